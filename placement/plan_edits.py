"""Plans with other gpu-lets or other models than before."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tenuto.placement.cluster import Cluster, Placed
from tenuto.placement.placement_constraints import is_at
from tenuto.placement.plan import Plan, PlannedGpu
from tenuto.placement.program import Gpulet
from tenuto.placement.workload import ModelSpec, Workload


def with_gpulets(plan: Plan, gpulets: Iterable[Gpulet]) -> Plan:
    """Return the plan with other gpu-lets; models that none of them holds are unserved."""
    gpulets = tuple(gpulets)
    held = {replica.name for gpulet in gpulets for replica in gpulet.models}
    unserved = tuple(spec.name for spec in plan.models if spec.name not in held)
    reasons = dict.fromkeys(unserved, "no room was found for it")
    return plan.model_copy(update={"gpulets": gpulets, "unserved": unserved, "unserved_reasons": reasons})


def on_gpus(plan: Plan, gpus: Iterable[Placed]) -> Plan:
    """Return the plan with those gpu-lets only that lie on these GPUs alone."""
    ids = {gpu.id for gpu in gpus}
    return plan.model_copy(update={"gpulets": tuple(g for g in plan.gpulets if ids.issuperset(g.gpus))})


def for_workload(plan: Plan, workload: Workload) -> Plan:
    """Return the plan with the workload's entries; models that are not in it are gone from the gpu-lets."""
    names = {spec.name for spec in workload.models}
    left = (gpulet.only(names) for gpulet in plan.gpulets)
    plan = plan.model_copy(update={"models": workload.models})
    return with_gpulets(plan, (gpulet for gpulet in left if gpulet is not None))


def without_others(plan: Plan, workload: Workload) -> Plan:
    """Return the plan without models outside the workload, with requests split among versions as the workload says."""
    specs = {spec.name: spec for spec in workload.models}
    models = tuple(
        spec.model_copy(update={"share_pct": specs[spec.name].share_pct, "shadow": specs[spec.name].shadow})
        for spec in plan.models
        if spec.name in specs
    )
    if models == plan.models:
        return plan
    return for_workload(plan, plan.workload.model_copy(update={"models": models}))


def with_idle(plan: Plan, idle: Sequence[ModelSpec], start_s: float) -> Plan:
    """Return the plan with models that nobody asks: no gpu-let holds them, and they are back `start_s` after somebody
    asks again. Only these are idle in the new plan."""
    names = {spec.name for spec in idle}
    others = {spec.name for spec in plan.models} - names
    if not names and not plan.idle:
        return plan
    left = (gpulet.only(others) for gpulet in plan.gpulets)
    reasons = {name: why for name, why in plan.unserved_reasons.items() if name not in plan.idle.keys() | names}
    update = {
        "models": (*(spec for spec in plan.models if spec.name in others), *idle),
        "gpulets": tuple(gpulet for gpulet in left if gpulet is not None),
        "unserved": (*(name for name in plan.unserved if name in others - plan.idle.keys()), *sorted(names)),
        "unserved_reasons": reasons | dict.fromkeys(sorted(names), "nobody has asked it lately"),
        "idle": dict.fromkeys(sorted(names), round(start_s, 1)),
    }
    return plan.model_copy(update=update)


def with_the_rest(plan: Plan, workload: Workload) -> Plan:
    """Return a plan that was made for the `bearable` part of a workload as one for all of it. The other models are
    unserved."""
    made_for = {spec.name for spec in plan.models}
    rest = tuple(spec.name for spec in workload.models if spec.name not in made_for)
    reasons = plan.unserved_reasons | dict.fromkeys(rest, "no GPU that it may be on is left")
    update = {"models": workload.models, "unserved": (*plan.unserved, *rest), "unserved_reasons": reasons}
    return plan.model_copy(update=update)


def drained(plan: Plan, cluster: Cluster, places: Sequence[str]) -> Plan:
    """Return a plan that was made without some places of a cluster, with their names and their GPUs added."""
    known = {gpu.id for gpu in plan.gpus}
    aside = tuple(PlannedGpu.of(gpu) for gpu in cluster.gpus if is_at(gpu, places) and gpu.id not in known)
    return plan.model_copy(update={"gpus": (*plan.gpus, *aside), "drained": tuple(places)})
