"""What tries a rate against a running endpoint, for the search of the highest rate that is in time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from tenuto.batching.virtual.criterion import Goal
from tenuto.loadgen.bench import BenchOptions, run_bench
from tenuto.loadgen.verdict import judged_rows
from tenuto.placement import ModelSpec
from tenuto.placement.application import Application


@dataclass(frozen=True)
class EndpointTrial:
    """The result of a rate. `worst_attainment` is that of the worst model; `invalid` says why a run proves nothing."""

    rate_scale: float
    offered_rps: float
    goodput_rps: float
    attainment: float
    worst_attainment: float
    worst_model: str | None
    invalid: str | None = None
    goal: Goal = field(default_factory=Goal)
    stopped_early: bool = False

    @classmethod
    def of(cls, rate_scale: float, summary: Mapping[str, Any], goal: Goal) -> EndpointTrial:
        """Return the result of a run from its figures."""
        rows = judged_rows(summary).items()
        judged = [(row["attainment"], name) for name, row in rows if row["attainment"] is not None]
        worst, name = min(judged, default=(0.0, None))
        invalid = None if judged else "no request was counted; lengthen the run or raise the rate"
        figures = summary["offered_rps"], summary["goodput_rps"], summary["attainment"] or 0.0
        return cls(rate_scale, *figures, worst, name, invalid, goal)

    @property
    def is_in_time(self) -> bool:
        """Whether the attainment reaches the goal."""
        attained = self.worst_attainment if self.goal.criterion == "each" else self.attainment
        return attained >= self.goal.attainment

    @property
    def ends_search(self) -> str | None:
        """The reason why other rates cannot be measured; None if there is none."""
        return None if self.invalid is None else f"the run at {self.rate_scale:.4g} proves nothing: {self.invalid}"


def on_endpoint(
    models: tuple[ModelSpec, ...],
    applications: tuple[Application, ...],
    options: BenchOptions,
    goal: Goal,
    say: Callable[[str], None],
) -> Callable[[float], EndpointTrial]:
    """Return the function that tries factors on all rates with the load generator; Ctrl-C ends the search.

    Args:
        models: the models to send requests to.
        applications: applications whose stages are among these models.
        options: options of every run, but for the rate scale.
        goal: the goal by which a rate is judged.
        say: is called with a line before every run.
    """

    def attempt(rate_scale: float) -> EndpointTrial:
        say(f"running {options.duration_s:g} s at rate {rate_scale:.4g}")
        result = run_bench(models, replace(options, rate_scale=rate_scale), applications=applications)
        if result.is_interrupted:
            raise KeyboardInterrupt
        invalid = "; ".join(result.verdict.reasons) if result.verdict.result == "INVALID" else None
        return replace(EndpointTrial.of(rate_scale, result.summary, goal), invalid=invalid)

    return attempt
