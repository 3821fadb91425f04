"""The requests of applications in virtual time: how many each call makes, and which are withdrawn with it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tenuto.batching.applications.application_run import ApplicationRun
from tenuto.batching.core.build import everywhere
from tenuto.batching.core.system import NetworkDelay
from tenuto.batching.registry import make_scheduler
from tenuto.batching.virtual.application_load import ApplicationLoad, Joins
from tenuto.batching.virtual.simulator import simulate
from tenuto.outcome import Outcome
from tenuto.placement import Cluster
from tenuto.profiles import Profiles
from tests.instruments.fan_out import FAST, game, load_of, traffic, workload

FUNCTION = "tests.instruments.fan_out:crops"


def ocr(**changes: Any) -> dict[str, Any]:
    """A detector, its crops (two in the mean, at most four), and one request that joins them."""
    stages = [
        {"model": "detect", "latency": FAST},
        {"model": "read", "after": ["detect"], "latency": FAST, "map": FUNCTION, "count": 2, "most": 4},
        {"model": "join", "after": ["read"], "latency": FAST},
    ]
    return {"name": "ocr", "rate_rps": 50.0, "slo_ms": 120.0, "stages": stages, **changes}


def rows_of(load: ApplicationLoad, call: int, stage: int) -> list[int]:
    rows: list[int] = np.flatnonzero((load.owner == call) & (load.stage == stage)).tolist()
    return rows


# --- how many requests a call makes ----------------------------------------------------------------------------------


def test_functions_make_drawn_numbers_of_requests_the_same_in_every_run() -> None:
    load, again = (load_of(workload(ocr()), 20.0) for _ in range(2))
    counts = np.bincount(load.owner[load.stage == 1], minlength=len(load.calls))

    assert np.array_equal(load.owner, again.owner)
    assert counts.max() == 4
    assert counts.min() == 0
    assert counts.mean() == pytest.approx(2.0, rel=0.1)
    assert all(len(rows_of(load, call, 0)) == len(rows_of(load, call, 2)) == 1 for call in range(50))


def test_what_comes_behind_a_stage_without_requests_does_not_wait_for_it() -> None:
    stages = ocr()["stages"][1:]
    stages[0] = {**stages[0], "after": [], "count": 0.5}
    load = load_of(workload(ocr(stages=stages)), 20.0)

    for call, (_, at_ms) in load.calls.items():
        (last,) = rows_of(load, call, 1)
        assert load.times_ms[last] == at_ms or rows_of(load, call, 0)


def test_a_call_without_requests_is_answered_at_once() -> None:
    only = [{**ocr()["stages"][1], "after": [], "count": 0.1}]
    load = load_of(workload(ocr(stages=only)), 20.0)
    empty = sorted(load.calls.keys() - {*load.owner.tolist()})
    joins = Joins(load)

    assert len(empty) > len(load.calls) / 2
    assert np.all(joins.outcome[empty] == Outcome.OK)
    assert joins.counts()["ocr"][Outcome.OK] == len(empty)
    assert joins.answered_ms[empty].tolist() == [load.calls[call][1] for call in empty]


def test_an_answer_goes_its_way_back_before_the_stages_behind_begin() -> None:
    work = workload(traffic(rate_rps=2.0))
    one_ms, three_ms = 5.0, 7.0  # of batches of one and of three

    for delay in (NetworkDelay(), NetworkDelay(ctrl_ms=0.5, response_ms=2.0)):
        own_ms = delay.ctrl_ms + delay.response_ms
        system = everywhere(work, Cluster.parse("v100:4"), Profiles(()), delay)
        load = load_of(work, 5.0)
        joins = Joins(load)
        simulate(
            make_scheduler("eager", system),
            load.times_ms,
            load.model_index,
            deadlines_ms=load.deadlines_ms,
            follows=joins,
        )

        assert np.all(joins.outcome == Outcome.OK)
        assert joins.stage_ms == pytest.approx(
            np.tile([one_ms, three_ms, one_ms, one_ms], (len(load.calls), 1)) + own_ms
        )
        begun_ms = np.array([at_ms for _, at_ms in load.calls.values()])
        assert joins.answered_ms - begun_ms == pytest.approx(2 * one_ms + three_ms + 3 * own_ms)


# --- calls that end early -------------------------------------------------------------------------------------------


def test_a_call_is_lost_once_and_withdraws_the_requests_that_have_no_answer() -> None:
    load = load_of(workload(game()), 0.5)
    at = [at_ms for _, at_ms in load.calls.values()]
    joins = Joins(load, counted_from_ms=at[1])
    first, second = (np.flatnonzero(load.owner == call).tolist() for call in (0, 2))
    for row in (*first, *second):
        assert joins.arrived(row, float(load.times_ms[row])) == load.calls[int(load.owner[row])][1] + 400.0

    assert joins.answered(first[:2], 50.0) == []
    assert joins.given_up(first[2:4], Outcome.EXPIRED, 60.0) == [(row, None) for row in first[3:]]
    assert joins.given_up(second, Outcome.REJECTED, 70.0) == [(row, None) for row in second[1:]]
    assert joins.answered(second, 80.0) == []
    assert joins.lost() == {"game": 1}  # the first call came before the warm-up was over
    assert joins.outcome[[0, 1, 2]].tolist() == [Outcome.EXPIRED, Outcome.FAILED, Outcome.REJECTED]


def test_losses_count_of_what_arrived_after_the_warm_up() -> None:
    """A request that arrives in the warm-up may be lost after it. Trials compare losses with what arrived after it."""
    alone = {"name": "m", "rate_rps": 900.0, "slo_ms": 120.0, "latency": FAST}
    work = workload(traffic(rate_rps=2.0), models=[alone])
    system, load = everywhere(work, Cluster.parse("v100:1"), Profiles(())), load_of(work, 2.0)
    joins, seen = Joins(load, counted_from_ms=500.0), list[int]()

    def note(lost: list[int]) -> bool:
        seen[:] = lost
        return False

    result = simulate(
        make_scheduler("eager", system),
        load.times_ms,
        load.model_index,
        warmup_s=0.5,
        deadlines_ms=load.deadlines_ms,
        follows=joins,
        stop=note,
    )
    at = [model.name for model in system.reported].index("m")
    arrived = (load.model_index == at) & (load.times_ms >= 500.0)
    lost = int(arrived.sum() - result.counts()[at][Outcome.OK])
    assert joins.lost_alone[at] == lost
    assert 0 < seen[at] <= lost  # at the last arrival


def test_a_call_goes_on_without_what_may_be_missing() -> None:
    stages = traffic()["stages"]
    stages[1] = {**stages[1], "allow_missing": True}
    load = load_of(workload(traffic(stages=stages)), 0.2)
    joins = Joins(load)
    at_ms, rows = load.calls[0][1], [rows_of(load, 0, stage) for stage in range(4)]
    joins.arrived(rows[0][0], at_ms)
    assert [row for row, _ in joins.answered(rows[0], at_ms + 10)] == rows[1] + rows[2]
    assert joins.answered(rows[2], at_ms + 20) == []
    assert joins.given_up(rows[1][:2], Outcome.EXPIRED, at_ms + 30) == []
    ((last, deadline),) = joins.given_up(rows[1][2:], Outcome.EXPIRED, at_ms + 40)
    assert last == rows[3][0]
    assert deadline == pytest.approx(at_ms + 120.0)
    assert joins.answered([last], at_ms + 50) == []
    assert joins.outcome[0] == Outcome.OK
    assert joins.stage_ms[0] == pytest.approx([10.0, 30.0, 10.0, 10.0])


def test_what_cannot_end_costs_nothing_more() -> None:
    work = workload(traffic())
    load = load_of(work, 0.2)
    joins = Joins(load)
    joins.follow(everywhere(work, Cluster.parse("v100:1"), Profiles(())))  # a request takes 5 ms at least
    at_ms, rows = load.calls[0][1], [rows_of(load, 0, stage) for stage in range(4)]
    assert joins.arrived(rows[0][0], at_ms) == pytest.approx(at_ms + 60.0)  # budgets 60, 30, 30
    assert joins.answered(rows[0], at_ms + 111) == []
    assert joins.outcome[0] == Outcome.EXPIRED

    late = load.calls[1][1] + 106
    assert joins.arrived(rows_of(load, 1, 0)[0], late) is None  # three stages take 15 ms
    assert joins.lost() == {"traffic": 2}


@pytest.mark.parametrize("scheduler", ["deferred", "symphony", "eager"])
def test_nothing_of_a_lost_call_begins_after_the_loss(scheduler: str) -> None:
    work = workload(ocr(rate_rps=250.0), traffic(rate_rps=60.0))
    load = load_of(work, 5.0, 1)
    lost_at: dict[float, float] = {}  # by the time of arrival

    class NotedRun(ApplicationRun):
        def give_up(self, now: float) -> None:
            super().give_up(now)
            lost_at[self.arrived_ms] = now

    joins = Joins(load, make_run=NotedRun)
    core = make_scheduler(scheduler, everywhere(work, Cluster.parse("v100:1"), Profiles(())))
    result = simulate(
        core, load.times_ms, load.model_index, duration_s=5.0, deadlines_ms=load.deadlines_ms, follows=joins
    )

    lost = np.flatnonzero(joins.outcome >= Outcome.EXPIRED)
    assert 0.1 < len(lost) / len(load.calls) < 0.9
    assert {load.calls[call][1] for call in lost} == lost_at.keys()
    for call in lost:
        dispatched_ms = result.dispatched_ms[load.owner == call]
        assert np.all(np.isnan(dispatched_ms) | (dispatched_ms <= lost_at[load.calls[call][1]]))
    assert sum(sum(counts) for counts in joins.counts().values()) == len(load.calls)
