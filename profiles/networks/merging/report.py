"""The report of merging, as plain data. No torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class MergedOperator:
    """Operators of several models that run once, as their weights are equal. `names`: the weight's name in every
    model. `parameters`: how many numbers it has."""

    kind: str
    depth: int
    names: dict[str, str]
    parameters: int


@dataclass(frozen=True)
class MergedCluster:
    """Models merged into one program. `operators_before` and `operators_after`: operators with weights that run for one
    request to every model."""

    models: tuple[str, ...]
    operators: tuple[MergedOperator, ...]
    operators_before: int
    operators_after: int
    memory_before_mib: float
    memory_after_mib: float
    worst_error: float  # over all outputs, relative to the largest magnitude of the output


@dataclass(frozen=True)
class MergeReport:
    """The merged clusters, and the reasons why other models are not merged."""

    clusters: tuple[MergedCluster, ...]
    unmerged: dict[str, str]
