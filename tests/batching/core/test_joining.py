"""Requests of different sizes: which join a batch, and that neither small nor large ones suffer from the others."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tenuto.batching.core.scheduler import Dispatch, Scheduler
from tenuto.batching.core.system import Host, Model, NetworkDelay, ScheduledGpulet, System
from tenuto.batching.registry import make_scheduler
from tenuto.batching.virtual.simulator import simulate
from tenuto.outcome import Outcome
from tenuto.placement import Objective
from tests.batching.checked_run import CheckedRun, Event
from tests.batching.core import contract
from tests.batching.core.contract import Drawn
from tests.batching.core.test_properties import scenarios
from tests.instruments.seeds import seeds

GRID = ((16,), (64,), (256,))


def system(
    ms_per_token: float = 0.02,
    fixed_ms: float = 2.0,
    *,
    slo_ms: float = 60.0,
    rate_rps: float | None = None,
    gpus: int = 1,
    grid: tuple[tuple[int, ...], ...] = GRID,
    joins: bool = True,
    others: tuple[Model, ...] = (),
) -> System:
    """One model with size classes, and others of fixed shape that take 10 ms."""
    models = tuple(Model("m", slo_ms, rate_rps, sizes=sizes, joins=joins) for sizes in grid)
    work = [int(np.prod(sizes)) for sizes in grid]
    hosts = {
        place: Host((0.0, *(fixed_ms + ms_per_token * tokens * b for b in range(1, 33))))
        for place, tokens in enumerate(work)
    }
    hosts |= {len(models) + n: Host((0.0, *(9.0 + b for b in range(1, 17)))) for n in range(len(others))}
    gpulets = tuple(ScheduledGpulet(f"g{n}", f"g{n}", hosts) for n in range(gpus))
    return System((*models, *others), gpulets, objective="total")


def sent(core: Scheduler) -> list[Dispatch]:
    return [decision for decision in core.drain() if isinstance(decision, Dispatch)]


def held(core: Scheduler, *requests: tuple[int, float], now: float = 0.0) -> Scheduler:
    """Add requests, as (class, deadline), while the only gpu-let is away."""
    core.gpulet_lost(now, 0)
    core.wake(now)
    for number, (model, deadline) in enumerate(requests):
        core.add_request(now, model, number, deadline)
    core.drain()
    core.gpulet_back(now, 0)
    core.wake(core.next_wake_ms)
    return core


def eager_core(sized: System) -> Scheduler:
    """The scheduler, without holding."""
    return make_scheduler("deferred", sized, {"hold": 0.0, "rehearse": False})


def seldom(**how: Any) -> System:
    """A system whose requests come so seldom that each would run alone."""
    return system(rate_rps=1.0, **how)


def test_requests_join_where_a_padded_batch_takes_less_time_than_two() -> None:
    # 2 + 0.02 * 16 for the small one by itself; padded to 64 tokens it adds 1.28 ms.
    (batch,) = sent(held(eager_core(seldom()), (0, 60.0), (1, 60.0)))
    assert (batch.program, sorted(batch.request_ids)) == (1, [0, 1])
    assert batch.finish_ms - batch.start_ms == pytest.approx(2.0 + 0.02 * 64 * 2)


def test_requests_stay_apart_where_padding_takes_longer() -> None:
    first, *_ = sent(held(eager_core(seldom()), (0, 60.0), (2, 60.0)))
    assert len(first.request_ids) == 1  # 0.02 * 240 ms more than the 2 ms that a batch of its own costs


def test_requests_stay_apart_that_soon_fill_batches_of_their_own() -> None:
    first, *_ = sent(held(eager_core(system(rate_rps=5000.0)), (0, 60.0), (1, 60.0)))
    assert len(first.request_ids) == 1


def test_classes_that_do_not_join_stay_apart() -> None:
    first, *_ = sent(held(eager_core(seldom(joins=False)), (0, 60.0), (1, 60.0)))
    assert len(first.request_ids) == 1


def test_no_request_joins_a_batch_that_ends_after_its_deadline() -> None:
    # Together they take 4.56 ms, and the small one has 4 ms.
    first, *_ = sent(held(eager_core(seldom()), (0, 4.0), (1, 60.0)))
    assert (first.program, list(first.request_ids)) == (0, [0])


def test_a_batch_is_padded_to_what_covers_all_its_sizes() -> None:
    grid = ((8, 2), (2, 8), (8, 8))
    (batch,) = sent(held(eager_core(seldom(grid=grid)), (0, 60.0), (1, 60.0)))
    assert (batch.program, len(batch.request_ids)) == (2, 2)


@pytest.mark.parametrize(("start_by_ms", "requests"), [(30.0, 1), (300.0, 2)])
def test_a_joint_batch_makes_no_waiting_batch_late(start_by_ms: float, requests: int) -> None:
    """The other model's batch of 10 ms starts in time behind 26.4 ms alone, but not behind the 32.8 ms of both."""
    sized = seldom(ms_per_token=0.1, fixed_ms=20.0, slo_ms=400.0, others=(Model("other", 400.0, 1.0),))
    first, *_ = sent(held(eager_core(sized), (1, 33.0), (0, 390.0), (3, start_by_ms + 10.0)))
    assert (first.program, len(first.request_ids)) == (1, requests)


drawn_grids = st.sampled_from([GRID, ((4, 4), (4, 16), (16, 4), (16, 16)), ((3,), (4,), (400,))])


@st.composite
def sized_scenarios(draw: Any, faults: bool = True) -> Drawn:
    """The scenarios of all schedulers for one model with size classes beside one of fixed shape."""
    _, events = draw(scenarios(faults=faults))
    gpus = draw(st.integers(1, 3))
    sized = system(
        draw(st.sampled_from([0.001, 0.02, 0.2])),
        draw(st.sampled_from([0.1, 2.0, 10.0])),
        slo_ms=draw(st.sampled_from([40.0, 100.0, 300.0])),
        gpus=gpus,
        grid=draw(drawn_grids),
        others=(Model("other", 50.0),),
    )
    network = draw(st.sampled_from([NetworkDelay(), NetworkDelay(0.1, 0.05, 0.5)]))
    sized = System(sized.models, sized.gpulets, network, objective=draw(st.sampled_from(["total", "each"])))
    moved = [
        Event(e.at, e.kind, e.index % (len(sized.models) if e.kind == "add" else gpus), e.ref, 4.0 * e.slo_ms)
        if e.kind != "cancel"
        else e
        for e in events
    ]
    return sized, moved


CHOICES = st.sampled_from([("deferred", {}), ("deferred", {"hold": 0.0}), ("symphony", {}), ("eager", {})])


@given(sized_scenarios(), CHOICES)
def test_every_request_has_one_outcome_whatever_its_size(scenario: Drawn, chosen: contract.Chosen) -> None:
    contract.every_request_has_one_outcome_and_no_promise_is_broken(scenario, chosen)


@given(sized_scenarios(faults=False), CHOICES)
def test_the_same_sizes_give_the_same_batches(scenario: Drawn, chosen: contract.Chosen) -> None:
    contract.the_same_events_give_the_same_batches(scenario, chosen)


@given(st.lists(st.floats(0.0, 60.0), min_size=10, max_size=10), st.floats(0.0, 60.0), st.floats(10.0, 35.0))
def test_a_lone_large_request_and_ten_small_ones_are_all_in_time(
    small: list[float], large: float, takes_ms: float
) -> None:
    """Whenever they come: all small ones together take less than their SLO leaves beside the large one."""
    sized = system((takes_ms - 1.0) / 256, 1.0, slo_ms=90.0)
    arrivals = sorted([(at, 0) for at in small] + [(large, 2)])
    events = [Event(at, "add", model, number, 90.0) for number, (at, model) in enumerate(arrivals)]
    out = CheckedRun(make_scheduler("deferred", sized)).run(events)
    assert not out.dropped
    assert len(out.served) == 11


@pytest.mark.parametrize("seed", seeds(1, 3))
def test_neither_small_nor_large_requests_starve_below_capacity(seed: int) -> None:
    """Nine of ten requests are small, and the large ones take two thirds of the time of the gpu-let."""
    sized, rng = system(0.05, 1.0, slo_ms=90.0), np.random.default_rng(seed)
    times = np.cumsum(rng.exponential(1000.0 / 180.0, 8000))
    large = rng.random(len(times)) < 0.1
    sizes = np.where(large, 200, 12).reshape(-1, 1)
    result = simulate(make_scheduler("deferred", sized), times, np.zeros(len(times), dtype=np.int32), sizes=sizes)
    in_time = result.outcome == Outcome.OK
    assert in_time[large].mean() > 0.98
    assert in_time[~large].mean() > 0.99


@pytest.mark.parametrize("objective", ["total", "each"])
def test_the_objective_says_what_large_requests_lose_beyond_capacity(objective: Objective) -> None:
    """At twice the capacity `total` serves the small ones, and `each` the same part of both, within 5 points."""
    sized, rng = replace(system(0.05, 1.0, slo_ms=90.0), objective=objective), np.random.default_rng(1)
    times = np.cumsum(rng.exponential(1000.0 / 400.0, 8000))
    large = rng.random(len(times)) < 0.3
    sizes = np.where(large, 200, 12).reshape(-1, 1)
    result = simulate(make_scheduler("deferred", sized), times, np.zeros(len(times), dtype=np.int32), sizes=sizes)
    of_small, of_large = (
        float((result.outcome == Outcome.OK)[mine & result.measured].mean()) for mine in (~large, large)
    )
    if objective == "total":
        assert of_small > 0.95
        assert of_large < 0.5
    else:
        assert of_large == pytest.approx(of_small, abs=0.05)


def test_sizes_that_no_class_covers_are_refused_and_counted() -> None:
    sizes = np.array([[10], [300], [64], [65]])
    result = simulate(
        make_scheduler("deferred", system()), np.arange(4.0), np.zeros(4, dtype=np.int32), sizes=sizes, warmup_s=0.0
    )
    assert [model.name for model in result.system.reported] == ["m"]
    assert result.counts()[0].tolist() == [3, 0, 0, 1, 0]
    assert result.summary()["models"].keys() == {"m"}
