"""Time of operators from their work: each is bound by arithmetic or by memory, and costs something to launch.

The plain roofline has three constants: the baseline every estimate is compared with. Beyond it each kind of kernel may
have its own speed, because libraries do: a dense 3x3 convolution needs fewer operations than it counts (Winograd), a
grouped one reaches a fraction. All constants are fitted to profiles, none is from a data sheet: both know the same.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tenuto.profiles.estimator.trace import Operator, Trace

__all__ = ["KINDS", "KernelTimes", "fit_kernel_times", "fit_roofline"]

KINDS = ("conv1", "conv3", "conv", "depthwise", "matmul", "attention", "norm", "elementwise")
_STIFFNESS = 0.3  # how strongly a kind is held at the common speed: a factor of e weighs like an error of 30 %


@dataclass(frozen=True)
class KernelTimes:
    """t(operator) = max(FLOPs / (flops_per_ms * s), bytes / (bytes_per_ms * s)) + launch_ms; s is the kind's speed.

    A network is the sum of its operators. Without `speeds` it is the plain roofline.
    """

    flops_per_ms: float
    bytes_per_ms: float
    launch_ms: float
    speeds: Mapping[str, float] = field(default_factory=dict)

    def operator_ms(self, operator: Operator) -> float:
        """Return the time of one operator in ms."""
        bound = max(operator.flops / self.flops_per_ms, operator.moved_bytes / self.bytes_per_ms)
        return bound / self.speeds.get(operator.kind, 1.0) + self.launch_ms

    def time_ms(self, trace: Trace) -> float:
        """Return the time of one batch in ms."""
        return math.fsum(self.operator_ms(operator) for operator in trace.operators)


def fit_roofline(traces: Sequence[Trace], times_ms: Sequence[float], groups: Sequence[str]) -> KernelTimes:
    """Fit the three constants by least squares on the logarithm of the time; every model weighs the same.

    Args:
        traces: of the measured points.
        times_ms: their latencies.
        groups: their models.
    """
    problem = _Problem(traces, times_ms, groups)
    fastest = max(f.sum() / t for f, t in zip(problem.flops, times_ms, strict=True))
    starts = [np.log([fastest, fastest / ratio, 0.005]) for ratio in (2, 10, 50)]
    low, high = np.log([fastest / 100, fastest / 1e5, 1e-5]), np.log([fastest * 100, fastest * 100, 10.0])
    speed, bandwidth, launch = np.exp(problem.solve(starts, low, high))
    return KernelTimes(float(speed), float(bandwidth), float(launch))


def fit_kernel_times(
    roofline: KernelTimes, traces: Sequence[Trace], times_ms: Sequence[float], groups: Sequence[str]
) -> KernelTimes:
    """Fit a speed for each kind of kernel as well, starting from a fitted roofline; speeds stay within 1/10 and 10."""
    problem = _Problem(traces, times_ms, groups)
    start = np.concatenate([
        np.log([roofline.flops_per_ms, roofline.bytes_per_ms, roofline.launch_ms]), np.zeros(len(KINDS))
    ])  # fmt: skip
    reach = np.concatenate([np.full(3, 3.0), np.full(len(KINDS), math.log(10))])
    found = np.exp(problem.solve([start], start - reach, start + reach))
    speeds = dict(zip(KINDS, found[3:].tolist(), strict=True))
    return KernelTimes(float(found[0]), float(found[1]), float(found[2]), speeds)


class _Problem:
    """The least-squares problem behind both fits."""

    def __init__(self, traces: Sequence[Trace], times_ms: Sequence[float], groups: Sequence[str]) -> None:
        self.flops = [np.array([o.flops for o in trace.operators]) for trace in traces]
        self._moved = [np.array([o.moved_bytes for o in trace.operators]) for trace in traces]
        self._kinds = [np.array([KINDS.index(o.kind) for o in trace.operators]) for trace in traces]
        self._logs = np.log(np.asarray(times_ms, dtype=float))
        self._weights = np.array([1.0 / math.sqrt(list(groups).count(group)) for group in groups])

    def solve(self, starts: Sequence[Any], low: Any, high: Any) -> NDArray[np.float64]:
        from scipy.optimize import least_squares

        fits = [least_squares(self._residuals, start, bounds=(low, high)) for start in starts]
        return np.asarray(min(fits, key=lambda fit: float(fit.cost)).x)

    def _residuals(self, logs: NDArray[np.float64]) -> NDArray[np.float64]:
        speed, bandwidth, launch = np.exp(logs[:3])
        kinds = np.exp(logs[3:])
        made = np.empty(len(self._logs))
        for index, (flops, moved) in enumerate(zip(self.flops, self._moved, strict=True)):
            bound = np.maximum(flops / speed, moved / bandwidth)
            if len(kinds):
                bound = bound / kinds[self._kinds[index]]
            made[index] = bound.sum() + launch * len(flops)
        errors = (np.log(made) - self._logs) * self._weights
        return np.concatenate([errors, _STIFFNESS * logs[3:]])
