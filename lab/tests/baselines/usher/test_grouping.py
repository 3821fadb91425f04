"""Grouping by matching: the closed form against brute force and against the general algorithm."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from tenuto_lab.baselines.usher import grouping as usher_grouping
from tenuto_lab.baselines.usher.grouping import group_models

surpluses = st.lists(st.integers(-100, 100), min_size=1, max_size=7)


def cheapest(values: list[int]) -> int:
    """Return the weight of the best matching of maximum cardinality, by trying all."""
    if len(values) < 2:
        return 0
    if len(values) % 2:
        return min(cheapest(values[:i] + values[i + 1 :]) for i in range(len(values)))
    first, rest = values[0], values[1:]
    return min(abs(first + rest[i]) + cheapest(rest[:i] + rest[i + 1 :]) for i in range(len(rest)))


def weight(values: list[int], pairs: list[tuple[int, int]]) -> int:
    return sum(abs(values[i] + values[j]) for i, j in pairs)


@given(surpluses)
def test_both_matchings_have_the_least_weight_and_leave_at_most_one_alone(values: list[int]) -> None:
    for matching in (usher_grouping.general_matching, usher_grouping.matching_on_a_line):
        pairs = matching(values)
        matched = list(itertools.chain.from_iterable(pairs))
        assert len(set(matched)) == len(matched) == len(values) - len(values) % 2
        assert weight(values, pairs) == cheapest(values)


def test_compute_heavy_pairs_with_memory_heavy() -> None:
    averages = {"a": (80.0, 10.0), "b": (75.0, 12.0), "c": (10.0, 80.0), "d": (12.0, 75.0)}
    pairs = group_models(averages, max_group_size=2)
    assert {frozenset(group) for group in pairs} == {frozenset("ac"), frozenset("bd")}
    assert all(sum(averages[name][0] - averages[name][1] for name in group) == 0 for group in pairs)


@given(st.integers(0, 40), st.sampled_from([1, 2, 4, 8]))
def test_every_model_is_in_exactly_one_group_of_at_most_the_size(count: int, size: int) -> None:
    averages = {f"m{i}": (float(i * 37 % 100), float(i * 53 % 100)) for i in range(count)}
    groups = group_models(averages, size)
    assert sorted(m for group in groups for m in group) == sorted(averages)
    assert all(1 <= len(group) <= size for group in groups)


def test_hundreds_of_models_take_the_closed_form() -> None:
    count = usher_grouping.LARGEST_GENERAL_MATCHING + 73
    averages = {f"m{i}": (float(i % 97), float(i % 89)) for i in range(count)}
    groups = group_models(averages, 4)
    assert sum(map(len, groups)) == count
    assert sum(len(group) == 4 for group in groups) == count // 4
