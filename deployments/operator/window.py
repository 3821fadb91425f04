"""Figures between two statuses of a server: rates, attainment, percentiles, utilisation.

Counts in a status only grow, so every figure here is the difference of two counts. The live page, `tenuto status
--watch` and tests share these definitions. When a server was restarted in between, its later counts are taken as they
are.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate
from typing import TypeVar

from tenuto.deployments.wire.status import (
    ApplicationStatus,
    Buckets,
    GpuletStatus,
    ModelStatus,
    OfflineCounts,
    SizeCounts,
    SystemStatus,
)
from tenuto.outcome import OUTCOMES

Count = TypeVar("Count", int, float)


@dataclass(frozen=True)
class SizeFigures:
    """One size class of a model over a window; `sizes` as in `SizeCounts`. `padding` is the part of the computed
    elements that batches were padded with; None if nothing was sent."""

    sizes: dict[str, int] | None
    goodput_rps: float
    ended_rps: float
    attainment: float | None
    padding: float | None


@dataclass(frozen=True)
class ModelFigures:
    """One model over a window. Rates are per second; times are ms, and None if nothing was executed.

    `ended_rps` counts requests that ended with any outcome; `attainment` is the part of them that was ok. `p50_ms` and
    `p99_ms` are interpolated inside histogram buckets, so they are as exact as the buckets are narrow: to a few percent
    around the SLO. `unknown_proxy_share` is the share of requests for which no proxy said when they began. Of a model
    that generates, `mean_ttft_ms`, `mean_tpot_ms` and `tokens_rps` are those of generations that ended. `by_size`: of
    one whose requests vary in size, and `padding` of all its classes.
    """

    offered_rps: float
    goodput_rps: float
    ended_rps: float
    attainment: float | None
    p50_ms: float | None
    p99_ms: float | None
    mean_batch: float | None
    unknown_proxy_share: float | None
    mean_ttft_ms: float | None = None
    mean_tpot_ms: float | None = None
    tokens_rps: float | None = None
    padding: float | None = None
    by_size: tuple[SizeFigures, ...] = ()


@dataclass(frozen=True)
class StageFigures:
    """One stage of an application over a window, of requests that were answered: its times from when it was due to its
    last answer, and the part of the applications' latency that it took. Stages beside each other take the same time
    twice. `lost_rps`: requests of the application that ended without an answer at this stage."""

    p50_ms: float | None
    p99_ms: float | None
    part: float | None
    lost_rps: float


@dataclass(frozen=True)
class ApplicationFigures:
    """One application over a window: its requests as of a model, and its stages by label."""

    requests: ModelFigures
    stages: dict[str, StageFigures]


@dataclass(frozen=True)
class GpuletFigures:
    """One gpu-let over a window. `measured_to_predicted`: measured over planned time of its batches."""

    utilisation: float
    batches_rps: float
    measured_to_predicted: float | None


@dataclass(frozen=True)
class OfflineFigures:
    """All offline requests over a window: how many were answered, the part of the gpu-lets' time that they had, and how
    many wait at its end."""

    answered_rps: float
    part: float
    waiting: int


@dataclass(frozen=True)
class WindowFigures:
    """Figures of everything between two statuses, `seconds` apart. `attainment` is that of all requests that
    ended, copies for shadows not among them. `offline` is None while nobody has asked for anything offline."""

    seconds: float
    attainment: float | None
    models: dict[str, ModelFigures]
    gpulets: dict[str, GpuletFigures]
    applications: dict[str, ApplicationFigures] = field(default_factory=dict)
    offline: OfflineFigures | None = None


def between(before: SystemStatus, after: SystemStatus, seconds: float) -> WindowFigures:
    """Return the figures between two statuses of one server.

    Args:
        before: the earlier status.
        after: the later status.
        seconds: the time between the two; positive.
    """
    gpulets = {gpulet.id: gpulet for gpulet in before.gpulets}
    models = {n: _model(before.models.get(n, ModelStatus()), model, seconds) for n, model in after.models.items()}
    visible = [figures for name, figures in models.items() if not after.models[name].shadow]
    ended_rps = sum(figures.ended_rps for figures in visible)
    return WindowFigures(
        seconds,
        sum(figures.goodput_rps for figures in visible) / ended_rps if ended_rps else None,
        models,
        {g.id: _gpulet(gpulets.get(g.id, GpuletStatus(id=g.id)), g, seconds) for g in after.gpulets},
        {
            name: _application(before.applications.get(name, ApplicationStatus()), counts, seconds)
            for name, counts in after.applications.items()
        },
        _offline(before, after, seconds),
    )


def _offline(before: SystemStatus, after: SystemStatus, seconds: float) -> OfflineFigures | None:
    counts = {name: model.offline for name, model in after.models.items() if model.offline is not None}
    then = {name: before.models.get(name, ModelStatus()).offline or OfflineCounts() for name in counts}
    answered = sum(_grown(then[n].ok + then[n].late, row.ok + row.late) for n, row in counts.items())
    gpu_s = sum(_grown(then[n].gpu_s, row.gpu_s) for n, row in counts.items())
    part = min(1.0, gpu_s / (seconds * max(1, len(after.gpulets))))
    waiting = sum(row.queued for row in counts.values())
    return OfflineFigures(answered / seconds, part, waiting) if counts else None


def quantile_s(histogram: Buckets, quantile: float) -> float | None:
    """Return a quantile of a histogram, in the unit of its bounds; None if it is empty.

    It is linear inside a bucket, as Prometheus' `histogram_quantile`. Values above the last bound count as that bound.
    """
    counts, bounds = histogram.counts, histogram.le
    upto = list(accumulate(counts))
    if not upto or not upto[-1]:
        return None
    rank = quantile * upto[-1]
    for index, bound in enumerate(bounds):
        if upto[index] >= rank and counts[index]:
            low = bounds[index - 1] if index else 0.0
            part = (rank - (upto[index] - counts[index])) / counts[index]
            return min(bound, low + (bound - low) * part)  # rounding must not lead into the next bucket
    return bounds[-1] if bounds else None


def _model(before: ModelStatus, after: ModelStatus, seconds: float) -> ModelFigures:
    submitted, ok = _grown(before.submitted, after.submitted), _grown(before.ok, after.ok)
    pairs = zip(before.by_outcome.values(), after.by_outcome.values(), strict=True)
    ended = sum(_grown(then, now) for then, now in pairs)
    batches = _grown(before.batches, after.batches)
    latency = _grown_buckets(before.latency_s, after.latency_s)
    p50_s, p99_s = (quantile_s(latency, quantile) for quantile in (0.5, 0.99))  # format: the percentiles of the page
    ttft, tpot = _grown_buckets(before.ttft_s, after.ttft_s), _grown_buckets(before.tpot_s, after.tpot_s)
    tokens = _grown(before.written_tokens, after.written_tokens) / seconds
    sizes = {str(row): row for row in before.by_size}
    by_size = [_grown_size(sizes.get(str(row), SizeCounts()), row) for row in after.by_size]
    computed = sum(row.computed_elements for row in by_size)
    proxied = sum(_grown_buckets(before.proxy_s or Buckets(), after.proxy_s or Buckets()).counts)
    return ModelFigures(
        offered_rps=submitted / seconds,
        goodput_rps=ok / seconds,
        ended_rps=ended / seconds,
        attainment=ok / ended if ended else None,
        p50_ms=None if p50_s is None else p50_s * 1000.0,
        p99_ms=None if p99_s is None else p99_s * 1000.0,
        mean_batch=_grown(before.batched, after.batched) / batches if batches else None,
        unknown_proxy_share=max(0.0, 1.0 - proxied / submitted) if submitted else None,
        mean_ttft_ms=mean_ms(ttft),
        mean_tpot_ms=mean_ms(tpot),
        tokens_rps=tokens if after.written_tokens else None,
        padding=1.0 - sum(row.input_elements for row in by_size) / computed if computed else None,
        by_size=tuple(
            SizeFigures(
                row.sizes, row.ok / seconds, row.ended / seconds, row.ok / row.ended if row.ended else None, row.padding
            )
            for row in by_size
        ),
    )


def _application(before: ApplicationStatus, after: ApplicationStatus, seconds: float) -> ApplicationFigures:
    whole_s = _grown_buckets(before.latency_s, after.latency_s).sum
    stages = {}
    for label, buckets in after.stage_s.items():
        took = _grown_buckets(before.stage_s.get(label, Buckets()), buckets)
        p50_s, p99_s = (quantile_s(took, quantile) for quantile in (0.5, 0.99))  # format: the percentiles of the page
        stages[label] = StageFigures(
            None if p50_s is None else p50_s * 1000.0,
            None if p99_s is None else p99_s * 1000.0,
            took.sum / whole_s if whole_s > 0.0 else None,
            _grown(before.lost_at.get(label, 0), after.lost_at.get(label, 0)) / seconds,
        )
    return ApplicationFigures(_model(before.as_model(), after.as_model(), seconds), stages)


def _grown_size(then: SizeCounts, now: SizeCounts) -> SizeCounts:
    counts = (*OUTCOMES, "input_elements", "computed_elements")
    return SizeCounts(sizes=now.sizes, **{name: _grown(getattr(then, name), getattr(now, name)) for name in counts})


def _gpulet(before: GpuletStatus, after: GpuletStatus, seconds: float) -> GpuletFigures:
    busy_s, predicted_s = _grown(before.busy_s, after.busy_s), _grown(before.predicted_s, after.predicted_s)
    return GpuletFigures(
        utilisation=min(1.0, busy_s / seconds),
        batches_rps=_grown(before.batches, after.batches) / seconds,
        measured_to_predicted=busy_s / predicted_s if predicted_s > 0.0 else None,
    )


def _grown(then: Count, now: Count) -> Count:
    return now - then if now >= then else now


def _grown_buckets(then: Buckets, now: Buckets) -> Buckets:
    """Return by how much a histogram grew. When its buckets changed or it was reset, return all of it."""
    if then.le != now.le or sum(then.counts) > sum(now.counts):
        return now
    return Buckets(now.le, [b - a for a, b in zip(then.counts, now.counts, strict=True)], now.sum - then.sum)


def mean_ms(histogram: Buckets) -> float | None:
    """Return the mean of a histogram of seconds, in ms; None if it is empty."""
    count = sum(histogram.counts)
    return 1000.0 * histogram.sum / count if count else None
