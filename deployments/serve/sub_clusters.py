"""A plan cut into sub-clusters, each with its own dispatcher: models and the gpu-lets that hold them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tenuto.documents import load_document
from tenuto.errors import InvalidInputError, Problem
from tenuto.placement import Plan
from tenuto.placement.policies.symphony.partition import PartitionModel, partition
from tenuto.placement.pools import joined

__all__ = ["cut_plan", "fits_plan", "parted", "read_partition"]

_WHOLE = "0"


def read_partition(path: str | Path) -> dict[str, int]:
    """Read the output of `tenuto partition --json`, or a mapping of model to sub-cluster.

    Raises:
        InvalidInputError: the file is neither.
    """
    document: Any = load_document(path)
    if isinstance(document, Mapping) and isinstance(document.get("assignment"), Mapping):
        document = document["assignment"]
    if not isinstance(document, Mapping) or not all(type(k) is int and k >= 0 for k in document.values()):
        raise InvalidInputError(
            Problem(
                str(path),
                document,
                "must map models to sub-clusters from 0",
                "Give the output of `tenuto partition --json`, or lines such as resnet50: 0.",
            )
        )
    return {str(name): k for name, k in document.items()}


def fits_plan(plan: Plan, assignment: Mapping[str, int]) -> bool:
    """Whether every model of a plan has a sub-cluster, and no gpu-let models of two."""
    return all(spec.name in assignment for spec in plan.models) and all(
        len({assignment[name] for name in pool}) == 1 for pool in _pools(plan)
    )


def parted(plan: Plan, present: Mapping[str, int], *, time_limit_s: float = 10.0) -> dict[str, int]:
    """Return the sub-cluster of every model of a plan, in as many as there are at present (or as few as the plan can be
    cut into): Symphony's appendix A over the models that gpu-lets hold together, which stay where most of their load
    is, as far as rates and memory remain even.
    """
    rates = {spec.name: spec.rate_rps for spec in plan.models}
    pools = _pools(plan)
    count = min(len(set(present.values())), len(pools))
    names = sorted(set(present.values()))
    entries, current = [], {}
    for index, pool in enumerate(pools):
        weights = {r.name: r.weights_mib or 0.0 for g in plan.gpulets for r in g.models if r.name in pool}
        rate = sum(rates[name] for name in pool)
        entries.append(PartitionModel(str(index), max(rate, 1e-9), max(rate, 1e-9), sum(weights.values())))
        by_place: dict[int, float] = {}
        for name in pool:
            if name in present:
                place = names.index(present[name])
                by_place[place] = by_place.get(place, 0.0) + rates[name]
        if by_place:
            current[str(index)] = min(count - 1, max(by_place, key=lambda place: (by_place[place], -place)))
    found = partition(entries, count, current=current, time_limit_s=time_limit_s).assignment
    return {name: names[found[str(index)]] for index, pool in enumerate(pools) for name in sorted(pool)}


def _pools(plan: Plan) -> list[set[str]]:
    """Return the models that gpu-lets hold together, directly or through others; one that is nowhere is by itself."""
    known = {spec.name for spec in plan.models}
    held = ({replica.name for replica in gpulet.models} & known for gpulet in plan.gpulets)
    return sorted(joined([*({name} for name in known), *held]), key=min)


def cut_plan(plan: Plan, partition: Mapping[str, int] | None = None) -> dict[str, Plan]:
    """Return the plan of every sub-cluster by its name; without a partition one sub-cluster holds everything.

    Raises:
        InvalidInputError: a model without sub-cluster, or a gpu-let that holds models of two.
    """
    if partition is None:
        return {_WHOLE: plan}
    problems = [
        Problem("partition", spec.name, "the model has no sub-cluster", "Add a line for it, or partition again.")
        for spec in plan.models
        if spec.name not in partition
    ]
    of_gpulet: dict[str, int] = {}
    for gpulet in plan.gpulets:
        found = sorted({partition[r.name] for r in gpulet.models if r.name in partition})
        if len(found) > 1:
            held = ", ".join(f"{r.name} ({partition[r.name]})" for r in gpulet.models if r.name in partition)
            problems.append(
                Problem(
                    "partition",
                    held,
                    f"gpu-let {gpulet.id} holds models of several sub-clusters",
                    "Plan each sub-cluster's models by themselves, or put these models into one sub-cluster.",
                )
            )
        of_gpulet[gpulet.id] = found[0] if found else 0
    if problems:
        raise InvalidInputError(problems)
    cut: dict[str, Plan] = {}
    for index in sorted({partition[spec.name] for spec in plan.models}):
        names = {spec.name for spec in plan.models if partition[spec.name] == index}
        gpulets = tuple(gpulet for gpulet in plan.gpulets if of_gpulet[gpulet.id] == index)
        used = {gpulet.gpu for gpulet in gpulets}
        expected = {name: value for name, value in plan.expected.models.items() if name in names}
        cut[str(index)] = plan.model_copy(
            update={
                "gpus": tuple(gpu for gpu in plan.gpus if gpu.id in used),
                "gpulets": gpulets,
                "models": tuple(spec for spec in plan.models if spec.name in names),
                "expected": plan.expected.model_copy(update={"models": expected}),
                "unserved": tuple(name for name in plan.unserved if name in names),
            }
        )
    return cut
