"""What each rival decides, on small cases one can follow by hand."""

from __future__ import annotations

import numpy as np
import pytest

from tenuto.batching.core.scheduler import Dispatch, Drop, Preempt
from tenuto.batching.core.system import System
from tenuto.batching.registry import make_scheduler
from tenuto.batching.virtual.simulator import simulate
from tenuto.outcome import Outcome
from tests.instruments.systems import everywhere_linear


def sizes(decisions: list[object]) -> list[int]:
    return [len(d.request_ids) for d in decisions if isinstance(d, Dispatch)]


def test_timeout_waits_for_size_or_time(one_gpu: System) -> None:
    options = {"batch_size": 3, "wait_ms": 4.0}
    core = make_scheduler("timeout", one_gpu, options)
    core.add_request(0.0, 0, 0, 20.0)
    core.add_request(1.0, 0, 1, 21.0)
    assert core.drain() == []
    assert core.next_wake_ms == pytest.approx(4.0)
    core.wake(core.next_wake_ms)
    assert sizes(core.drain()) == [2]
    core.batch_done(11.0, 0)
    for request in (2, 3, 4, 5):
        core.add_request(12.0, 0, request, 32.0)
    assert sizes(core.drain()) == [3]
    core.wake(16.1)
    core.batch_done(20.0, 0)
    assert sizes(core.drain()) == [1]  # the fourth has waited 8 ms by then


@pytest.mark.parametrize(("drop", "ok", "late", "expired"), [("late", 3, 0, 2), ("queue", 3, 1, 1), ("none", 3, 2, 0)])
def test_drop_rules_of_timeout(one_gpu: System, drop: str, ok: int, late: int, expired: int) -> None:
    """Five requests at 0 with an SLO of 20, one at a time: they would end at 6, 12, 18, 24 and 30."""
    core = make_scheduler("timeout", one_gpu, {"batch_size": 1, "wait_ms": 0.0, "drop": drop})
    result = simulate(core, np.zeros(5), np.zeros(5, dtype=np.int32), duration_s=1.0, warmup_s=0.0)
    assert result.counts()[0, [Outcome.OK, Outcome.LATE, Outcome.EXPIRED]].tolist() == [ok, late, expired]


def test_clockwork_runs_powers_of_two_and_its_other_order_single_requests(one_gpu: System) -> None:
    for order, expected in (("earliest", 4), ("latest", 1)):
        core = make_scheduler("clockwork", one_gpu, {"order": order})
        for request in range(7):
            core.add_request(0.0, 0, request, 30.0)
            core.wake(0.0)
        core.drain()
        core.batch_done(6.0, 0)
        assert sizes(core.drain()) == [expected]


def test_nexus_shares_one_model_evenly_over_the_gpulets() -> None:
    core = make_scheduler("nexus", everywhere_linear([("a", 1.0, 5.0, 40.0, 100.0)], 4))
    taken = []
    for request in range(8):
        core.add_request(0.0, 0, request, 40.0)
        taken += [d.gpulet for d in core.drain() if isinstance(d, Dispatch)]
    assert sorted(taken) == [0, 1, 2, 3]
    assert core.queued(0) == 4
    core.batch_done(6.0, 2)
    assert [(d.gpulet, len(d.request_ids)) for d in core.drain() if isinstance(d, Dispatch)] == [(2, 1)]


def test_nexus_drops_a_head_that_keeps_the_planned_batch_from_running() -> None:
    core = make_scheduler("nexus", everywhere_linear([("a", 1.0, 5.0, 24.0, 100.0)], 1))  # plans batches of 6
    core.add_request(0.0, 0, 0, 24.0)
    core.drain()
    core.add_request(0.5, 0, 1, 13.0)
    for request in range(2, 8):
        core.add_request(1.0, 0, request, 25.0)
    core.batch_done(6.0, 0)
    decisions = core.drain()
    assert Drop(0, [1]) in decisions
    assert sizes(decisions) == [6]


def test_nexus_plans_anew_for_the_rates_it_sees() -> None:
    system = everywhere_linear([("a", 1.0, 5.0, 40.0, 300.0), ("b", 1.0, 5.0, 40.0, 300.0)], 4)
    options = {"plan": "epochs", "epoch_s": 2.0, "early_epoch_s": 1.0, "rate_window_s": 1.0, "head_room_pct": 20.0}
    rng = np.random.default_rng(0)
    times = np.cumsum(rng.exponential(1.0, 20_000))  # 1000 r/s, nine in ten for model a
    models = (rng.random(len(times)) < 0.1).astype(np.int32)
    result = simulate(make_scheduler("nexus", system, options), times, models, warmup_s=6.0)
    assert result.attainments().min() > 0.97
    assert (result.outcome == Outcome.OK).mean() > 0.8


def test_shepherd_preempts_for_three_times_the_size(one_gpu: System) -> None:
    core = make_scheduler("shepherd", one_gpu)
    core.add_request(0.0, 0, 0, 20.0)
    assert sizes(core.drain()) == [1]
    core.add_request(0.5, 0, 1, 20.5)
    core.add_request(0.6, 0, 2, 20.6)
    assert core.drain() == []  # three with the running one: below 3.03
    core.add_request(0.7, 0, 3, 20.7)
    decisions = core.drain()
    assert decisions[0] == Preempt(0)
    assert sizes(decisions) == [4]
    assert core.queued(0) == 0


def test_shepherd_counts_the_lost_work(one_gpu: System) -> None:
    times = np.array([0.0, 0.5, 0.6, 0.7])
    result = simulate(make_scheduler("shepherd", one_gpu), times, np.zeros(4, dtype=np.int32), warmup_s=0.0)
    assert result.batches.preempted == [True, False]
    assert result.summary()["preempted_batches"] == 1
    assert (result.outcome == Outcome.OK).all()


def test_shepherd_takes_the_largest_batch_whatever_is_urgent() -> None:
    core = make_scheduler("shepherd", everywhere_linear([("a", 1.0, 5.0, 50.0, None), ("b", 1.0, 5.0, 50.0, None)], 1))
    core.add_request(0.0, 0, 0, 50.0)
    core.add_request(0.0, 0, 9, 13.0)
    core.add_request(0.0, 1, 1, 50.0)
    core.add_request(0.0, 1, 2, 50.0)
    core.drain()
    core.batch_done(6.0, 0)
    assert [(d.program, len(d.request_ids)) for d in core.drain() if isinstance(d, Dispatch)] == [(1, 2)]
