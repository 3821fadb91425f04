"""Validation of plans by the rules that hold for every one: ids and names that exist, models that can run as one
program, and options that work where models are placed.

They need only the plan. `tenuto.placement.planner.completion` checks what also needs the cluster.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

from tenuto.errors import Problem, one_of
from tenuto.placement.cluster import Placed, first_overlap, node_of
from tenuto.placement.merged_groups import group_problems, member_option_problems
from tenuto.placement.program import Gpulet, fits_memory, total_mib
from tenuto.placement.workload import ModelSpec
from tenuto.profiles import LatencyTable, ModelProfile
from tenuto.profiles.gpu_types import FAST_CAPABILITY, GPU_TYPES, capability_of_type
from tenuto.profiles.mig_instances import instance_profiles, instance_type_of, mig_types
from tenuto.profiles.networks.model_options import run_differences, run_option_problems


def plan_problems(
    gpu_types: Mapping[str, str], gpulets: Sequence[Gpulet], models: Sequence[ModelSpec], origin: str
) -> list[Problem]:
    """Return everything that is wrong with the gpu-lets of a plan.

    Args:
        gpu_types: the plan's GPUs with their types.
        gpulets: the plan's.
        models: the workload's entries in the plan.
        origin: what the paths of problems begin with.
    """
    on_cpu = {r.name for g in gpulets if "cpu" in map(gpu_types.get, g.gpus) for r in g.models}
    groups = dict.fromkeys(models for gpulet in gpulets for models in gpulet.joint_models)
    return [
        *_reference_problems(gpu_types, gpulets, origin),
        *_together_problems(gpu_types, gpulets, origin),
        *_replica_problems(gpulets, models, origin),
        *group_problems(gpulets, models, origin),
        *option_problems(models, groups, on_cpu, f"{origin}: "),
    ]


def layout_problems(gpus: Sequence[Placed], origin: str) -> list[Problem]:
    """Return what is wrong with a plan's MIG instances: types without such an instance, instances on the same memory
    slices, and GPUs that are whole and cut at once. The paths of problems begin with `origin`."""
    problems: list[Problem] = []
    on: dict[str, list[tuple[str, int, int]]] = {}
    for gpu in gpus:
        place, kind = gpu.instance, gpu.type
        if place is None:
            continue
        where, mig = f"{origin}: gpus.{gpu.id}", gpu.cut_as
        known = {} if mig is None else instance_profiles(mig.base)
        if mig is None:
            rule, cure = "has a place on a GPU, but its type is no MIG instance", "Write a type such as a100-3g.20gb."
            problems.append(Problem(f"{where}.type", kind, rule, cure))
        elif mig.base in GPU_TYPES and not known:
            cure = f"Place its gpu-lets on the whole GPU. Types with MIG: {', '.join(mig_types())}."
            problems.append(Problem(f"{where}.type", kind, f"GPU type '{mig.base}' has no MIG", cure))
        elif known and mig.profile not in known:
            problems.append(Problem(f"{where}.type", kind, "no such MIG profile", one_of(mig.profile, known)))
        elif known and place.gpu_uuid is None and place.start not in (starts := known[mig.profile].starts):
            rule = f"a {mig.profile} cannot begin at memory slice {place.start}"
            problems.append(Problem(where, place.start, rule, f"It begins at {', '.join(map(str, starts))}."))
        on.setdefault(place.gpu, []).append((gpu.id, place.start, place.slices))
    for gpu in gpus:
        if gpu.instance is None and gpu.id in on:
            rule, cure = "is whole and cut into MIG instances at once", "Keep the GPU, or its instances."
            problems.append(Problem(f"{origin}: gpus", gpu.id, rule, cure))
    for name, placed in on.items():
        overlap = first_overlap(placed)
        if overlap is not None:
            cure = "Begin one of them elsewhere, or remove it."
            problems.append(Problem(f"{origin}: gpus.{name}", overlap, "take the same memory slices", cure))
    return problems


def _reference_problems(gpu_types: Mapping[str, str], gpulets: Sequence[Gpulet], origin: str) -> list[Problem]:
    """Return gpu-lets on unknown GPUs or with ids used twice, and models that appear twice on one gpu-let."""
    problems: list[Problem] = []
    seen: set[str] = set()
    for index, gpulet in enumerate(gpulets):
        where = f"{origin}: gpulets.{index}"
        for key, gpu in (("gpu", gpulet.gpu), *(("also_on", gpu) for gpu in gpulet.also_on)):
            if gpu not in gpu_types:
                inside = sorted(name for name in gpu_types if name.startswith(f"{gpu}."))
                cure = (
                    f"It is cut into MIG instances: {', '.join(inside)}." if inside else one_of(gpu, sorted(gpu_types))
                )
                problems.append(Problem(f"{where}.{key}", gpu, "no such GPU in the plan", cure))
        if gpulet.id in seen:
            problems.append(Problem(f"{where}.id", gpulet.id, "id is used twice", "Give each gpu-let its own id."))
        seen.add(gpulet.id)
        for name, count in sorted(Counter(replica.name for replica in gpulet.models).items()):
            if count > 1:
                cure = "Keep one entry; its batch size is the largest batch."
                problems.append(Problem(f"{where}.models", name, "model appears twice on one gpu-let", cure))
    return problems


def _together_problems(gpu_types: Mapping[str, str], gpulets: Sequence[Gpulet], origin: str) -> list[Problem]:
    """Return what is wrong with gpu-lets on several GPUs: these are whole GPUs of one node and one type, each named
    once, and hold one model that generates."""
    faults: list[Problem] = []
    for index, gpulet in enumerate(gpulets):
        if not gpulet.also_on:
            continue
        where, given = f"{origin}: gpulets.{index}.also_on", ", ".join(gpulet.also_on)
        kinds = {gpu_types[gpu] for gpu in gpulet.gpus if gpu in gpu_types}
        if len({node_of(gpu) for gpu in gpulet.gpus}) > 1:
            cure = "Name GPUs of the node of its first GPU."
            faults.append(Problem(where, given, "GPUs of several nodes cannot run one model together", cure))
        if len(kinds) > 1:
            cure = f"Name GPUs of the type of its first one, {gpu_types[gpulet.gpu]}."
            faults.append(Problem(where, given, "GPUs of several types cannot run one model together", cure))
        if any(instance_type_of(kind) is not None or kind == "cpu" for kind in kinds):
            rule, cure = "only whole GPUs run a model together", "Leave `also_on` out, or name whole GPUs."
            faults.append(Problem(where, given, rule, cure))
        if len(set(gpulet.gpus)) < len(gpulet.gpus):
            faults.append(Problem(where, given, "names a GPU twice", "Name each GPU once, and not its `gpu` again."))
        if len(gpulet.models) != 1 or any(replica.steps is None for replica in gpulet.models):
            rule = "only a model that generates, alone in its gpu-let, runs on several GPUs together"
            faults.append(Problem(where, given, rule, "Leave `also_on` out, or give the model a gpu-let with `steps`."))
    return faults


def _replica_problems(gpulets: Sequence[Gpulet], models: Sequence[ModelSpec], origin: str) -> list[Problem]:
    """Return batches larger than their latency knows, and steps of models that do not generate."""
    fixed = {spec.name for spec in models if spec.generates is None}
    problems: list[Problem] = []
    for index, gpulet in enumerate(gpulets):
        for place, replica in enumerate(gpulet.models):
            where, latency = f"{origin}: gpulets.{index}.models.{place}", replica.latency
            if isinstance(latency, LatencyTable) and replica.batch_size > latency.largest:
                rule = f"above the largest batch of its latency ({latency.largest})"
                cure = "Lower it, or plan again with a profile of larger batches."
                problems.append(Problem(f"{where}.batch_size", replica.batch_size, rule, cure))
            if replica.steps is not None and replica.name in fixed:
                cure = "Remove `steps`, or say under `models` what it `generates`."
                problems.append(Problem(f"{where}.steps", replica.name, "is of a model that does not generate", cure))
    return problems


def room_problems(
    by_gpu: Mapping[str, Sequence[Gpulet]],
    memory_mib: Mapping[str, float | None],
    *,
    overcommits: bool,
    unrestricted_pct: float,
    origin: str = "",
) -> list[Problem]:
    """Return GPUs with less memory or a smaller share than their gpu-lets have.

    Args:
        by_gpu: the gpu-lets of each GPU.
        memory_mib: of each GPU; None where it is not known.
        overcommits: whether shares may add up to more than 100 %.
        unrestricted_pct: what a gpu-let without a share counts.
        origin: what the paths of problems begin with.
    """
    problems: list[Problem] = []
    for gpu, gpulets in by_gpu.items():
        where, mib = f"{origin}: gpus.{gpu}".removeprefix(": "), memory_mib.get(gpu)
        share = sum(unrestricted_pct if g.share_pct is None else g.share_pct for g in gpulets)
        if share > 100.0 + 1e-6 and not overcommits:
            cure = "Lower `share_pct` of its gpu-lets, or write `overcommits: true` if it is on purpose."
            problems.append(Problem(where, share, "shares sum to more than 100 %", cure))
        if mib is not None and not fits_memory(gpulets, mib):
            rule = f"more memory than the GPU has ({mib:.0f} MiB)"
            cure = "Use smaller batches, fewer models per GPU, lower `memory_mib` of its gpu-lets, or a larger GPU."
            problems.append(Problem(where, f"{total_mib(gpulets):.0f} MiB", rule, cure))
    return problems


# --- options of how a model is run ------------------------------------------------------------------------------


def option_problems(
    models: Sequence[ModelSpec], groups: Iterable[Sequence[str]], on_cpu: set[str], prefix: str = ""
) -> list[Problem]:
    """Return what is wrong with the options of models: wrong values, contradictions, CUDA graphs on a CPU, and options
    that a program of several members refuses. Options of a network or a user's factory are not checked.

    Args:
        models: the models with options.
        groups: models that run as one program.
        on_cpu: models that run on a CPU.
        prefix: what the paths of problems begin with.
    """
    if not any(spec.options for spec in models):
        return []
    group_of = {name: group for group in groups for name in group}
    problems: list[Problem] = []
    for index, spec in enumerate(models):
        path = f"{prefix}models.{index}.options"
        problems += run_option_problems(spec.options, path, on_cpu=spec.name in on_cpu)
        if spec.name in group_of:
            problems += member_option_problems(spec, group_of[spec.name], path)
    return problems


_OLDER = (7, 0)  # format: NVIDIA's; any capability below `FAST_CAPABILITY`


def measured_otherwise(
    models: Sequence[ModelSpec], gpu_types: Iterable[str], profile_for: Callable[[ModelSpec, str], ModelProfile | None]
) -> list[Problem]:
    """Return the options under which models would run otherwise than their profiles were measured. Such a plan would
    not hold. Profiles that do not say how they were measured pass.

    Args:
        models: with valid options.
        gpu_types: the cluster's.
        profile_for: a model's profile on a type; None where there is none.
    """
    problems: list[Problem] = []
    for index, spec in enumerate(models):
        for kind in gpu_types:
            profile, capability = profile_for(spec, kind), capability_of_type(kind)
            if profile is None or profile.run is None:
                continue
            # Whether an unknown type is fast is not known: assume what is nearer to the measurement.
            either = (capability,) if capability is not None or kind == "cpu" else (FAST_CAPABILITY, _OLDER)
            found_on = [run_differences(profile.run, spec.options, one) for one in either]
            for key, (measured, would) in min(found_on, key=len).items():
                was, is_now = _yaml(measured), _yaml(would)
                rule = f"its profile on {kind} was measured with {was}, but it would run with {is_now}"
                cure = f"Give `{key}: {was}` in its options, or measure it with --option {key}={is_now}."
                problems.append(Problem(f"models.{index}.options.{key}", spec.options.get(key), rule, cure))
    return problems


def _yaml(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
