"""How much a plan can carry: the highest rate scale that is still in time, and what is left beyond it.

The search and the curves know neither the simulator nor an endpoint: both are an `Attempt`, a function that runs one
load and says what came of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from tenuto.errors import Problem, raise_if_any

__all__ = ["AXES", "Attempt", "Capacity", "Curve", "Limits", "Load", "Outcome", "check_axes", "curves", "find_capacity"]


@dataclass(frozen=True)
class Load:
    """What is offered: factors on every rate and SLO, and the coefficient of variation of all gaps (None: as given)."""

    rate_scale: float = 1.0
    slo_scale: float = 1.0
    cv: float | None = None


@dataclass(frozen=True)
class Outcome:
    """What came of a load. `worst_attainment` is that of the worst model; `invalid` says why a run proves nothing."""

    load: Load
    offered_rps: float
    goodput_rps: float
    attainment: float
    worst_attainment: float
    worst_model: str | None
    invalid: str | None = None


Attempt = Callable[[Load], Outcome]

AXES: dict[str, tuple[float, ...]] = {
    "rate_scale": (0.25, 0.5, 0.75, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0),
    "slo_scale": (0.25, 0.4, 0.5, 0.6, 0.75, 1.0, 1.25, 1.5, 2.0),
    "cv": (0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0),
}


@dataclass(frozen=True)
class Limits:
    """When the search ends: relative width of the bracket, number of runs; and what counts as in time."""

    tolerance: float = 0.02
    most_runs: int = 24
    attainment: float = 0.99
    start_scale: float = 1.0

    def check(self) -> None:
        """Raise `InvalidInputError` with every setting out of range."""
        problems = []
        if not 0 < self.tolerance < 1:
            problems.append(Problem("--tolerance", self.tolerance, "must be between 0 and 1", "Give for example 0.02."))
        if self.most_runs < 1:
            problems.append(Problem("--runs", self.most_runs, "must be at least 1", "Give for example 12."))
        if not 0 < self.attainment <= 1:
            problems.append(Problem("--attainment", self.attainment, "must be above 0, at most 1", "Give 0.99."))
        if not (math.isfinite(self.start_scale) and self.start_scale > 0):
            problems.append(Problem("--rate-scale", self.start_scale, "must be a positive number", "Give 1."))
        raise_if_any(problems)


@dataclass
class Capacity:
    """The answer so far: every model attains what is asked up to `rate_scale`, and not at `upper_scale` (inf: never
    failed). `ended` says why the search stopped."""

    limits: Limits
    rate_scale: float = 0.0
    upper_scale: float = math.inf
    best: Outcome | None = None
    ended: str = "interrupted"
    outcomes: list[Outcome] = field(default_factory=list)

    def summary(self) -> dict[str, Any]:
        """Return the figures for `capacity --json`."""
        return {
            "rate_scale": self.rate_scale,
            "upper_scale": self.upper_scale if math.isfinite(self.upper_scale) else None,
            "goodput_rps": self.best.goodput_rps if self.best else 0.0,
            "offered_rps": self.best.offered_rps if self.best else 0.0,
            "required_attainment": self.limits.attainment,
            "ended": self.ended,
            "runs": [_plain(outcome) for outcome in self.outcomes],
        }


@dataclass
class Curve:
    """Attainment along one axis of `AXES`, everything else the same."""

    axis: str
    outcomes: list[Outcome] = field(default_factory=list)

    def summary(self) -> dict[str, Any]:
        """Return the axis and its points."""
        return {"axis": self.axis, "points": [_plain(outcome) for outcome in self.outcomes]}


def _plain(outcome: Outcome) -> dict[str, Any]:
    values = asdict(outcome)
    return {**values.pop("load"), **values}


def find_capacity(attempt: Attempt, limits: Limits, progress: Callable[[Capacity], None]) -> Capacity:
    """Search the highest rate scale at which the worst model attains what is asked, by doubling and bisection.

    A run that proves nothing (the generator fell behind, for instance) ends the search: what lies above cannot be
    measured. Ctrl-C ends it with the best answer so far.

    Args:
        attempt: runs a load.
        limits: when to stop, and where to begin.
        progress: called after every run.

    Raises:
        InvalidInputError: limits out of range.
    """
    limits.check()
    found = Capacity(limits)
    scale = limits.start_scale
    try:
        while len(found.outcomes) < limits.most_runs:
            outcome = attempt(Load(rate_scale=scale))
            found.outcomes.append(outcome)
            if outcome.invalid is not None:
                found.ended = f"the run at {scale:.4g} proves nothing: {outcome.invalid}"
                return found
            if outcome.worst_attainment >= limits.attainment:
                found.rate_scale, found.best = scale, outcome
            else:
                found.upper_scale = scale
            progress(found)
            if found.rate_scale and found.upper_scale / found.rate_scale - 1.0 <= limits.tolerance:
                found.ended = "found"
                return found
            if not found.rate_scale and scale < 1e-6 * limits.start_scale:
                found.ended = "no rate is in time"
                return found
            if not found.rate_scale:
                scale = found.upper_scale / 2.0
            elif math.isinf(found.upper_scale):
                scale = 2.0 * found.rate_scale
            else:
                scale = math.sqrt(found.rate_scale * found.upper_scale)
        found.ended = f"stopped after {limits.most_runs} runs"
    except KeyboardInterrupt:
        found.ended = "interrupted"
    return found


def check_axes(axes: Mapping[str, Sequence[float]]) -> None:
    """Raise `InvalidInputError` for an unknown axis or a value that is not a positive number."""
    problems = []
    for axis, values in axes.items():
        if axis not in AXES:
            problems.append(Problem("--curve", axis, "is no axis", f"Give one of {', '.join(AXES)}."))
        problems += [
            Problem(f"--curve {axis}", value, "must be a positive number", "Give for example 0.5,1,2.")
            for value in values
            if not (math.isfinite(value) and value > 0)
        ]
    raise_if_any(problems)


def curves(attempt: Attempt, axes: Mapping[str, Sequence[float]], base_rate_scale: float = 1.0) -> Iterator[Curve]:
    """Run the points of each axis and yield the growing curve after each point; the last yield of an axis is whole.

    All run at `base_rate_scale` (the capacity, say); values of the axis `rate_scale` are factors on it.

    Raises:
        InvalidInputError: an unknown axis, or a value that is not a positive number.
    """
    check_axes(axes)
    for axis, values in axes.items():
        curve = Curve(axis)
        for value in sorted(set(values)):
            factor = value if axis == "rate_scale" else 1.0
            curve.outcomes.append(attempt(Load(**{axis: value, "rate_scale": base_rate_scale * factor})))
            yield curve
