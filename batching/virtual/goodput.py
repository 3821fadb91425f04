"""Goodput: the highest offered rate that is still answered in time, found by bisection on the rate scale.

The criterion is Symphony's: every model keeps at least 99 % of its requests in time (or, optionally, all requests
together). Where requests fan out over several models and join, the whole of each counts, end to end, in place of the
requests to those models.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from tenuto.batching.core.scheduler import Scheduler
from tenuto.batching.virtual.result import SimulationResult
from tenuto.batching.virtual.simulator import simulate
from tenuto.errors import InvalidInputError, Problem
from tenuto.outcome import Outcome

__all__ = ["Criterion", "GoodputSearch", "Joined", "Offer", "Trial", "find_goodput"]

Criterion = Literal["each", "all"]
Schedule = tuple[NDArray[np.float64], NDArray[np.int32]]


class Joined(Protocol):
    """The requests that fan out and join in one run, by the name of what they belong to (an application)."""

    def answered(self, requests: list[int], now: float, /) -> list[tuple[int, float]]:
        """Return the requests that arrive because these have been answered, each with its deadline."""
        ...

    def given_up(self, requests: Sequence[int], /) -> None:
        """Take note that these will not be answered."""
        ...

    def stages(self) -> dict[str, tuple[int, ...]]:
        """Return the models that each is made of."""
        ...

    def offered(self) -> dict[str, int]:
        """Return how many arrive after the warm-up."""
        ...

    def lost_so_far(self) -> dict[str, int]:
        """Return how many of those have been given up."""
        ...

    def ended(self, result: SimulationResult, /) -> dict[str, tuple[int, int]]:
        """Return how many of those that arrived in a run were in time, and how many arrived."""
        ...


@dataclass(frozen=True)
class Offer:
    """What is offered in one run; `joined` says what follows on answers, at times that are NaN behind the others."""

    times_ms: NDArray[np.float64]
    model_index: NDArray[np.int32]
    deadlines_ms: NDArray[np.float64] | None = None
    joined: Joined | None = None


LARGEST_SCALE = 2.0**20
LEAST_REQUESTS = 100  # a run with fewer measured requests cannot show 99 %


@dataclass(frozen=True)
class Trial:
    """One simulated rate: attainment of the worst model and of all requests. A hopeless run is stopped early."""

    rate_scale: float
    passed: bool
    offered_rps: float
    goodput_rps: float
    worst_model: str | None
    worst_attainment: float
    attainment: float
    stopped_early: bool


@dataclass(frozen=True)
class GoodputSearch:
    """The answer so far. `best` is the run at `rate_scale`; None when no tried rate satisfied the criterion."""

    rate_scale: float
    upper_scale: float  # the lowest rate scale known to fail; inf if none did
    best: SimulationResult | None
    trials: tuple[Trial, ...]
    criterion: Criterion
    attainment: float
    interrupted: bool

    def summary(self) -> dict[str, Any]:
        """Return the figures of `goodput --json`; those of the best run are under `simulation`."""
        best = self.best
        return {
            "goodput_rps": best.goodput_rps if best else 0.0,
            "rate_scale": self.rate_scale,
            "offered_rps": float(best.counts().sum()) / best.window_s if best else 0.0,
            "bracket_pct": 100.0 * (self.upper_scale / self.rate_scale - 1.0)
            if self.rate_scale > 0 and math.isfinite(self.upper_scale)
            else None,
            "criterion": self.criterion,
            "required_attainment": self.attainment,
            "interrupted": self.interrupted,
            "trials": [
                {
                    "rate_scale": t.rate_scale,
                    "passed": t.passed,
                    "offered_rps": t.offered_rps,
                    "attainment": t.attainment,
                    "worst_model": t.worst_model,
                    "worst_attainment": t.worst_attainment,
                    "stopped_early": t.stopped_early,
                }
                for t in self.trials
            ],
            "simulation": best.summary() if best else None,
        }


def find_goodput(
    make_scheduler: Callable[[float], Scheduler],
    make_schedule: Callable[[float], Schedule | Offer],
    *,
    duration_s: float,
    warmup_s: float | None = None,
    criterion: Criterion = "each",
    attainment: float = 0.99,
    tolerance: float = 0.01,
    start_scale: float = 1.0,
    growth: float = 2.0,
    progress: Callable[[Trial, GoodputSearch], None] | None = None,
) -> GoodputSearch:
    """Search the rate scale until the bracket between passing and failing is narrower than `tolerance`.

    Args:
        make_scheduler: a fresh scheduler for a rate scale.
        make_schedule: the arrivals (times in ms, model index) at a rate scale, `duration_s` long; an `Offer` where
            requests follow on others.
        duration_s: length of each run.
        warmup_s: not counted; default: the first 5 %.
        criterion: `each`: every model that has a host, and every application whose models have; `all`: their requests
            together.
        attainment: the share of requests to be answered in time.
        tolerance: relative width of the final bracket.
        start_scale: where to begin.
        growth: step of the scale until one passes and one fails; small where the start is a good guess.
        progress: called after each run with it and the search so far.

    Returns:
        The best answer found; on Ctrl-C the best so far, marked `interrupted`.

    Raises:
        InvalidInputError: arguments out of range.
    """
    for name, value, valid in (
        ("duration_s", duration_s, math.isfinite(duration_s) and duration_s > 0),
        ("attainment", attainment, 0 < attainment <= 1),
        ("tolerance", tolerance, 0 < tolerance < 1),
        ("start_scale", start_scale, math.isfinite(start_scale) and start_scale > 0),
        ("growth - 1", growth - 1, math.isfinite(growth) and growth > 1),
    ):
        if not valid:
            raise InvalidInputError(Problem(name, value, "out of range", "Give a positive, finite number."))
    low, high = 0.0, math.inf
    best: SimulationResult | None = None
    trials: list[Trial] = []

    def answer(interrupted: bool = False) -> GoodputSearch:
        return GoodputSearch(low, high, best, tuple(trials), criterion, attainment, interrupted)

    scale = start_scale
    try:
        while True:
            trial, result = _try(
                make_scheduler(scale), make_schedule(scale), scale, duration_s, warmup_s, criterion, attainment
            )
            trials.append(trial)
            if trial.passed:
                low, best = scale, result
            else:
                high = scale
            if progress is not None:
                progress(trial, answer())
            if low and math.isfinite(high):
                if high / low - 1 < tolerance:
                    return answer()
                scale = math.sqrt(low * high)
            elif low:
                if low >= LARGEST_SCALE:
                    return answer()
                scale = low * growth
            else:
                if result.measured.sum() < LEAST_REQUESTS:
                    return answer()
                scale = high / growth
    except KeyboardInterrupt:
        return answer(interrupted=True)


def _try(
    scheduler: Scheduler,
    schedule: Schedule | Offer,
    scale: float,
    duration_s: float,
    warmup_s: float | None,
    criterion: Criterion,
    attainment: float,
) -> tuple[Trial, SimulationResult]:
    offer = schedule if isinstance(schedule, Offer) else Offer(*schedule)
    joined = offer.joined
    models = scheduler.system.models
    hosted = scheduler.system.served
    stages = joined.stages() if joined is not None else {}
    alone = sorted(hosted.difference(*stages.values()))
    judged_joins = [name for name, parts in stages.items() if hosted.issuperset(parts)]
    begin_ms = 1000.0 * (0.05 * duration_s if warmup_s is None else warmup_s)
    by_index = np.bincount(offer.model_index[offer.times_ms >= begin_ms], minlength=len(models)).tolist()
    offered = {models[m].name: int(by_index[m]) for m in alone}
    offered_joins = joined.offered() if joined is not None else {}
    offered |= {name: offered_joins[name] for name in judged_joins}
    allowed = {name: (1.0 - attainment) * count for name, count in offered.items()}
    allowed_together = sum(allowed.values())
    stopped = False

    def stop(dropped: list[int]) -> bool:
        """Whether the drops so far already exceed what the whole run may lose."""
        nonlocal stopped
        lost = {models[m].name: dropped[m] for m in alone}
        if joined is not None:
            so_far = joined.lost_so_far()
            lost |= {name: so_far[name] for name in judged_joins}
        if criterion == "all":
            stopped = sum(lost.values()) > allowed_together
        else:
            stopped = any(count > allowed[name] for name, count in lost.items())
        return stopped

    result = simulate(
        scheduler, offer.times_ms, offer.model_index, duration_s=duration_s, warmup_s=warmup_s, stop=stop,
        deadlines_ms=offer.deadlines_ms, followers=joined.answered if joined is not None else None,
        given_up=joined.given_up if joined is not None else None,
    )  # fmt: skip
    counts = result.counts()
    # What was offered in the run itself, which ends early when it is hopeless.
    ended = {models[m].name: (int(counts[m, Outcome.OK]), int(counts[m].sum())) for m in alone}
    if joined is not None:
        joins_ended = joined.ended(result)
        ended |= {name: joins_ended[name] for name in judged_joins}
    judged = [(good / total, name) for name, (good, total) in ended.items() if offered[name] and total]
    worst, worst_name = min(judged, default=(0.0, None))
    total = sum(count for _, count in ended.values())
    together = sum(good for good, _ in ended.values()) / total if total else 0.0
    passed = not stopped and bool(judged) and (worst if criterion == "each" else together) >= attainment
    return Trial(
        rate_scale=scale,
        passed=passed,
        offered_rps=float(counts.sum()) / result.window_s,
        goodput_rps=result.goodput_rps,
        worst_model=worst_name,
        worst_attainment=worst,
        attainment=together,
        stopped_early=stopped,
    ), result
