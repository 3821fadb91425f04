"""Size classes of a network whose inputs vary: the sizes at which it was measured, and which of them a request is in.

A request has a size for each named dimension, such as its tokens. It belongs to the smallest class that covers it, and
its batch is padded to a class. Sizes are tuples in the order of the network's names.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

Sizes = tuple[int, ...]


def in_order(grid: Iterable[Sizes]) -> tuple[Sizes, ...]:
    """Return each class once, the smallest first: by the product of its sizes, and then by the sizes."""
    return tuple(sorted(set(grid), key=lambda sizes: (math.prod(sizes), sizes)))


def class_of(classes: Sequence[Sizes], sizes: Sizes) -> int | None:
    """Return the place of the first class that covers these sizes; None if none does. `classes` are in order."""
    for place, most in enumerate(classes):
        if all(size <= limit for size, limit in zip(sizes, most, strict=True)):
            return place
    return None


def find_classes(classes: Sequence[Sizes], sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the same for many requests, one row of sizes each; -1 where no class covers them."""
    places = np.full(len(sizes), -1, dtype=np.int64)
    for place in range(len(classes) - 1, -1, -1):
        places[(sizes <= np.array(classes[place])).all(axis=1)] = place
    return places
