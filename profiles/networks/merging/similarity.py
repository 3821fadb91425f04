"""How much the weights of two operators have in common, which operators to match, and their shared submatrix (USHER
§3.4).

A weight is a matrix of output features (rows) by input features (columns); an entry of a convolution is a whole kernel.
The common part may lie further down or right in one weight than in another. Imports torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment


@dataclass(frozen=True)
class Submatrix:
    """Rows and columns of the first weight, ascending, in which all weights are equal. Each entry has `entry_size`
    numbers. `shifts`: by how many rows and columns the submatrix is shifted in each weight; the first has (0, 0)."""

    rows: tuple[int, ...]
    columns: tuple[int, ...]
    entry_size: int
    shifts: tuple[tuple[int, int], ...]

    @property
    def parameters(self) -> int:
        """How many numbers the submatrix has."""
        return len(self.rows) * len(self.columns) * self.entry_size


def _equal(a: torch.Tensor, b: torch.Tensor, shift: tuple[int, int], within: float) -> np.ndarray:
    """Return which entries of `a` are equal to the entries of `b` shifted by so many rows and columns."""
    equal = torch.zeros(a.shape[:2], dtype=torch.bool, device=a.device)
    (top, bottom), (left, right) = ((max(0, -d), min(a.shape[k], b.shape[k] - d)) for k, d in enumerate(shift))
    if top < bottom and left < right:
        moved = b[top + shift[0] : bottom + shift[0], left + shift[1] : right + shift[1]]
        near = (a[top:bottom, left:right].float() - moved.float()).abs() <= within
        equal[top:bottom, left:right] = near.reshape(*near.shape[:2], -1).all(dim=2)
    return equal.cpu().numpy()


def _shift(a: torch.Tensor, b: torch.Tensor, within: float) -> tuple[int, int]:
    """Return the shift (rows, columns) of the larger common part in `b`: none, or the shift of most values that occur
    once in each weight."""
    in_place = _equal(a, b, (0, 0), within)
    (known, at), (others, places) = _once(a), _once(b)
    _, mine, theirs = np.intersect1d(known, others, assume_unique=True, return_indices=True)
    if in_place.all() or not len(mine):
        return 0, 0
    down = places[theirs] // b.shape[1] - at[mine] // a.shape[1]
    right = places[theirs] % b.shape[1] - at[mine] % a.shape[1] + a.shape[1]
    width = a.shape[1] + b.shape[1]
    shifts, votes = np.unique(down * width + right, return_counts=True)
    most = int(shifts[votes.argmax()])
    shift = most // width, most % width - a.shape[1]
    return shift if _area(_largest(_equal(a, b, shift, within))) > _area(_largest(in_place)) else (0, 0)


def _once(weight: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Return the entries whose value occurs once, and their places; of a kernel only the first number counts."""
    entries = weight.detach().reshape(weight.shape[0] * weight.shape[1], -1)[:, 0].float().cpu().numpy()
    values, places, counts = np.unique(entries, return_index=True, return_counts=True)
    return values[counts == 1], places[counts == 1]


def similarity(a: torch.Tensor, b: torch.Tensor, within: float) -> float:
    """Return 2 * |common submatrix| / (|a| + |b|) (USHER, section 2.4); 0 for kernels of different sizes."""
    if a.dim() != b.dim() or a.shape[2:] != b.shape[2:]:
        return 0.0
    return 2.0 * shared_submatrix((a, b), within).parameters / (a.numel() + b.numel())


def match_operators(
    anchors: Sequence[torch.Tensor], others: Sequence[torch.Tensor], omega: float, within: float
) -> list[tuple[int, int, float]]:
    """Return the pairs (anchor, other, similarity) with the largest total similarity; each reaches `omega`.

    It uses the Hungarian method on operators of one kind at one depth. Ties go to pairs in the same place.
    """
    if not anchors or not others:
        return []
    values = np.array([[similarity(a, b, within) for b in others] for a in anchors])
    places = 1e-6 * np.abs(np.arange(len(anchors))[:, None] - np.arange(len(others))[None, :])
    rows, columns = linear_sum_assignment(places - values)
    return [(int(i), int(j), float(values[i, j])) for i, j in zip(rows, columns, strict=True) if values[i, j] >= omega]


def shared_submatrix(weights: Sequence[torch.Tensor], within: float, *, whole_rows: bool = False) -> Submatrix:
    """Return a large submatrix in which all weights are equal, empty if there is none.

    The largest one is NP-hard to find (maximum-edge biclique). The method here adds rows in the order of how much of
    them is equal, and keeps the columns that are equal in all; then it does the same with rows and columns exchanged,
    and takes the larger result. It is exact if whole rows, whole columns or everything is equal, as after fine-tuning.

    Args:
        weights: two or more weights of one kernel size.
        within: the largest absolute difference between weights that count as equal.
        whole_rows: only take rows that are equal in full, as grouped convolutions need.
    """
    first = weights[0]
    entry = int(np.prod(first.shape[2:], initial=1))
    shifts = ((0, 0), *((0, 0) if whole_rows else _shift(first, other, within) for other in weights[1:]))
    equal = np.ones(first.shape[:2], dtype=bool)
    for other, shift in zip(weights, shifts, strict=True):
        equal &= _equal(first, other, shift, within)
    if whole_rows:
        full = np.flatnonzero(equal.all(axis=1))
        return Submatrix(tuple(full.tolist()), tuple(range(first.shape[1])) if len(full) else (), entry, shifts)
    rows, columns = _largest(equal)
    return Submatrix(tuple(sorted(rows.tolist())), tuple(sorted(columns.tolist())), entry, shifts)


def _largest(equal: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    by_row, by_column = _grown(equal), _grown(equal.T)[::-1]
    return max((by_row, by_column), key=_area)


def _area(found: tuple[np.ndarray, np.ndarray]) -> int:
    return len(found[0]) * len(found[1])


def _grown(equal: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    order = np.argsort(-equal.sum(axis=1), kind="stable")
    left = np.logical_and.accumulate(equal[order], axis=0).sum(axis=1)
    count = int(np.argmax(left * np.arange(1, len(order) + 1))) + 1 if len(order) else 0
    rows = order[:count]
    columns = np.flatnonzero(equal[rows].all(axis=0))
    return (rows, columns) if len(columns) and count else (rows[:0], columns[:0])
