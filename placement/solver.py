"""Linear and integer programs, solved by HiGHS, whose own words reach neither stdout nor stderr."""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from scipy.optimize import OptimizeResult
    from scipy.sparse import csr_array

_one_at_a_time = threading.Lock()  # file descriptor 1 is the whole process's


def linear_program(
    cost: Sequence[float], matrix: csr_array, upper: Sequence[float], most: Sequence[float]
) -> list[float]:
    """Return the x of the least cost with matrix x <= upper and 0 <= x <= most; x = 0 must be allowed.

    Plans are judged by some hundreds of programs of a few rows. `scipy.optimize.linprog` takes 4 ms for one of them, of
    which the solver takes 0.3 ms and the checking of arguments the rest.
    """
    import highspy  # every gpu-let's process imports this package, and none asks this

    program = highspy.HighsLp()
    program.num_col_, program.num_row_ = len(cost), len(upper)
    program.col_cost_, program.col_lower_, program.col_upper_ = np.array(cost), np.zeros(len(cost)), np.array(most)
    program.row_lower_, program.row_upper_ = np.full(len(upper), -np.inf), np.array(upper)
    program.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    program.a_matrix_.start_, program.a_matrix_.index_ = matrix.indptr, matrix.indices
    program.a_matrix_.value_ = matrix.data
    _hear_banner()
    solver = highspy.Highs()
    solver.setOptionValue("output_flag", False)
    solver.passModel(program)
    solver.run()
    return list(solver.getSolution().col_value)


class Rows:
    """Rows of a linear program, collected one by one: least <= sum of value * x[column] <= most."""

    def __init__(self) -> None:
        self._entries: tuple[list[float], list[int], list[int]] = [], [], []  # values, rows, columns
        self.least: list[float] = []
        self.most: list[float] = []

    def add(self, columns: Collection[int], values: Iterable[float], most: float, least: float = -np.inf) -> None:
        """Add a row."""
        held, rows, places = self._entries
        rows.extend([len(self.most)] * len(columns))
        places.extend(columns)
        held.extend(values)
        self.least.append(least)
        self.most.append(most)

    def matrix(self, columns: int) -> csr_array:
        """Return the rows over so many columns."""
        from scipy.sparse import csr_array  # see `integer_program`

        values, rows, places = self._entries
        return csr_array((values, (rows, places)), shape=(len(self.most), columns))


def integer_program(cost: Any, **program: Any) -> OptimizeResult:
    """Return what `scipy.optimize.milp` does, without what its solver prints."""
    # Gateways import what partitions models, and only one of a cluster ever partitions.
    from scipy.optimize import milp

    with _one_at_a_time, _silenced():
        return milp(cost, **program)


@cache
def _hear_banner() -> None:
    """Let HiGHS (1.16) print the banner that the first solver of a process prints before it takes options."""
    import highspy

    with _one_at_a_time, _silenced():
        highspy.Highs()


@contextmanager
def _silenced() -> Iterator[None]:
    """HiGHS (scipy 1.17.1) prints a line for debugging by C's printf, whatever its options say, when it polishes a
    solution; a reader of `tenuto plan --json` would get that line before the document."""
    sys.stdout.flush()
    try:
        kept = os.dup(1)
    except OSError:  # closed: nothing to keep clean
        yield
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 1)
        yield
    finally:
        ctypes.CDLL(None).fflush(None)  # into nowhere still
        os.dup2(kept, 1)
        os.close(kept)
        os.close(nowhere)
