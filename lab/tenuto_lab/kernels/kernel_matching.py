"""Adds to the kernels of a trace what another tool measured of the same launches.

Two launches are the same when their names and launch configurations agree, and when each is the n-th of its kind in its
file. The tools spell names differently, so full names are tried first, and then the function's own name.
"""

from __future__ import annotations

import re
from collections import defaultdict, deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

from tenuto.errors import refused
from tenuto.profiles.measuring.kernels.record import Kernel


@dataclass(frozen=True)
class Matched:
    """The trace's kernels, with the measurements of their partners; and how many on each side have no partner."""

    kernels: tuple[Kernel, ...]
    unmatched: int
    unused: int


def base_name(name: str) -> str:
    """Return a kernel's own name: without return type, namespaces, template arguments and parameters."""
    depth = 0
    kept: list[str] = []
    for sign in name.replace("(anonymous namespace)", "").replace("<unnamed>", ""):
        if sign == "(" and depth == 0 and kept:
            break
        if sign in "<(":
            depth += 1
        elif sign in ">)":
            depth -= 1
        elif depth == 0:
            kept.append(sign)
    words = re.split(r"::|\s", "".join(kept).strip())
    return next((word for word in reversed(words) if word), name)


def match_kernels(trace: Sequence[Kernel], measured: Sequence[Kernel], *, origin: str = "kernels") -> Matched:
    """Return the trace's kernels with occupancy, L2 and DRAM use of the measured ones; times stay the trace's.

    Raises:
        InvalidInputError: not one kernel has a partner; the files are of different models, batches or GPUs.
    """
    result: list[Kernel | None] = [None] * len(trace)
    left = list(measured)
    for same in (_by_name, _by_base):
        waiting: defaultdict[Hashable, deque[int]] = defaultdict(deque)
        for index, kernel in enumerate(left):
            waiting[same(kernel)].append(index)
        used: set[int] = set()
        for position, kernel in enumerate(trace):
            queue = waiting.get(same(kernel))
            if result[position] is None and queue:
                partner = left[queue[0]]
                used.add(queue.popleft())
                result[position] = replace(
                    kernel,
                    achieved_occupancy_pct=partner.achieved_occupancy_pct,
                    l2_util_pct=partner.l2_util_pct,
                    dram_util_pct=partner.dram_util_pct,
                )
        left = [kernel for index, kernel in enumerate(left) if index not in used]
    unmatched = sum(one is None for one in result)
    if unmatched == len(trace):
        example = trace[0] if trace else None
        raise refused(
            origin,
            None if example is None else f"{example.name} {example.grid} {example.block}",
            "no kernel of the one file is in the other by name and launch configuration",
            "Record both of the same model, batch size and GPU.",
        )
    kernels = tuple(kernel if one is None else one for kernel, one in zip(trace, result, strict=True))
    return Matched(kernels, unmatched, len(left))


def _by_name(kernel: Kernel) -> Hashable:
    return kernel.name, kernel.grid, kernel.block


def _by_base(kernel: Kernel) -> Hashable:
    return base_name(kernel.name), kernel.grid, kernel.block
