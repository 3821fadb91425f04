"""The clock of a load client. Event loops count timers in whole ms, which would make half of all requests 0.5 ms late.
On Linux an alarm of the system wakes the client within microseconds; elsewhere the loop's own timers do."""

from __future__ import annotations

import asyncio
import time
from typing import Protocol

from tenuto.deployments.dispatch.alarm import Alarm, alarm


class Timer(Protocol):
    """A clock that one waiter at a time can wait for. Times are seconds; only `wall` has a fixed origin."""

    def now(self) -> float:
        """Return the time."""

    def wall(self) -> float:
        """Return the time as `time.time()` counts it, which all clients of a run share."""

    async def wait_until(self, at: float) -> None:
        """Return at `at` or a little later, never earlier; at once if it has passed."""

    def close(self) -> None:
        """Free the timer."""


class PreciseTimer:
    """The real time, on the running event loop. Times are those of `time.monotonic()`."""

    def __init__(self) -> None:
        """Must be called on the event loop."""
        self._loop = asyncio.get_running_loop()
        self._waiter: asyncio.Future[None] | None = None
        self._alarm: Alarm = alarm(self._rang)

    def _rang(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def now(self) -> float:
        """Return the time."""
        return time.monotonic()

    def wall(self) -> float:
        """Return the time since the epoch."""
        return time.time()

    async def wait_until(self, at: float) -> None:
        """Return at `at` or a little later, never earlier; at once when it has passed."""
        while at > time.monotonic():
            self._waiter = self._loop.create_future()
            self._alarm.set(at)
            await self._waiter

    def close(self) -> None:
        """Let go of everything."""
        self._alarm.close()
