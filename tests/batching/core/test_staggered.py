"""The staggered batch and the online rate."""

from __future__ import annotations

import pytest

from tenuto.batching.core.staggered import ArrivalRate, staggered_batch

RESNET50 = [0.0, *(1.053 * b + 5.072 for b in range(1, 19))]
INCEPTION = [0.0, *(5.09 * b + 18.368 for b in range(1, 11))]


@pytest.mark.parametrize(
    ("latency", "slo", "rate", "bound_batch"), [(RESNET50, 25.0, 5839.0, 16), (INCEPTION, 70.0, 1083.0, 8)]
)
def test_target_is_the_staggered_batch_of_table_2(
    latency: list[float], slo: float, rate: float, bound_batch: int
) -> None:
    assert staggered_batch(latency, slo, rate) == bound_batch


def test_target_where_less_than_one_gpu_is_needed_is_what_can_be_collected() -> None:
    size = staggered_batch(RESNET50, 25.0, 300.0)
    assert RESNET50[size] + size / 0.3 <= 25.0 < RESNET50[size + 1] + (size + 1) / 0.3


def test_target_without_a_rate_fits_two_batches() -> None:
    size = staggered_batch(RESNET50, 25.0, None)
    assert 2 * RESNET50[size] <= 25.0 < 2 * RESNET50[size + 1]


def test_target_is_at_least_one() -> None:
    assert staggered_batch([0.0, 30.0], 25.0, 10.0) == 1
    assert staggered_batch(RESNET50, 1.0, 10.0) == 1


def test_the_rate_follows_the_last_seconds() -> None:
    rate = ArrivalRate()
    assert rate.rps is None
    now = 0.0
    for per_second in (100.0, 400.0):
        for _ in range(40):
            rate.count += int(per_second / 4)
            now += 250.0
            rate.roll(now)
        assert rate.rps == pytest.approx(per_second, rel=0.06)
        assert rate.recent_rps == pytest.approx(per_second)


def test_what_came_in_the_last_second_tells_of_a_change_and_of_silence() -> None:
    rate = ArrivalRate()
    for number in range(1, 49):
        rate.count += 100 if number <= 40 else 5
        rate.roll(250.0 * number)
    assert rate.recent_rps == pytest.approx(20.0)
    assert rate.rps is not None
    assert rate.rps > 200.0
    assert rate.is_silent(14_000.0)
    rate.look_back(21_500.0)
    assert rate.recent_rps == pytest.approx(1.0)


def test_the_rate_is_unknown_before_ten_requests() -> None:
    rate = ArrivalRate()
    rate.roll(0.0)
    rate.count += 5
    rate.roll(1000.0)
    assert rate.rps is None
    assert rate.next_at == 1250.0
