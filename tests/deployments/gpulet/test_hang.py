"""A model whose forward never returns: its requests are answered when their deadline has passed, the other gpu-let
serves on, and the process ends so that another can start."""

import threading
from typing import Any

import numpy as np
import pytest

from tenuto.batching.core.build import from_plan
from tenuto.batching.registry import make_scheduler
from tenuto.deployments.dispatch import sent_batches
from tenuto.deployments.dispatch.dispatcher import Dispatcher
from tenuto.deployments.gpulet import replica as replica_module
from tenuto.deployments.gpulet.executors.torch_executor import TorchExecutor
from tenuto.deployments.serve.deployment import Deployment
from tenuto.deployments.wire.answers import Answer
from tenuto.outcome import Outcome
from tests.deployments.gpulet.test_lost_device import PLAN, Served
from tests.instruments.asking import X, answer, submit, until
from tests.instruments.fake_gpulet import FakeGpulet, finder, make_plan
from tests.instruments.live import PATIENCE_S


def _eager(plan: Any, network: Any) -> Any:
    return make_scheduler("eager", from_plan(plan, network), {})


class Hanging(TorchExecutor):
    """Computes on the CPU until it is told to hang."""

    def __init__(self) -> None:
        super().__init__("cpu", cores=1)
        self.goes_on = threading.Event()
        self.goes_on.set()
        self.ran = 0

    def run(self, *arguments: Any) -> Any:
        self.ran += 1
        self.goes_on.wait(PATIENCE_S)
        return super().run(*arguments)


async def test_a_process_whose_batch_never_comes_back_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_module, "HANGS_TIMES", 1.0)
    served = Served(monkeypatch, Hanging)
    exits, dispatcher = served.exits, served.dispatcher
    hanging, sound = await served.start()
    x = [np.ones(4, np.float32).tobytes()]
    assert [(await answer(submit(dispatcher, "m", x))).outcome for _ in range(4)] == [Outcome.OK] * 4
    assert not exits  # nothing hung, though the worker has been idle for longer than that
    hanging.goes_on.clear()
    impatient = Deployment(plan=PLAN, executor="torch", hangs_s=0.01).config().gpulets[0]
    await served.gpulets["n0/0/a"].reconfigure(impatient.user_config.to_data())
    held: list[Answer] = []
    while not held:  # a machine that stands still lets some expire before they are executed
        asked = [submit(dispatcher, "m", x, 300.0) for _ in range(8)]
        found = [await answer(future) for future in asked]
        assert {each.outcome for each in found} <= {Outcome.OK, Outcome.EXPIRED}
        held = [each for each in found if each.gpulet and each.outcome is Outcome.EXPIRED]
    assert {each.gpulet for each in held} == {"n0/0/a"}
    await until(lambda: exits[:1] == [1])  # the test's exit ends nothing
    ran = hanging.ran
    assert [(await answer(submit(dispatcher, "m", x))).outcome for _ in range(4)] == [Outcome.OK] * 4
    assert hanging.ran == ran
    assert sound.ran > 0
    hanging.goes_on.set()
    await served.close()


@pytest.mark.parametrize("size", [1, 4])
async def test_a_batch_that_does_not_come_back_answers_each_request_once_and_a_late_one_still_counts(
    monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    """Whatever holds it up: requests end when their own deadlines have passed, the gpu-let is used again once it has
    answered, and that answer changes nothing any more."""
    monkeypatch.setattr(sent_batches, "GIVEN_UP_S", 0.0)
    gpulet = FakeGpulet("a", ("m",), hold=True)
    await gpulet.start()
    dispatcher = Dispatcher(_eager, finder({"a": gpulet}))
    dispatcher.apply(make_plan(("a", ("m",)), batch_size=size))
    await until(dispatcher.is_ready)
    counters = dispatcher.accounts.counters["m"]
    futures = [submit(dispatcher, "m", X, 60.0) for _ in range(size - 1)] + [submit(dispatcher, "m", X, 60_000.0)]
    await until(lambda: len(gpulet.sizes) == 1)
    assert gpulet.sizes == [size] or gpulet.sizes == [1]
    short = futures[:-1]
    assert [(await answer(future)).outcome for future in short] == [Outcome.EXPIRED] * len(short)
    await until(lambda: any("hangs" in each.what for each in dispatcher.accounts.events))
    waiting = submit(dispatcher, "m", X)
    gpulet.hold = False
    gpulet.release()
    assert [(await answer(future)).outcome for future in (futures[-1], waiting)] == [Outcome.OK] * 2
    assert (counters.submitted, counters.ok, counters.expired) == (size + 1, 2, size - 1)
    await dispatcher.close()
    gpulet.die()
