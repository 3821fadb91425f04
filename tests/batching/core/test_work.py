"""What the scheduler does for a request, a batch and something learned does not grow with the system.

Counted in instructions, so that no machine and no neighbour changes it.
"""

from __future__ import annotations

import heapq
import random
from dataclasses import dataclass

import pytest

from tenuto.batching.core.scheduler import Dispatch, Scheduler
from tenuto.batching.core.system import Host, Model, NetworkDelay, ScheduledGpulet, System
from tenuto.batching.registry import make_scheduler
from tests.instruments.counted_work import counted

PACKAGE = "tenuto.batching"
SIZES = [(2, 1), (400, 1), (400, 100)]


@dataclass
class Costs:
    """Instructions, each in the mean."""

    request: float
    batch: float
    correction: float
    delays: float


def build(name: str, gpulets: int, models: int, *, alike: bool) -> Scheduler:
    def host(model: int) -> Host:
        fixed = 2.0 + model % 5
        return Host((0.0, *(fixed + 0.5 * size for size in range(1, 20))))

    specs = tuple(Model(f"m{m}", 40.0 + m % 7, 100.0) for m in range(models))
    everything = {m: host(m) for m in range(models)}
    placed = tuple(
        # Apart, each gpu-let hosts its own choice of models, and few of them, as plans do.
        ScheduledGpulet(
            f"g{g}", f"g{g}", everything if alike else {m: host(m) for m in {g % models, (7 * g + 1) % models}}
        )
        for g in range(gpulets)
    )
    return make_scheduler(name, System(specs, placed), {"rehearse": "false"} if name == "deferred" else {})


def measured(name: str, gpulets: int, models: int, *, alike: bool = True, load: float = 0.5) -> Costs:
    """Serve a few hundred requests and learn something with every batch, no two gpu-lets alike in the end."""
    rng = random.Random(1)
    core = build(name, gpulets, models, alike=alike)
    hosted = [sorted(gpulet.hosts) for gpulet in core.system.gpulets]
    served = sorted({program for programs in hosted for program in programs})
    for gpulet, programs in enumerate(hosted):
        for program in programs:
            core.update_latency(program, gpulet, rng.uniform(0.9, 1.3))
    now, gap = 0.0, 4.0 / (gpulets * load)
    ends: list[tuple[float, int, int]] = []
    found, count = Costs(0.0, 0.0, 0.0, 0.0), [0, 0, 0]
    for number in range(250 + 2 * gpulets):
        now += rng.expovariate(1.0 / gap)
        warm = number >= 100 + 2 * gpulets
        while core.next_wake_ms < now or (ends and ends[0][0] <= now):
            with counted(PACKAGE) as work:
                if ends and ends[0][0] <= core.next_wake_ms:
                    at, gpulet, program = heapq.heappop(ends)
                    core.batch_done(at, gpulet)
                else:
                    at = max(core.next_wake_ms, 0.0)
                    core.wake(at)
                decisions = core.drain()
            found.batch += warm * work.instructions
            for decision in decisions:
                if isinstance(decision, Dispatch):
                    count[1] += warm
                    heapq.heappush(ends, (decision.finish_ms, decision.gpulet, decision.program))
                    with counted(PACKAGE) as work:
                        core.update_latency(decision.program, decision.gpulet, rng.uniform(0.9, 1.3))
                    found.correction = max(found.correction, work.instructions)
                    with counted(PACKAGE) as work:
                        core.update_network(NetworkDelay(rng.uniform(0.1, 0.2), 0.0, rng.uniform(1.0, 2.0)))
                    found.delays = max(found.delays, work.instructions)
        with counted(PACKAGE) as work:
            core.add_request(now, rng.choice(served), number, now + 40.0)
        found.request += warm * work.instructions
        count[0] += warm
    found.request /= count[0]
    found.batch /= max(1, count[1])
    return found


@pytest.mark.parametrize("name", ["deferred", "symphony", "eager"])
def test_what_a_request_a_batch_and_something_learned_cost_does_not_grow_with_gpulets_and_models(name: str) -> None:
    small, *larger = [measured(name, gpulets, models) for gpulets, models in SIZES]
    for costs in larger:
        assert costs.request < 2.0 * small.request + 100.0
        assert costs.batch < 3.0 * small.batch + 500.0
        assert costs.correction < small.correction + 50.0
        assert costs.delays < small.delays + 50.0


def test_where_gpulets_are_short_a_batch_costs_at_most_a_place_in_the_line_for_each_model_that_waits() -> None:
    alone, half, crowded = (measured("deferred", 2, models) for models in (1, 50, 100))
    assert crowded.request < 3.0 * alone.request
    assert crowded.batch <= 2.2 * half.batch
    assert crowded.correction < alone.correction + 50.0


def test_where_no_two_gpulets_host_the_same_it_grows_with_those_of_one_model_at_most() -> None:
    small = measured("deferred", 4, 4, alike=False)
    large = measured("deferred", 400, 100, alike=False)  # eight gpu-lets for each model, instead of two
    assert large.request < 4.0 * small.request + 100.0
    assert large.batch < 4.0 * small.batch + 500.0
    assert large.correction < small.correction + 50.0
    assert large.delays < small.delays + 50.0
