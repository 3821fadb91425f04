"""The time a scheduler core lives in, on an event loop: the clock's, which waits for the core where a timer is late."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

from tenuto.deployments.dispatch.alarm import Alarm, alarm

# Derived: a timer of the loop is late by one turn of it, and turns are below 2 ms unless the machine is busy. Where
# requests keep more of their deadlines for that, so much more is waited.
LEAST_PATIENCE_MS = 2.0


class CoreTime:
    """Invariant: `now_ms` never decreases, and no event of the core comes before a timer that was due earlier.

    Timers come late, and a batch held to its last moment would then miss it. So the core's time stands still at the
    moment for which it asked to be woken until it has been woken, for at most `patience_ms`: what requests keep of
    their deadlines for delays that nobody planned. How late timers are is thus part of what is kept, and of nothing
    else; virtual time and this one give the core the same moments.
    """

    def __init__(self, clock: Callable[[], float], on_timer: Callable[[float], None]) -> None:
        """Take a clock in seconds, and what to call with the core's time when the core is to be woken."""
        self._clock = clock
        self._on_timer = on_timer
        self._alarm: Alarm | None = None
        self._soon: asyncio.Handle | None = None  # once this turn of the loop is over
        self._armed_ms = math.inf
        self._last_ms = -math.inf
        self._is_closed = False
        self.patience_ms = LEAST_PATIENCE_MS

    @property
    def clock_ms(self) -> float:
        """The clock's time."""
        return self._clock() * 1000.0

    @property
    def now_ms(self) -> float:
        """The core's time."""
        now = self._clock() * 1000.0
        if self._armed_ms < now <= self._armed_ms + self.patience_ms:
            now = self._armed_ms
        if now > self._last_ms:
            self._last_ms = now
        return self._last_ms

    def arm(self, wake_ms: float, now_ms: float) -> None:
        """Call back at `wake_ms`, and not when it was to be before."""
        if wake_ms == self._armed_ms or self._soon is not None or self._is_closed:
            return
        if wake_ms <= now_ms:
            self._soon = asyncio.get_running_loop().call_soon(self._turn_is_over)
            return
        if self._alarm is None:
            self._alarm = alarm(self._ring, self._clock)
        self._armed_ms = wake_ms
        if wake_ms == math.inf:
            self._alarm.clear()
            return
        self._alarm.set(wake_ms / 1000.0)

    def _turn_is_over(self) -> None:
        self._soon = None
        self._on_timer(self.now_ms)

    def _ring(self) -> None:
        # An alarm that was set in seconds may ring a rounding error before the ms it was meant for.
        now = self._last_ms = max(self.now_ms, self._armed_ms)
        self._armed_ms = math.inf
        self._on_timer(now)

    def close(self) -> None:
        """Call back no more, whatever is armed later."""
        self._is_closed = True
        if self._soon is not None:
            self._soon.cancel()
            self._soon = None
        if self._alarm is not None:
            self._alarm.close()
            self._alarm = None
