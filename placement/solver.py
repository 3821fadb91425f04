"""scipy's integer programs (HiGHS), kept off stdout, which belongs to what a command prints."""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from scipy.optimize import OptimizeResult

__all__ = ["integer_program"]

_one_at_a_time = threading.Lock()  # file descriptor 1 is the whole process's


def integer_program(cost: Any, **program: Any) -> OptimizeResult:
    """Return what `scipy.optimize.milp` does; whatever its solver prints goes to stderr."""
    # Gateways import what partitions models, and only one of a cluster ever partitions.
    from scipy.optimize import milp

    with _one_at_a_time, _stdout_to_stderr():
        return milp(cost, **program)


@contextmanager
def _stdout_to_stderr() -> Iterator[None]:
    """HiGHS (scipy 1.17.1) prints a line for debugging by C's printf, whatever its options say, when it polishes a
    solution; a reader of `tenuto plan --json` would get that line before the document."""
    sys.stdout.flush()
    try:
        kept = os.dup(1)
    except OSError:  # closed: nothing to keep clean
        yield
        return
    try:
        os.dup2(2, 1)
        yield
    finally:
        ctypes.CDLL(None).fflush(None)  # into stderr still
        os.dup2(kept, 1)
        os.close(kept)
