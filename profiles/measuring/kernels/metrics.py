"""The compute metrics of a profile from the kernels of one batch: occupancy and SM utilisation, weighted by time.

Sources: thesis section 5.3.2 (weighted SM utilisation, weighted achieved occupancy), USHER section 4.1 (the compute
requirement is the largest occupancy of kernels that run at once).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tenuto.errors import refused
from tenuto.profiles.measuring.kernels.occupancy import estimated_occupancy_pct, sms_needed
from tenuto.profiles.measuring.kernels.record import Device, Kernel


@dataclass(frozen=True)
class Launch:
    """When a kernel ran and how many SMs it would fill, which may be more than there are."""

    start_us: float
    duration_us: float
    sms_needed: float


def launches(kernels: Sequence[Kernel], device: Device) -> list[Launch]:
    """Return when each kernel ran and the SMs it needs on this device."""
    return [Launch(k.start_us, k.duration_us, sms_needed(k, device.limits)) for k in kernels]


def weighted_sm_utilisation_pct(sequence: Sequence[Launch], sm_count: int) -> float:
    """Return the mean of min(SMs needed, SMs)/SMs over the time in which any kernel runs, in percent.

    Kernels that overlap add their SMs up to those of the GPU. For kernels in sequence it is the sum of
    min(s_i, S)/S * t_i over the sum of t_i (thesis section 5.3.2).

    Raises:
        InvalidInputError: no kernel, or none of any duration.
    """
    marks = [(k.start_us, k.start_us + k.duration_us, k.sms_needed) for k in sequence]
    busy = weighted = 0.0
    for length, running in _intervals(marks):
        busy += length
        weighted += length * min(sum(running), sm_count) / sm_count
    if busy <= 0:
        rule = "no kernel ran for any time"
        raise refused("kernels", len(marks), rule, "Record at least a batch.")
    return 100.0 * weighted / busy


def kernel_metrics(kernels: Sequence[Kernel], device: Device) -> dict[str, float]:
    """Return a batch's metrics by the names profiles use.

    `achieved_occupancy_pct` (the largest sum over kernels that run at once, at most 100), `wavg_ach_occ_pct` (this sum,
    averaged over the time in which any kernel runs), `wavg_sm_util_pct`, `kernels`, `kernel_ms` (time in which at least
    one kernel ran), `kernel_gap_ms` (time between kernels in which none ran) and `overlap_pct` (part of `kernel_ms` in
    which two or more ran). `occupancy_estimated` is 1 if the occupancy of any kernel is estimated from its launch
    configuration, and 0 if all were measured.
    """
    limits, sms = device.limits, device.sm_count
    estimated = any(kernel.achieved_occupancy_pct is None for kernel in kernels)

    def occupancy(kernel: Kernel) -> float:
        measured = kernel.achieved_occupancy_pct
        return estimated_occupancy_pct(kernel, limits, sms) if measured is None else measured

    marks = [(k.start_us, k.end_us, occupancy(k)) for k in kernels]
    periods = list(_intervals(marks))
    busy = math.fsum(length for length, _ in periods)
    result = {
        "kernels": float(len(kernels)),
        "wavg_sm_util_pct": weighted_sm_utilisation_pct(launches(kernels, device), sms),
        "achieved_occupancy_pct": min(100.0, max(math.fsum(running) for _, running in periods)),
        "wavg_ach_occ_pct": math.fsum(length * min(100.0, math.fsum(running)) for length, running in periods) / busy,
        "kernel_ms": busy / 1000.0,
        "kernel_gap_ms": max(0.0, max(k.end_us for k in kernels) - min(k.start_us for k in kernels) - busy) / 1000.0,
        "overlap_pct": 100.0 * math.fsum(length for length, running in periods if len(running) > 1) / busy,
        "occupancy_estimated": float(estimated),
    }
    return {name: round(value, 4) for name, value in result.items()}


def _intervals(marks: Sequence[tuple[float, float, float]]) -> Iterator[tuple[float, list[float]]]:
    """Yield the length and the running values of every stretch of time in which the same kernels run."""
    events = sorted(
        [(start, 1, index) for index, (start, end, _) in enumerate(marks) if end > start]
        + [(end, 0, index) for index, (start, end, _) in enumerate(marks) if end > start]
    )
    running: dict[int, float] = {}
    before = 0.0
    for time, begins, index in events:
        if running and time > before:
            yield time - before, list(running.values())
        before = time
        if begins:
            running[index] = marks[index][2]
        else:
            del running[index]
