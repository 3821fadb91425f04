"""How a batch is cut from a queue: which requests at its front are given up, and how many of the next run together.

The rule is a pure function of the queue and the time. Deadlines are ascending, times in ms. What was learned of a
gpu-let and of the delay to it comes in as plain numbers, since both change with every batch.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right

from tenuto.batching.core.system import TIME_TOLERANCE_MS


def longest_within(run_ms: list[float], room_ms: float, factor: float = 1.0, data_ms: float = 0.0) -> int:
    """Return the largest batch that takes at most `room_ms`, the way of its data included; 0: none."""
    if not data_ms:
        return max(0, bisect_right(run_ms, room_ms / factor) - 1)
    sizes = range(len(run_ms))
    return max(0, bisect_right(sizes, room_ms, key=lambda size: factor * run_ms[size] + data_ms * size) - 1)


def usual_batch(run_ms: list[float], slo_ms: float) -> int:
    """Return the largest batch that takes at most half of an SLO, as a request may come when another has just begun;
    at least 1."""
    return max(1, longest_within(run_ms, slo_ms / 2.0))


def window(
    deadlines: list[float],
    defended: int,
    run_ms: list[float],
    factor: float,
    arrives_at: float,
    data_ms: float,
    free_at: float,
) -> tuple[int, int]:
    """Give up the front requests that keep the batch below the size worth defending.

    That size is the largest q <= defended such that the newest q requests could run as one batch. Then the batch grows
    beyond q as long as its own first deadline holds. With 1 only requests are given up that cannot be met even alone,
    and the first of the rest bounds the batch (Symphony, Alg. 1).

    A batch of b ends at max(arrives_at + b * data_ms, free_at) + factor * run_ms[b]: it starts when its data has
    arrived and the gpu-let is free, and runs `factor` times as long as planned.

    Returns:
        How many requests to skip at the front, and the size of the batch behind them (0: nothing can be met).
    """
    count = len(deadlines)
    size = min(defended, count, len(run_ms) - 1)
    while size:
        end = max(arrives_at + data_ms * size, free_at) + factor * run_ms[size]
        if end <= deadlines[count - size] + TIME_TOLERANCE_MS:
            break
        size -= 1
    else:
        return count, 0
    skip = bisect_left(deadlines, end - TIME_TOLERANCE_MS)
    head = deadlines[skip] + TIME_TOLERANCE_MS
    size = min(count - skip, longest_within(run_ms, head - arrives_at, factor, data_ms))
    if free_at > arrives_at:
        size = min(size, longest_within(run_ms, head - free_at, factor))
    return skip, size
