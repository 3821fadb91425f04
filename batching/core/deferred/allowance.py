"""Which programs keep to their planned rate: a token bucket per program, filled at that rate.

A request that finds no token is *borrowed*: it is served with the GPU time that other programs leave. This rule is
ours; the papers have none like it.
"""

from __future__ import annotations

import math

from tenuto.batching.core.staggered import ArrivalRate
from tenuto.batching.core.system import INF
from tenuto.placement.workload import EXCESS

BURST_MS = 2000.0  # fitted: the bucket holds at most what the planned rate brings in this time
LEAST_BURST = float(ArrivalRate.LEAST)  # derived: requests that the bucket holds at least
USUAL = 2.0  # fitted: the bucket holds this many times the largest recent burst; half of its most while none is known
USUAL_MS = 2.0 * ArrivalRate.WINDOW_MS  # derived: the time constant in which a burst is forgotten
# Derived: a program with 40 requests a second and three times its planned rate is found within a second.
STEP = 1 / 24  # weight of the newest request in the share of borrowed ones
EXCEEDS = 0.5  # fitted: the share of borrowed requests when a program sends twice its planned rate


class Allowance:
    """The bucket of one program. Without a planned rate the program is not limited, and no request is ever borrowed.

    `borrowed`: the share of recent requests that found no token. `owed`: admitted requests that were not served yet,
    nor another one in their place. `most`: upper bound of tokens and of `owed`. `usual`: the largest recent burst. A
    program that often bursts gets a larger bucket, so that programs with bursts at different times can help each other.
    A program that never burst is soon found to exceed its plan.
    """

    __slots__ = ("_at", "_full_at", "_peak", "_per_ms", "_used", "borrowed", "is_limited", "most", "owed", "usual")

    def __init__(self, rate_rps: float | None) -> None:
        self.is_limited = rate_rps is not None
        self._per_ms = INF if rate_rps is None else EXCESS * rate_rps / 1000.0
        self.most = max(LEAST_BURST, BURST_MS * self._per_ms)
        self._used = self._peak = 0.0  # tokens taken: now, and the most since the bucket was full
        self._at = self._full_at = 0.0
        self.usual = 0.5 * self.most / USUAL
        self.borrowed = 0.0
        self.owed = 0.0

    @property
    def exceeds(self) -> bool:
        """Whether the program was lately offered more than twice its planned rate."""
        return self.borrowed > EXCEEDS

    def take_token(self, now_ms: float) -> bool:
        """Take a token for a request; False if there is none, so that the request is borrowed."""
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
        """Note that `count` requests are served."""
        self.owed = max(0.0, self.owed - count)

    def next_ms(self) -> float:
        """Return how many ms after the last request there will be a token."""
        return max(0.0, self._used + 1.0 - self._burst()) / self._per_ms
