"""Time of operators from their work: each is bound by arithmetic or by memory, and costs something to launch.

The plain roofline has three constants, and is the baseline of every estimate. In a second form each kind of kernel has
its own speed, because libraries differ by kind: a dense 3x3 convolution needs fewer operations than are counted
(Winograd), and a grouped one reaches a fraction of the speed. All constants of both forms are fitted to the same
profiles; none is from a data sheet.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tenuto_lab.estimator.trace import Operator, Trace

Floats = NDArray[np.float64]

KINDS = ("conv1", "conv3", "conv", "depthwise", "matmul", "attention", "norm", "elementwise")
_STIFFNESS = 0.3  # pull of a kind towards the common speed: a factor of e costs as much as an error of 30 %


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


class MeasuredNetworks:
    """The operators of all measured networks in one row, the logarithms of the times that a fit explains, and the
    weight of each measured point. Every model has the same weight."""

    def __init__(self, traces: Sequence[Trace], times_ms: Sequence[float], groups: Sequence[str]) -> None:
        operators = [operator for trace in traces for operator in trace.operators]
        self.counts = np.array([len(trace.operators) for trace in traces], dtype=float)
        self._begins = np.concatenate([[0], np.cumsum(self.counts)[:-1]]).astype(int)
        self.flops = np.array([o.flops for o in operators])
        self.moved = np.array([o.moved_bytes for o in operators])
        self.kinds = np.array([KINDS.index(o.kind) for o in operators])
        self.times_ms = np.asarray(times_ms, dtype=float)
        self.logs = np.log(self.times_ms)
        self.weights = np.array([1.0 / math.sqrt(list(groups).count(group)) for group in groups])
        self.fastest = float(np.max(self.totals(self.flops) / self.times_ms))

    def totals(self, of_operators: Floats) -> Floats:
        """Return the sum over the operators of each network."""
        return np.asarray(np.add.reduceat(of_operators, self._begins))


def fit_roofline(traces: Sequence[Trace], times_ms: Sequence[float], groups: Sequence[str]) -> KernelTimes:
    """Fit the three constants by least squares on the logarithm of the time. Every model has the same weight.

    Args:
        traces: of the measured points.
        times_ms: their latencies.
        groups: their models.
    """
    measured = MeasuredNetworks(traces, times_ms, groups)
    starts = [np.log([measured.fastest, measured.fastest / ratio, 0.005]) for ratio in (2, 10, 50)]
    low, high = (
        np.log([measured.fastest * by, measured.fastest * least, launch_ms])
        for by, least, launch_ms in ((1e-2, 1e-5, 1e-5), (1e2, 1e2, 10.0))
    )
    speed, bandwidth, launch = np.exp(_solve(measured, starts, low, high))
    return KernelTimes(float(speed), float(bandwidth), float(launch))


def fit_kernel_times(
    roofline: KernelTimes, traces: Sequence[Trace], times_ms: Sequence[float], groups: Sequence[str]
) -> KernelTimes:
    """Fit a speed for each kind of kernel as well, from a fitted roofline on; speeds stay within 1/10 and 10."""
    start = np.concatenate(
        [np.log([roofline.flops_per_ms, roofline.bytes_per_ms, roofline.launch_ms]), np.zeros(len(KINDS))]
    )
    reach = np.concatenate([np.full(3, 3.0), np.full(len(KINDS), math.log(10))])
    found = np.exp(_solve(MeasuredNetworks(traces, times_ms, groups), [start], start - reach, start + reach))
    speeds = dict(zip(KINDS, found[3:].tolist(), strict=True))
    return KernelTimes(float(found[0]), float(found[1]), float(found[2]), speeds)


def _solve(measured: MeasuredNetworks, starts: Sequence[Floats], low: Floats, high: Floats) -> Floats:
    from scipy.optimize import least_squares

    def residuals(logs: Floats) -> Floats:
        speed, bandwidth, launch = np.exp(logs[:3])
        kinds = np.exp(logs[3:])
        bound = np.maximum(measured.flops / speed, measured.moved / bandwidth)
        if len(kinds):
            bound = bound / kinds[measured.kinds]
        errors = np.log(measured.totals(bound) + launch * measured.counts) - measured.logs
        return np.concatenate([errors * measured.weights, _STIFFNESS * logs[3:]])

    fits = [least_squares(residuals, start, bounds=(low, high)) for start in starts]
    return np.asarray(min(fits, key=lambda fit: float(fit.cost)).x)
