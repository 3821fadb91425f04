"""What the controller learns from looks: rates with their bursts, and models that lose more than they may."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest

from tenuto.deployments.control.attainment import Attainment
from tenuto.deployments.control.estimates import Estimates
from tenuto.deployments.control.interface import ModelSeen, Observation
from tenuto.deployments.control.rates import Rates, RatesMemory
from tenuto.deployments.control.remembered import Memory
from tenuto.deployments.control.settings import ControlSettings, RateSettings
from tests.instruments.plans import make_plan


def rates(declared: dict[str, float], *, ttft_s: Mapping[str, float] | None = None, **changes: float) -> Rates:
    settings = RateSettings(settle_s=60.0).model_copy(update=changes)
    return Rates(declared, settings, 0.99, RatesMemory(), ttft_s=ttft_s)


@pytest.mark.parametrize("declared", [5.0, 50.0, 500.0])
def test_a_rate_that_triples_is_known_within_two_looks(declared: float) -> None:
    rng = np.random.default_rng(1)
    known = rates({"m": declared})
    for second in range(100):
        assert not known.observe(second, 1.0, {"m": rng.poisson(declared)})
    seen = [bool(known.observe(second, 1.0, {"m": rng.poisson(3 * declared)})) for second in range(100, 106)]
    assert any(seen[: 2 if declared > 10 else 5])
    assert known.mean_rps["m"] == pytest.approx(3 * declared, rel=0.35)


def test_a_steady_rate_is_no_change_for_hours_and_its_bursts_are_covered() -> None:
    rng = np.random.default_rng(0)
    known = rates({"a": 3.0, "b": 80.0})
    counts = {name: rng.poisson(rate, 5_000) for name, rate in (("a", 3.0), ("b", 80.0))}
    covered = {"a": 0, "b": 0}
    for second in range(5_000):
        demand = known.traffic()
        for name, seen in counts.items():
            covered[name] += seen[second] <= demand.upper_rps[name]
        assert not known.observe(second, 1.0, {name: int(seen[second]) for name, seen in counts.items()})
    assert min(covered.values()) > 0.985 * 5_000


def test_bursty_arrivals_get_more_room_than_poisson() -> None:
    rng = np.random.default_rng(0)
    known = rates({"poisson": 50.0, "bursty": 50.0})
    for second in range(2000):
        burst = 4 * rng.poisson(50.0 / 4)  # an index of dispersion of 4
        known.observe(second, 1.0, {"poisson": rng.poisson(50.0), "bursty": burst})
    burst_rps = known.traffic().burst_rps
    assert burst_rps["bursty"] == pytest.approx(2.0 * burst_rps["poisson"], rel=0.25)


def test_bursts_are_those_of_a_second_however_often_looks_are_taken() -> None:
    rng = np.random.default_rng(0)
    seldom, often = rates({"m": 50.0}), rates({"m": 50.0})
    for second in range(2000):
        rate = 50.0 + 12.0 * (-1) ** (second // 4)  # for some seconds it is high, then low
        halves = rng.poisson(rate / 2, 2)
        seldom.observe(second, 1.0, {"m": int(halves.sum())})
        for half, arrived in enumerate(halves.tolist()):
            often.observe(second + half / 2, 0.5, {"m": arrived})
    assert often.traffic().burst_rps["m"] == pytest.approx(seldom.traffic().burst_rps["m"], rel=0.2)


@pytest.mark.parametrize("lasts_s", [1, 5, 15])
@pytest.mark.parametrize("at_s", [0, 30])
def test_a_burst_of_a_model_that_generates_is_no_need(lasts_s: int, at_s: int) -> None:
    """Before, one second of a burst counted as the mean rate for five minutes, and a plan for it took ten times the
    GPUs."""
    rng = np.random.default_rng(lasts_s)
    known = rates({"waits": 50.0, "fixed": 50.0}, ttft_s={"waits": 2.0})
    for second in range(at_s + lasts_s + 21):
        rate_rps = 500.0 if at_s <= second < at_s + lasts_s else 50.0
        known.observe(second, 1.0, {name: rng.poisson(rate_rps) for name in ("waits", "fixed")})
    # The declared rate counts for 20 s, and then all that came.
    assert known.mean_rps["waits"] == pytest.approx(50.0 + 450.0 * lasts_s / (20 + at_s + lasts_s + 21), rel=0.2)
    mean_rps, upper_rps = known.traffic().mean_rps, known.traffic().upper_rps
    assert known.mean_rps["waits"] < mean_rps["waits"] < 500.0 < mean_rps["fixed"] + 50.0
    assert upper_rps["waits"] == mean_rps["waits"]  # bursts count once
    assert upper_rps["fixed"] > mean_rps["fixed"]
    again = [known.observe(100.0 + second, 1.0, {"waits": 50 if second else 300}) for second in range(10)]
    assert not any("waits" in jumped for jumped in again)


def test_a_jump_of_a_model_that_generates_is_known_at_once_and_stays() -> None:
    rng = np.random.default_rng(3)
    known = rates({"waits": 50.0}, ttft_s={"waits": 2.0})
    seen = [
        known.observe(second, 1.0, {"waits": rng.poisson(150.0 if second >= 60 else 50.0)}) for second in range(180)
    ]
    assert not any(seen[:60])
    assert seen[60]
    assert known.mean_rps["waits"] == pytest.approx(150.0, rel=0.1)
    assert known.traffic().mean_rps["waits"] < 200.0


def test_a_need_is_remembered_until_it_has_settled() -> None:
    known = rates({"m": 100.0})
    for second in range(30):
        known.observe(second, 1.0, {"m": 100})
    high = known.traffic().upper_rps["m"]
    for second in range(30, 30 + 61):
        known.observe(second, 1.0, {"m": 10})
        if second < 30 + 55:
            assert known.traffic().upper_rps["m"] >= 0.95 * high
    assert known.traffic().upper_rps["m"] < 0.3 * high


@pytest.mark.parametrize("ttft_s", [{}, {"m": 2.0}])
@pytest.mark.parametrize("begun_s", [0.0, 1.7e9])
def test_what_is_declared_is_a_need_though_the_first_seconds_bring_less(
    ttft_s: dict[str, float], begun_s: float
) -> None:
    """A lull in the first second took half the GPUs, and the next seconds lost most of their requests."""
    known = rates({"m": 2000.0}, ttft_s=ttft_s)
    for second in range(60):
        known.observe(begun_s + second, 1.0, {"m": 600})
        assert known.traffic().mean_rps["m"] >= 2000.0
    for second in range(60, 120):
        known.observe(begun_s + second, 1.0, {"m": 600})
    assert known.traffic().mean_rps["m"] < 800.0


def test_a_rising_rate_is_planned_for_ahead_and_a_falling_one_is_not() -> None:
    rising, falling = rates({"m": 100.0}, settle_s=0.0), rates({"m": 300.0}, settle_s=0.0)
    for second in range(100):
        rising.observe(second, 1.0, {"m": 100 + second})
        falling.observe(second, 1.0, {"m": 300 - second})
    assert rising.traffic(20.0).mean_rps["m"] == pytest.approx(220.0, abs=8.0)
    assert falling.traffic(20.0).mean_rps["m"] >= 200.0


def test_models_that_join_start_from_their_declared_rate_and_memory_survives() -> None:
    known = rates({"m": 10.0})
    for second in range(50):
        known.observe(second, 1.0, {"m": 40})
    known.set_models({"m": 10.0, "new": 7.0})
    assert known.mean_rps["m"] == pytest.approx(40.0, rel=0.05)
    assert known.mean_rps["new"] == 7.0
    again = Rates({"m": 10.0, "new": 7.0}, RateSettings(settle_s=60.0), 0.99, known.memory())
    assert again.mean_rps == known.mean_rps
    known.set_models({"new": 7.0})
    assert list(known.traffic().mean_rps) == ["new"]


def ended(good: int, bad: int) -> dict[str, ModelSeen]:
    return {"m": ModelSeen(good + bad, good, bad)}


def test_losses_beyond_chance_are_found_soon_and_chance_is_not() -> None:
    rng = np.random.default_rng(0)
    watch = Attainment(["m"], target=0.99, window_s=20.0)
    for second in range(5_000):
        bad = rng.binomial(50, 0.01)
        assert not watch.observe(second, ended(50 - bad, bad))
    found = [bool(watch.observe(5_000 + second, ended(40, 10))) for second in range(3)]
    assert found[0]
    assert watch.lost_part(["m"])["m"] > 0.02
    watch.forget()
    assert not watch.observe(20_010, ended(50, 1))


def test_requests_that_come_together_are_lost_together() -> None:
    """A few of a burst were lost, and the model was planned for three times its rate from then on."""
    watch = Attainment(["m"], target=0.99, window_s=600.0)
    for second in range(100):
        assert not watch.observe(second, ended(10, 0), {"m": 3.0})
    assert not watch.observe(100, ended(2, 4), {"m": 3.0})
    assert any(watch.observe(101 + second, ended(6, 4), {"m": 3.0}) for second in range(4))
    assert watch.lost_part(["m"])["m"] < 0.5


@pytest.mark.parametrize("takes", [1.0, 1.1, 1.25, 2.0])
def test_losses_that_repeat_are_learnt_ever_longer_and_others_are_forgotten(takes: float) -> None:
    """A model loses a fifth of its requests once, and then for a day whenever it is planned for less than it takes."""
    plan = make_plan({"n0/0/a": (100.0, ["m"])})
    known = Estimates(ControlSettings(), Memory(plan, plan.workload))
    learnt_s: list[float] = []
    for now_s in range(0, 86_400, 20):
        planned = known.traffic(0.0).mean_rps["m"] / known.rates.traffic().mean_rps["m"]
        bad = 400 if planned < takes or not learnt_s else 0
        losing = known.observe(float(now_s), Observation(ended(2_000 - bad, bad), frozenset(), ())).losing
        if losing:
            known.raise_surplus(losing)
            learnt_s.append(now_s)
    if takes == 1.0:
        assert learnt_s == [0]
        assert not known.surpluses
    else:
        assert 2 <= len(learnt_s) < 100
        assert known.surpluses["m"].factor < 1.25 * takes / 0.99
        by_quarter = np.histogram(learnt_s, 4, (0.0, 86_400.0))[0]
        assert by_quarter[0] > by_quarter[-1]
