"""ParvaGPU: equal processes of one model in MIG instances of the size that serves it best."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from tenuto.errors import refused
from tenuto.options import option
from tenuto.placement.cluster import Cluster, Gpu
from tenuto.placement.plan import Plan
from tenuto.placement.policies.parvagpu.allocation import Allocator, CutGpu
from tenuto.placement.policies.parvagpu.segments import Service
from tenuto.placement.policies.shared.mig_cutting import CuttableGpus, FilledInstance, cuttable_kinds
from tenuto.placement.policy import Policy
from tenuto.placement.workload import Workload
from tenuto.profiles import Profiles


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
        """Return the plan; models that keep their SLO in no instance go unserved.

        Raises:
            InvalidInputError: the cluster has no GPU that plans may cut.
        """
        kinds = cuttable_kinds(cluster)
        if not kinds:
            cure = "Give mig: managed in the cluster file, or --gpus a100-80gb:4:mig; or take another policy."
            rule = f"policy {self.name} cuts GPUs, and may cut none of these"
            raise refused("gpus", ", ".join(cluster.gpu_types), rule, cure)
        gpus = CuttableGpus(kinds[0], workload, cluster, profiles)
        by_slices = sorted(gpus.sizes.items(), key=lambda item: (item[1].gpcs, -item[1].slices))
        sizes = {size.gpcs: name for name, size in by_slices}  # of each number of GPCs, the one with the fewest slices
        services = {model.spec.name: Service.of(model, sizes, self.processes) for model in gpus.models}
        reasons = {
            spec.name: f"no batch that fits takes less than 0.45 of its SLO of {spec.slo_ms:g} ms in any instance"
            for spec in workload.models
            if not services[spec.name].best
        }
        pool = gpus.pool
        allocator = Allocator({gpcs: gpus.sizes[name] for gpcs, name in sizes.items()}, pool.left(gpus.kind))
        allocator.place([segment for each in services.values() if each.best for segment in each.segments()])
        allocator.dissolve(services)
        total_rps = dict.fromkeys(services, 0.0)
        for cut in allocator.gpus:
            for segment in cut.placed.values():
                total_rps[segment.model] += segment.throughput_rps
        carried = {name: min(1.0, services[name].rate_rps / total) for name, total in total_rps.items() if total}

        def filled() -> Iterator[tuple[Gpu, Iterator[tuple[int, FilledInstance]]]]:
            for cut in allocator.gpus:
                gpu = pool.next_gpu(gpus.kind)
                if gpu is not None:
                    yield gpu, _filled(cut, sizes, carried)

        return gpus.plan(self.name, filled(), reasons)


def _filled(
    cut: CutGpu, sizes: Mapping[int, str], carried: Mapping[str, float]
) -> Iterator[tuple[int, FilledInstance]]:
    """Yield the instances of a GPU by their starts. Of a segment's throughput its part of the model's rate is used."""
    for start, segment in sorted(cut.placed.items()):
        rate_rps = carried[segment.model] * segment.throughput_rps
        yield start, FilledInstance(sizes[segment.gpcs], {segment.model: rate_rps}, {segment.model: segment.way})
