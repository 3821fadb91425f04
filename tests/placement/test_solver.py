"""What solvers print reaches neither stdout, where the plan goes, nor stderr."""

from __future__ import annotations

import ctypes
import os
import random
import subprocess
import sys

import pytest

from tenuto.placement import solver
from tenuto.placement.solver import Rows, integer_program
from tenuto_lab.baselines.milp.milp import AoMilp
from tests.placement.published import LANGUAGE_MIX, equal_rates, planned, v100s


def test_the_lines_that_highs_prints_for_itself_are_not_seen(capfd: pytest.CaptureFixture[str]) -> None:
    for gpus in (6, 7, 8):  # on at least one of them HiGHS 1.12 tells how it polishes a solution
        planned(AoMilp(), equal_rates(LANGUAGE_MIX, 300, 300), v100s(gpus))
    ctypes.CDLL(None).fflush(None)
    assert tuple(capfd.readouterr()) == ("", "")


def test_the_banner_of_the_first_solver_of_a_process_is_not_seen() -> None:
    asks = "from tenuto.placement.solver import *; linear_program([-1.0], Rows(), [5.0])"
    done = subprocess.run([sys.executable, "-c", asks], capture_output=True, text=True, timeout=300, check=True)
    assert (done.stdout, done.stderr) == ("", "")


def test_stdout_is_what_it_was_afterwards(capfd: pytest.CaptureFixture[str]) -> None:
    solved = integer_program([-1.0], Rows(), [0.0], [2.5], [True])
    assert (list(solved.x), solved.bound, solved.is_proven) == ([2.0], -2.0, True)
    os.write(1, b"seen")
    assert capfd.readouterr().out == "seen"


def test_a_search_ends_when_its_work_is_used_up(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn, rows = random.Random(1), Rows()
    for _ in range(15):
        values = [float(drawn.randint(1, 99)) for _ in range(30)]
        rows.add(range(30), values, 0.3 * sum(values))
    cost, ends = [-float(drawn.randint(1, 99)) for _ in range(30)], []
    for work in (1, solver.WORK):
        monkeypatch.setattr(solver, "WORK", work)
        ends.append(integer_program(cost, rows, [0.0] * 30, [1.0] * 30, [True] * 30).is_proven)
    assert ends == [False, True]
