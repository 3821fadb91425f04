"""The features of a traced network: work, sizes, kinds of operators, and kernels that start together."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from tenuto_lab.estimator.device_times import DeviceTimes
from tenuto_lab.estimator.roofline import KINDS, KernelTimes
from tenuto_lab.estimator.trace import Operator, Trace

TAU_MS = 0.001  # kernels that start within this time of each other run together (USHER, section 4.1)

FEATURE_NAMES = (
    "log_batch",
    "log_flops",
    "log_moved_bytes",
    "log_weight_bytes",
    "log_operators",
    "log_input_bytes",
    "log_kernels_ms",
    "log_peak_bytes",
    "log_intensity",
    "log_peak_threads",
    "log_mean_threads",
    "compute_bound_share",
    "launch_share",
    *(f"time_share_{kind}" for kind in KINDS),
)


class OperatorTimes(Protocol):
    """Gives the time of an operator: fitted to whole networks, or learnt from timed operators."""

    def operator_ms(self, operator: Operator) -> float:
        """Return the time of one operator in ms."""


def concurrent_sets(trace: Trace, kernels: OperatorTimes, tau_ms: float = TAU_MS) -> list[list[Operator]]:
    """Return the sets of operators that start together when each starts as soon as its inputs are there.

    Two operators belong together when their starts are at most `tau_ms` apart (from the first of the set).
    """
    times_ms = [kernels.operator_ms(operator) for operator in trace.operators]
    found = starting_together(trace, [1] * len(times_ms), times_ms, tau_ms)
    return [[trace.operators[index] for index in together] for together in found]


def starting_together(
    trace: Trace, counts: Sequence[int], times_ms: Sequence[float], tau_ms: float = TAU_MS
) -> list[list[int]]:
    """Return the sets of kernels that start within `tau_ms`, each as soon as its operator's inputs are there.

    Args:
        trace: the operators with what they read.
        counts: kernels of each operator, which follow each other.
        times_ms: of all kernels, operator by operator.
    """
    ends: list[float] = []
    starts: list[tuple[float, int]] = []
    number = 0
    for operator, count in zip(trace.operators, counts, strict=True):
        at = max((ends[source] for source in operator.inputs), default=0.0)
        for _ in range(count):
            starts.append((at, number))
            at += times_ms[number]
            number += 1
        ends.append(at)
    sets: list[list[int]] = []
    first = -math.inf
    for start, index in sorted(starts):
        if start - first > tau_ms:
            sets.append([])
            first = start
        sets[-1].append(index)
    return sets


def peak_threads(sets: Sequence[Sequence[Operator]]) -> float:
    """Return the largest number of results (4 bytes each) that a set of concurrent operators computes in parallel.

    Operators on constants start with the network. Only operators that do arithmetic count, so these do not.
    """
    return max((sum(o.written_bytes / 4 for o in group if o.flops > 0) for group in sets), default=0.0)


def features(trace: Trace, kernels: DeviceTimes | KernelTimes) -> NDArray[np.float64]:
    """Return the feature vector of a network at its batch size, in the order of `FEATURE_NAMES`."""
    times = [kernels.operator_ms(operator) for operator in trace.operators]
    total = math.fsum(times)
    flops = math.fsum(o.flops for o in trace.operators)
    moved = math.fsum(o.moved_bytes for o in trace.operators)
    compute = math.fsum(
        t
        for o, t in zip(trace.operators, times, strict=True)
        if o.flops / kernels.flops_per_ms > o.moved_bytes / kernels.bytes_per_ms
    )
    mean_threads = math.fsum(t * o.written_bytes / 4 for o, t in zip(trace.operators, times, strict=True)) / total
    shares = [
        math.fsum(t for o, t in zip(trace.operators, times, strict=True) if o.kind == kind) / total for kind in KINDS
    ]
    logs = [
        trace.batch_size,
        flops,
        moved,
        trace.weight_bytes,
        len(trace.operators),
        trace.input_bytes,
        total,
        trace.peak_bytes,
        flops / moved,
        peak_threads(concurrent_sets(trace, kernels)),
        mean_threads,
    ]
    values = [
        *(math.log(max(value, 1e-12)) for value in logs),
        compute / total,
        kernels.launch_ms * len(times) / kernels.time_ms(trace),
        *shares,
    ]
    return np.array(values)
