"""Symphony's appendix A: split models into sub-clusters, each served by one dispatcher on its own GPUs.

A mixed-integer program. With x[i,j] = 1 where model i is in sub-cluster j of l, rate r, static memory s (weights),
dynamic memory d (working space while it runs), R = sum r / l and S = sum s / l:

    minimise    dR / R + w dS / S
    subject to  sum_j x[i,j] = 1                                        every model i
                |sum_i r_i x[i,j] - R| <= dR,  |sum_i s_i x[i,j] - S| <= dS           every j
                sum_i r_i x[i,j] <= R_max                               what one dispatcher can take
                sum_i s_i x[i,j] + max_i d_i x[i,j] <= S_max            each GPU of a sub-cluster holds all its models;
                                                                        one at a time needs its dynamic part
                sum_ij c_i |x[i,j] - x'[i,j]| <= C_max                  change against the present partition x'

The paper minimises dR + w dS; dividing both by their means is the same program with another w, free of units. c_i is
the static memory of a model, loading and unloading both counted. `max_models` is ours. The paper gives its solver 10 s.
Here the solver's work is bounded instead, so a partition is the same every time. A longest-first partition, improved by
moves and swaps, is the answer when it is better than the solver's, and at once when its imbalance is below
`GOOD_ENOUGH` of an average sub-cluster.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tenuto.errors import refused
from tenuto.placement.solver import Rows, integer_program

# limit: asked for less, the solver uses up its work from some 30 models on, and seldom finds better
GOOD_ENOUGH = 1e-2
MOST_CHOICES = 20_000  # limit: models times sub-clusters; above, the solver found nothing better in 10 s
Floats = NDArray[np.float64]
Assignment = NDArray[np.int64]


@dataclass(frozen=True)
class PartitionModel:
    """A model to assign: GPUs that its rate keeps busy, its rate, and the MiB of its copy on every GPU: `static`
    always, `dynamic` while it runs."""

    name: str
    need_gpus: float
    rate_rps: float
    static_mib: float = 0.0
    dynamic_mib: float = 0.0


@dataclass(frozen=True)
class PartitionLimits:
    """The limits of a sub-cluster; None: no limit. `memory_mib` is one GPU's; `max_change_mib` limits all loading and
    unloading together; `memory_weight` is w."""

    memory_mib: float | None = None
    max_rate_rps: float | None = None
    max_models: int | None = None
    max_change_mib: float | None = None
    memory_weight: float = 1.0


@dataclass(frozen=True)
class Partition:
    """The sub-cluster (from 0) of every model, and how good the partition is.

    `objective` is the program's; no partition is below `lower_bound`. `proven`: the solver finished, or the bound is
    reached.
    """

    assignment: Mapping[str, int]
    subclusters: int
    objective: float
    lower_bound: float
    moved: tuple[str, ...]
    changed_mib: float
    proven: bool
    models: tuple[PartitionModel, ...] = field(repr=False)


def gpus_by_need(needs: Sequence[float], total: int) -> list[int]:
    """Share out GPUs, at least one each. The next one always goes where GPUs are busiest, so the largest need per GPU
    becomes as small as possible."""
    counts = [1] * len(needs)
    for _ in range(total - len(needs)):
        counts[max(range(len(needs)), key=lambda k: (needs[k] / counts[k], -k))] += 1
    return counts


def partition(
    models: Sequence[PartitionModel],
    subclusters: int,
    *,
    limits: PartitionLimits | None = None,
    current: Mapping[str, int] | None = None,
    time_limit_s: float = math.inf,
) -> Partition:
    """Return the best partition found, the same every time unless a time limit ends the search.

    Args:
        models: at least one, with positive need and rate.
        subclusters: their number, at most that of models.
        limits: on each sub-cluster and on the change.
        current: present sub-clusters of served models, by number.
        time_limit_s: for the solver, beside the limit on its work; 0: no solver.

    Raises:
        InvalidInputError: no partition keeps the limits.
    """
    limits, names = limits or PartitionLimits(), {model.name for model in models}
    current = {name: k for name, k in (current or {}).items() if name in names}
    case = _Case(models, subclusters, limits, current)
    starts = [start for start in (case.kept(), case.longest_first()) if start is not None]
    improved = [case.improved(start) for start in starts]
    best = min(improved, key=case.objective, default=None)
    bound, proven = case.bound, False
    if best is not None:
        best = case.renamed(best)
    is_good = best is not None and case.objective(best) <= case.bound + GOOD_ENOUGH
    is_small = best is None or len(models) * subclusters <= MOST_CHOICES
    if not is_good and is_small and time_limit_s > 0:
        solved, bound, proven = case.solved(time_limit_s)
        if solved is not None and case.allows(solved):
            solved = case.renamed(solved)
            if best is None or case.objective(solved) < case.objective(best) - 1e-9:
                best = solved
    if best is None:
        if proven:
            cure = "Use more sub-clusters, GPUs with more memory, or a higher limit on rate, models or change."
            raise refused("--subclusters", subclusters, "no partition keeps the limits", cure)
        cure = "Use more sub-clusters or wider limits, or give more time where --time-limit-s was given."
        raise refused("--subclusters", subclusters, "no partition that keeps the limits was found", cure)
    objective = case.objective(best)
    return Partition(
        assignment={model.name: int(k) for model, k in zip(models, best, strict=True)},
        subclusters=subclusters,
        objective=objective,
        lower_bound=min(bound, objective),
        moved=tuple(models[i].name for i in case.moved(best)),
        changed_mib=case.changed_mib(best),
        proven=bool(proven or objective <= case.bound + 1e-9),
        models=tuple(models),
    )


def fits_some(models: Sequence[PartitionModel], subclusters: int, limits: PartitionLimits) -> list[int | None]:
    """As `longest_first`, with None for models that fit nowhere."""
    placed = _Case(models, subclusters, limits, {}).filled([None] * len(models))
    return [None if k < 0 else int(k) for k in placed]


class _Case:
    """The numbers of one program. An assignment is the sub-cluster of every model, -1 for none yet."""

    def __init__(
        self, models: Sequence[PartitionModel], subclusters: int, limits: PartitionLimits, current: Mapping[str, int]
    ) -> None:
        self.count, self.limits = subclusters, limits
        rates = np.array([model.rate_rps for model in models])
        static = np.array([model.static_mib for model in models])
        self._static, self._dynamic = static, np.array([model.dynamic_mib for model in models])
        self._mean_rate, self._mean_static = rates.sum() / subclusters, static.sum() / subclusters
        self._rate = rates / self._mean_rate  # in average sub-clusters
        self._memory = static / self._mean_static if self._mean_static else static
        self._weight = limits.memory_weight if self._mean_static else 0.0
        self._most_rate = math.inf if limits.max_rate_rps is None else limits.max_rate_rps / self._mean_rate
        self._most_memory = math.inf if limits.memory_mib is None else limits.memory_mib
        self._most_models = math.inf if limits.max_models is None else limits.max_models
        self._home = np.array([current.get(model.name, -1) for model in models], dtype=np.int64)
        # The largest model cannot be divided: its excess over the mean is imbalance in any partition.
        self.bound = max(0.0, self._rate.max() - 1.0) + self._weight * max(0.0, self._memory.max() - 1.0)

    # --- judging ------------------------------------------------------------------------------------------------

    def loads(self, assignment: Assignment) -> tuple[Floats, Floats]:
        """Return rate and static memory of every sub-cluster in averages."""
        placed = assignment >= 0
        where = assignment[placed]
        return self._sums(where, self._rate[placed]), self._sums(where, self._memory[placed])

    def _sums(self, where: Assignment, values: Floats) -> Floats:
        """Return the sum of the values in every sub-cluster, as floats: numpy's own sums of nothing are integers, which
        would drop fractions added later."""
        return np.bincount(where, values, self.count).astype(np.float64)

    def objective(self, assignment: Assignment) -> float:
        rate, memory = self.loads(assignment)
        return float(np.abs(rate - 1.0).max() + self._weight * (np.abs(memory - 1.0).max() if self._weight else 0.0))

    def moved(self, assignment: Assignment) -> list[int]:
        return np.flatnonzero((self._home >= 0) & (self._home != assignment)).tolist()

    def changed_mib(self, assignment: Assignment) -> float:
        """Return the memory loaded and unloaded: a moved model counts twice, a new one once."""
        if not (self._home >= 0).any():
            return 0.0
        new = float(self._static[self._home < 0].sum())
        return new + 2.0 * float(self._static[self.moved(assignment)].sum())

    def allows(self, assignment: Assignment) -> bool:
        """Say whether the limits hold; empty sub-clusters are not allowed."""
        rate, _ = self.loads(assignment)
        counts = np.bincount(assignment, minlength=self.count)
        change = self.limits.max_change_mib
        return bool(
            counts.min() > 0
            and counts.max() <= self._most_models
            and rate.max() <= self._most_rate * (1 + 1e-9)
            and self._held(assignment).max() <= self._most_memory * (1 + 1e-9)
            and (change is None or self.changed_mib(assignment) <= change * (1 + 1e-9) + 1e-9)
        )

    def _held(self, assignment: Assignment) -> Floats:
        """Return static memory and the largest dynamic part of every sub-cluster in MiB."""
        static = self._sums(assignment, self._static)
        largest = np.zeros(self.count)
        np.maximum.at(largest, assignment, self._dynamic)
        return static + largest

    # --- starts and improvements ----------------------------------------------------------------------------------

    def kept(self) -> Assignment | None:
        """Return the present partition with new models added; None without one, or when it breaks a limit."""
        if not (self._home >= 0).any():
            return None
        return self._whole(self.filled(list(self._home)))

    def longest_first(self) -> Assignment | None:
        """Return a partition made in one pass, or None when a model fits nowhere."""
        return self._whole(self.filled([None] * len(self._rate)))

    def _whole(self, assignment: Assignment) -> Assignment | None:
        return assignment if (assignment >= 0).all() and self.allows(assignment) else None

    def filled(self, start: Sequence[int | None]) -> Assignment:
        """Give every model without a sub-cluster one, the largest first; -1 when it fits nowhere."""
        assignment = np.array([-1 if k is None or k < 0 else k for k in start], dtype=np.int64)
        placed = assignment >= 0
        where = assignment[placed]
        rate, memory = self.loads(assignment)
        static = self._sums(where, self._static[placed])
        dynamic = np.zeros(self.count)
        np.maximum.at(dynamic, where, self._dynamic[placed])
        models = np.bincount(where, minlength=self.count)
        size = np.maximum(self._rate, self._weight * self._memory)
        left = [i for i in np.argsort(-size, kind="stable").tolist() if assignment[i] < 0]
        for position, i in enumerate(left):
            new_rate, new_memory = rate + self._rate[i], memory + self._memory[i]
            held = static + self._static[i] + np.maximum(dynamic, self._dynamic[i])
            fits = (
                (new_rate <= self._most_rate * (1 + 1e-9))
                & (held <= self._most_memory * (1 + 1e-9))
                & (models < self._most_models)
            )
            if (models == 0).sum() >= len(left) - position:
                fits &= models == 0  # the rest must fill the empty sub-clusters
            if not fits.any():
                continue
            fullest = np.where(fits, np.maximum(new_rate, self._weight * new_memory), np.inf)
            k = int(fullest.argmin())
            assignment[i] = k
            rate[k], memory[k], static[k] = new_rate[k], new_memory[k], static[k] + self._static[i]
            dynamic[k], models[k] = max(dynamic[k], self._dynamic[i]), models[k] + 1
        return assignment

    def improved(self, start: Assignment) -> Assignment:
        """Move and swap models while the sum of squared deviations from the mean falls, then while the objective
        does."""
        best = start.copy()
        for reduce in (np.add, np.maximum):
            for _ in range(4 * len(best)):  # limit: steps of the search
                step = self._step(best, reduce)
                if step is None:
                    break
                best = step
        return best

    def _potential(self, rate: Floats, memory: Floats, reduce: np.ufunc) -> float:
        """Return what an improvement lowers: the sum of squared deviations (add), or the largest ones (maximum)."""
        rates, memories = self._deviations(rate, memory, reduce)
        return float(reduce.reduce(rates) + reduce.reduce(memories))

    def _deviations(self, rate: Floats, memory: Floats, reduce: np.ufunc) -> tuple[Floats, Floats]:
        if reduce is np.add:
            return np.square(rate - 1.0), self._weight**2 * np.square(memory - 1.0)
        return np.abs(rate - 1.0), self._weight * np.abs(memory - 1.0)

    def _step(self, assignment: Assignment, reduce: np.ufunc) -> Assignment | None:
        """Return the assignment after the best move or swap with a sub-cluster furthest from the mean; None when no
        allowed one helps."""
        rate, memory = self.loads(assignment)
        now = self._potential(rate, memory, reduce)
        furthest = {int(rate.argmax()), int(rate.argmin())}
        if self._weight:
            furthest |= {int(memory.argmax()), int(memory.argmin())}
        for k in sorted(furthest, key=lambda k: -abs(rate[k] - 1.0) - self._weight * abs(memory[k] - 1.0)):
            inside, outside = np.flatnonzero(assignment == k), np.flatnonzero(assignment != k)
            if not len(inside) or not len(outside):
                continue
            # Exchange one of k's models or none (index -1) for another model or none.
            mine, others = np.append(inside, -1), np.append(outside, -1)
            out_rate, in_rate = np.append(self._rate[inside], 0.0), np.append(self._rate[outside], 0.0)
            out_memory, in_memory = np.append(self._memory[inside], 0.0), np.append(self._memory[outside], 0.0)
            gain_rate, gain_memory = in_rate[None, :] - out_rate[:, None], in_memory[None, :] - out_memory[:, None]
            home = np.append(assignment[outside], self._emptiest(rate, memory, k))  # where a plain move goes
            after = self._after(k, home, rate, memory, gain_rate, gain_memory, reduce)
            after[-1, -1] = np.inf
            order = np.argsort(after, axis=None)[:64]
            for place in order.tolist():
                if after.flat[place] >= now - 1e-12:
                    break
                i, o = divmod(place, after.shape[1])
                other = assignment.copy()
                if others[o] >= 0:
                    other[others[o]] = k
                if mine[i] >= 0:
                    other[mine[i]] = home[o]
                if self.allows(other):
                    return other
        return None

    def _emptiest(self, rate: Floats, memory: Floats, without: int) -> int:
        fullness = np.maximum(rate, self._weight * memory)
        fullness[without] = np.inf
        return int(fullness.argmin())

    def _after(
        self,
        k: int,
        home: Assignment,
        rate: Floats,
        memory: Floats,
        gain_rate: Floats,
        gain_memory: Floats,
        reduce: np.ufunc,
    ) -> Floats:
        """Return the potential after each exchange: rows are models that leave k, columns models that come from the
        sub-clusters `home`. Only two sub-clusters change, so the others are summed once."""
        potential = np.zeros(gain_rate.shape)
        before = self._deviations(rate, memory, reduce)
        at_k = self._deviations(rate[k] + gain_rate, memory[k] + gain_memory, reduce)
        at_home = self._deviations(rate[home] - gain_rate, memory[home] - gain_memory, reduce)
        for all_before, new_k, new_home in zip(before, at_k, at_home, strict=True):
            if reduce is np.add:
                rest = all_before.sum() - all_before[k] - all_before
            else:
                others = np.delete(all_before, k)
                first, second = np.sort(np.append(others, [0.0, 0.0]))[::-1][:2]
                rest = np.where(all_before == first, second, first)
            potential += reduce(reduce(rest[home], new_k), new_home)
        return potential

    def renamed(self, assignment: Assignment) -> Assignment:
        """Return the same partition, named so that least moves: sub-clusters are interchangeable."""
        from scipy.optimize import linear_sum_assignment

        known = self._home >= 0
        if not known.any():
            return assignment
        stays = np.zeros((self.count, self.count))
        np.add.at(stays, (assignment[known], self._home[known]), self._static[known] + 1.0)
        rows, names = linear_sum_assignment(-stays)
        other = names[np.argsort(rows)][assignment]
        return other if self.changed_mib(other) <= self.changed_mib(assignment) else assignment

    # --- the integer program --------------------------------------------------------------------------------------

    def solved(self, time_limit_s: float) -> tuple[Assignment | None, float, bool]:
        """Return the solver's assignment (None if it found none), a lower bound of the objective, and whether it
        finished."""
        models, count = len(self._rate), self.count
        x = np.arange(models * count).reshape(models, count)
        d_rate, d_memory = models * count, models * count + 1
        dynamic = models * count + 2 + np.arange(count)
        rows = Rows()
        for i in range(models):
            rows.add(x[i], np.ones(count), 1.0, least=1.0)
        for k in range(count):
            for values, slack, used in ((self._rate, d_rate, True), (self._memory, d_memory, self._weight > 0)):
                if used:
                    rows.add([*x[:, k], slack], [*values, -1.0], 1.0)
                    rows.add([*x[:, k], slack], [*values, 1.0], np.inf, least=1.0)
            rows.add(x[:, k], np.ones(models), min(self._most_models, models), least=1.0)
            if self._most_rate < math.inf:
                rows.add(x[:, k], self._rate, self._most_rate)
            if self._most_memory < math.inf:
                share = self._static / self._most_memory
                rows.add([*x[:, k], dynamic[k]], [*share, 1.0], 1.0)
                for i in np.flatnonzero(self._dynamic).tolist():
                    rows.add([dynamic[k], x[i, k]], [1.0, -self._dynamic[i] / self._most_memory], np.inf, least=0.0)
        homed = np.flatnonzero(self._home >= 0)
        if self.limits.max_change_mib is not None and len(homed):
            cost = 2.0 * self._static[homed]
            most = self.limits.max_change_mib - float(self._static[self._home < 0].sum())
            rows.add(x[homed, self._home[homed]], -cost, most - float(cost.sum()))
        most_x = np.ones((models, count))
        if not len(homed):  # sub-clusters are interchangeable: model i may only open those up to i
            most_x[np.triu_indices(models, 1, count)] = 0.0
        size = models * count + 2 + count
        objective = np.zeros(size)
        objective[d_rate], objective[d_memory] = 1.0, self._weight
        upper = np.concatenate([most_x.ravel(), np.full(2 + count, np.inf)])
        whole = np.arange(size) < models * count
        solved = integer_program(objective, rows, np.zeros(size), upper, whole, time_limit_s=time_limit_s, gap=1e-6)
        if solved.x is None:
            return None, self.bound, solved.is_proven
        assignment = solved.x[: models * count].reshape(models, count).argmax(axis=1).astype(np.int64)
        return assignment, max(self.bound, solved.bound), solved.is_proven
