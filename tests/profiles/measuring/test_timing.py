"""When a measurement is repeated, when it stops, and the line through the points."""

import math

import pytest

from tenuto.profiles.measuring.timing import MAX_RUNS, TOLERANCE_PCT, Timing, fit_line, measure_repeatedly, sample


class Clock:
    """A clock that only the work moves: each run takes the next duration, the last one for ever."""

    def __init__(self, *durations_s: float) -> None:
        self.now = 0.0
        self.durations = list(durations_s)
        self.runs = 0

    def __call__(self) -> float:
        return self.now

    def run(self) -> None:
        self.now += self.durations[min(self.runs, len(self.durations) - 1)]
        self.runs += 1


def test_steady_work_stops_early() -> None:
    clock = Clock(0.002)
    timing = Timing.of(sample(clock.run, clock, 100))
    assert clock.runs == timing.runs == 10
    assert timing.median_ms == pytest.approx(2.0)
    assert timing.spread_ms == pytest.approx(0.0, abs=1e-9)


def test_noisy_work_is_repeated_until_the_median_is_certain() -> None:
    noisy = Clock(*[0.001 * (1 + 0.075 * math.sin(i * 7.3)) for i in range(500)])
    timing = Timing.of(sample(noisy.run, noisy, 100))
    assert 10 < timing.runs < 500
    assert timing.uncertainty_pct <= TOLERANCE_PCT


def test_the_budget_ends_it_but_three_runs_are_made() -> None:
    slow = Clock(10.0, 12.0, 11.0)
    timing = Timing.of(sample(slow.run, slow, 1))
    assert timing.runs == 3
    assert timing.median_ms == pytest.approx(11_000)
    forever = Clock(0.001, 0.002)
    forever.durations = [0.001, 0.01] * 1000
    assert len(sample(forever.run, forever, 1e9)) == MAX_RUNS


def test_rounds_are_repeated_while_their_medians_disagree_and_time_is_left() -> None:
    settled = Clock(*[0.002] * 10, 0.001)
    timing, repeat_pct = measure_repeatedly(settled.run, settled, budget_s=1)
    assert settled.runs == 30  # a slow round, a quick one, and another that agrees with it
    assert timing.median_ms == pytest.approx(1.0)
    assert timing.runs == 20
    assert repeat_pct == pytest.approx(0.0, abs=1e-9)
    steady = Clock(0.001)
    assert measure_repeatedly(steady.run, steady, budget_s=1)[0].runs == 20
    late = Clock(*[0.2] * 3, 0.1)
    timing, repeat_pct = measure_repeatedly(late.run, late, budget_s=1)
    assert repeat_pct == pytest.approx(100.0)  # no time is left: the disagreement is reported
    assert timing.runs == 8


def test_one_outlier_does_not_move_the_median() -> None:
    timing = Timing.of([1.0] * 20 + [500.0])
    assert timing.median_ms == 1.0
    assert timing.fastest_ms == 1.0


def test_the_spread_is_half_of_what_most_values_lie_in() -> None:
    assert Timing.of([1.0, 2.0, 3.0]).spread_ms == pytest.approx(0.8)
    assert Timing.of([4.0]).spread_ms == 0.0


def test_the_line_is_found_again() -> None:
    line = fit_line([(b, 1.5 * b + 4.0) for b in (1, 2, 4, 8)])
    assert line is not None
    assert line == pytest.approx((1.5, 4.0, 1.0, 0.0), abs=1e-9)
    bent = fit_line([(1, 1.0), (2, 2.0), (3, 2.0)])
    assert bent is not None
    alpha, beta, r_squared, error = bent
    assert (alpha, beta) == pytest.approx((0.5, 2 / 3))
    assert r_squared == pytest.approx(0.75)
    assert error == pytest.approx(100 / 6)  # the line passes 1/3 under the second point, and 1/6 beside the first
    assert fit_line([(4, 1.0)]) is None
    assert fit_line([(1, 2.0), (2, 2.0)])[2] is None  # type: ignore[index]
