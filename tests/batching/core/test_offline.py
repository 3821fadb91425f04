"""Offline requests run in time that no other request loses."""

from __future__ import annotations

import math

import pytest

from tenuto.batching.core.scheduler import Decision, Dispatch, Drop, Scheduler
from tenuto.batching.core.system import NetworkDelay, System
from tenuto.batching.registry import make_scheduler
from tests.instruments.systems import everywhere_linear


@pytest.fixture
def system() -> System:
    """`a` takes 6 ms alone and has 40 ms; `b` takes 1 ms a request more than 1, and has a day."""
    return everywhere_linear([("a", 1.0, 5.0, 40.0, 1.0), ("b", 1.0, 1.0, 1000.0, 1.0)], 1)


def deferred(system: System) -> Scheduler:
    return make_scheduler("deferred", system, {"rehearse": False})


def drained(core: Scheduler, now: float) -> list[Decision]:
    """What is decided now."""
    while core.next_wake_ms <= now:
        core.wake(now)
    return core.drain()


def batches(decisions: list[Decision]) -> list[tuple[int, list[int]]]:
    return [(decision.program, [*decision.request_ids]) for decision in decisions if isinstance(decision, Dispatch)]


def test_an_idle_gpulet_takes_as_much_as_the_slack_beside_it_allows(system: System) -> None:
    core = deferred(system)
    for number in range(100):
        core.add_offline(0.0, 1, number, math.inf)
    ((program, ids),) = batches(drained(core, 0.0))
    assert program == 1
    assert 20 <= len(ids) <= 33  # a request of `a` that comes now still has its 6 ms
    assert core.queued_offline(1) == 100 - len(ids)
    assert core.queued(1) == 0


def test_a_request_with_an_slo_goes_first_and_is_never_late_for_it(system: System) -> None:
    core = deferred(system)
    core.add_offline(0.0, 1, 0, math.inf)
    core.add_request(0.0, 0, 1, 40.0)
    assert batches(drained(core, 0.0)) == [(0, [1])]
    core.batch_done(6.0, 0)
    assert batches(drained(core, 6.0)) == [(1, [0])]


def test_nothing_starts_that_would_end_after_the_latest_start_of_a_batch_that_is_held() -> None:
    system = everywhere_linear([("a", 1.0, 5.0, 40.0, 500.0), ("b", 1.0, 30.0, 1000.0, 1.0)], 1)
    core = make_scheduler("deferred", system, {"rehearse": False, "hold": 1.0, "save_above": 0.0})
    core.add_request(0.0, 0, 1, 40.0)
    core.add_offline(0.0, 1, 0, math.inf)
    decisions = drained(core, 0.0)
    assert (1, [0]) not in batches(decisions)


def test_a_held_batch_goes_where_its_gpulet_would_be_idle_while_offline_requests_wait() -> None:
    system = everywhere_linear([("a", 1.0, 5.0, 40.0, 500.0), ("b", 1.0, 9.0, 1000.0, 1.0)], 1)
    options = {"rehearse": False, "hold": 1.0, "save_above": 0.0}
    core, alone = make_scheduler("deferred", system, options), make_scheduler("deferred", system, options)
    for number in range(4):
        for each in (core, alone):
            each.add_request(0.0, 0, number, 40.0)
    core.add_offline(20.0, 1, 4, math.inf)
    assert batches(drained(alone, 20.0)) == []  # it is held for more requests
    assert batches(drained(core, 20.0)) == [(0, [0, 1, 2, 3])]  # no request of `b` fits before it
    core.batch_done(29.0, 0)
    assert batches(drained(core, 29.0)) == [(1, [4])]


def test_a_batch_takes_offline_requests_of_its_model_along(system: System) -> None:
    core = deferred(system)
    core.add_offline(0.0, 0, 0, math.inf)
    core.add_request(0.0, 0, 1, 40.0)
    assert batches(drained(core, 0.0)) == [(0, [1, 0])]


def test_a_cancelled_one_is_forgotten_and_one_whose_client_waits_no_longer_is_dropped(system: System) -> None:
    core = deferred(system)
    core.gpulet_lost(0.0, 0)
    core.add_offline(0.0, 1, 0, math.inf)
    core.add_offline(0.0, 1, 1, 50.0)
    assert core.cancel(0.0, 1, 0)
    assert not core.cancel(0.0, 1, 0)
    assert not batches(drained(core, 0.0))
    assert drained(core, 50.0) == [Drop(1, [1])]
    assert core.queued_offline(1) == 0


def test_a_program_that_nobody_asks_keeps_its_slack_and_starves_nobody(system: System) -> None:
    core = deferred(system)
    for number in range(200):
        core.add_offline(0.0, 1, number, math.inf)
    for at in (0.0, 2_000.0, 200_000.0):
        ((_, ids),) = batches(drained(core, at))
        assert 20 <= len(ids) <= 33  # a request of `a` that comes now still has its 6 ms, however rare it is
        core.batch_done(at + 99.0, 0)
    large = everywhere_linear([("a", 1.0, 5.0, 40.0, 1.0), ("b", 1.0, 99.0, 1000.0, 1.0)], 1)
    core = deferred(large)
    for number in range(2):
        core.add_offline(0.0, 1, number, math.inf)
    assert not batches([*drained(core, 0.0), *drained(core, 59_000.0)])
    assert batches(drained(core, 60_500.0)) == [(1, [0])]
    core.add_request(60_600.0, 0, 2, 60_640.0)
    assert not batches(drained(core, 60_600.0))


def test_models_take_turns(system: System) -> None:
    core = deferred(system)
    for number in range(300):
        core.add_offline(0.0, number % 2, number, math.inf)
    programs = []
    for turn in range(4):
        at = 100.0 * turn
        programs += [program for program, _ in batches(drained(core, at))]
        core.batch_done(at + 99.0, 0)
    assert programs == [0, 1, 0, 1]


def test_clients_take_turns_however_many_each_has_sent(system: System) -> None:
    core = deferred(system)
    for number in range(100):
        core.add_offline(0.0, 1, number, math.inf, "many")
    for number in range(100, 103):
        core.add_offline(0.0, 1, number, math.inf, "few")
    core.add_offline(0.0, 1, 103, math.inf, "one")
    assert core.cancel(0.0, 1, 103)
    ((_, first),) = batches(drained(core, 0.0))
    assert first[:7] == [0, 100, 1, 101, 2, 102, 3]
    assert core.queued_offline(1) == 103 - len(first)
    core.batch_done(99.0, 0)
    core.add_offline(99.0, 1, 104, math.inf, "one")
    ((_, second),) = batches(drained(core, 99.0))
    assert second[:3] == [len(first) - 3, 104, len(first) - 2]


def test_with_a_delay_to_the_gpulet_the_next_batch_is_sent_ahead() -> None:
    models = [("a", 1.0, 5.0, 60.0, 1.0), ("b", 1.0, 9.0, 1000.0, 1.0)]
    core = deferred(everywhere_linear(models, 1, NetworkDelay(ctrl_ms=1.0, response_ms=1.0)))
    for number in range(500):
        core.add_offline(0.0, 1, number, math.inf)
    (first,) = [each for each in drained(core, 0.0) if isinstance(each, Dispatch)]
    assert not batches(drained(core, first.finish_ms - 1.5))
    (second,) = [each for each in drained(core, first.finish_ms - 1.0) if isinstance(each, Dispatch)]
    assert second.start_ms == pytest.approx(first.finish_ms)


@pytest.mark.parametrize("name", ["eager", "symphony"])
def test_other_schedulers_say_that_they_run_none(name: str, system: System) -> None:
    core = make_scheduler(name, system, {})
    assert not core.takes_offline
    assert core.queued_offline(0) == 0
    with pytest.raises(NotImplementedError, match="offline"):
        core.add_offline(0.0, 0, 0, math.inf)
