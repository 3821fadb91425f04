"""A precise timer for an event loop. Timers of asyncio count whole ms, so they ring up to 1.5 ms early or late. A Linux
timer descriptor wakes a loop within some 50 µs."""

from __future__ import annotations

import asyncio
import ctypes
import math
import os
import sys
import time
from collections.abc import Callable
from typing import Any, Protocol

_ABSOLUTE = 1  # format: TFD_TIMER_ABSTIME
_FLAGS = os.O_NONBLOCK | getattr(os, "O_CLOEXEC", 0)  # TFD_NONBLOCK and TFD_CLOEXEC have these values


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class _Setting(ctypes.Structure):
    _fields_ = (("interval", _Timespec), ("first", _Timespec))


class Alarm(Protocol):
    """Rings once for each time it is set. When it is set again or cleared, it does not ring for the earlier time."""

    def set(self, at_s: float) -> None:
        """Ring when the clock says `at_s`; at once, if that has passed."""

    def clear(self) -> None:
        """Do not ring."""

    def close(self) -> None:
        """Free the timer; a closed alarm must not be set again."""


def alarm(on_ring: Callable[[], None], clock: Callable[[], float] = time.monotonic) -> Alarm:
    """Return an alarm on the running event loop. With the system's clock on Linux it is a timer descriptor; otherwise
    it is a timer of the loop, which may ring early too.

    Args:
        on_ring: called when the alarm rings.
        clock: returns seconds; a clock other than the system's must run as fast as the loop's time.
    """
    loop = asyncio.get_running_loop()
    if sys.platform == "linux" and clock is time.monotonic:
        # PyDLL keeps Python's lock during a call: releasing the lock and taking it again would cost more than the call.
        library = ctypes.PyDLL(None, use_errno=True)
        descriptor = int(library.timerfd_create(time.CLOCK_MONOTONIC, _FLAGS))
        if descriptor >= 0:
            return _DescriptorAlarm(loop, on_ring, library, descriptor)
    return _LoopAlarm(loop, on_ring, clock)


class _DescriptorAlarm:
    def __init__(
        self, loop: asyncio.AbstractEventLoop, on_ring: Callable[[], None], library: Any, descriptor: int
    ) -> None:
        self._loop = loop
        self._on_ring = on_ring
        self._set_time = library.timerfd_settime
        self._descriptor = descriptor
        self._setting = _Setting()
        self._first = self._setting.first
        self._pointer = ctypes.byref(self._setting)
        self._is_set = False
        loop.add_reader(descriptor, self._ready)

    def set(self, at_s: float) -> None:
        self._is_set = True
        first, seconds = self._first, int(at_s)
        first.seconds = seconds
        # Format: of a timespec; all zero means never.
        first.nanoseconds = min(999_999_999, math.ceil((at_s - seconds) * 1e9)) or 1
        if self._set_time(self._descriptor, _ABSOLUTE, self._pointer, None) != 0:
            raise OSError(ctypes.get_errno(), "timerfd_settime failed")

    def clear(self) -> None:
        self._is_set = False

    def _ready(self) -> None:
        try:
            os.read(self._descriptor, 8)
        except BlockingIOError:
            return  # the alarm was set again after it rang
        if self._is_set:
            self._is_set = False
            self._on_ring()

    def close(self) -> None:
        if self._descriptor >= 0:
            self._is_set = False
            self._loop.remove_reader(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = -1


class _LoopAlarm:
    def __init__(
        self, loop: asyncio.AbstractEventLoop, on_ring: Callable[[], None], clock: Callable[[], float]
    ) -> None:
        self._loop = loop
        self._on_ring = on_ring
        self._clock = clock
        self._timer: asyncio.TimerHandle | None = None

    def set(self, at_s: float) -> None:
        self.clear()
        self._timer = self._loop.call_later(max(0.0, at_s - self._clock()), self._ring)

    def _ring(self) -> None:
        self._timer = None
        self._on_ring()

    def clear(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def close(self) -> None:
        self.clear()
