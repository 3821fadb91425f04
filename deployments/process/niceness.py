"""Ray starts its workers at niceness 15, where anything else on the machine delays them by whole time slices."""

from __future__ import annotations

import logging
import os

logger = logging.getLogger("ray.serve")


def run_at_normal_priority() -> None:
    """Run this process at niceness 0 where the system allows it; `RAY_worker_niceness=0` for `ray start` needs no
    permission."""
    if os.getpriority(os.PRIO_PROCESS, 0) <= 0:
        return
    try:
        # Threads keep the niceness they were started with: every one of them has to be told.
        for thread in os.listdir("/proc/self/task"):
            os.setpriority(os.PRIO_PROCESS, int(thread), 0)
    except OSError as error:
        logger.warning(
            "this process stays at niceness %d (%s). Start Ray with RAY_worker_niceness=0 in the environment.",
            os.getpriority(os.PRIO_PROCESS, 0),
            error.strerror,
        )
