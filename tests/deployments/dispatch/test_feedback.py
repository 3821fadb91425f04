"""States that feed themselves: on a processor that the dispatcher's own work keeps busy, a standstill is over once what
waited then is worked off, whatever was learned from it.

Time is virtual and passes by what is done: each instruction of the scheduler and the dispatcher takes some, and what
gpu-lets measure contains how late the processor got to them, as it does where they share it.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass

import pytest

from tenuto.batching.core.build import from_plan
from tenuto.batching.core.scheduler import Scheduler
from tenuto.batching.core.system import NetworkDelay
from tenuto.batching.registry import make_scheduler
from tenuto.deployments.dispatch.dispatcher import Dispatcher
from tenuto.deployments.dispatch.fleet import GpuletConnection
from tenuto.deployments.wire.messages import GpuletState
from tenuto.deployments.wire.peer import ConnectionEvents, Finder
from tenuto.outcome import Outcome
from tenuto.placement import Plan
from tests.instruments.asking import submit
from tests.instruments.counted_work import Work, counted
from tests.instruments.replay import EmulatedConnection, compute_here
from tests.instruments.scenario import Scenario
from tests.instruments.seeds import seeds
from tests.instruments.virtual_loop import VirtualLoop

INSTRUCTION_S = 40e-9  # of the time of a core, in Python
ENTRY_S = 0.3e-3  # a request takes besides, before it is asked for and when it is answered
NOISE_MS = 0.5  # processes that share cores are late by so much in the mean
RESERVE_MS = 2.0


class BusyLoop(VirtualLoop):
    """Its time also passes by work."""

    def __init__(self) -> None:
        super().__init__()
        self.work = Work()
        self.instruction_s = INSTRUCTION_S

    def time(self) -> float:
        return super().time() + self.instruction_s * self.work.instructions

    def stand_still(self, seconds: float) -> None:
        self._jump.now_s += seconds


@dataclass
class Served:
    """Shares in time by half seconds, and the part of the time that the processor worked."""

    shares: list[float]
    busy: float


def zoo(rng: random.Random, models: int, gpulets: int, rate_rps: float, seconds: float) -> Scenario:
    """Return gpu-lets that all host all models, and the arrivals."""
    specs, held, arrivals = [], {}, []
    for number in range(models):
        alpha, beta = rng.uniform(1.0, 6.0), rng.uniform(1.0, 10.0)
        slo = rng.uniform(6.0, 12.0) * (alpha + beta)
        name = f"m{number}"
        latency = {"alpha_ms": alpha, "beta_ms": beta}
        specs.append({"name": name, "slo_ms": slo, "latency": latency, "rate_rps": rate_rps / models})
        held[name] = max(1, int((slo - beta) / alpha))
        now = 0.0
        while (now := now + rng.expovariate(rate_rps / models / 1000.0)) < 1000.0 * seconds:
            arrivals.append({"model": name, "at_ms": now})
    return Scenario.from_data(
        {
            "models": specs,
            "gpulets": [{"id": f"g{number}", "models": held} for number in range(gpulets)],
            "arrivals": arrivals,
        }
    )


def serve(scenario: Scenario, seconds: float, *, still_at_s: float, still_s: float) -> Served:
    """Serve a scenario, with one standstill of the processor."""
    plan, noise = scenario.plan(), random.Random(0)

    def connect(gpulet_id: str, _find: Finder, events: ConnectionEvents[GpuletState]) -> GpuletConnection:
        return EmulatedConnection(gpulet_id, events, plan, 0.1, late_s=lambda: noise.expovariate(1000.0 / NOISE_MS))

    def build(plan: Plan, network: NetworkDelay) -> Scheduler:
        return make_scheduler("deferred", from_plan(plan, network), {"rehearse": "false"})

    def find(_gpulet: str) -> Finder:
        async def nobody() -> None:
            raise LookupError

        return nobody  # type: ignore[return-value]

    async def run() -> Served:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, BusyLoop)
        dispatcher = Dispatcher(build, find, clock=loop.time, make_connection=connect, compute=compute_here)
        dispatcher.apply(plan)
        while not dispatcher.is_ready():
            await asyncio.sleep(0)
        begin, worked = loop.time(), loop.work.instructions
        ended: list[list[bool]] = [[] for _ in range(int(2 * seconds) + 1)]
        schedule, slo = scenario.schedule(), {model.name: model.slo_ms for model in scenario.models}

        def arrive(at_ms: float, model: str) -> None:
            # It came when it was due, however late the processor gets to it.
            loop.stand_still(ENTRY_S)
            late_ms = (loop.time() - begin) * 1000.0 - at_ms
            due_s = begin + (at_ms + slo[model]) / 1000.0
            asked = submit(dispatcher, model, [b"\0" * 4], slo[model] - late_ms, reserve_ms=RESERVE_MS)
            asked.add_done_callback(
                lambda done: ended[int(at_ms / 500.0)].append(
                    done.result().outcome is Outcome.OK and loop.time() <= due_s
                )
            )

        for at_ms, model in schedule:
            loop.call_at(begin + at_ms / 1000.0, arrive, at_ms, model)
        loop.call_at(begin + still_at_s, loop.stand_still, still_s)
        await asyncio.sleep(seconds + 1.0)
        await dispatcher.close()
        done = [part for part in ended if part]
        work_s = loop.instruction_s * (loop.work.instructions - worked)
        return Served([sum(part) / len(part) for part in done], work_s / seconds)

    with counted("tenuto.batching", "tenuto.deployments.dispatch") as work:

        def make_loop() -> BusyLoop:
            loop = BusyLoop()
            loop.work = work
            return loop

        with asyncio.Runner(loop_factory=make_loop) as runner:
            return runner.run(run())


@pytest.mark.parametrize("seed", [1])
def test_twenty_models_on_24_gpulets_are_served_as_before_a_standstill_of_the_processor(seed: int) -> None:
    """Twelve hundred requests a second. It was in doubt: what was learned from late batches was written into all tables
    of all gpu-lets, which made batches late."""
    served = serve(zoo(random.Random(seed), 20, 24, 1200.0, 2.5), 2.5, still_at_s=0.6, still_s=0.25)
    assert served.shares[0] > 0.99
    assert served.shares[-1] > 0.99
    assert served.busy < 0.7


@pytest.mark.parametrize("seed", seeds(1, 2))
def test_no_system_stays_in_a_state_that_a_standstill_brought_it_to(seed: int) -> None:
    rng = random.Random(seed)
    models, gpulets = rng.choice([1, 3, 10, 30]), rng.choice([1, 4, 16, 40])
    rate_rps = min(1500.0, gpulets * rng.uniform(20.0, 60.0))
    scenario = zoo(rng, models, gpulets, rate_rps, 2.0)
    calm = serve(scenario, 2.0, still_at_s=0.3, still_s=0.0)
    disturbed = serve(scenario, 2.0, still_at_s=0.3, still_s=rng.choice([0.05, 0.2, 0.4]))
    assert disturbed.shares[-1] > calm.shares[-1] - 0.03
