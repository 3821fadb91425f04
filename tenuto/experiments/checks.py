"""What the checks of published observations share: one way to word a finding, and the plan's facts of a point."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tenuto.experiments.experiment import Observation

__all__ = ["finding", "hosted", "missing", "near", "replica_rows"]


def missing(name: str, statement: str, published: str, tolerance: str, figure: str) -> Observation:
    """Return the observation of which a point was not run."""
    why = "its points did not run: --quick, --policy and --live run fewer, and an interruption ends a run early"
    return Observation(name, statement, published, "-", "not checked", tolerance, figure, why)


def finding(
    name: str, statement: str, published: str, ours: str, is_reproduced: bool, tolerance: str, figure: str,
    why_not: str = "",
) -> Observation:  # fmt: skip
    """Return the observation with its verdict; `why_not` is kept only where it is not reproduced."""
    status = "reproduced" if is_reproduced else "not reproduced"
    why = "" if is_reproduced else why_not or "no cause is known"
    return Observation(name, statement, published, ours, status, tolerance, figure, why)  # type: ignore[arg-type]


def near(value: float | None, expected: float, tolerance: float) -> bool:
    """Return whether a value is within a relative tolerance of what was expected."""
    return value is not None and abs(value - expected) <= tolerance * abs(expected)


def replica_rows(run: Mapping[str, Any] | None, model: str) -> list[Mapping[str, Any]]:
    """Return the rows of a model's replicas in a run, in the order of the plan."""
    return [] if run is None else list(run["models"][model]["replicas"])


def hosted(row: Mapping[str, Any] | None) -> dict[str, list[tuple[str, int]]]:
    """Return the (model, batch size) pairs on each GPU of a point's plan."""
    found: dict[str, list[tuple[str, int]]] = {}
    for gpulet in [] if row is None else row["plan"]["gpulets"]:
        for replica in gpulet["models"]:
            found.setdefault(gpulet["gpu"], []).append((replica["name"], replica["batch_size"]))
    return found
