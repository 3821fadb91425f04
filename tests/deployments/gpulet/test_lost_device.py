"""A sticky error of the device in one of two gpu-lets: nobody's request is lost, and the process goes at once."""

import asyncio
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tenuto.batching.core.build import from_plan
from tenuto.batching.registry import make_scheduler
from tenuto.deployments.dispatch.dispatcher import Dispatcher
from tenuto.deployments.gpulet import replica as replica_module
from tenuto.deployments.gpulet import worker as worker_module
from tenuto.deployments.gpulet.executors.torch_executor import TorchExecutor
from tenuto.deployments.gpulet.replica import LocalReplica
from tenuto.deployments.serve.deployment import Deployment
from tenuto.deployments.wire.answers import Refused
from tenuto.outcome import Outcome
from tenuto.placement import Plan
from tests.instruments.asking import answer, outputs, submit, until
from tests.instruments.live import PATIENCE_S

LATENCY = {"alpha_ms": 1.0, "beta_ms": 6.0}
PLAN = Plan.from_data(
    {
        "policy": {"name": "test"},
        "gpus": [{"id": "n0/0", "type": "cpu"}, {"id": "n0/1", "type": "cpu"}],
        "gpulets": [
            {"id": f"n0/{i}/a", "gpu": f"n0/{i}", "models": [{"name": "m", "batch_size": 2, "latency": LATENCY}]}
            for i in range(2)
        ],
        "models": [
            {
                "name": "m",
                "source": "tests.instruments.own_models:scale",
                "rate_rps": 100,
                "slo_ms": 30_000,
                "latency": LATENCY,
            }
        ],
    }
)
STICKY = "cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"


class Device(TorchExecutor):
    """Computes on the CPU, says that it is CUDA, and can be lost."""

    def __init__(self) -> None:
        super().__init__("cpu", cores=1)
        self.device = "cuda:0 NVIDIA H200"
        self.is_lost = False
        self.ran = 0

    def run(self, *arguments: Any) -> Any:
        self.ran += 1
        if self.is_lost:
            raise RuntimeError(STICKY)
        return super().run(*arguments)


class Served:
    """The gpu-lets of `PLAN` in this process, each with an executor that `make` makes, and their dispatcher. `exits`:
    the codes with which they would have ended the process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, make: Callable[[], TorchExecutor]) -> None:
        self.exits: list[int] = []
        self.executors: list[Any] = []
        self.gpulets: dict[str, LocalReplica] = {}
        self.dispatcher = Dispatcher(
            lambda plan, network: make_scheduler("eager", from_plan(plan, network), {}),
            lambda gpulet_id: self.gpulets[gpulet_id].endpoint,
        )
        monkeypatch.setattr(LocalReplica, "end_process", staticmethod(self.exits.append))

        def made(_: Any) -> TorchExecutor:
            self.executors.append(make())
            return self.executors[-1]

        monkeypatch.setattr(replica_module, "make_executor", made)

    async def start(self) -> list[Any]:
        """Return the executors once all gpu-lets are ready."""
        for application in Deployment(plan=PLAN, executor="torch").config().gpulets:
            assert application.spec is not None
            replica = await LocalReplica.start(application.spec, application.user_config)
            self.gpulets[application.spec.gpulet] = replica
        self.dispatcher.apply(PLAN)
        await until(self.dispatcher.is_ready)
        return self.executors

    async def close(self) -> None:
        await self.dispatcher.close()
        for gpulet in self.gpulets.values():
            await gpulet.close()


async def test_on_a_node_with_notice_a_gpulet_serves_on_while_a_dispatcher_uses_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    served = Served(monkeypatch, Device)
    await served.start()
    ending = served.gpulets["n0/0/a"]
    for ends_s in (0.0, time.time() + 0.5):  # no notice, and no time left
        monkeypatch.setattr(replica_module, "node_ends_s", lambda ends_s=ends_s: ends_s)
        await ending.outlast_notice()

    def broken() -> float:
        raise ConnectionError("Ray does not answer")

    monkeypatch.setattr(replica_module, "node_ends_s", broken)
    await ending.outlast_notice()
    monkeypatch.setattr(replica_module, "node_ends_s", lambda: time.time() + 3600.0)
    outlasting = [asyncio.create_task(gpulet.outlast_notice()) for gpulet in served.gpulets.values()]
    x = np.ones(4, np.float32)
    assert [(await answer(submit(served.dispatcher, "m", [x.tobytes()]))).outcome for _ in range(8)] == [Outcome.OK] * 8
    assert not any(task.done() for task in outlasting)
    await served.dispatcher.close()
    await asyncio.wait_for(asyncio.gather(*outlasting), PATIENCE_S)
    await served.close()


@pytest.mark.parametrize("is_sticky", [True, False])
async def test_batches_of_a_lost_device_run_elsewhere_and_its_process_ends(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, is_sticky: bool
) -> None:
    monkeypatch.setattr(worker_module, "loses_device", lambda error: is_sticky and STICKY in str(error))
    served = Served(monkeypatch, Device)
    exits, dispatcher = served.exits, served.dispatcher
    broken, sound = await served.start()
    broken.is_lost = True
    x = np.ones(4, np.float32)
    answers = [await answer(f) for f in [submit(dispatcher, "m", [x.tobytes()]) for _ in range(8)]]
    assert broken.ran > 0
    if is_sticky:
        assert {found.outcome for found in answers} == {Outcome.OK}
        assert all(outputs(found)["y"] == [2.0] * 4 for found in answers)
        tried = broken.ran
        assert tried == 1  # whatever else waited there was handed back unrun
        await until(lambda: exits == [1])
        again = await answer(submit(dispatcher, "m", [x.tobytes()]))
        assert again.outcome is Outcome.OK
        assert broken.ran == tried  # an idle gpu-let that cannot run attracts nothing
    else:  # one kernel was refused: those requests failed, and the gpu-let stays
        assert {found.outcome for found in answers} == {Outcome.OK, Outcome.FAILED}
        for found in answers:
            if isinstance(found, Refused):  # what the model said is in the log, under the name that the client got
                assert STICKY not in found.reason
                incident = found.reason.split()[-1]
                assert any(incident in line.message and STICKY in str(line.exc_info) for line in caplog.records)
        assert sound.ran > 0
        broken.is_lost = False
        assert (await answer(submit(dispatcher, "m", [x.tobytes()]))).outcome is Outcome.OK
        assert not exits
    await served.close()
