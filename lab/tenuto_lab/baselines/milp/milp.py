"""The MILP family: the highest total goodput that replicas fitting on the GPUs can give, as an integer program.

Source: P. Elvinger's thesis (ETH Zurich 2024, section 5.4.3): choose how many replicas of each model run with which
batch size on which GPU, such that on every GPU the compute requirements sum to at most 100 % and the memory
requirements too, and the sum over models of min(rate, throughput of its replicas) is largest. The thesis decides per
GPU; here GPUs of a type are counted per pattern (see `patterns`), which has the same optimum without the symmetry.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter

from tenuto.options import option
from tenuto.placement.cluster import Cluster, Gpu
from tenuto.placement.plan import Plan
from tenuto.placement.policies.shared.gpu_pool import GpuPool
from tenuto.placement.policies.shared.hosting import hosting_plan
from tenuto.placement.policy import Abilities, Policy
from tenuto.placement.workload import ModelSpec, Workload
from tenuto.profiles import Profiles
from tenuto_lab.baselines.milp.greedy import greedy_patterns
from tenuto_lab.baselines.milp.patterns import (
    Item,
    Pattern,
    TooManyPatternsError,
    enumerate_patterns,
    items_of,
    patterns_worth,
)
from tenuto_lab.baselines.milp.placement_program import PlacementProgram, Relaxation, Solution
from tenuto_lab.baselines.requirements import (
    MEMORY,
    Requirement,
    Requirements,
    context_pct_of,
    hosted_requirements,
    requirements_of,
)

COLUMNS_PER_ROUND = 20  # fitted: column generation; patterns added per round and GPU type
MOST_ROUNDS = 200  # limit: rounds before the last one's bound is taken
# Fitted: parts of the time limit until the columns are made and the goodput (or price) is found. The rest keeps
# replicas away from neighbours; building the programs also takes time, so the parts stay below 1.
COLUMNS_UNTIL, GOODPUT_UNTIL, ALL_UNTIL = 0.35, 0.75, 0.95


@dataclass(kw_only=True, eq=False)
class MilpPolicy(Policy):
    """Base of the MILP policies; they differ in which metric is the compute requirement.

    Among plans of equal goodput, the one with replicas least exposed to neighbours wins (sum over pairs on a GPU of the
    neighbour's batch latency as part of the SLO), then the one with the least load, so that no replica is idle by
    design. On an elastic cluster the policy chooses the cheapest GPUs that carry every rate; types without a price
    count one unit each. A gpu-let has no share, as in the thesis: gpu-lets on one GPU compete freely, and the policy
    believes the latency of the whole GPU. Beside the memory requirement, each replica's memory and its process's CUDA
    context have to fit.

    The solver's work is bounded, not its time, so a plan is the same every time. When the work is used up, the best
    plan so far (a greedy one at least) is returned, and a note says how far it may be from the optimum.

    Options:
        compute_metric, memory_metric: what must stay below 100 % of a GPU; a metric of the profile in percent, or
            `memory`.
        max_replicas: most replicas of one model; the thesis leaves its value open. At most one is on a GPU.
        one_batch_size: all replicas of a model use the same batch size, as in the thesis (its section 6.3 comes out
            only so); otherwise each its own, which never gives less goodput.
        time_limit_s: after this time, too, the best plan so far is returned; two runs may then differ.
        pattern_limit: up to this many patterns are listed in full; above, columns are generated on demand.
        shares: limit each gpu-let to its compute requirement instead.
    """

    abilities = Abilities(objectives=("weighted",), plans_at_once=False)
    compute_metric: str = "achieved_occupancy_pct"
    memory_metric: str = MEMORY
    max_replicas: int | None = option(None, minimum=1)
    one_batch_size: bool = True
    time_limit_s: float | None = option(None, above=0)
    pattern_limit: int = option(4000, minimum=1)
    shares: bool = False

    def place(self, workload: Workload, cluster: Cluster, profiles: Profiles) -> Plan:
        """Return the plan; raises `InvalidInputError` when a profile lacks the metrics."""
        watch = _Watch(self.time_limit_s)
        needs = requirements_of(workload, cluster, profiles, self.compute_metric, self.memory_metric)
        context_pct = context_pct_of(cluster, profiles)
        usable = {kind: _usable(needs, kind, context_pct[kind]) for kind in cluster.gpu_types}
        models = [spec for spec in workload.models if any(by_model[spec.name] for by_model in usable.values())]
        reasons = {spec.name: "no GPU time left: the others carry more requests on these GPUs" for spec in models}
        for spec in workload.models:
            if spec.name not in reasons:
                why = [req.why_not for req in needs[spec.name].values() if req.why_not]
                reasons[spec.name] = why[0] if why else "memory: no replica and its process's context fit a GPU"
        notes: list[str] = []
        chosen: list[tuple[Pattern, int]] = []
        if models:
            available = None if cluster.elastic else cluster.counts
            program = PlacementProgram(
                models, available, cluster.prices, self.max_replicas, one_batch_size=self.one_batch_size
            )
            items = items_of(models, usable, context_pct, one_batch_size=self.one_batch_size)
            chosen, note = _Solving(program, items, self.pattern_limit, watch).run()
            notes.append(note)
        placed = _on_gpus(chosen, models, cluster)
        hosted = hosted_requirements(workload, placed, shares=self.shares)
        competes = not self.shares and any(len(replicas) > 1 for _, replicas in placed)
        if competes:
            notes.append("over-commits shares on purpose: gpu-lets of one GPU are not limited and compete freely")
        return hosting_plan(self.name, workload, cluster, hosted, reasons, notes, overcommits=competes)


class _Watch:
    """How much of the time limit is left, if there is one."""

    def __init__(self, limit_s: float | None) -> None:
        self._limit_s, self._began = math.inf if limit_s is None else limit_s, time.monotonic()

    def left_s(self, until: float) -> float:
        """Return the seconds until this part of the limit is used up; negative afterwards."""
        return self._began + until * self._limit_s - time.monotonic()


class _Solving:
    """One run: the columns, then the goodput (or price), then the neighbours, each within its part of the time."""

    def __init__(
        self,
        program: PlacementProgram,
        items: Mapping[str, Sequence[Sequence[Item]]],
        pattern_limit: int,
        watch: _Watch,
    ) -> None:
        self._program, self._items, self._limit, self._watch = program, items, pattern_limit, watch

    def run(self) -> tuple[list[tuple[Pattern, int]], str]:
        """Return the patterns used with their counts, and what is known about the optimum."""
        program, watch = self._program, self._watch
        patterns, bound = self._patterns()
        patterns, best = self._rounded(patterns, bound)
        best = self._better(best, patterns)
        if bound is not None and bound.is_bound and not self._is_complete(patterns, bound, best):
            more = self._columns_in_gap(patterns, bound, best)
            if more and watch.left_s(GOODPUT_UNTIL) > 0:
                patterns = patterns + more
                best = self._better(best, patterns)
        left_s = watch.left_s(ALL_UNTIL)
        second = program.solve(patterns, best.counts, time_limit_s=left_s, at_least=best.objective)
        final = second or best
        chosen = [(pattern, n) for pattern, n in zip(patterns, final.counts, strict=True) if n]
        if bound is None or not bound.is_bound:
            return chosen, "the best plan found; its distance from the optimum is not known"
        gap = abs(bound.objective - best.objective) / max(abs(best.objective), 1e-9)
        optimal = best.proven and (gap <= 1e-6 or self._is_complete(patterns, bound, best))
        note = "optimal" if optimal else f"within {100 * gap:.3g} % of the bound, optimality not proven"
        if second is None or not second.proven:
            note += "; neighbours were not fully optimised"
        return chosen, note

    def _rounded(self, patterns: Sequence[Pattern], bound: Relaxation | None) -> tuple[list[Pattern], Solution]:
        """Return the better of a greedy plan and of the relaxation rounded down and filled up, with its patterns."""
        starts: list[Sequence[tuple[Pattern, int]]] = [()]
        if bound is not None and not self._program.one_batch_size:
            starts.append([(p, int(n + 1e-9)) for p, n in zip(patterns, bound.counts, strict=True) if n >= 1])
        plans = [greedy_patterns(self._program, self._items, start) for start in starts]
        every = {pattern.key: pattern for pattern in patterns}
        for filled in plans:
            every |= {pattern.key: pattern for pattern, _ in filled}
        all_patterns = list(every.values())
        solutions = []
        for filled in plans:
            count = {pattern.key: n for pattern, n in filled}
            counts = tuple(count.get(pattern.key, 0) for pattern in all_patterns)
            solutions.append(Solution(counts, self._program.objective(all_patterns, counts), False))
        best = min if self._program.buys else max
        return all_patterns, best(solutions, key=attrgetter("objective"))

    def _better(self, known: Solution, patterns: Sequence[Pattern]) -> Solution:
        """Return the better of a known solution over the first patterns and the solver's over all of them."""
        left_s = self._watch.left_s(GOODPUT_UNTIL)
        other = self._program.solve(patterns, known.counts, time_limit_s=left_s)
        padded = Solution(known.counts + (0,) * (len(patterns) - len(known.counts)), known.objective, False)
        if other is None:
            return padded
        tolerance = 1e-9 * max(1.0, abs(known.objective))
        if self._program.buys:
            return padded if known.objective < other.objective - tolerance else other
        return padded if known.objective > other.objective + tolerance else other

    def _patterns(self) -> tuple[list[Pattern], Relaxation | None]:
        """Return all patterns when they are few, else those that the linear relaxation asks for; and the relaxation,
        None when there was no time for it."""
        try:
            patterns: list[Pattern] = []
            for kind, by_model in self._items.items():
                patterns += enumerate_patterns(kind, by_model, self._limit - len(patterns))
            return patterns, self._program.relax(patterns)
        except TooManyPatternsError:
            patterns = [Pattern(kind, (item,)) for kind, groups in self._items.items() for g in groups for item in g]
        if not self._program.buys and self._program.max_replicas is None:
            # When the GPUs suffice on average, the relaxation sets no price on them and asks for no dense pattern.
            # Whole numbers fit with the patterns that need the fewest GPUs.
            buyer = PlacementProgram(self._program.models, None, self._program.prices, None)
            patterns, _ = self._generate(buyer, patterns, COLUMNS_UNTIL / 2)
        return self._generate(self._program, patterns, COLUMNS_UNTIL)

    def _generate(
        self, program: PlacementProgram, patterns: list[Pattern], until: float
    ) -> tuple[list[Pattern], Relaxation | None]:
        """Add patterns of positive reduced value until none is left, so that the relaxation covers all patterns."""
        known = {pattern.key for pattern in patterns}
        relaxation: Relaxation | None = None
        for _ in range(MOST_ROUNDS):
            if self._watch.left_s(until) <= 0:
                break
            relaxation = program.relax(patterns)
            if relaxation is None:
                break
            new = []
            for kind, by_model in self._items.items():
                threshold = relaxation.gpu[kind] * (1 + 1e-7) + 1e-7  # derived: rounding of the solver
                worthy, _ = patterns_worth(kind, by_model, relaxation.worth, threshold, COLUMNS_PER_ROUND)
                new += [pattern for pattern in worthy if pattern.key not in known]
            if not new:
                return patterns, relaxation
            known |= {pattern.key for pattern in new}
            patterns = patterns + new
        if relaxation is not None:  # it lacks the patterns of the last round
            padding = (0.0,) * (len(patterns) - len(relaxation.counts))
            relaxation = replace(relaxation, counts=relaxation.counts + padding, is_bound=False)
        return patterns, relaxation

    def _is_complete(self, patterns: Sequence[Pattern], bound: Relaxation, solution: Solution) -> bool:
        """Return whether `solution` cannot be beaten by any plan with a pattern outside `patterns`."""
        slack = abs(bound.objective - solution.objective)
        if slack <= 1e-6 * max(abs(bound.objective), 1.0):
            return True
        known = {pattern.key for pattern in patterns}
        for kind, by_model in self._items.items():
            useful, all_listed = patterns_worth(kind, by_model, bound.worth, bound.gpu[kind] - slack, self._limit)
            if not all_listed or any(pattern.key not in known for pattern in useful):
                return False
        return True

    def _columns_in_gap(self, patterns: Sequence[Pattern], bound: Relaxation, solution: Solution) -> list[Pattern]:
        """Return patterns that a better plan might use: their reduced cost is below the gap."""
        known = {pattern.key for pattern in patterns}
        slack = abs(bound.objective - solution.objective)
        more: list[Pattern] = []
        for kind, by_model in self._items.items():
            useful, _ = patterns_worth(kind, by_model, bound.worth, bound.gpu[kind] - slack, self._limit)
            more += [pattern for pattern in useful if pattern.key not in known]
        return more


def _usable(
    needs: Mapping[str, Mapping[str, Requirements]], kind: str, context_pct: float
) -> dict[str, Sequence[Requirement]]:
    """Return every model's batches that fit a GPU type with their process's context."""
    none = Requirements((), (), "")
    return {
        name: [r for r in by_type.get(kind, none).within_slo if r.held_pct(context_pct) <= 100.0]
        for name, by_type in needs.items()
    }


def _on_gpus(
    chosen: Sequence[tuple[Pattern, int]], models: Sequence[ModelSpec], cluster: Cluster
) -> list[tuple[Gpu, list[tuple[str, Requirement]]]]:
    """Give patterns to GPUs, in the order of the workload's models: equal decisions then give equal plans."""
    pool = GpuPool(cluster)
    placed = []
    for pattern, count in sorted(chosen, key=lambda pair: [(i.model, i.need.batch_size) for i in pair[0].items]):
        for _ in range(count):
            gpu = pool.next_gpu(pattern.gpu_type)
            if gpu is not None:
                placed.append((gpu, [(models[item.model].name, item.need) for item in pattern.items]))
    return placed


class AoMilp(MilpPolicy):
    """Creq = achieved occupancy, the largest over sets of overlapping kernels: few models share a GPU.

    Invariant and options are those of `MilpPolicy`.
    """

    name = "ao-milp"
    summary = "highest goodput by integer programming; compute need = achieved occupancy"
    source = "Elvinger's thesis (ETH 2024), section 5.4.3 and chapter 6"
    readings = (
        "of equally good plans the least exposed to neighbours (the thesis leaves it to the solver); replicas are "
        "not limited"
    )


@dataclass(kw_only=True, eq=False)
class WsmMilp(MilpPolicy):
    """Creq = time-weighted SM utilisation: models whose kernels leave SMs idle share a GPU.

    Invariant and options are those of `MilpPolicy`.
    """

    name = "wsm-milp"
    summary = "highest goodput by integer programming; compute need = weighted SM utilisation"
    source = "Elvinger's thesis (ETH 2024), section 5.4.3 and chapter 6"
    readings = "as ao-milp"
    compute_metric: str = "wavg_sm_util_pct"
