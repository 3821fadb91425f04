"""When models may run as one merged program: the rules that hold for the groups of every plan, whoever wrote it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from tenuto.errors import InvalidInputError, Problem
from tenuto.placement.merged_group import group_name
from tenuto.profiles import LatencyTable
from tenuto.profiles.networks.catalogue import lookup

if TYPE_CHECKING:
    from tenuto.placement.plan import Gpulet, Plan
    from tenuto.placement.workload import ModelSpec

__all__ = ["has_source", "merge_problems", "why_apart"]


def merge_problems(plan: Plan, origin: str) -> list[Problem]:
    """Return what is wrong with the merged groups of a plan.

    A group's models are resident on its gpu-let (hence on one GPU), have a network to merge, belong to one group, and
    are held together by every gpu-let that holds one of them, as they share one queue.
    """
    found: list[Problem] = []
    seen: set[str] = set()
    for index, gpulet in enumerate(plan.gpulets):
        resident = {replica.name for replica in gpulet.models}
        counts = Counter(name for group in gpulet.merge for name in group.models)
        for place, group in enumerate(gpulet.merge):
            where = f"{origin}: gpulets.{index}.merge.{place}"
            for name in group.models:
                if name not in resident:
                    known = ", ".join(sorted(resident)) or "(none)"
                    found.append(
                        Problem(where, name, f"no such model on gpu-let {gpulet.id}", f"Resident there: {known}.")
                    )
                elif counts[name] > 1:
                    found.append(Problem(where, name, "is in two merged groups", "Keep it in one of them."))
                    counts[name] = 1
            if isinstance(group.latency, LatencyTable) and (group.batch_size or 0) > group.latency.largest:
                found.append(
                    Problem(
                        f"{where}.batch_size", group.batch_size,
                        f"above the largest batch of its latency ({group.latency.largest})",
                        "Lower it, or measure larger batches with `tenuto merge -o`.",
                    )
                )  # fmt: skip
            if group.name not in seen and resident.issuperset(group.models):
                seen.add(group.name)  # a plan may hold one group on thousands of gpu-lets
                found += _of_all_gpulets(plan, group.models, where)
    return found


def _of_all_gpulets(plan: Plan, models: Sequence[str], where: str) -> list[Problem]:
    """Return what is wrong with a group wherever it is."""
    name = group_name(models)
    found = [
        Problem(
            where, spec.name, "has no network to merge: no source, and not in the catalogue",
            "Give its `source`, or remove it from `merge`.",
        )
        for spec in plan.models
        if spec.name in models and not has_source(spec)
    ]  # fmt: skip
    apart = why_apart(plan.gpulets, models)
    if apart:
        found.append(Problem(where, name, apart, "Merge them wherever they are, or nowhere."))
    elif not all(_merges(other, models) for other in plan.gpulets):
        found.append(
            Problem(
                where, name, "is merged on one gpu-let and not on another, but has one queue for both",
                "Give every gpu-let that holds these models the same `merge`.",
            )
        )  # fmt: skip
    return found


def _merges(gpulet: Gpulet, models: Sequence[str]) -> bool:
    """Return whether a gpu-let that holds these models has them as a group; True where it holds none."""
    resident = {replica.name for replica in gpulet.models}
    return not resident & set(models) or any(group.models == tuple(models) for group in gpulet.merge)


def why_apart(gpulets: Iterable[Gpulet], models: Sequence[str]) -> str | None:
    """Return why models cannot share one queue: a gpu-let that holds some of them does not hold all; else None."""
    wanted, hosts = set(models), []
    for gpulet in gpulets:
        held = wanted & {replica.name for replica in gpulet.models}
        if held:
            hosts.append((gpulet.id, held))
    missing = wanted - {name for _, held in hosts for name in held}
    if missing:
        return f"{', '.join(sorted(missing))} is on no gpu-let"
    partly = [(place, held) for place, held in hosts if held != wanted]
    if not partly:
        return None
    shown = "; ".join(f"{place} holds {', '.join(sorted(held))}" for place, held in partly[:3])
    more = f" and {len(partly) - 3} more" if len(partly) > 3 else ""
    return f"not every gpu-let that holds one of them holds all ({shown}{more}), and they would share one queue"


def has_source(spec: ModelSpec) -> bool:
    """Return whether a model names a network: its source, or its name in the catalogue."""
    if spec.source is not None:
        return True
    try:
        lookup(spec.name)
    except InvalidInputError:
        return False
    return True
