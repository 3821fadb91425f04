"""ParvaGPU: equal processes of one model in MIG instances of the size that serves it best."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tenuto.errors import refused
from tenuto.options import option
from tenuto.placement.cluster import Cluster, Gpu
from tenuto.placement.costs import context_mib_of, costs_of
from tenuto.placement.plan import Plan
from tenuto.placement.policies.parvagpu.allocation import Allocator, CutGpu, Segment
from tenuto.placement.policies.parvagpu.segments import ModelToServe, best_triplets
from tenuto.placement.policies.shared.gpu_pool import GpuPool
from tenuto.placement.policies.shared.hosting import Hosted, hosting_plan
from tenuto.placement.policy import Policy
from tenuto.placement.program import Replica
from tenuto.placement.workload import Workload
from tenuto.profiles import Profiles
from tenuto.profiles.mig_instances import InstanceProfile, instance_profiles


@dataclass(kw_only=True, eq=False)
class ParvaGpu(Policy):
    """Cuts GPUs into MIG instances, each for one model with several equal processes.

    1. Configurator: of every model the instance size, batch and number of processes with most throughput per GPC, of
       those whose batch takes less than 0.9 times half the SLO; as many such segments as the rate fills, and the
       smallest instance that carries the rest.
    2. Allocator: the largest segments first, each on the GPU that then has the fewest GPCs left.
    3. GPUs with at most 4 GPCs in use are dissolved into segments of 1 and 2 GPCs, which fill others.

    Needs GPUs that plans may cut (`mig: managed`), of one type, and profiles measured in instances.

    Options:
        processes: at most in one instance. The paper has three; the answers published with its code take up to five.
    """

    name = "parvagpu"
    summary = "MIG instances with equal processes of one model, largest first"
    source = "Lee et al., ParvaGPU, SC 2024 (arXiv 2409.14447), and its code"
    readings = "up to five processes, as its published answers; instances lie where MIG has a place for them"
    processes: int = option(5, minimum=1)

    def place(self, workload: Workload, cluster: Cluster, profiles: Profiles) -> Plan:
        """Return the plan; models that keep their SLO in no instance go unserved."""
        cluster, kind = cuttable(cluster, self.name)
        sizes = {size.gpcs: (name, size) for name, size in _sizes(kind)}
        example = next(gpu for gpu in cluster.gpus if gpu.type == kind)
        parts = Cluster.of(example.cut(name, size.starts[0]) for name, size in sizes.values())
        of_type = {part.type: size.gpcs for part, (_, size) in zip(parts.gpus, sizes.values(), strict=True)}
        services, reasons, context_mib = [], {}, context_mib_of(kind, profiles)
        for name, by_type in costs_of(workload, parts, profiles).items():
            spec = next(spec for spec in workload.models if spec.name == name)
            inside = {of_type[part]: on for part, on in by_type.items()}
            best = best_triplets(inside, self.processes, context_mib)
            if best:
                services.append(ModelToServe(name, spec.rate_rps, best))
            else:
                reasons[name] = (
                    f"no batch that fits takes less than 0.45 of its SLO of {spec.slo_ms:g} ms in any instance"
                )
        pool = GpuPool(cluster)
        allocator = Allocator({gpcs: size for gpcs, (_, size) in sizes.items()}, pool.left(kind))
        allocator.place([Segment(service, triplet) for service in services for triplet in service.segments()])
        allocator.dissolve()
        names = {gpcs: name for gpcs, (name, _) in sizes.items()}
        hosted = [each for cut in allocator.gpus for each in _hosted(cut, pool.take(kind), names, allocator.gpus)]
        several = any(segment.triplet.processes > 1 for cut in allocator.gpus for segment in cut.placed.values())
        return hosting_plan(self.name, workload, cluster, hosted, reasons, overcommits=several)


def cuttable(cluster: Cluster, policy: str) -> tuple[Cluster, str]:
    """Return the cluster with the GPUs whole that a policy may cut, and the first type of these.

    Raises:
        InvalidInputError: it has none.
    """
    cluster = cluster.uncut
    kind = next((gpu.type for gpu in cluster.gpus if gpu.mig == "managed"), None)
    if kind is None:
        cure = "Give mig: managed in the cluster file, or --gpus a100-80gb:4:mig; or take another policy."
        raise refused(
            "gpus", ", ".join(cluster.gpu_types), f"policy {policy} cuts GPUs, and may cut none of these", cure
        )
    return cluster, kind


def _sizes(kind: str) -> Iterable[tuple[str, InstanceProfile]]:
    """Yield, of each number of GPCs, the profile that takes the fewest memory slices."""
    by_size = sorted(instance_profiles(kind).items(), key=lambda item: (item[1].gpcs, -item[1].slices))
    return {size.gpcs: (name, size) for name, size in by_size}.values()


def _hosted(cut: CutGpu, gpu: Gpu | None, names: dict[int, str], every: Sequence[CutGpu]) -> Iterable[Hosted]:
    """Yield the gpu-lets of a GPU: the processes of its segments, each with its part of the model's rate."""
    for start, segment in sorted(cut.placed.items()):
        if gpu is None:
            return
        service, triplet = segment.service, segment.triplet
        total_rps = sum(
            other.triplet.throughput_rps for each in every for other in each.placed.values() if other.service is service
        )
        part = triplet.throughput_rps / triplet.processes / total_rps
        rate = min(service.rate_rps, total_rps) * part
        replica = Replica.believed(service.name, triplet.batch_size, rate, triplet.latency_ms)
        yield from [Hosted(gpu.cut(names[triplet.gpcs], start), None, [replica])] * triplet.processes
