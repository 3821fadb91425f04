from tenuto.deployments.dispatch.correction import LatencyCorrection, NetworkMeter


def test_an_outlier_is_ignored_and_a_slowdown_is_followed() -> None:
    correction = LatencyCorrection()
    assert [correction.record(0, 0, ratio) for ratio in (1.0, 1.0, 9.0, 1.0, 1.0)] == [None] * 5
    factors = [correction.record(0, 0, 2.0) for _ in range(10)]
    assert factors[0] is None
    assert correction.factor(0, 0) > 1.9
    assert correction.factor(1, 0) == 1.0


def test_delays_are_news_when_they_have_moved_however_often_somebody_looked() -> None:
    meter = NetworkMeter(3.0, 1.0)
    assert meter.delay().ctrl_ms == 1.0
    for _ in range(64):
        meter.record(1.01, 4)
        meter.delay()  # as /status does
    assert meter.news() is None  # 0.01 ms is not worth it
    for _ in range(64):
        meter.record(2.0, 4)
        meter.delay()
    told = meter.news()
    assert told is not None
    assert (told.ctrl_ms, told.response_ms) == (2.0, 3.0)
    assert meter.news() is None
    for _ in range(64):
        meter.record_answer(1.5)
        meter.record(2.0, 4)
    told = meter.news()
    assert told is not None
    assert told.response_ms == 4.5
