"""The MILP family: the highest total goodput that replicas fitting on the GPUs can give, as an integer program.

Source: P. Elvinger's thesis (ETH Zurich 2024, section 5.4.3): choose how many replicas of each model run with which
batch size on which GPU, such that on every GPU the compute requirements sum to at most 100 % and the memory
requirements too, and the sum over models of min(rate, throughput of its replicas) is largest. The thesis decides per
GPU; here GPUs of a type are counted per pattern (see `milp_patterns`), which has the same optimum without the symmetry.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from tenuto.errors import InvalidInputError, Problem
from tenuto.placement.cluster import Cluster, Gpu
from tenuto.placement.plan import Plan
from tenuto.placement.policies.milp.model import Master, Relaxation, Solution
from tenuto.placement.policies.milp.patterns import (
    Item,
    Pattern,
    TooManyPatternsError,
    enumerate_patterns,
    items_of,
    patterns_worth,
)
from tenuto.placement.policies.shared.gpu_pool import GpuPool
from tenuto.placement.policies.shared.profiled_plan import Hosted, profiled_plan
from tenuto.placement.policies.shared.requirements import MEMORY, Requirement, Requirements, requirements_of
from tenuto.placement.policy import Policy
from tenuto.placement.workload import ModelSpec, Workload
from tenuto.profiles import Profiles

__all__ = ["MilpPolicy"]

# Column generation: patterns added per round and GPU type, and rounds before the bound of the last round is taken.
COLUMNS_PER_ROUND = 20
MOST_ROUNDS = 200
# Part of the time left that goes to the goodput (or price); the rest is for keeping replicas away from neighbours.
FIRST_STAGE = 0.7


class MilpPolicy(Policy):
    """Base of the MILP policies; they differ in which metric is the compute requirement.

    Among plans of equal goodput, the one whose replicas are least exposed to neighbours is taken (sum over pairs on a
    GPU of the neighbour's batch latency as part of the SLO), then the one with the least load, so that no replica is
    idle by design. On an elastic cluster the cheapest GPUs that carry every rate are chosen; types without a price
    count one unit each. A gpu-let has no share, as in the thesis: gpu-lets on one GPU compete freely, and their latency
    is that of the whole GPU.

    Options:
        compute_metric, memory_metric: what must stay below 100 % of a GPU; a metric of the profile in percent, or
        `memory`.
        max_replicas: most replicas of one model; the thesis leaves its value open. At most one is on a GPU.
        one_batch_size: all replicas of a model use the same batch size, as in the thesis (its section 6.3 comes out
        only
            so); otherwise each its own, which never gives less goodput.
        time_limit_s: after this time the best plan so far is returned and its gap to the proven bound noted.
        pattern_limit: up to this many patterns are listed in full; above, columns are generated on demand.
        shares: limit each gpu-let to its compute requirement instead.
    """

    def __init__(
        self, *, compute_metric: str, memory_metric: str = MEMORY, max_replicas: int | None = None,
        one_batch_size: bool = True, time_limit_s: float = 10.0, pattern_limit: int = 4000, shares: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        problems = []
        if max_replicas is not None and max_replicas < 1:
            rule = "must be at least 1"
            problems.append(Problem("--option max_replicas", max_replicas, rule, "Leave it out, or give 2."))
        if time_limit_s <= 0:
            problems.append(Problem("--option time_limit_s", time_limit_s, "must be above 0", "Try 10."))
        if pattern_limit < 1:
            problems.append(Problem("--option pattern_limit", pattern_limit, "must be at least 1", "Try 4000."))
        if problems:
            raise InvalidInputError(problems)
        self.compute_metric, self.memory_metric, self.max_replicas = compute_metric, memory_metric, max_replicas
        self.one_batch_size, self.shares = one_batch_size, shares
        self.time_limit_s, self.pattern_limit = time_limit_s, pattern_limit
        self._clock = clock

    def place(self, workload: Workload, cluster: Cluster, profiles: Profiles) -> Plan:
        """Return the plan; raises `InvalidInputError` when a profile lacks the metrics."""
        needs = requirements_of(workload, cluster, profiles, self.compute_metric, self.memory_metric)
        unserved = {
            spec.name: "; ".join(req.why_not for req in needs[spec.name].values())
            for spec in workload.models
            if not any(req.within_slo for req in needs[spec.name].values())
        }
        models = [spec for spec in workload.models if spec.name not in unserved]
        notes: list[str] = []
        hosted: list[tuple[Gpu, list[Hosted]]] = []
        if models and cluster.gpus:
            chosen, note = self._choose(models, cluster, needs)
            hosted = _on_gpus(chosen, models, cluster)
            notes.append(note)
        served = {replica.model for _, replicas in hosted for replica in replicas}
        for spec in models:
            if spec.name not in served:
                unserved[spec.name] = "leaving it out lets the other models carry more requests on these GPUs"
        return profiled_plan(self.name, workload, cluster, hosted, unserved, notes, shares=self.shares)

    def _choose(
        self, models: Sequence[ModelSpec], cluster: Cluster, needs: Mapping[str, Mapping[str, Requirements]]
    ) -> tuple[list[tuple[Pattern, int]], str]:
        """Return the patterns used with their counts, and what is known about the optimum."""
        until = self._clock() + self.time_limit_s
        prices = _prices(cluster)
        counts: dict[str, int] = {}
        for gpu in cluster.gpus:
            counts[gpu.type] = counts.get(gpu.type, 0) + 1
        available = None if cluster.elastic else counts
        master = Master(models, available, prices, self.max_replicas, one_batch_size=self.one_batch_size)
        items = {kind: items_of(models, _usable(models, needs, kind)) for kind in prices}
        patterns, bound = self._patterns(master, items, until)
        first = self._first_stage(master, patterns, until)
        if first is None:
            return [], f"no plan found within {self.time_limit_s:g} s; raise time_limit_s"
        if not self._complete(items, patterns, bound, first):
            more = self._columns_in_gap(items, patterns, bound, first)
            if more:
                patterns = patterns + more
                again = self._first_stage(master, patterns, until)
                first = _better(master, first, again, len(patterns))
        second = master.solve(patterns, until - self._clock(), at_least=first.objective)
        final = second or first
        gap = abs(bound.objective - first.objective) / max(abs(first.objective), 1e-9)
        optimal = first.proven and (gap <= 1e-6 or self._complete(items, patterns, bound, first))
        note = "optimal" if optimal else f"within {100 * gap:.3g} % of the bound, optimality not proven"
        if second is None or not second.proven:
            note += "; neighbours were not fully optimised in the time given"
        return [(pattern, n) for pattern, n in zip(patterns, final.counts, strict=True) if n], note

    def _first_stage(self, master: Master, patterns: Sequence[Pattern], until: float) -> Solution | None:
        return master.solve(patterns, FIRST_STAGE * (until - self._clock()))

    def _patterns(
        self, master: Master, items: Mapping[str, Sequence[Sequence[Item]]], until: float
    ) -> tuple[list[Pattern], Relaxation]:
        """Return all patterns where they are few, else those that the linear relaxation asks for; and the
        relaxation."""
        try:
            patterns: list[Pattern] = []
            for kind, by_model in items.items():
                patterns += enumerate_patterns(kind, by_model, self.pattern_limit - len(patterns))
            return patterns, master.relax(patterns)
        except TooManyPatternsError:
            patterns = [Pattern(kind, (item,)) for kind, by_model in items.items() for g in by_model for item in g]
        if not master.buys and self.max_replicas is None:
            # Where the GPUs suffice on average, the relaxation puts no price on them and asks for no dense pattern;
            # the patterns that would need the fewest GPUs are those with which whole numbers fit.
            buyer = Master(master.models, None, master.prices, None)
            patterns, _ = self._generate(buyer, patterns, items, until)
        return self._generate(master, patterns, items, until)

    def _generate(
        self, master: Master, patterns: list[Pattern], items: Mapping[str, Sequence[Sequence[Item]]], until: float
    ) -> tuple[list[Pattern], Relaxation]:
        """Add patterns of positive reduced value until there are none, so that the relaxation covers all patterns."""
        known = {_key(pattern) for pattern in patterns}
        for _ in range(MOST_ROUNDS):
            relaxation = master.relax(patterns)
            new = []
            for kind, by_model in items.items():
                threshold = relaxation.gpu[kind] * (1 + 1e-7) + 1e-7
                found, _ = patterns_worth(kind, by_model, relaxation.worth, threshold, COLUMNS_PER_ROUND)
                new += [pattern for pattern in found if _key(pattern) not in known]
            if not new or self._clock() > until:
                break
            known |= {_key(pattern) for pattern in new}
            patterns = patterns + new
        return patterns, relaxation

    def _complete(
        self, items: Mapping[str, Sequence[Sequence[Item]]], patterns: Sequence[Pattern],
        bound: Relaxation, found: Solution,
    ) -> bool:
        """Say whether no pattern outside `patterns` can be part of a better plan than `found`."""
        slack = abs(bound.objective - found.objective)
        if slack <= 1e-6 * max(abs(bound.objective), 1.0):
            return True
        known = {_key(pattern) for pattern in patterns}
        for kind, by_model in items.items():
            useful, all_listed = patterns_worth(
                kind, by_model, bound.worth, bound.gpu[kind] - slack, self.pattern_limit
            )
            if not all_listed or any(_key(pattern) not in known for pattern in useful):
                return False
        return True

    def _columns_in_gap(
        self, items: Mapping[str, Sequence[Sequence[Item]]], patterns: Sequence[Pattern],
        bound: Relaxation, found: Solution,
    ) -> list[Pattern]:
        """Return patterns which a better plan might use: those whose reduced cost is below the gap."""
        known = {_key(pattern) for pattern in patterns}
        slack = abs(bound.objective - found.objective)
        more: list[Pattern] = []
        for kind, by_model in items.items():
            useful, _ = patterns_worth(kind, by_model, bound.worth, bound.gpu[kind] - slack, self.pattern_limit)
            more += [pattern for pattern in useful if _key(pattern) not in known]
        return more


def _key(pattern: Pattern) -> tuple[str, tuple[tuple[int, int], ...]]:
    return pattern.gpu_type, tuple((item.model, item.need.batch_size) for item in pattern.items)


def _better(master: Master, one: Solution, other: Solution | None, columns: int) -> Solution:
    """Return the better of two solutions over growing pattern lists, with counts for all `columns`."""
    padded = Solution(one.counts + (0,) * (columns - len(one.counts)), one.objective, False)
    if other is None:
        return padded
    improved = other.objective < one.objective if master.buys else other.objective > one.objective
    return other if improved or other.proven else padded


def _usable(
    models: Sequence[ModelSpec], needs: Mapping[str, Mapping[str, Requirements]], kind: str
) -> dict[str, Sequence[Requirement]]:
    return {m.name: needs[m.name][kind].within_slo if kind in needs[m.name] else () for m in models}


def _prices(cluster: Cluster) -> dict[str, float]:
    """Return the price per GPU type, in file order; one unit each where any is unknown."""
    prices = {gpu.type: gpu.price_per_hour for gpu in cluster.gpus}
    known = {kind: price for kind, price in prices.items() if price is not None}
    return known if len(known) == len(prices) else dict.fromkeys(prices, 1.0)


def _on_gpus(
    chosen: Sequence[tuple[Pattern, int]], models: Sequence[ModelSpec], cluster: Cluster
) -> list[tuple[Gpu, list[Hosted]]]:
    """Give patterns to GPUs: in the order of the workload's models, so that equal decisions give equal plans."""
    pool = GpuPool(cluster)
    hosted = []
    ordered = sorted(chosen, key=lambda pair: [(item.model, item.need.batch_size) for item in pair[0].items])
    for pattern, count in ordered:
        for _ in range(count):
            gpu = pool.take(pattern.gpu_type)
            if gpu is not None:
                hosted.append((gpu, [Hosted(models[item.model].name, item.need) for item in pattern.items]))
    order = {gpu.id: index for index, gpu in enumerate(cluster.gpus)}
    hosted.sort(key=lambda pair: order.get(pair[0].id, len(order)))
    return hosted
