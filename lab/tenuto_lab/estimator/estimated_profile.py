"""Estimates as a profile. Plans read it like a measured one, and then say that they rest on estimates."""

from __future__ import annotations

from collections.abc import Iterable

from tenuto.profiles import ModelProfile, Profile, ProfilePoint
from tenuto_lab.estimator.estimator import CREQ_METRIC, Estimate


def estimated_profile(
    row: str, gpu_type: str, estimates: Iterable[Estimate], source: str, error_pct: float | None
) -> Profile:
    """Return the estimates for batches of a model as the profile of a GPU type.

    Args:
        row: the model's name.
        gpu_type: where it would run, on the whole GPU.
        estimates: by batch size.
        source: the method of the estimates, and the data that it learnt from.
        error_pct: mean error of the time of models left out; None: not known.
    """
    points = tuple(
        ProfilePoint(
            batch_size=each.batch_size,
            latency_ms=round(each.latency_ms, 4),
            memory_mib=None if each.memory_mib is None else round(each.memory_mib, 1),
            metrics={} if each.creq_pct is None else {CREQ_METRIC: round(each.creq_pct, 2)},
        )
        for each in estimates
    )
    metrics = sorted({name for point in points for name in point.metrics})
    wrong = "" if error_pct is None else f": time of models left out was wrong by {error_pct:.0f} % on average"
    model = ModelProfile(
        points=points, doubts=(f"estimated, not measured{wrong}",), estimated=("latency_ms", "memory_mib", *metrics)
    )
    return Profile(name=f"estimate-{row}", gpu_type=gpu_type, source=source, models={row: model})
