"""Symphony's appendix A: split models into sub-clusters, each served by one dispatcher on its own GPUs.

A mixed-integer program. With binary x[m,k] (model m is in sub-cluster k), GPU need u_m, rate r_m and memory s_m of a
model:

    minimise    (Z - z)/U  +  (R - q)/T  +  w * sum_m c_m (1 - x[m, k0(m)]) / C
    subject to  sum_k x[m,k] = 1                           every model m
                z <= sum_m u_m x[m,k] <= Z,  q <= sum_m r_m x[m,k] <= R      every k
                sum_m s_m x[m,k] <= memory of one GPU      every k: each GPU of a sub-cluster holds all of its models
                sum_m r_m x[m,k] <= max_rate_rps           every k: what one dispatcher can schedule
                sum_m x[m,k] <= max_models                 every k
                sum_m c_m (1 - x[m, k0(m)]) <= max_moved_mib

The first two terms are the imbalance of GPU need and of rate between the largest and the smallest sub-cluster,
relative to the average one (U, T); the last is the disruption against the current partition k0: c_m is the memory that
a model moved elsewhere has to load there (1 MiB where it is unknown), relative to the total C. The appendix was
known by its aims only, so the terms and weights are derived here; `disruption_weight` is w. Sub-clusters
are interchangeable: names of the current partition are kept, and without one the symmetry is broken by the first model.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pulp

from tenuto.errors import InvalidInputError, Problem, raise_if_any

__all__ = ["Limits", "Partition", "PartitionModel", "partition"]


@dataclass(frozen=True)
class PartitionModel:
    """A model to be assigned: GPUs its rate keeps busy, its rate, and the memory its copy takes on every GPU (MiB)."""

    name: str
    need_gpus: float
    rate_rps: float
    memory_mib: float = 0.0


@dataclass(frozen=True)
class Limits:
    """What a sub-cluster may hold; None: no limit. `max_moved_mib` bounds the disruption as a whole."""

    memory_mib: float | None = None
    max_rate_rps: float | None = None
    max_models: int | None = None
    max_moved_mib: float | None = None
    disruption_weight: float = 0.1


@dataclass(frozen=True)
class Partition:
    """The sub-cluster (from 0) of every model, and how good that is.

    `imbalance` is the objective's first two terms; `lower_bound` no partition's objective is below; `proven` says that
    the solver finished rather than ran out of time.
    """

    assignment: Mapping[str, int]
    subclusters: int
    objective: float
    imbalance: float
    lower_bound: float
    moved: tuple[str, ...]
    moved_mib: float
    proven: bool
    models: tuple[PartitionModel, ...] = field(repr=False)

    def members(self, subcluster: int) -> list[PartitionModel]:
        """Return the models of a sub-cluster, in the order given."""
        return [model for model in self.models if self.assignment[model.name] == subcluster]

    def gpus(self, total: int) -> list[int]:
        """Return how many of `total` GPUs each sub-cluster gets: at least one, the rest in proportion to need (largest
        remainders); none for an empty one."""
        needs = [sum(m.need_gpus for m in self.members(k)) for k in range(self.subclusters)]
        used = [k for k in range(self.subclusters) if self.members(k)]
        if total < len(used):
            raise InvalidInputError(
                Problem(
                    "--gpus", total, f"{len(used)} sub-clusters need at least one GPU each", "Use fewer sub-clusters."
                )
            )
        spare = total - len(used)
        whole_need = sum(needs) or 1.0
        shares = {k: spare * needs[k] / whole_need for k in used}
        result = [0] * self.subclusters
        for k in used:
            result[k] = 1 + math.floor(shares[k] + 1e-9)
        by_rest = sorted(used, key=lambda k: (math.floor(shares[k] + 1e-9) - shares[k], k))
        for k in by_rest[: total - sum(result)]:
            result[k] += 1
        return result

    def as_dict(self, total_gpus: int | None = None) -> dict[str, Any]:
        """Return it for JSON; the file can be given as the current partition later."""
        gpus = self.gpus(total_gpus) if total_gpus is not None else [None] * self.subclusters
        return {
            "subclusters": [
                {
                    "index": k,
                    "gpus": gpus[k],
                    "models": [m.name for m in members],
                    "rate_rps": sum(m.rate_rps for m in members),
                    "need_gpus": sum(m.need_gpus for m in members),
                    "memory_mib": sum(m.memory_mib for m in members),
                }
                for k in range(self.subclusters)
                for members in [self.members(k)]
            ],
            "assignment": dict(self.assignment),
            "objective": self.objective,
            "imbalance": self.imbalance,
            "lower_bound": self.lower_bound,
            "moved": list(self.moved),
            "moved_mib": self.moved_mib,
            "proven": self.proven,
        }


def partition(
    models: Sequence[PartitionModel],
    subclusters: int,
    *,
    limits: Limits | None = None,
    current: Mapping[str, int] | None = None,
    time_limit_s: float = 10.0,
) -> Partition:
    """Return the best partition found within the time limit; deterministic when the solver finishes.

    Args:
        models: with positive need and rate.
        subclusters: how many, at most the number of models.
        limits: of each sub-cluster, and of the disruption.
        current: the sub-cluster of models that are already served; other models are new and cost nothing to place.
        time_limit_s: for the solver; a greedy partition is the answer when it finds none that is better.

    Raises:
        InvalidInputError: numbers out of range, or limits that no partition keeps.
    """
    limits, current = limits or Limits(), {k: v for k, v in (current or {}).items() if any(m.name == k for m in models)}
    raise_if_any(_problems(models, subclusters, limits, current, time_limit_s))
    judge = _Judge(models, subclusters, limits, current)
    start = _greedy(models, judge)
    if start is not None and judge.objective(start) <= judge.bound + 1e-9:
        return _result(models, judge, start, judge.bound, True)
    solved, bound, proven = _solve(models, judge, time_limit_s)
    options = [option for option in (start, solved) if option is not None and judge.is_allowed(option)]
    if not options:
        if proven:
            raise InvalidInputError(
                Problem(
                    "--subclusters",
                    subclusters,
                    "no partition keeps the limits",
                    "Use more sub-clusters, GPUs with more memory, or a higher limit on rate, models or movement.",
                )
            )
        raise InvalidInputError(
            Problem(
                "--time-limit-s",
                time_limit_s,
                "no partition that keeps the limits was found in this time",
                "Give more time or wider limits.",
            )
        )
    best = min(options, key=judge.objective)
    return _result(models, judge, best, min(bound, judge.objective(best)), proven)


class _Judge:
    """Computes the objective and the limits of an assignment, as the program states them."""

    def __init__(
        self, models: Sequence[PartitionModel], subclusters: int, limits: Limits, current: Mapping[str, int]
    ) -> None:
        self.models, self.subclusters, self.limits = models, subclusters, limits
        self.home = [current.get(model.name) for model in models]
        self.cost = [model.memory_mib or 1.0 for model in models]
        self.mean_need = sum(m.need_gpus for m in models) / subclusters
        self.mean_rate = sum(m.rate_rps for m in models) / subclusters
        self.all_cost = sum(cost for cost, home in zip(self.cost, self.home, strict=True) if home is not None)
        # The largest model cannot be split; what exceeds the mean there is lost in any partition.
        others = max(subclusters - 1, 1)
        self.bound = 0.0
        for values, mean in (
            ([m.need_gpus for m in models], self.mean_need),
            ([m.rate_rps for m in models], self.mean_rate),
        ):
            over = max(0.0, max(values) - mean)
            if subclusters > 1:
                self.bound += (over + over / others) / mean

    def loads(self, assignment: Sequence[int]) -> tuple[list[float], list[float]]:
        need, rate = [0.0] * self.subclusters, [0.0] * self.subclusters
        for model, k in zip(self.models, assignment, strict=True):
            need[k] += model.need_gpus
            rate[k] += model.rate_rps
        return need, rate

    def crowded(self, assignment: Sequence[int]) -> set[int]:
        """Return the sub-clusters with the most need, rate, memory and models: where a single move can help."""
        totals = [[0.0] * self.subclusters for _ in range(4)]
        for model, k in zip(self.models, assignment, strict=True):
            for total, value in zip(totals, (model.need_gpus, model.rate_rps, model.memory_mib, 1.0), strict=True):
                total[k] += value
        return {max(range(self.subclusters), key=total.__getitem__) for total in totals}

    def imbalance(self, assignment: Sequence[int]) -> float:
        need, rate = self.loads(assignment)
        return (max(need) - min(need)) / self.mean_need + (max(rate) - min(rate)) / self.mean_rate

    def moved(self, assignment: Sequence[int]) -> list[int]:
        return [
            i for i, (home, k) in enumerate(zip(self.home, assignment, strict=True)) if home is not None and home != k
        ]

    def moved_mib(self, assignment: Sequence[int]) -> float:
        return sum(self.cost[i] for i in self.moved(assignment))

    def objective(self, assignment: Sequence[int]) -> float:
        disruption = self.moved_mib(assignment) / self.all_cost if self.all_cost else 0.0
        return self.imbalance(assignment) + self.limits.disruption_weight * disruption

    def is_allowed(self, assignment: Sequence[int]) -> bool:
        limits = self.limits
        _, rate = self.loads(assignment)
        memory, count = [0.0] * self.subclusters, [0] * self.subclusters
        for model, k in zip(self.models, assignment, strict=True):
            memory[k] += model.memory_mib
            count[k] += 1
        return (
            min(count) > 0
            and (limits.memory_mib is None or max(memory) <= limits.memory_mib * (1 + 1e-9))
            and (limits.max_rate_rps is None or max(rate) <= limits.max_rate_rps * (1 + 1e-9))
            and (limits.max_models is None or max(count) <= limits.max_models)
            and (limits.max_moved_mib is None or self.moved_mib(assignment) <= limits.max_moved_mib * (1 + 1e-9) + 1e-9)
        )


def _greedy(models: Sequence[PartitionModel], judge: _Judge) -> list[int] | None:
    """Return the current partition or longest-processing-time-first, improved by single moves; None if not allowed."""
    order = sorted(range(len(models)), key=lambda i: (-models[i].need_gpus, i))
    starts = []
    if judge.all_cost:
        starts.append([home if home is not None else -1 for home in judge.home])
    starts.append([-1] * len(models))
    best: list[int] | None = None
    for assignment in starts:
        need = [0.0] * judge.subclusters
        for model, k in zip(models, assignment, strict=True):
            if k >= 0:
                need[k] += model.need_gpus
        for i in order:
            if assignment[i] < 0:
                assignment[i] = min(range(judge.subclusters), key=lambda k: (need[k], k))
                need[assignment[i]] += models[i].need_gpus
        for _ in range(min(3 * len(models), 4_000 // len(models) + 1)):
            value = judge.objective(assignment) if judge.is_allowed(assignment) else math.inf
            moves = []
            crowded = judge.crowded(assignment)
            for i in (i for i, k in enumerate(assignment) if k in crowded):
                for k in range(judge.subclusters):
                    if k != assignment[i]:
                        other = [*assignment[:i], k, *assignment[i + 1 :]]
                        if judge.is_allowed(other):
                            moves.append((judge.objective(other), i, k))
            if not moves or min(moves)[0] >= value - 1e-12:
                break
            _, i, k = min(moves)
            assignment[i] = k
        if judge.is_allowed(assignment) and (best is None or judge.objective(assignment) < judge.objective(best)):
            best = assignment
    return best


def _solve(
    models: Sequence[PartitionModel], judge: _Judge, time_limit_s: float
) -> tuple[list[int] | None, float, bool]:
    """Return the solver's assignment (None if it found none), a lower bound of the objective, and whether it
    finished."""
    limits, count = judge.limits, judge.subclusters
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = pulp.LpProblem("partition", pulp.LpMinimize)
        x = [[pulp.LpVariable(f"x_{i}_{k}", cat="Binary") for k in range(count)] for i in range(len(models))]
        most, least = pulp.LpVariable("most_need", 0), pulp.LpVariable("least_need", 0)
        busiest, quietest = pulp.LpVariable("most_rate", 0), pulp.LpVariable("least_rate", 0)
        homed = [(i, home) for i, home in enumerate(judge.home) if home is not None]
        moved = pulp.lpSum(judge.cost[i] * (1 - x[i][home]) for i, home in homed)
        weight = limits.disruption_weight / judge.all_cost if judge.all_cost else 0.0
        # Needs and rates are scaled to the mean sub-cluster, which keeps the solver's tolerances meaningful.
        program += (most - least) + (busiest - quietest) + weight * moved
        for row in x:
            program += pulp.lpSum(row) == 1
        for k in range(count):
            need = pulp.lpSum(m.need_gpus / judge.mean_need * x[i][k] for i, m in enumerate(models))
            rate = pulp.lpSum(m.rate_rps / judge.mean_rate * x[i][k] for i, m in enumerate(models))
            program += need <= most
            program += need >= least
            program += rate <= busiest
            program += rate >= quietest
            program += pulp.lpSum(x[i][k] for i in range(len(models))) >= 1
            if limits.memory_mib is not None:
                program += pulp.lpSum(m.memory_mib / limits.memory_mib * x[i][k] for i, m in enumerate(models)) <= 1
            if limits.max_rate_rps is not None:
                program += rate <= limits.max_rate_rps / judge.mean_rate
            if limits.max_models is not None:
                program += pulp.lpSum(x[i][k] for i in range(len(models))) <= limits.max_models
        if limits.max_moved_mib is not None and homed:
            program += moved <= limits.max_moved_mib
        if not homed:
            for i in range(min(count, len(models))):  # model i may only open the sub-clusters up to i
                for k in range(i + 1, count):
                    program += x[i][k] == 0
        status = program.solve(pulp.PULP_CBC_CMD(msg=False, timeLimit=time_limit_s, threads=1))
    name = pulp.LpStatus[status]
    if name == "Infeasible":
        return None, math.inf, True
    if any(variable.varValue is None for row in x for variable in row):
        return None, judge.bound, False
    assignment = [max(range(count), key=lambda k: row[k].varValue) for row in x]
    proven = name == "Optimal" and program.sol_status == pulp.LpSolutionOptimal
    bound = judge.objective(assignment) if proven else judge.bound
    return assignment, bound, proven


def _result(
    models: Sequence[PartitionModel], judge: _Judge, assignment: Sequence[int], bound: float, proven: bool
) -> Partition:
    moved = judge.moved(assignment)
    return Partition(
        assignment={model.name: k for model, k in zip(models, assignment, strict=True)},
        subclusters=judge.subclusters,
        objective=judge.objective(assignment),
        imbalance=judge.imbalance(assignment),
        lower_bound=bound,
        moved=tuple(models[i].name for i in moved),
        moved_mib=sum(models[i].memory_mib for i in moved),
        proven=proven,
        models=tuple(models),
    )


def _problems(
    models: Sequence[PartitionModel], subclusters: int, limits: Limits, current: Mapping[str, int], time_limit_s: float
) -> list[Problem]:
    found = []
    if not 1 <= subclusters <= len(models):
        found.append(
            Problem(
                "--subclusters",
                subclusters,
                f"must be from 1 to the number of models ({len(models)})",
                "Give fewer sub-clusters or more models.",
            )
        )
    for model in models:
        for key, least in (("need_gpus", 1e-12), ("rate_rps", 1e-12), ("memory_mib", 0.0)):
            value = getattr(model, key)
            if not (math.isfinite(value) and value >= least):
                found.append(Problem(f"{model.name}.{key}", value, "must be a finite positive number", "Correct it."))
        if limits.memory_mib is not None and model.memory_mib > limits.memory_mib:
            found.append(
                Problem(
                    f"{model.name}.memory_mib",
                    model.memory_mib,
                    f"more than the {limits.memory_mib:g} MiB of a GPU",
                    "Use a GPU type with more memory.",
                )
            )
        if limits.max_rate_rps is not None and model.rate_rps > limits.max_rate_rps:
            found.append(
                Problem(
                    f"{model.name}.rate_rps",
                    model.rate_rps,
                    f"alone above the {limits.max_rate_rps:g} r/s one sub-cluster may have",
                    "Raise the limit, or list the model twice with half the rate each.",
                )
            )
    for name, k in current.items():
        if not 0 <= k < subclusters:
            found.append(
                Problem(
                    f"current.{name}",
                    k,
                    f"there are sub-clusters 0 to {subclusters - 1}",
                    "Leave the model out of the current partition, or use more sub-clusters.",
                )
            )
    for key in ("memory_mib", "max_rate_rps", "max_models"):
        value = getattr(limits, key)
        if value is not None and not value > 0:
            found.append(Problem(key, value, "must be positive", "Leave it out for no limit."))
    if limits.max_moved_mib is not None and not limits.max_moved_mib >= 0:
        found.append(Problem("max_moved_mib", limits.max_moved_mib, "must be at least 0", "0 moves nothing."))
    if not (math.isfinite(limits.disruption_weight) and limits.disruption_weight >= 0):
        found.append(Problem("disruption_weight", limits.disruption_weight, "must be at least 0", "Try 0.1."))
    if not (math.isfinite(time_limit_s) and time_limit_s > 0):
        found.append(Problem("--time-limit-s", time_limit_s, "must be a positive number of seconds", "Try 10."))
    return found
