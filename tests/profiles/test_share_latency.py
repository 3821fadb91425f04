"""Latency on shares that were not measured: which rule applies, and within which bounds."""

from __future__ import annotations

import pytest

from tenuto.errors import MissingProfileError
from tenuto.profiles import LinearLatency, ModelProfile, Profiles
from tenuto.profiles.share_latency import EVERY_RULE, latency_on_share, utilisation_factor, with_share
from tenuto.profiles.shipped import load_shipped

GRID = load_shipped("igniter-v100").models
THESIS = load_shipped("thesis-v100").models


@pytest.mark.parametrize("row", ["alexnet", "resnet50", "vgg19", "ssd"])
def test_the_whole_gpu_is_continued_where_only_smaller_shares_were_measured(row: str) -> None:
    whole = GRID[row]
    model = whole.model_copy(update={"points": tuple(p for p in whole.points if 10 < p.share_pct < 100)})
    latency, rule = latency_on_share(model, 100.0, EVERY_RULE)
    assert rule == "continued"
    for size in whole.batch_sizes(100.0):
        # Between 9 % too fast (SSD, batch 1) and 4 % too slow (AlexNet, batch 1).
        assert latency.at(size) == pytest.approx(whole.latency_ms(size), rel=0.1)
        largest = model.latency_ms(size, 80)
        assert 0.8 * largest - 1e-9 <= latency.at(size) <= largest


def test_a_share_below_the_smallest_measured_is_slower_than_that() -> None:
    latency, rule = latency_on_share(GRID["resnet50"], 5.0, EVERY_RULE)
    assert rule == "continued"
    assert all(latency.at(size) >= GRID["resnet50"].latency_ms(size, 10.0) for size in (1, 8, 32))


def test_measured_shares_and_those_between_are_taken_as_they_are() -> None:
    assert latency_on_share(GRID["vgg19"], 100.0)[0].at(1) == 2.8291  # published
    latency, rule = latency_on_share(GRID["vgg19"], 45.0)
    assert rule == "measured"
    assert GRID["vgg19"].latency_ms(8, 50.0) < latency.at(8) < GRID["vgg19"].latency_ms(8, 40.0)


def test_where_only_the_whole_gpu_was_measured_sm_utilisation_tells() -> None:
    model = THESIS["densenet121"]
    latency, rule = latency_on_share(model, 50.0)
    assert rule == "utilisation"
    assert latency.at(4) == pytest.approx(model.latency_ms(4) * utilisation_factor(13.9, 50.0))
    plain = model.model_copy(update={"points": tuple(p.model_copy(update={"metrics": {}}) for p in model.points)})
    with pytest.raises(MissingProfileError):
        latency_on_share(plain, 50.0)
    latency, rule = latency_on_share(plain, 50.0, EVERY_RULE)
    assert (rule, latency.at(4)) == ("proportional", pytest.approx(2 * model.latency_ms(4)))


def test_utilisation_is_never_slower_than_proportion_and_never_faster_than_the_whole_gpu() -> None:
    for busy in (0.0, 30.0, 100.0):
        assert 1.0 <= utilisation_factor(busy, 25.0) <= 4.0
    assert utilisation_factor(50.0, 100.0) == 1.0


def test_a_profile_learns_a_share() -> None:
    line = ModelProfile(line=LinearLatency(alpha_ms=1.0, beta_ms=3.0))
    latency, _ = latency_on_share(line, 50.0, EVERY_RULE)
    known = with_share(line, 50.0, latency)
    assert known.latency_ms(7, 50.0) == pytest.approx(20.0)
    assert with_share(GRID["ssd"], 50.0, GRID["ssd"].latency(50.0)) is GRID["ssd"]
    assert Profiles([])  # nothing is shipped by looking
