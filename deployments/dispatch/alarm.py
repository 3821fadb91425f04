"""A timer of an event loop to the microsecond: loops count theirs in whole ms, which alone makes them up to 1.5 ms
early or late. A Linux timer descriptor wakes a loop within some 50 µs."""

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
_FLAGS = os.O_NONBLOCK | getattr(os, "O_CLOEXEC", 0)  # TFD_NONBLOCK and TFD_CLOEXEC have the values of these


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class _Setting(ctypes.Structure):
    _fields_ = (("interval", _Timespec), ("first", _Timespec))


class Alarm(Protocol):
    """Rings once for each time it is set. Set anew or cleared, it does not ring for what it was set for before."""

    def set(self, at_s: float) -> None:
        """Ring at that time of its clock, at once where it has passed."""

    def clear(self) -> None:
        """Do not ring."""

    def close(self) -> None:
        """Let go of everything; a closed one is not set again."""


def alarm(on_ring: Callable[[], None], clock: Callable[[], float] = time.monotonic) -> Alarm:
    """Return an alarm on the running event loop: a descriptor's where the clock is the system's, else the loop's, which
    may ring early too.

    Args:
        on_ring: what to call.
        clock: in seconds; another than the system's must pass as the loop's time does.
    """
    loop = asyncio.get_running_loop()
    if sys.platform == "linux" and clock is time.monotonic:
        # Called with the interpreter's lock held: that takes less than giving it back and asking for it again.
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
        first.nanoseconds = min(999_999_999, math.ceil((at_s - seconds) * 1e9)) or 1  # all zero means never
        if self._set_time(self._descriptor, _ABSOLUTE, self._pointer, None) != 0:
            raise OSError(ctypes.get_errno(), "timerfd_settime failed")

    def clear(self) -> None:
        self._is_set = False

    def _ready(self) -> None:
        try:
            os.read(self._descriptor, 8)
        except BlockingIOError:
            return  # set anew since it rang
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
