"""How many GPUs to add or release: the advice of Symphony §3.5, from what a scheduler's clients and GPUs experienced.

A share r of bad requests (late or dropped) on N GPUs means that N GPUs carry 1 - r of the load: N/(1-r) would carry
all, so N*r/(1-r) are missing. Because deferred batching leaves GPUs idle in proportion to what the load spares, an
idle fraction f means that N*f GPUs can go. Counts go in with explicit times; there is no clock here, and no request is
stored.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class AutoscaleOptions:
    """When advice is given.

    window_s: length of the windows the figures are taken over.
    bad_threshold: share of bad requests above which GPUs are asked for. The paper gives none; 1 % is what its goodput
    allows.
    headroom: idle share that is kept when GPUs are released. The paper releases all of N*f, which leaves nothing for
    the next burst; 0 does as the paper does.
    settle_windows: windows in a row that must agree before GPUs are released. Advice to add GPUs never waits.
    """

    window_s: float = 10.0  # default: seconds of a window
    bad_threshold: float = 0.01
    headroom: float = 0.1  # default
    settle_windows: int = 1


@dataclass(frozen=True)
class Advice:
    """The figures of one window, and the advice. `delta_gpus` > 0: add so many GPUs; < 0: release so many."""

    start_s: float
    end_s: float
    gpus: int
    requests: int
    bad_rate: float
    idle_fraction: float
    delta_gpus: int


def advise(gpus: int, bad_rate: float, idle_fraction: float, options: AutoscaleOptions = AutoscaleOptions()) -> int:
    """Return how many GPUs to add (positive) or release (negative).

    To add, N*r/(1-r) is rounded up. It is at most what ten doublings add, as an r near 1 says only "far too few". To
    release, N*(f - headroom) is rounded down, and at least one GPU is kept. A cluster that loses requests releases
    nothing, however much of it is idle.
    """
    if bad_rate > options.bad_threshold:
        ratio = bad_rate / (1 - bad_rate) if bad_rate < 1 else math.inf
        return math.ceil(gpus * min(ratio, 1023.0) - 1e-9)  # derived: ten doublings
    return -max(0, min(gpus - 1, math.floor(gpus * (idle_fraction - options.headroom) + 1e-9)))


class AutoscaleAdvisor:
    """Turns counts into one `Advice` per window. Times are seconds on the caller's axis and never decrease.

    Feed it with `add` as often as convenient (per batch or per second); each call that ends windows returns their
    advice.
    """

    def __init__(self, gpus: int, options: AutoscaleOptions = AutoscaleOptions(), *, start_s: float = 0.0) -> None:
        """Begin a window at `start_s`."""
        self.options = options
        self._gpus = gpus
        self._start_s = self._now_s = start_s
        self._good = self._bad = 0
        self._busy_gpu_s = 0.0
        self._gpu_s = 0.0
        self._spare: list[int] = []

    def set_gpus(self, now_s: float, gpus: int) -> list[Advice]:
        """Set how many GPUs are in use from now on. Windows count GPU-seconds, so the number may change inside one."""
        advice = self._advance(now_s)
        if gpus != self._gpus:
            self._gpus = gpus
            self._spare.clear()
        return advice

    def add(self, now_s: float, *, good: int = 0, bad: int = 0, busy_gpu_s: float = 0.0) -> list[Advice]:
        """Count requests that ended, and GPU-seconds that were spent on batches, since the last call.

        Returns:
            The advice of every window that ended at or before `now_s`, usually none or one.
        """
        advice = self._advance(now_s)
        self._good += good
        self._bad += bad
        self._busy_gpu_s += busy_gpu_s
        return advice

    def _advance(self, now_s: float) -> list[Advice]:
        advices = []
        while now_s >= self._start_s + self.options.window_s:
            end_s = self._start_s + self.options.window_s
            self._gpu_s += self._gpus * (end_s - self._now_s)
            advices.append(self._close(end_s))
            self._start_s = self._now_s = end_s
        self._gpu_s += self._gpus * max(0.0, now_s - self._now_s)
        self._now_s = max(self._now_s, now_s)
        return advices

    def _close(self, end_s: float) -> Advice:
        requests = self._good + self._bad
        bad_rate = self._bad / requests if requests else 0.0
        # Batches are reported when they end, so a window may hold a little more than its own time.
        idle = min(1.0, max(0.0, 1.0 - self._busy_gpu_s / self._gpu_s)) if self._gpu_s > 0 else 1.0
        delta = advise(self._gpus, bad_rate, idle, self.options)
        if delta < 0:
            self._spare.append(-delta)
            settled = self._spare[-self.options.settle_windows :]
            delta = -min(settled) if len(settled) == self.options.settle_windows else 0
            del self._spare[: -self.options.settle_windows]
        else:
            self._spare.clear()
        advice = Advice(self._start_s, end_s, self._gpus, requests, bad_rate, idle, delta)
        self._good = self._bad = 0
        self._busy_gpu_s = self._gpu_s = 0.0
        return advice
