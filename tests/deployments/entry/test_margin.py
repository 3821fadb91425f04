"""The margin before deadlines: controlled by lateness, bounded, never a lock."""

import math
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tenuto.deployments.entry.service.margin import Margin

SLO_MS = 100.0
Answers = st.lists(st.one_of(st.none(), st.floats(0.0, 500.0)), max_size=80)  # None: in time; else late by so much


def after(answers: list[float | None], slo_ms: float = 25.0, alone_ms: float = 6.0) -> Margin:
    margin = Margin()
    for late_ms in answers:
        margin.answered(25.0 if late_ms is None else -late_ms, slo_ms, alone_ms, margin.reserve_ms(slo_ms, alone_ms))
    return margin


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(Answers, st.floats(0.0, 10_000.0), st.floats(0.0, 10_000.0))
def test_whatever_was_late_a_lone_request_keeps_half_of_its_room(
    answers: list[float | None], slo_ms: float, alone_ms: float
) -> None:
    reserve_ms = after(answers).reserve_ms(slo_ms, alone_ms)
    assert 0.0 <= reserve_ms <= max(0.0, (slo_ms - alone_ms) / 2.0)


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
    count = 100_000
    allowance_ms = margin.allowance_ms(SLO_MS, 0.0)
    for number in range(2 * count):
        reserve_ms = margin.reserve_ms(SLO_MS, 0.0)
        delay_ms = delays.expovariate(1.0 / scale_ms)
        margin.answered(reserve_ms - delay_ms, SLO_MS, 0.0, reserve_ms)
        late += number >= count and delay_ms > reserve_ms - allowance_ms
    assert late / count == pytest.approx((1.0 - attainment) / 3.0, rel=0.25, abs=2e-4)


def test_answers_that_are_late_together_raise_it_by_little_and_by_that_much_sooner_or_later() -> None:
    margin = Margin()
    start_ms = margin.margin_ms
    for _ in range(15):  # requests of one batch
        margin.answered(-0.1, SLO_MS, 0.0, margin.reserve_ms(SLO_MS, 0.0))
    assert start_ms < margin.margin_ms < start_ms + 1.0
    for _ in range(200):
        margin.answered(-5.0, SLO_MS, 0.0, margin.reserve_ms(SLO_MS, 0.0))
    assert margin.margin_ms > start_ms + 5.0


def test_what_no_margin_can_help_does_not_move_it() -> None:
    """A machine that stands still makes everything late by more than is ever kept of a deadline."""
    assert after([500.0, 40.0, 7.0] * 1000).margin_ms == Margin().margin_ms


def test_lateness_that_margins_only_move_does_not_hold_it_at_its_ceiling() -> None:
    """One answer in ten is late by 1 to 8 ms, whatever is kept: small batches take more of a busy processor."""
    import random

    chance = random.Random(3)
    margin = Margin()
    highest = []
    for _ in range(20_000):
        late_ms = chance.uniform(1.0, 8.0) if chance.random() < 0.1 else -1.0
        allowance_ms = margin.allowance_ms(25.0, 6.0)
        margin.answered(allowance_ms - late_ms, 25.0, 6.0, margin.reserve_ms(25.0, 6.0))
        highest.append(margin.margin_ms)
    margin.margin_ms = math.inf
    most_ms = margin.reserve_ms(25.0, 6.0) - margin.allowance_ms(25.0, 6.0)
    assert max(highest[10_000:]) < most_ms - 0.5


def test_a_request_of_which_nothing_is_kept_teaches_nothing() -> None:
    margin = Margin()
    margin.answered(-5.0, 25.0, 6.0, 0.0)
    assert (margin.margin_ms, margin.late_share) == (Margin().margin_ms, 0.0)


def test_refusals_for_its_sake_bring_it_down_and_those_beyond_capacity_no_further_than_they_can_help() -> None:
    """Delays as above; every ms of margin has one request in fifty refused, or one in three are, whatever it is."""
    import random

    def settled(refused: Callable[[float], float]) -> float:
        chance = random.Random(7)
        margin = Margin()
        total_ms = 0.0
        for number in range(100_000):
            if chance.random() < refused(margin.margin_ms):
                margin.refused_for_it()
                continue
            reserve_ms = margin.reserve_ms(SLO_MS, 0.0)
            margin.answered(reserve_ms - chance.expovariate(0.5), SLO_MS, 0.0, reserve_ms)
            total_ms += margin.margin_ms if number >= 50_000 else 0.0
        return total_ms / 50_000

    never, slowly, overload = settled(lambda _: 0.0), settled(lambda ms: ms / 50.0), settled(lambda _: 1.0 / 3.0)
    assert never > slowly + 1.0
    assert overload < never - 1.0
    assert overload > never / 4.0
