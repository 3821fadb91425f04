"""The time that a scheduler core sees on an event loop: the clock's time, which stands still while a timer is late."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

from tenuto.deployments.dispatch.alarm import Alarm, alarm

# Derived: a timer of the loop is late by one turn of the loop, and turns are below 2 ms unless the machine is busy.
# When requests keep more time of their deadlines in reserve, the patience is that much longer.
LEAST_PATIENCE_MS = 2.0


class CoreTime:
    """Invariant: `now_ms` never decreases, and no event of the core comes before a timer that was due earlier.

    Timers come late, and a batch that is held to its last moment would then miss it. So when the core has asked to be
    woken at some moment, its time stands still at that moment until it has been woken, for at most `patience_ms`. That
    is the time which requests keep of their deadlines for unplanned delays, so late timers use up this reserve and
    nothing else. The core sees the same moments here as in virtual time.
    """

    def __init__(self, clock: Callable[[], float], on_timer: Callable[[float], None]) -> None:
        """`clock` returns seconds. `on_timer` is called with the core's time in ms when the core must be woken."""
        self._clock = clock
        self._on_timer = on_timer
        self._alarm: Alarm | None = None
        self._soon: asyncio.Handle | None = None  # wakes the core after this turn of the loop
        self._armed_ms = math.inf
        self._last_ms = -math.inf
        self._is_closed = False
        self.patience_ms = LEAST_PATIENCE_MS

    @property
    def clock_ms(self) -> float:
        """The clock's time in ms."""
        return self._clock() * 1000.0

    @property
    def now_ms(self) -> float:
        """The core's time in ms."""
        now = self._clock() * 1000.0
        if self._armed_ms < now <= self._armed_ms + self.patience_ms:
            now = self._armed_ms
        if now > self._last_ms:
            self._last_ms = now
        return self._last_ms

    def arm(self, wake_ms: float, now_ms: float) -> None:
        """Wake the core at `wake_ms` instead of the time set before."""
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
        # The alarm is set in seconds, so it may ring a rounding error before the moment in ms.
        now = self._last_ms = max(self.now_ms, self._armed_ms)
        self._armed_ms = math.inf
        self._on_timer(now)

    def close(self) -> None:
        """Never wake the core again, even if `arm` is called later."""
        self._is_closed = True
        if self._soon is not None:
            self._soon.cancel()
            self._soon = None
        if self._alarm is not None:
            self._alarm.close()
            self._alarm = None
