"""How much two operators' weights have in common, which operators to match, and the submatrix they share (USHER §3.4).

A weight is a matrix of output features (rows) by input features (columns); a convolution's entry is its whole kernel.
Features are compared in place, row i with row i: models fine-tuned from one base keep their order. Imports torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment


@dataclass(frozen=True)
class Submatrix:
    """Rows and columns, ascending, in which all members' weights are equal; `entry_size` weights lie in each entry."""

    rows: tuple[int, ...]
    columns: tuple[int, ...]
    entry_size: int

    @property
    def parameters(self) -> int:
        """Weights in it."""
        return len(self.rows) * len(self.columns) * self.entry_size


def _equal(a: torch.Tensor, b: torch.Tensor, within: float) -> torch.Tensor:
    """Return where two weights agree, on the features both have."""
    rows, columns = min(a.shape[0], b.shape[0]), min(a.shape[1], b.shape[1])
    return (a[:rows, :columns].float() - b[:rows, :columns].float()).abs() <= within


def similarity(a: torch.Tensor, b: torch.Tensor, within: float) -> float:
    """Return equal weights over the weights of the larger operator, in [0, 1]; 0 for kernels of different sizes."""
    if a.dim() != b.dim() or a.shape[2:] != b.shape[2:]:
        return 0.0
    return float(_equal(a, b, within).sum()) / max(a.numel(), b.numel())


def match_operators(
    anchors: Sequence[torch.Tensor], others: Sequence[torch.Tensor], omega: float, within: float
) -> list[tuple[int, int, float]]:
    """Return the pairs (anchor, other, similarity) of most similarity in total that reach `omega`.

    The Hungarian method, on operators of one kind at one depth; ties go to pairs in the same place.
    """
    if not anchors or not others:
        return []
    values = np.array([[similarity(a, b, within) for b in others] for a in anchors])
    places = 1e-6 * np.abs(np.arange(len(anchors))[:, None] - np.arange(len(others))[None, :])
    rows, columns = linear_sum_assignment(places - values)
    return [(int(i), int(j), float(values[i, j])) for i, j in zip(rows, columns, strict=True) if values[i, j] >= omega]


def shared_submatrix(weights: Sequence[torch.Tensor], within: float, *, whole_rows: bool = False) -> Submatrix:
    """Return a large submatrix in which all weights are equal, empty if there is none.

    The largest one is NP-hard to find (maximum-edge biclique). Found here: grow rows in the order of how much of them
    is equal and keep the columns equal in all of them; the same with rows and columns exchanged; the larger wins.
    Exact where whole rows, whole columns or everything is equal, which is what fine-tuning leaves.

    Args:
        weights: two or more, of one kernel size.
        within: largest absolute difference of equal weights.
        whole_rows: only rows that are equal in full, as grouped convolutions need.
    """
    first = weights[0]
    entry = int(np.prod(first.shape[2:], initial=1))
    columns = min(w.shape[1] for w in weights)
    rows = min(w.shape[0] for w in weights)
    mask = torch.ones((rows, columns), dtype=torch.bool, device=first.device)
    for other in weights[1:]:
        mask &= _equal(first, other, within)[:rows, :columns].reshape(rows, columns, -1).all(dim=2)
    equal = mask.cpu().numpy()
    if whole_rows or any(w.shape[1] != columns for w in weights):
        full = np.flatnonzero(equal.all(axis=1))
        if whole_rows:
            return Submatrix(tuple(full.tolist()), tuple(range(columns)) if len(full) else (), entry)
    by_row = _grown(equal)
    by_column = _grown(equal.T)[::-1]
    best = max((by_row, by_column), key=lambda found: len(found[0]) * len(found[1]))
    return Submatrix(tuple(sorted(best[0].tolist())), tuple(sorted(best[1].tolist())), entry)


def _grown(equal: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    order = np.argsort(-equal.sum(axis=1), kind="stable")
    left = np.logical_and.accumulate(equal[order], axis=0).sum(axis=1)
    count = int(np.argmax(left * np.arange(1, len(order) + 1))) + 1 if len(order) else 0
    rows = order[:count]
    columns = np.flatnonzero(equal[rows].all(axis=0))
    return (rows, columns) if len(columns) and count else (rows[:0], columns[:0])
