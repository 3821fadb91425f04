"""Rehearsals: what they choose, what they leave alone, and what they take of a core."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from tenuto.batching.core.deferred import DeferredOptions, DeferredScheduler
from tenuto.batching.core.deferred.deferring import Known
from tenuto.batching.core.scheduler import Scheduler
from tenuto.batching.core.system import Host, Model, NetworkDelay, ScheduledGpulet, System
from tenuto.batching.registry import make_scheduler
from tenuto.batching.rehearsal.budget import Budget
from tenuto.batching.rehearsal.observer import Rehearsals, rehearsals_of
from tenuto.batching.rehearsal.replay import Replay, Replayed, Setting
from tenuto.placement import Objective
from tests.batching.checked_run import CheckedRun, Event
from tests.instruments.systems import everywhere_linear


def crowd(seed: int, rate_rps: float, count: int) -> list[Event]:
    """Return arrivals of two models that each meet the other's batches on one gpu-let."""
    rng = np.random.default_rng(seed)
    times = np.cumsum(rng.exponential(1000.0 / rate_rps, count))
    return [Event(float(at), "add", int(rng.integers(0, 2)), number, 40.0) for number, at in enumerate(times)]


def two_on_one() -> System:
    hosts = dict.fromkeys((0, 1), Host((0.0, *(0.1 * size + 18.0 for size in range(1, 9)))))
    return System((Model("a", 40.0), Model("b", 40.0)), (ScheduledGpulet("g/a", "g", hosts),))


def shown(scheduler: Scheduler, events: list[Event], take: Callable[[Rehearsals, float, Replay], None]) -> Rehearsals:
    """Show arrivals to a scheduler and its observer, and hand over each replay; nothing ever ends on the gpu-lets."""
    rehearsals = rehearsals_of(scheduler)
    assert rehearsals is not None
    for event in events:
        while scheduler.next_wake_ms < event.at:
            scheduler.wake(scheduler.next_wake_ms)
        replay = rehearsals.arrived(event.at, event.index, event.at + event.slo_ms)
        if replay is not None:
            take(rehearsals, event.at, replay)
        scheduler.add_request(event.at, event.index, event.ref, event.at + event.slo_ms)
        scheduler.drain()
    return rehearsals


def test_only_a_scheduler_that_can_be_tuned_and_is_asked_to_be_is_observed() -> None:
    system = two_on_one()
    assert rehearsals_of(make_scheduler("deferred", system)) is not None
    for name, options in (("symphony", {}), ("eager", {}), ("deferred", {"rehearse": "false"})):
        assert rehearsals_of(make_scheduler(name, system, options)) is None


def test_rehearsals_find_that_holding_does_not_pay_and_say_so() -> None:
    run = CheckedRun(DeferredScheduler(two_on_one(), DeferredOptions(hold=1.0)))
    run.run(crowd(3, 30.0, 4000))
    assert run.rehearsals is not None
    status = run.rehearsals.status()
    assert status.hold < 1.0
    assert (status.rehearsals or 0) >= 4


def test_a_replay_changes_nothing_and_gives_the_same_in_another_process() -> None:
    found: list[Replay] = []
    scheduler = DeferredScheduler(two_on_one())
    shown(scheduler, crowd(3, 30.0, 260), lambda _observer, _now, replay: found.append(replay))
    assert pickle.loads(pickle.dumps(found[-1])).run() == found[-1].run() == found[-1].run()


@pytest.mark.parametrize(("rate_rps", "runs"), [(100.0, 1), (500.0, 4)])
def test_values_of_defend_that_decide_nothing_are_not_run_and_give_what_they_would(rate_rps: float, runs: int) -> None:
    made: list[float] = []

    class Counted(DeferredScheduler):
        def __init__(self, system: System, options: DeferredOptions, known: Known) -> None:
            made.append(options.defend)
            super().__init__(system, options, known)

    system = two_on_one()
    arrivals = [(event.at, event.index, event.at + event.slo_ms) for event in crowd(3, rate_rps, 600)]
    settings = tuple(Setting(0.4, defend) for defend in (0.5, 0.75, 1.0, 1.5))
    known = DeferredScheduler(system).known()
    replay = Replay(Counted, DeferredOptions(rehearse=False), system, known, arrivals, (0, 600), settings)
    found = replay.run()
    assert len(made) == runs
    assert found == [replay._replace(settings=(setting,)).run()[0] for setting in settings]
    assert len({replayed.met for replayed in found}) == (1 if runs == 1 else 3)


def test_without_an_answer_to_a_replay_serving_goes_on() -> None:
    found: list[Replay] = []
    scheduler = DeferredScheduler(two_on_one())
    shown(scheduler, crowd(3, 30.0, 3000), lambda _observer, _now, replay: found.append(replay))
    assert len(found) == 1


def test_a_replay_begins_with_what_was_learned() -> None:
    """On a gpu-let that takes twice as long as planned, over a way that takes 3 ms, beside one that is lost."""
    hosts = {0: Host((0.0, *(size + 5.0 for size in range(1, 9))))}
    system = System((Model("a", 40.0),), tuple(ScheduledGpulet(f"{name}/a", name, hosts) for name in "gh"))
    scheduler = DeferredScheduler(system)
    scheduler.update_latency(0, 0, 2.0)
    scheduler.update_network(NetworkDelay(3.0))
    scheduler.gpulet_lost(0.0, 1)
    found: list[Replay] = []
    events = [Event(100.0 * number, "add", 0, number, 40.0) for number in range(300)]
    shown(scheduler, events, lambda _observer, _now, replay: found.append(replay))
    assert found[0].known.lost == (1,)
    for replayed in found[0].run():
        assert replayed.met == replayed.offered
        assert replayed.busy_ms == pytest.approx(12.0 * len(found[0].arrivals))
    late = found[0]._replace(arrivals=[(at, model, at + 14.9) for at, model, _ in found[0].arrivals])
    assert {replayed.met for replayed in late.run()} == {(0,)}


@pytest.mark.parametrize("cpu_ms", [400.0, 900.0, 4000.0])
def test_rehearsals_take_a_twentieth_of_a_core_in_any_minute_however_dear_they_are(cpu_ms: float) -> None:
    """What they took decides when the next begins, even if each of them finds something else to be the best; one that
    takes more than all may waits for the next minute."""
    taken: list[float] = []  # when

    def take(rehearsals: Rehearsals, now: float, replay: Replay) -> None:
        best = replay.settings[len(taken) % len(replay.settings)]
        found = [Replayed(s, (9_000, 0), (9_000 if s == best else 0, 0), 1.0) for s in replay.settings]
        rehearsals.learn(found, now, cpu_ms)
        taken.append(now)

    events = [Event(2.5 * number, "add", 0, number, 40.0) for number in range(60_000)]
    rehearsals = shown(DeferredScheduler(two_on_one()), events, take)
    assert len(taken) > 2
    assert cpu_ms * (len(taken) - 1) <= 0.05 * taken[-1] + 1000.0
    for began in taken:
        assert cpu_ms * sum(began <= at < began + 60_000.0 for at in taken) <= max(3_000.0, cpu_ms)
    assert rehearsals.status().rehearsal_cpu_s == pytest.approx(len(taken) * cpu_ms / 1000.0)


def test_above_5000_requests_a_second_rehearsals_take_ten_microseconds_for_each() -> None:
    budget, rps, taken = Budget(), 20_000.0, []
    for now in np.arange(0.0, 300_000.0, 100.0):
        if budget.save_up(now, rps):
            budget.spend(900.0, now)
            taken.append(now)
    per_minute = [900.0 * sum(began <= at < began + 60_000.0 for at in taken) for began in taken]
    assert max(per_minute) <= 0.01 * 60.0 * rps
    assert 900.0 * len(taken) > 0.9 * 0.01 * 300.0 * rps


@pytest.mark.parametrize(("objective", "chosen"), [("total", 0.4), ("each", 0.7)])
def test_under_each_a_rehearsal_goes_by_the_models_served_worst(objective: Objective, chosen: float) -> None:
    """Served unevenly, more requests are in time in all."""
    system = replace(everywhere_linear([(f"m{i}", 1.0, 5.0, 50.0, None) for i in range(8)], 2), objective=objective)
    scheduler = DeferredScheduler(system, DeferredOptions(hold=0.4))
    uneven, even = (600, 600, *(900,) * 6), (800,) * 8
    Rehearsals(scheduler).learn(
        [
            Replayed(Setting(hold, 1.0), (1000,) * 8, met, 1.0)
            for hold, met in ((0.0, uneven), (0.4, uneven), (0.7, even))
        ],
        0.0,
        1.0,
    )
    assert scheduler.hold == chosen


@pytest.mark.parametrize(("small", "chosen"), [(100, 1.0), (98, 0.4)])
def test_gpu_time_is_not_saved_at_the_cost_of_a_small_model(small: int, chosen: float) -> None:
    """Two of 9,100 requests are nothing in all, and too many of a model with a hundred."""
    system = everywhere_linear([("large", 1.0, 5.0, 50.0, None), ("small", 1.0, 5.0, 50.0, None)], 2)
    scheduler = DeferredScheduler(system, DeferredOptions(hold=0.4))
    offered = (9_000, 100)
    Rehearsals(scheduler).learn(
        [
            Replayed(Setting(0.4, 1.0), offered, offered, 1_000.0),
            Replayed(Setting(1.0, 1.0), offered, (9_000, small), 900.0),
        ],
        0.0,
        1.0,
    )
    assert scheduler.hold == chosen
