"""Symphony's placement: every GPU of a sub-cluster holds all of its models, and the dispatcher decides the rest.

Source: Chen et al., "Symphony: Optimized DNN Model Serving using Deferred Batch Scheduling", arXiv 2308.07470v2,
sections 3-4 and appendix A.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tenuto.errors import InvalidInputError
from tenuto.options import option
from tenuto.placement.cluster import Cluster, Gpu
from tenuto.placement.costs import context_mib_of, costs_of
from tenuto.placement.plan import Plan
from tenuto.placement.policies.shared.gpu_pool import GpuPool
from tenuto.placement.policies.shared.hosting import Hosted, hosting_plan
from tenuto.placement.policies.symphony.partition import (
    PartitionLimits,
    PartitionModel,
    fits_some,
    gpus_by_need,
    partition,
)
from tenuto.placement.policies.symphony.staggering import StaggeredModel
from tenuto.placement.policy import Policy
from tenuto.placement.program import Replica
from tenuto.placement.workload import ModelSpec, Workload
from tenuto.profiles import Profiles

MOST_GPUS = 100_000  # limit: most GPUs bought for one sub-cluster, so that a wrong rate does not loop for ever


@dataclass
class _SubCluster:
    gpu_type: str
    residents: list[StaggeredModel]
    gpus: list[Gpu] = field(default_factory=list)

    def need(self, gpus: float) -> float:
        """Return how many GPUs its rates keep busy when it has that many."""
        return sum(resident.need(gpus) for resident in self.residents)


@dataclass(kw_only=True, eq=False)
class Symphony(Policy):
    """One unrestricted gpu-let per GPU that holds all models of its sub-cluster.

    A model's largest batch is the staggered one, max b with (1 + 1/n)*l(b) <= SLO on n GPUs. Models go to the fewest
    sub-clusters in which they fit a GPU's memory and a dispatcher's rate, split as in appendix A (`partition`): evenly
    in rate and static memory. GPUs are then shared out by need. A sub-cluster has GPUs of one type. When it has fewer
    GPUs than its models need, their rates are carried in proportion; an elastic cluster grows until all is carried.

    Options:
        sub_clusters: number of sub-clusters per GPU type; 0 for the fewest that the limits allow.
        max_rate_rps: what one dispatcher can take, the paper's R_max; 0: no limit.
        memory_weight: weight of even memory against even rates, the paper's w.
        time_limit_s: for the solver of the partition, whose work is bounded; where seconds end it, two runs may differ.
            0: no solver.
        max_batch: largest batch considered.
    """

    name = "symphony"
    summary = "every GPU of a sub-cluster holds all its models; staggered batch sizes"
    source = "Symphony (arXiv 2308.07470v2), sections 3 and 4 and appendix A"
    readings = (
        "as few sub-clusters as memory and rate allow, where the paper is given their number; one GPU type in each"
    )

    sub_clusters: int = option(0, minimum=0)
    max_rate_rps: float = option(0.0, minimum=0)
    memory_weight: float = option(1.0, minimum=0)
    time_limit_s: float | None = option(None, minimum=0)
    max_batch: int = option(128, minimum=1)

    def place(self, workload: Workload, cluster: Cluster, profiles: Profiles) -> Plan:
        """Return the plan; deterministic, ties broken by the order of the workload."""
        pool, counts = GpuPool(cluster), cluster.counts
        residents, reasons = self._residents(workload, cluster, profiles)
        parts: list[_SubCluster] = []
        for kind, members in _choose_types(workload, residents, counts, pool).items():
            room_mib = pool.types[kind].memory_mib - context_mib_of(kind, profiles)
            own, left_out = self._split(kind, members, counts[kind], room_mib, elastic=pool.elastic)
            reasons |= left_out
            _give_gpus(own, counts[kind], pool)
            parts += own
        return self._plan(workload, cluster, [part for part in parts if part.gpus], reasons)

    def _residents(
        self, workload: Workload, cluster: Cluster, profiles: Profiles
    ) -> tuple[dict[str, dict[str, StaggeredModel]], dict[str, str]]:
        """Return the models by name and GPU type, and the reasons of those that no type can serve."""
        contexts = {kind: context_mib_of(kind, profiles) for kind in cluster.gpu_types}
        residents: dict[str, dict[str, StaggeredModel]] = {}
        reasons = {}
        for name, by_type in costs_of(workload, cluster, profiles).items():
            whole = {kind: on for kind, on in by_type.items() if on.knows(100.0, ("measured",))}
            models = {kind: StaggeredModel(on, self.max_batch, contexts[kind]) for kind, on in whole.items()}
            able = {kind: model for kind, model in models.items() if not model.why_not}
            if able:
                residents[name] = able
            else:
                why = [model.why_not for model in models.values()]
                reasons[name] = why[0] if why else "its latency on a whole GPU was not measured"
        return residents, reasons

    def _split(
        self, kind: str, members: Sequence[StaggeredModel], gpus: int, room_mib: float, *, elastic: bool
    ) -> tuple[list[_SubCluster], dict[str, str]]:
        """Return the sub-clusters of one type, and why models are in none."""
        if not members:
            return [], {}
        limits = PartitionLimits(
            memory_mib=room_mib, max_rate_rps=self.max_rate_rps or None, memory_weight=self.memory_weight
        )
        # Batches and memory grow with the GPUs of a sub-cluster; an elastic cluster may grow to any number.
        entries = [member.entry(MOST_GPUS if elastic else gpus) for member in members]
        most = len(members) if elastic else min(gpus, len(members))
        number, placed = self._fewest(entries, limits, most)
        members_placed = [index for index, k in enumerate(placed) if k is not None]
        reason = f"no memory left: it does not fit into a {kind} beside the other models of any sub-cluster"
        left_out = {entry.name: reason for entry, k in zip(entries, placed, strict=True) if k is None}
        number = min(number, len(members_placed))
        if not members_placed:
            return [], left_out
        try:
            limit_s = math.inf if self.time_limit_s is None else self.time_limit_s
            parts = partition([entries[i] for i in members_placed], number, limits=limits, time_limit_s=limit_s)
            where = [parts.assignment[entries[i].name] for i in members_placed]
        except InvalidInputError:  # tight limits: keep what one pass found
            where = [k for k in placed if k is not None]
        groups = [[members[i] for i, k in zip(members_placed, where, strict=True) if k == g] for g in range(number)]
        return [_SubCluster(kind, group) for group in groups if group], left_out

    def _fewest(
        self, entries: Sequence[PartitionModel], limits: PartitionLimits, most: int
    ) -> tuple[int, list[int | None]]:
        """Return the fewest sub-clusters that hold all models, or the most allowed, with a first assignment."""
        if self.sub_clusters:
            number = min(self.sub_clusters, most)
            return number, fits_some(entries, number, limits)
        number = max(1, math.ceil(sum(entry.static_mib for entry in entries) / (limits.memory_mib or math.inf)))
        if limits.max_rate_rps:
            number = max(number, math.ceil(sum(entry.rate_rps for entry in entries) / limits.max_rate_rps))
        number = min(number, most)
        while True:
            placed = fits_some(entries, number, limits)
            if None not in placed or number >= most:
                return number, placed
            # Pace: of the search: a tenth more sub-clusters each time.
            number = min(most, number + max(1, number // 10))

    def _plan(
        self, workload: Workload, cluster: Cluster, parts: Sequence[_SubCluster], reasons: Mapping[str, str]
    ) -> Plan:
        hosted: list[Hosted] = []
        why = dict(reasons)
        for part in parts:
            count = len(part.gpus)
            need = part.need(count)
            carried = min(1.0, count / need)
            for resident in part.residents:
                why[resident.spec.name] = (
                    f"no GPU time left: its sub-cluster needs {need:.3g} GPUs and has {count}, so that "
                    f"{100 * carried:.3g} % of each rate is carried"
                )
            replicas = [_replica(resident, count, carried) for resident in part.residents]
            hosted += [Hosted(gpu, None, replicas) for gpu in part.gpus]
        return hosting_plan(self.name, workload, cluster, hosted, why)


def _replica(resident: StaggeredModel, gpus: int, carried: float) -> Replica:
    return Replica(
        name=resident.spec.name,
        batch_size=resident.batch(gpus),
        rate_rps=resident.spec.rate_rps * carried / gpus,
        latency_ms=round(resident.latency_ms(gpus), 6),
    )


def _choose_types(
    workload: Workload, residents: Mapping[str, Mapping[str, StaggeredModel]], counts: Mapping[str, int], pool: GpuPool
) -> dict[str, list[StaggeredModel]]:
    """Give each model to one GPU type: the largest first, to the type whose GPUs are then least busy (or cheapest)."""
    load = dict.fromkeys(counts, 0.0)
    by_type: dict[str, list[StaggeredModel]] = {kind: [] for kind in counts}
    needs = {
        name: {kind: model.need(counts[kind]) for kind, model in options.items()} for name, options in residents.items()
    }

    def need(spec: ModelSpec) -> float:
        return max(needs[spec.name].values())

    for spec in sorted((s for s in workload.models if s.name in residents), key=need, reverse=True):
        own = needs[spec.name]
        if pool.elastic:
            kind = min(own, key=lambda kind: own[kind] * pool.prices[kind])
        else:
            kind = min(own, key=lambda kind: (load[kind] + own[kind]) / counts[kind])
        load[kind] += own[kind]
        by_type[kind].append(residents[spec.name][kind])
    return by_type


def _give_gpus(parts: Sequence[_SubCluster], gpus: int, pool: GpuPool) -> None:
    """Give the sub-clusters of one type their GPUs: by need on a fixed cluster, as many as needed when bought."""
    if pool.elastic:
        counts = [next((n for n in _growing(part) if part.need(n) <= n + 1e-9), MOST_GPUS) for part in parts]
    else:
        counts = gpus_by_need([part.need(max(1, gpus // len(parts))) for part in parts], gpus) if parts else []
    for part, count in zip(parts, counts, strict=True):
        for _ in range(count):
            gpu = pool.next_gpu(part.gpu_type)
            if gpu is not None:
                part.gpus.append(gpu)


def _growing(part: _SubCluster) -> range:
    """Return the numbers of GPUs to try, from what the largest batches need."""
    return range(max(1, math.floor(part.need(MOST_GPUS))), MOST_GPUS)
