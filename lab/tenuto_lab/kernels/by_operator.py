"""Finds the kernels of each operator of a network, with their times and occupancies, in a trace with a range for each
operator.

The host marks a range around every operator (`torch.profiler.record_function`). A launch inside a range and the kernel
that it started have the same correlation number of CUPTI. So a kernel can be assigned to its operator, although it runs
later.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tenuto.errors import refused
from tenuto.profiles.measuring.kernels.chrome_trace import parse_chrome_trace, read_chrome_trace
from tenuto.profiles.measuring.kernels.occupancy import estimated_occupancy_pct

RANGE_NAME = "tenuto operator"
_LAUNCHES = ("cuda_runtime", "cuda_driver")


@dataclass(frozen=True)
class OperatorKernel:
    """One kernel of an operator; its occupancy in percent is estimated from its launch configuration."""

    name: str
    time_ms: float
    occupancy_pct: float


def load_operator_kernels(path: Path) -> list[list[OperatorKernel]]:
    """Read a trace file; see `operator_kernels`."""
    return operator_kernels(read_chrome_trace(path), origin=str(path))


def operator_kernels(data: Any, *, origin: str = "trace") -> list[list[OperatorKernel]]:
    """Return each operator's kernels, both in the order of their launches; an operator may have none.

    Args:
        data: a trace of torch.profiler with a range named `RANGE_NAME` around every operator.
        origin: prefix of the paths in error messages.

    Raises:
        InvalidInputError: no kernels, no ranges, or a kernel without its launch configuration.
    """
    trace = parse_chrome_trace(data, origin=origin)
    ranges = sorted(
        (float(event["ts"]), float(event["ts"]) + float(event["dur"]))
        for event in data["traceEvents"]
        if event.get("cat") == "user_annotation" and event.get("name") == RANGE_NAME
    )
    if not ranges:
        raise refused(origin, 0, f"has no range named '{RANGE_NAME}'", "Record with `tenuto kernels time`.")
    known = {
        kernel.correlation: OperatorKernel(
            kernel.name,
            kernel.duration_us / 1000.0,
            min(100.0, estimated_occupancy_pct(kernel, trace.device.limits, trace.device.sm_count)),
        )
        for kernel in trace.kernels
    }
    found: list[list[OperatorKernel]] = [[] for _ in ranges]
    starts = [begin for begin, _ in ranges]
    launches = [
        event
        for event in data["traceEvents"]
        if str(event.get("cat", "")).lower() in _LAUNCHES and event.get("ph") == "X"
    ]
    for event in sorted(launches, key=lambda event: float(event["ts"])):
        index = _range_of(float(event["ts"]), starts, ranges)
        correlation = (event.get("args") or {}).get("correlation")
        if index is not None and correlation in known:
            found[index].append(known[correlation])
    return found


def _range_of(at_us: float, starts: Sequence[float], ranges: Sequence[tuple[float, float]]) -> int | None:
    index = bisect.bisect_right(starts, at_us) - 1
    return index if index >= 0 and at_us <= ranges[index][1] else None
