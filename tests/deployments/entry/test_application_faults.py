"""Faults amid requests of applications: plans, models, functions and dispatchers that change or end while graphs are
under way. Every request ends once, by its deadline, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections import Counter
from collections.abc import AsyncIterator

import pytest

from tenuto.deployments.entry.service import process_pool
from tenuto.profiles.networks.catalogue import ModelSignature, TensorSignature
from tests.deployments.entry.test_application_functions import FUNCTIONS, ask, fan_out, with_hooks, works_again
from tests.deployments.entry.test_applications import CHAIN, Gpulets, Served, nothing_is_left, outputs, plan
from tests.instruments.asking import until
from tests.instruments.fake_gpulet import SIGNATURE, make_plan
from tests.instruments.live import PATIENCE_S
from tests.instruments.replica_processes import functions_of
from tests.instruments.seeds import seeds

pytestmark = pytest.mark.usefixtures("quick_workers")


def processes_of_functions() -> set[int]:
    """The processes beside this one that run functions."""
    return set(functions_of(os.getpid()))


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that ended are replaced at once."""
    monkeypatch.setattr(process_pool, "AGAIN_S", 0.01)


@pytest.fixture
async def served(request: pytest.FixtureRequest) -> AsyncIterator[Served]:
    made = Served(is_beside=getattr(request, "param", "beside") == "beside")
    await made.start(fan_out())
    yield made
    await nothing_is_left(made)
    await made.close()
    await until(lambda: not processes_of_functions())


WAYS = pytest.mark.parametrize("served", ["beside", "elsewhere"], indirect=True)


async def change_tensors(served: Served, name: str, signature: ModelSignature) -> None:
    """Give a model other tensors, as a gpu-let has them that comes in the place of another."""
    gpulet = served.gpulets[name]
    gpulet.SIGNATURES = {**Gpulets.SIGNATURES, name: signature}  # type: ignore[misc]
    gpulet.die()
    await gpulet.start()
    dispatching = served.entry.service.dispatching
    await until(lambda: dispatching.is_ready(name) and dispatching.signature(name) == signature)
    await asyncio.sleep(0)


SCALAR = ModelSignature(
    "tensor", (TensorSignature("x", "float32", (1,)),), (TensorSignature("y", "float32", (1,)),), platform="fake"
)


async def test_a_request_whose_next_model_takes_other_tensors_since_is_told_so(served: Served) -> None:
    """A gpu-let relies on the shapes: what does not fit would fail the others of its batch."""
    await served.serve(plan(*CHAIN))
    served.gpulets["m"].hold = True
    asked = asyncio.create_task(served.infer("app"))
    await asyncio.wait_for(served.gpulets["m"].arrived.wait(), PATIENCE_S)
    await change_tensors(served, "n", SCALAR)
    served.gpulets["m"].hold = False
    served.gpulets["m"].release()
    answer = await asked
    assert answer.status_code == 503
    assert answer.json()["error"].startswith("stage 'n': 'n' takes other tensors since its plan changed")
    assert served.gpulets["n"].sizes == []
    answer = await served.infer("app")
    assert (answer.status_code, "does not fit input 'x'" in answer.json()["error"]) == (503, True)
    await change_tensors(served, "n", SIGNATURE)
    assert outputs(await served.infer("app")) == {"y": ([1, 2], [4.0, 8.0])}


async def test_requests_under_way_keep_their_functions_when_a_model_changes(served: Served) -> None:
    """The functions of later requests are for its new tensors."""
    await works_again(served)
    served.gpulets["m"].hold = True
    served.gpulets["m"].arrived.clear()
    before = asyncio.create_task(ask(served, 1.0, 1.0))
    await asyncio.wait_for(served.gpulets["m"].arrived.wait(), PATIENCE_S)
    running = processes_of_functions()
    labelled = ModelSignature("tensor", SIGNATURE.inputs, SIGNATURE.outputs, labels=("a", "b"), platform="fake")
    await change_tensors(served, "n", labelled)
    await until(lambda: len(processes_of_functions()) == 4)
    served.gpulets["m"].hold = False
    served.gpulets["m"].release()
    assert outputs(await before) == {"y": ([1, 1, 2], [4.0, 4.0])}
    await until(lambda: not running & processes_of_functions())
    await works_again(served)


@pytest.mark.parametrize("way", ["predict", "infer"])
async def test_code_that_runs_when_the_plan_drops_it_keeps_no_request_waiting(served: Served, way: str) -> None:
    """Hooks go with the plan, and with them what they were at. Functions stay until the last request has ended."""
    await served.serve(with_hooks(fan_out()))
    async with asyncio.timeout(PATIENCE_S):
        while (await served.client.post("/predict/m", content=b"[1, 2]")).status_code != 200:
            await asyncio.sleep(0.01)
    if way == "predict":
        asked = asyncio.create_task(served.client.post("/predict/m", content=b"spin"))
        await asyncio.sleep(0.05)  # whether it has begun or waits: it is answered
    else:
        served.gpulets["m"].arrived.clear()
        asked = asyncio.create_task(ask(served, -2.0, 1.0, X_SLO_Ms="1500"))
        await asyncio.wait_for(served.gpulets["m"].arrived.wait(), PATIENCE_S)
    await served.serve(plan(*CHAIN))
    answer = await asked
    expected = (503, "the hooks of 'm' have changed. Retry.") if way == "predict" else (504, "has not returned by")
    assert (answer.status_code, expected[1] in answer.json()["error"]) == (expected[0], True), answer.text
    await until(lambda: not processes_of_functions())


@WAYS
@pytest.mark.parametrize("seed", seeds(1, 2))
async def test_whatever_fails_amid_graphs_every_request_ends_once_and_nothing_is_left(
    served: Served, seed: int
) -> None:
    """Plans and tensors change, functions, gpu-lets and dispatchers end, batches are held and fail, clients leave."""
    dice = random.Random(seed)
    await works_again(served)
    ends: Counter[int] = Counter()
    plans = [
        *(fan_out(), fan_out(most=3), fan_out(outputs=f"{FUNCTIONS}:words"), plan(*CHAIN)),
        make_plan(("m", ("m",)), slo_ms=60_000.0),  # the model of the next stage is gone, and the application
    ]
    labelled = ModelSignature("tensor", SIGNATURE.inputs, SIGNATURE.outputs, labels=("a", "b"), platform="fake")

    async def keep(x: float, slo_ms: str) -> None:
        ends[(await ask(served, x, 3.0, X_SLO_Ms=slo_ms)).status_code] += 1

    async def befall() -> None:
        gpulet = served.gpulets[dice.choice("mn")]
        match dice.randrange(8):
            case 0:
                for each in served.gpulets.values():  # a gateway is ready when no gpu-let is at what it ran before
                    each.hold = False
                    each.release()
                await served.serve(dice.choice(plans))
            case 1 if running := processes_of_functions():
                os.killpg(dice.choice(sorted(running)), signal.SIGKILL)
            case 2:
                gpulet.die()
                gpulet.SIGNATURES = {**Gpulets.SIGNATURES, "n": dice.choice((SIGNATURE, SCALAR, labelled))}  # type: ignore[misc]
                await gpulet.start()
            case 3:
                gpulet.hold = True
            case 4:
                gpulet.error = dice.choice((None, "broken"))
            case 5:
                dice.choice(asked).cancel()
            case 6 if served.server is not None:
                await served.end_dispatcher()
                await served.serve(dice.choice(plans))
            case _:
                gpulet.hold = False
                gpulet.release()

    asked: list[asyncio.Task[None]] = []
    for _ in range(60):
        for _ in range(dice.choice((1, 1, 4))):
            asked.append(asyncio.create_task(keep(dice.choice((1.0, 1.0, -1.0, -5.0)), dice.choice(("300", "60000")))))
        await asyncio.sleep(dice.choice((0.0, 0.002, 0.02)))
        await befall()
    for gpulet in served.gpulets.values():
        gpulet.hold, gpulet.error, gpulet.SIGNATURES = False, None, Gpulets.SIGNATURES  # type: ignore[misc]
        gpulet.die()  # what it held is tried once more
        await gpulet.start()
    await asyncio.gather(*asked, return_exceptions=True)
    assert set(ends) <= {200, 404, 429, 500, 503, 504}, ends
    await served.serve(fan_out())
    await works_again(served)
    await nothing_is_left(served)
    await until(lambda: len(processes_of_functions()) == 2)
