"""Symphony's placement: every GPU of a sub-cluster holds all of its models, and the dispatcher decides the rest.

Source: Chen et al., "Symphony: Optimized DNN Model Serving using Deferred Batch Scheduling", arXiv 2308.07470v2,
sections 3-4.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from tenuto.errors import InvalidInputError, Problem
from tenuto.placement.cluster import Cluster, Gpu
from tenuto.placement.plan import Expected, ExpectedModel, Gpulet, Plan, PolicyUsed, Replica
from tenuto.placement.policies.shared.gpu_pool import GpuPool, gpulet_id, planned_gpus
from tenuto.placement.policies.symphony.staggering import staggered_batch
from tenuto.placement.policy import Policy
from tenuto.placement.workload import ModelSpec, Workload, profile_of
from tenuto.profiles import LatencyTable, LinearLatency, ModelProfile, Profiles

__all__ = ["Symphony"]

MOST_GPUS = 100_000  # bought for one sub-cluster at most, so that a wrong rate does not loop for ever


@dataclass(frozen=True)
class _Resident:
    """A model on the GPUs of one type."""

    spec: ModelSpec
    model: ModelProfile
    latency: LinearLatency | LatencyTable
    largest: int

    def batch(self, gpus: int) -> int:
        """Return the staggered batch on that many GPUs; a single request where not even that has slack."""
        return max(1, min(self.largest, staggered_batch(self.latency, self.spec.slo_ms, gpus)))

    def need(self, gpus: int) -> float:
        """Return the GPUs that are busy with this model's rate in full batches."""
        size = self.batch(gpus)
        return self.spec.rate_rps * self.latency.at(size) / size / 1000.0

    def memory_mib(self, gpus: int) -> float:
        return self.model.memory_mib(self.batch(gpus)) or 0.0


@dataclass
class _SubCluster:
    gpu_type: str
    residents: list[_Resident] = field(default_factory=list)
    gpus: list[Gpu] = field(default_factory=list)

    def need(self, gpus: int) -> float:
        return sum(resident.need(gpus) for resident in self.residents)

    def memory_mib(self, gpus: int) -> float:
        return sum(resident.memory_mib(gpus) for resident in self.residents)


class Symphony(Policy):
    """One unrestricted gpu-let per GPU that holds all models of its sub-cluster.

    A model's largest batch is the staggered one, max b with (1 + 1/n)*l(b) <= SLO on n GPUs. Models go to the fewest
    sub-clusters in which they fit into a GPU's memory, balanced by the GPUs they keep busy; GPUs are shared out in the
    same proportion. A sub-cluster has GPUs of one type. When the models need more GPUs than there are, every rate is
    carried in the same proportion; an elastic cluster grows until all is carried.

    Options:
        sub_clusters: number of sub-clusters per GPU type; 0 for the fewest that memory allows.
        max_batch: largest batch considered.
    """

    name = "symphony"
    summary = "every GPU of a sub-cluster holds all its models; staggered batch sizes"
    source = "Symphony (arXiv 2308.07470v2), sections 3 and 4"

    def __init__(self, *, sub_clusters: int = 0, max_batch: int = 128) -> None:
        problems = []
        if sub_clusters < 0:
            problems.append(Problem("--option sub_clusters", sub_clusters, "must be 0 or more", "0 finds the fewest."))
        if max_batch < 1:
            problems.append(Problem("--option max_batch", max_batch, "must be at least 1", "Try 128."))
        if problems:
            raise InvalidInputError(problems)
        self.sub_clusters, self.max_batch = sub_clusters, max_batch

    def place(self, workload: Workload, cluster: Cluster, profiles: Profiles) -> Plan:
        """Return the plan; deterministic, ties broken by the order of the workload."""
        pool = GpuPool(cluster)
        counts = {kind: len(pool.free(kind)) for kind in pool.types}
        residents, unserved = self._residents(workload, cluster, profiles)
        by_type = _choose_types(workload, residents, counts, pool)
        parts: list[_SubCluster] = []
        for kind, members in by_type.items():
            split, left_out = self._split(kind, members, counts[kind], pool)
            unserved |= left_out
            parts += split
        for part in parts:
            _give_gpus(part, parts, counts[part.gpu_type], pool)
        parts = [part for part in parts if part.gpus]
        return self._plan(workload, cluster, parts, unserved)

    def _residents(
        self, workload: Workload, cluster: Cluster, profiles: Profiles
    ) -> tuple[dict[str, dict[str, _Resident]], dict[str, str]]:
        found: dict[str, dict[str, _Resident]] = {}
        unserved: dict[str, str] = {}
        memories = {gpu.type: gpu.memory_mib for gpu in cluster.gpus}
        for spec in workload.models:
            reasons = []
            for kind in cluster.gpu_types:
                try:
                    model = profile_of(spec, kind, profiles)
                    latency = model.latency(100.0)
                except InvalidInputError as error:
                    reasons.append(f"{kind}: {error}")
                    continue
                if latency.at(1) > spec.slo_ms:
                    reasons.append(f"{kind}: one request takes {latency.at(1):.4g} ms, more than the SLO")
                    continue
                largest = min(self.max_batch, latency.largest_batch(spec.slo_ms))
                memory = memories[kind]
                while largest > 1 and (model.memory_mib(largest) or 0.0) > memory:
                    largest -= 1
                found.setdefault(spec.name, {})[kind] = _Resident(spec, model, latency, largest)
            if spec.name not in found:
                unserved[spec.name] = "; ".join(reasons)
        return found, unserved

    def _split(
        self, kind: str, members: Sequence[_Resident], gpus: int, pool: GpuPool
    ) -> tuple[list[_SubCluster], dict[str, str]]:
        """Return the sub-clusters of one type, and the models that fit into the memory of none."""
        memory = pool.types[kind].memory_mib
        most = len(members) if pool.elastic else min(gpus, len(members))
        first = min(self.sub_clusters or 1, max(most, 1))
        for number in range(first, (first if self.sub_clusters else max(most, 1)) + 1):
            # Batches grow with the GPUs, and an elastic cluster may grow to any number of them.
            parts, left = _balanced(kind, members, number, MOST_GPUS if pool.elastic else gpus, memory)
            if not left:
                break
        reason = f"does not fit into the {memory:.0f} MiB of a {kind} beside the other models of any sub-cluster"
        return parts, {resident.spec.name: reason for resident in left}

    def _plan(
        self, workload: Workload, cluster: Cluster, parts: Sequence[_SubCluster], unserved: dict[str, str]
    ) -> Plan:
        gpulets: list[Gpulet] = []
        models: dict[str, ExpectedModel] = {}
        notes: list[str] = []
        for part in parts:
            count = len(part.gpus)
            carried = min(1.0, count / part.need(count))
            if carried < 1.0:
                notes.append(
                    f"{', '.join(r.spec.name for r in part.residents)}: {100 * carried:.3g} % of the rates carried; "
                    f"they keep {part.need(count):.3g} GPUs busy and there are {count}"
                )
            replicas = tuple(_replica(resident, count, carried) for resident in part.residents)
            gpulets += [Gpulet(id=gpulet_id(gpu.id, 0), gpu=gpu.id, models=replicas) for gpu in part.gpus]
            for resident in part.residents:
                latency = resident.latency.at(resident.batch(count))
                models[resident.spec.name] = ExpectedModel(
                    goodput_rps=round(resident.spec.rate_rps * carried, 6), latency_ms=round(latency, 6)
                )
        order = {gpu.id: index for index, gpu in enumerate(cluster.gpus)}
        gpulets.sort(key=lambda gpulet: order.get(gpulet.gpu, len(order)))
        names = [spec.name for spec in workload.models if spec.name not in models]
        goodput = round(sum(model.goodput_rps for model in models.values()), 6)
        ordered = {spec.name: models[spec.name] for spec in workload.models if spec.name in models}
        return Plan(
            policy=PolicyUsed(name=self.name),
            gpus=planned_gpus(cluster, (gpu for part in parts for gpu in part.gpus)),
            gpulets=tuple(gpulets),
            expected=Expected(goodput_rps=goodput, models=ordered),
            unserved=tuple(names),
            unserved_reasons={name: unserved.get(name, "no GPU is left for its sub-cluster") for name in names},
            notes=tuple(notes),
        )


def _replica(resident: _Resident, gpus: int, carried: float) -> Replica:
    return Replica(
        name=resident.spec.name, batch_size=resident.batch(gpus),
        rate_rps=math.floor(1e6 * resident.spec.rate_rps * carried / gpus) / 1e6,
        memory_mib=resident.memory_mib(gpus) or None,
    )


def _choose_types(
    workload: Workload, residents: dict[str, dict[str, _Resident]], counts: dict[str, int], pool: GpuPool
) -> dict[str, list[_Resident]]:
    """Give each model to one GPU type: the largest first, to the type whose GPUs are then least busy (or cheapest)."""
    load = dict.fromkeys(counts, 0.0)
    by_type: dict[str, list[_Resident]] = {kind: [] for kind in counts}
    prices = {kind: gpu.price_per_hour for kind, gpu in pool.types.items()}
    known = all(price is not None for price in prices.values())

    def need(spec: ModelSpec) -> float:
        return max((r.need(counts[kind]) for kind, r in residents[spec.name].items()), default=0.0)

    for spec in sorted((s for s in workload.models if s.name in residents), key=need, reverse=True):
        options = residents[spec.name]

        def busy(kind: str, options: dict[str, _Resident] = options) -> float:
            own = options[kind].need(counts[kind])
            if pool.elastic:
                return own * (prices[kind] or 0.0) if known else own
            return (load[kind] + own) / counts[kind]

        kind = min(options, key=busy)
        load[kind] += options[kind].need(counts[kind])
        by_type[kind].append(options[kind])
    return by_type


def _balanced(
    kind: str, members: Sequence[_Resident], number: int, gpus: int, memory_mib: float
) -> tuple[list[_SubCluster], list[_Resident]]:
    """Spread models over `number` sub-clusters, the largest first to the least busy one whose memory it fits."""
    parts = [_SubCluster(kind) for _ in range(number)]
    each = max(1, gpus // number)
    left = []
    for resident in sorted(members, key=lambda r: r.need(each), reverse=True):
        roomy = [p for p in parts if p.memory_mib(gpus) + resident.memory_mib(gpus) <= memory_mib + 1e-6]
        if roomy:
            min(roomy, key=lambda part: part.need(each)).residents.append(resident)
        else:
            left.append(resident)
    return [part for part in parts if part.residents], left


def _give_gpus(part: _SubCluster, parts: Sequence[_SubCluster], gpus: int, pool: GpuPool) -> None:
    """Hand a sub-cluster its GPUs: in proportion to its need, at least one each; as many as it needs when bought."""
    if pool.elastic:
        wanted = next((n for n in range(1, MOST_GPUS) if part.need(n) <= n + 1e-9), MOST_GPUS)
    else:
        same = [other for other in parts if other.gpu_type == part.gpu_type]
        needs = [other.need(gpus) for other in same]
        shares = [1 + (gpus - len(same)) * need / sum(needs) for need in needs]
        whole = [int(share + 1e-9) for share in shares]
        by_rest = sorted(range(len(same)), key=lambda index: (whole[index] - shares[index], index))
        for index in by_rest[: gpus - sum(whole)]:
            whole[index] += 1
        wanted = whole[same.index(part)]
    for _ in range(wanted):
        gpu = pool.take(part.gpu_type)
        if gpu is not None:
            part.gpus.append(gpu)
