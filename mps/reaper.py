"""Stop a GPU's daemon after its last gpu-let: `python -m tenuto.mps.reaper GPU-…`, started together with the daemon."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

from tenuto.mps.control import ControlError
from tenuto.mps.daemon import PrivateDaemon

POLL_S = 2.0  # limit: between two looks at a daemon's clients
UNUSED_POLLS = 5  # limit: a gpu-let that Serve replaces is away for some seconds
# After a fault all of a GPU's gpu-lets are away at once, for as long as importing torch and Serve's back-off between
# two tries (at most 64 s) take; with the daemon the count of faults would go, and restarts would never come to an end.
UNUSED_POLLS_AFTER_FAULTS = 60  # limit: two minutes


def reap(daemon: PrivateDaemon, sleep: Callable[[float], None] = time.sleep) -> None:
    """Wait until nobody has used the daemon for some polls in a row, more after a fault, then quit it; ends when the
    daemon is gone."""
    unused = 0
    while daemon.is_ours():
        sleep(POLL_S)
        if daemon.is_used():
            unused = 0
            continue
        unused += 1
        if unused < (UNUSED_POLLS_AFTER_FAULTS if daemon.recent_faults() else UNUSED_POLLS):
            continue
        try:
            if daemon.stop_if_unused():
                return
        except ControlError:
            pass  # it may answer at the next poll; `tenuto doctor` shows it until then
        unused = 0


if __name__ == "__main__":
    reap(PrivateDaemon(sys.argv[1]))
