"""USHER: group models with complementary needs, then choose batch sizes, replicas and GPUs group by group.

Source: Shubha, Shen, Iyer, "USHER: Holistic Interference Avoidance for Resource Optimized ML Inference", OSDI 2024,
section 4, in the reading of P. Elvinger's thesis (ETH Zurich 2024, section 5.4). Merging operators of co-located
models, the paper's third component, changes the executables and not the placement, and is not part of this policy.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from tenuto.errors import InvalidInputError, Problem
from tenuto.placement.cluster import Cluster, Gpu
from tenuto.placement.plan import Plan
from tenuto.placement.policies.shared.gpu_pool import GpuPool
from tenuto.placement.policies.shared.profiled_plan import Hosted, profiled_plan
from tenuto.placement.policies.shared.requirements import MEMORY, Requirement, Requirements, requirements_of
from tenuto.placement.policies.usher.grouping import group_models
from tenuto.placement.policies.usher.search import UNLIMITED, Choice, Config, Placement, Room, Search
from tenuto.placement.policy import Policy
from tenuto.placement.workload import ModelSpec, Workload
from tenuto.profiles import Profiles

__all__ = ["Usher"]

MULTIPLIERS = 6  # replica counts are i * c_min with i in 1..6


class Usher(Policy):
    """Packs replicas so that compute and memory of a GPU fill up evenly and never exceed 100 %.

    Per model, c_min = ceil(rate / throughput of the largest batch within the SLO) on the type where that is highest;
    replica counts are c_min to 6 c_min, at most the number of GPUs. A model with c_min above the number of GPUs is not
    served at all, while the replicas of a feasible count are placed as far as they fit. At most one replica of a model
    is on a GPU.
    Counts beyond the first that carries the rate are skipped: they can only take room from other models.

    On a fixed cluster each group gets the configuration with the highest goodput; on an elastic one, the cheapest that
    carries every rate, each model on one GPU type. Each gpu-let's share is its compute requirement. Latency is the one
    measured
    on the whole GPU: avoiding contention is what the packing is for.

    Options:
        compute_metric, memory_metric: what Creq and Mreq are; a metric of the profile in percent, or `memory`.
        heavy_ratio: from which Creq/Mreq (or Mreq/Creq) a replica counts as compute-heavy (memory-heavy).
        max_group_size: models per group: 1, 2, 4, 8, …
        groups: explicit groups in order, `a+b+c,d+e`, instead of matching.
        shares: limit gpu-lets to their compute requirement; without it they compete freely (thesis, appendix A.2.1).
        Ablation, each a single ingredient left out: grouping=false (every model alone, largest first),
        replication=false (c_min replicas only), batch_choice=false (largest batch within the SLO only), balance=false
        (first fit on GPUs).
    """

    name = "usher"
    summary = "groups models with complementary compute and memory needs, then packs replicas group by group"
    source = "USHER (OSDI 2024), section 4; Creq = achieved occupancy as in Elvinger's thesis (ETH 2024)"

    def __init__(
        self, *, compute_metric: str = "achieved_occupancy_pct", memory_metric: str = MEMORY, heavy_ratio: float = 1.2,
        max_group_size: int = 4, groups: str = "", shares: bool = True, grouping: bool = True, replication: bool = True,
        batch_choice: bool = True, balance: bool = True,
    ) -> None:
        problems = []
        if heavy_ratio < 1:
            problems.append(Problem("--option heavy_ratio", heavy_ratio, "must be at least 1", "The paper uses 1.2."))
        if max_group_size < 1:
            rule = "must be at least 1"
            problems.append(Problem("--option max_group_size", max_group_size, rule, "The paper uses 4."))
        if problems:
            raise InvalidInputError(problems)
        self.compute_metric, self.memory_metric = compute_metric, memory_metric
        self.heavy_ratio, self.max_group_size, self.groups = heavy_ratio, max_group_size, groups
        self.shares, self.grouping, self.replication = shares, grouping, replication
        self.batch_choice, self.balance = batch_choice, balance

    def place(self, workload: Workload, cluster: Cluster, profiles: Profiles) -> Plan:
        """Return the plan.

        Raises:
            InvalidInputError: a profile lacks the metrics, or the `groups` option does not name every model once.
        """
        needs = requirements_of(workload, cluster, profiles, self.compute_metric, self.memory_metric)
        pool = GpuPool(cluster)
        counts = _gpu_counts(cluster)
        unserved: dict[str, str] = {}
        choices: dict[str, Choice] = {}
        for spec in workload.models:
            configs, reason = self._configs(spec, needs[spec.name], counts)
            if configs:
                choices[spec.name] = Choice(spec.name, spec.rate_rps, spec.weight, configs)
            else:
                unserved[spec.name] = reason
        groups = self._groups(workload, needs)
        rooms = [Room(kind, 0, count) for kind, count in counts.items()]
        placements, rooms, cut = self._place_groups(groups, choices, rooms, _prices(cluster))
        for name in choices.keys() - placements.keys():
            unserved[name] = _no_room(choices[name], rooms)
        notes = ["groups: " + " | ".join(" ".join(group) for group in groups)] if groups else []
        if cut:
            notes.append("the search over configurations was cut short; the best plan found is used")
        hosted = _on_gpus(placements, pool, cluster)
        return profiled_plan(self.name, workload, cluster, hosted, unserved, notes, shares=self.shares)

    def _groups(
        self, workload: Workload, needs: Mapping[str, Mapping[str, Requirements]]
    ) -> tuple[tuple[str, ...], ...]:
        names = [spec.name for spec in workload.models]
        if self.groups:
            given = tuple(tuple(group.split("+")) for group in self.groups.split(","))
            if sorted(name for group in given for name in group) != sorted(names):
                raise InvalidInputError(
                    Problem("--option groups", self.groups, "must name every model of the workload exactly once",
                            f"Write for example groups={'+'.join(names)}.")
                )
            return given
        averages = {name: _highest_type(needs[name]).average() for name in names if needs[name]}
        return group_models(averages, self.max_group_size if self.grouping else 1)

    def _configs(
        self, spec: ModelSpec, needs: Mapping[str, Requirements], gpu_counts: Mapping[str, int]
    ) -> tuple[tuple[Config, ...], str]:
        """Return what may be chosen for a model, fewest replicas and smallest batch first; or why nothing may."""
        usable = {kind: {r.batch_size: r for r in req.within_slo} for kind, req in needs.items() if req.within_slo}
        if not usable:
            return (), "; ".join(req.why_not for req in needs.values())
        kinds = sorted(usable, key=lambda kind: -_largest_batch(usable[kind]).throughput_rps)
        configs: list[Config] = []
        elastic = UNLIMITED in gpu_counts.values()
        for alternatives in [[kind] for kind in kinds] if elastic else [kinds]:
            minimum = math.ceil(spec.rate_rps / _largest_batch(usable[alternatives[0]]).throughput_rps - 1e-9)
            limit = sum(gpu_counts[kind] for kind in alternatives)
            counts = [i * minimum for i in range(1, MULTIPLIERS + 1 if self.replication else 2) if i * minimum <= limit]
            if not counts:
                best = _largest_batch(usable[kinds[0]])
                return (), (
                    f"needs {minimum} replicas even at its largest batch within the SLO ({best.batch_size}: "
                    f"{best.throughput_rps:g} rps on a {kinds[0]}), but only {limit} of the GPUs can run it"
                )
            configs += _per_batch(spec, {kind: usable[kind] for kind in alternatives}, counts, self.batch_choice)
        configs.sort(key=lambda config: (config.replicas, config.batch_size))
        return tuple(configs), ""

    def _place_groups(
        self, groups: Sequence[Sequence[str]], choices: Mapping[str, Choice], rooms: list[Room],
        prices: Mapping[str, float] | None,
    ) -> tuple[dict[str, Placement], list[Room], bool]:
        placements: dict[str, Placement] = {}
        cut = False
        for group in groups:
            members = [choices[name] for name in group if name in choices]
            able = [any(room.takes(config) for choice in members for config in choice.configs) for room in rooms]
            full = [room for room, takes in zip(rooms, able, strict=True) if not takes]
            open_rooms = [room for room, takes in zip(rooms, able, strict=True) if takes]
            search = Search(members, open_rooms, self.heavy_ratio, balance=self.balance, prices=prices)
            placements |= search.run()
            rooms = full + search.best_rooms
            cut = cut or search.cut
        return placements, rooms, cut


def _highest_type(needs: Mapping[str, Requirements]) -> Requirements:
    """Return the requirements on the type where the model is fastest, which stands for it in the averages."""
    return max(needs.values(), key=lambda req: max((r.throughput_rps for r in req.measured), default=0.0))


def _largest_batch(by_size: Mapping[int, Requirement]) -> Requirement:
    return by_size[max(by_size)]


def _per_batch(
    spec: ModelSpec, usable: Mapping[str, Mapping[int, Requirement]], counts: Sequence[int], choice: bool
) -> list[Config]:
    """Return the configurations of a model: per batch size the counts up to the first that carries the rate."""
    sizes = sorted({size for by_size in usable.values() for size in by_size})
    configs = []
    for size in sizes if choice else sizes[-1:]:
        needs = {kind: by_size[size] for kind, by_size in usable.items() if size in by_size}
        first = next(iter(needs.values()))
        carries = [count * first.throughput_rps >= spec.rate_rps - 1e-6 for count in counts]
        some_slower = len({need.throughput_rps for need in needs.values()}) > 1
        kept = counts[: carries.index(True) + 1] if any(carries) and not some_slower else counts
        configs += [Config(needs, size, count, first.total_pct) for count in kept]
    return configs


def _no_room(choice: Choice, rooms: Sequence[Room]) -> str:
    """Say what the model's least demanding replica needs and what the GPUs have left after all groups."""
    least = min((need for config in choice.configs for need in config.needs.values()), key=lambda need: need.total_pct)
    kinds = {kind for config in choice.configs for kind in config.needs}
    able = [room for room in rooms if room.gpu_type in kinds]
    freest = min(able, key=lambda room: max(room.compute_pct, room.memory_pct), default=None)
    if freest is None:
        return "there is no GPU"
    return (
        f"its least demanding replica (batch {least.batch_size}) needs {least.compute_pct:.3g} % compute and "
        f"{least.memory_pct:.3g} % memory; the freest {freest.gpu_type} has {100 - freest.compute_pct:.3g} % and "
        f"{100 - freest.memory_pct:.3g} % left after models that carry more"
    )


def _gpu_counts(cluster: Cluster) -> dict[str, int]:
    """Return the GPUs there are of each type; `UNLIMITED` on an elastic cluster."""
    counts: dict[str, int] = {}
    for gpu in cluster.gpus:
        counts[gpu.type] = counts.get(gpu.type, 0) + 1
    return dict.fromkeys(counts, UNLIMITED) if cluster.elastic else counts


def _prices(cluster: Cluster) -> dict[str, float] | None:
    """Return what a GPU of each type costs where GPUs are bought; one unit each where any price is unknown."""
    if not cluster.elastic:
        return None
    prices = {gpu.type: gpu.price_per_hour for gpu in cluster.gpus}
    known = {kind: price for kind, price in prices.items() if price is not None}
    return known if len(known) == len(prices) else dict.fromkeys(prices, 1.0)


def _on_gpus(placements: Mapping[str, Placement], pool: GpuPool, cluster: Cluster) -> list[tuple[Gpu, list[Hosted]]]:
    """Turn numbered GPUs per type into GPUs of the cluster, in its order, bought ones last."""
    by_number: dict[tuple[str, int], list[Hosted]] = {}
    for name, placement in placements.items():
        for kind, start, count in placement.ranges:
            for number in range(start, start + count):
                by_number.setdefault((kind, number), []).append(Hosted(name, placement.config.needs[kind]))
    hosted = []
    for (kind, _), replicas in sorted(by_number.items()):
        gpu = pool.take(kind)
        if gpu is not None:
            hosted.append((gpu, replicas))
    order = {gpu.id: index for index, gpu in enumerate(cluster.gpus)}
    hosted.sort(key=lambda pair: order.get(pair[0].id, len(order)))
    return hosted
