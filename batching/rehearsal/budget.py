"""How much of a core rehearsals may use."""

from __future__ import annotations

from collections import deque

from tenuto.batching.core.system import INF

CORE = 0.05  # limit: the part of a core that rehearsals may use, or
CORE_MS = 0.01  # limit: ms of a core per offered request, when that is more: above 5,000 requests a second
CREDIT_MS = 1000.0  # limit: ms of a core that rehearsals may use at once, at the start and after a rest
SPAN_MS = 60_000.0  # unit: a minute; rehearsals keep to their part of a core in every minute


class Budget:
    """A token bucket in ms of a core: rehearsals may use a part of every minute, and at once what they saved up."""

    def __init__(self) -> None:
        self._core = CORE  # the part of a core
        self.spent_ms = 0.0
        self._saved_ms = CREDIT_MS
        self._saved_at = -INF
        self._lately: deque[tuple[float, float]] = deque()  # (when, ms of a core) in the last minute
        self._last_ms = 0.0  # what the last replay took
        self._expected_ms = 0.0  # what it was expected to take
        self._measured = 1.0  # the ratio of both

    def save_up(self, now: float, rps: float) -> bool:
        """Save up until now, at `rps` requests a second; return whether a replay as long as the last one may begin."""
        self._save(now)
        self._core = max(CORE, CORE_MS / 1000.0 * rps)
        return self._saved_ms >= 0.0 and self._left_ms(now) >= min(self._last_ms, self._core * SPAN_MS)

    def expect_replay(self, expected_ms: float, now: float) -> bool:
        """Note what the next replay should take; return whether it would use up the rest of this minute's budget."""
        self._expected_ms = expected_ms
        return self._measured * expected_ms >= self._left_ms(now)

    def spend(self, cpu_ms: float, now: float) -> None:
        """Charge what the last replay took."""
        self._save(now)
        self._saved_ms -= cpu_ms
        self._lately.append((now, cpu_ms))
        self._last_ms = cpu_ms
        self._measured = cpu_ms / self._expected_ms if self._expected_ms else 1.0
        self.spent_ms += cpu_ms

    def _left_ms(self, now: float) -> float:
        while self._lately and self._lately[0][0] <= now - SPAN_MS:
            self._lately.popleft()
        return self._core * SPAN_MS - sum([spent_ms for _, spent_ms in self._lately], 0.0)

    def _save(self, now: float) -> None:
        if self._saved_at > -INF:
            self._saved_ms = min(CREDIT_MS, self._saved_ms + self._core * (now - self._saved_at))
        self._saved_at = now
