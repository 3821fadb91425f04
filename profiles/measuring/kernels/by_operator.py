"""Which kernels each operator of a network launched, and what they occupied: from a trace with a range per operator.

The host marks a range around every operator (`torch.profiler.record_function`); a launch inside a range and the kernel
it started share CUPTI's correlation number. So kernels find their operator although they run later.
"""

from __future__ import annotations

import bisect
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tenuto.errors import InvalidInputError, Problem
from tenuto.profiles.measuring.kernels.chrome_trace import parse_chrome_trace
from tenuto.profiles.measuring.kernels.occupancy import estimated_occupancy_pct

__all__ = ["RANGE_NAME", "load_operator_occupancies", "operator_occupancies"]

RANGE_NAME = "tenuto operator"
_LAUNCHES = ("cuda_runtime", "cuda_driver")


def load_operator_occupancies(path: Path) -> list[float]:
    """Read a trace file; see `operator_occupancies`."""
    return operator_occupancies(json.loads(path.read_text(encoding="utf-8")), origin=str(path))


def operator_occupancies(data: Any, *, origin: str = "trace") -> list[float]:
    """Return each operator's occupancy in percent, in order: the largest of its kernels, 0 where it launched none.

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
        raise InvalidInputError(
            Problem(origin, 0, f"has no range named '{RANGE_NAME}'", "Record with `tenuto profile --time-operators`.")
        )
    occupancy = {
        kernel.correlation: estimated_occupancy_pct(kernel, trace.device.limits, trace.device.sm_count)
        for kernel in trace.kernels
    }
    found = [0.0] * len(ranges)
    starts = [begin for begin, _ in ranges]
    for event in data["traceEvents"]:
        if str(event.get("cat", "")).lower() not in _LAUNCHES or event.get("ph") != "X":
            continue
        index = _range_of(float(event["ts"]), starts, ranges)
        correlation = (event.get("args") or {}).get("correlation")
        if index is not None and correlation in occupancy:
            found[index] = max(found[index], min(100.0, occupancy[correlation]))
    return found


def _range_of(at_us: float, starts: Sequence[float], ranges: Sequence[tuple[float, float]]) -> int | None:
    index = bisect.bisect_right(starts, at_us) - 1
    return index if index >= 0 and at_us <= ranges[index][1] else None
