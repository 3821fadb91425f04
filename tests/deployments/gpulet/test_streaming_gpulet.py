"""Real gpu-lets that stream, and one that does not, with their sockets, without Ray around them."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest

from tenuto.batching.core.build import from_plan
from tenuto.batching.registry import make_scheduler
from tenuto.deployments.dispatch.dispatcher import Dispatcher
from tenuto.deployments.dispatch.in_flight import Request
from tenuto.deployments.gpulet.replica import LocalReplica
from tenuto.deployments.serve.deployment import Deployment
from tenuto.deployments.wire.answers import Executed, Refused
from tenuto.deployments.wire.status import GpuletMode
from tenuto.deployments.wire.tensors import InputPart
from tenuto.errors import InvalidInputError
from tenuto.outcome import Outcome
from tenuto.placement import Plan
from tests.instruments.asking import answer, submit, until

OWN = "tests.instruments.own_models"
LATENCY = {"alpha_ms": 1.0, "beta_ms": 6.0}


async def start(plan: Plan, executor: str) -> LocalReplica:
    """Start the plan's only gpu-let as its Serve config says."""
    (application,) = Deployment(plan=plan, executor=executor).config().gpulets  # type: ignore[arg-type]
    return await LocalReplica.start(application.spec, application.user_config)


def make_plan(gpu: str = "v100", **model: Any) -> Plan:
    replica = {"name": "m", "batch_size": 4, "latency": LATENCY, "latency_ms": 10.0}
    return Plan.from_data(
        {
            "policy": {"name": "test"},
            "gpus": [{"id": "n0/0", "type": gpu}],
            "gpulets": [{"id": "n0/0/a", "gpu": "n0/0", "models": [replica]}],
            "models": [{"name": "m", "rate_rps": 400, "slo_ms": 60_000, "latency": LATENCY, **model}],
            "streaming": True,
        }
    )


@pytest.fixture
async def serving(request: pytest.FixtureRequest) -> AsyncIterator[tuple[Dispatcher, LocalReplica]]:
    plan, executor, scheduler = request.param
    gpulet = await start(plan, executor)
    dispatcher = Dispatcher(
        lambda plan, network: make_scheduler(scheduler, from_plan(plan, network), {}), lambda _: gpulet.endpoint
    )
    dispatcher.apply(plan)
    await until(dispatcher.is_ready)
    yield dispatcher, gpulet
    await dispatcher.close()
    await gpulet.close()


class Took:
    """Takes answers, and keeps when each batch ran."""

    def __init__(self) -> None:
        self.requests, self.batches = 0, dict[float, Executed]()

    def executed(self, request: Request, executed: Executed, row: int) -> None:
        del request, row
        self.requests += 1
        self.batches[executed.started_ms] = executed

    def refused(self, request: Request, refused: Refused) -> None:
        raise AssertionError(refused)


EMULATED = make_plan(options={"copy_in_ms": 0.4, "copy_out_ms": 0.1}, longest_hold_ms=100.0)


@pytest.mark.parametrize("serving", [(EMULATED, "emulated", s) for s in ("deferred", "eager")], indirect=True)
async def test_an_emulated_gpulet_reports_where_the_time_went(serving: tuple[Dispatcher, LocalReplica]) -> None:
    dispatcher, _ = serving
    took = Took()
    for _ in range(120):
        request = dispatcher.admit("m", took)
        dispatcher.start(request, [InputPart(np.zeros(1, np.float32).tobytes())])
        await asyncio.sleep(0.002)
    await until(lambda: took.requests == 120)
    for executed in took.batches.values():  # 1.0 a request in all, 0.5 of it copies
        assert executed.execution_ms == pytest.approx(6.0 + 0.5 * executed.batch_size, abs=0.01)
    (described,) = dispatcher.gpulets()
    assert described.mode == GpuletMode(share=False, streaming=True, programs={"m": "emulated"})
    for (_, before), (begun_ms, _) in itertools.pairwise(sorted(took.batches.items())):
        assert begun_ms >= before.started_ms + before.execution_ms - 1e-3
    assert dispatcher.way.delay().data_ms_per_request >= 0.5 - 1e-6


PLAIN = Plan.from_data({**EMULATED.to_data(), "streaming": False})


@pytest.mark.parametrize("serving", [(PLAIN, "emulated", "eager")], indirect=True)
async def test_where_the_plan_does_not_stream_copies_are_part_of_the_execution(
    serving: tuple[Dispatcher, LocalReplica],
) -> None:
    dispatcher, _ = serving
    for future in [submit(dispatcher, "m", [np.zeros(1, np.float32).tobytes()]) for _ in range(40)]:
        found = await answer(future)
        assert found.execution_ms >= 6.0 + found.batch_size - 0.01  # a half of each request more than what streams
    (described,) = dispatcher.gpulets()
    assert described.mode == GpuletMode(share=False, streaming=False, programs={"m": "emulated"})
    assert dispatcher.way.delay().data_ms_per_request == 0.0


@pytest.mark.parametrize("serving", [(make_plan("cpu", source=f"{OWN}:scale"), "torch", "eager")], indirect=True)
async def test_on_a_cpu_every_request_gets_its_own_answer(serving: tuple[Dispatcher, LocalReplica]) -> None:
    dispatcher, _ = serving
    rows = [np.full(4, n, np.float32) for n in range(40)]
    futures = [submit(dispatcher, "m", [row.tobytes()]) for row in rows]
    for row, future in zip(rows, futures, strict=True):
        found = await answer(future)
        assert found.outcome is Outcome.OK
        np.testing.assert_array_equal(np.frombuffer(found.outputs[0].data, np.float32), row * 2)
    (described,) = dispatcher.gpulets()
    assert described.mode == GpuletMode(share=False, streaming=True, programs={"m": "plain"})
    assert described.sm_count is None


@pytest.mark.parametrize("serving", [(make_plan("cpu", source=f"{OWN}:scale"), "torch", "eager")], indirect=True)
async def test_models_change_between_batches_and_a_failing_batch_fails_alone(
    serving: tuple[Dispatcher, LocalReplica],
) -> None:
    dispatcher, gpulet = serving
    wrong = submit(dispatcher, "m", [b"\0" * 4])  # one number where there should be four
    found = await answer(wrong)
    assert found.outcome is Outcome.FAILED
    assert "running 'm' failed" in found.reason
    member = {"name": "m", "source": f"{OWN}:scale", "options": {"factor": 3.0}}
    await gpulet.reconfigure({"programs": [{"name": "m", "batch_size": 4, "members": [member]}]})
    right = await answer(submit(dispatcher, "m", [np.ones(4, np.float32).tobytes()]))
    assert np.frombuffer(right.outputs[0].data, np.float32).tolist() == [3.0] * 4


async def test_graphs_on_a_cpu_are_refused_while_loading() -> None:
    with pytest.raises(InvalidInputError, match=r"cuda_graphs.*need an NVIDIA GPU"):
        await start(make_plan("cpu", source=f"{OWN}:scale", options={"cuda_graphs": True}), "torch")
