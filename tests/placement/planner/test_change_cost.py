"""What a change of plan is worth: requests first, then GPUs, and what is lost on the way."""

from __future__ import annotations

import pytest

from tenuto.placement import Plan
from tenuto.placement.expectation.outlook import Traffic
from tenuto.placement.planner.change_cost import ChangeScale, ChangeWorth, Rent
from tenuto.placement.planner.gpu_matching import match_to_running
from tests.instruments.plans import DURATIONS, gpu, make_plan
from tests.instruments.plans import running as running_plan

SINGLE, BOTH = {"n0/0/a": (100.0, ["a"])}, {"n0/0/a": (100.0, ["a"]), "n0/1/a": (100.0, ["a"])}
ONE, TWO = make_plan(SINGLE), make_plan(BOTH)  # a GPU carries about 600 r/s
HALF = make_plan({"n0/0/a": (50.0, ["a"])})
GPUS = (gpu("n0/0"), gpu("n0/1"))


def weigh(
    running: Plan, target: Plan, rate_rps: float, *, gpus: int = 2, horizon_s: float = 300.0, by_gpu: bool = True
) -> ChangeWorth:
    there = GPUS[:gpus]
    laid = match_to_running(target, running, there, keep_idle=True)
    runs = running_plan(running, Traffic({"a": rate_rps}), horizon_s=horizon_s)
    return ChangeScale(runs, there, Rent(by_gpu, {})).weigh(laid)


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


def test_a_change_that_loses_more_than_it_gains_does_not_pay() -> None:
    # The only GPU has to be empty before the new, slightly better gpu-let can start on it.
    rate_rps = 700.0
    running, target = make_plan({"n0/0/a": (90.0, ["a"])}), make_plan({"n0/0/b": (100.0, ["a"])})
    assert not weigh(running, target, rate_rps, gpus=1, horizon_s=100.0, by_gpu=False).pays
    assert weigh(running, target, rate_rps, gpus=2, horizon_s=100.0, by_gpu=False).pays
    assert weigh(running, target, rate_rps, gpus=1, horizon_s=1000.0, by_gpu=False).pays


@pytest.mark.parametrize(("rates_rps", "pays"), [((50.0, 53.0), False), ((50.0, 60.0), True), ((10.0, 20.0), True)])
def test_a_model_makes_way_for_another_only_where_chance_does_not_explain_the_gain(
    rates_rps: tuple[float, float], pays: bool
) -> None:
    one, other = make_plan(SINGLE), make_plan({"n0/0/b": (100.0, ["b"])})
    runs = running_plan(one, Traffic(dict(zip("ab", rates_rps, strict=True))))
    worth = ChangeScale(runs, GPUS[:1], Rent(False, {})).weigh(other)
    assert worth.pays == pays
    assert worth.lost_requests > 0.0
    both = make_plan({"n0/0/a": (100.0, ["a"]), "n0/1/a": (100.0, ["b"])})
    assert ChangeScale(runs, GPUS, Rent(False, {})).weigh(both).pays  # takes nothing from anybody


def test_saving_never_costs_a_request() -> None:
    rate_rps = 200.0
    running, target = make_plan({"n0/0/a": (100.0, ["a"])}), make_plan({"n0/0/b": (50.0, ["a"])})
    assert not weigh(running, target, rate_rps, gpus=1, by_gpu=False).pays
    assert weigh(running, target, rate_rps, gpus=2, by_gpu=False).pays


def test_what_random_arrivals_cost_counts_where_it_is_more_than_may_be_lost() -> None:
    # At an SLO of 26 ms one GPU has the time for 600 r/s on average, and for 98 % of them when they come at random.
    rate_rps = 600.0
    running, target = make_plan(BOTH, slo_ms=26.0), make_plan(SINGLE, slo_ms=26.0)
    held = weigh(running, target, rate_rps)
    assert not held.pays
    assert "the running one 600" in held.why
    assert weigh(target, running, rate_rps).pays
    assert weigh(running, target, 400.0).pays
