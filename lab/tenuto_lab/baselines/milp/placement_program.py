"""The placement MILP over patterns: its linear relaxation (duals, bound) and its integer program, solved by HiGHS."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tenuto.placement.solver import Rows, integer_program, linear_program
from tenuto.placement.workload import ModelSpec
from tenuto_lab.baselines.milp.patterns import Item, Pattern

TOLERANCE = 1e-6  # derived: relative rounding error of the solver


@dataclass(frozen=True)
class Relaxation:
    """The optimum of the linear relaxation, and its marginal prices.

    `counts` are GPUs per pattern, fractions allowed. `carried`: the value of one more request per second of a model.
    `replica`: of one more allowed replica of a model. `gpu`: of one more GPU of a type, or its price when GPUs are
    bought.
    """

    objective: float
    counts: tuple[float, ...]
    carried: tuple[float, ...]
    replica: tuple[float, ...]
    gpu: Mapping[str, float]
    is_bound: bool = True  # no pattern left out would improve it

    def worth(self, item: Item) -> float:
        """Return what a replica adds to the objective at these prices."""
        return self.carried[item.model] * item.carries_rps - self.replica[item.model]


@dataclass(frozen=True)
class Solution:
    """How many GPUs get each pattern. `proven`: the solver showed that the given patterns allow nothing better."""

    counts: tuple[int, ...]
    objective: float
    proven: bool


class PlacementProgram:
    """Maximises weighted goodput on a fixed number of GPUs per type, or minimises the price of carrying every rate.

    Args:
        gpu_counts: GPUs per type; None where they are bought.
        prices: price of a GPU per type, used where GPUs are bought.
        max_replicas: most replicas of one model, or None.
        one_batch_size: all replicas of a model have the same batch size; the relaxation ignores this and stays a bound.
    """

    def __init__(
        self,
        models: Sequence[ModelSpec],
        gpu_counts: Mapping[str, int] | None,
        prices: Mapping[str, float],
        max_replicas: int | None,
        *,
        one_batch_size: bool = False,
    ) -> None:
        self.models, self.gpu_counts, self.prices, self.max_replicas = models, gpu_counts, prices, max_replicas
        self.one_batch_size = one_batch_size
        self.types = list(prices)

    @property
    def buys(self) -> bool:
        """True when the objective is a price to minimise."""
        return self.gpu_counts is None

    def relax(self, patterns: Sequence[Pattern]) -> Relaxation | None:
        """Solve the linear relaxation over these patterns; None when the most replicas of a model carry too little."""
        rows = self._rows(patterns)
        models, columns = len(self.models), len(patterns)
        rates = [spec.rate_rps for spec in self.models]
        least = [0.0] * columns + (rates if self.buys else [0.0] * models)
        solved = linear_program(self._cost(patterns), rows, [math.inf] * columns + rates, least)
        if solved.x is None:
            return None
        duals = -solved.duals
        at = models + (models if self.max_replicas is not None else 0)
        replica = duals[models:at] if at > models else np.zeros(models)
        gpu = self.prices if self.buys else dict(zip(self.types, map(float, duals[at:]), strict=True))
        objective = (1.0 if self.buys else -1.0) * float(self._cost(patterns) @ solved.x)
        counts = tuple(map(float, solved.x[:columns]))
        return Relaxation(objective, counts, tuple(map(float, duals[:models])), tuple(map(float, replica)), gpu)

    def solve(
        self,
        patterns: Sequence[Pattern],
        start: Sequence[int],
        *,
        time_limit_s: float = math.inf,
        at_least: float | None = None,
    ) -> Solution | None:
        """Solve the integer program; None when nothing was found.

        Args:
            patterns: the columns.
            start: known counts of the first patterns.
            time_limit_s: for the solver.
            at_least: when given, keep the first objective at this level (`at most` for a price), and minimise the
                replicas' exposure to neighbours instead, then load, so that no replica is needless.
        """
        if time_limit_s <= 0:
            return None
        rows = self._rows(patterns)
        columns, models = len(patterns), len(self.models)
        chosen = self._sizes(patterns, rows) if self.one_batch_size else []
        sizes = len(chosen)
        first = np.concatenate([self._cost(patterns), np.zeros(sizes)])
        cost = first
        if at_least is not None:
            # Derived: rounding of the solver.
            level = (1.0 if self.buys else -1.0) * at_least + max(TOLERANCE * abs(at_least), 1e-4)
            where = np.flatnonzero(first)
            rows.add(where, first[where], level)
            exposure = [round(pattern.exposure, 6) + 1e-3 * round(pattern.load, 4) for pattern in patterns]
            cost = np.concatenate([exposure, np.zeros(models + sizes)])
        rates = [spec.rate_rps for spec in self.models]
        least = [0.0] * columns + (rates if self.buys else [0.0] * models) + [0.0] * sizes
        most = [self._most(pattern) for pattern in patterns] + rates + [1.0] * sizes
        # Whole replicas may carry a rate exactly; a millionth allows for rounding in their sums.
        rows.most = [limit + (TOLERANCE if index < models else 0.0) for index, limit in enumerate(rows.most)]
        known = np.zeros(len(cost))
        known[: len(start)] = start
        carried = self._carried(patterns, start)
        known[columns : columns + models] = np.minimum(rates, carried)
        used = {(i.model, i.need.batch_size) for p, n in zip(patterns, start, strict=False) if n for i in p.items}
        known[columns + models :] = [size in used for size in chosen]
        whole = [True] * columns + [False] * models + [True] * sizes
        solved = integer_program(cost, rows, least, most, whole, start=known, time_limit_s=time_limit_s)
        if solved.x is None:
            return None
        counts = tuple(round(value) for value in solved.x[:columns])
        return Solution(counts, self.objective(patterns, counts), solved.is_proven)

    def objective(self, patterns: Sequence[Pattern], counts: Sequence[int]) -> float:
        """Return the weighted goodput, or the price, of whole counts."""
        if self.buys:
            return sum(self.prices[pattern.gpu_type] * n for pattern, n in zip(patterns, counts, strict=True))
        carried = self._carried(patterns, counts)
        return math.fsum(s.weight * min(s.rate_rps, total) for s, total in zip(self.models, carried, strict=True))

    def _carried(self, patterns: Sequence[Pattern], counts: Sequence[int]) -> list[float]:
        """Return what so many GPUs with each of the first patterns carry of every model."""
        carried = [0.0] * len(self.models)
        for pattern, n in zip(patterns, counts, strict=False):
            for item in pattern.items:
                carried[item.model] += item.carries_rps * n
        return carried

    # Columns: a count per pattern, the goodput of each model, and for one batch size whether it is chosen.

    def _cost(self, patterns: Sequence[Pattern]) -> Any:
        if self.buys:
            return np.array([self.prices[pattern.gpu_type] for pattern in patterns] + [0.0] * len(self.models))
        return np.array([0.0] * len(patterns) + [-spec.weight for spec in self.models])

    def _most(self, pattern: Pattern) -> float:
        return np.inf if self.gpu_counts is None else float(self.gpu_counts[pattern.gpu_type])

    def _rows(self, patterns: Sequence[Pattern]) -> Rows:
        """Return the rows of the linear part: what is carried by model, replicas by model, GPUs by type."""
        columns, models = len(patterns), len(self.models)
        rows = Rows()
        carried: list[dict[int, float]] = [{columns + model: 1.0} for model in range(models)]
        replicas: list[dict[int, float]] = [{} for _ in range(models)]
        for column, pattern in enumerate(patterns):
            for item in pattern.items:
                carried[item.model][column] = -item.carries_rps
                replicas[item.model][column] = 1.0
        for row in carried:
            rows.add(row, row.values(), 0.0)
        if self.max_replicas is not None:
            for row in replicas:
                rows.add(row, row.values(), float(self.max_replicas))
        if self.gpu_counts is not None:
            for kind in self.types:
                same = [column for column, pattern in enumerate(patterns) if pattern.gpu_type == kind]
                rows.add(same, np.ones(len(same)), float(self.gpu_counts[kind]))
        return rows

    def _sizes(self, patterns: Sequence[Pattern], rows: Rows) -> list[tuple[int, int]]:
        """Add the rows that let every model use one batch size; return model and size of each added column."""
        with_size: dict[tuple[int, int], dict[int, float]] = {}
        least_rps: dict[int, float] = {}
        for column, pattern in enumerate(patterns):
            for item in pattern.items:
                with_size.setdefault((item.model, item.need.batch_size), {})[column] = 1.0
                least_rps[item.model] = min(least_rps.get(item.model, math.inf), item.carries_rps)
        chosen: dict[int, dict[int, float]] = {}
        first = len(patterns) + len(self.models)
        for position, ((model, _), columns) in enumerate(with_size.items()):
            most = math.ceil(self.models[model].rate_rps / least_rps[model]) + 1
            if self.gpu_counts is not None:
                most = max(most, sum(self.gpu_counts.values()))
            rows.add([*columns, first + position], [*columns.values(), -float(most)], 0.0)
            chosen.setdefault(model, {})[first + position] = 1.0
        for row in chosen.values():
            rows.add(row, row.values(), 1.0)
        return list(with_size)
