"""GPUs cut into MIG instances, for every policy that cuts them: which GPUs may be cut, how models run in instances, and
the plan of the instances that a policy chose.

A policy decides only which instances are made and which models run in them: ParvaGPU by its segments, `tenuto` by its
integer program over layouts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from tenuto.placement.cluster import Cluster, Gpu
from tenuto.placement.costs import context_mib_of, costs_of
from tenuto.placement.plan import Plan
from tenuto.placement.policies.shared.gpu_pool import GpuPool
from tenuto.placement.policies.shared.hosting import Hosted, hosting_plan
from tenuto.placement.program import Replica
from tenuto.placement.workload import ModelSpec, Workload
from tenuto.profiles import Profiles
from tenuto.profiles.mig_instances import instance_profiles


@dataclass(frozen=True)
class InstanceWay:
    """How a model runs in an instance: batch size and number of equal processes, and the latency of a batch then.

    `memory_mib` and `weights_mib` are of one process without its context. `alone_ms` is the latency of a batch in a
    process that is alone, `slowdown` how many times as slow it is beside its equals, at least 1.
    """

    batch_size: int
    processes: int
    latency_ms: float
    memory_mib: float
    weights_mib: float | None
    alone_ms: float
    slowdown: float

    @property
    def rate_rps(self) -> float:
        """The requests per second that its processes serve together."""
        return 1000.0 * self.batch_size * self.processes / self.latency_ms


@dataclass(frozen=True)
class InstanceModel:
    """A model with its measured ways that fit into the memory of an instance, by MIG profile."""

    spec: ModelSpec
    ways: Mapping[str, Sequence[InstanceWay]]


@dataclass(frozen=True)
class FilledInstance:
    """An instance with the rate of each model in it, and the way each runs there; all run in as many processes."""

    size: str
    rates_rps: Mapping[str, float]
    ways: Mapping[str, InstanceWay]

    @property
    def busy(self) -> float:
        """The part of its time that it works."""
        return sum(rate / self.ways[name].rate_rps for name, rate in self.rates_rps.items())

    @property
    def processes(self) -> int:
        """Its processes, each with all of its models."""
        return max(way.processes for way in self.ways.values())


class CuttableGpus:
    """The GPUs of one type that plans may cut, and the models of a workload in their instances."""

    def __init__(self, kind: str, workload: Workload, cluster: Cluster, profiles: Profiles) -> None:
        """Look up what the models cost in every size of instance.

        Args:
            kind: a type of which the cluster has GPUs with `mig: managed`.
            workload: the models.
            cluster: the GPUs; those that plans may cut count as whole.
            profiles: measured in instances.
        """
        self.kind, self.cluster, self._workload = kind, cluster.uncut, workload
        self.sizes = instance_profiles(kind)
        example = next(gpu for gpu in self.cluster.gpus if gpu.type == kind and gpu.mig == "managed")
        instances = {name: example.cut(name, size.starts[0]) for name, size in self.sizes.items()}
        self.room_mib = {name: instance.memory_mib for name, instance in instances.items()}
        self.context_mib = context_mib_of(kind, profiles)
        costs, self.models = costs_of(workload, Cluster.of(instances.values()), profiles), list[InstanceModel]()
        for spec in workload.models:
            ways: dict[str, list[InstanceWay]] = {}
            for name, instance in instances.items():
                on = costs[spec.name].get(instance.type)
                for point in () if on is None else on.profile.points:
                    for processes, ms in ({1: point.latency_ms} | point.processes_ms).items():
                        if on is not None and on.has_room_for(processes, point.batch_size, self.context_mib):
                            needs, alone_ms = on.needs_mib(point.batch_size), point.latency_ms
                            slowdown = max(1.0, ms / alone_ms)
                            way = InstanceWay(point.batch_size, processes, ms, *needs, alone_ms, slowdown)
                            ways.setdefault(name, []).append(way)
            self.models.append(InstanceModel(spec, ways))

    @property
    def pool(self) -> GpuPool:
        """The GPUs that may be cut, all of them untouched."""
        return GpuPool(self.cluster, managed_only=True)

    def plan(
        self,
        policy: str,
        filled: Iterable[tuple[Gpu, Iterable[tuple[int, FilledInstance]]]],
        reasons: Mapping[str, str],
    ) -> Plan:
        """Return the plan of GPUs, each with its instances by the memory slice where they begin.

        Args:
            policy: the name of the policy that decided.
            filled: by GPU what runs in its instances.
            reasons: see `hosting_plan`.
        """
        hosted: list[Hosted] = []
        several = False
        for gpu, instances in filled:
            for start, instance in instances:
                hosted += _processes(gpu.cut(instance.size, start), instance)
                several = several or instance.processes > 1
        return hosting_plan(policy, self._workload, self.cluster, hosted, reasons, overcommits=several)


def cuttable_kinds(cluster: Cluster) -> list[str]:
    """Return the types of the GPUs that plans may cut, in the order of the cluster."""
    return list(dict.fromkeys(gpu.type for gpu in cluster.uncut.gpus if gpu.mig == "managed"))


def _processes(gpu: Gpu, instance: FilledInstance) -> Iterator[Hosted]:
    """Yield the processes of an instance, each with an equal part of every model's rate there."""
    count, ways = instance.processes, instance.ways
    replicas = [
        Replica.believed(name, ways[name].batch_size, rate / count, ways[name].latency_ms)
        for name, rate in instance.rates_rps.items()
    ]
    for _ in range(count):
        yield Hosted(gpu, None, replicas)
