"""Gateways and a dispatcher in other processes, here on one loop: same outcomes as with the dispatcher beside them."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import time
from collections.abc import AsyncIterator, Callable, Sequence

import numpy as np
import pytest

from tenuto.batching.core.build import from_plan
from tenuto.batching.core.scheduler import Scheduler
from tenuto.batching.core.system import NetworkDelay
from tenuto.batching.registry import make_scheduler
from tenuto.deployments.dispatch.dispatcher import Dispatcher
from tenuto.deployments.dispatch.dispatcher_process import BundleServer
from tenuto.deployments.dispatch.driven_scheduler import SchedulerFactory
from tenuto.deployments.dispatch.in_flight import Request, Samples
from tenuto.deployments.dispatch.leadership import Leadership
from tenuto.deployments.entry.service.dispatcher_client import DispatcherClient
from tenuto.deployments.entry.service.dispatching import ask
from tenuto.deployments.serve.deployment import Deployment
from tenuto.deployments.serve.sub_clusters import cut_plan
from tenuto.deployments.wire.answers import Answer, Executed, Refused
from tenuto.deployments.wire.arena import Arena
from tenuto.deployments.wire.peer import Endpoint
from tenuto.deployments.wire.tensors import InputPart
from tenuto.errors import InvalidInputError
from tenuto.outcome import Outcome
from tenuto.placement import Plan
from tests.instruments.asking import X, answer, submit, until
from tests.instruments.fake_gpulet import FakeGpulet, finder, make_plan
from tests.instruments.live import PATIENCE_S


def _deferred(plan: Plan, network: NetworkDelay) -> Scheduler:
    return make_scheduler("symphony", from_plan(plan, network))


def _eager(plan: Plan, network: NetworkDelay) -> Scheduler:
    return make_scheduler("eager", from_plan(plan, network), {})


class Line:
    """Passes bytes on to a dispatcher and back, for as long as it is not cut."""

    def __init__(self, far: Endpoint) -> None:
        self._far = far
        self.near = Endpoint(f"\0tenuto-test-line-{far.token}", far.token)
        self._writers: list[asyncio.StreamWriter] = []

    async def lay(self) -> asyncio.Server:
        return await asyncio.start_unix_server(self._join, self.near.address)

    async def _join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_unix_connection(self._far.address)
        self._writers += [writer, far_writer]
        await asyncio.gather(self._pass_on(reader, far_writer), self._pass_on(far_reader, writer))

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(1 << 16):
                writer.write(data)
        writer.close()

    def cut(self) -> None:
        """End every connection; who connects again is heard."""
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()


class Cluster:
    """Dispatchers behind sockets, as many as are started, and as many gateways as a test asks for."""

    def __init__(self, plan: Plan, gpulets: Sequence[FakeGpulet], max_queued: int, scheduler: SchedulerFactory) -> None:
        self.scheduler = scheduler
        self.plan = plan
        self.gpulets = gpulets
        self.max_queued = max_queued
        self.servers: dict[BundleServer, Endpoint] = {}  # the oldest first
        self.asked = 0
        self.not_found = 0  # so many of the oldest are not found yet
        self.gateways: list[DispatcherClient] = []
        self.pids = itertools.count()

    async def start(self) -> BundleServer:
        leadership = Leadership("0", lambda: server.step_back())
        dispatcher = Dispatcher(
            self.scheduler,
            finder({g.id: g for g in self.gpulets}),
            max_queued=self.max_queued,
            on_change=lambda: server.announce(),
            leadership=leadership,
        )
        server = BundleServer(dispatcher, leadership)
        self.servers[server] = await server.listen()
        dispatcher.apply(self.plan)
        return server

    @property
    def server(self) -> BundleServer | None:
        """The one that schedules."""
        return next(iter(self.servers), None)

    async def _find(self) -> Endpoint:
        """Serve's handle asks any of the replicas."""
        if not self.servers:
            raise LookupError("no dispatcher")
        self.asked += 1
        found = list(self.servers.values())[self.not_found :]
        return found[self.asked % len(found)]

    async def gateway(
        self, dispatchers: int = 1, *, reaches: BundleServer | None = None, line: Line | None = None
    ) -> DispatcherClient:
        async def find() -> Endpoint:
            found = await self._find() if reaches is None else self.servers[reaches]
            return line.near if line is not None and found.token == line.near.token else found

        gateway = DispatcherClient(lambda _name: find)
        self.gateways.append(gateway)
        await self.apply(gateway, dispatchers)
        await until(gateway.is_ready)
        return gateway

    async def apply(self, gateway: DispatcherClient, dispatchers: int) -> None:
        names = [spec.name for spec in self.plan.models]
        await gateway.apply(self.plan, {"0": names}, dispatchers=dispatchers, wait_s=5.0)

    async def kill(self) -> None:
        """What a killed process leaves: closed connections and nothing said."""
        server = self.server
        assert server is not None
        del self.servers[server]
        server.step_back()
        await server.close(0.0)


Start = Callable[..., "asyncio.Future[Cluster]"]


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    running: list[Cluster] = []

    async def begin(
        plan: Plan, *gpulets: FakeGpulet, max_queued: int = 100, scheduler: SchedulerFactory = _deferred
    ) -> Cluster:
        for gpulet in gpulets:
            await gpulet.start()
        cluster = Cluster(plan, gpulets, max_queued, scheduler)
        running.append(cluster)
        await cluster.start()
        return cluster

    yield begin  # type: ignore[misc]
    for cluster in running:
        for gateway in cluster.gateways:
            await gateway.close()
        for server in cluster.servers:
            await server.close(drain_s=0.0)
        for gpulet in cluster.gpulets:
            gpulet.die()


async def test_requests_of_two_gateways_share_batches_and_get_their_own_outputs(start: Start) -> None:
    gpulet = FakeGpulet("a", ("m",))
    cluster = await start(make_plan(("a", ("m",)), batch_size=4), gpulet)
    gateways = [await cluster.gateway() for _ in range(2)]
    futures = [
        submit(gateways[n % 2], "m", [np.array([n, 0], np.float32).tobytes()], client_id=f"r{n}") for n in range(8)
    ]
    answers = [await answer(future) for future in futures]
    assert [a.outcome for a in answers] == [Outcome.OK] * 8
    assert [np.frombuffer(a.outputs[0].data, np.float32)[0] for a in answers] == [2.0 * n for n in range(8)]
    assert gpulet.sizes == [4, 4]
    ended = await gateways[0].ended("r3", 5)
    assert [(e.id, e.outcome) for e in ended] == [("r3", "ok")]
    status = await gateways[1].status()
    assert (status.models["m"].ok, status.policy) == (8, "test")
    assert await gateways[0].waiting() == {"m": 0}


async def test_deadlines_rejections_and_errors_come_back(start: Start) -> None:
    gpulet = FakeGpulet("a", ("m",), hold=True)
    cluster = await start(make_plan(("a", ("m",))), gpulet, max_queued=1)
    gateway = await cluster.gateway()
    assert (await answer(submit(gateway, "m", X, -5.0))).outcome is Outcome.EXPIRED
    running = submit(gateway, "m", X)
    await asyncio.wait_for(gpulet.arrived.wait(), PATIENCE_S)
    waiting, rejected = submit(gateway, "m", X), submit(gateway, "m", X)
    found = await answer(rejected)
    assert found.outcome is Outcome.REJECTED
    assert found.retry_after_s is not None
    gpulet.error = "running 'm' failed: no"
    gpulet.hold = False
    gpulet.release()
    for future in (running, waiting):
        found = await answer(future)
        assert (found.outcome, found.reason) == (Outcome.FAILED, "running 'm' failed: no")


async def test_samples_that_are_asked_of_another_dispatcher_are_still_one_request(start: Start) -> None:
    gpulet = FakeGpulet("a", ("m",), hold=True)
    cluster = await start(make_plan(("a", ("m",)), slo_ms=60_000.0), gpulet, scheduler=_eager)
    spare = await cluster.start()
    gateway = await cluster.gateway(dispatchers=2)
    samples = Samples(3)
    asked = [ask(gateway, "m", [InputPart(X[0])], samples=samples) for _ in range(3)]
    await until(lambda: len(gpulet.sizes) == 1)
    gpulet.release()  # one has its answer when the dispatcher dies
    await answer(asked[0])
    await cluster.kill()
    gpulet.hold = False
    for future in asked:
        assert (await answer(future)).outcome is Outcome.OK
    counters = spare.dispatcher.accounts.counters["m"]
    assert (counters.submitted, counters.ok, counters.samples, counters.inferences) == (1, 1, 2, 2)


async def test_a_cancelled_request_frees_its_place(start: Start) -> None:
    gpulet = FakeGpulet("a", ("m",), hold=True)
    cluster = await start(make_plan(("a", ("m",)), slo_ms=20_000.0), gpulet)
    gateway = await cluster.gateway()
    running = submit(gateway, "m", X)
    await asyncio.wait_for(gpulet.arrived.wait(), PATIENCE_S)
    waiting = [submit(gateway, "m", X) for _ in range(4)]
    assert cluster.server is not None
    counters = cluster.server.dispatcher.accounts.counters["m"]
    await until(lambda: counters.submitted == 5)
    waiting[3].cancel()
    await until(lambda: counters.cancelled == 1)
    gpulet.hold = False
    gpulet.release()
    assert [(await answer(future)).outcome for future in (running, *waiting[:3])] == [Outcome.OK] * 4
    assert gpulet.sizes == [1] * 4


async def test_a_dead_gateway_frees_its_places_and_the_other_goes_on(start: Start) -> None:
    gpulet = FakeGpulet("a", ("m",), hold=True)
    cluster = await start(make_plan(("a", ("m",)), slo_ms=20_000.0), gpulet)
    first, second = await cluster.gateway(), await cluster.gateway()
    running = submit(second, "m", X)
    await asyncio.wait_for(gpulet.arrived.wait(), PATIENCE_S)
    lost = [submit(first, "m", X) for _ in range(5)]
    kept = submit(second, "m", X)
    assert cluster.server is not None
    counters = cluster.server.dispatcher.accounts.counters["m"]
    await until(lambda: counters.submitted == 7)
    await first.close()
    await until(lambda: counters.cancelled == 5)
    assert [(await answer(future)).outcome for future in lost] == [Outcome.FAILED] * 5
    gpulet.hold = False
    gpulet.release()
    assert [(await answer(future)).outcome for future in (running, kept)] == [Outcome.OK] * 2
    assert len(gpulet.sizes) <= 3  # one may have gone to the gpu-let ahead, to run next


async def test_a_dead_dispatcher_fails_what_it_held_at_once_and_is_found_again(start: Start) -> None:
    gpulet = FakeGpulet("a", ("m",), hold=True)
    cluster = await start(make_plan(("a", ("m",))), gpulet)
    gateway = await cluster.gateway()
    held = [submit(gateway, "m", X) for _ in range(4)]
    await asyncio.wait_for(gpulet.arrived.wait(), PATIENCE_S)
    await cluster.kill()
    for future in held:
        found = await answer(future)
        assert (found.outcome, found.retry_after_s) == (Outcome.FAILED, 1.0)
        assert "dispatcher" in found.reason
    assert not gateway.is_ready("m")
    assert [gpulet.up for gpulet in gateway.gpulets()] == [False]
    assert (await answer(submit(gateway, "m", X))).outcome is Outcome.FAILED
    gpulet.hold = False
    await cluster.start()
    await until(gateway.is_ready)
    assert (await answer(submit(gateway, "m", X))).outcome is Outcome.OK


async def test_what_a_dead_dispatcher_held_is_asked_of_the_one_that_waits(start: Start) -> None:
    gpulet = FakeGpulet("a", ("m",), hold=True)
    cluster = await start(make_plan(("a", ("m",)), slo_ms=20_000.0), gpulet)
    spare = await cluster.start()
    first = await cluster.gateway(2)
    cluster.not_found = 1
    asyncio.get_running_loop().call_later(0.2, setattr, cluster, "not_found", 0)
    second = await cluster.gateway(2)
    # It knows both before it takes a request: else the younger one would schedule for it, the older one for the other.
    assert [first.connected(), second.connected()] == [{"0": 2}] * 2
    arena = Arena(1 << 20)
    slot = arena.take(8)
    assert slot is not None
    slot.data[:] = np.array([7, 0], np.float32).tobytes()
    held = [submit(gateway, "m", X) for gateway in (first, second, first, second)]
    held.append(ask(first, "m", [InputPart(slot.data, "", slot.arena, slot.offset)], memory=slot))
    slot.release()
    await asyncio.wait_for(gpulet.arrived.wait(), PATIENCE_S)
    assert spare.dispatcher.accounts.counters["m"].submitted == 0  # it waits
    gone = submit(first, "m", X)
    gone.cancel()
    late = submit(second, "m", X, slo_ms=1.0)
    time.sleep(0.002)
    await cluster.kill()
    assert (await answer(late)).outcome is Outcome.EXPIRED
    gpulet.hold = False
    gpulet.release()
    answers = [await answer(future) for future in held]
    assert [found.outcome for found in answers] == [Outcome.OK] * 5
    assert np.frombuffer(answers[4].outputs[0].data, np.float32)[0] == 14.0
    assert spare.dispatcher.accounts.counters["m"].submitted == 5
    assert first.is_ready("m")
    # Who was asked for the second time is not asked for the third.
    gpulet.hold = True
    gpulet.arrived.clear()
    waiting = submit(second, "m", X)
    await asyncio.wait_for(gpulet.arrived.wait(), PATIENCE_S)
    for _ in range(2):
        await cluster.start()
        await until(lambda: all(each.connected() == {"0": len(cluster.servers)} for each in (first, second)))
        await cluster.kill()
    assert (await answer(waiting)).outcome is Outcome.FAILED
    gpulet.hold = False
    gpulet.release()
    arena.close()


async def test_a_gateway_that_hears_a_dispatcher_no_more_takes_all_others_with_it(start: Start) -> None:
    """The dispatcher lives and another gateway hears it well: still one alone schedules, and nothing runs for the other
    one. Asked again, it waits, the youngest."""
    gpulets = [FakeGpulet(name, ("m",), hold=True) for name in ("a", "b")]
    cluster = await start(make_plan(("a", ("m",)), ("b", ("m",)), slo_ms=60_000.0), *gpulets, scheduler=_eager)
    spare = await cluster.start()
    first = cluster.server
    assert first is not None
    line = Line(cluster.servers[first])
    laid = await line.lay()
    deaf, other = await cluster.gateway(2, line=line), await cluster.gateway(2)
    held = [submit(gateway, "m", [np.array([n, 0], np.float32).tobytes()]) for n, gateway in enumerate([deaf, other])]
    waiting = [submit(gateway, "m", X) for gateway in (deaf, other) * 3]
    await until(lambda: first.dispatcher.accounts.counters["m"].submitted == 8)
    await until(lambda: [len(gpulet.sizes) for gpulet in gpulets] == [1, 1])
    line.cut()
    await until(lambda: spare.dispatcher.accounts.counters["m"].submitted == 8)
    await until(lambda: [len(gpulet.sizes) for gpulet in gpulets] == [2, 2])  # the second time for the spare one
    for gpulet in gpulets:
        gpulet.hold = False
        gpulet.release()
    assert [(await answer(future)).outcome for future in (*held, *waiting)] == [Outcome.OK] * 8
    assert sum(sum(gpulet.sizes) for gpulet in gpulets) == 8 + 2  # two were under way
    await until(lambda: [gateway.connected() for gateway in (deaf, other)] == [{"0": 2}] * 2)
    assert first.started_at_s > spare.started_at_s
    assert [(await answer(submit(gateway, "m", X))).outcome for gateway in (deaf, other)] == [Outcome.OK] * 2
    assert (first.dispatcher.accounts.counters["m"].submitted, spare.dispatcher.accounts.counters["m"].submitted) == (
        8,
        10,
    )
    line.cut()
    laid.close()


async def test_two_gateways_that_reach_one_dispatcher_each_are_not_served_in_turns(start: Start) -> None:
    """Who was asked first serves its gateway without a break; the other gateway is told, until that one is gone."""
    gpulets = [FakeGpulet(name, ("m",)) for name in ("a", "b")]
    cluster = await start(make_plan(("a", ("m",)), ("b", ("m",)), slo_ms=60_000.0), *gpulets, scheduler=_eager)
    servers = [cluster.server, await cluster.start()]
    first, second = [await cluster.gateway(reaches=server) for server in servers]
    assert (await answer(submit(first, "m", X))).outcome is Outcome.OK
    await until(lambda: not second.is_ready("m"))
    for _ in range(10):
        asked = [submit(gateway, "m", X) for gateway in (first, second)]
        mine, others = [await answer(future) for future in asked]
        assert mine.outcome is Outcome.OK
        assert others.outcome is Outcome.FAILED
        assert "another dispatcher schedules" in others.reason
    assert [len(gpulet.taken) for gpulet in gpulets] == [1, 1]
    await cluster.kill()
    await until(lambda: second.is_ready("m"))
    assert (await answer(submit(second, "m", X))).outcome is Outcome.OK
    assert [len(gpulet.taken) for gpulet in gpulets] == [2, 2]


async def test_gateways_follow_how_many_dispatchers_there_are_to_be(start: Start) -> None:
    gpulet = FakeGpulet("a", ("m",))
    cluster = await start(make_plan(("a", ("m",)), slo_ms=20_000.0), gpulet)
    gateway = await cluster.gateway()
    await cluster.start()
    await cluster.apply(gateway, 2)
    await until(lambda: gateway.connected() == {"0": 2})
    await cluster.apply(gateway, 1)
    assert gateway.connected() == {"0": 2}  # which of them ends is not the gateway's to say
    await cluster.kill()
    await until(lambda: gateway.connected() == {"0": 1})
    await cluster.start()
    assert (await answer(submit(gateway, "m", X))).outcome is Outcome.OK
    assert gateway.connected() == {"0": 1}
    assert [server.dispatcher.accounts.counters["m"].submitted for server in cluster.servers] == [1, 0]


async def test_a_closing_dispatcher_answers_what_it_holds_first(start: Start) -> None:
    gpulet = FakeGpulet("a", ("m",), hold=True)
    cluster = await start(make_plan(("a", ("m",))), gpulet)
    gateway = await cluster.gateway()
    running, waiting = submit(gateway, "m", X), submit(gateway, "m", X)
    await asyncio.wait_for(gpulet.arrived.wait(), PATIENCE_S)
    assert cluster.server is not None
    closing = asyncio.create_task(cluster.server.close(drain_s=5.0))
    await asyncio.sleep(0)
    gpulet.hold = False
    gpulet.release()
    assert [(await answer(future)).outcome for future in (running, waiting)] == [Outcome.OK] * 2
    await closing


async def test_a_new_plan_moves_models_between_dispatchers(start: Start) -> None:
    gpulet = FakeGpulet("a", ("m", "n"))
    cluster = await start(make_plan(("a", ("m", "n"))), gpulet)
    gateway = await cluster.gateway()
    plan = make_plan(("a", ("n",)), models=("n",))
    await gateway.apply(plan, {"0": ["n"]})
    assert cluster.server is not None
    cluster.server.dispatcher.apply(plan)
    await until(lambda: gateway.is_ready("n"))
    assert (await answer(submit(gateway, "n", X))).outcome is Outcome.OK
    assert not gateway.is_ready("m")
    with pytest.raises(KeyError):
        submit(gateway, "m", X)


class Noting:
    """Asks, and wants no answer."""

    def executed(self, request: Request, executed: Executed, row: int) -> None: ...

    def refused(self, request: Request, refused: Refused) -> None: ...


async def test_keys_take_turns_with_what_waits_offline(start: Start) -> None:
    gpulet = FakeGpulet("a", ("m",), hold=True)
    cluster = await start(
        make_plan(("a", ("m",)), slo_ms=60_000.0),
        gpulet,
        scheduler=lambda plan, network: make_scheduler("deferred", from_plan(plan, network)),
    )
    gateway = await cluster.gateway()
    order = list[str]()

    def send(client: str) -> asyncio.Future[Answer]:
        future = ask(gateway, "m", [InputPart(X[0])], slo_ms=math.inf, offline=True, client=client)
        future.add_done_callback(lambda _: order.append(client))
        return future

    futures = [send("anna") for _ in range(16)]
    await asyncio.wait_for(gpulet.arrived.wait(), PATIENCE_S)
    futures.append(send("ben"))
    assert cluster.server is not None
    offline = cluster.server.dispatcher.accounts.offline["m"]
    await until(lambda: offline.submitted == len(futures))
    gpulet.hold = False
    gpulet.release()
    await asyncio.wait_for(asyncio.gather(*futures), PATIENCE_S)
    assert order.index("ben") < 12  # behind the batches that were sent before it came, and not behind all


async def test_memory_is_held_until_the_dispatcher_says_that_nobody_reads_it(start: Start) -> None:
    gpulet = FakeGpulet("a", ("m",), hold=True)
    # The deferred scheduler may send the second ahead to a gpu-let that is about to be free.
    cluster = await start(make_plan(("a", ("m",)), slo_ms=60_000.0), gpulet, scheduler=_eager)
    gateway = await cluster.gateway()
    arena = Arena(1 << 20)

    def asked() -> Request:
        slot = arena.take(8)
        assert slot is not None
        slot.data[:] = X[0]
        request = gateway.admit("m", Noting())
        gateway.start(request, [InputPart(slot.data, "", slot.arena, slot.offset)], slot)
        slot.release()
        return request

    running = asked()
    await asyncio.wait_for(gpulet.arrived.wait(), PATIENCE_S)
    waiting, unsent = asked(), asked()
    gateway.cancel(unsent)
    assert cluster.server is not None
    counters = cluster.server.dispatcher.accounts.counters["m"]
    await until(lambda: counters.submitted == 2)
    assert arena.used_bytes == 2 << 16  # the one that was never sent is free at once
    gateway.cancel(running)
    gateway.cancel(waiting)
    await until(lambda: arena.used_bytes == 1 << 16)  # nobody reads the one that waited
    gpulet.release()
    await until(lambda: arena.used_bytes == 0)
    assert gpulet.bodies == [0]
    arena.close()


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
    names = [each.name for each in Deployment(plan=PLAN).config().applications]
    assert names == ["tenuto", "gpulet-a", "gpulet-b", "tenuto-control"]
    config = Deployment(plan=PLAN, gateways=3, partition={"m": 0, "n": 0, "o": 1}).config()
    assert [each.name for each in config.applications] == [
        "tenuto",
        "dispatcher-0",
        "dispatcher-1",
        "gpulet-a",
        "gpulet-b",
        "tenuto-control",
    ]
    assert config.entry.processes == 3
    assert (config.dispatchers[0].processes, config.dispatchers[0].most_per_node) == (2, None)
    spread = Deployment(plan=PLAN, gateways=3, nodes=2).config()
    assert [spread.entry.most_per_node, spread.dispatchers[0].most_per_node] == [2, 1]
    assert config.entry.user_config.sub_clusters == {"0": ("m", "n"), "1": ("o",)}
    assert Plan.from_data(config.to_data()) == PLAN
    with pytest.raises(ValueError, match="gateways"):
        Deployment(plan=PLAN, gateways=-1)
