"""A plan cut into sub-clusters, each with its own dispatcher: models and the gpu-lets that hold them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tenuto.documents import load_document
from tenuto.errors import InvalidInputError, Problem
from tenuto.placement import Plan

__all__ = ["cut_plan", "read_partition"]

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
