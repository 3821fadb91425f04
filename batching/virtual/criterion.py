"""Whether a simulated load counts as in time, and when its run is hopeless. By Symphony's criterion, every model must
have at least 99 % of its requests in time. The other criterion asks this of all requests together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from tenuto.batching.core.system import System
from tenuto.batching.virtual.result import SimulationResult
from tenuto.outcome import ATTAINED, Outcome

Criterion = Literal["each", "all"]
Stop = Callable[[Sequence[int]], bool]
_LEAST_REQUESTS = 100  # derived: a run with fewer requests cannot show 99 %


def never(_lost_by_model: Sequence[int]) -> bool:
    """End no run early."""
    return False


class JudgedRequests(Protocol):
    """The requests by which a run is judged, by the name of their model or application."""

    def offered(self) -> dict[str, int]:
        """Return how many requests arrive after the warm-up."""
        ...

    def lost(self, lost_by_model: Sequence[int]) -> dict[str, int]:
        """Return how many of these requests have missed their deadline so far, from the losses of each model."""
        ...

    def ended(self, result: SimulationResult) -> dict[str, tuple[int, int]]:
        """Return how many requests of a run were in time, and how many arrived."""
        ...


class HostedModels:
    """Every model that has a host, judged by its own requests; models without a host are left out."""

    def __init__(
        self, system: System, times_ms: NDArray[np.float64], model_index: NDArray[np.int32], begin_ms: float
    ) -> None:
        """`begin_ms`: end of the warm-up."""
        self._index = {system.reported[index].name: index for index in sorted(system.reported_served)}
        self._arriving = np.bincount(model_index[times_ms >= begin_ms], minlength=len(system.reported)).tolist()

    def offered(self) -> dict[str, int]:
        """Return how many requests arrive after the warm-up."""
        return {name: self._arriving[index] for name, index in self._index.items()}

    def lost(self, lost_by_model: Sequence[int]) -> dict[str, int]:
        """Return how many of these requests have missed their deadline so far."""
        return {name: lost_by_model[index] for name, index in self._index.items()}

    def ended(self, result: SimulationResult) -> dict[str, tuple[int, int]]:
        """Return how many requests of a run were in time, and how many arrived."""
        counts = result.counts()
        return {name: (int(counts[i, Outcome.OK]), int(counts[i].sum())) for name, i in self._index.items()}


@dataclass(frozen=True)
class Goal:
    """The share of requests that must be in time, of every model (`each`) or of all together (`all`)."""

    criterion: Criterion = "each"
    attainment: float = ATTAINED

    def is_out_of_reach(self, offered: Mapping[str, int], lost: Mapping[str, int]) -> bool:
        """Return whether more requests are lost already than a whole run may lose."""
        may_miss = 1.0 - self.attainment
        if self.criterion == "all":
            return sum(lost.values()) > may_miss * sum(offered.values())
        return any(count > may_miss * offered[name] for name, count in lost.items())


@dataclass(frozen=True)
class Trial:
    """One simulated load: attainment of the worst model and of all requests. A hopeless run is stopped early."""

    result: SimulationResult
    is_in_time: bool
    worst_model: str | None
    worst_attainment: float
    attainment: float
    stopped_early: bool

    @property
    def offered_rps(self) -> float:
        """Requests that arrived per second of the measured window."""
        return float(self.result.counts().sum()) / self.result.window_s

    @property
    def goodput_rps(self) -> float:
        """Requests answered in time per second of the measured window."""
        return self.result.goodput_rps

    @property
    def ends_search(self) -> str | None:
        """The reason why a lower rate would show nothing; None if there is none."""
        if self.is_in_time or self.result.measured.sum() >= _LEAST_REQUESTS:
            return None
        return f"a run with fewer than {_LEAST_REQUESTS} requests shows nothing"


def try_load(run: Callable[[Stop], SimulationResult], judged: JudgedRequests, goal: Goal) -> Trial:
    """Run a load in virtual time until it is over or hopeless, and judge it.

    Args:
        run: simulates the load; its argument goes to `simulate(stop=…)`.
        judged: the requests that count.
        goal: the share of them that must be in time.
    """
    offered = judged.offered()
    stopped = False

    def stop(lost_by_model: Sequence[int]) -> bool:
        nonlocal stopped
        stopped = goal.is_out_of_reach(offered, judged.lost(lost_by_model))
        return stopped

    result = run(stop)
    # Only requests that arrived in the run count: a hopeless run ends early.
    ended = {name: counts for name, counts in judged.ended(result).items() if offered[name] and counts[1]}
    worst, worst_name = min(((good / total, name) for name, (good, total) in ended.items()), default=(0.0, None))
    total = sum(count for _, count in ended.values())
    together = sum(good for good, _ in ended.values()) / total if total else 0.0
    is_in_time = not stopped and (worst if goal.criterion == "each" else together) >= goal.attainment
    return Trial(result, is_in_time, worst_name, worst, together, stopped)
