"""A share of a CPU is a number of threads. Measuring and serving share the rule, so that a profile holds for both."""

from __future__ import annotations

import os
from collections.abc import MutableMapping

# Threads that wait for each other sleep and do not spin. Spinning made ResNet-50 on two threads ten times slower when
# another program ran (2.6 s instead of 0.23 s beside one busy process on two cores).
_PASSIVE = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0"}


def calm_openmp(environment: MutableMapping[str, str]) -> None:
    """Make OpenMP's threads wait without spinning, unless the user chose otherwise. Call this before importing
    torch."""
    for key, value in _PASSIVE.items():
        environment.setdefault(key, value)


def cpu_cores() -> int:
    """Return the cores this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def cpu_threads(share_pct: float | None, cores: int | None = None) -> int:
    """Return the number of threads of a share: share_pct of the cores, rounded, at least one; all cores for None.

    Args:
        share_pct: in (0, 100]; 50 of two cores is one thread.
        cores: number of cores; default: those this process may run on.
    """
    return max(1, round((100.0 if share_pct is None else share_pct) / 100.0 * (cores or cpu_cores())))
