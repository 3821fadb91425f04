"""The time a scheduler core lives in, on an event loop: the clock's, or a wake taken a little early."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable

from tenuto.batching.core.system import TIME_TOLERANCE_MS
from tenuto.deployments.dispatch.alarm import Alarm, alarm

_FIRST_SLACK_MS = 0.2  # until it is measured
_MOST_SLACK_MS = 2.0  # what is later than that is a busy machine, and belongs to the margin
_LOOKED_AT = 64  # timers
_QUANTILE = 0.9


class CoreTime:
    """Invariant: `now_ms` never decreases, though a wake may have been dated after the clock.

    Timers come late, and a batch held to its last moment would then miss it. So the core is woken earlier by what nine
    of ten timers are late by, as measured, and told the moment it asked for.
    """

    def __init__(self, clock: Callable[[], float], slack_ms: float | None, on_timer: Callable[[], None]) -> None:
        """Take a clock in seconds, how much early to wake (None: measured), and what to call then."""
        self._clock = clock
        self._is_measured = slack_ms is None
        self._slack_ms = max(_FIRST_SLACK_MS if slack_ms is None else slack_ms, TIME_TOLERANCE_MS)
        self._late_ms: deque[float] = deque(maxlen=_LOOKED_AT)
        self._on_timer = on_timer
        self._alarm: Alarm | None = None
        self._soon: asyncio.Handle | None = None  # once this turn of the loop is over
        self._armed_ms = math.inf
        self._due_ms = 0.0
        self._woken_ms = -math.inf
        self._is_closed = False

    @property
    def clock_ms(self) -> float:
        """The clock's time."""
        return self._clock() * 1000.0

    @property
    def now_ms(self) -> float:
        """The core's time: the clock's, or the moment of the last wake where that was taken early."""
        return max(self._clock() * 1000.0, self._woken_ms)

    def alarm(self, on_ring: Callable[[], None]) -> Alarm:
        """Return an alarm by the same clock."""
        return alarm(on_ring, self._clock)

    def arm(self, wake_ms: float, now_ms: float) -> None:
        """Call back at `wake_ms`, and not when it was to be before."""
        if wake_ms == self._armed_ms or self._soon is not None or self._is_closed:
            return
        if wake_ms <= now_ms:
            self._soon = asyncio.get_running_loop().call_soon(self._turn_is_over)
            return
        if self._alarm is None:
            self._alarm = self.alarm(self._ring)
        self._armed_ms = wake_ms
        if wake_ms == math.inf:
            self._alarm.clear()
            return
        self._due_ms = max(now_ms, wake_ms - self._slack_ms)
        self._alarm.set(self._due_ms / 1000.0)

    def _turn_is_over(self) -> None:
        self._soon = None
        self._on_timer()

    def _ring(self) -> None:
        self._armed_ms = math.inf
        if self._is_measured:
            late = self._late_ms
            late.append(self._clock() * 1000.0 - self._due_ms)
            if len(late) == _LOOKED_AT:
                found = sorted(late)[int(_QUANTILE * _LOOKED_AT)]
                self._slack_ms = min(_MOST_SLACK_MS, max(TIME_TOLERANCE_MS, found))
                late.clear()
        self._on_timer()

    def reach(self, moment_ms: float) -> float:
        """Return the time now; it is `moment_ms` where that is so near that waiting for it could miss it."""
        now = self.now_ms
        # An alarm that was set in seconds may ring a rounding error before the ms it was meant for.
        if moment_ms <= now + self._slack_ms + TIME_TOLERANCE_MS:
            now = self._woken_ms = max(now, moment_ms)
        return now

    def close(self) -> None:
        """Call back no more, whatever is armed later."""
        self._is_closed = True
        if self._soon is not None:
            self._soon.cancel()
            self._soon = None
        if self._alarm is not None:
            self._alarm.close()
            self._alarm = None
