"""The service under more than can be served, and on a machine that stands still, in virtual time.

The whole path from an exchange to its response is the real one, on a loop whose time jumps; every request and every
answer takes the processor for a while, so that timers and other requests wait as they do on one event loop.
"""

from __future__ import annotations

import asyncio
import gc
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec
import pytest

from tenuto.batching.core.build import from_plan
from tenuto.batching.core.scheduler import Scheduler
from tenuto.batching.core.system import NetworkDelay
from tenuto.batching.registry import make_scheduler
from tenuto.deployments.dispatch.dispatcher import Dispatcher
from tenuto.deployments.dispatch.fleet import GpuletConnection
from tenuto.deployments.entry.http.exchange import Exchange, Head
from tenuto.deployments.entry.service.inference import InferenceService
from tenuto.deployments.entry.service.reading_lag import ReadingLag
from tenuto.deployments.wire.messages import GpuletState
from tenuto.deployments.wire.peer import ConnectionEvents, Finder
from tenuto.deployments.wire.tensors import Buffer
from tenuto.placement import Plan
from tests.instruments.fake_gpulet import SIGNATURE
from tests.instruments.replay import EmulatedConnection, compute_here
from tests.instruments.virtual_loop import VirtualLoop

SLO_MS = 25.0
LATENCY = {"alpha_ms": 1.053, "beta_ms": 5.072}
PEAK_RPS = 1000.0  # what two gpu-lets serve in time here, a little below the scheduler's own limit
ACCEPT_MS, ANSWER_MS, TURN_AWAY_MS = 0.06, 0.02, 0.02
HEAD = Head(b"POST", b"/v2/models/m/infer", {}, is_cached=True)
BODY = b'{"inputs":[{"name":"x","shape":[1,2],"datatype":"FP32","data":[1,2]}]}'


def make_plan() -> Plan:
    replica = {"name": "m", "batch_size": 18, "latency": LATENCY, "latency_ms": 24.0}
    return Plan.from_data(
        {
            "policy": {"name": "test"},
            "gpus": [{"id": f"n0/{n}", "type": "v100"} for n in range(2)],
            "gpulets": [{"id": f"n0/{n}/a", "gpu": f"n0/{n}", "models": [replica]} for n in range(2)],
            "models": [{"name": "m", "rate_rps": 900, "slo_ms": SLO_MS, "latency": LATENCY}],
        }
    )


class Timed(Exchange, eq=False):
    """Notes when it is answered, and takes the processor for it."""

    loop: VirtualLoop | None = None
    status: int = 0
    took_ms: float = 0.0
    answered: asyncio.Event = msgspec.field(default_factory=asyncio.Event)

    def respond(self, status: int, headers: bytes, payload: Sequence[Buffer]) -> None:
        assert self.loop is not None
        self.loop.work(TURN_AWAY_MS if status != 200 else ANSWER_MS)
        self.on_left = None
        self.answered.set()
        self.status = status
        self.took_ms = self.loop.time() * 1000.0 - self.arrived_ms


class Machine(VirtualLoop):
    """A loop whose processor is taken by what it does."""

    def work(self, ms: float) -> None:
        self._jump.now_s += ms / 1000.0


@dataclass
class Phase:
    """A rate for a while; and what became of its requests."""

    rate_rps: float
    seconds: float
    stands_still_s: float = 0.0  # before it begins
    exchanges: list[Timed] = field(default_factory=list)

    def counted(self, after_s: float) -> list[Timed]:
        """Return the requests that came later than so long after its beginning, and whose answers were due before the
        next phase began with a standstill."""
        begin_ms = self.exchanges[0].arrived_ms
        until_ms = begin_ms + 1000.0 * self.seconds - 2.0 * SLO_MS
        return [e for e in self.exchanges if begin_ms + 1000.0 * after_s <= e.arrived_ms < until_ms]

    def in_time(self, after_s: float = 0.0) -> float:
        """Return the requests in time per second."""
        good = [e for e in self.counted(after_s) if e.status == 200 and e.took_ms <= SLO_MS]
        return len(good) / (self.seconds - after_s - 2e-3 * SLO_MS)

    def share(self, after_s: float = 0.0) -> float:
        """Return the share of the requests in time."""
        good = [e for e in self.counted(after_s) if e.status == 200 and e.took_ms <= SLO_MS]
        return len(good) / len(self.counted(after_s))

    @property
    def slowest_ms(self) -> float:
        return max(e.took_ms for e in self.exchanges)


def play(
    *phases: Phase, seed: int = 1, oversleep_s: Callable[[], float] = lambda: 0.0, rehearse: bool = True
) -> InferenceService:
    """Run phases one after the other through one service; timers come late by what `oversleep_s` returns."""
    loop: Machine
    chance = random.Random(seed)

    def make_connection(gpulet_id: str, _find: Finder, events: ConnectionEvents[GpuletState]) -> GpuletConnection:
        connection = EmulatedConnection(gpulet_id, events, make_plan(), 0.1)
        connection.state.signatures["m"] = SIGNATURE
        return connection

    def build(plan: Plan, network: NetworkDelay) -> Scheduler:
        return make_scheduler("deferred", from_plan(plan, network), {"rehearse": rehearse})

    async def run() -> InferenceService:
        clock = loop.time
        service = InferenceService(lambda _exchange, _caller: None, clock=clock)
        dispatcher = Dispatcher(
            build,
            lambda _: None,
            clock=clock,
            make_connection=make_connection,  # type: ignore[arg-type, return-value]
            compute=compute_here,
        )
        dispatcher.apply(make_plan())
        await asyncio.sleep(0.01)
        service.follow(dispatcher)
        at = clock()
        for phase in phases:
            at += phase.stands_still_s
            if phase.stands_still_s:
                loop.work(phase.stands_still_s * 1000.0)
            ends = at + phase.seconds
            while (at := at + chance.expovariate(phase.rate_rps)) < ends:
                await asyncio.sleep(max(0.0, at - clock()))
                exchange = Timed(HEAD, at * 1000.0, BODY, loop=loop)
                phase.exchanges.append(exchange)
                behind = service.lag.turned_away
                service.handle(exchange)
                loop.work(ACCEPT_MS if service.lag.turned_away == behind else 0.0)
            at = ends
        for phase in phases:
            for exchange in phase.exchanges:
                await exchange.answered.wait()
        await dispatcher.close()
        service.close()
        return service

    with asyncio.Runner(loop_factory=Machine) as runner:
        loop = runner.get_loop()  # type: ignore[assignment]
        loop.oversleep(oversleep_s)
        return runner.run(run())


@pytest.mark.parametrize("times", [2.0, 10.0, 25.0])
def test_beyond_capacity_as_much_is_served_as_at_it_and_nothing_comes_much_too_late(times: float) -> None:
    at_peak, beyond, after = Phase(0.9 * PEAK_RPS, 1.5), Phase(times * PEAK_RPS, 1.2), Phase(100.0, 3.0)
    play(at_peak, beyond, after)
    assert at_peak.share(0.5) >= 0.99
    assert beyond.in_time(0.5) >= 0.9 * at_peak.in_time(0.5)
    assert at_peak.slowest_ms <= 2.0 * SLO_MS
    assert beyond.slowest_ms <= (2.0 * SLO_MS if times <= 10.0 else 10.0 * SLO_MS)  # until it knows that it is behind
    assert after.share(1.0) >= 0.99


def test_on_a_machine_whose_timers_come_late_few_are_lost_either_way() -> None:
    """One timer in sixteen is late by 2 ms more in the mean, those of the gpu-lets too. A margin that counts late
    answers alone refuses one request in eight here."""
    chance = random.Random(99)

    def oversleep_s() -> float:
        return chance.uniform(0.0, 4e-4) + (chance.expovariate(500.0) if chance.random() < 0.06 else 0.0)

    below, near = Phase(600.0, 3.0), Phase(900.0, 4.0)
    play(below, near, seed=23, oversleep_s=oversleep_s)
    assert below.share(1.0) >= 0.97
    assert near.share(1.0) >= 0.93


def test_a_cold_start_under_load_serves_at_once() -> None:
    cold = Phase(700.0, 2.0)
    play(cold)
    assert cold.share(0.2) >= 0.99


def test_a_machine_that_stood_still_serves_again_within_a_second() -> None:
    before, *after = Phase(700.0, 1.0), Phase(700.0, 2.0, 0.5), Phase(700.0, 2.0, 0.05), Phase(700.0, 3.0, 3.0)
    service = play(before, *after)
    for phase in after:
        assert phase.share(1.0) >= 0.99
    assert service.margin.margin_ms <= 3.0


def test_requests_leave_nothing_for_the_collector() -> None:
    """It would stop the gateway for as long as it takes to look at what they left."""

    def left(seconds: float) -> int:
        phase = Phase(2.0 * PEAK_RPS, seconds)  # its exchanges are kept until all is counted
        gc.collect()
        gc.disable()
        try:
            served = play(phase, rehearse=False)  # elsewhere replays leave things in another process
            found = gc.collect()
            served.close()  # and has lived until here, with the dispatcher's log
            return found
        finally:
            gc.enable()

    few = left(0.2)  # what was about them
    assert left(0.7) - few < 0.025 * 2.0 * PEAK_RPS


def test_only_a_loop_that_stays_behind_turns_requests_away() -> None:
    lag = ReadingLag()
    assert not lag.record_wait(1000.0, SLO_MS, 0.0)  # a standstill
    assert not lag.record_wait(1000.0, SLO_MS, 99.0)
    assert lag.record_wait(5.1, SLO_MS, 100.0)
    assert not lag.record_wait(4.9, SLO_MS, 101.0)
    assert lag.record_wait(5.1, SLO_MS, 102.0)
    assert not lag.record_wait(4.9, SLO_MS, 103.0)
    assert not lag.record_wait(5.1, SLO_MS, 1103.0)
    assert lag.turned_away == 2


def test_requests_sent_without_any_time_left_say_nothing_about_the_loop() -> None:
    lag = ReadingLag()
    assert not any(lag.record_wait(0.1, slo_ms, now_ms) for slo_ms in (0.0, -3.0) for now_ms in (0.0, 150.0, 300.0))
