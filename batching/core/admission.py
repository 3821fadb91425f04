"""Who keeps to the plan: a token bucket per program, filled at its planned rate.

A request that finds no token is borrowed: it is served with what the others leave. Ours; the papers have no such rule.
"""

from __future__ import annotations

from tenuto.batching.core.system import INF

__all__ = ["Allowance"]

MARGIN = 1.1  # of the planned rate: chance alone must not empty the bucket
BURST_MS = 2000.0  # of the planned rate may come at once
LEAST_BURST = 10.0  # requests
STEP = 1 / 64  # how fast the share of borrowed requests follows
EXCEEDS = 0.5  # share of borrowed requests from which on a program exceeds its plan: more than twice what is planned


class Allowance:
    """The bucket of one program; without a planned rate it is not limited, and nothing is ever borrowed. `borrowed` is
    the share of its requests lately that found no token, `owed` how many that found one have not been served yet, they
    or others in their place."""

    __slots__ = ("_at", "_burst", "_per_ms", "_tokens", "borrowed", "is_limited", "owed")

    def __init__(self, rate_rps: float | None) -> None:
        self.is_limited = rate_rps is not None
        self._per_ms = INF if rate_rps is None else MARGIN * rate_rps / 1000.0
        self._burst = max(LEAST_BURST, BURST_MS * self._per_ms)
        self._tokens = self._burst
        self._at = 0.0
        self.borrowed = 0.0
        self.owed = 0.0

    @property
    def exceeds(self) -> bool:
        """Whether the program was offered more than twice its plan lately."""
        return self.borrowed > EXCEEDS

    def take(self, now_ms: float) -> bool:
        """Count a request; False if it is borrowed."""
        if not self.is_limited:
            return True
        self._tokens = min(self._burst, self._tokens + (now_ms - self._at) * self._per_ms)
        self._at = now_ms
        is_planned = self._tokens >= 1.0
        if is_planned:
            self._tokens -= 1.0
            self.owed = min(self.owed + 1.0, self._burst)
            self.borrowed -= self.borrowed * STEP
        else:
            self.borrowed += (1.0 - self.borrowed) * STEP
        return is_planned

    def serve(self, count: int) -> None:
        """So many are served."""
        self.owed = max(0.0, self.owed - count)

    def resume(self, now_ms: float, borrowed: float) -> None:
        """Begin anew: the bucket is full, or empty where the program exceeds its plan."""
        self.borrowed = borrowed
        self._at = now_ms
        self.owed = 0.0
        self._tokens = 0.0 if self.exceeds else self._burst

    def next_ms(self) -> float:
        """Return how long after the last request there will be a token."""
        return max(0.0, 1.0 - self._tokens) / self._per_ms
