import pytest

from tenuto.deployments.dispatch.measured_times import LatencyRatios, WayMeter


def test_an_outlier_is_ignored_and_a_slowdown_is_followed() -> None:
    ratios = LatencyRatios()
    assert [ratios.record(0, 0, ratio, 0.0) for ratio in (1.0, 1.0, 9.0, 1.0, 1.0)] == [None] * 5
    factors = [ratios.record(0, 0, 2.0, 0.0) for _ in range(10)]
    assert factors[0] is None
    assert ratios.measured(0.0) == {0: {0: pytest.approx(2.0, abs=0.1)}}


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


def test_the_way_is_news_when_it_has_moved_however_often_somebody_looked() -> None:
    meter = WayMeter(1.0)
    assert meter.delay().ctrl_ms == 1.0
    for _ in range(64):
        meter.record_way(1.01)
        meter.delay()  # as /status does
    assert meter.news() is None  # 0.01 ms is not worth it
    for _ in range(128):
        meter.record_way(2.0)
        meter.delay()
    told = meter.news()
    assert told is not None
    assert (told.ctrl_ms, told.response_ms) == (2.0, 0.0)
    assert meter.news() is None


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
    told = meter.news()
    assert told is not None
    assert told.data_ms_per_request == 0.5


def test_what_was_measured_lately_is_told_by_gpulet() -> None:
    ratios = LatencyRatios()
    for _ in range(20):
        ratios.record(3, 1, 1.5, 100.0)
        ratios.record(2, 0, 1.0, 90.0)
    told = ratios.measured(101.0)
    assert set(told) == {1}
    assert 1.45 < told[1][3] <= 1.5


def test_what_moves_no_batch_by_a_twentieth_of_a_ms_is_not_worth_new_tables() -> None:
    ratios = LatencyRatios()
    assert [ratios.record(0, 0, 1.2, 0.0, longest_ms=0.2) for _ in range(20)] == [None] * 20
    assert any(ratios.record(0, 0, 2.0, 0.0, longest_ms=0.2) for _ in range(20))
