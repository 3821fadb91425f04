"""A running system whose plan changes: what waits moves over, what runs ends, what is lost is tried once more."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from tenuto.batching.core.build import from_plan
from tenuto.batching.core.system import System
from tenuto.batching.registry import make_scheduler
from tenuto.batching.virtual.running import Life, RunningSystem
from tenuto.batching.virtual.simulator import simulate
from tenuto.errors import InvalidInputError
from tenuto.outcome import Outcome
from tenuto.placement import Gpulet, Plan
from tests.instruments.plans import make_plan

AT_ONCE = Life((0.0, 0.0), (0.0, 0.0))
TWO = {"n0/0/a": (100.0, ["a", "b"]), "n0/1/a": (100.0, ["a", "b"])}


Load = tuple[NDArray[np.float64], NDArray[np.int32]]


def arrivals(rates_rps: Sequence[float], seconds: float, seed: int = 0) -> Load:
    rng = np.random.default_rng(seed)
    times = [np.sort(rng.uniform(0, 1000.0 * seconds, rng.poisson(rate * seconds))) for rate in rates_rps]
    index = np.repeat(np.arange(len(rates_rps), dtype=np.int32), [len(part) for part in times])
    merged = np.concatenate(times)
    order = np.argsort(merged, kind="stable")
    return merged[order], index[order]


def running(plan: Plan, load: Load, life: Life = AT_ONCE, scheduler: str = "deferred") -> RunningSystem:
    def build(system: System):  # type: ignore[no-untyped-def]
        return make_scheduler(scheduler, system)

    names, slos = [m.name for m in plan.models], [m.slo_ms for m in plan.models]
    system = RunningSystem(names, slos, *load, build, life=life)
    system.apply(plan)
    return system


def ended(system: RunningSystem) -> NDArray[np.int64]:
    system.advance(1e6)
    return system.observe().ended


@pytest.mark.parametrize("scheduler", ["deferred", "eager"])
@pytest.mark.parametrize("look_ms", [40.0, 1000.0])
def test_with_one_plan_it_does_what_the_simulator_does(scheduler: str, look_ms: float) -> None:
    plan = make_plan(TWO)
    load = arrivals([300.0, 200.0], 5.0)
    whole = simulate(make_scheduler(scheduler, from_plan(plan)), *load, duration_s=5.0, warmup_s=0.0).counts()
    system = running(plan, load, scheduler=scheduler)
    total = np.zeros_like(whole)
    for step in range(int(6000 / look_ms)):
        system.advance(look_ms * (step + 1))
        total += system.observe().ended
    assert (total == whole).all()


@pytest.mark.parametrize("seed", range(4))
def test_every_request_ends_once_however_often_the_plan_changes(seed: int) -> None:
    rng = np.random.default_rng(seed)
    plans = [
        make_plan(TWO),
        make_plan({"n0/0/a": (100.0, ["a", "b"])}),
        make_plan({"n0/0/b": (50.0, ["a"]), "n0/0/c": (50.0, ["b"])}),
        make_plan({"n0/0/a": (40.0, ["a", "b"]), "n0/1/b": (100.0, ["b"])}),
        make_plan({"n0/1/a": (100.0, ["b"])}, models=["a"]),
    ]
    load = arrivals([400.0, 300.0], 10.0, seed)
    system = running(plans[0], load, Life((0.0, 0.4), (0.0, 0.2)))
    total = np.zeros((2, 5), dtype=np.int64)
    for at in np.sort(rng.uniform(0, 10_000.0, 40)).tolist():
        system.advance(at)
        if rng.random() < 0.3:
            assert system.plan is not None
            system.lose([g.id for g in system.plan.gpulets if rng.random() < 0.5])
        total += system.observe().ended
        system.apply(plans[rng.integers(len(plans))])
    total += ended(system)
    assert total.sum(axis=1).tolist() == np.bincount(load[1], minlength=2).tolist()


def test_a_change_that_keeps_the_gpulets_costs_no_request() -> None:
    plan = make_plan(TWO)
    larger = plan.model_copy(
        update={
            "gpulets": tuple(
                g.model_copy(update={"models": tuple(r.model_copy(update={"batch_size": 12}) for r in g.models)})
                for g in plan.gpulets
            )
        }
    )
    load = arrivals([200.0, 100.0], 5.0)
    system = running(plan, load)
    for step in range(1, 50):
        system.advance(100.0 * step)
        system.apply(larger if step % 2 else plan)
    assert ended(system)[:, Outcome.OK].tolist() == np.bincount(load[1]).tolist()


def test_new_processes_serve_once_they_have_started() -> None:
    before, after = make_plan({"n0/0/a": (100.0, ["a"])}), make_plan({"n0/1/b": (100.0, ["a"])})
    system = running(before, arrivals([50.0], 10.0), Life((2.0, 2.0), (1.0, 1.0)))
    assert system.observe().waiting == {"n0/0/a"}
    system.advance(3000.0)
    assert system.observe().ready == {"n0/0/a"}
    system.apply(after)
    system.advance(3900.0)
    system.observe()  # what the old process still answered
    system.advance(4990.0)
    assert system.observe().ended[0, Outcome.OK] == 0
    system.advance(8000.0)
    look = system.observe()
    assert look.ready == {"n0/1/b"}
    assert look.ended[0, Outcome.OK] > 0
    assert look.share_s == pytest.approx(3.01)


def test_requests_of_a_lost_gpulet_are_tried_once_more() -> None:
    plan = make_plan(TWO, slo_ms=200.0)
    load = arrivals([150.0, 100.0], 4.0)
    system = running(plan, load)
    system.advance(2000.0)
    system.lose(["n0/0/a"])
    look = ended(system)
    assert look[:, Outcome.OK].sum() == len(load[0])  # the other carries all, and in time
    assert system.observe().broken == {"n0/0/a": "lost"}


def test_slow_batches_are_told_to_the_scheduler() -> None:
    plan = make_plan({"n0/0/a": (100.0, ["a"])}, slo_ms=40.0)
    load = arrivals([100.0], 8.0)
    system = running(plan, load)
    system.advance(2000.0)
    system.slow_down("a", 2.0)
    assert not system.observe().gpulets["n0/0/a"].ratio  # no such batch has run yet
    system.advance(3000.0)
    late = system.observe()
    assert late.gpulets["n0/0/a"].ratio == {"a": 2.0}
    system.advance(9000.0)
    rest = system.observe().ended[0]
    assert rest[Outcome.OK] > 0.9 * rest.sum()  # smaller batches, sent earlier
    system.slow_down("a", 1.0)
    assert not system.observe().gpulets


def test_what_cannot_start_is_broken_and_the_others_serve() -> None:
    plan = make_plan(TWO)
    load = arrivals([100.0, 0.0], 2.0)

    def broken(gpulet: Gpulet) -> str | None:
        return "no such weights" if gpulet.id == "n0/1/a" else None

    system = RunningSystem(
        ["a", "b"], [100.0, 100.0], *load, lambda s: make_scheduler("deferred", s), life=AT_ONCE, cannot_start=broken
    )
    system.apply(plan)
    system.advance(3000.0)
    look = system.observe()
    assert look.broken == {"n0/1/a": "no such weights"}
    assert look.ended[0, Outcome.OK] == len(load[0])


def sized_plan(*grid: int) -> Plan:
    """One gpu-let for model `a`, profiled at these sizes."""
    by_size = [{"sizes": {"tokens": n}, "latency": {"points": {b: 1.0 + 0.01 * n * b for b in (1, 8)}}} for n in grid]
    plan = make_plan({"n0/0/a": (100.0, ["a"])}, models=["a"]).to_data()
    plan["gpulets"][0]["models"][0] |= {"batch_size": 8, "by_size": by_size}
    plan["models"] = [{"name": "a", "rate_rps": 100, "slo_ms": 50, "sizes": {"tokens": {"quantiles": {0: 1, 100: 90}}}}]
    return Plan.from_data(plan)


def test_requests_go_to_the_size_classes_of_the_plan_that_stands() -> None:
    """The second plan covers fewer sizes: from then on larger requests are refused, and no others."""
    times, index = arrivals([100.0], 8.0)
    sizes = np.random.default_rng(3).integers(1, 91, (len(times), 1))
    wide, narrow = sized_plan(16, 100), sized_plan(8, 32, 64)
    system = RunningSystem(
        ["a"], [50.0], times, index, lambda made: make_scheduler("deferred", made), life=AT_ONCE, sizes=sizes
    )
    system.apply(wide)
    system.advance(4000.0)
    system.apply(narrow)
    counts = ended(system)[0]
    larger = int(((sizes[:, 0] > 64) & (times > 4000.0)).sum())
    assert larger <= counts[Outcome.REJECTED] + counts[Outcome.FAILED] <= larger + 2  # two may wait while it changes
    assert counts[Outcome.OK] == len(times) - counts[1:].sum()
    assert counts[Outcome.OK] > 0.98 * (len(times) - larger)


def test_a_model_with_size_classes_needs_the_sizes_of_its_requests() -> None:
    with pytest.raises(InvalidInputError, match="give the sizes of all requests"):
        running(sized_plan(16, 100), arrivals([100.0], 1.0))
