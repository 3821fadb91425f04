"""Which sizes of requests a network is measured at: those that are named, and of a range as many as its cost needs.

A range begins with its least and its most. Then the gap between two measured sizes is halved, in ratio, beside the size
that is most off where it is computed from its neighbours, until none is off by more than `GOOD_ENOUGH` and no gap is
wider than `_WIDEST`. The other dimensions have their most meanwhile; at the end all combinations are measured.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise, product

from tenuto.errors import one_of, refused
from tenuto.profiles.networks.catalogue import ModelSignature, SizeRange
from tenuto.profiles.size_classes import Sizes, in_order

Axis = tuple[int, ...] | SizeRange
"""Sizes of one dimension to measure, ascending, or the range that they are found in."""
Times = Mapping[int, float]
"""What batches of one size take in ms, by batch size."""

GOOD_ENOUGH = 0.1  # derived: the mean error that predicted times may have; a size that is left out has twice the gap
USUAL_SIZES = 4  # derived: sizes of a range by which the time for each is planned
_MOST_SIZES = 9  # limit: sizes of a range
_MOST_COMBINATIONS = 27  # limit: of the sizes of several ranges
_WIDEST = 8  # derived: in gaps of a higher ratio, costs were off by up to 32 % where no measured size was by 10 %
_LEAST_PART = 16  # default: a range whose least is not known begins at this part of its most


def size_axes(signature: ModelSignature, asked: Mapping[str, Axis]) -> list[Axis]:
    """Return what to measure of each size of a network, in its order: what is asked for, else the range that it takes;
    of the range, if nothing says its least, from a sixteenth of its most.

    Raises:
        InvalidInputError: the network has no such size, or does not take it.
    """
    for name in asked:
        if name not in signature.sizes:
            raise refused("--sizes", name, "is no size of the network", one_of(name, list(signature.sizes), "It has:"))
    axes: list[Axis] = []
    for name, allowed in signature.sizes.items():
        least = allowed.least if allowed.least > 1 else max(1, allowed.most // _LEAST_PART)
        axis = asked.get(name, SizeRange(allowed.most, least))
        values = named_sizes(axis)
        outside = [size for size in values if not allowed.least <= size <= allowed.most]
        wrong = outside or [size for size in axis if size % allowed.multiple] if isinstance(axis, tuple) else outside
        if wrong:
            taken = f"{allowed.least} to {allowed.most}, multiples of {allowed.multiple}"
            raise refused("--sizes", f"{name}={wrong[0]}", f"the network takes {taken}", "Measure sizes that it takes.")
        if isinstance(axis, SizeRange):
            least, most = (-(-size // allowed.multiple) * allowed.multiple for size in values)
            axis = (most,) if least >= most else SizeRange(most, least, allowed.multiple)
        axes.append(axis)
    return axes


def named_sizes(axis: Axis) -> tuple[int, ...]:
    """Return the sizes that are named: of a range its ends."""
    return (axis.least, axis.most) if isinstance(axis, SizeRange) else axis


def largest(axis: Axis) -> int:
    """Return the largest size of a dimension that is measured."""
    return named_sizes(axis)[-1]


def smallest(axis: Axis) -> int:
    """Return the smallest size of a dimension that is measured."""
    return named_sizes(axis)[0]


def count_sizes(axes: Sequence[Axis]) -> int:
    """Return how many combinations of sizes will be measured; ranges count as usual."""
    return math.prod(USUAL_SIZES if isinstance(axis, SizeRange) else len(axis) for axis in axes)


def next_sizes(axes: Sequence[Axis], measured: Mapping[Sizes, Times]) -> Sizes | None:
    """Return the sizes to measure after those that are measured; None where these are enough.

    Args:
        axes: as `size_axes` gives them.
        measured: what batches take, by sizes; nothing where no batch fitted into memory.
    """
    tops = tuple(map(largest, axes))
    ranges = sum(isinstance(axis, SizeRange) for axis in axes)
    most = min(_MOST_SIZES, int(_MOST_COMBINATIONS ** (1.0 / max(1, ranges)) + 1e-9))  # derived: error of rounding
    values: list[Sequence[int]] = []
    for place, axis in enumerate(axes):
        if not isinstance(axis, SizeRange):
            values.append(axis)
            continue
        others = (*tops[:place], *tops[place + 1 :])
        line = {at[place]: times for at, times in measured.items() if (*at[:place], *at[place + 1 :]) == others}
        size = _next_on(axis, line, most)
        if size is not None:
            return (*tops[:place], size, *tops[place + 1 :])
        values.append(sorted(line))
    return next((sizes for sizes in in_order(product(*values)) if sizes not in measured), None)


def _next_on(axis: SizeRange, line: Mapping[int, Times], most: int) -> int | None:
    """Return the next size of one dimension; `line` has what is measured of it."""
    for end in (axis.least, axis.most):
        if end not in line:
            return end
    sizes = sorted(line)
    errors = {size: _error(line, low, size, high) for low, size, high in zip(sizes, sizes[1:], sizes[2:], strict=False)}
    worst = {
        (a, b): max(errors.get(a, 0.0), errors.get(b, 0.0)) if errors and b <= _WIDEST * a else math.inf
        for a, b in pairwise(sizes)
    }
    for low, high in sorted(worst, key=lambda gap: (-worst[gap], -gap[1] / gap[0])):
        middle = round(math.sqrt(low * high) / axis.multiple) * axis.multiple
        if len(sizes) < most and worst[low, high] > GOOD_ENOUGH and low < middle < high:
            return middle
    return None


def _error(line: Mapping[int, Times], low: int, size: int, high: int) -> float:
    """Return the largest error of what batches take at a size, computed from two others."""
    part = (size - low) / (high - low)
    errors = (
        abs((1.0 - part) * line[low][batch] + part * line[high][batch] - ms) / ms
        for batch, ms in line[size].items()
        if batch in line[low] and batch in line[high]
    )
    return max(errors, default=0.0)
