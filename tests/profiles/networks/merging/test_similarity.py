"""How much two weights have in common, against all submatrices at all places."""

from __future__ import annotations

from itertools import combinations, product

import pytest
import torch

from tenuto.profiles.networks.merging.similarity import shared_submatrix, similarity

SEEDS = range(30)


def largest_common(a: torch.Tensor, b: torch.Tensor) -> int:
    """Return the entries of the largest common submatrix: any rows and columns, the same way apart in both."""
    best = 0
    for down, right in product(range(-a.shape[0] + 1, b.shape[0]), range(-a.shape[1] + 1, b.shape[1])):
        rows = [r for r in range(a.shape[0]) if 0 <= r + down < b.shape[0]]
        columns = [c for c in range(a.shape[1]) if 0 <= c + right < b.shape[1]]
        for count in range(1, len(rows) + 1):
            for some in combinations(rows, count):
                equal = [c for c in columns if all(torch.equal(a[r, c], b[r + down, c + right]) for r in some)]
                best = max(best, count * len(equal))
    return best


def sizes(generator: torch.Generator) -> list[int]:
    return torch.randint(2, 6, (4,), generator=generator).tolist()


@pytest.mark.parametrize("kernel", [(), (2,)])
def test_a_common_block_is_found_wherever_it_lies(kernel: tuple[int, ...]) -> None:
    for seed in SEEDS:
        generator = torch.Generator().manual_seed(seed)
        rows, columns, more_rows, more_columns = sizes(generator)
        a, b = (
            torch.rand(*size, *kernel, generator=generator) for size in ((rows, columns), (more_rows, more_columns))
        )
        high, wide = (min(pair) - 1 for pair in ((rows, more_rows), (columns, more_columns)))
        b[more_rows - high :, :wide] = a[:high, columns - wide :]
        expected = 2 * largest_common(a, b) * (a[0, 0].numel()) / (a.numel() + b.numel())
        assert similarity(a, b, 0.0) == similarity(b, a, 0.0) == pytest.approx(expected)
        assert expected > 0


def test_what_is_found_is_equal_and_never_above_the_largest() -> None:
    for seed in SEEDS:
        generator = torch.Generator().manual_seed(seed)
        rows, columns, more_rows, more_columns = sizes(generator)
        a, b = (
            torch.randint(0, 4, size, generator=generator).float()
            for size in ((rows, columns), (more_rows, more_columns))
        )
        found = shared_submatrix([a, b], 0.0)
        down, right = found.shifts[1]
        assert all(a[r, c] == b[r + down, c + right] for r in found.rows for c in found.columns)
        assert found.parameters <= largest_common(a, b)
