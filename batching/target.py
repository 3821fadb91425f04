"""How large a batch is worth waiting and dropping for: the staggered optimum at the rate that is really offered."""

from __future__ import annotations

from collections import deque

from tenuto.batching.interface import INF, TIME_TOLERANCE_MS

__all__ = ["ArrivalRate", "target_batch"]


def target_batch(latency_ms: list[float], budget_ms: float, rate_rps: float | None, gpus: float | None) -> int:
    """Return the largest batch of the staggered pattern: (1 + 1/n) l(b) <= budget (Symphony §3.3, table 2).

    n is the number of GPUs the pattern is spread over: `gpus` if given, else what the model needs by itself,
    n = rate * l(b) / b. Where it needs less than one, the residual rule of Nexus: l(b) + b/rate <= budget.
    Without either, two batches of equal length must fit: l(b) <= budget / 2.

    Args:
        latency_ms: l(b) by batch size, any delay per request included.
        budget_ms: the time from arrival to the end of the batch.
        rate_rps: offered rate of this model.
        gpus: a fixed n instead.

    Returns:
        At least 1.
    """
    budget_ms += TIME_TOLERANCE_MS
    for size in range(len(latency_ms) - 1, 1, -1):
        latency = latency_ms[size]
        if gpus is not None:
            fits = latency * (1 + 1 / gpus) <= budget_ms
        elif rate_rps is None:
            fits = 2 * latency <= budget_ms
        else:
            need = rate_rps * latency / (1000.0 * size)
            fits = latency * (1 + 1 / need) <= budget_ms if need > 1 else latency + 1000.0 * size / rate_rps <= budget_ms
        if fits:
            return size
    return 1


class ArrivalRate:
    """The offered rate of one model over the last seconds. The owner adds to `count` and calls `roll` once past `next_at`."""

    __slots__ = ("_marks", "count", "next_at", "rps")

    STEP_MS = 250.0
    WINDOW_STEPS = 20  # 5 s

    def __init__(self, first_guess_rps: float | None = None) -> None:
        self.rps = first_guess_rps
        self.count = 0
        self.next_at = -INF
        self._marks: deque[tuple[float, int]] = deque(maxlen=self.WINDOW_STEPS)

    def roll(self, now_ms: float) -> None:
        """Close a step: the rate is the mean since the oldest mark, known once a step and ten requests lie behind it."""
        if self._marks:
            oldest, count = self._marks[0]
            if now_ms - oldest >= self.STEP_MS and self.count - count >= 10:
                self.rps = 1000.0 * (self.count - count) / (now_ms - oldest)
        self._marks.append((now_ms, self.count))
        self.next_at = now_ms + self.STEP_MS
