"""Computations aside: in one process that stays, and comes again when it was lost."""

import asyncio
import os
from dataclasses import dataclass
from typing import Any

import pytest

from tenuto.batching.core.scheduler import Rehearse
from tenuto.deployments.dispatch.rehearsals import Computed, RehearsalProcess, Rehearsals
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
    process = RehearsalProcess(PATIENCE_S)
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


async def test_a_result_comes_when_it_is_due_and_a_failure_never(caplog: pytest.LogCaptureFixture) -> None:
    found: list[Computed] = []

    async def compute(job: Any) -> Computed:
        if job.ends:
            raise EOFError
        return Computed(job.number, None)

    rehearsals = Rehearsals(found.append, compute)
    loop = asyncio.get_running_loop()
    rehearsals.begin(Rehearse(Where(1, ends=True), 0.0), 0.0)
    await until(lambda: "a rehearsal of the scheduler failed: EOFError" in caplog.text)
    begun = loop.time()
    rehearsals.begin(Rehearse(Where(2), 30.0), 10.0)
    await until(lambda: bool(found))
    assert found == [Computed(2, None)]
    assert loop.time() - begun >= 0.0199
    rehearsals.close()
