"""The margin before deadlines: controlled by lateness, bounded, never a lock."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tenuto.deployments.entry.margin import Margin

Answers = st.lists(st.one_of(st.none(), st.floats(0.0, 500.0)), max_size=80)  # None: in time; else late by so much


def after(answers: list[float | None], slo_ms: float = 25.0, alone_ms: float = 6.0) -> Margin:
    margin = Margin()
    for late_ms in answers:
        if late_ms is None:
            margin.in_time()
        else:
            margin.late(late_ms, margin.reserve_ms(slo_ms, alone_ms) - margin.allowance_ms(slo_ms))
    return margin


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(Answers, st.floats(0.0, 10_000.0), st.floats(0.0, 10_000.0))
def test_whatever_was_late_a_lone_request_keeps_half_of_its_room(
    answers: list[float | None], slo_ms: float, alone_ms: float
) -> None:
    reserve_ms = after(answers).reserve_ms(slo_ms, alone_ms)
    assert 0.0 <= reserve_ms <= max(0.0, (slo_ms - alone_ms) / 2.0)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(Answers)
def test_without_answers_it_comes_back_to_its_start(answers: list[float | None]) -> None:
    margin = after(answers)
    start_ms = Margin().margin_ms
    margin.tick()
    for _ in range(30):
        before = abs(margin.margin_ms - start_ms)
        margin.tick()
        assert abs(margin.margin_ms - start_ms) <= before
    assert margin.margin_ms == pytest.approx(start_ms, abs=0.1)


@pytest.mark.parametrize("attainment", [0.9, 0.99, 0.999])
@pytest.mark.parametrize("scale_ms", [0.3, 2.0])
def test_the_share_that_is_late_settles_at_a_third_of_what_the_attainment_leaves(
    attainment: float, scale_ms: float
) -> None:
    """Delays that nobody planned, exponential: an answer is late where the delay exceeds the margin kept."""
    import random

    delays = random.Random(7)
    margin = Margin(attainment)
    late = 0
    count = 200_000
    for number in range(2 * count):
        kept_ms = margin.margin_ms
        late_ms = delays.expovariate(1.0 / scale_ms) - kept_ms
        if late_ms <= 0.0:
            margin.in_time()
        else:
            margin.late(late_ms, kept_ms)
            late += number >= count
    assert late / count == pytest.approx((1.0 - attainment) / 3.0, rel=0.25)


def test_one_late_answer_raises_it_no_further_than_that_one_needed() -> None:
    margin = Margin()
    margin.late(0.1, margin.margin_ms)
    assert margin.margin_ms == pytest.approx(Margin().margin_ms + 0.1)
    margin.late(100.0, 0.0)
    assert margin.margin_ms == pytest.approx(Margin().margin_ms + 0.6)
