"""One published statement as a function of results, and the helpers of such functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tenuto_lab.experiments.experiment import NotRunError, Observation, Results

GOODPUT, PLACEMENTS = "Goodput", "placements"  # where on the page a claim is shown
UNPRINTED = "bars in figure {} only"


@dataclass(frozen=True)
class Seen:
    """What came out. `why_not` is kept only if this is not the published result."""

    ours: str
    is_reproduced: bool
    why_not: str = "no cause is known"


@dataclass(frozen=True)
class Claim:
    """A published statement and how to look for it. `look` raises `NotRunError` if it needs a point that is missing."""

    name: str
    statement: str
    published: str
    tolerance: str
    figure: str
    look: Callable[[Results], Seen]

    def check(self, results: Results) -> Observation:
        """Return whether it is reproduced."""
        stated = {"name": self.name, "statement": self.statement, "published": self.published}
        told = {"tolerance": self.tolerance, "figure": self.figure}
        try:
            seen = self.look(results)
        except NotRunError:
            why = "its points did not run: --quick, --policy and --live run fewer, and an interruption ends a run early"
            return Observation(**stated, ours="-", status="not checked", why=why, **told)
        if seen.is_reproduced:
            return Observation(**stated, ours=seen.ours, status="reproduced", **told)
        return Observation(**stated, ours=seen.ours, status="not reproduced", why=seen.why_not, **told)


def claim(
    name: str, statement: str, published: str, tolerance: str = "equal", figure: str = PLACEMENTS
) -> Callable[[Callable[[Results], Seen]], Claim]:
    """Turn the function that looks for a claim into the claim."""
    return lambda look: Claim(name, statement, published, tolerance, figure, look)


def near(value: float, expected: float, tolerance: float) -> bool:
    """Return whether a value is within a relative tolerance of what was expected."""
    return abs(value - expected) <= tolerance * abs(expected)


def replica_rows(run: Mapping[str, Any], model: str) -> list[Mapping[str, Any]]:
    """Return the rows of a model's replicas in a run that ran any batch, in the order of the plan.

    Raises:
        NotRunError: there is none.
    """
    rows = [row for row in run["models"][model]["replicas"] if row["execution_ms"] is not None]
    if not rows:
        raise NotRunError(model)
    return rows


def hosted(row: Mapping[str, Any]) -> dict[str, list[tuple[str, int]]]:
    """Return the (model, batch size) pairs on each GPU of a point's plan."""
    found: dict[str, list[tuple[str, int]]] = {}
    for gpulet in row["plan"]["gpulets"]:
        for replica in gpulet["models"]:
            found.setdefault(gpulet["gpu"], []).append((replica["name"], replica["batch_size"]))
    return found


def pairs_of(row: Mapping[str, Any]) -> list[tuple[str, int]]:
    """Return the (model, batch size) pairs of a point's plan, GPU after GPU."""
    return [pair for gpu in hosted(row).values() for pair in gpu]
