"""Real-time scheduling for the thread that sends, if the system allows it.

Kernels of servers are built without preemption: a process that wakes up waits until a running process has finished its
time slice. On a busy machine that is 2 to 4 ms. A real-time thread gets the processor at once: beside three busy
processes on two cores 99 % of wake-ups came within 0.2 ms (lab/journal/benchmarks-loadgen.md). The client needs little
processor time, and Linux keeps a twentieth of the time for other threads, so the client cannot block the machine.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Literal

Priority = Literal["realtime", "normal"]
_LOWEST = 1  # format: the lowest real-time priority, which is above all ordinary threads


@contextlib.contextmanager
def preferred() -> Iterator[Priority]:
    """Give the calling thread the lowest real-time priority within the block; yield the priority that it got.

    This needs root, CAP_SYS_NICE or a limit for real-time priority (`ulimit -r`). Without these, and on other systems
    than Linux, the thread stays as it is. So does a thread that is real-time already. Threads and processes that the
    thread starts have ordinary priority.
    """
    if not hasattr(os, "sched_setscheduler"):
        yield "normal"
        return
    before = _policy()
    got: Priority = "realtime"
    if before not in (os.SCHED_RR, os.SCHED_FIFO):
        try:
            _set(os.SCHED_RR, _LOWEST)
        except OSError:  # not permitted, or the group of this process has no real-time share
            got = "normal"
    try:
        yield got
    finally:
        if _policy() != before:
            _set(before, 0)


def _policy() -> int:
    return os.sched_getscheduler(0) & ~os.SCHED_RESET_ON_FORK


def _set(policy: int, priority: int) -> None:
    # The flag stays when the priority goes, since only root may clear it.
    os.sched_setscheduler(0, policy | os.SCHED_RESET_ON_FORK, os.sched_param(priority))
