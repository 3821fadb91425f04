"""Figures of requests that ended: how many by outcome, percentiles of latencies, and the stages of applications."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tenuto.batching.virtual.result import P99_SAMPLES
from tenuto.loadgen.records import Records
from tenuto.outcome import OUTCOMES, Outcome
from tenuto.placement.application import Application


def outcome_figures(counts: Sequence[int]) -> dict[str, Any]:
    """Return how many requests were offered, how many ended in every outcome, and the attainment.

    Args:
        counts: requests by outcome.
    """
    offered = sum(counts)
    attainment = counts[Outcome.OK] / offered if offered else None
    return {"offered": offered, **dict(zip(OUTCOMES, counts, strict=True)), "attainment": attainment}


def counted(outcome: NDArray[np.int8]) -> list[int]:
    """Return the number of requests in every outcome."""
    counts: list[int] = np.bincount(outcome, minlength=len(OUTCOMES)).tolist()
    return counts


def percentile(values: NDArray[np.float64], percent: float, at_least: int = 1) -> float | None:
    """Return a percentile of the values that are not NaN; None when there are too few."""
    known = values[~np.isnan(values)]
    return float(np.percentile(known, percent)) if known.size >= at_least else None


def latency_figures(latency_ms: NDArray[np.float64]) -> dict[str, float | None]:
    """Return the percentiles of answers that every table has."""
    figures = {f"p{percent}_ms": percentile(latency_ms, percent) for percent in (50, 90)}
    return {**figures, "p99_ms": percentile(latency_ms, 99, P99_SAMPLES)}


def application_figures(records: Records, application: Application, length_s: float) -> dict[str, Any]:
    """Return offered, every outcome, attainment, goodput and latency percentiles of an application, and of each of its
    stages how long it took in requests that were answered.

    Args:
        records: the requests of the application.
        application: the application, with the SLO to judge it by.
        length_s: length of the measured window.
    """
    counts = counted(records.outcome)
    answered = records.where(records.status == Outcome.OK.http_status)
    return {
        **outcome_figures(counts),
        "goodput_rps": counts[Outcome.OK] / length_s,
        "slo_ms": application.slo_ms,
        **latency_figures(answered.latency_ms),
        "stages": {
            stage.label: {"model": application.model_name(stage), **latency_figures(took_ms)}
            for stage, took_ms in zip(application.stages, answered.stage_ms.T, strict=False)
        },
    }
