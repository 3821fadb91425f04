"""The report of merging, as plain data. No torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class MergedOperator:
    """Operators of several models with equal weights, which run once. `names`: the weight's name in every model."""

    kind: str
    depth: int
    names: dict[str, str]
    parameters: int  # of the weight


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

    @property
    def memory_saved_mib(self) -> float:
        """MiB of weights that are no longer kept twice."""
        return self.memory_before_mib - self.memory_after_mib


@dataclass(frozen=True)
class MergeReport:
    """The merged clusters, and the reasons why other models are not merged."""

    clusters: tuple[MergedCluster, ...]
    unmerged: dict[str, str]

    def to_data(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        data = asdict(self)
        for cluster, shown in zip(self.clusters, data["clusters"], strict=True):
            shown["memory_saved_mib"] = cluster.memory_saved_mib
        return data
