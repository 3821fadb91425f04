"""The niceness of our processes. Ray starts its workers at niceness 15, so other programs delay them by time slices."""

from __future__ import annotations

import logging
import os

logger = logging.getLogger("ray.serve")


def run_at_normal_priority() -> None:
    """Run this process at niceness 0 if the system allows it. (Starting Ray with `RAY_worker_niceness=0` needs no
    permission.)"""
    if os.getpriority(os.PRIO_PROCESS, 0) <= 0:
        return
    try:
        # Each thread has a niceness of its own, so it is set for every thread.
        for thread in os.listdir("/proc/self/task"):
            os.setpriority(os.PRIO_PROCESS, int(thread), 0)
    except OSError as error:
        logger.warning(
            "this process stays at niceness %d (%s). Start Ray with RAY_worker_niceness=0 in the environment.",
            os.getpriority(os.PRIO_PROCESS, 0),
            error.strerror,
        )
