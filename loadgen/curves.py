"""Attainment curves, in virtual time or against a running endpoint: the attainment at other rates, SLOs and burstiness.

Search and curves know neither the simulator nor an endpoint. Both are an `Attempt`: a function that runs one load and
returns its result. This module makes such functions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, TypeVar

from tenuto.batching.virtual.criterion import Goal
from tenuto.errors import InvalidInputError, Problem, first_line, raise_if_any
from tenuto.loadgen.bench import BenchOptions, run_bench
from tenuto.loadgen.simulated import Simulation
from tenuto.loadgen.verdict import judged_rows
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


@dataclass(frozen=True)
class Attempted:
    """The result of a load. `worst_attainment` is that of the worst model; `invalid` says why a run proves nothing."""

    factors: Factors
    offered_rps: float
    goodput_rps: float
    attainment: float
    worst_attainment: float
    worst_model: str | None
    invalid: str | None = None
    goal: Goal = field(default_factory=Goal)
    stopped_early: bool = False

    @property
    def is_in_time(self) -> bool:
        """Whether the attainment reaches the goal."""
        attained = self.worst_attainment if self.goal.criterion == "each" else self.attainment
        return attained >= self.goal.attainment

    @property
    def ends_search(self) -> str | None:
        """The reason why other rates cannot be measured; None if there is none."""
        at = self.factors.rate_scale
        return None if self.invalid is None else f"the run at {at:.4g} proves nothing: {self.invalid}"

    def as_dict(self) -> dict[str, Any]:
        """Return it for JSON, the factors first."""
        values = asdict(self)
        del values["goal"], values["stopped_early"]
        return {**values.pop("factors"), **values}


Attempt = Callable[[Factors], Attempted]


@dataclass
class Curve:
    """Attainment along one axis of `AXES`, everything else the same."""

    axis: str
    points: list[Attempted] = field(default_factory=list)

    def summary(self) -> dict[str, Any]:
        """Return the axis and its points."""
        return {"axis": self.axis, "points": [point.as_dict() for point in self.points]}


def in_virtual_time(simulation: Callable[[float], Simulation]) -> Attempt:
    """Return the function that tries loads in virtual time.

    Args:
        simulation: makes the simulation for a factor on every SLO. When no batch can meet an SLO, the load proves
            nothing.
    """

    def attempt(factors: Factors) -> Attempted:
        try:
            at = simulation(factors.slo_scale)
        except InvalidInputError as error:
            return Attempted(factors, 0.0, 0.0, 0.0, 0.0, None, invalid=first_line(error))
        at = replace(at, models=_with_cv(at.models, factors.cv), applications=_with_cv(at.applications, factors.cv))
        return _attempted(factors, at.run(factors.rate_scale).summary(), Goal())

    return attempt


def on_endpoint(
    models: tuple[ModelSpec, ...],
    applications: tuple[Application, ...],
    options: BenchOptions,
    goal: Goal,
    say: Callable[[str], None],
) -> Attempt:
    """Return the function that tries loads against an endpoint with the load generator; Ctrl-C ends the search.

    Args:
        models: the models to send requests to.
        applications: applications whose stages are among these models.
        options: options of every run; the load sets the rate scale and the SLO scale.
        goal: the goal by which a load is judged.
        say: is called with a line before every run.
    """

    def attempt(factors: Factors) -> Attempted:
        shown = f"rate {factors.rate_scale:.4g}, SLO {factors.slo_scale:.4g}, CV {factors.cv or 'as planned'}"
        say(f"running {options.duration_s:g} s at {shown}")
        run_options = replace(options, rate_scale=factors.rate_scale, slo_scale=factors.slo_scale)
        loads = _with_cv(models, factors.cv), _with_cv(applications, factors.cv)
        result = run_bench(loads[0], run_options, applications=loads[1])
        if result.is_interrupted:
            raise KeyboardInterrupt
        invalid = "; ".join(result.verdict.reasons) if result.verdict.result == "INVALID" else None
        return replace(_attempted(factors, result.summary, goal), invalid=invalid)

    return attempt


def _with_cv(arriving: tuple[_Arriving, ...], cv: float | None) -> tuple[_Arriving, ...]:
    if cv is None:
        return arriving
    return tuple(spec.model_copy(update={"arrival": Arrival(process="gamma", cv=cv)}) for spec in arriving)


def _attempted(factors: Factors, summary: Mapping[str, Any], goal: Goal) -> Attempted:
    judged = [(row["attainment"], name) for name, row in judged_rows(summary).items() if row["attainment"] is not None]
    worst, name = min(judged, default=(0.0, None))
    invalid = None if judged else "no request was counted; lengthen the run or raise the rate"
    figures = summary["offered_rps"], summary["goodput_rps"], summary["attainment"] or 0.0
    return Attempted(factors, *figures, worst, name, invalid, goal)


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
            curve.points.append(attempt(Factors(**{axis: value, "rate_scale": base_rate_scale * factor})))
            yield curve
