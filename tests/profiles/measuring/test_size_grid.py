"""Which sizes of a range are measured: few where the cost of a batch is a line, more where it bends."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tenuto.profiles.measuring.size_grid import GOOD_ENOUGH, Axis, next_sizes, size_axes
from tenuto.profiles.networks.catalogue import ModelSignature, SizeRange, TensorSignature
from tenuto.profiles.size_classes import Sizes

Cost = Callable[..., float]


def measured(axes: Sequence[Axis], cost: Cost, *, fits: Callable[..., bool] = lambda *_: True) -> list[Sizes]:
    """The sizes that are measured, in order, of a network whose batches of 1 and 4 take so long."""
    times: dict[Sizes, dict[int, float]] = {}
    while (sizes := next_sizes(axes, times)) is not None:
        assert sizes not in times
        times[sizes] = {batch: cost(batch, *sizes) for batch in (1, 4) if fits(batch, *sizes)}
    return list(times)


def test_a_line_takes_its_ends_and_one_size_to_see_it() -> None:
    assert measured([SizeRange(256, 16)], lambda b, n: 1 + 0.1 * b * n) == [(16,), (256,), (64,)]
    grid = measured([SizeRange(640, 32, 32), SizeRange(320, 32, 32)], lambda b, h, w: 5 + 0.001 * b * h * w)
    assert len(grid) == 9
    assert all(h % 32 == w % 32 == 0 for h, w in grid)


def test_named_sizes_stay_as_they_are() -> None:
    assert measured([(16, 64, 256)], lambda b, n: b * n**2) == [(16,), (64,), (256,)]
    assert measured([(8,), SizeRange(64, 1)], lambda b, m, n: 1.0 + m * n) == [(8, 1), (8, 64), (8, 8)]
    assert measured([], lambda b: 1.0) == [()]


def test_a_cost_that_bends_takes_more_sizes_and_one_in_steps_at_most_nine() -> None:
    assert 4 < len(measured([SizeRange(512, 8)], lambda b, n: 1 + 0.001 * b * n * n)) <= 9
    steps = measured([SizeRange(512, 8)], lambda b, n: math.ceil(n / 128) * b)
    assert len(steps) == 9
    assert len(measured([SizeRange(512, 8)] * 2, lambda b, n, m: math.ceil(n / 128) * math.ceil(m / 128) * b)) == 25


@given(st.floats(0, 100), st.floats(0, 1), st.floats(0, 0.01), st.integers(1, 64), st.integers(100, 4000))
def test_between_the_sizes_that_are_chosen_smooth_costs_are_known(
    fixed: float, line: float, square: float, least: int, most: int
) -> None:
    def cost(batch: int, size: float) -> float:
        return 0.01 + fixed + batch * (line * size + square * size * size)

    sizes = sorted(size for (size,) in measured([SizeRange(most, least)], cost))
    every = np.arange(least, most + 1)
    for batch in (1, 4):
        told = np.interp(every, sizes, [cost(batch, size) for size in sizes])
        error = np.abs(told / [cost(batch, size) for size in every] - 1)
        assert len(sizes) == 9 or (error.mean() <= GOOD_ENOUGH and error.max() <= 2.0 * GOOD_ENOUGH)


def test_sizes_that_do_not_fit_into_memory_end_the_search() -> None:
    axes = [SizeRange(512, 8), SizeRange(512, 8)]
    grid = measured(axes, lambda b, n, m: 1.0 + n * m * b, fits=lambda b, n, m: n * m < 512 * 512)
    assert {*grid} == {*product(sorted({n for n, _ in grid}), sorted({m for _, m in grid}))}


@pytest.mark.parametrize("asked", [{}, {"n": SizeRange(100, 10)}])
def test_a_network_is_measured_in_the_range_that_it_takes(asked: dict[str, Axis]) -> None:
    taken = {"n": SizeRange(128, 1, 8), "m": SizeRange(6, 3), "k": SizeRange(5, 5)}
    signature = ModelSignature("tensor", (TensorSignature("x", "float32", ("n", "m", "k")),), (), sizes=taken)
    first = SizeRange(104, 16, 8) if asked else SizeRange(128, 8, 8)
    assert size_axes(signature, asked) == [first, SizeRange(6, 3, 1), (5,)]
