"""Long planning on the terminal: a line of progress, and Ctrl-C for the best plan so far."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from tenuto.cli.common import ProgressLine
from tenuto.placement import Policy
from tenuto.placement.watch import PlanningWatch

QUIET_S = 2.0  # format: planning that ends sooner shows no progress
EVERY_S = 5.0  # format: time between plain lines when there is no terminal


@contextmanager
def planning_watched(policy: Policy) -> Iterator[None]:
    """Show the progress of a policy while it plans. The first Ctrl-C asks the policy for the best plan so far; a second
    one interrupts it. A policy that cannot be asked is interrupted by the first."""
    if not policy.abilities.is_interruptible:
        yield
        return
    watch = _TerminalWatch(policy.name)
    policy.watch = watch
    is_main = threading.current_thread() is threading.main_thread()  # other threads cannot set handlers
    before = signal.signal(signal.SIGINT, watch.interrupted) if is_main else None
    try:
        yield
    finally:
        if is_main:
            signal.signal(signal.SIGINT, before)
        watch.clear()


class _TerminalWatch(PlanningWatch):
    def __init__(self, name: str) -> None:
        self._name, self._began_at = name, time.monotonic()
        self._line = ProgressLine(every_s=EVERY_S)
        self._is_stopped = self._has_spoken = False

    def is_stopped(self) -> bool:
        return self._is_stopped

    def say(self, progress: str) -> None:
        took_s = time.monotonic() - self._began_at
        if took_s >= QUIET_S and not self._is_stopped:
            self._has_spoken = True
            self._line.show(f"{self._name}: {progress}, {took_s:.0f} s; Ctrl-C for the best plan so far")

    def interrupted(self, number: int, frame: FrameType | None) -> None:
        """Take a signal: the first asks for the best plan so far, any further one interrupts."""
        del number, frame
        if self._is_stopped:
            raise KeyboardInterrupt
        self._is_stopped = True
        self._line.show(f"{self._name}: finishing with the best plan so far; Ctrl-C again to give up", is_last=True)

    def clear(self) -> None:
        """Remove the line, so that results can follow."""
        if self._has_spoken or self._is_stopped:
            self._line.clear()
