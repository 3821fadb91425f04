"""The placement MILP over patterns: its linear relaxation (duals, bound) and its integer program (PuLP with CBC)."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pulp
from scipy.optimize import linprog

from tenuto.placement.policies.milp.patterns import Item, Pattern
from tenuto.placement.workload import ModelSpec

__all__ = ["Master", "Relaxation", "Solution"]

TOLERANCE = 1e-6


@dataclass(frozen=True)
class Relaxation:
    """The optimum of the linear relaxation and what its constraints are worth at the margin."""

    objective: float
    carried: tuple[float, ...]  # per model: value of one more request per second carried
    replica: tuple[float, ...]  # per model: value of one more replica allowed
    gpu: Mapping[str, float]  # per type: value of one more GPU, or its price where GPUs are bought

    def worth(self, item: Item) -> float:
        """Return what a replica adds to the objective at these prices."""
        return self.carried[item.model] * item.carries_rps - self.replica[item.model]


@dataclass(frozen=True)
class Solution:
    """How many GPUs get each pattern. `proven`: the solver showed that nothing better exists among the patterns
    given."""

    counts: tuple[int, ...]
    objective: float
    proven: bool


class Master:
    """Maximises weighted goodput on a fixed number of GPUs per type, or minimises the price of carrying every rate.

    Args:
        gpu_counts: GPUs per type; None where they are bought.
        prices: price of a GPU per type, used where GPUs are bought.
        max_replicas: most replicas of one model, or None.
        one_batch_size: all replicas of a model have the same batch size; the relaxation ignores this and stays a bound.
    """

    def __init__(
        self, models: Sequence[ModelSpec], gpu_counts: Mapping[str, int] | None, prices: Mapping[str, float],
        max_replicas: int | None, *, one_batch_size: bool = False,
    ) -> None:
        self.models, self.gpu_counts, self.prices, self.max_replicas = models, gpu_counts, prices, max_replicas
        self.one_batch_size = one_batch_size
        self.types = list(prices)

    @property
    def buys(self) -> bool:
        """True when the objective is a price to minimise."""
        return self.gpu_counts is None

    def relax(self, patterns: Sequence[Pattern]) -> Relaxation:
        """Solve the linear relaxation over these patterns."""
        models, count = len(self.models), len(patterns)
        carries = np.zeros((models, count))
        replicas = np.zeros((models, count))
        for column, pattern in enumerate(patterns):
            for item in pattern.items:
                carries[item.model, column] = item.carries_rps
                replicas[item.model, column] = 1.0
        rates = np.array([spec.rate_rps for spec in self.models])
        weights = np.array([spec.weight for spec in self.models])
        rows, limits = [np.hstack([np.eye(models), -carries])], [np.zeros(models)]
        if self.max_replicas is not None:
            rows.append(np.hstack([np.zeros((models, models)), replicas]))
            limits.append(np.full(models, float(self.max_replicas)))
        if self.gpu_counts is None:
            cost = np.concatenate([np.zeros(models), [self.prices[pattern.gpu_type] for pattern in patterns]])
            bounds = [(rate, rate) for rate in rates]
        else:
            is_type = [[float(pattern.gpu_type == kind) for pattern in patterns] for kind in self.types]
            rows.append(np.hstack([np.zeros((len(self.types), models)), np.array(is_type)]))
            limits.append(np.array([float(self.gpu_counts[kind]) for kind in self.types]))
            cost = np.concatenate([-weights, np.zeros(count)])
            bounds = [(0.0, rate) for rate in rates]
        result = linprog(cost, A_ub=np.vstack(rows), b_ub=np.concatenate(limits), bounds=bounds + [(0, None)] * count)
        duals = -result.ineqlin.marginals
        at = models + (models if self.max_replicas is not None else 0)
        replica = duals[models:at] if at > models else np.zeros(models)
        gpu = self.prices if self.buys else dict(zip(self.types, map(float, duals[at:]), strict=True))
        objective = float(result.fun) if self.buys else -float(result.fun)
        return Relaxation(objective, tuple(map(float, duals[:models])), tuple(map(float, replica)), gpu)

    def solve(
        self, patterns: Sequence[Pattern], time_limit_s: float, *, at_least: float | None = None
    ) -> Solution | None:
        """Solve the integer program with CBC; None when nothing was found in time.

        Args:
            at_least: when given, the first objective is kept at this level (`at most` for a price), and the exposure of
                replicas to their neighbours is minimised instead, then load, so that no replica is there without need.
        """
        with warnings.catch_warnings():
            # PuLP 3.3 announces the interface of 4.0, which 3.2 and older lack; pyproject keeps PuLP below 4.
            warnings.simplefilter("ignore", DeprecationWarning)
            return self._solve(patterns, time_limit_s, at_least)

    def _solve(self, patterns: Sequence[Pattern], time_limit_s: float, at_least: float | None) -> Solution | None:
        problem = pulp.LpProblem("placement", pulp.LpMinimize)
        most = dict.fromkeys(self.types) if self.gpu_counts is None else self.gpu_counts
        counts = [
            pulp.LpVariable(f"n{index}", 0, most[pattern.gpu_type], pulp.LpInteger)
            for index, pattern in enumerate(patterns)
        ]
        carried: list[list[pulp.LpAffineExpression]] = [[] for _ in self.models]
        replicas: list[list[pulp.LpVariable]] = [[] for _ in self.models]
        for pattern, variable in zip(patterns, counts, strict=True):
            for item in pattern.items:
                carried[item.model].append(item.carries_rps * variable)
                replicas[item.model].append(variable)
        if self.gpu_counts is None:
            first = pulp.lpSum(self.prices[p.gpu_type] * n for p, n in zip(patterns, counts, strict=True))
            for spec, terms in zip(self.models, carried, strict=True):
                problem += pulp.lpSum(terms) >= spec.rate_rps - TOLERANCE
        else:
            goodputs = [pulp.LpVariable(f"g{index}", 0, spec.rate_rps) for index, spec in enumerate(self.models)]
            first = -pulp.lpSum(spec.weight * goodput for spec, goodput in zip(self.models, goodputs, strict=True))
            for goodput, terms in zip(goodputs, carried, strict=True):
                problem += goodput <= pulp.lpSum(terms)
            for kind in self.types:
                same = [n for pattern, n in zip(patterns, counts, strict=True) if pattern.gpu_type == kind]
                problem += pulp.lpSum(same) <= self.gpu_counts[kind]
        if self.max_replicas is not None:
            for variables in replicas:
                problem += pulp.lpSum(variables) <= self.max_replicas
        if self.one_batch_size:
            self._require_one_batch_size(problem, patterns, counts)
        if at_least is None:
            problem.setObjective(first)
        else:
            sign = 1.0 if self.buys else -1.0
            problem += first <= sign * at_least + max(TOLERANCE * abs(at_least), 1e-4)
            problem.setObjective(pulp.lpSum(
                (round(pattern.exposure, 6) + 1e-3 * round(pattern.load, 4)) * n
                for pattern, n in zip(patterns, counts, strict=True)
            ))
        status = problem.solve(pulp.PULP_CBC_CMD(msg=False, timeLimit=max(0.1, time_limit_s)))
        found = problem.sol_status in (pulp.LpSolutionOptimal, pulp.LpSolutionIntegerFeasible)
        if not found:
            return None
        values = tuple(round(variable.value() or 0.0) for variable in counts)
        proven = status == pulp.LpStatusOptimal and problem.sol_status == pulp.LpSolutionOptimal
        return Solution(values, self.objective(patterns, values), proven)

    def _require_one_batch_size(
        self, problem: pulp.LpProblem, patterns: Sequence[Pattern], counts: Sequence[pulp.LpVariable]
    ) -> None:
        with_size: dict[tuple[int, int], list[pulp.LpVariable]] = {}
        for pattern, variable in zip(patterns, counts, strict=True):
            for item in pattern.items:
                with_size.setdefault((item.model, item.need.batch_size), []).append(variable)
        smallest = {i.model: i.carries_rps for p in patterns for i in p.items}
        for pattern in patterns:
            for item in pattern.items:
                smallest[item.model] = min(smallest[item.model], item.carries_rps)
        chosen: dict[int, list[pulp.LpVariable]] = {}
        for (model, size), variables in with_size.items():
            is_chosen = pulp.LpVariable(f"b{model}_{size}", cat=pulp.LpBinary)
            most = math.ceil(self.models[model].rate_rps / smallest[model]) + 1
            if self.gpu_counts is not None:
                most = max(most, sum(self.gpu_counts.values()))
            problem += pulp.lpSum(variables) <= most * is_chosen
            chosen.setdefault(model, []).append(is_chosen)
        for binaries in chosen.values():
            problem += pulp.lpSum(binaries) <= 1

    def objective(self, patterns: Sequence[Pattern], counts: Sequence[int]) -> float:
        """Return the weighted goodput, or the price, of whole counts."""
        if self.buys:
            return sum(self.prices[pattern.gpu_type] * n for pattern, n in zip(patterns, counts, strict=True))
        totals = [0.0] * len(self.models)
        for pattern, n in zip(patterns, counts, strict=True):
            for item in pattern.items:
                totals[item.model] += item.carries_rps * n
        return math.fsum(s.weight * min(s.rate_rps, total) for s, total in zip(self.models, totals, strict=True))
