"""Size classes of a network whose inputs vary: the sizes at which it was measured and others between these, and which
of them a request is in.

A request has a size for each named dimension, such as its tokens. It belongs to the smallest class that covers it, and
its batch is padded to a class. Sizes are tuples in the order of the network's names.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, pairwise, product

import numpy as np
from numpy.typing import NDArray

Sizes = tuple[int, ...]

CLOSE = 1.25  # limit: a batch counts as at most so many times what it takes where the number of classes allows it
MOST_CLASSES = 16  # limit: classes of a model with those between measured sizes, as each is a queue of the scheduler


def in_order(grid: Iterable[Sizes]) -> tuple[Sizes, ...]:
    """Return each class once, the smallest first: by the product of its sizes, and then by the sizes."""
    return tuple(sorted(set(grid), key=lambda sizes: (math.prod(sizes), sizes)))


def united(grids: Iterable[Sequence[Sizes]]) -> tuple[Sizes, ...]:
    """Return the size classes of several GPU types as those of one model, in order, at most `MOST_CLASSES`.

    Of more, those are left out that the next class which covers them pads least. Classes that no other one of their own
    grid covers stay, so that each type serves what it was measured for.
    """
    different = dict.fromkeys(map(tuple, grids))
    firm = {sizes for grid in different for sizes in grid if not any(_covers(o, sizes) for o in grid if o != sizes)}
    classes = list(in_order(chain.from_iterable(different)))
    while len(classes) > MOST_CLASSES:
        padding = {
            sizes: min(math.prod(larger) for larger in classes[place + 1 :] if _covers(larger, sizes))
            / math.prod(sizes)
            for place, sizes in enumerate(classes)
            if sizes not in firm
        }
        if not padding:
            break
        classes.remove(min(padding, key=lambda sizes: padding[sizes]))
    return tuple(classes)


def _covers(larger: Sizes, sizes: Sizes) -> bool:
    return all(size <= most for size, most in zip(sizes, larger, strict=True))


def class_of(classes: Sequence[Sizes], sizes: Sizes) -> int | None:
    """Return the place of the first class that covers these sizes; None if none does. `classes` are in order."""
    for place, most in enumerate(classes):
        if _covers(most, sizes):
            return place
    return None


def find_classes(classes: Sequence[Sizes], sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the same for many requests, one row of sizes each; -1 where no class covers them."""
    places = np.full(len(sizes), -1, dtype=np.int64)
    for place in range(len(classes) - 1, -1, -1):
        places[(sizes <= np.array(classes[place])).all(axis=1)] = place
    return places


def shapes_in(batch: float, chance: float) -> float:
    """Return how many shapes a batch of so many requests has in the mean, two of which have one shape with this
    chance."""
    return (1.0 - (1.0 - chance) ** batch) / chance if chance else batch


def classes_by_cost(grid: Mapping[Sizes, float], multiples: Sequence[int]) -> tuple[Sizes, ...]:
    """Return the size classes of a network that was measured on a grid of sizes, in order.

    In each dimension, a batch takes at most `CLOSE` times as long at one size as at the one before, or longer where
    there would be more than `MOST_CLASSES`. So measured sizes that are close in cost are left out, and others are added
    where they are far apart: multiples of `multiples` that lie between measured sizes on all sides. Every measured size
    is covered.

    Args:
        grid: how long a batch of one size takes at each of the measured sizes, in ms.
        multiples: what the sizes of each dimension are multiples of.
    """
    axes = [sorted(set(values)) for values in zip(*grid, strict=True)]
    close, spaced = CLOSE, [_spaced(grid, axis, CLOSE, multiple) for axis, multiple in enumerate(multiples)]
    while math.prod(map(len, spaced)) > MOST_CLASSES and any(len(axis) > 2 for axis in spaced):
        close **= 1.1  # derived: in small steps
        spaced = [_spaced(grid, axis, close, multiple) for axis, multiple in enumerate(multiples)]
    classes = in_order(s for s in product(*spaced) if s in grid or all(c in grid for c, _ in corners(axes, s)))
    return in_order([*classes, *(sizes for sizes in grid if class_of(classes, sizes) is None)])


def _spaced(grid: Mapping[Sizes, float], axis: int, close: float, multiple: int) -> list[int]:
    """Return sizes of one dimension that are at most `close` apart in cost, with the smallest and the largest."""
    lines: dict[Sizes, list[tuple[int, float]]] = {}
    for sizes, ms in sorted(grid.items()):
        lines.setdefault((*sizes[:axis], *sizes[axis + 1 :]), []).append((sizes[axis], ms))
    ratios: dict[tuple[int, int], float] = {}  # of neighbours, the largest over the other dimensions
    for (low, low_ms), (high, high_ms) in chain.from_iterable(map(pairwise, lines.values())):
        ratios[low, high] = max(high_ms / low_ms, ratios.get((low, high), 1.0))
    measured = sorted({sizes[axis] for sizes in grid})
    spaced, since = {measured[0], measured[-1]}, 1.0  # since: how far the size is from the last that was taken
    for low, high in reversed(list(pairwise(measured))):
        ratio = ratios.get((low, high), close)
        if since * ratio > close:
            spaced.add(high)
            since = 1.0
        since *= ratio
        parts = math.ceil(math.log(ratio) / math.log(close) - 1e-9)  # derived: error of rounding
        steps = ((ratio ** (part / parts) - 1.0) / (ratio - 1.0) for part in range(1, parts))
        between = (multiple * math.ceil((low + (high - low) * step) / multiple) for step in steps)
        spaced |= {size for size in between if size < high}
    return sorted(spaced)


def corners(axes: Sequence[Sequence[int]], sizes: Sizes) -> list[tuple[Sizes, float]]:
    """Return the measured sizes around others and their weights, by which a value is interpolated: linear in each
    dimension. `axes` are the measured values of each dimension; the sizes lie within them."""
    around = []
    for axis, size in zip(axes, sizes, strict=True):
        place = bisect_left(axis, size)
        low, high = axis[place if axis[place] == size else place - 1], axis[place]
        upper = (size - low) / (high - low) if high > low else 1.0
        around.append([(high, upper)] if high == low else [(low, 1.0 - upper), (high, upper)])
    return [(tuple(s for s, _ in ways), math.prod(w for _, w in ways)) for ways in product(*around)]
