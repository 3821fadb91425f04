"""How a batch is cut from a queue: which requests at its front are given up, and how many of the following run
together.

A rule is a pure function of the queue and the moment, exchangeable by name. Deadlines are ascending, times in ms.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable

from tenuto.batching.core.system import TIME_TOLERANCE_MS

# rule(deadlines, defended, send_at, sent_ms, free_at, run_ms) -> (skip, size). A batch of b ends at
# max(send_at + sent_ms[b], free_at + run_ms[b]): it starts when its data has arrived and the gpu-let is free.
GatherRule = Callable[[list[float], int, float, list[float], float, list[float]], tuple[int, int]]


def head_first(
    deadlines: list[float], _defended: int, send_at: float, sent_ms: list[float], free_at: float, run_ms: list[float]
) -> tuple[int, int]:
    """Give up only what cannot make it even alone; then the longest batch the first survivor allows (Symphony, Alg. 1).

    Returns:
        How many requests at the front cannot be met, and the size of the batch behind them (0: nothing can be met).
    """
    return window(deadlines, 1, send_at, sent_ms, free_at, run_ms)


def window(
    deadlines: list[float], defended: int, send_at: float, sent_ms: list[float], free_at: float, run_ms: list[float]
) -> tuple[int, int]:
    """Give up the front requests that keep the batch below the size worth defending.

    That size is the largest q <= defended such that the newest q requests could run as one batch. Then the batch grows
    past it for free, as long as its own first deadline holds.

    Returns:
        How many requests to skip at the front, and the size of the batch behind them (0: nothing can be met).
    """
    count = len(deadlines)
    size = min(defended, count, len(run_ms) - 1)
    while size and max(send_at + sent_ms[size], free_at + run_ms[size]) > deadlines[count - size] + TIME_TOLERANCE_MS:
        size -= 1
    if not size:
        return count, 0
    end = max(send_at + sent_ms[size], free_at + run_ms[size])
    skip = bisect_left(deadlines, end - TIME_TOLERANCE_MS)
    head = deadlines[skip] + TIME_TOLERANCE_MS
    size = min(count - skip, bisect_right(sent_ms, head - send_at) - 1)
    if free_at > send_at:
        size = min(size, bisect_right(run_ms, head - free_at) - 1)
    return skip, size


GATHERING: dict[str, GatherRule] = {"head-first": head_first, "window": window}
