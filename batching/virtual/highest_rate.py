"""The search for the highest rate that is still in time. It takes steps until one rate is in time and one is not, and
then halves the gap.

The search knows neither the simulator nor an endpoint: a function that tries one rate is given to it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from tenuto.errors import Problem, raise_if_any

_FURTHEST = 2.0**20  # limit: the largest factor from the start, up or down: beyond it, something else must be the limit


class Tried(Protocol):
    """The result at one rate scale."""

    @property
    def is_in_time(self) -> bool:
        """Whether enough requests were in time at this rate."""
        ...

    @property
    def ends_search(self) -> str | None:
        """The reason why trying other rates would tell nothing; None as a rule."""
        ...


T = TypeVar("T", bound=Tried)


@dataclass(frozen=True)
class SearchLimits:
    """Where the search begins and when it ends."""

    tolerance: float = 0.01  # relative width of the last bracket
    most_runs: int = 64  # limit
    start_scale: float = 1.0
    growth: float = 2.0  # factor of a step; choose it small when the start is a good guess

    def check(self) -> None:
        """Raise `InvalidInputError` with every setting out of range."""
        problems = []
        if not 0 < self.tolerance < 1:
            problems.append(Problem("--tolerance", self.tolerance, "must be between 0 and 1", "Give for example 0.02."))
        if self.most_runs < 1:
            problems.append(Problem("--runs", self.most_runs, "must be at least 1", "Give for example 12."))
        if not (math.isfinite(self.start_scale) and self.start_scale > 0):
            problems.append(Problem("--rate-scale", self.start_scale, "must be a positive number", "Give 1."))
        if not (math.isfinite(self.growth) and self.growth > 1):
            problems.append(Problem("growth", self.growth, "must be above 1", "Give 2."))
        raise_if_any(problems)


@dataclass
class HighestRate(Generic[T]):
    """The answer so far. `best` was in time at `rate_scale` (0: no rate was). `upper_scale` was not in time (inf: every
    rate was). `ended` says why the search stopped.
    """

    rate_scale: float = 0.0
    upper_scale: float = math.inf
    best: T | None = None
    ended: str = "interrupted"
    tried: list[tuple[float, T]] = field(default_factory=list)

    @property
    def is_interrupted(self) -> bool:
        """Whether Ctrl-C ended it."""
        return self.ended == "interrupted"

    @property
    def bracket(self) -> float:
        """Relative distance of the two scales; inf while one is unknown."""
        return self.upper_scale / self.rate_scale - 1.0 if self.rate_scale else math.inf


def find_highest_rate(
    attempt: Callable[[float], T],
    limits: SearchLimits,
    progress: Callable[[HighestRate[T]], None] = lambda _found: None,
) -> HighestRate[T]:
    """Search the highest rate scale that is in time; on Ctrl-C the answer is the best so far.

    Args:
        attempt: tries one rate scale.
        limits: where to begin and when to end.
        progress: called after every run.

    Raises:
        InvalidInputError: limits out of range.
    """
    limits.check()
    highest: HighestRate[T] = HighestRate()
    scale = limits.start_scale
    try:
        while len(highest.tried) < limits.most_runs:
            tried = attempt(scale)
            highest.tried.append((scale, tried))
            if tried.ends_search is not None:
                highest.ended = tried.ends_search
                return highest
            if tried.is_in_time:
                highest.rate_scale, highest.best = scale, tried
            else:
                highest.upper_scale = scale
            progress(highest)
            if highest.bracket <= limits.tolerance:
                highest.ended = "found"
                return highest
            if highest.best is not None and math.isfinite(highest.upper_scale):
                scale = math.sqrt(highest.rate_scale * highest.upper_scale)
            elif not 1.0 / _FURTHEST < scale / limits.start_scale < _FURTHEST:
                highest.ended = "no rate is in time" if highest.best is None else "every rate is in time"
                return highest
            else:
                scale = scale / limits.growth if highest.best is None else scale * limits.growth
        highest.ended = f"stopped after {limits.most_runs} runs"
    except KeyboardInterrupt:
        highest.ended = "interrupted"
    return highest
