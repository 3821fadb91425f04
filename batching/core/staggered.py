"""The size of the staggered batch, and the measured rate of requests that it depends on."""

from __future__ import annotations

from collections import deque
from typing import Final

from tenuto.batching.core.gathering import longest_within
from tenuto.batching.core.system import INF, TIME_TOLERANCE_MS


def staggered_batch(
    latency_ms: list[float],
    budget_ms: float,
    rate_rps: float | None,
    *,
    longest: int | None = None,
    factor: float = 1.0,
    data_ms: float = 0.0,
) -> int:
    """Return the largest batch of the staggered pattern: (1 + 1/n) l(b) <= budget (Symphony §3.3, table 2).

    n is the number of GPUs that the model needs by itself: n = rate * l(b) / b. Then l(b)/n is the time in which b
    requests arrive, and the condition reads l(b) + b/rate <= budget. When n <= 1, this is the residual rule of Nexus,
    so one formula serves both. While the rate is unknown, two equal batches must fit: l(b) <= budget / 2.

    Args:
        latency_ms: l(b) by batch size.
        budget_ms: the time from arrival to the end of the batch, without the fixed delay that every batch has.
        rate_rps: offered rate of this model; None: unknown.
        longest: the largest batch to consider; default: the largest in `latency_ms`.
        factor: measured over planned latency of batches.
        data_ms: how long the data of each request is on its way.

    Returns:
        At least 1.
    """
    budget_ms += TIME_TOLERANCE_MS
    most = len(latency_ms) - 1 if longest is None else longest
    if rate_rps is None:
        return max(1, min(most, longest_within(latency_ms, budget_ms / 2.0, factor, data_ms)))
    gap_ms = 1000.0 / rate_rps + data_ms
    low, high = 1, most + 1  # low fits, or is 1; high does not fit
    while high - low > 1:
        middle = (low + high) // 2
        if factor * latency_ms[middle] + middle * gap_ms <= budget_ms:
            low = middle
        else:
            high = middle
    return low


class ArrivalRate:
    """The offered rate of one model over the last seconds: add to `count`, and call `roll` once past `next_at`.

    `rps` is the mean of the last 5 s. `recent_rps` is the rate of the last step or of the last second, whichever is
    higher, so that it rises at once. Both reach back over at least ten requests, however long ago these came; when
    fewer came in all, the rate is at most that of ten. A first guess sets `rps` alone, since requests that have not
    come yet keep no gpu-let busy.
    """

    __slots__ = ("_marks", "count", "next_at", "recent_rps", "rps")

    STEP_MS: Final = 250.0  # derived: a twentieth of the window
    WINDOW_STEPS: Final = 20  # fitted: the window of the offered rate, in steps: 5 s
    WINDOW_MS: Final = WINDOW_STEPS * STEP_MS
    RECENT_MS: Final = 1000.0  # fitted: the window of the recent rate
    LEAST: Final = 10  # derived: requests that give a rate within a third

    def __init__(self, first_guess_rps: float | None = None) -> None:
        self.rps = first_guess_rps
        self.recent_rps = 0.0
        self.count = 0
        self.next_at = -INF
        self._marks: deque[tuple[float, int]] = deque(maxlen=self.WINDOW_STEPS)

    def roll(self, now_ms: float) -> None:
        """Close a step. The rate is the mean since the oldest mark, once a step and ten requests have passed since."""
        if self._marks:
            oldest, count = self._marks[0]
            if now_ms - oldest >= self.STEP_MS and self.count - count >= self.LEAST:
                self.rps = 1000.0 * (self.count - count) / (now_ms - oldest)
            self.look_back(now_ms)
        self._marks.append((now_ms, self.count))
        self.next_at = now_ms + self.STEP_MS

    def is_silent(self, now_ms: float) -> bool:
        """Return whether no request came for so long that `recent_rps` is out of date; `look_back` renews it."""
        return bool(self._marks) and now_ms >= self.next_at + self.RECENT_MS

    def silent_at(self, now_ms: float) -> float:
        """Return when to ask again whether the model is silent: always after now, and later the longer it is silent."""
        since = self.next_at + self.RECENT_MS
        return since if since > now_ms else now_ms + max(self.STEP_MS, (now_ms - since) / self.WINDOW_STEPS)

    def look_back(self, now_ms: float) -> None:
        """Set `recent_rps` anew; may be called at any time after the last request."""
        highest = 0.0
        for at, count in reversed(self._marks):
            if now_ms - at >= self.STEP_MS and self.count - count >= self.LEAST:
                highest = highest or 1000.0 * (self.count - count) / (now_ms - at)
                if now_ms - at >= self.RECENT_MS:
                    self.recent_rps = max(highest, 1000.0 * (self.count - count) / (now_ms - at))
                    return
        if self.rps is not None and self._marks:
            most = 1000.0 * self.LEAST / max(now_ms - self._marks[0][0], self.STEP_MS)
            self.recent_rps = max(highest, min(self.rps, most))
