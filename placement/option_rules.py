"""Whether models can be run as their options say, where they are placed: found when planning, not when a gpu-let loads.

Only the options of how a model is run are judged; all others are those of its network or of a user's factory.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from tenuto.errors import Problem
from tenuto.profiles.networks.run_options import run_option_problems, unmergeable_options

if TYPE_CHECKING:
    from tenuto.placement.cluster import Cluster
    from tenuto.placement.plan import Plan
    from tenuto.placement.workload import ModelSpec, Workload

__all__ = ["plan_option_problems", "why_unmergeable", "workload_option_problems"]


def workload_option_problems(workload: Workload, cluster: Cluster) -> list[Problem]:
    """Return what is wrong with the options of all models, wherever a policy may put them: wrong values,
    contradictions, CUDA graphs where there are only CPUs, and options that the groups asked for refuse."""
    cpu_only = bool(cluster.gpu_types) and all(kind == "cpu" for kind in cluster.gpu_types)
    groups = workload.merge if isinstance(workload.merge, tuple) else ()
    on_cpu = {spec.name for spec in workload.models} if cpu_only else set[str]()
    return _problems(workload.models, groups, on_cpu, "")


def plan_option_problems(plan: Plan, origin: str) -> list[Problem]:
    """Return what is wrong with the options of a plan's models on the gpu-lets that hold them; paths begin with
    `origin`."""
    if not any(spec.options for spec in plan.models):
        return []
    cpus = {gpu.id for gpu in plan.gpus if gpu.type == "cpu"}
    on_cpu = {replica.name for gpulet in plan.gpulets if gpulet.gpu in cpus for replica in gpulet.models}
    groups = dict.fromkeys(group.models for gpulet in plan.gpulets for group in gpulet.merge)
    return _problems(plan.models, groups, on_cpu, f"{origin}: ")


def why_unmergeable(models: Iterable[ModelSpec]) -> str | None:
    """Return why models cannot be merged as they are run, or None."""
    refused = [(spec.name, key, value) for spec in models for key, value in unmergeable_options(spec.options).items()]
    if not refused:
        return None
    return f"a merged program knows no {', no '.join(f'`{key}: {value}` of {name}' for name, key, value in refused)}"


def _problems(
    models: Sequence[ModelSpec], groups: Iterable[Sequence[str]], on_cpu: set[str], prefix: str
) -> list[Problem]:
    group_of: Mapping[str, Sequence[str]] = {name: group for group in groups for name in group}
    found: list[Problem] = []
    for index, spec in enumerate(models):
        path = f"{prefix}models.{index}.options"
        found += run_option_problems(spec.options, path, on_cpu=spec.name in on_cpu)
        if spec.name in group_of:
            rule = f"is not possible for a model that is merged ({'+'.join(sorted(group_of[spec.name]))})"
            cure = "Remove it, or the group from `merge`: the models are then served one by one."
            found += [Problem(f"{path}.{k}", v, rule, cure) for k, v in unmergeable_options(spec.options).items()]
    return found
