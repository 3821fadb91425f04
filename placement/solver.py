"""Linear and integer programs, solved by HiGHS on one thread and within bounded work, so that the same program has the
same answer every time. What HiGHS prints reaches neither stdout nor stderr."""

from __future__ import annotations

import ctypes
import math
import os
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Numbers: TypeAlias = Sequence[float] | NDArray[np.float64]

# limit: the work of an integer program: how often HiGHS may ask whether to go on, times the nonzeros of the program.
# HiGHS asks about once for each time that it solves the linear program anew. At the root it asks after its own cuts and
# searches, which take some twenty times as long. Programs of 1,500 to 30,000 nonzeros used this up in 2 to 20 CPU
# seconds.
WORK, AT_ROOT = 10_000_000, 20

_one_at_a_time = threading.Lock()  # file descriptor 1 is the whole process's


@dataclass(frozen=True)
class Optimum:
    """The result of a program.

    `x`: the best that was found; None: none was found. `bound`: no x costs less. `is_proven`: the solver finished, so
    that no x is better, or none is allowed. `duals`, of a linear program: how much the least cost grows when the limit
    of a row grows by 1.
    """

    x: NDArray[np.float64] | None
    bound: float
    is_proven: bool
    duals: NDArray[np.float64]


def linear_program(cost: Numbers, rows: Rows, most: Numbers, least: Numbers | None = None) -> Optimum:
    """Return the x of the least cost that keeps the rows, with least <= x <= most; `least` is 0 where not given.

    Plans are judged by some hundreds of programs of a few rows. `scipy.optimize.linprog` takes 4 ms for one of them, of
    which the solver takes 0.3 ms and the checking of arguments the rest.
    """
    return _Solver(cost, rows, least, most).solved()


def integer_program(
    cost: Numbers,
    rows: Rows,
    least: Numbers,
    most: Numbers,
    whole: Sequence[bool] | NDArray[np.bool_],
    *,
    start: Numbers | None = None,
    time_limit_s: float = math.inf,
    gap: float = 0.0,
) -> Optimum:
    """Return the x of the least cost that keeps the rows, with least <= x <= most, and whole numbers where asked for.

    The solver ends when its work is used up (`WORK`), and then the best x found is returned.

    Args:
        cost: of each column.
        rows: what has to hold.
        least, most: of each column.
        whole: columns that must be whole numbers.
        start: an x that is known; one that breaks a row is not used.
        time_limit_s: a limit in seconds besides; where it ends the search, two runs may differ.
        gap: relative to the bound; an x as near is good enough.
    """
    return _Solver(cost, rows, least, most).whole(np.asarray(whole, dtype=bool), start, time_limit_s, gap)


class Rows:
    """Rows of a linear program, collected one by one: least <= sum of value * x[column] <= most."""

    def __init__(self) -> None:
        self.values: list[float] = []  # of one row after the other, with their columns
        self.columns: list[int] = []
        self.starts: list[int] = []  # of the rows in these
        self.least: list[float] = []
        self.most: list[float] = []

    def add(self, columns: Iterable[int], values: Iterable[float], most: float, least: float = -np.inf) -> None:
        """Add a row."""
        self.starts.append(len(self.values))
        for column, value in sorted(zip(columns, values, strict=True)):
            self.columns.append(column)
            self.values.append(value)
        self.least.append(least)
        self.most.append(most)


class _Solver:
    def __init__(self, cost: Numbers, rows: Rows, least: Numbers | None, most: Numbers) -> None:
        highspy = _highspy()
        self._program = program = highspy.HighsLp()
        program.num_col_, program.num_row_ = len(cost), len(rows.most)
        program.col_cost_, program.col_upper_ = np.array(cost, dtype=float), np.array(most, dtype=float)
        program.col_lower_ = np.zeros(len(cost)) if least is None else np.array(least, dtype=float)
        program.row_lower_, program.row_upper_ = np.array(rows.least, dtype=float), np.array(rows.most, dtype=float)
        program.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
        program.a_matrix_.start_ = np.array([*rows.starts, len(rows.values)], dtype=np.int32)
        program.a_matrix_.index_ = np.array(rows.columns, dtype=np.int32)
        program.a_matrix_.value_ = np.array(rows.values, dtype=float)
        self._nonzeros, self._asked = max(1, len(rows.values)), 0
        self._highs = highspy.Highs()
        for name, value in (("output_flag", False), ("threads", 1)):
            self._highs.setOptionValue(name, value)

    def solved(self) -> Optimum:
        """Solve the program. Without presolve, which took 9 s for a program of 2,800 columns that takes 0.1 s."""
        self._highs.setOptionValue("presolve", "off")
        return self._run()

    def whole(self, whole: NDArray[np.bool_], start: Numbers | None, limit_s: float, gap: float) -> Optimum:
        """Solve it with whole numbers."""
        highspy = _highspy()
        kinds = highspy.HighsVarType.kContinuous, highspy.HighsVarType.kInteger
        self._program.integrality_ = [kinds[is_whole] for is_whole in whole.tolist()]
        self._highs.setOptionValue("mip_rel_gap", gap)
        self._highs.setOptionValue("time_limit", float(limit_s))
        self._highs.setCallback(self._ask, None)
        self._highs.startCallback(highspy.cb.HighsCallbackType.kCallbackMipInterrupt)
        with _one_at_a_time, _silenced():
            return self._run(start)

    def _ask(self, _kind: Any, _message: str, state: Any, answer: Any, _data: Any) -> None:
        """Answer HiGHS, which asks whether to go on. highspy 1.10 to 1.16 all ask in this way and heed the answer."""
        self._asked += self._nonzeros * (1 if state.mip_node_count else AT_ROOT)
        answer.user_interrupt = self._asked > WORK

    def _run(self, start: Numbers | None = None) -> Optimum:
        highspy = _highspy()
        self._highs.passModel(self._program)
        if start is not None:
            known = highspy.HighsSolution()
            known.col_value = list(start)
            self._highs.setSolution(known)
        self._highs.run()
        status, info, solution = self._highs.getModelStatus(), self._highs.getInfo(), self._highs.getSolution()
        is_best = status == highspy.HighsModelStatus.kOptimal
        is_found = is_best or info.primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible
        return Optimum(
            x=np.array(solution.col_value) if is_found else None,
            bound=float(info.mip_dual_bound),
            is_proven=is_best or status == highspy.HighsModelStatus.kInfeasible,
            duals=np.array(solution.row_dual),
        )


@cache
def _highspy() -> Any:
    """Return the solver's package. The first solver of a process prints the version (1.16.0), before one can say no."""
    import highspy  # every gpu-let's process imports this module, and none solves anything

    with _one_at_a_time, _silenced():
        highspy.Highs()
    return highspy


@contextmanager
def _silenced() -> Iterator[None]:
    """HiGHS (1.12) prints a line for debugging by C's printf, whatever its options say, when it polishes a
    solution; a reader of `tenuto plan --json` would get that line before the document."""
    sys.stdout.flush()
    try:
        stdout = os.dup(1)
    except OSError:  # closed: nothing to keep clean
        yield
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 1)
        yield
    finally:
        ctypes.CDLL(None).fflush(None)  # into nowhere still
        os.dup2(stdout, 1)
        os.close(stdout)
        os.close(nowhere)
