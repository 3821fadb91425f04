"""Computations aside: in one process that stays, and comes again when it was lost."""

import asyncio
import os
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

import pytest

from tenuto.deployments.dispatch.rehearsals import LAST_IN_LINE, Computed, RehearsalProcess, RehearsalRunner
from tests.instruments.asking import until
from tests.instruments.live import PATIENCE_S


@dataclass
class Where:
    """Returns the process that it runs in, unless it is told to end it."""

    number: int
    ends: bool = False

    def run(self) -> tuple[int, int]:
        if self.ends:
            os._exit(1)
        return self.number, os.getpid()


async def test_rehearsals_share_a_process_and_survive_its_end() -> None:
    # Last in line it would wait for minutes beside busy programs.
    process = RehearsalProcess(PATIENCE_S, first=f"import sys; sys.path.append({os.getcwd()!r})\n")
    (one, first), (two, second) = [(await process.run(Where(n))).result for n in (1, 2)]
    with pytest.raises(EOFError):
        await process.run(Where(3, ends=True))
    (four, third), cpu_ms = await process.run(Where(4))
    process.close()
    assert (one, two, four) == (1, 2, 4)
    assert first == second != os.getpid()
    assert third != first
    assert cpu_ms is not None
    assert 0.0 < cpu_ms < 1000.0 * PATIENCE_S


def test_what_rehearses_runs_only_when_nobody_else_wants_the_core() -> None:
    said = "print(os.sched_getscheduler(0) == os.SCHED_IDLE or os.nice(0))"
    ran = subprocess.run([sys.executable, "-c", LAST_IN_LINE + said], capture_output=True, text=True)
    assert ran.stdout.strip() in ("True", "19")


async def test_a_result_comes_when_it_is_due_and_a_failure_is_said_at_once(caplog: pytest.LogCaptureFixture) -> None:
    found: list[Computed] = []
    failed: list[bool] = []

    def fail() -> None:
        failed.append(True)

    async def compute(job: Any) -> Computed:
        if job.ends:
            raise EOFError
        return Computed(job.number, None)

    running = RehearsalRunner(compute)
    loop = asyncio.get_running_loop()
    running.begin(Where(1, ends=True), 0.0, found.append, fail)  # type: ignore[arg-type]
    await until(lambda: "a rehearsal of the scheduler failed: EOFError" in caplog.text)
    begun = loop.time()
    running.begin(Where(2), 20.0, found.append, fail)  # type: ignore[arg-type]
    await until(lambda: bool(found))
    assert failed == [True]
    assert found == [Computed(2, None)]  # type: ignore[arg-type]
    assert loop.time() - begun >= 0.0199
    running.close()
