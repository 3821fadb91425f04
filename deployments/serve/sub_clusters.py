"""A plan cut into sub-clusters. Each has its own dispatcher, models, and the gpu-lets that hold these models."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tenuto.documents import load_document
from tenuto.errors import Problem, raise_if_any, refused
from tenuto.placement import Gpulet, Plan
from tenuto.placement.components import connected_components
from tenuto.placement.policies.symphony.partition import PartitionModel, partition

_WHOLE = "0"


def read_partition(path: str | Path) -> dict[str, int]:
    """Read a mapping of model to sub-cluster, or a partition document that has such a mapping as `assignment`.

    Raises:
        InvalidInputError: the file is neither.
    """
    document: Any = load_document(path)
    if isinstance(document, Mapping) and isinstance(document.get("assignment"), Mapping):
        document = document["assignment"]
    if not isinstance(document, Mapping) or not all(type(k) is int and k >= 0 for k in document.values()):
        rule, cure = "must map models to sub-clusters from 0", "Give lines such as resnet50: 0."
        raise refused(str(path), document, rule, cure)
    return {str(name): k for name, k in document.items()}


def fits_plan(plan: Plan, assignment: Mapping[str, int]) -> bool:
    """Whether every model of a plan has a sub-cluster, and no gpu-let holds models of two."""
    return all(spec.name in assignment for spec in plan.models) and all(
        len({assignment[name] for name in component}) == 1 for component in _inseparable(plan)
    )


def parted(plan: Plan, present: Mapping[str, int], *, count: int | None = None) -> dict[str, int]:
    """Return a sub-cluster for every model of a plan, by Symphony's appendix A.

    Models that gpu-lets hold together stay together, and stay where most of their load is, as far as rates and memory
    remain even. When the plan cannot be cut into `count` parts, there are fewer.

    Args:
        plan: the plan whose models are parted.
        present: the present sub-cluster of models.
        count: how many sub-clusters; by default as many as there are at present.
    """
    rates = {spec.name: spec.rate_rps for spec in plan.models}
    components = _inseparable(plan)
    names = sorted(set(present.values())) if count is None else list(range(count))
    count = min(len(names), len(components))
    entries, current = [], {}
    for index, component in enumerate(components):
        weights = {r.name: r.weights_mib or 0.0 for g in plan.gpulets for r in g.models if r.name in component}
        rate = sum(rates[name] for name in component)
        # When no weights are known, each component counts the same.
        entries.append(PartitionModel(str(index), max(rate, 1e-9), max(rate, 1e-9), sum(weights.values()) or 1.0))
        by_place: dict[int, float] = {}
        for name in component:
            if name in present:
                place = names.index(present[name])
                by_place[place] = by_place.get(place, 0.0) + rates[name]
        if by_place:
            current[str(index)] = min(count - 1, max(by_place, key=lambda place: (by_place[place], -place)))
    parts = partition(entries, count, current=current, time_limit_s=math.inf).assignment
    return {name: names[parts[str(index)]] for index, component in enumerate(components) for name in sorted(component)}


def _inseparable(plan: Plan) -> list[set[str]]:
    """Return groups of models that gpu-lets hold together, directly or through others. A model without a gpu-let is a
    group of its own."""
    known = {spec.name for spec in plan.models}
    held = ({replica.name for replica in gpulet.models} & known for gpulet in plan.gpulets)
    return sorted(connected_components([*({name} for name in known), *held]), key=min)


def _straddles(gpulet: Gpulet, assignment: Mapping[str, int]) -> bool:
    return len({assignment[replica.name] for replica in gpulet.models if replica.name in assignment}) > 1


def cut_plan(
    plan: Plan, partition: Mapping[str, int] | None = None, *, also: Mapping[str, int] | None = None
) -> dict[str, Plan]:
    """Return the plan of every sub-cluster by its name. Without a partition one sub-cluster holds everything.

    `also` is a second partition into the same sub-clusters. With it, each sub-cluster holds the models that it has in
    either, and a gpu-let may belong to two.

    Raises:
        InvalidInputError: a model has no sub-cluster, or a gpu-let holds models of two.
    """
    if partition is None:
        return {_WHOLE: plan}
    problems = [
        Problem("partition", spec.name, "the model has no sub-cluster", "Add a line for it, or partition again.")
        for spec in plan.models
        if spec.name not in partition
    ]
    places = {spec.name: {partition.get(spec.name, 0), (also or partition).get(spec.name, 0)} for spec in plan.models}
    of_gpulet: dict[str, set[int]] = {}
    for gpulet in plan.gpulets:
        if all(_straddles(gpulet, each) for each in (partition, also or partition)):
            held = ", ".join(f"{r.name} ({partition[r.name]})" for r in gpulet.models if r.name in partition)
            problems.append(
                Problem(
                    "partition",
                    held,
                    f"gpu-let {gpulet.id} holds models of several sub-clusters",
                    "Plan each sub-cluster's models by themselves, or put these models into one sub-cluster.",
                )
            )
        of_gpulet[gpulet.id] = {place for r in gpulet.models for place in places.get(r.name, ())} or {0}
    raise_if_any(problems)
    cut: dict[str, Plan] = {}
    for index in sorted({index for held_by in places.values() for index in held_by}):
        names = {name for name, held_by in places.items() if index in held_by}
        gpulets = tuple(gpulet for gpulet in plan.gpulets if index in of_gpulet[gpulet.id])
        used = {gpu for gpulet in gpulets for gpu in gpulet.gpus}
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
