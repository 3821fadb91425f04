"""Canaries that are worse are found, and such as are not hardly ever: a claim on counts alone."""

from __future__ import annotations

from random import Random

import pytest

from tenuto.deployments.control.canaries import Canaries, WorseCanary
from tenuto.deployments.control.interface import ModelSeen
from tests.instruments.plans import make_plan
from tests.instruments.seeds import seeds

SPECS = make_plan({"n0/0/a": (100.0, ["m", "x"])}).models
MODELS = (SPECS[0], SPECS[0].model_copy(update={"name": "m:2", "share_pct": 5.0}), SPECS[1])


def seen(ended: int, lost: int) -> ModelSeen:
    return ModelSeen(ended, ended - lost, lost)


def found_after(canaries: Canaries, draw: Random, looks: int, part: float, rest_part: float, batch: int) -> int | None:
    """Return the look at which the canary is found worse, where so much is lost in whole batches; None: in none."""
    for look in range(looks):
        trouble = draw.random() < 0.1  # from which both suffer alike

        def of(batches: int, lost: float, trouble: bool = trouble) -> ModelSeen:
            part = max(lost, 0.6 * trouble)
            gone = [draw.random() < part for _ in range(batches)].count(True)
            return seen(batch * batches, batch * gone)

        if canaries.observe(MODELS, {"m": of(20, rest_part), "m:2": of(draw.randint(0, 3), part), "x": seen(9, 9)}):
            return look
    return None


@pytest.mark.parametrize(
    ("part", "batch"),
    [(0.01, 32), *(pytest.param(*each, marks=pytest.mark.night) for each in ((0.3, 8), (0.0, 1), (0.3, 1)))],
)
def test_a_canary_that_is_as_good_is_hardly_ever_taken_back_however_long_one_looks(part: float, batch: int) -> None:
    runs = 100
    alarms = sum(found_after(Canaries(0.95), Random(seed), 1000, part, part, batch) is not None for seed in range(runs))
    assert alarms <= 0.05 * runs + 3.0 * (0.05 * 0.95 * runs) ** 0.5  # three standard deviations above the bound


@pytest.mark.parametrize("seed", seeds(2, 5))
def test_one_that_is_better_is_never_taken_back(seed: int) -> None:
    assert found_after(Canaries(0.9), Random(seed), 2000, 0.0, 0.05, 4) is None


def test_one_that_fails_is_taken_back_after_a_few_requests_and_the_figures_are_told() -> None:
    canaries = Canaries(0.999)
    looks = [canaries.observe(MODELS, {"m": seen(10, 0), "m:2": seen(1, 1)}) for _ in range(16)]
    (worse,) = next(look for look in looks if look)
    assert 10 <= worse.ended <= 16  # twice the stock with each at most, and 1000 are enough
    assert worse == WorseCanary("m:2", "m", worse.ended, worse.ended, 10 * worse.ended, 0)


@pytest.mark.parametrize("seed", seeds(2, 5))
def test_one_that_loses_a_tenth_more_is_found_within_a_bounded_number_of_looks(seed: int) -> None:
    look = found_after(Canaries(0.999), Random(seed), 4000, 0.12, 0.02, 1)
    assert look is not None


def test_one_that_fails_after_it_was_better_for_long_is_found_soon() -> None:
    canaries = Canaries(0.999)
    for _ in range(20_000):
        assert not canaries.observe(MODELS, {"m": seen(100, 5), "m:2": seen(10, 0)})
    looks = [canaries.observe(MODELS, {"m": seen(10, 0), "m:2": seen(1, 1)}) for _ in range(100)]
    assert any(looks)


def test_looks_without_both_versions_say_nothing_and_a_new_canary_begins_anew() -> None:
    canaries = Canaries(0.999)
    for _ in range(100):
        assert not canaries.observe(MODELS, {"m": seen(0, 0), "m:2": seen(5, 5)})
        assert not canaries.observe(MODELS, {"m:2": seen(5, 5)})
        assert not canaries.observe(MODELS, {"m": seen(5, 5), "m:2": seen(5, 5)})
    for _ in range(30):
        for _ in range(10):
            assert not canaries.observe(MODELS, {"m": seen(10, 0), "m:2": seen(1, 1)})
        assert not canaries.observe(MODELS[:1], {"m": seen(10, 0)})  # it was taken back
    shadow = (MODELS[0], MODELS[1].model_copy(update={"share_pct": None, "shadow": True}))
    for _ in range(30):
        assert not canaries.observe(shadow, {"m": seen(10, 0), "m:2": seen(1, 1)})
