"""What happened between two statuses of a server: rates, attainment, percentiles, utilisation.

Counts in a status only grow, so that every figure here is a difference of two of them; one definition for the live
page, for `tenuto top` and for tests. A server that was started anew in between counts from zero.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from typing import Any

from tenuto.outcome import OUTCOMES


@dataclass(frozen=True)
class ModelFigures:
    """One model over a window. Rates are per second; times are ms and None where nothing was executed.

    `attainment` is that of the requests that ended. `p50_ms` and `p99_ms` are interpolated inside histogram buckets, so
    that they are as exact as the buckets are narrow: to a few percent around the SLO. `unknown_proxy_share` is the
    share of requests of which no proxy said when they began.
    """

    offered_rps: float
    goodput_rps: float
    attainment: float | None
    p50_ms: float | None
    p99_ms: float | None
    mean_batch: float | None
    unknown_proxy_share: float | None


@dataclass(frozen=True)
class GpuletFigures:
    """One gpu-let over a window. `measured_to_predicted`: what batches took, over what the plan says they take."""

    utilisation: float
    batches_rps: float
    measured_to_predicted: float | None


@dataclass(frozen=True)
class Window:
    """Figures of everything between two statuses, `seconds` apart."""

    seconds: float
    models: dict[str, ModelFigures]
    gpulets: dict[str, GpuletFigures]

    def to_data(self) -> dict[str, Any]:
        """Return plain data."""
        return asdict(self)


def between(before: Mapping[str, Any] | None, after: Mapping[str, Any], seconds: float) -> Window:
    """Return what happened between two statuses of one server.

    Args:
        before: the earlier one; None: the server's start.
        after: the later one.
        seconds: from one to the other; positive.
    """
    earlier_models = before["models"] if before else {}
    earlier_gpulets = {gpulet["id"]: gpulet for gpulet in before["gpulets"]} if before else {}
    return Window(
        seconds,
        {name: _model(earlier_models.get(name, {}), model, seconds) for name, model in after["models"].items()},
        {g["id"]: _gpulet(earlier_gpulets.get(g["id"], {}), g, seconds) for g in after["gpulets"]},
    )


def quantile_s(histogram: Mapping[str, Any], quantile: float) -> float | None:
    """Return a quantile of a histogram, in the unit of its bounds; None where it is empty.

    Linear inside a bucket, as Prometheus' `histogram_quantile`; what lies above the last bound counts as that bound.
    """
    counts, bounds = histogram["counts"], histogram["le"]
    upto = list(accumulate(counts))
    if not upto or not upto[-1]:
        return None
    rank = quantile * upto[-1]
    for index, bound in enumerate(bounds):
        if upto[index] >= rank and counts[index]:
            low = bounds[index - 1] if index else 0.0
            part = (rank - (upto[index] - counts[index])) / counts[index]
            return float(min(bound, low + (bound - low) * part))  # rounding must not lead into the next bucket
    return float(bounds[-1]) if bounds else None


def _model(before: Mapping[str, Any], after: Mapping[str, Any], seconds: float) -> ModelFigures:
    grown = {key: _grown(before, after, key) for key in (*OUTCOMES, "submitted", "batches", "batched")}
    ended = sum(grown[outcome] for outcome in OUTCOMES)
    latency = _histogram(before, after, "latency_s")
    p50_s, p99_s = (quantile_s(latency, quantile) for quantile in (0.5, 0.99))
    proxied = sum(_histogram(before, after, "proxy_s")["counts"])
    return ModelFigures(
        offered_rps=grown["submitted"] / seconds,
        goodput_rps=grown["ok"] / seconds,
        attainment=grown["ok"] / ended if ended else None,
        p50_ms=None if p50_s is None else p50_s * 1000.0,
        p99_ms=None if p99_s is None else p99_s * 1000.0,
        mean_batch=grown["batched"] / grown["batches"] if grown["batches"] else None,
        unknown_proxy_share=max(0.0, 1.0 - proxied / grown["submitted"]) if grown["submitted"] else None,
    )


def _gpulet(before: Mapping[str, Any], after: Mapping[str, Any], seconds: float) -> GpuletFigures:
    busy_s, predicted_s = _grown(before, after, "busy_s"), _grown(before, after, "predicted_s")
    return GpuletFigures(
        utilisation=min(1.0, busy_s / seconds),
        batches_rps=_grown(before, after, "batches") / seconds,
        measured_to_predicted=busy_s / predicted_s if predicted_s > 0.0 else None,
    )


def _grown(before: Mapping[str, Any], after: Mapping[str, Any], key: str) -> float:
    now, then = float(after.get(key) or 0.0), float(before.get(key) or 0.0)
    return now - then if now >= then else now


def _histogram(before: Mapping[str, Any], after: Mapping[str, Any], key: str) -> dict[str, Sequence[float]]:
    """Return what a histogram grew by; all of it where its buckets are others, or it counts from zero again."""
    now, then = after.get(key), before.get(key)
    if not now:
        return {"le": (), "counts": ()}
    if not then or then["le"] != now["le"] or sum(then["counts"]) > sum(now["counts"]):
        return {"le": now["le"], "counts": now["counts"]}
    return {"le": now["le"], "counts": [b - a for a, b in zip(then["counts"], now["counts"], strict=True)]}
