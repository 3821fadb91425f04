"""Standby processes are loaded and idle, so that they need no start. There are two kinds:

*Larger ones* (iGniter, sections 4.2 and 5.3): a second process beside a gpu-let, with as much more share as the GPU has
free. When the gpu-let turns out too slow, its larger one takes over.
*Twins*: a copy of a gpu-let on an empty GPU. When a GPU is lost or models outgrow the plan, the twin joins.

An idle process takes memory and no share. Those on one GPU may all count on the same free part: once one takes over,
the others are out of date.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from tenuto.errors import InvalidInputError
from tenuto.placement.cluster import Gpu
from tenuto.placement.expectation.outlook import Outlooks, Traffic
from tenuto.placement.placement_constraints import is_at
from tenuto.placement.plan import Plan, PlannedGpu
from tenuto.placement.plan_edits import on_gpus
from tenuto.placement.planner.batch_growth import with_latency
from tenuto.placement.planner.change_stages import fits
from tenuto.placement.planner.gpu_matching import fresh_id
from tenuto.placement.program import Gpulet, total_mib
from tenuto.placement.workload import profile_of
from tenuto.profiles import Profiles

LEAST_PCT = 1.0  # derived: CUDA MPS counts shares in whole percent


@dataclass(frozen=True)
class Standby:
    """An idle process for the gpu-let `of`, which it replaces, or joins as its twin."""

    of: str
    gpulet: Gpulet
    is_twin: bool = False


def standbys(
    plan: Plan, more_pct: float, profiles: Profiles, gpus: Sequence[Gpu], running: Plan
) -> tuple[Standby, ...]:
    """Return the larger standby process of every gpu-let that can have one.

    A gpu-let has none when its GPU is full (share or memory), it holds a joint program, or no larger share of its
    models was profiled.

    Args:
        plan: the plan to run.
        more_pct: most additional share of a GPU.
        profiles: what models take with more share.
        gpus: with their memory.
        running: the running plan, whose ids are taken.
    """
    known = {gpu.id: gpu for gpu in gpus}
    taken = {gpulet.id for gpulet in (*plan.gpulets, *running.gpulets)}
    waiting: list[Standby] = []
    for gpu_id, gpulets in plan.by_gpu().items():
        gpu = known.get(gpu_id)
        if gpu is None:
            continue
        free_pct = 100.0 - sum(gpulet.effective_share_pct for gpulet in gpulets)
        free_mib = gpu.memory_mib - total_mib(gpulets)
        for gpulet in gpulets:
            larger = _larger(gpulet, min(more_pct, free_pct), plan, profiles, gpu.type)
            if larger is None or larger.needs_mib > free_mib + 1e-6:
                continue
            free_mib -= larger.needs_mib
            waiting.append(Standby(gpulet.id, larger.model_copy(update={"id": fresh_id(gpu_id, taken)})))
    return tuple(waiting)


def twins(plan: Plan, count: int, gpus: Sequence[Gpu], running: Plan) -> tuple[Standby, ...]:
    """Return a twin for every gpu-let of a plan that lies on one GPU, on at most `count` GPUs of its type that neither
    plan uses, as far as memory goes."""
    used = {*plan.used_gpus, *running.used_gpus}
    free_mib = {gpu.id: gpu.memory_mib for gpu in [gpu for gpu in gpus if gpu.id not in used][:count]}
    types = {gpu.id: gpu.type for gpu in gpus} | {gpu.id: gpu.type for gpu in plan.gpus}
    taken: set[str] = set()
    copies = []
    for gpulet in (each for each in plan.gpulets if not each.also_on):
        room = [
            name
            for name, mib in free_mib.items()
            if types[name] == types[gpulet.gpu] and gpulet.needs_mib <= mib + 1e-6
        ]
        if room:
            free_mib[room[0]] -= gpulet.needs_mib
            twin = gpulet.model_copy(update={"id": fresh_id(room[0], taken), "gpu": room[0]})
            copies.append(Standby(gpulet.id, twin, is_twin=True))
    return tuple(copies)


def still_fitting(waiting: Sequence[Standby], plan: Plan, gpus: Sequence[Gpu]) -> tuple[Standby, ...]:
    """Return the standby processes that can wait beside another plan: it keeps their gpu-let, has the memory free, and
    their GPU is present and not drained."""
    if not waiting:
        return ()
    planned = {gpulet.id for gpulet in plan.gpulets}
    usable = [gpu for gpu in gpus if not is_at(gpu, plan.drained)]
    free_mib = {gpu.id: gpu.memory_mib - total_mib(plan.on_gpu(gpu.id)) for gpu in usable}
    fitting = []
    for standby in waiting:
        gpulet = standby.gpulet
        left_mib = free_mib.get(gpulet.gpu, -1.0) - gpulet.needs_mib
        if standby.of in planned and gpulet.id not in planned and left_mib >= -1e-6:
            free_mib[gpulet.gpu] = left_mib
            fitting.append(standby)
    return tuple(fitting)


def _larger(gpulet: Gpulet, more_pct: float, plan: Plan, profiles: Profiles, gpu_type: str) -> Gpulet | None:
    if gpulet.share_pct is None or gpulet.joint_models or more_pct < LEAST_PCT:
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
        models.append(with_latency(replica, before, after, replica.batch_size))
    return gpulet.model_copy(update={"share_pct": share_pct, "models": tuple(models)})


def taken_over(
    plan: Plan,
    waiting: Sequence[Standby],
    ready: Collection[str],
    short: set[str],
    traffic: Traffic,
    slowdowns: Mapping[str, float],
    gpus: Sequence[Gpu],
) -> Plan | None:
    """Return the running plan on the present GPUs with ready standby processes in use for models that are short. Take
    the first way that carries everything, else the one that eases most; None when none eases anything."""
    running = on_gpus(plan, gpus)
    hosts = {gpulet.id for gpulet in plan.gpulets if any(replica.name in short for replica in gpulet.models)}
    able = [standby for standby in waiting if standby.gpulet.id in ready and standby.of in hosts]
    outlooks = Outlooks(slowdowns)

    def judged(target: Plan) -> tuple[float, float]:
        """Return a plan's requests per second in time for the models that are short, and its load."""
        outlook = outlooks.of(target, traffic)
        in_time_rps = sum(outlook.parts.get(name, 0.0) * traffic.mean_rps.get(name, 0.0) for name in short)
        return in_time_rps, outlook.load

    in_time_rps, load = judged(running)
    best: tuple[float, float, Plan] | None = None
    for target in _ways(running, able, gpus):
        in_time_after, load_after = judged(target)
        eases = in_time_after > 1.001 * in_time_rps or load_after < load - 1e-3  # derived: above the noise of promises
        if eases and (best is None or (-in_time_after, load_after) < best[:2]):
            best = -in_time_after, load_after, target
    return None if best is None else best[2]


def _ways(plan: Plan, able: Sequence[Standby], gpus: Sequence[Gpu]) -> Iterator[Plan]:
    """Yield what could run: with larger ones, one on each GPU; with twins; with both."""
    larger = {standby.gpulet.gpu: standby for standby in reversed(able) if not standby.is_twin}
    instead = {standby.of: standby.gpulet for standby in larger.values()}
    sizes = {gpu.id: gpu for gpu in gpus}
    joining: dict[str, list[Gpulet]] = {}
    for standby in able:
        gpulet = standby.gpulet
        on_gpu = joining.setdefault(gpulet.gpu, list(plan.on_gpu(gpulet.gpu)))
        if standby.is_twin and gpulet.gpu in sizes and fits([*on_gpu, gpulet], sizes[gpulet.gpu]):
            on_gpu.append(gpulet)
    known = {gpulet.id for gpulet in plan.gpulets}
    twins = [gpulet for on_gpu in joining.values() for gpulet in on_gpu if gpulet.id not in known]
    for others, more in ((instead, []), ({}, twins), (instead, twins)):
        if others or more:
            yield plan.model_copy(
                update={
                    "gpus": (
                        *plan.gpus,
                        *(
                            PlannedGpu.of(sizes[name])
                            for name in dict.fromkeys(g.gpu for g in more)
                            if name not in {gpu.id for gpu in plan.gpus}
                        ),
                    ),
                    "gpulets": (*(others.get(gpulet.id, gpulet) for gpulet in plan.gpulets), *more),
                }
            )
