"""How much a plan can carry, in virtual time or against a running endpoint, and how that depends on rate, SLOs and
burstiness: the highest rate scale that is in time, and attainment curves.

Search and curves know neither the simulator nor an endpoint: both are an `Attempt`, a function that runs one load and
says what came of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, TypeVar

from tenuto.batching.virtual.highest_rate import HighestRate, Limits, find_highest_rate
from tenuto.errors import InvalidInputError, Problem, first_line, raise_if_any
from tenuto.loadgen.bench import BenchOptions, run_bench
from tenuto.loadgen.simulated import Simulation
from tenuto.loadgen.verdict import judged_rows
from tenuto.placement import Arrival, ModelSpec
from tenuto.placement.applications import Application

_Arriving = TypeVar("_Arriving", ModelSpec, Application)

AXES: dict[str, tuple[float, ...]] = {
    "rate_scale": (0.25, 0.5, 0.75, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0),
    "slo_scale": (0.25, 0.4, 0.5, 0.6, 0.75, 1.0, 1.25, 1.5, 2.0),
    "cv": (0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0),
}
REQUIRED_ATTAINMENT = 0.99


@dataclass(frozen=True)
class Load:
    """What is offered: factors on every rate and SLO, and the coefficient of variation of all gaps (None: as given)."""

    rate_scale: float = 1.0
    slo_scale: float = 1.0
    cv: float | None = None


@dataclass(frozen=True)
class Attempted:
    """What came of a load. `worst_attainment` is that of the worst model; `invalid` says why a run proves nothing."""

    load: Load
    offered_rps: float
    goodput_rps: float
    attainment: float
    worst_attainment: float
    worst_model: str | None
    invalid: str | None = None

    @property
    def is_in_time(self) -> bool:
        """Whether even the worst model attains what is asked."""
        return self.worst_attainment >= REQUIRED_ATTAINMENT

    @property
    def ends_search(self) -> str | None:
        """Why what lies above cannot be measured."""
        return (
            None
            if self.invalid is None
            else f"the run at {self.load.rate_scale:.4g} proves nothing: {self.invalid}"
        )

    def as_dict(self) -> dict[str, Any]:
        """Return it for JSON, the load's factors first."""
        values = asdict(self)
        return {**values.pop("load"), **values}


Attempt = Callable[[Load], Attempted]
Capacity = HighestRate[Attempted]


@dataclass
class Curve:
    """Attainment along one axis of `AXES`, everything else the same."""

    axis: str
    points: list[Attempted] = field(default_factory=list)

    def summary(self) -> dict[str, Any]:
        """Return the axis and its points."""
        return {"axis": self.axis, "points": [point.as_dict() for point in self.points]}


def find_capacity(attempt: Attempt, limits: Limits, progress: Callable[[Capacity], None]) -> Capacity:
    """Search the highest rate scale at which the worst model attains 99 %; see `find_highest_rate`."""
    return find_highest_rate(lambda scale: attempt(Load(rate_scale=scale)), limits, progress)


def summary_of(found: Capacity) -> dict[str, Any]:
    """Return the figures for `capacity --json`."""
    return {
        "rate_scale": found.rate_scale,
        "upper_scale": found.upper_scale if math.isfinite(found.upper_scale) else None,
        "goodput_rps": found.best.goodput_rps if found.best else 0.0,
        "offered_rps": found.best.offered_rps if found.best else 0.0,
        "required_attainment": REQUIRED_ATTAINMENT,
        "ended": found.ended,
        "runs": [attempted.as_dict() for _, attempted in found.tried],
    }


def in_virtual_time(simulation: Callable[[float], Simulation]) -> Attempt:
    """Return what tries loads in virtual time.

    Args:
        simulation: what is run, by the factor on every SLO; an SLO that no batch can meet makes a load prove nothing.
    """

    def attempt(load: Load) -> Attempted:
        try:
            at = simulation(load.slo_scale)
        except InvalidInputError as error:
            return Attempted(load, 0.0, 0.0, 0.0, 0.0, None, invalid=first_line(error))
        at = replace(at, models=_with_cv(at.models, load.cv), applications=_with_cv(at.applications, load.cv))
        return _attempted(load, at.run(load.rate_scale).summary())

    return attempt


def on_endpoint(
    models: tuple[ModelSpec, ...],
    applications: tuple[Application, ...],
    options: BenchOptions,
    say: Callable[[str], None],
) -> Attempt:
    """Return what tries loads by runs of the load generator against an endpoint; Ctrl-C in one ends the search.

    Args:
        models: those asked.
        applications: whose stages are among them.
        options: of every run; rate and SLO scale are those of the load.
        say: takes a line before every run.
    """

    def attempt(load: Load) -> Attempted:
        factors = f"rate {load.rate_scale:.4g}, SLO {load.slo_scale:.4g}, CV {load.cv or 'as planned'}"
        say(f"running {options.duration_s:g} s at {factors}")
        run_options = replace(options, rate_scale=load.rate_scale, slo_scale=load.slo_scale)
        result = run_bench(_with_cv(models, load.cv), run_options, applications=_with_cv(applications, load.cv))
        if result.is_interrupted:
            raise KeyboardInterrupt
        invalid = "; ".join(result.verdict.reasons) if result.verdict.result == "INVALID" else None
        return replace(_attempted(load, result.summary), invalid=invalid)

    return attempt


def _with_cv(arriving: tuple[_Arriving, ...], cv: float | None) -> tuple[_Arriving, ...]:
    if cv is None:
        return arriving
    return tuple(spec.model_copy(update={"arrival": Arrival(process="gamma", cv=cv)}) for spec in arriving)


def _attempted(load: Load, summary: Mapping[str, Any]) -> Attempted:
    judged = [(row["attainment"], name) for name, row in judged_rows(summary).items() if row["attainment"] is not None]
    worst, name = min(judged, default=(0.0, None))
    invalid = None if judged else "no request was counted; lengthen the run or raise the rate"
    attainment = summary["attainment"] or 0.0
    return Attempted(load, summary["offered_rps"], summary["goodput_rps"], attainment, worst, name, invalid)


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
            curve.points.append(attempt(Load(**{axis: value, "rate_scale": base_rate_scale * factor})))
            yield curve
