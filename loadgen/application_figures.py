"""How the requests of applications ended, end to end, from the records of their stages' requests.

When all answers of all stages came within the application's SLO, its request is `ok`. When all came but not in time, it
is `late`. Otherwise the first of its stages' requests that got no answer decides: expired, rejected or failed. When a
stage is missing because the client was lost or stopped, it is failed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tenuto.batching.virtual.result import P99_SAMPLES
from tenuto.loadgen.records import Records
from tenuto.outcome import OUTCOMES, Outcome
from tenuto.placement.application import Application

_SLACK_MS = 1e-6  # unit: rounding of float sums, as in the simulator


@dataclass(frozen=True)
class Calls:
    """The requests of one application in order of arrival. `latency_ms` is NaN unless all its stages were answered."""

    number: NDArray[np.int64]
    at_ms: NDArray[np.float64]
    latency_ms: NDArray[np.float64]
    outcome: NDArray[np.int8]

    def __len__(self) -> int:
        """Return the number of requests of the application."""
        return int(self.number.size)

    def within(self, begin_ms: float, end_ms: float) -> Calls:
        """Return the requests that arrived in a window."""
        rows = (self.at_ms >= begin_ms) & (self.at_ms < end_ms)
        return Calls(self.number[rows], self.at_ms[rows], self.latency_ms[rows], self.outcome[rows])


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


def stage_owners(applications: Iterable[Application]) -> dict[str, str]:
    """Return the application of every model that is a stage of one."""
    return {app.model_name(stage): app.name for app in applications for stage in app.stages}


def calls_of(
    records: Records, names: Sequence[str], stages: Collection[str], stage_requests: int, slo_ms: float
) -> Calls:
    """Return how every request of an application ended.

    Args:
        records: all records of the run; those of other applications and models are ignored.
        names: names of the models, by index.
        stages: the models that are stages of the application.
        stage_requests: how many requests to these models make one request of the application.
        slo_ms: time allowed end to end.
    """
    is_mine = np.array([name in stages for name in names] + [False])
    mine = records.where((records.call >= 0) & is_mine[records.model])
    number, place = np.unique(mine.call, return_inverse=True)
    at_ms = np.zeros(len(number))
    at_ms[place] = mine.call_at_ms
    answered = mine.status == 200
    ended_ms = np.full(len(number), -np.inf)
    np.maximum.at(ended_ms, place, np.where(answered, mine.answered_ms, np.inf))
    complete = np.isfinite(ended_ms) & (np.bincount(place, minlength=len(number)) == stage_requests)
    latency = np.where(complete, ended_ms - at_ms, np.nan)
    outcome = np.full(len(number), Outcome.FAILED, np.int8)
    outcome[complete] = np.where(latency[complete] <= slo_ms + _SLACK_MS, Outcome.OK, Outcome.LATE)
    # The first request without an answer decides. They are sorted backwards, so that the first is written last.
    lost = np.flatnonzero(~answered)
    when = np.where(np.isnan(mine.answered_ms[lost]), np.inf, mine.answered_ms[lost])
    lost = lost[np.argsort(-when, kind="stable")]
    outcome[place[lost]] = mine.outcome[lost]
    order = np.argsort(at_ms, kind="stable")
    return Calls(number[order], at_ms[order], latency[order], outcome[order])


def calls_by_name(document: Mapping[str, Any], records: Records) -> dict[str, Calls]:
    """Return how the requests of every application of a run ended, from its result document and all its records."""
    models = document["models"]
    calls = {}
    for name, row in (document.get("applications") or {}).items():
        stages = {model for model, figures in models.items() if figures.get("stage_of") == name}
        calls[name] = calls_of(records, list(models), stages, row["stage_requests"], row["slo_ms"])
    return calls


def application_figures(
    records: Records, names: Sequence[str], applications: Iterable[Application], *, warmup_ms: float, duration_ms: float
) -> dict[str, dict[str, Any]]:
    """Return offered, every outcome, attainment, goodput and latency percentiles per application.

    Args:
        records: every request of the run.
        names: names of the models, by index.
        applications: the applications, with the SLOs to judge them by.
        warmup_ms: requests of applications that arrive before this are left out.
        duration_ms: end of the measured window.
    """
    length_s = max(1e-9, (duration_ms - warmup_ms) / 1000.0)
    figures: dict[str, dict[str, Any]] = {}
    for application in applications:
        stages = {application.model_name(stage) for stage in application.stages}
        stage_requests = sum(stage.count for stage in application.stages)
        calls = calls_of(records, names, stages, stage_requests, application.slo_ms).within(warmup_ms, duration_ms)
        counts = counted(calls.outcome)
        figures[application.name] = {
            **outcome_figures(counts),
            "goodput_rps": counts[Outcome.OK] / length_s,
            "slo_ms": application.slo_ms,
            "stage_requests": stage_requests,
            **latency_figures(calls.latency_ms),
        }
    return figures


def label_stages(models: Mapping[str, dict[str, Any]], applications: Iterable[Application]) -> None:
    """Write into the figures of models which application each is a stage of."""
    for name, owner in stage_owners(applications).items():
        if name in models:
            models[name]["stage_of"] = owner
