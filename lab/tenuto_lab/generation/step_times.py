"""Step times of language models, fitted to measured cells: a prefill by its tokens, a decoding step by its batch and
the tokens of its contexts, both on a share of the GPU.

A prefill takes at least the time of reading the weights. With more tokens its time climbs a staircase while they do not
fill the tiles of the GPU, and then follows a line; beyond some 16,000 tokens, tensor parallelism makes the line
steeper. A decoding step reads the weights, takes longer with the batch in the same way, and reads the keys and values
of its contexts. So both times are lines between knots. Each knot is A + B * (100 / share - 1): B is the part that
computes, A the part that does not.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

Array = NDArray[np.float64]

PREFILL_KNOTS = (32, 64, 128, 256, 512, 1024, 2048, 8192, 16384, 32768, 65536, 131072)
"""Tokens of the prefill's knots. derived: the measured sums are powers of two; those left out lie on straight parts."""
DECODE_KNOTS = (1, 32, 64, 128, 256, 512, 2048)
"""Batches of the decoding step's knots. derived: the jumps of the tiles are at 64, 128 and 256."""
_STIFFNESS = 0.05
"""fitted on muxserve_a100.json: how much a bend of the curve weighs beside a cell. It decides only where a knot has no
cell; halved or doubled, the errors on cells left out change by less than 0.1 percentage points."""
_ROBUST_FROM = 0.01
"""limit: errors above 1 % weigh by their size and no longer by its square, so that a stray cell bends nothing."""
_ROUNDS = 20
"""limit: rounds of reweighting; the coefficients stand still after ten."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One measurement: a prefill of `batch` prompts of `tokens_each` tokens in ms (None: did not fit into memory), and
    a decoding step of as many sequences with as long a context."""

    model: str
    tensor_parallel: int
    share_pct: float
    batch: int
    tokens_each: int
    prefill_ms: float | None
    decode_ms: float


@dataclass(frozen=True, slots=True)
class Curve:
    """A cost in ms: a line between knots, beyond the last knot the last line, plus `per_unit_ms` for each of a second
    quantity. Each number is (A, B), and A + B * (100 / share_pct - 1) on a share."""

    knots: tuple[tuple[int, float, float], ...]
    per_unit_ms: tuple[float, float] = (0.0, 0.0)

    def at(self, amount: float, share_pct: float, units: float = 0.0) -> float:
        """Return the ms that `amount` costs on a share, with `units` of the second quantity."""
        less = 100.0 / share_pct - 1.0
        i = min(max(bisect_right(self.knots, amount, key=itemgetter(0)), 1), len(self.knots) - 1)
        (x0, a0, b0), (x1, a1, b1) = self.knots[i - 1], self.knots[i]
        weight = max(0.0, (amount - x0) / (x1 - x0))
        line = (1.0 - weight) * (a0 + b0 * less) + weight * (a1 + b1 * less)
        return line + units * (self.per_unit_ms[0] + self.per_unit_ms[1] * less)


class Times(Protocol):
    """How long steps of a model take on so many GPUs, in ms."""

    def prefill_ms(self, tokens: float, share_pct: float) -> float:
        """Return the time of a prefill of prompts with so many tokens together."""

    def decode_ms(self, batch: float, context_tokens: float, share_pct: float) -> float:
        """Return the time of a step of so many sequences with so many tokens of context together."""


@dataclass(frozen=True, slots=True)
class StepTimes:
    """The two curves of one model on so many GPUs: prefill by tokens; decode by batch, and by tokens of context."""

    prefill: Curve
    decode: Curve

    def prefill_ms(self, tokens: float, share_pct: float) -> float:
        """Return how long a prefill of prompts with so many tokens together takes."""
        return self.prefill.at(tokens, share_pct)

    def decode_ms(self, batch: float, context_tokens: float, share_pct: float) -> float:
        """Return how long one step of `batch` sequences takes that have so many tokens of context together."""
        return self.decode.at(batch, share_pct, context_tokens)


@dataclass(frozen=True, slots=True)
class Errors:
    """Relative errors of prefills and decoding steps."""

    prefill: tuple[float, ...]
    decode: tuple[float, ...]

    @property
    def both(self) -> tuple[float, ...]:
        """All errors together."""
        return self.prefill + self.decode


def fit(cells: Sequence[Cell]) -> StepTimes:
    """Return the curves nearest to the cells of one model on one number of GPUs, in relative error; no number is
    negative.

    Raises:
        ValueError: there is no cell with a prefill.
    """
    whole = [cell for cell in cells if cell.prefill_ms is not None]
    if not whole:
        raise ValueError("no measured prefill: give cells of one model on one number of GPUs.")
    tokens = np.array([float(cell.batch * cell.tokens_each) for cell in cells])
    has = np.array([cell.prefill_ms is not None for cell in cells])
    less = np.array([100.0 / cell.share_pct - 1.0 for cell in cells])
    prefill_ms = np.array([float(cell.prefill_ms or 0.0) for cell in whole])
    prefill = _fitted(_on_share(_hat(tokens[has], PREFILL_KNOTS), less[has]), prefill_ms, PREFILL_KNOTS)
    batches = np.array([float(cell.batch) for cell in cells])
    decode_ms = np.array([cell.decode_ms for cell in cells])
    terms = np.hstack([_hat(batches, DECODE_KNOTS), tokens[:, None]])
    decode = _fitted(_on_share(terms, less), decode_ms, DECODE_KNOTS)
    return StepTimes(_curve(PREFILL_KNOTS, prefill), _curve(DECODE_KNOTS, decode))


def by_model(cells: Iterable[Cell]) -> dict[tuple[str, int], list[Cell]]:
    """Return the cells of each model and number of GPUs, in order."""
    found: dict[tuple[str, int], list[Cell]] = {}
    for cell in cells:
        found.setdefault((cell.model, cell.tensor_parallel), []).append(cell)
    return dict(sorted(found.items()))


def errors(times: StepTimes, cells: Iterable[Cell]) -> Errors:
    """Return how far the curves are from cells, as parts of what was measured."""
    prefill, decode = [], []
    for cell in cells:
        tokens = cell.batch * cell.tokens_each
        if cell.prefill_ms is not None:
            prefill.append(abs(times.prefill_ms(tokens, cell.share_pct) / cell.prefill_ms - 1.0))
        decode.append(abs(times.decode_ms(cell.batch, tokens, cell.share_pct) / cell.decode_ms - 1.0))
    return Errors(tuple(prefill), tuple(decode))


def left_out(cells: Sequence[Cell], out: Callable[[Cell], bool]) -> Errors:
    """Fit each model without the cells that `out` names, and return the errors on those."""
    prefill: list[float] = []
    decode: list[float] = []
    for of_model in by_model(cells).values():
        kept, judged = [c for c in of_model if not out(c)], [c for c in of_model if out(c)]
        if judged:
            found = errors(fit(kept), judged)
            prefill += found.prefill
            decode += found.decode
    return Errors(tuple(prefill), tuple(decode))


def _hat(amounts: Array, knots: Sequence[int]) -> Array:
    """Return each knot's weight at each amount: lines between knots, flat below the first, the last line beyond."""
    at = np.asarray(knots, dtype=float)
    left = np.clip(np.searchsorted(at, amounts, side="right") - 1, 0, len(at) - 2)
    weight = np.maximum(0.0, (amounts - at[left]) / (at[left + 1] - at[left]))
    weights = np.zeros((len(amounts), len(at)))
    row = np.arange(len(amounts))
    weights[row, left], weights[row, left + 1] = 1.0 - weight, weight
    return weights


def _on_share(terms: Array, less: Array) -> Array:
    return np.hstack([terms, terms * less[:, None]])


def _fitted(terms: Array, measured_ms: Array, knots: Sequence[int]) -> Array:
    """Return the coefficients without a negative one that are nearest in relative error, reweighted so that errors
    count by their size; bends of the curve count a little, which settles knots without a cell."""
    bends = _bends(knots, terms.shape[1] // 2, float(measured_ms.min()))
    weight = np.ones(len(measured_ms))
    found = np.zeros(terms.shape[1])
    for _ in range(_ROUNDS):
        scale = weight / measured_ms
        rows = np.vstack([terms * scale[:, None], bends * _STIFFNESS])
        found, _ = nnls(rows, np.concatenate([weight, np.zeros(len(bends))]), maxiter=100 * terms.shape[1])
        weight = 1.0 / np.sqrt(np.maximum(np.abs(terms @ found / measured_ms - 1.0), _ROBUST_FROM))
    return found


def _bends(knots: Sequence[int], width: int, least_ms: float) -> Array:
    """Return one row per inner knot and kind of coefficient: how far the knot lies from the line of its neighbours, as
    part of a curve that doubles from its least value with the tokens of the first bend."""
    rows = []
    for kind in (0, width):
        for i in range(1, len(knots) - 1):
            before, here, after = knots[i - 1 : i + 2]
            row = np.zeros(2 * width)
            row[kind + i - 1], row[kind + i + 1] = (after - here) / (after - before), (here - before) / (after - before)
            row[kind + i] = -1.0
            rows.append(row / (least_ms * (1.0 + here / 128.0)))
    return np.array(rows)


def _curve(knots: Sequence[int], found: Array) -> Curve:
    half = len(found) // 2
    rounded = [float(f"{value:.4g}") for value in found]
    both = list(zip(rounded[:half], rounded[half:], strict=True))
    rest = both[len(knots)] if half > len(knots) else (0.0, 0.0)
    return Curve(tuple((k, a, b) for k, (a, b) in zip(knots, both, strict=False)), rest)
