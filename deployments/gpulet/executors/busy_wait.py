"""Waits of emulated GPUs, to the microsecond as far as the machine allows."""

from __future__ import annotations

import time


def wait_until(end_s: float) -> None:
    """Wait until `time.perf_counter` reaches `end_s`. The last part is a busy wait, as a sleep would end too late."""
    while (rest := end_s - time.perf_counter()) > 0:
        if rest > _SPUN_S:
            time.sleep(rest - _SPUN_S)


_SPUN_S = 5e-5  # derived: Linux may wake a sleeping thread this much too late (PR_SET_TIMERSLACK)
