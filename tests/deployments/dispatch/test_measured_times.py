import random

import pytest

from tenuto.batching.core.system import NetworkDelay
from tenuto.deployments.dispatch.measured_times import LatencyRatios, WayMeter


def test_an_outlier_is_ignored_and_a_slowdown_is_followed() -> None:
    ratios = LatencyRatios()
    assert [ratios.record(0, 0, ratio, 0.0) for ratio in (1.0, 1.0, 9.0, 1.0, 1.0, 1.0, 1.0)] == [None] * 7
    told = [ratios.record(1, 0, 2.0, 0.0) for _ in range(20)]
    assert told[4] is not None
    assert told[4] > 1.8
    assert ratios.measured(0.0)[0][1] == pytest.approx(2.0, abs=0.1)


@pytest.mark.parametrize("spread", [0.01, 0.1, 0.5])
def test_what_single_batches_differ_by_is_not_learned(spread: float) -> None:
    rng = random.Random(1)
    ratios = LatencyRatios()
    told = [ratios.record(0, 0, rng.gauss(1.0, spread), 0.0) for _ in range(10_000)]
    assert sum(factor is not None for factor in told) < 300
    assert all(abs(factor - 1.0) < 3.0 * spread for factor in told if factor is not None)


def test_a_factor_that_nothing_confirms_fades_so_that_it_cannot_lock_the_system() -> None:
    ratios = LatencyRatios()
    for _ in range(20):
        ratios.record(0, 0, 40.0, 100.0)  # no deadline allows so much: nothing runs, nothing is measured
    assert ratios.fade(101.0) == []
    factors = [ratios.fade(103.0 + second)[0][2] for second in range(12)]
    assert factors == sorted(factors, reverse=True)
    assert factors[-1] < 1.6
    ratios.record(0, 0, 1.0, 200.0)
    assert ratios.fade(201.0) == []


def test_the_way_is_followed_once_enough_is_measured() -> None:
    meter = WayMeter(1.0)
    assert meter.delay().ctrl_ms == 1.0
    for _ in range(128):
        meter.record_way(2.0)
    assert meter.delay() == NetworkDelay(ctrl_ms=2.0)


def test_one_slow_batch_in_twenty_is_no_longer_way() -> None:
    meter = WayMeter(1.0)
    for number in range(200):
        meter.record_way(100.0 if number % 20 == 0 else 0.2)
    assert meter.delay().ctrl_ms == 0.2
    for _ in range(200):
        meter.record_way(100.0)
    assert meter.delay().ctrl_ms <= 4.0  # whatever happens, it stays a way


def test_copies_are_budgeted_by_request() -> None:
    meter = WayMeter(1.0)
    for _ in range(64):
        meter.record_copies(4.0, 8)
    assert meter.delay().data_ms_per_request == 0.5


def test_what_was_measured_lately_is_told_by_gpulet() -> None:
    ratios = LatencyRatios()
    for _ in range(20):
        ratios.record(3, 1, 1.5, 100.0)
        ratios.record(2, 0, 1.0, 90.0)
    told = ratios.measured(101.0)
    assert set(told) == {1}
    assert 1.45 < told[1][3] <= 1.5
