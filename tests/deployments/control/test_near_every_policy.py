"""Plans near one that runs, by every policy: within what is allowed, valid, with their price, no change for nothing."""

from __future__ import annotations

import pytest

from tests.instruments.near_plans import POLICIES, judged


@pytest.mark.parametrize("policy", POLICIES)
def test_plans_near_one_that_runs_change_no_more_than_they_must(policy: str) -> None:
    found = judged(4, policy, **({"requests": "500"} if policy == "tenuto" else {}))
    assert found.faults == []
    assert found.sums["plans"] + found.sums["refused"] == 5


def test_where_limits_of_memory_leave_no_room_beside_what_stays_there_is_a_plan_all_the_same() -> None:
    assert judged(9113, "wao-usher").faults == []


def test_of_a_policy_that_tries_its_plans_near_ones_promise_what_trials_serve_too() -> None:
    assert judged(9378, "tenuto", requests="500").faults == []


def test_what_was_added_for_a_model_and_is_not_needed_in_the_end_is_left_away() -> None:
    assert judged(9109, "igniter").faults == []


def test_what_its_neighbours_are_the_quicker_without_is_left_away() -> None:
    assert judged(500163, "wao-usher").faults == []
