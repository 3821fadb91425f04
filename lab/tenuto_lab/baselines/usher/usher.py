"""USHER: group models with complementary needs, then choose batch sizes, replicas and GPUs group by group.

Source: Shubha, Shen, Iyer, "USHER: Holistic Interference Avoidance for Resource Optimized ML Inference", OSDI 2024,
section 3.3, with the readings of P. Elvinger's thesis (ETH Zurich 2024, section 5.4) as options. The paper's third
component, merging operators of models on one GPU, follows the placement for every policy (`tenuto.placement.merging`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tenuto.errors import Problem, raise_if_any
from tenuto.options import option
from tenuto.placement.cluster import Cluster, Gpu
from tenuto.placement.plan import Plan
from tenuto.placement.policies.shared.gpu_pool import GpuPool
from tenuto.placement.policies.shared.hosting import hosting_plan
from tenuto.placement.policy import Abilities, Policy
from tenuto.placement.workload import ModelSpec, Workload
from tenuto.profiles import Profiles
from tenuto.profiles.share_latency import WHOLE_GPU_PCT
from tenuto_lab.baselines.requirements import (
    MEMORY,
    Requirement,
    Requirements,
    context_pct_of,
    hosted_requirements,
    requirements_of,
)
from tenuto_lab.baselines.usher.grouping import TIES, group_models
from tenuto_lab.baselines.usher.search import Choice, Config, GpuStates, Need, Readings, Search, State, Taken

MULTIPLIERS = 6  # paper: §3.3; replica counts are i * c_min with i in 1..6
MOST_IN_A_GROUP = 6  # limit: models of an explicit group; the search is exponential in it
NODES_OF_A_PLAN = 400_000  # limit: placements tried for all groups before the best so far is taken


@dataclass(kw_only=True, eq=False)
class Usher(Policy):
    """Packs replicas so that compute and memory of a GPU fill up evenly and never exceed 100 %.

    Per model, c = ceil(rate / throughput of the largest batch within the SLO) on the type where that is highest;
    replica counts are c to 6 c, at most the number of GPUs (see `oversized`). At most one replica of a model is on a
    GPU. On a fixed cluster each group gets the configuration with the highest goodput, on an elastic one the cheapest
    of those that carry most. Each gpu-let's share is its compute requirement. The policy believes the latencies
    measured on the whole GPU: avoiding contention is what the packing is for. Beside Mreq, the memory of each replica
    with the CUDA context of its process has to fit, which the paper does not count.

    Options:
        compute_metric, memory_metric: what Creq and Mreq are; a metric of the profile in percent, or `memory`.
        heavy_ratio: from which Creq/Mreq (or Mreq/Creq) a model counts as compute-heavy (memory-heavy).
        max_group_size: models per group: 1, 2 or 4.
        groups: explicit groups in order, `a+b+c,d+e`, instead of matching.
        shares: limit gpu-lets to their compute requirement; without it they compete freely (thesis, appendix A.2.1).
        Readings of what the paper leaves open: neutral (`falling`: neutral models, and heavy ones without a partner,
        come where Rreq keeps falling; `last`: after the others, as the thesis reads), pairs (`single`: the models of a
        pair are placed one after the other; `together`: on the same GPUs), group_order (`largest` requirement first, or
        `workload`), grouping_ties (`exact`: as in the thesis' examples of section 5.4; `float`: as its groups of
        section 6.2.1 come out, with memory_metric=mem_cap_pct), waiting (`none`: a replica carries full batches without
        a pause; `batch`: each waits for one of its own), oversized (`leave`: a model whose c exceeds the GPUs is not
        served, as in the thesis; `cap`: it gets as many as there are).
        Ablations, each an ingredient left out: classify=false (the paper's CM), replication=false (WD, c replicas
        only), sort=false (S); M is a workload with `merge: off`. And of the thesis: grouping=false (every model alone,
        largest first), batch_choice=false (largest batch within the SLO only).
    """

    name = "usher"
    summary = "groups models with complementary compute and memory needs, then packs replicas group by group"
    source = "USHER (OSDI 2024), Algorithms 1 and 2; Creq = achieved occupancy as in Elvinger's thesis (ETH 2024)"
    readings = (
        "options for what is left open: pairs, neutral models, order of groups, ties, waiting; ours: contexts "
        "count as memory"
    )
    abilities = Abilities(objectives=("weighted",), is_interruptible=True, most_models=500, plans_at_once=False)

    compute_metric: str = "achieved_occupancy_pct"
    memory_metric: str = MEMORY
    heavy_ratio: float = option(1.2, minimum=1)
    max_group_size: int = option(4, choices=(1, 2, 4))
    groups: str = ""
    shares: bool = True
    neutral: str = option("falling", choices=("falling", "last"))
    pairs: str = option("single", choices=("single", "together"))
    group_order: str = option("largest", choices=("largest", "workload"))
    grouping_ties: str = option("exact", choices=TIES)
    waiting: str = option("none", choices=("none", "batch"))
    oversized: str = option("leave", choices=("leave", "cap"))
    classify: bool = True
    sort: bool = True
    grouping: bool = True
    replication: bool = True
    batch_choice: bool = True

    def place(self, workload: Workload, cluster: Cluster, profiles: Profiles) -> Plan:
        """Return the plan.

        Raises:
            InvalidInputError: a profile lacks the metrics, or the `groups` option does not name every model once.
        """
        needs = requirements_of(workload, cluster, profiles, self.compute_metric, self.memory_metric)
        kinds = cluster.gpu_types
        context_pct = context_pct_of(cluster, profiles)
        reasons: dict[str, str] = {}
        choices: dict[str, Choice] = {}
        for spec in workload.models:
            configs, reason = self._configs(spec, needs[spec.name], cluster, context_pct)
            reasons[spec.name] = reason or "no GPU time left for one more replica"
            if configs:
                choices[spec.name] = Choice(spec.name, spec.rate_rps, spec.weight, configs)
        groups = self._groups(workload, needs)
        idle = tuple(math.inf if cluster.elastic else float(count) for count in cluster.counts.values())
        states = GpuStates({}, idle, tuple(cluster.prices.values()))
        assignment = _Assignment(GpuPool(cluster), kinds)
        readings = Readings(self.heavy_ratio, self.neutral, self.pairs, self.classify, self.sort)
        cut = False
        for number, group in enumerate(groups):
            self.watch.say(f"placed {number} of {len(groups)} groups")
            members = [choices[name] for name in group if name in choices]
            if not members:
                continue
            limit = 0 if self.watch.is_stopped() else max(1_000, NODES_OF_A_PLAN // len(groups))
            # Limit: the default of `Search`.
            search = Search(members, states.as_others(), readings, buys=cluster.elastic, node_limit=min(limit, 40_000))
            search.run()
            states, cut = search.states, cut or search.cut
            assignment.carry_out([choice.name for choice in members], search.taken)
        for name in choices.keys() - assignment.served:
            reasons[name] = _no_room(choices[name], states, kinds)
        notes = ["groups: " + " | ".join(" ".join(group) for group in groups)] if groups else []
        if cut:
            notes.append("the search over configurations was cut short; the best plan found is used")
        placed = [
            (gpu, [(name, _of_batch(needs[name][gpu.type], size)) for name, size in held])
            for gpu, held in assignment.gpus()
        ]
        hosted = hosted_requirements(workload, placed, shares=self.shares)
        overcommits = not self.shares and any(len(held) > 1 for _, held in placed)
        return hosting_plan(self.name, workload, cluster, hosted, reasons, notes, overcommits=overcommits)

    def _groups(
        self, workload: Workload, needs: Mapping[str, Mapping[str, Requirements]]
    ) -> tuple[tuple[str, ...], ...]:
        names = [spec.name for spec in workload.models]
        if self.groups:
            given = tuple(tuple(group.split("+")) for group in self.groups.split(","))
            problems = []
            if sorted(name for group in given for name in group) != sorted(names):
                cure = f"Write for example groups={'+'.join(names)}."
                rule = "must name every model of the workload exactly once"
                problems.append(Problem("--option groups", self.groups, rule, cure))
            if any(len(group) > MOST_IN_A_GROUP for group in given):
                rule = f"a group has {MOST_IN_A_GROUP} models at most"
                problems.append(Problem("--option groups", self.groups, rule, "Divide it."))
            raise_if_any(problems)
            return given
        whole = 1.0 if self.grouping_ties == "float" else WHOLE_GPU_PCT
        averages = {name: _average([r for req in needs[name].values() for r in req.measured], whole) for name in names}
        groups = group_models(averages, self.max_group_size if self.grouping else 1, ties=self.grouping_ties)
        if self.group_order == "workload":
            return tuple(sorted(groups, key=lambda group: min(map(names.index, group))))
        return groups

    def _configs(
        self, spec: ModelSpec, needs: Mapping[str, Requirements], cluster: Cluster, context_pct: Mapping[str, float]
    ) -> tuple[tuple[Config, ...], str]:
        """Return a model's possible configurations, fewest replicas and smallest batch first; or why there are none."""
        usable = {
            kind: {r.batch_size: r for r in req.within_slo if r.held_pct(context_pct[kind]) <= WHOLE_GPU_PCT}
            for kind, req in needs.items()
        }
        usable = {kind: by_size for kind, by_size in usable.items() if by_size}
        if not usable:
            reasons = [req.why_not for req in needs.values() if req.why_not]
            return (), reasons[0] if reasons else "memory: no replica and the context of its process fit a GPU"
        highest = max(usable, key=lambda kind: self._rate_rps(usable[kind][max(usable[kind])]))
        best = usable[highest][max(usable[highest])]
        minimum = math.ceil(spec.rate_rps / self._rate_rps(best) - 1e-9)
        able = sum(cluster.counts[kind] for kind in usable)
        limit = math.inf if cluster.elastic else able
        counts = [i * minimum for i in range(1, MULTIPLIERS + 1 if self.replication else 2) if i * minimum <= limit]
        if not counts and self.oversized == "cap":
            counts = [able]
        if not counts:
            return (), (
                f"needs {minimum} replicas even at its largest batch within the SLO ({best.batch_size}: "
                f"{self._rate_rps(best):g} rps on a {highest}), but only {able} of the GPUs can run it"
            )
        configs = []
        sizes = sorted({size for by_size in usable.values() for size in by_size})
        for size in sizes if self.batch_choice else sizes[-1:]:
            of_size = [usable[kind].get(size) if kind in usable else None for kind in cluster.gpu_types]
            by_type = tuple(
                Need(r.compute_pct, r.held_pct(context_pct[kind]), self._rate_rps(r)) if r is not None else None
                for kind, r in zip(cluster.gpu_types, of_size, strict=True)
            )
            average = _average([r for req in needs.values() for r in req.measured if r.batch_size == size])
            configs += [Config(by_type, size, count, *average) for count in counts]
        return tuple(sorted(configs, key=lambda config: (config.replicas, config.batch_size))), ""

    def _rate_rps(self, requirement: Requirement) -> float:
        return requirement.throughput_rps / (2.0 if self.waiting == "batch" else 1.0)


@dataclass(kw_only=True, eq=False)
class WaoUsher(Usher):
    """USHER as it is, with Creq = weighted achieved occupancy: smaller needs, denser packing (thesis, chapter 6).

    Invariant and options are those of `Usher`.
    """

    name = "wao-usher"
    summary = "usher with time-weighted achieved occupancy as compute need: packs more densely"
    source = "Elvinger's thesis (ETH 2024), chapter 6; USHER (OSDI 2024)"
    readings = "as usher; neutral=last and grouping_ties=float are the thesis' readings where it differs from the paper"
    compute_metric: str = "wavg_ach_occ_pct"


class _Assignment:
    """Which GPU has which replicas: turns states into GPUs, the lowest number first."""

    def __init__(self, pool: GpuPool, kinds: Sequence[str]) -> None:
        self._pool, self._kinds = pool, kinds
        self._in_state: dict[State, list[int]] = {}
        self._gpus: list[tuple[Gpu, list[tuple[str, int]]]] = []
        self.served: set[str] = set()

    def carry_out(self, names: Sequence[str], taken: Sequence[Taken]) -> None:
        """Carry out what a group's search found."""
        others: dict[State, list[int]] = {}
        for state, numbers in self._in_state.items():
            others.setdefault(state._replace(is_own=False), []).extend(numbers)
        self._in_state = others
        for each in taken:
            if each.before is None:
                numbers = [self._open(each.kind) for _ in range(each.gpus)]
            else:
                numbers = sorted(self._in_state[each.before])[: each.gpus]
                self._in_state[each.before] = [n for n in self._in_state[each.before] if n not in set(numbers)]
            self._in_state.setdefault(each.after, []).extend(numbers)
            for model, config in zip(each.models, each.configs, strict=True):
                self.served.add(names[model])
                for number in numbers:
                    self._gpus[number][1].append((names[model], config.batch_size))

    def gpus(self) -> list[tuple[Gpu, list[tuple[str, int]]]]:
        """Return the GPUs in use with the models and batch sizes of their replicas."""
        return self._gpus

    def _open(self, kind: int) -> int:
        gpu = self._pool.next_gpu(self._kinds[kind])
        if gpu is None:
            raise AssertionError("the search opened more GPUs than there are")
        self._gpus.append((gpu, []))
        return len(self._gpus) - 1


def _average(requirements: Sequence[Requirement], whole: float = WHOLE_GPU_PCT) -> tuple[float, float]:
    """Return the mean (Creq, Mreq) where a GPU has `whole` of each; (0, 0) of none.

    The mean is over all measured batches. Over those within the SLO alone, other groups would come out than the thesis
    prints in section 5.4.1.
    """
    count = max(1, len(requirements))
    part = WHOLE_GPU_PCT / whole
    compute, memory = (r.compute_pct / part for r in requirements), (r.memory_pct / part for r in requirements)
    return sum(compute) / count, sum(memory) / count


def _of_batch(requirements: Requirements, batch_size: int) -> Requirement:
    return next(r for r in requirements.within_slo if r.batch_size == batch_size)


def _no_room(choice: Choice, states: GpuStates, kinds: Sequence[str]) -> str:
    """Say what the model's least demanding replica lacks on the nearest GPU, after all groups."""
    best: tuple[float, str] | None = None
    for config in choice.configs:
        for kind, need in enumerate(config.needs):
            if need is None:
                continue
            for state in [*states.used, *([State(kind, 0.0, 0.0, False)] if states.idle[kind] else [])]:
                if state.kind != kind:
                    continue
                lacks = {
                    "GPU time": (need.compute_pct, WHOLE_GPU_PCT - state.compute_pct),
                    "memory": (need.held_pct, WHOLE_GPU_PCT - state.held_pct),
                }
                what, (required, free) = max(lacks.items(), key=lambda item: item[1][0] - item[1][1])
                text = (
                    f"no {what} left: its least demanding replica (batch {config.batch_size}) needs {required:.3g} %, "
                    f"and of a {kinds[kind]} {free:.3g} % are free"
                )
                if best is None or required - free < best[0]:
                    best = (required - free, text)
    return best[1] if best is not None else "there is no GPU that can run it"
