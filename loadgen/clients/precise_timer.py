"""The clock of a load client. Event loops count their timers in whole ms, which alone would make half of all requests
0.5 ms late; a Linux timer descriptor wakes them within microseconds. Elsewhere the loop's own timers do, up to 1 ms
late."""

from __future__ import annotations

import asyncio
import ctypes
import math
import os
import sys
import time
from typing import Any, Protocol

__all__ = ["PreciseTimer", "Timer"]

_ABSOLUTE = 1  # TFD_TIMER_ABSTIME
_FLAGS = os.O_NONBLOCK | getattr(os, "O_CLOEXEC", 0)  # TFD_NONBLOCK and TFD_CLOEXEC have the values of these


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class _Setting(ctypes.Structure):
    _fields_ = (("interval", _Timespec), ("first", _Timespec))


class Timer(Protocol):
    """A clock that can be waited for by one waiter at a time; times in seconds, from any origin but `wall`'s."""

    def now(self) -> float:
        """Return the time."""
        ...

    def wall(self) -> float:
        """Return the time as `time.time()` counts it, which all clients of a run share."""
        ...

    async def wait_until(self, at: float) -> None:
        """Return at `at` or a little later, never earlier; at once when it has passed."""
        ...

    def close(self) -> None:
        """Let go of everything."""
        ...


class PreciseTimer:
    """The real time, on the running event loop. Times are those of `time.monotonic()`."""

    def __init__(self) -> None:
        """Open the descriptor; must be called on the event loop."""
        self._loop = asyncio.get_running_loop()
        self._waiter: asyncio.Future[None] | None = None
        self._library: Any = None
        self._descriptor = -1
        if sys.platform == "linux":
            library = ctypes.CDLL(None, use_errno=True)
            descriptor = int(library.timerfd_create(time.CLOCK_MONOTONIC, _FLAGS))
            if descriptor >= 0:
                self._library, self._descriptor = library, descriptor
                self._setting = _Setting()
                self._loop.add_reader(descriptor, self._fired)

    def _fired(self) -> None:
        try:
            os.read(self._descriptor, 8)
        except BlockingIOError:
            return  # armed anew since it fired
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
        while (left_s := at - time.monotonic()) > 0:
            if self._library is None:
                await asyncio.sleep(math.ceil(left_s * 1000.0) / 1000.0)
                continue
            self._waiter = self._loop.create_future()
            first = self._setting.first
            first.seconds = int(at)
            first.nanoseconds = min(999_999_999, math.ceil((at - int(at)) * 1e9))
            if self._library.timerfd_settime(self._descriptor, _ABSOLUTE, ctypes.byref(self._setting), None) != 0:
                raise OSError(ctypes.get_errno(), "timerfd_settime failed")
            await self._waiter

    def close(self) -> None:
        """Close the descriptor."""
        if self._descriptor >= 0:
            self._loop.remove_reader(self._descriptor)
            os.close(self._descriptor)
            self._descriptor, self._library = -1, None
