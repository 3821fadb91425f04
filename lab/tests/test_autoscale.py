"""The advice of Symphony §3.5 and its windows."""

from __future__ import annotations

import pytest

from tenuto_lab.autoscale import AutoscaleAdvisor, AutoscaleOptions, advise

PAPER = AutoscaleOptions(headroom=0.0)


@pytest.mark.parametrize(
    ("gpus", "bad", "idle", "expected"),
    [
        (10, 0.5, 0.0, 10),
        (90, 0.1, 0.0, 10),
        (10, 0.2, 0.9, 3),
        (10, 0.005, 0.0, 0),
        (10, 0.0, 0.35, -3),
        (1, 0.0, 0.99, 0),
        (4, 0.0, 1.0, -3),
    ],
)
def test_the_formulas(gpus: int, bad: float, idle: float, expected: int) -> None:
    assert advise(gpus, bad, idle, PAPER) == expected


def test_some_headroom_is_kept() -> None:
    assert advise(100, 0.0, 0.25) == -15
    assert advise(100, 0.0, 0.1) == 0


def test_losing_everything_asks_for_a_finite_number() -> None:
    assert advise(2, 1.0, 0.0) == 2046


def test_a_window_ends_once_and_counts_gpu_seconds() -> None:
    advisor = AutoscaleAdvisor(10, AutoscaleOptions(window_s=10.0, headroom=0.0))
    assert advisor.add(4.0, good=80, bad=20, busy_gpu_s=30.0) == []
    (advice,) = advisor.add(10.0)
    assert (advice.start_s, advice.end_s, advice.requests) == (0.0, 10.0, 100)
    assert advice.bad_rate == pytest.approx(0.2)
    assert advice.idle_fraction == pytest.approx(0.7)
    assert advice.delta_gpus == 3
    assert advisor.add(19.9) == []


def test_a_change_in_the_middle_of_a_window_is_weighed_by_time() -> None:
    advisor = AutoscaleAdvisor(10, AutoscaleOptions(window_s=10.0))
    advisor.set_gpus(5.0, 20)
    advisor.add(6.0, good=1, busy_gpu_s=75.0)
    (advice,) = advisor.add(10.0)
    assert advice.idle_fraction == pytest.approx(0.5)
    assert advice.gpus == 20


def test_empty_windows_are_reported_as_idle() -> None:
    advisor = AutoscaleAdvisor(4, AutoscaleOptions(window_s=1.0, headroom=0.0))
    found = advisor.add(3.5)
    assert [advice.delta_gpus for advice in found] == [-3, -3, -3]


def test_releasing_can_wait_for_agreement_and_takes_the_smaller() -> None:
    advisor = AutoscaleAdvisor(10, AutoscaleOptions(window_s=1.0, headroom=0.0, settle_windows=2))
    advisor.add(0.5, good=1, busy_gpu_s=2.0)
    assert [a.delta_gpus for a in advisor.add(1.0)] == [0]
    advisor.add(1.5, good=1, busy_gpu_s=7.0)
    assert [a.delta_gpus for a in advisor.add(2.0)] == [-3]
