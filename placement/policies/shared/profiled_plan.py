"""From replicas on GPUs to a plan, for the policies that plan with whole-GPU measurements (USHER and the MILPs)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tenuto.placement.cluster import Cluster, Gpu
from tenuto.placement.plan import Expected, ExpectedModel, Gpulet, Plan, PolicyUsed, Replica
from tenuto.placement.policies.shared.gpu_pool import gpulet_id, planned_gpus
from tenuto.placement.policies.shared.requirements import Requirement
from tenuto.placement.workload import Workload

__all__ = ["Hosted", "profiled_plan"]


@dataclass(frozen=True)
class Hosted:
    """A replica of a model on a GPU, with what it requires there."""

    model: str
    need: Requirement


def profiled_plan(
    policy: str, workload: Workload, cluster: Cluster, hosted: Sequence[tuple[Gpu, Sequence[Hosted]]],
    unserved: Mapping[str, str], notes: Sequence[str], *, shares: bool,
) -> Plan:
    """Return the plan: one gpu-let per replica, its latency as measured on the whole GPU.

    A model's rate is spread over its replicas in proportion to their throughput; its goodput is min(rate, sum of
    throughputs).

    Args:
        hosted: GPUs in the order of the plan with their replicas.
        shares: limit each gpu-let to its compute requirement; otherwise gpu-lets of a GPU compete freely, which is
        noted.
    """
    capacity = {spec.name: 0.0 for spec in workload.models}
    slowest: dict[str, float] = {}
    for _, replicas in hosted:
        for replica in replicas:
            capacity[replica.model] += replica.need.throughput_rps
            slowest[replica.model] = max(slowest.get(replica.model, 0.0), replica.need.latency_ms)
    rates = {spec.name: min(spec.rate_rps, capacity[spec.name]) for spec in workload.models}
    gpulets = [
        _gpulet(gpu, index, replica, rates[replica.model] / capacity[replica.model], shares)
        for gpu, replicas in hosted
        for index, replica in enumerate(replicas)
    ]
    remarks = list(notes)
    for spec in workload.models:
        if 0 < capacity[spec.name] < spec.rate_rps - 1e-6:
            carried = f"{capacity[spec.name]:.6g} of {spec.rate_rps:g} rps carried"
            remarks.append(f"{spec.name}: {carried}; no GPU has room for one more replica")
    competes = not shares and any(len(replicas) > 1 for _, replicas in hosted)
    if competes:
        remarks.append("over-commits shares on purpose: gpu-lets of one GPU are not limited and compete freely")
    models = {
        spec.name: ExpectedModel(goodput_rps=round(rates[spec.name], 6), latency_ms=round(slowest[spec.name], 6))
        for spec in workload.models
        if spec.name in slowest
    }
    goodput = round(sum(model.goodput_rps for model in models.values()), 6)
    names = [spec.name for spec in workload.models if spec.name not in slowest]
    return Plan(
        policy=PolicyUsed(name=policy),
        gpus=planned_gpus(cluster, (gpu for gpu, _ in hosted)),
        gpulets=tuple(gpulets),
        expected=Expected(goodput_rps=goodput, models=models),
        unserved=tuple(names),
        unserved_reasons={name: unserved.get(name, "no GPU has room for a replica") for name in names},
        notes=tuple(remarks),
        overcommits=competes,
    )


def _gpulet(gpu: Gpu, index: int, replica: Hosted, part: float, shares: bool) -> Gpulet:
    need = replica.need
    return Gpulet(
        id=gpulet_id(gpu.id, index),
        gpu=gpu.id,
        share_pct=need.compute_pct if shares else None,
        models=(
            Replica(name=replica.model, batch_size=need.batch_size, rate_rps=round(need.throughput_rps * part, 6),
                    latency_ms=round(need.latency_ms, 6), memory_mib=need.memory_mib, latency=need.latency),
        ),
    )
