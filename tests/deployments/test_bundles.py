"""Gateways and a dispatcher in other processes, here on one loop: same outcomes as with the dispatcher beside them."""

import asyncio
import itertools
import math
from collections.abc import AsyncIterator, Callable, Sequence

import numpy as np
import pytest

from tenuto.deployments.dispatch.dispatcher import Dispatcher
from tenuto.deployments.dispatch.dispatcher_process import BundleServer
from tenuto.deployments.entry.remote import RemoteDispatchers
from tenuto.deployments.serve.config import serve_config
from tenuto.deployments.serve.sub_clusters import cut_plan
from tenuto.deployments.wire.answers import Answer, OutputTensor
from tenuto.deployments.wire.bundles import (
    AnswerRow,
    Bundler,
    RequestRow,
    pack_answers,
    pack_requests,
    unpack_answers,
    unpack_requests,
)
from tenuto.errors import InvalidInputError
from tenuto.outcome import Outcome
from tenuto.placement import Plan

from .fakes import FakeGpulet, finder, make_plan
from .test_dispatcher import X, _answer, _deferred, _until


class Cluster:
    """One dispatcher behind sockets, and as many gateways as a test asks for."""

    def __init__(self, plan: Plan, gpulets: Sequence[FakeGpulet], max_queued: int) -> None:
        self.plan = plan
        self.gpulets = gpulets
        self.max_queued = max_queued
        self.server: BundleServer | None = None
        self.gateways: list[RemoteDispatchers] = []
        self.pids = itertools.count()

    async def start(self) -> None:
        dispatcher = Dispatcher(
            _deferred, finder({g.id: g for g in self.gpulets}), max_queued=self.max_queued, on_change=self._changed
        )
        self.server = BundleServer(dispatcher)
        self.address = await self.server.start()
        dispatcher.apply(self.plan)

    def _changed(self) -> None:
        if self.server is not None:
            self.server.announce()

    async def _describe(self) -> dict[str, object]:
        if self.server is None:
            raise LookupError("no dispatcher")
        return {"address": list(self.address), "token": self.server.token, **self.server.state()}

    async def gateway(self) -> RemoteDispatchers:
        gateway = RemoteDispatchers(lambda _name: self._describe)
        self.gateways.append(gateway)
        await gateway.apply(self.plan, {"0": [spec.name for spec in self.plan.models]}, wait_s=5.0)
        await _until(gateway.is_ready)
        return gateway

    async def kill(self) -> None:
        """What a killed process leaves: closed connections and nothing said."""
        assert self.server is not None
        server, self.server = self.server, None
        for listener in server._servers:
            listener.close()
        for gateway in list(server._gateways.values()):
            gateway.protocol._transport.abort()  # type: ignore[union-attr]
        await asyncio.sleep(0.01)
        await server.dispatcher.close()


Start = Callable[..., "asyncio.Future[Cluster]"]


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    running: list[Cluster] = []

    async def begin(plan: Plan, *gpulets: FakeGpulet, max_queued: int = 100) -> Cluster:
        for gpulet in gpulets:
            await gpulet.start()
        cluster = Cluster(plan, gpulets, max_queued)
        running.append(cluster)
        await cluster.start()
        return cluster

    yield begin  # type: ignore[misc]
    for cluster in running:
        for gateway in cluster.gateways:
            await gateway.close()
        if cluster.server is not None:
            await cluster.server.close(drain_s=0.0)
        for gpulet in cluster.gpulets:
            gpulet.die()


def test_bundles_survive_the_wire() -> None:
    rows = [
        RequestRow(1, "m", 20.5, "id", [b"abc", b"de"]),
        RequestRow(2, "n", -1.0, "", [b""]),
        RequestRow(1, "", 0.0, "", None),
    ]
    header, buffers = pack_requests(rows, 2.0)
    found = list(unpack_requests(header, memoryview(b"".join(buffers))))
    assert [(r.number, r.model, r.allowed_ms, r.parts and [bytes(p) for p in r.parts]) for r in found] == [
        (1, "m", 20.5, [b"abc", b"de"]),
        (2, "n", -1.0, [b""]),
        (1, "", 0.0, None),
    ]
    output = OutputTensor("y", "float32", (2,), memoryview(bytes(8)))
    answers = [
        AnswerRow(1, 5.0, Answer(Outcome.OK, [output], 4, "g", 1.0, 2.0, 3.0, True, start_ms=2.5)),
        AnswerRow(2, 0.0, Answer(Outcome.REJECTED, retry_after_s=0.5, reason="full")),
    ]
    header, buffers = pack_answers(answers)
    first, second = unpack_answers(header, memoryview(b"".join(buffers)))
    assert first == answers[0]
    assert (second.answer.outcome, second.answer.reason, second.answer.retry_after_s) == (Outcome.REJECTED, "full", 0.5)
    assert math.isnan(second.answer.start_ms)


async def test_what_comes_in_one_turn_of_the_loop_leaves_in_one_bundle() -> None:
    sent: list[list[int]] = []
    bundler: Bundler[int] = Bundler(sent.append)
    for number in range(5):
        bundler.add(number)
    assert sent == []
    await asyncio.sleep(0)
    bundler.add(5)
    bundler.add(6, 1 << 30)
    assert sent == [[0, 1, 2, 3, 4], [5, 6]]  # a large one does not wait
    bundler.add(7)
    bundler.drop()
    await asyncio.sleep(0)
    assert len(sent) == 2


async def test_requests_of_two_gateways_share_batches_and_get_their_own_outputs(start: Start) -> None:
    gpulet = FakeGpulet("a", ("m",))
    cluster = await start(make_plan(("a", ("m",)), batch_size=4), gpulet)
    gateways = [await cluster.gateway() for _ in range(2)]
    futures = [
        gateways[n % 2].submit("m", [np.array([n, 0], np.float32).tobytes()], client_id=f"r{n}") for n in range(8)
    ]
    answers = [await _answer(future) for future in futures]
    assert [a.outcome for a in answers] == [Outcome.OK] * 8
    assert [np.frombuffer(a.outputs[0].data, np.float32)[0] for a in answers] == [2.0 * n for n in range(8)]
    assert gpulet.batches == [4, 4]
    assert {name for header in gpulet.headers for name in header["requests"]} == {f"r{n}" for n in range(8)}
    found = await gateways[0].report("requests", id="r3", limit=5)
    assert [(e["id"], e["outcome"]) for e in found] == [("r3", "ok")]
    status = await gateways[1].report("status")
    assert (status["models"]["m"]["ok"], status["plan"]["policy"]["name"]) == (8, "test")
    assert await gateways[0].report("queue") == {"m": 0}


async def test_deadlines_rejections_and_errors_come_back(start: Start) -> None:
    gpulet = FakeGpulet("a", ("m",), hold=True)
    cluster = await start(make_plan(("a", ("m",))), gpulet, max_queued=1)
    gateway = await cluster.gateway()
    assert (await _answer(gateway.submit("m", X, -5.0))).outcome is Outcome.EXPIRED
    running = gateway.submit("m", X)
    await asyncio.wait_for(gpulet.arrived.wait(), 5)
    waiting, rejected = gateway.submit("m", X), gateway.submit("m", X)
    answer = await _answer(rejected)
    assert answer.outcome is Outcome.REJECTED
    assert answer.retry_after_s is not None
    gpulet.error = "running 'm' failed: no"
    gpulet.hold = False
    gpulet.release()
    for future in (running, waiting):
        answer = await _answer(future)
        assert (answer.outcome, answer.reason) == (Outcome.FAILED, "running 'm' failed: no")


async def test_a_cancelled_request_frees_its_place(start: Start) -> None:
    gpulet = FakeGpulet("a", ("m",), hold=True)
    cluster = await start(make_plan(("a", ("m",)), slo_ms=20_000.0), gpulet)
    gateway = await cluster.gateway()
    running = gateway.submit("m", X)
    await asyncio.wait_for(gpulet.arrived.wait(), 5)
    waiting = [gateway.submit("m", X) for _ in range(4)]
    assert cluster.server is not None
    counters = cluster.server.dispatcher.accounts.counters["m"]
    await _until(lambda: counters.submitted == 5)
    waiting[3].cancel()
    await _until(lambda: counters.cancelled == 1)
    gpulet.hold = False
    gpulet.release()
    assert [(await _answer(future)).outcome for future in (running, *waiting[:3])] == [Outcome.OK] * 4
    assert gpulet.batches == [1] * 4


async def test_a_dead_gateway_frees_its_places_and_the_other_goes_on(start: Start) -> None:
    gpulet = FakeGpulet("a", ("m",), hold=True)
    cluster = await start(make_plan(("a", ("m",)), slo_ms=20_000.0), gpulet)
    first, second = await cluster.gateway(), await cluster.gateway()
    running = second.submit("m", X)
    await asyncio.wait_for(gpulet.arrived.wait(), 5)
    lost = [first.submit("m", X) for _ in range(5)]
    kept = second.submit("m", X)
    assert cluster.server is not None
    counters = cluster.server.dispatcher.accounts.counters["m"]
    await _until(lambda: counters.submitted == 7)
    await first.close()
    await _until(lambda: counters.cancelled == 5)
    assert [(await _answer(future)).outcome for future in lost] == [Outcome.FAILED] * 5
    gpulet.hold = False
    gpulet.release()
    assert [(await _answer(future)).outcome for future in (running, kept)] == [Outcome.OK] * 2
    assert len(gpulet.batches) <= 3  # one may have gone to the gpu-let ahead, to run next


async def test_a_dead_dispatcher_fails_what_it_held_at_once_and_is_found_again(start: Start) -> None:
    gpulet = FakeGpulet("a", ("m",), hold=True)
    cluster = await start(make_plan(("a", ("m",))), gpulet)
    gateway = await cluster.gateway()
    held = [gateway.submit("m", X) for _ in range(4)]
    await asyncio.wait_for(gpulet.arrived.wait(), 5)
    await cluster.kill()
    for future in held:
        answer = await _answer(future)
        assert (answer.outcome, answer.retry_after_s) == (Outcome.FAILED, 1.0)
        assert "dispatcher" in answer.reason
    assert not gateway.is_ready("m")
    assert [entry["up"] for entry in gateway.gpulets()] == [False]
    assert (await _answer(gateway.submit("m", X))).outcome is Outcome.FAILED
    gpulet.hold = False
    await cluster.start()
    await _until(gateway.is_ready)
    assert (await _answer(gateway.submit("m", X))).outcome is Outcome.OK


async def test_a_closing_dispatcher_answers_what_it_holds_first(start: Start) -> None:
    gpulet = FakeGpulet("a", ("m",), hold=True)
    cluster = await start(make_plan(("a", ("m",))), gpulet)
    gateway = await cluster.gateway()
    running, waiting = gateway.submit("m", X), gateway.submit("m", X)
    await asyncio.wait_for(gpulet.arrived.wait(), 5)
    assert cluster.server is not None
    closing = asyncio.create_task(cluster.server.close(drain_s=5.0))
    await asyncio.sleep(0)
    gpulet.hold = False
    gpulet.release()
    assert [(await _answer(future)).outcome for future in (running, waiting)] == [Outcome.OK] * 2
    await closing


async def test_a_new_plan_moves_models_between_dispatchers(start: Start) -> None:
    gpulet = FakeGpulet("a", ("m", "n"))
    cluster = await start(make_plan(("a", ("m", "n"))), gpulet)
    gateway = await cluster.gateway()
    plan = make_plan(("a", ("n",)), models=("n",))
    await gateway.apply(plan, {"0": ["n"]})
    assert cluster.server is not None
    cluster.server.dispatcher.apply(plan)
    await _until(lambda: gateway.is_ready("n"))
    assert (await _answer(gateway.submit("n", X))).outcome is Outcome.OK
    assert not gateway.is_ready("m")
    with pytest.raises(KeyError):
        gateway.submit("m", X)


PLAN = make_plan(("a", ("m", "n")), ("b", ("o",)))


def test_a_plan_is_cut_along_its_partition() -> None:
    cut = cut_plan(PLAN, {"m": 0, "n": 0, "o": 3})
    assert {name: [g.id for g in part.gpulets] for name, part in cut.items()} == {"0": ["a"], "3": ["b"]}
    assert {name: [m.name for m in part.models] for name, part in cut.items()} == {"0": ["m", "n"], "3": ["o"]}
    assert cut_plan(PLAN) == {"0": PLAN}
    with pytest.raises(InvalidInputError, match="gpu-let a holds models of several"):
        cut_plan(PLAN, {"m": 0, "n": 1, "o": 1})
    with pytest.raises(InvalidInputError, match="no sub-cluster"):
        cut_plan(PLAN, {"m": 0, "n": 0})


def test_the_serve_config_has_a_dispatcher_per_sub_cluster_only_when_there_are_several_processes() -> None:
    names = [a["name"] for a in serve_config(PLAN)["applications"]]
    assert names == ["tenuto", "gpulet-a", "gpulet-b"]
    config = serve_config(PLAN, gateways=3, partition={"m": 0, "n": 0, "o": 1})
    assert [a["name"] for a in config["applications"]] == [
        "tenuto", "dispatcher-0", "dispatcher-1", "gpulet-a", "gpulet-b",
    ]  # fmt: skip
    entry = config["applications"][0]["deployments"][0]
    assert entry["num_replicas"] == 3
    assert entry["user_config"]["sub_clusters"] == {"0": ["m", "n"], "1": ["o"]}
    assert Plan.from_data(config) == PLAN
    with pytest.raises(ValueError, match="gateways"):
        serve_config(PLAN, gateways=0)
