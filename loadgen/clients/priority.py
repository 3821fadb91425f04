"""Real-time scheduling for the thread that sends, where the system allows it.

A kernel built without preemption, as servers' are, lets a running process finish its slice before one that wakes up
gets the processor: 2 to 4 ms late on a machine that is busy with anything else. A real-time thread is served at once:
99 % of wake-ups within 0.2 ms beside three busy processes on two cores (lab/journal/benchmarks-loadgen.md). The client
needs little processor time, and Linux keeps a twentieth of it for everyone else, so that it cannot take the machine.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Literal

Priority = Literal["realtime", "normal"]
_LOWEST = 1  # format: of the real-time priorities: above all ordinary threads, below everyone's who asked for more


def prefer_this_thread(wanted: Priority = "realtime") -> Priority:
    """Give the calling thread the lowest real-time priority and return what it has got.

    Needs root, CAP_SYS_NICE or a limit for real-time priority (`ulimit -r`); without, and elsewhere than on Linux, the
    thread stays as it is, and so does one that is real-time already. Threads and processes that it starts are ordinary
    ones.
    """
    if wanted == "normal" or not hasattr(os, "sched_setscheduler"):
        return "normal"
    if _policy() in (os.SCHED_RR, os.SCHED_FIFO):
        return "realtime"
    try:
        _set(os.SCHED_RR, _LOWEST)
    except OSError:  # not permitted, or the group of this process has no real-time share
        return "normal"
    return "realtime"


@contextlib.contextmanager
def preferred(wanted: Priority = "realtime") -> Iterator[Priority]:
    """Prefer the calling thread within the block; see `prefer_this_thread`."""
    before = _policy() if hasattr(os, "sched_getscheduler") else None
    got = prefer_this_thread(wanted)
    try:
        yield got
    finally:
        if before is not None and _policy() != before:
            _set(before, 0)


def _policy() -> int:
    return os.sched_getscheduler(0) & ~os.SCHED_RESET_ON_FORK


def _set(policy: int, priority: int) -> None:
    # The flag stays when the priority goes: who is not root may set it and not clear it.
    os.sched_setscheduler(0, policy | os.SCHED_RESET_ON_FORK, os.sched_param(priority))
