"""Cutting a batch from a queue."""

from __future__ import annotations

import random

import pytest

from tenuto.batching.core.gathering import window

L = [0.0, *(1.0 * b + 5.0 for b in range(1, 9))]  # l(b) = b + 5, at most 8


def test_everything_fits() -> None:
    for defended in (1, 3):
        assert window([20.0, 21.0, 22.0], defended, L, 1.0, 0.0, 0.0, 0.0) == (0, 3)


def test_without_a_target_only_what_is_lost_anyway_is_given_up() -> None:
    # At 10, the first cannot make 15 even alone (16); the second allows l(b) <= 7, two requests.
    assert window([15.0, 17.0, 30.0, 30.0, 30.0], 1, L, 1.0, 10.0, 0.0, 10.0) == (1, 2)


def test_window_gives_up_the_head_to_keep_the_batch_at_its_target() -> None:
    assert window([15.0, 17.0, 30.0, 30.0, 30.0], 3, L, 1.0, 10.0, 0.0, 10.0) == (2, 3)


def test_window_defends_no_more_than_the_newest_requests_allow() -> None:
    # A batch of four behind the first would have to end at 19; the newest two could run as two only.
    assert window([17.0, 17.0, 17.0, 17.0], 4, L, 1.0, 10.0, 0.0, 10.0) == (0, 2)


def test_a_batch_grows_past_the_target_for_free() -> None:
    assert window([30.0] * 7, 2, L, 1.0, 10.0, 0.0, 10.0) == (0, 7)


def test_a_deadline_met_exactly_is_met() -> None:
    assert window([16.0], 1, L, 1.0, 10.0, 0.0, 10.0) == (0, 1)
    assert window([15.999], 1, L, 1.0, 10.0, 0.0, 10.0) == (1, 0)


@pytest.mark.parametrize("defended", [1, 4])
def test_nothing_to_gather(defended: int) -> None:
    assert window([], defended, L, 1.0, 10.0, 0.0, 10.0) == (0, 0)
    assert window([1.0, 2.0], defended, L, 1.0, 10.0, 0.0, 10.0) == (2, 0)


def test_the_largest_batch_bounds_the_size() -> None:
    assert window([100.0] * 20, 16, L, 1.0, 10.0, 0.0, 10.0) == (0, 8)


def test_a_gpulet_that_is_not_free_yet_counts() -> None:
    assert window([20.0] * 5, 1, L, 1.0, 10.0, 0.1, 12.0) == (0, 3)  # 12 + 8 = 20


def test_what_was_learned_is_as_if_the_table_had_been_written_anew() -> None:
    rng = random.Random(1)
    for _ in range(2000):
        deadlines = sorted(rng.uniform(5.0, 60.0) for _ in range(rng.randint(1, 12)))
        factor, ctrl_ms, data_ms = (
            rng.uniform(0.5, 3.0),
            rng.uniform(0.0, 5.0),
            rng.choice([0.0, rng.uniform(0.0, 1.0)]),
        )
        sent = [ctrl_ms + data_ms * size + factor * run for size, run in enumerate(L)]
        for defended in (1, rng.randint(1, 6)):
            skip, size = window(deadlines, defended, L, factor, ctrl_ms, data_ms, 0.0)
            assert (skip, size) == window(deadlines, defended, sent, 1.0, 0.0, 0.0, 0.0)
