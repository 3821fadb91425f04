"""Merged programs through the dispatcher: one queue, one frame, and every request answered by its own model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import msgspec
import numpy as np
import pytest

from tenuto.batching.core.build import from_plan
from tenuto.batching.core.scheduler import Scheduler
from tenuto.batching.core.system import NetworkDelay
from tenuto.batching.registry import make_scheduler
from tenuto.deployments.dispatch.dispatcher import Dispatcher
from tenuto.deployments.gpulet.executors.emulated import EmulatedExecutor
from tenuto.deployments.gpulet.replica import LocalReplica
from tenuto.deployments.serve.deployment import Deployment
from tenuto.deployments.serve.user_config import MemberEntry, ProgramEntry
from tenuto.deployments.wire.answers import Answer
from tenuto.deployments.wire.tensors import Blocks
from tenuto.outcome import Outcome
from tenuto.placement import Plan
from tenuto.profiles import LatencyTable
from tenuto.profiles.networks.catalogue import ModelSignature
from tests.instruments.asking import outputs, submit, until
from tests.instruments.fake_gpulet import FakeGpulet, finder
from tests.instruments.live import PATIENCE_S

# Two models whose inputs and outputs differ in number, type and size.
RAW: dict[str, Any] = {
    "a": {
        "inputs": [{"name": "x", "dtype": "float32", "shape": [2]}, {"name": "k", "dtype": "int64", "shape": [1]}],
        "outputs": [{"name": "y", "dtype": "float32", "shape": [2]}],
    },
    "b": {
        "inputs": [{"name": "x", "dtype": "float32", "shape": [3]}],
        "outputs": [{"name": "s", "dtype": "float32", "shape": [1]}, {"name": "z", "dtype": "float32", "shape": [3]}],
    },
}
SIGNATURES = {name: msgspec.convert({"kind": "tensor", **raw}, ModelSignature) for name, raw in RAW.items()}


class MergedGpulet(FakeGpulet):
    """Runs a and b, merged if it holds `a+b`: a gives x + k, b the sum of x and 10 x."""

    def largest(self) -> int:
        return 8

    def signatures(self) -> dict[str, ModelSignature]:
        members = {name for program in self.programs for name in program.split("+")}
        return {name: SIGNATURES[name] for name in members}

    def compute(self, model: str, blocks: Blocks) -> dict[str, np.ndarray]:
        x = np.concatenate(blocks["x"])
        if model == "a":
            return {"y": (x + np.concatenate(blocks["k"])).astype(np.float32)}
        return {"s": x.sum(axis=1, keepdims=True), "z": x * 10}


def make_plan(*, merged: bool, batch_size: int = 4, slo_ms: float = 60_000.0) -> Plan:
    replicas = [{"name": n, "batch_size": batch_size, "latency": {"alpha_ms": 1, "beta_ms": 1}} for n in "ab"]
    gpulet = {"id": "g", "gpu": "g", "models": replicas, "merge": [["a", "b"]] if merged else []}
    return Plan.from_data(
        {
            "policy": {"name": "test"},
            "gpus": [{"id": "g", "type": "v100"}],
            "gpulets": [gpulet],
            "models": [{"name": n, "source": "own:factory", "rate_rps": 10, "slo_ms": slo_ms} for n in "ab"],
        }
    )


def request(model: str, value: float) -> list[bytes]:
    if model == "a":
        return [np.array([value, value + 0.5], np.float32).tobytes(), np.array([7], np.int64).tobytes()]
    return [np.array([value, 1, 2], np.float32).tobytes()]


def expected(model: str, value: float) -> dict[str, list[float]]:
    if model == "a":
        return {"y": [value + 7, value + 7.5]}
    return {"s": [value + 3], "z": [value * 10, 10, 20]}


def ok(found: Answer) -> dict[str, list[float]]:
    assert found.outcome is Outcome.OK, found
    return outputs(found)


def _deferred(plan: Plan, network: NetworkDelay) -> Scheduler:
    return make_scheduler("symphony", from_plan(plan, network))


Start = Callable[[Plan, FakeGpulet], Awaitable[Dispatcher]]


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    running: list[tuple[Dispatcher, FakeGpulet]] = []

    async def begin(plan: Plan, gpulet: FakeGpulet) -> Dispatcher:
        dispatcher = Dispatcher(_deferred, finder({gpulet.id: gpulet}))
        running.append((dispatcher, gpulet))
        await gpulet.start()
        dispatcher.apply(plan)
        await until(lambda: dispatcher.is_ready() and gpulet.is_connected)
        return dispatcher

    yield begin
    for dispatcher, gpulet in running:
        await dispatcher.close()
        gpulet.die()


async def test_a_joint_batch_answers_every_request_with_its_own_models_outputs(start: Start) -> None:
    gpulet = MergedGpulet("g", ("a+b",))
    dispatcher = await start(make_plan(merged=True), gpulet)
    asked = [("b", 1.0), ("a", 2.0), ("b", 3.0), ("a", 4.0), ("a", 5.0), ("b", 6.0), ("b", 8.0), ("b", 9.0)]
    futures = [submit(dispatcher, model, request(model, value)) for model, value in asked]
    answers = [await asyncio.wait_for(future, PATIENCE_S) for future in futures]
    assert [ok(answer) for answer in answers] == [expected(*each) for each in asked]
    assert [answer.batch_size for answer in answers] == [8] * 8  # full, with more of b than b was planned for
    assert gpulet.messages[0].members == [("a", 3), ("b", 5)]
    counters = dispatcher.accounts.counters
    assert [(counters[n].ok, counters[n].batches, counters[n].batched) for n in "ab"] == [(3, 1, 3), (5, 1, 5)]
    models = (await dispatcher.status()).models
    assert list(models) == ["a", "b"]
    assert models["b"].execution_p50_ms == 1.0


async def test_a_batch_may_hold_one_member_only(start: Start) -> None:
    gpulet = MergedGpulet("g", ("a+b",))
    dispatcher = await start(make_plan(merged=True, batch_size=1), gpulet)
    answers = await asyncio.gather(*(submit(dispatcher, "b", request("b", float(v))) for v in range(2)))
    assert [ok(answer) for answer in answers] == [expected("b", float(v)) for v in range(2)]
    assert gpulet.messages[0].members == [("b", 2)]
    assert dispatcher.accounts.counters["a"].batches == 0


async def test_members_keep_their_own_deadlines_and_queues_in_the_status(start: Start) -> None:
    gpulet = MergedGpulet("g", ("a+b",), hold=True)
    dispatcher = await start(make_plan(merged=True, batch_size=2), gpulet)
    gone = submit(dispatcher, "b", request("b", 4.0), 0.0)
    assert (await asyncio.wait_for(gone, PATIENCE_S)).outcome is Outcome.EXPIRED
    futures = [submit(dispatcher, "a", request("a", 1.0)), submit(dispatcher, "a", request("a", 2.0))]
    assert await dispatcher.waiting() == {"a": 2, "b": 0}
    first = submit(dispatcher, "b", request("b", 3.0))
    assert await dispatcher.waiting() == {"a": 2, "b": 1}
    last = submit(dispatcher, "b", request("b", 5.0))  # fills the batch
    await asyncio.wait_for(gpulet.arrived.wait(), PATIENCE_S)
    gpulet.release()
    assert ok(await asyncio.wait_for(last, PATIENCE_S)) == expected("b", 5.0)
    await asyncio.wait_for(asyncio.gather(first, *futures), PATIENCE_S)
    assert dispatcher.accounts.counters["b"].expired == 1
    assert await dispatcher.waiting() == {"a": 0, "b": 0}


async def test_a_new_plan_without_the_group_moves_waiting_requests_and_answers_running_ones(start: Start) -> None:
    gpulet = MergedGpulet("g", ("a+b",), hold=True)
    dispatcher = await start(make_plan(merged=True, batch_size=1), gpulet)
    running = [submit(dispatcher, model, request(model, float(v))) for v, model in enumerate("ab")]
    await asyncio.wait_for(gpulet.arrived.wait(), PATIENCE_S)
    waiting = [submit(dispatcher, model, request(model, float(v))) for v, model in enumerate("ab", 10)]
    dispatcher.apply(make_plan(merged=False, batch_size=1))
    gpulet.load("a", "b")
    gpulet.hold = False
    gpulet.release()
    answers = [await asyncio.wait_for(future, PATIENCE_S) for future in (*running, *waiting)]
    assert [ok(answer) for answer in answers] == [
        expected("a", 0.0),
        expected("b", 1.0),
        expected("a", 10.0),
        expected("b", 11.0),
    ]
    assert [[message.program] for message in gpulet.messages[1:]] == [
        [model for model, _ in message.members] for message in gpulet.messages[1:]
    ]
    assert {message.program for message in gpulet.messages[1:]} == {"a", "b"}


async def test_a_member_that_leaves_the_plan_fails_and_the_other_goes_on(start: Start) -> None:
    gpulet = MergedGpulet("g", ("a+b",))
    dispatcher = await start(make_plan(merged=True), gpulet)
    left = submit(dispatcher, "a", request("a", 1.0))
    stays = submit(dispatcher, "b", request("b", 2.0))
    data = make_plan(merged=False, batch_size=1).to_data()
    data["models"] = data["models"][1:]
    data["gpulets"][0]["models"] = data["gpulets"][0]["models"][1:]
    dispatcher.apply(Plan.from_data(data))
    answer = await asyncio.wait_for(left, PATIENCE_S)
    assert (answer.outcome, "removed from the plan" in answer.reason) == (Outcome.FAILED, True)
    assert not dispatcher.is_ready()  # it still holds a+b
    gpulet.load("b")
    assert ok(await asyncio.wait_for(stays, PATIENCE_S)) == expected("b", 2.0)


async def test_a_gpulet_is_used_once_it_holds_the_merged_program(start: Start) -> None:
    gpulet = MergedGpulet("g", ("a", "b"))
    dispatcher = await start(make_plan(merged=False), gpulet)
    dispatcher.apply(make_plan(merged=True, batch_size=1))
    assert not dispatcher.is_ready()
    gpulet.load("a+b")
    await until(dispatcher.is_ready)
    answers = await asyncio.gather(*(submit(dispatcher, model, request(model, 1.0)) for model in "ab"))
    assert [ok(answer) for answer in answers] == [expected(model, 1.0) for model in "ab"]


async def test_a_joint_batch_that_raises_an_error_is_run_again_in_halves(start: Start) -> None:
    gpulet = MergedGpulet("g", ("a+b",), hold=True)
    dispatcher = await start(make_plan(merged=True, batch_size=1), gpulet)
    futures = [submit(dispatcher, model, request(model, 1.0)) for model in "ab"]
    await asyncio.wait_for(gpulet.arrived.wait(), PATIENCE_S)
    gpulet.error, gpulet.hold = "broken", False
    gpulet.release()
    answers = [await asyncio.wait_for(future, PATIENCE_S) for future in futures]
    assert [(a.outcome, a.reason) for a in answers] == [(Outcome.FAILED, "broken")] * 2
    assert [dispatcher.accounts.counters[n].failed for n in "ab"] == [1, 1]
    assert [message.members for message in gpulet.messages] == [[("a", 1), ("b", 1)], [("a", 1)], [("b", 1)]]


async def test_a_real_gpulet_emulates_a_group_as_the_serve_config_tells_it() -> None:
    data = make_plan(merged=True, batch_size=1).to_data()
    for spec in data["models"]:
        spec["options"] = RAW[spec["name"]]
    plan = Plan.from_data(data)
    (application,) = Deployment(plan=plan, executor="emulated").config().gpulets
    replica = await LocalReplica.start(application.spec, application.user_config)
    dispatcher = Dispatcher(_deferred, lambda _: replica.endpoint)
    try:
        dispatcher.apply(plan)
        await until(dispatcher.is_ready)
        futures = [submit(dispatcher, model, request(model, 1.0)) for model in "ab"]
        first, second = [await asyncio.wait_for(future, PATIENCE_S) for future in futures]
        assert ok(first) == {"y": [0.0, 0.0]}
        assert ok(second) == {"s": [0.0], "z": [0.0, 0.0, 0.0]}
        assert (first.batch_size, first.emulated, first.gpulet) == (2, True, "g")
        (described,) = dispatcher.gpulets()
        assert described.models == {"a+b": 2}
        assert list(described.merged) == ["a+b"]
        assert described.batches == 1
    finally:
        await dispatcher.close()
        await replica.close()


def test_the_serve_config_loads_a_group_in_place_of_its_members() -> None:
    def entries(plan: Plan) -> tuple[ProgramEntry, ...]:
        (application,) = Deployment(plan=plan).config().gpulets
        return application.user_config.programs

    (group,) = entries(make_plan(merged=True))
    assert (group.name, group.batch_size) == ("a+b", 8)
    assert group.latency is not None
    assert group.latency.at(8) == 11.0  # 4 + 1 of one, 3 of the other
    assert [member.name for member in group.members] == ["a", "b"]
    assert [entry.name for entry in entries(make_plan(merged=False))] == ["a", "b"]


def test_an_emulated_group_takes_the_groups_time_and_answers_each_member() -> None:
    executor = EmulatedExecutor("v100")
    members = tuple(MemberEntry(name=n, options=RAW[n]) for n in "ab")
    latency = LatencyTable(points={1: 1.0, 4: 2.5})
    executor.load(ProgramEntry(name="a+b", batch_size=4, members=members, latency=latency, slowdown=2.0), range(1, 5))
    answers, time_ms = executor.run("a+b", {}, {"a": 3, "b": 1})
    assert time_ms >= 5.0
    assert {name: {k: v.shape for k, v in arrays.items()} for name, (arrays,) in answers.items()} == {
        "a": {"y": (3, 2)},
        "b": {"s": (1, 1), "z": (1, 3)},
    }
    assert executor.signature("b") == SIGNATURES["b"]
    assert list(executor.facts()) == ["a+b"]
    executor.unload("a+b")
    assert executor.facts() == {}
    with pytest.raises(KeyError):
        executor.signature("a")
