"""For how many connections a process has file descriptors. Where there are none left, the kernel's next connection is
reset, whoever it is."""

from __future__ import annotations

import os
import resource

_SPARE = 96  # derived: for operators' connections (64), and those that a turn takes and closes again (16), twice
_FEWEST = 8  # limit: connections, however few descriptors there are
_OF_OTHERS = 4096  # limit: descriptors of gpu-lets, Ray and files; where there are more, none is counted
_WITH_HANDSHAKES = 1.25  # derived: unfinished handshakes may be a quarter as many as connections


def use_all_descriptors() -> None:
    """Let this process open as many files as its hard limit allows."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def most_connections(most: int, held: int) -> int:
    """Return how many connections a server may have: as many as are asked for, or fewer where the limit of file
    descriptors is low. `held`: the connections that it has now."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if limit == resource.RLIM_INFINITY or limit >= _WITH_HANDSHAKES * most + _OF_OTHERS:
        return most
    try:
        others = len(os.listdir("/proc/self/fd")) - held
    except OSError:  # none is left
        others = limit - held
    return min(most, max(_FEWEST, int((limit - others - _SPARE) / _WITH_HANDSHAKES)))
