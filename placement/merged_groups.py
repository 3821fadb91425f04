"""What holds for models that a plan runs as one merged program, and which models can be merged."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from tenuto.errors import InvalidInputError, Problem
from tenuto.placement.program import Gpulet, program_name
from tenuto.placement.workload import ModelSpec
from tenuto.profiles import LatencyTable
from tenuto.profiles.networks.catalogue import lookup
from tenuto.profiles.networks.model_options import unmergeable_options


def group_problems(gpulets: Sequence[Gpulet], models: Sequence[ModelSpec], origin: str) -> list[Problem]:
    """Return what is wrong with merged groups.

    A group's models are resident on its gpu-let, have a network to merge, and belong to one group. They share one
    queue, so every gpu-let that holds one of them holds all.
    """
    problems: list[Problem] = []
    seen: set[str] = set()
    for index, gpulet in enumerate(gpulets):
        resident = {replica.name for replica in gpulet.models}
        counts = Counter(name for group in gpulet.merge for name in group.models)
        for place, group in enumerate(gpulet.merge):
            where = f"{origin}: gpulets.{index}.merge.{place}"
            for name in group.models:
                if name not in resident:
                    known = ", ".join(sorted(resident)) or "(none)"
                    rule = f"no such model on gpu-let {gpulet.id}"
                    problems.append(Problem(where, name, rule, f"Resident there: {known}."))
                elif counts[name] > 1:
                    problems.append(Problem(where, name, "is in two merged groups", "Keep it in one of them."))
                    counts[name] = 1
            if isinstance(group.latency, LatencyTable) and (group.batch_size or 0) > group.latency.largest:
                rule = f"above the largest batch of its latency ({group.latency.largest})"
                cure = "Lower it, or measure larger batches with `tenuto merge -o`."
                problems.append(Problem(f"{where}.batch_size", group.batch_size, rule, cure))
            if group.name not in seen and resident.issuperset(group.models):
                seen.add(group.name)  # a plan may hold one group on thousands of gpu-lets
                problems += _problems_of_group(gpulets, models, group.models, where)
    return problems


def _problems_of_group(
    gpulets: Sequence[Gpulet], models: Sequence[ModelSpec], group: Sequence[str], where: str
) -> list[Problem]:
    """Return what is wrong with a group on any gpu-let."""
    rule, cure = "has no network to merge: no source, and not in the catalogue", "Give its `source`, or remove it."
    faults = [Problem(where, spec.name, rule, cure) for spec in models if spec.name in group and not has_network(spec)]
    apart = why_apart(gpulets, group)
    if apart:
        faults.append(Problem(where, program_name(group), apart, "Merge them wherever they are, or nowhere."))
    elif not all(_merges(gpulet, group) for gpulet in gpulets):
        rule = "is merged on one gpu-let and not on another, but both share one queue"
        cure = "Give every gpu-let that holds these models the same `merge`."
        faults.append(Problem(where, program_name(group), rule, cure))
    return faults


def _merges(gpulet: Gpulet, models: Sequence[str]) -> bool:
    """Return whether a gpu-let with these models has them as a group; True when it has none of them."""
    resident = {replica.name for replica in gpulet.models}
    return not resident & set(models) or any(group.models == tuple(models) for group in gpulet.merge)


def why_apart(gpulets: Iterable[Gpulet], models: Sequence[str]) -> str | None:
    """Return why models cannot share one queue: some gpu-let holds some of them but not all. None when they can."""
    together, hosts = set(models), []
    for gpulet in gpulets:
        held = together & {replica.name for replica in gpulet.models}
        if held:
            hosts.append((gpulet.id, held))
    missing = together - {name for _, held in hosts for name in held}
    if missing:
        return f"{', '.join(sorted(missing))} is on no gpu-let"
    partly = [(place, held) for place, held in hosts if held != together]
    if not partly:
        return None
    shown = "; ".join(f"{place} holds {', '.join(sorted(held))}" for place, held in partly[:3])
    more = f" and {len(partly) - 3} more" if len(partly) > 3 else ""
    return f"not every gpu-let that holds one of them holds all ({shown}{more}), and they would share one queue"


def why_unmergeable(models: Iterable[ModelSpec]) -> str | None:
    """Return why models cannot be merged: one has no network, sizes that vary, or options that a merged program
    lacks."""
    specs = list(models)
    without = [spec.name for spec in specs if not has_network(spec)]
    if without:
        return f"{', '.join(without)} has no network to merge; give its `source`"
    if sized := [spec.name for spec in specs if spec.sizes]:
        return f"requests of {', '.join(sized)} vary in size"
    refused = [f"`{key}: {value}` of {s.name}" for s in specs for key, value in unmergeable_options(s.options).items()]
    return f"a merged program knows no {', no '.join(refused)}" if refused else None


def has_network(spec: ModelSpec) -> bool:
    """Return whether a model names a network: its source, or its name in the catalogue."""
    if spec.source is not None:
        return True
    try:
        lookup(spec.network)
    except InvalidInputError:
        return False
    return True


def member_option_problems(spec: ModelSpec, group: Sequence[str], path: str) -> list[Problem]:
    """Return the options of a group's member that a merged program refuses. `path` names the options in problems."""
    rule = f"is not possible for a model that is merged ({program_name(group)})"
    cure = "Remove it, or the group from `merge`: the models are then served one by one."
    return [Problem(f"{path}.{key}", value, rule, cure) for key, value in unmergeable_options(spec.options).items()]
