"""Who keeps to the plan: a token bucket per program, filled at its planned rate.

A request that finds no token is borrowed: it is served with what the others leave. Ours; the papers have no such rule.
"""

from __future__ import annotations

import math

from tenuto.batching.core.system import INF

# Derived: three deviations of a thousand Poisson requests, so that chance alone does not empty the bucket.
MARGIN = 1.1  # of the planned rate
BURST_MS = 2000.0  # fitted: of the planned rate may come at once, at most
LEAST_BURST = 10.0  # derived: requests, from which on a rate is known at all (`ArrivalRate.LEAST`)
USUAL = 2.0  # fitted: times the largest burst of late may come at once; half of the most as long as none is known
USUAL_MS = 10_000.0  # derived: twice the window of the offered rate: how fast that burst is forgotten
# Derived: at 40 requests a second a program at three times its plan is known within a second.
STEP = 1 / 24  # how fast the share of borrowed requests follows
EXCEEDS = 0.5  # derived: share of borrowed requests of a program that comes at twice its plan


class Allowance:
    """The bucket of one program; without a planned rate it is not limited, and nothing is ever borrowed.

    `borrowed`: the share of its requests lately that found no token. `owed`: admitted requests not served yet, or
    others served in their place. `most`: upper bound of tokens and of `owed`. `usual`: the largest burst of late;
    models that fluctuate by turns help each other, and one that never did is known soon to exceed its plan.
    """

    __slots__ = ("_at", "_full_at", "_peak", "_per_ms", "_used", "borrowed", "is_limited", "most", "owed", "usual")

    def __init__(self, rate_rps: float | None) -> None:
        self.is_limited = rate_rps is not None
        self._per_ms = INF if rate_rps is None else MARGIN * rate_rps / 1000.0
        self.most = max(LEAST_BURST, BURST_MS * self._per_ms)
        self._used = self._peak = 0.0  # tokens, now and at most since the bucket was full
        self._at = self._full_at = 0.0
        self.usual = 0.5 * self.most / USUAL
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
        self._used -= (now_ms - self._at) * self._per_ms
        self._at = now_ms
        if self._used <= 0.0:
            self._used = 0.0
            self.usual = max(self._peak, self.usual * math.exp((self._full_at - now_ms) / USUAL_MS))
            self._peak = 0.0
            self._full_at = now_ms
        used = self._used + 1.0
        is_planned = used <= LEAST_BURST or used <= self._burst()
        if is_planned:
            self._used = used
            self._peak = max(self._peak, used)
            self.owed = min(self.owed + 1.0, self.most)
            self.borrowed -= self.borrowed * STEP
        else:
            self.borrowed += (1.0 - self.borrowed) * STEP
        return is_planned

    def _burst(self) -> float:
        return min(self.most, max(LEAST_BURST, USUAL * self.usual))

    def serve(self, count: int) -> None:
        """So many are served."""
        self.owed = max(0.0, self.owed - count)

    def next_ms(self) -> float:
        """Return how long after the last request there will be a token."""
        return max(0.0, self._used + 1.0 - self._burst()) / self._per_ms
