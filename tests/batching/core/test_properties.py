"""Generated scenarios: whatever happens, the promises of the deadline-keeping schedulers hold."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tenuto.batching.core.system import Host, Model, NetworkDelay, ScheduledGpulet, System
from tenuto.batching.registry import make_scheduler
from tenuto.batching.virtual.simulator import simulate
from tenuto.outcome import Outcome
from tests.batching.checked_run import CheckedRun, Event
from tests.batching.core import contract
from tests.batching.core.contract import Chosen, Drawn
from tests.instruments.seeds import seeds
from tests.instruments.systems import everywhere_linear

coefficients = st.tuples(st.floats(0.1, 5.0), st.floats(0.0, 10.0), st.floats(1.05, 6.0))


@st.composite
def systems(draw: Any, delays: bool = True) -> System:
    """Return models on pools of different speed, largest batch and model sets."""
    lines = draw(st.lists(coefficients, min_size=1, max_size=4))
    models = []
    for index, (alpha, beta, slack) in enumerate(lines):
        models.append(
            Model(f"m{index}", (alpha + beta) * slack * 2.0 + 3.0, draw(st.sampled_from([None, 50.0, 500.0])))
        )
    pools = []
    for _ in range(draw(st.integers(1, 3))):
        held = draw(st.sets(st.integers(0, len(lines) - 1), min_size=1))
        speed = draw(st.sampled_from([1.0, 1.0, 1.5]))
        hosts = {}
        for index in sorted(held):
            alpha, beta, _ = lines[index]
            largest = draw(st.integers(1, 12))
            hosts[index] = Host(
                (0.0, *(speed * (alpha * b + beta) for b in range(1, largest + 1))), draw(st.sampled_from([1.0, 1.2]))
            )
        pools.append(hosts)
    gpulets = [
        ScheduledGpulet(f"g{number}", f"g{number}", pools[draw(st.integers(0, len(pools) - 1))])
        for number in range(draw(st.integers(1, 5)))
    ]
    network = (
        draw(st.sampled_from([NetworkDelay(), NetworkDelay(0.1, 0.05, 0.5), NetworkDelay(0.0, 0.0, 1.0)]))
        if delays
        else NetworkDelay()
    )
    return System(tuple(models), tuple(gpulets), network)


@st.composite
def scenarios(draw: Any, faults: bool = True) -> tuple[System, list[Event]]:
    system = draw(systems())
    gaps = draw(st.lists(st.sampled_from([0.0, 0.0, 0.1, 0.5, 1.0, 3.0, 20.0]), min_size=1, max_size=60))
    events, now = [], 0.0
    kinds = ["add"] * 8 + (["cancel", "lost", "back", "slower"] if faults else [])
    for ref, gap in enumerate(gaps):
        now += gap
        kind = draw(st.sampled_from(kinds))
        if kind == "add":
            model = draw(st.integers(0, len(system.models) - 1))
            slo = system.models[model].slo_ms * draw(st.sampled_from([1.0, 1.0, 1.0, 0.5, 2.0, -1.0]))
            events.append(Event(now, "add", model, ref, slo))
        elif kind == "cancel":
            events.append(Event(now, "cancel", 0, draw(st.integers(0, ref))))
        elif kind == "slower":
            gpulet = draw(st.integers(0, len(system.gpulets) - 1))
            events.append(Event(now, "slower", gpulet, ref, draw(st.sampled_from([0.0, 0.2, 1.0]))))
        else:
            events.append(Event(now, kind, draw(st.integers(0, len(system.gpulets) - 1))))
    return system, events


chosen_schedulers = st.one_of(
    st.just(("deferred", {})),
    st.just(("eager", {})),
    st.tuples(
        st.just("symphony"),
        st.fixed_dictionaries(
            {"gather": st.sampled_from(["window", "head-first"]), "release": st.sampled_from(["frontrun", "target"])}
        ),
    ),
)


@given(scenarios(), chosen_schedulers)
def test_every_request_has_one_outcome_and_an_expired_one_is_answered_by_its_deadline(
    scenario: Drawn, chosen: Chosen
) -> None:
    contract.every_request_has_one_outcome_and_no_promise_is_broken(scenario, chosen)


@given(scenarios(faults=False), chosen_schedulers)
def test_the_same_events_give_the_same_batches(scenario: Drawn, chosen: Chosen) -> None:
    contract.the_same_events_give_the_same_batches(scenario, chosen)


@given(scenarios(faults=False), chosen_schedulers)
def test_an_idle_cluster_drops_nothing_that_could_have_been_met(scenario: Drawn, chosen: Chosen) -> None:
    contract.a_lone_request_that_can_be_met_is_served(scenario, chosen)


@given(st.integers(0, 2**32 - 1), st.floats(0.3, 3.0), st.integers(1, 6))
def test_the_fast_driver_agrees_with_the_checked_one(seed: int, load: float, gpus: int) -> None:
    system = everywhere_linear([("a", 1.0, 5.0, 25.0, None), ("b", 2.0, 6.0, 60.0, None)], gpus)
    rng = np.random.default_rng(seed)
    count = 300
    times = np.cumsum(rng.exponential(1.0 / (0.5 * gpus * load), count))
    models = rng.integers(0, 2, count).astype(np.int32)
    result = simulate(make_scheduler("deferred", system), times, models, warmup_s=0.0)
    events = [
        Event(float(t), "add", int(m), i, system.models[int(m)].slo_ms)
        for i, (t, m) in enumerate(zip(times, models, strict=True))
    ]
    out = CheckedRun(make_scheduler("deferred", system)).run(events)
    assert {int(i) for i in np.flatnonzero(result.outcome == Outcome.OK)} == set(out.served)
    assert {int(i) for i in np.flatnonzero(result.outcome == Outcome.EXPIRED)} == set(out.dropped)
    assert not (result.outcome == Outcome.LATE).any()
    assert sorted(result.batches.finish_ms) == pytest.approx(sorted(batch[4] for batch in out.batches))


@settings(max_examples=settings.default.max_examples // 4)
@example(8522563, 2.450247700836485)  # one model at 0.33 and another at 0.76 in the first 1.4 s
@given(st.integers(0, 2**32 - 1), st.floats(1.0, 2.5))
def test_no_model_starves_while_another_is_served_late(seed: int, load: float) -> None:
    """Equal models under overload all keep a fair part: none falls below half of the best one's attainment. In
    half of this time a model has some 20 batches, and one draw of 100 is below."""
    system = everywhere_linear([(f"m{i}", 1.0, 5.0, 40.0, None) for i in range(6)], 2)
    rng = np.random.default_rng(seed)
    times = np.cumsum(rng.exponential(1.0 / (0.9 * load), 6000))
    models = rng.integers(0, 6, len(times)).astype(np.int32)
    result = simulate(make_scheduler("deferred", system), times, models)
    attained = result.attainments()
    assert attained.min() >= 0.5 * attained.max()
    assert result.counts()[:, Outcome.LATE].sum() == 0


@pytest.mark.parametrize("name", ["deferred", "symphony", "eager"])
@pytest.mark.parametrize("seed", seeds(3, 12))
def test_a_scheduler_asks_to_be_woken_no_more_often_than_something_happens(seed: int, name: str) -> None:
    """Times that differ by nanoseconds, as sums of times do: what is nearly due must come due and not stay so."""
    rng = random.Random(seed)
    models = tuple(Model(f"m{m}", float(rng.choice((20, 30, 60))), rng.choice((None, 80.0))) for m in range(4))
    hosts = {m: Host((0.0, *(rng.randint(3, 6) + 1.0 * size for size in range(1, 20)))) for m in range(4)}
    system = System(models, tuple(ScheduledGpulet(f"g{g}", f"g{g}", hosts) for g in range(2)))
    scheduler = make_scheduler(name, system, {"rehearse": "false"} if name == "deferred" else {})
    woken, wake = 0, scheduler.wake

    def counted_wake(now_ms: float) -> None:
        nonlocal woken
        woken += 1
        assert woken < 40_000
        wake(now_ms)

    scheduler.wake = counted_wake  # type: ignore[method-assign]
    count = 2_000
    times = np.sort(np.array([rng.randint(0, 6_000) + rng.randint(0, 5) * 1.5e-6 for _ in range(count)]))
    simulate(scheduler, times, np.array([rng.randrange(4) for _ in range(count)], dtype=np.int32))
    assert woken < 6 * count
