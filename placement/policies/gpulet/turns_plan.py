"""From gpu-lets in which models take turns to a plan: shared by gpulet, SBP and the ideal placement."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tenuto.placement.cluster import Cluster, Gpu
from tenuto.placement.plan import Expected, ExpectedModel, Gpulet, Plan, PolicyUsed, Replica
from tenuto.placement.policies.gpulet.share_costs import WHOLE_GPU, ShareCosts
from tenuto.placement.policies.shared.gpu_pool import gpulet_id, planned_gpus
from tenuto.placement.workload import Workload

__all__ = ["Turn", "TurnsGpulet", "turns_plan"]

CARRIED = 1e-6  # relative shortfall below which a rate counts as carried


@dataclass(frozen=True)
class Turn:
    """A model's turn in a gpu-let: the batch it runs once per duty cycle and the rate that is routed there."""

    costs: ShareCosts
    batch_size: int
    rate_rps: float
    slowdown: float = 1.0

    def latency_ms(self, share_pct: float) -> float:
        """Return what the batch takes on a share, neighbours included."""
        return self.costs.latency_ms[share_pct][self.batch_size] * self.slowdown


@dataclass(frozen=True)
class TurnsGpulet:
    """A share of a GPU, its duty cycle (None: batches run when they are due) and the turns taken in it."""

    gpu: Gpu
    share_pct: float
    duty_ms: float | None
    turns: Sequence[Turn]


def turns_plan(
    policy: str,
    workload: Workload,
    cluster: Cluster,
    gpulets: Sequence[TurnsGpulet],
    unserved: Mapping[str, str],
    notes: Sequence[str] = (),
) -> Plan:
    """Return the plan. Models whose rate is carried in part are named in the notes, those without a turn in
    `unserved`."""
    order = {gpu.id: index for index, gpu in enumerate(cluster.gpus)}
    counts: dict[str, int] = {}
    planned = []
    for gpulet in sorted(gpulets, key=lambda g: order.get(g.gpu.id, len(order))):
        index = counts.get(gpulet.gpu.id, 0)
        counts[gpulet.gpu.id] = index + 1
        planned.append(_gpulet(gpulet, index))
    rates = {spec.name: 0.0 for spec in workload.models}
    slowest: dict[str, float] = {}
    for done in planned:
        for replica in done.models:
            rates[replica.name] += replica.rate_rps or 0.0
            slowest[replica.name] = max(slowest.get(replica.name, 0.0), replica.latency_ms or 0.0)
    remarks = list(notes)
    for spec in workload.models:
        if spec.name in slowest and rates[spec.name] < spec.rate_rps * (1 - CARRIED):
            carried = f"{rates[spec.name]:.6g} of {spec.rate_rps:g} rps carried"
            remarks.append(f"{spec.name}: {carried}; no room for the rest")
    models = {
        spec.name: ExpectedModel(
            goodput_rps=round(min(spec.rate_rps, rates[spec.name]), 6), latency_ms=slowest[spec.name]
        )
        for spec in workload.models
        if spec.name in slowest
    }
    names = tuple(spec.name for spec in workload.models if spec.name not in slowest)
    return Plan(
        policy=PolicyUsed(name=policy),
        gpus=planned_gpus(cluster, (gpulet.gpu for gpulet in gpulets)),
        gpulets=tuple(planned),
        expected=Expected(goodput_rps=round(sum(m.goodput_rps for m in models.values()), 6), models=models),
        unserved=names,
        unserved_reasons={name: unserved.get(name, "no gpu-let has room for it") for name in names},
        notes=tuple(remarks),
    )


def _gpulet(gpulet: TurnsGpulet, index: int) -> Gpulet:
    share = gpulet.share_pct
    replicas = tuple(
        Replica(
            name=turn.costs.spec.name,
            batch_size=turn.batch_size,
            rate_rps=round(turn.rate_rps, 6),
            latency_ms=round(turn.latency_ms(share), 6),
            slowdown=max(1.0, round(turn.slowdown, 6)),
            memory_mib=turn.costs.memory_mib(turn.batch_size, share) or None,
            latency=turn.costs.curve(share, turn.batch_size),
        )
        for turn in gpulet.turns
    )
    return Gpulet(
        id=gpulet_id(gpulet.gpu.id, index),
        gpu=gpulet.gpu.id,
        share_pct=None if share >= WHOLE_GPU else share,
        duty_cycle_ms=None if gpulet.duty_ms is None else round(gpulet.duty_ms, 6),
        models=replicas,
    )
