"""Makes a plan of replicas on GPUs: the last step of every policy."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count

from tenuto.placement.cluster import Cluster, Gpu
from tenuto.placement.plan import Expected, ExpectedModel, Plan, PlannedGpu, PolicyUsed
from tenuto.placement.program import Gpulet, Replica, slowest_ms
from tenuto.placement.workload import Workload

CARRIED = 1e-6  # derived: relative shortfall below which a rate counts as carried


@dataclass(frozen=True)
class Hosted:
    """A gpu-let of a plan in the making. `share_pct` None: unrestricted; `duty_ms` as in `Gpulet.duty_cycle_ms`.

    Each replica's `rate_rps` and `latency_ms` are the policy's beliefs.
    """

    gpu: Gpu
    share_pct: float | None
    replicas: Sequence[Replica]
    duty_ms: float | None = None


def hosting_plan(
    policy: str,
    workload: Workload,
    cluster: Cluster,
    hosted: Iterable[Hosted],
    reasons: Mapping[str, str],
    notes: Sequence[str] = (),
    *,
    overcommits: bool = False,
) -> Plan:
    """Return the plan, gpu-lets in the order of the cluster's GPUs, bought ones last.

    The policy's belief of a model is the sum of its replicas' rates, and the latency of the slowest.

    Args:
        reasons: by model, why not all of its rate is carried, when that is not for lack of GPU time; reasons of carried
            models are dropped.
    """
    order = {gpu.id: index for index, gpu in enumerate(cluster.gpus)}
    counts: dict[str, int] = {}
    gpulets = []
    rates = dict.fromkeys((spec.name for spec in workload.models), 0.0)
    used = []
    for each in sorted(hosted, key=lambda each: order.get(each.gpu.id, order.get(each.gpu.device, len(order)))):
        index = counts.get(each.gpu.id, 0)
        counts[each.gpu.id] = index + 1
        used.append(each.gpu)
        gpulets.append(
            Gpulet(
                id=gpulet_id(each.gpu.id, index),
                gpu=each.gpu.id,
                share_pct=each.share_pct,
                duty_cycle_ms=each.duty_ms,
                models=tuple(each.replicas),
            )
        )
        for replica in each.replicas:
            rates[replica.name] += replica.rate_rps or 0.0
    slowest = slowest_ms(gpulets)
    missing = {spec.name for spec in workload.models if rates[spec.name] < spec.rate_rps * (1 - CARRIED)}
    models = {
        spec.name: ExpectedModel(
            goodput_rps=round(rates[spec.name], 6) if spec.name in missing else spec.rate_rps,
            latency_ms=slowest[spec.name],
        )
        for spec in workload.models
        if spec.name in slowest
    }
    return Plan(
        policy=PolicyUsed(name=policy),
        gpus=planned_gpus(cluster, used),
        gpulets=tuple(gpulets),
        expected=Expected(goodput_rps=round(sum(model.goodput_rps for model in models.values()), 6), models=models),
        unserved=tuple(spec.name for spec in workload.models if spec.name not in slowest),
        unserved_reasons={
            spec.name: reasons.get(spec.name, "no GPU time left") for spec in workload.models if spec.name in missing
        },
        notes=tuple(notes),
        overcommits=overcommits,
    )


def planned_gpus(cluster: Cluster, used: Iterable[Gpu]) -> tuple[PlannedGpu, ...]:
    """Return the plan's GPUs: all of a fixed cluster, as idle ones are part of the answer; the used ones of an elastic
    one."""
    gpus: Iterable[Gpu] = used
    if not cluster.elastic:
        gpus = cluster.cut_as(used).gpus
    unique = {gpu.id: PlannedGpu.of(gpu) for gpu in gpus}
    return tuple(unique.values())


def gpulet_id(gpu_id: str, index: int) -> str:
    """Return the id of the index-th gpu-let of a GPU: a, b, …, z, aa, ab, …"""
    letters = ""
    index += 1
    while index:
        index, rest = divmod(index - 1, 26)
        letters = chr(ord("a") + rest) + letters
    return f"{gpu_id}/{letters}"


def free_gpulet_id(gpu_id: str, taken: Collection[str]) -> str:
    """Return the first id on a GPU that no gpu-let has yet."""
    return next(name for index in count() if (name := gpulet_id(gpu_id, index)) not in taken)
