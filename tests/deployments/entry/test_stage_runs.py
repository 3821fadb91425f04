"""How often a stage runs when what runs it, or what sends it there, ends amid a graph: at most once more."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator

import numpy as np
import pytest

from tenuto.deployments.wire.messages import RunBatch
from tests.deployments.entry.test_applications import CHAIN, MODELS, Gpulets, Served, nothing_is_left, plan
from tests.instruments.asking import until

ASKED = 120


class RecordingGpulet(Gpulets):
    """Counts how often each request has come, by the first of its numbers, which are all different."""

    def __init__(self, name: str, programs: tuple[str, ...]) -> None:
        super().__init__(name, programs)
        self.runs: Counter[float] = Counter()

    def note_batch(self, message: RunBatch, body: memoryview) -> None:
        for blocks in self.inputs(message, body):
            self.runs.update(np.concatenate(blocks["x"])[:, 0].tolist())


@pytest.fixture
async def served(request: pytest.FixtureRequest) -> AsyncIterator[Served]:
    made = Served(is_beside=request.param == "beside")
    made.gpulets.clear()
    made.gpulets |= {name: RecordingGpulet(name, (name,)) for name in MODELS}
    await made.start(plan(*CHAIN))
    yield made
    await nothing_is_left(made)
    await made.close()


WAYS = pytest.mark.parametrize("served", ["beside", "elsewhere"], indirect=True)


async def ask(served: Served, number: int) -> int:
    """Ask the application for a number, and return the status of the answer."""
    tensor = {"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [number, 1]}
    return (await served.infer("app", {"inputs": [tensor]})).status_code


@WAYS
@pytest.mark.parametrize("name", ["m", "n"])
async def test_a_stage_runs_once_more_when_its_gpulet_ends_and_not_twice(served: Served, name: str) -> None:
    gpulet, times = served.gpulets[name], 1 if name == "m" else 2
    runs = gpulet.runs
    for number, ends in ((5, 1), (7, 2)):
        gpulet.hold = True
        asked = asyncio.create_task(ask(served, number))
        for count in range(1, ends + 1):
            await until(lambda: runs[times * number] == count)  # noqa: B023
            gpulet.die()
            gpulet.hold = count < ends
            await gpulet.start()
        assert await asked == (200 if ends == 1 else 503)
        assert runs[times * number] == 2
    others = served.gpulets["n" if name == "m" else "m"].runs
    assert max(others.values()) == 1


@WAYS
@pytest.mark.parametrize("seed", range(2))
async def test_each_stage_of_a_request_runs_at_most_once_more(served: Served, seed: int) -> None:
    """Gpu-lets and dispatchers end again and again, mostly with batches that are under way."""
    dice = random.Random(seed)
    ends: Counter[int] = Counter()

    async def count(number: int) -> None:
        ends[await ask(served, number)] += 1

    asked = []
    for number in range(1, ASKED + 1):
        asked.append(asyncio.create_task(count(number)))
        await asyncio.sleep(dice.choice((0.0, 0.002, 0.01)))
        gpulet = served.gpulets[dice.choice("mn")]
        match dice.randrange(6):
            case 0 | 1:
                gpulet.hold = True
            case 2:
                gpulet.die()
                await gpulet.start()
            case 3 if served.server is not None and number % 5 == 0:
                await served.end_dispatcher()
                await served.serve(plan(*CHAIN))
            case _:
                gpulet.hold = False
                gpulet.release()
    for gpulet in served.gpulets.values():
        gpulet.hold = False
        gpulet.die()
        await gpulet.start()
    await asyncio.gather(*asked)
    assert sum(ends.values()) == ASKED
    assert {200} <= set(ends) <= {200, 503}, ends
    for name in "mn":
        counts = Counter(served.gpulets[name].runs.values())
        assert max(counts) <= 2, (name, counts)
