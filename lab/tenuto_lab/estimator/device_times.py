"""The time of a network on a GPU: its kernels, the host that launches them, and the copy of its inputs.

The plain roofline does not know four properties of GPUs. The host runs ahead of the device: a network of short kernels
takes as long as their launches, a network of long kernels takes as long as the kernels, and in between both count.
Inputs are copied first. A small kernel fills only a part of the device. Arithmetic has a speed for each kind of kernel
(Winograd, grouped convolutions); memory has one speed for all. All constants are fitted to profiles, none is from a
data sheet.

The fit is robust. Some library may run a network ten times slower than its work explains (XLNet's einsums on a V100).
Such a network says nothing about the others, and must not bend the constants that they share.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tenuto_lab.estimator.roofline import KINDS, MeasuredNetworks
from tenuto_lab.estimator.trace import Operator, Trace

Floats = NDArray[np.float64]

_OVERLAP = 4.0  # exponent of the sum of kernels and launches: 1 would add them, infinity takes the larger
_OUTLIER = 0.15  # errors of the logarithm beyond this count ever less
_START_COPY, _START_RAMP, _START_KERNEL = 8e6, 3e4, 0.003  # bytes per ms, elements, ms: where the search begins
_STIFFNESS = (0.03, 0.03, 0.03, 0.03, 0.09, 0.09)  # pull towards that start, like _KIND_STIFFNESS for kinds' speeds
_KIND_STIFFNESS = 0.09


@dataclass(frozen=True)
class DeviceTimes:
    """t = (kernels^p + launches^p)^(1/p) + input_bytes / copy_bytes_per_ms, p being `overlap`.

    kernels: sum of max(FLOPs / (flops_per_ms * s) * (1 + ramp_elements / elements), bytes / bytes_per_ms) + kernel_ms,
    with s the speed of the kind and elements those the operator writes; launches: launch_ms per operator.
    """

    flops_per_ms: float
    bytes_per_ms: float
    launch_ms: float
    copy_bytes_per_ms: float
    ramp_elements: float
    kernel_ms: float
    overlap: float
    speeds: Mapping[str, float]

    def operator_ms(self, operator: Operator) -> float:
        """Return the time of one operator alone in ms, without the copy of inputs."""
        ramp = 1.0 + self.ramp_elements / max(operator.written_bytes / 4.0, 1.0)
        arithmetic = operator.flops / (self.flops_per_ms * self.speeds.get(operator.kind, 1.0)) * ramp
        return max(arithmetic, operator.moved_bytes / self.bytes_per_ms) + self.kernel_ms

    def time_ms(self, trace: Trace) -> float:
        """Return the time of one batch in ms."""
        kernels = math.fsum(self.operator_ms(operator) for operator in trace.operators)
        launches = self.launch_ms * len(trace.operators)
        together: float = (kernels**self.overlap + launches**self.overlap) ** (1.0 / self.overlap)
        return together + trace.input_bytes / self.copy_bytes_per_ms


def fit_device_times(traces: Sequence[Trace], times_ms: Sequence[float], groups: Sequence[str]) -> DeviceTimes:
    """Fit to networks measured on a GPU. Every model has the same weight.

    Args:
        traces: of the measured points.
        times_ms: their latencies.
        groups: their models.
    """
    return _Problem(traces, times_ms, groups).solve()


class _Problem:
    def __init__(self, traces: Sequence[Trace], times_ms: Sequence[float], groups: Sequence[str]) -> None:
        self._measured = measured = MeasuredNetworks(traces, times_ms, groups)
        self._elements = np.array([max(o.written_bytes / 4.0, 1.0) for trace in traces for o in trace.operators])
        self._inputs = np.array([trace.input_bytes for trace in traces])
        shortest = np.min(measured.times_ms / measured.counts)
        first = [measured.fastest, measured.fastest / 20.0, shortest / 2.0, _START_COPY, _START_RAMP, _START_KERNEL]
        self._start = np.concatenate([np.log(first), np.zeros(len(KINDS))])
        self._stiffness = np.concatenate([_STIFFNESS, np.full(len(KINDS), _KIND_STIFFNESS)])

    def solve(self) -> DeviceTimes:
        from scipy.optimize import least_squares

        found = least_squares(self._residuals, self._start, max_nfev=200)
        values = np.exp(found.x).tolist()
        speeds = dict(zip(KINDS, values[6:], strict=True))
        return DeviceTimes(
            flops_per_ms=values[0],
            bytes_per_ms=values[1],
            launch_ms=values[2],
            copy_bytes_per_ms=values[3],
            ramp_elements=values[4],
            kernel_ms=values[5],
            overlap=_OVERLAP,
            speeds=speeds,
        )

    def _residuals(self, logs: Floats) -> Floats:
        errors = self._predicted(logs) - self._measured.logs
        robust = np.sign(errors) * _OUTLIER * np.sqrt(np.log1p((errors / _OUTLIER) ** 2))
        return np.concatenate([robust * self._measured.weights, self._stiffness * (logs - self._start)])

    def _predicted(self, logs: Floats) -> Floats:
        measured = self._measured
        speed, bandwidth, launch, copy, ramp, least = np.exp(logs[:6])
        kinds = np.exp(logs[6:])
        arithmetic = measured.flops / (speed * kinds[measured.kinds]) * (1.0 + ramp / self._elements)
        kernels = measured.totals(np.maximum(arithmetic, measured.moved / bandwidth) + least)
        together = (kernels**_OVERLAP + (launch * measured.counts) ** _OVERLAP) ** (1.0 / _OVERLAP)
        return np.asarray(np.log(together + self._inputs / copy))
