"""Attainment at other rates, SLOs and burstiness, in virtual time: one thing changed at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, TypeVar

from tenuto.batching.virtual.criterion import Goal
from tenuto.documents import parse_document
from tenuto.errors import InvalidInputError, Problem, first_line, raise_if_any
from tenuto.loadgen.endpoint_trials import EndpointTrial
from tenuto.loadgen.simulated import Simulation
from tenuto.placement import Arrival, ModelSpec
from tenuto.placement.application import Application

_Arriving = TypeVar("_Arriving", ModelSpec, Application)

AXES: dict[str, tuple[float, ...]] = {  # unit: the values that are tried by default
    "rate_scale": (0.25, 0.5, 0.75, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0),
    "slo_scale": (0.25, 0.4, 0.5, 0.6, 0.75, 1.0, 1.25, 1.5, 2.0),
    "cv": (0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0),
}


@dataclass(frozen=True)
class Factors:
    """The load to try: factors on every rate and SLO, and the coefficient of variation of all gaps (None: as given)."""

    rate_scale: float = 1.0
    slo_scale: float = 1.0
    cv: float | None = None


Attempt = Callable[[Factors], EndpointTrial]


@dataclass
class Curve:
    """Attainment along one axis of `AXES`, everything else the same."""

    axis: str
    points: list[tuple[Factors, EndpointTrial]] = field(default_factory=list)

    def summary(self) -> dict[str, Any]:
        """Return the axis and its points."""
        points = [asdict(trial) | asdict(factors) for factors, trial in self.points]
        return {"axis": self.axis, "points": points}


def in_virtual_time(simulation: Callable[[float], Simulation]) -> Attempt:
    """Return the function that tries loads in virtual time.

    Args:
        simulation: makes the simulation for a factor on every SLO. When no batch can meet an SLO, the load proves
            nothing.
    """

    def attempt(factors: Factors) -> EndpointTrial:
        try:
            at = simulation(factors.slo_scale)
        except InvalidInputError as error:
            return EndpointTrial(factors.rate_scale, 0.0, 0.0, 0.0, 0.0, None, invalid=first_line(error))
        at = replace(at, models=_with_cv(at.models, factors.cv), applications=_with_cv(at.applications, factors.cv))
        return EndpointTrial.of(factors.rate_scale, at.run(factors.rate_scale).summary(), Goal())

    return attempt


def _with_cv(arriving: tuple[_Arriving, ...], cv: float | None) -> tuple[_Arriving, ...]:
    if cv is None:
        return arriving
    arrival = parse_document(Arrival, {"process": "gamma", "cv": cv}, origin="--curve")
    return tuple(spec.model_copy(update={"arrival": arrival}) for spec in arriving)


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

    All run at `base_rate_scale` (for example the highest in time); values of the axis `rate_scale` are factors on it.

    Raises:
        InvalidInputError: an unknown axis, or a value that is not a positive number.
    """
    check_axes(axes)
    for axis, values in axes.items():
        curve = Curve(axis)
        for value in sorted(set(values)):
            factor = value if axis == "rate_scale" else 1.0
            factors = Factors(**{axis: value, "rate_scale": base_rate_scale * factor})
            curve.points.append((factors, attempt(factors)))
            yield curve
