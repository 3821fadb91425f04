"""Offline work in virtual time: it fills the time that others leave, and takes nothing that another needs."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tenuto.batching.core.deferred_steps import DeferredSteps
from tenuto.batching.core.step_scheduler import Step, StepLimits, StepScheduler
from tenuto.batching.registry import make_scheduler
from tenuto.batching.virtual.offline_backlog import FIRST_OFFLINE, OfflineBacklog
from tenuto.batching.virtual.result import SimulationResult
from tenuto.batching.virtual.simulator import simulate
from tenuto.batching.virtual.virtual_steps import VirtualSteps
from tenuto.profiles.generation import StepCost
from tests.instruments.seeds import seeds
from tests.instruments.systems import everywhere_linear

COST = StepCost.line(10.0, 0.05, 0.2, 0.001, 0.0)


def run(
    offline: dict[int, float] | None,
    seed: int = 1,
    load: float = 0.4,
    *,
    offline_ms: tuple[float, float] = (1.0, 4.0),
    **options: float,
) -> SimulationResult:
    """Half a minute of two models on two GPUs, and beside them a third one that nobody asks in a hurry."""
    models = [
        ("a", 1.0, 5.0, 80.0, 400.0 * load),
        ("b", 2.0, 10.0, 200.0, 200.0 * load),
        ("c", *offline_ms, 999.0, 0.01),
    ]
    draws = np.random.default_rng(seed)
    index = (draws.random(20_000) < 1 / 3).astype(np.int32)
    times = np.cumsum(draws.exponential(1000.0 / (600.0 * load), 20_000))
    last = int(np.searchsorted(times, 30_000.0))
    backlog = None if offline is None else OfflineBacklog(offline, lambda _: (1, 1))
    core = make_scheduler("deferred", everywhere_linear(models, 2), {"rehearse": False, **options})
    return simulate(core, times[:last], index[:last], duration_s=30.0, offline=backlog)


@pytest.mark.parametrize("seed", seeds(2, 5))
def test_the_idle_time_is_used_and_nobody_loses_by_it(seed: int) -> None:
    alone, both = run(None, seed), run({2: math.inf}, seed)
    assert "offline" not in alone.summary()
    assert both.summary()["attainment"] >= alone.summary()["attainment"] - 0.002
    assert both.summary()["offline"]["part_of_idle"] >= 0.85
    assert both.counts().sum() == alone.counts().sum()


@pytest.mark.parametrize("seed", seeds(2, 5))
@pytest.mark.parametrize("offline_ms", [(1.0, 4.0), (4.0, 8.0)])
def test_held_batches_keep_no_idle_time_from_offline_requests(offline_ms: tuple[float, float], seed: int) -> None:
    runs = [run({2: math.inf}, seed, offline_ms=offline_ms, hold=hold, save_above=0.0).summary() for hold in (0.4, 1.0)]
    assert min(each["offline"]["part_of_idle"] for each in runs) >= 0.85
    assert min(each["attainment"] for each in runs) >= 0.99


def test_a_backlog_runs_once_and_ends() -> None:
    log = run({2: 1000.0, 0: 500.0}).batches
    ran = dict.fromkeys(range(3), 0)
    for program, offline in zip(log.program, log.offline, strict=True):
        ran[program] += offline
    assert ran == {0: 500, 1: 0, 2: 1000}


def test_the_same_backlog_gives_the_same_run() -> None:
    first, second = (run({2: math.inf}).summary() for _ in "12")
    assert {**first, "wall_s": 0} == {**second, "wall_s": 0}


def decide(steps: StepScheduler) -> Step:
    step = steps.decide()
    assert step is not None
    steps.done(step)
    return step


def test_an_offline_sequence_leaves_its_memory_at_once_and_goes_on_later() -> None:
    steps = StepScheduler(StepLimits(8, 64, 64, block_tokens=4))
    assert steps.add(1, 20, 30, offline=True) is None
    assert decide(steps).first == [1]
    for _ in range(4):
        assert decide(steps).offline == 1
    assert steps.add(2, 40, 10) is None
    step = decide(steps)
    assert (step.gave_way, step.preempted, step.first, step.offline) == ([1], [], [2], 0)
    ended = [
        name for _ in range(60) if (each := steps.decide()) is not None and not steps.done(each) for name in each.last
    ]
    assert ended == [2, 1]
    assert steps.free_blocks == steps.blocks
    assert steps.names() == []


def test_the_last_place_is_of_a_sequence_that_is_not_offline() -> None:
    steps = StepScheduler(StepLimits(1, 64, 1000, block_tokens=4))
    steps.add(1, 5, 20, offline=True)
    decide(steps)
    steps.add(2, 5, 3)
    assert decide(steps).gave_way == [1]
    assert (steps.running, steps.waiting_offline) == (1, 1)


def test_a_cancelled_offline_sequence_is_forgotten() -> None:
    steps = StepScheduler(StepLimits(4, 64, 1000, block_tokens=4))
    steps.add(1, 5, 20, offline=True)
    decide(steps)
    assert steps.cancel(1)
    assert not steps.cancel(1)
    assert steps.decide() is None
    assert steps.free_blocks == steps.blocks


def test_clients_of_offline_sequences_take_turns() -> None:
    steps = StepScheduler(StepLimits(1, 64, 1000, block_tokens=4))
    for number, client in enumerate("aaaabac"):
        steps.add(number, 5, 1, offline=True, client=client)
    order = []
    while (step := steps.decide()) is not None:
        order += [name for name, _, read in step.chunks if not read]
        steps.done(step)
        if order == [0, 4]:
            steps.add(7, 5, 1, offline=True, client="b")  # it has had its turn in this round
    assert order == [0, 4, 6, 1, 7, 2, 3, 5]
    for number, client in enumerate("ab", 8):  # nothing waits: all begin anew
        steps.add(number, 5, 1, offline=True, client=client)
    assert [name for name, *_ in decide(steps).chunks] == [8]


def test_one_whose_client_waits_no_longer_is_given_up() -> None:
    steps = StepScheduler(StepLimits(1, 64, 1000, block_tokens=4))
    steps.add(1, 5, 50)
    steps.decide()
    steps.add(2, 5, 5, 0.0, 30.0, offline=True)
    steps.decide(31.0)
    assert steps.expired == [2]


@given(st.integers(0, 2**32))
def test_what_others_get_does_not_depend_on_offline_sequences(seed: int) -> None:
    """Without an order, the same steps bring the same tokens of all others, whatever is offline, and no step has more
    than it may."""
    rng = random.Random(seed)
    limits = StepLimits(rng.randint(1, 4), rng.randint(6, 32), 4 * rng.randint(12, 40), block_tokens=4)
    alone, both = StepScheduler(limits), StepScheduler(limits)
    for number in range(60):
        if rng.random() < 0.3:
            lengths = rng.randint(1, 30), rng.randint(1, 15)
            assert alone.add(number, *lengths) == both.add(number, *lengths)
        if rng.random() < 0.5:
            both.add(1000 + number, rng.randint(1, 30), rng.randint(1, 15), offline=True)
        first, second = alone.decide(), both.decide()
        assert both.free_blocks >= 0
        mine = [(step.chunks, step.first, step.last) for step in (first or Step(),)]
        others = [
            (
                [chunk for chunk in step.chunks if chunk[0] < 1000],
                *([n for n in names if n < 1000] for names in (step.first, step.last)),
            )
            for step in (second or Step(),)
        ]
        assert mine == others
        for steps, step in ((alone, first), (both, second)):
            if step is not None:
                assert step.prompt_tokens + step.sequences <= limits.max_batch_tokens
                steps.done(step)


def test_with_an_order_nobody_is_late_for_offline_sequences() -> None:
    rng = random.Random(3)
    arrivals = [
        (60.0 * number + rng.uniform(0, 50), rng.randint(50, 400), rng.randint(10, 60)) for number in range(300)
    ]

    def late(*, offline: bool) -> tuple[int, int]:
        steps = VirtualSteps(StepLimits(64, 1024, 20_000), COST, order=DeferredSteps(COST, 1024))
        number = FIRST_OFFLINE
        refused = 0
        for name, (at, prompt, output) in enumerate(arrivals):
            while steps.due_ms <= at:
                steps.advance(steps.due_ms)
            while offline and steps.waiting_offline < 3:
                steps.add(at, number, 300, 100, offline=True)
                number += 1
            refused += steps.add(at, name, prompt, output, at + 400.0, 50.0) is not None
        while steps.due_ms < math.inf:
            steps.advance(steps.due_ms)
        missed = sum(
            steps.first_ms[name] > arrivals[name][0] + 400.0
            or last - steps.first_ms[name] > 50.0 * (arrivals[name][2] - 1) + 1e-6
            for name, last in steps.last_ms.items()
        )
        assert len(steps.last_ms) + refused + len(steps.scheduler.expired) == len(arrivals)
        assert (steps.offline_tokens > 10_000) == offline
        online = sum(end - begin for begin, end in steps.busy_online())
        assert online <= sum(end - begin for begin, end in steps.busy)
        return refused, missed

    assert late(offline=False) == (0, 0)
    assert late(offline=True) == (0, 0)
