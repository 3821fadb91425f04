"""Standby processes (iGniter, sections 4.2 and 5.3): beside a gpu-let a second process on its GPU, loaded and idle,
with as much more of the share as the GPU has free. Where the gpu-let turns out too slow, it takes over without a start.

An idle process takes memory and no share: those of one GPU may each count on the same free part, as one that takes over
makes the others out of date.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from tenuto.deployments.control.capacity import Capacity, Demand
from tenuto.deployments.control.fit import fresh_id
from tenuto.deployments.control.steps import needed_mib
from tenuto.errors import InvalidInputError
from tenuto.placement import Gpulet, Plan
from tenuto.placement.cluster import Gpu
from tenuto.placement.costs import latency_up_to
from tenuto.placement.workload import profile_of
from tenuto.profiles import Profiles

__all__ = ["standbys", "taken_over"]

LEAST_PCT = 1.0  # CUDA MPS counts shares in whole percent


def standbys(
    plan: Plan, more_pct: float, profiles: Profiles, gpus: Sequence[Gpu], running: Plan
) -> dict[str, Gpulet]:
    """Return the standby process of every gpu-let of a plan that can have one, by the gpu-let's id.

    Left without are those on a full GPU, in share or memory, those that hold merged programs, and those whose models
    were not profiled at any larger share.

    Args:
        plan: that is to run.
        more_pct: of a GPU, what each gets more at most.
        profiles: that say what models take with more.
        gpus: with their memory.
        running: whose gpu-lets keep their ids to themselves.
    """
    known = {gpu.id: gpu for gpu in gpus}
    taken = {gpulet.id for gpulet in (*plan.gpulets, *running.gpulets)}
    found: dict[str, Gpulet] = {}
    for gpu_id, gpulets in plan.by_gpu().items():
        gpu = known.get(gpu_id)
        if gpu is None:
            continue
        free_pct = 100.0 - sum(gpulet.effective_share_pct for gpulet in gpulets)
        free_mib = gpu.memory_mib - sum(map(needed_mib, gpulets))
        for gpulet in gpulets:
            larger = _larger(gpulet, min(more_pct, free_pct), plan, profiles, gpu.type)
            if larger is None or needed_mib(larger) > free_mib + 1e-6:
                continue
            free_mib -= needed_mib(larger)
            name = fresh_id(gpu_id, taken)
            taken.add(name)
            found[gpulet.id] = larger.model_copy(update={"id": name})
    return found


def _larger(gpulet: Gpulet, more_pct: float, plan: Plan, profiles: Profiles, gpu_type: str) -> Gpulet | None:
    if gpulet.share_pct is None or gpulet.merge or more_pct < LEAST_PCT:
        return None
    share_pct = gpulet.share_pct + float(int(more_pct))
    models = []
    for replica in gpulet.models:
        try:
            model = profile_of(plan.model(replica.name), gpu_type, profiles)
            before, after = model.latency(gpulet.share_pct), model.latency(share_pct)
        except InvalidInputError:
            return None
        if replica.latency is None:
            return None
        size = replica.batch_size
        # The plan's own latency may hold more than the profile's; what more share saves is the profile's to tell.
        ratio = replica.latency.at(size) / before.at(size)
        curve = latency_up_to(after, size).scaled(ratio)
        models.append(
            replica.model_copy(
                update={"latency": curve, "latency_ms": round(curve.at(size) * replica.slowdown, 6)}
            )
        )
    return gpulet.model_copy(update={"share_pct": share_pct, "models": tuple(models)})


def taken_over(
    plan: Plan, standby: Mapping[str, Gpulet], ready: Collection[str], losing: Collection[str], demand: Demand,
    slowdowns: Mapping[str, float],
) -> Plan | None:
    """Return the plan in which standby processes that are ready have taken over from gpu-lets of the models that lose
    requests, one on each GPU; None where that would relieve nothing."""
    changed: dict[str, Gpulet] = {}
    gpus: set[str] = set()
    for gpulet in plan.gpulets:
        other = standby.get(gpulet.id)
        is_asked = any(replica.name in losing for replica in gpulet.models)
        if other is not None and other.id in ready and is_asked and gpulet.gpu not in gpus:
            changed[gpulet.id] = other
            gpus.add(gpulet.gpu)
    if not changed:
        return None
    target = plan.model_copy(update={"gpulets": tuple(changed.get(g.id, g) for g in plan.gpulets)})
    before = Capacity(plan, slowdowns=slowdowns).carried(demand)
    after = Capacity(target, slowdowns=slowdowns).carried(demand)
    is_faster = any(after[name] > 1.001 * before[name] for name in losing if name in after)
    return target if is_faster or _eases(plan, target, demand, slowdowns) else None


def _eases(plan: Plan, target: Plan, demand: Demand, slowdowns: Mapping[str, float]) -> bool:
    return Capacity(target, slowdowns=slowdowns).load(demand) < Capacity(plan, slowdowns=slowdowns).load(demand) - 1e-3
