"""Stop a GPU's daemon after its last gpu-let: `python -m tenuto.mps.reaper GPU-…`, started together with the daemon."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

from tenuto.mps.control import ControlError
from tenuto.mps.daemon import PrivateDaemon

POLL_S = 2.0  # pace: time between two looks at a daemon's clients
UNUSED_POLLS = 5  # limit: looks without a gpu-let before the daemon ends; Serve may take some seconds to replace one
# After a fault all gpu-lets of the GPU are away at once, while torch is imported and while Serve waits between two
# tries (at most 64 s). If the daemon ended meanwhile, the count of faults would be lost, and restarts would never end.
UNUSED_POLLS_AFTER_FAULTS = 60  # limit: two minutes


def reap(daemon: PrivateDaemon, sleep: Callable[[float], None] = time.sleep) -> None:
    """Wait until nobody has used the daemon for some polls in a row (more after a fault), then quit it. Returns when
    the daemon is gone."""
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
