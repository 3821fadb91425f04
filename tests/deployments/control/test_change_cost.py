"""What a change of plan is worth: requests first, then GPUs, and what is lost on the way."""

from __future__ import annotations

import pytest

from tenuto.placement import Plan
from tenuto.placement.expectation.outlook import Traffic
from tenuto.placement.planner.change_cost import ChangeScale, ChangeWorth, Rent
from tenuto.placement.planner.change_stages import stages
from tests.instruments.plans import DURATIONS, gpu, make_plan
from tests.instruments.plans import running as running_plan

ONE = make_plan({"n0/0/a": (100.0, ["a"])})  # carries about 600 r/s
TWO = make_plan({"n0/0/a": (100.0, ["a"]), "n0/1/a": (100.0, ["a"])})
HALF = make_plan({"n0/0/a": (50.0, ["a"])})
GPUS = (gpu("n0/0"), gpu("n0/1"))


def weigh(
    running: Plan, target: Plan, rate_rps: float, *, horizon_s: float = 300.0, by_gpu: bool = True
) -> ChangeWorth:
    runs = running_plan(running, Traffic({"a": rate_rps}), horizon_s=horizon_s)
    return ChangeScale(runs, GPUS, Rent(by_gpu, {})).weigh(target)


def test_a_plan_that_carries_more_pays_where_the_requests_are() -> None:
    worth = weigh(ONE, TWO, 900.0)
    assert worth.pays
    assert worth.gained_requests > 0.0
    assert worth.lost_requests == 0.0
    assert worth.seconds == DURATIONS.start_s


def test_a_plan_that_carries_no_more_and_costs_as_much_does_not_pay() -> None:
    worth = weigh(ONE, TWO, 50.0)
    assert not worth.pays
    assert worth.why == "the new plan carries no more and needs 2.00 GPUs, the running one 1.00"


def test_a_plan_that_carries_less_never_pays_however_cheap() -> None:
    worth = weigh(TWO, ONE, 900.0, horizon_s=1e6)
    assert not worth.pays
    assert worth.why.startswith("the new plan carries ")


@pytest.mark.parametrize("horizon_s", [300.0, 3000.0])
def test_what_is_saved_grows_with_the_horizon(horizon_s: float) -> None:
    worth = weigh(TWO, ONE, 50.0, horizon_s=horizon_s)
    assert worth.pays
    assert worth.saved_rent == pytest.approx(horizon_s - worth.seconds)
    assert worth.lost_requests == 0.0


def test_rent_is_whole_gpus_or_the_shares_held_times_the_price() -> None:
    assert Rent(True, {}).of(HALF) == 1.0
    assert Rent(False, {}).of(HALF) == 0.5
    kind = HALF.gpus[0].type
    assert Rent(False, {kind: 3.0}).of(HALF) == 1.5


def test_the_stages_make_before_they_break_and_end_at_the_target() -> None:
    way = stages(ONE, TWO, GPUS, {"a": 900.0})
    assert {gpulet.id for gpulet in way[0].plan.gpulets} == {"n0/0/a", "n0/1/a"}
    assert (way[0].ready, way[0].lasts_s(DURATIONS)) == ({"n0/0/a"}, DURATIONS.start_s)
    assert {gpulet.id for gpulet in way[-1].plan.gpulets} == {gpulet.id for gpulet in TWO.gpulets}
    assert stages(ONE, ONE, GPUS, {"a": 900.0}) == []
