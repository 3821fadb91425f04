"""What an experiment is: the points it runs, the observations it checks, and the points its page shows in detail."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from tenuto_lab.experiments.case import DEFERRED, ROUTER, Case

THESIS_POLICIES = ("igniter", "usher", "wao-usher", "ao-milp", "wsm-milp")

Status = Literal["reproduced", "not reproduced", "not checked"]


@dataclass(frozen=True)
class Settings:
    """What the user chose.

    clients: `thesis` sends what the thesis' clients reached, `exact` what they should have sent.
    policies: only these; None: those of the thesis and every other that can plan for the thesis' profile.
    """

    seed: int = 0
    clients: Literal["thesis", "exact"] = "thesis"
    policies: tuple[str, ...] | None = None
    duration_s: float | None = None
    quick: bool = False


@dataclass(frozen=True)
class Observation:
    """A published statement and whether it is reproduced here.

    `published` and `ours` are the numbers side by side; `tolerance` says what counts as reproduced; `why` explains a
    difference.
    """

    name: str
    statement: str
    published: str
    ours: str
    status: Status
    tolerance: str
    figure: str
    why: str = ""


class NotRunError(Exception):
    """A point that was asked for did not run, or its policy could not plan."""


class Results:
    """The points that have run, found by series, place and SLO. All but `find` raise `NotRunError` for others."""

    def __init__(self, rows: Iterable[Mapping[str, Any]]) -> None:
        self.rows = list(rows)
        self._found = {(row["series"], float(row["case"]["x"]), float(row["case"]["slo_ms"])): row for row in self.rows}

    def find(self, series: str, x: float, slo_ms: float) -> Mapping[str, Any] | None:
        """Return a point that was planned and run, if there is one."""
        row = self._found.get((series, float(x), float(slo_ms)))
        return row if row is not None and "runs" in row else None

    def row(self, series: str, x: float, slo_ms: float) -> Mapping[str, Any]:
        """Return a point that was planned and run."""
        row = self.find(series, x, slo_ms)
        if row is None:
            raise NotRunError(f"{series} at {x:g}, SLO {slo_ms:g} ms")
        return row

    def run(self, series: str, x: float, slo_ms: float, scheduler: str = ROUTER) -> Mapping[str, Any]:
        """Return the figures of a point under one scheduler."""
        runs: Mapping[str, Mapping[str, Any]] = self.row(series, x, slo_ms)["runs"]
        if scheduler not in runs:
            raise NotRunError(f"{series} at {x:g}, SLO {slo_ms:g} ms, under {scheduler}")
        return runs[scheduler]

    def goodput(self, series: str, x: float, slo_ms: float, scheduler: str = ROUTER) -> float:
        """Return the goodput of a point in requests per second."""
        return float(self.run(series, x, slo_ms, scheduler)["goodput_rps"])

    def series(self) -> list[str]:
        """Return the names of all lines with at least one run, in order of their first point."""
        return list(dict.fromkeys(row["series"] for row in self.rows if "runs" in row))

    def errors(self) -> dict[str, str]:
        """Return why series could not be planned, by name; only those without any run."""
        ran = set(self.series())
        return {row["series"]: row["error"] for row in self.rows if "error" in row and row["series"] not in ran}

    def slos(self) -> list[float]:
        """Return the SLOs in ascending order."""
        return sorted({float(row["case"]["slo_ms"]) for row in self.rows})


class Checkable(Protocol):
    """A published statement."""

    def check(self, results: Results) -> Observation:
        """Return what became of it."""
        ...


@dataclass(frozen=True)
class Detail:
    """A point whose placement, batches and stages the page shows, with the statement of the thesis about it."""

    series: str
    x: float
    slo_ms: float
    caption: str


@dataclass(frozen=True)
class Experiment:
    """One published experiment. `figures` are the names under which the thesis shows it; the first is its own name."""

    figures: tuple[str, ...]
    section: str
    title: str
    about: str
    x_label: str
    cases: Callable[[Settings], list[Case]]
    claims: Sequence[Checkable] = ()
    details: Sequence[Detail] = ()
    schedulers: tuple[str, ...] = field(default=(ROUTER, DEFERRED))

    @property
    def name(self) -> str:
        """The name on the command line."""
        return self.figures[0]

    def check(self, results: Results) -> list[Observation]:
        """Return what became of each published statement."""
        return [claim.check(results) for claim in self.claims]

    def in_detail(self, cases: Sequence[Case]) -> list[Case]:
        """Return the cases that the page shows in detail, in its order; these alone run live."""
        found = {(case.series, float(case.x), case.slo_ms): case for case in cases}
        keys = ((detail.series, float(detail.x), detail.slo_ms) for detail in self.details)
        return [found[key] for key in keys if key in found]
