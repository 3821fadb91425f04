"""Offline requests in virtual time: those that wait from the beginning on, and those that come meanwhile.

They are numbers from `FIRST_OFFLINE` on, and in no figure of other requests. Schedulers get a few batches of them at a
time, as one that holds a million would decide the same.
"""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tenuto.batching.core.scheduler import Scheduler
from tenuto.batching.core.system import INF, System

FIRST_OFFLINE = 1 << 40  # unit: the number of the first one; a schedule has fewer requests
_BATCHES = 4  # derived: largest batches that wait at a scheduler: more than it sends before it gets others


class OfflineBacklog:
    """`came` are those so far, by model, and `left` those of them that no scheduler has got yet; inf: they have no
    end."""

    def __init__(
        self,
        left: Mapping[int, float],
        lengths: Callable[[int], tuple[int, int]],
        arrivals: Sequence[tuple[float, int]] = (),
    ) -> None:
        """`lengths`: draws the tokens of prompt and output for a model that generates. `arrivals`: time and model of
        those that come later, ascending."""
        self.left = dict.fromkeys((model for _, model in arrivals), 0.0) | dict(left)
        self.came = Counter[int](self.left)
        self._arrivals = deque(arrivals)
        self._lengths = lengths
        self._numbers = itertools.count(FIRST_OFFLINE)
        self._places: dict[int, int] = {}  # by model, of those that run in batches
        self._models: dict[int, int] = {}  # by place among the models of the system
        self._most: dict[int, int] = {}  # largest batch, by place
        self._program: dict[int, int] = {}

    def follow(self, index: Sequence[int], system: System) -> None:
        """Take the system that serves from now on; `index`: the places of the models in it, -1: not served."""
        self._models = {index[model]: model for model in self.left if index[model] >= 0}
        self._program = {place: system.program_of[place] for place in self._models}
        hosts = system.distinct_hosts()
        self._most = {
            place: max(len(each[program].latency_ms) - 1 for each in hosts if program in each)
            for place, program in self._program.items()
            if program in system.hosted
        }

    @property
    def next_ms(self) -> float:
        """When the next request comes."""
        return self._arrivals[0][0] if self._arrivals else INF

    def arrive(self, now_ms: float) -> None:
        """Let the requests come that are due."""
        while self.next_ms <= now_ms:
            model = self._arrivals.popleft()[1]
            self.left[model] += 1
            self.came[model] += 1

    def end(self) -> None:
        """Let no more requests come or run."""
        self._arrivals.clear()
        self.left.clear()

    def refill(self, scheduler: Scheduler, now_ms: float) -> None:
        """Give a scheduler more requests that run in batches."""
        for place, most in self._most.items():
            model = self._models[place]
            if self.left.get(model, 0) >= 1 and scheduler.queued_offline(self._program[place]) < _BATCHES * most:
                for _ in range(int(min(_BATCHES * most, self.left[model]))):
                    self.left[model] -= 1
                    scheduler.add_offline(now_ms, place, next(self._numbers), INF)

    def take_back(self, scheduler: Scheduler) -> None:
        """Take the requests back that wait at a scheduler, which decides nothing more."""
        for place in self._most:
            if self._models[place] in self.left:
                self.left[self._models[place]] += scheduler.queued_offline(self._program[place])

    def give_back(self, program: int, count: int) -> None:
        """Take requests back whose gpu-let was lost."""
        for place, model in self._models.items():
            if self._program[place] == program and model in self.left:
                self.left[model] += count

    def draw_sequence(self, place: int) -> tuple[int, int, int] | None:
        """Return the next sequence of a model at a place: its number, tokens of its prompt and output; None: none."""
        model = self._models.get(place, -1)
        if self.left.get(model, 0) < 1:
            return None
        self.left[model] -= 1
        return (next(self._numbers), *self._lengths(model))


def offline_figures(
    answered: Mapping[str, int], left: Mapping[str, float], tokens: int, part: float | None, others: float | None
) -> dict[str, Any]:
    """Return what offline requests had, by model: how many were answered, and how many waited or ran at the end (None:
    they had no end); the tokens that were read and made for them, and their part of the GPU time, and of what others
    left idle of it. `part` and `others` are the parts that they and all others had; None: unknown."""
    idle = None if others is None else 1.0 - others
    return {
        "requests": {name: answered.get(name, 0) for name in left},
        "waiting": {name: None if count == INF else int(count) for name, count in left.items()},
        "tokens": tokens,
        "part_of_gpu_time": part,
        "part_of_idle": part / idle if part is not None and idle is not None and idle > 0.0 else None,
    }


def online_of(requests: Sequence[int]) -> list[int]:
    """Return those that are not offline."""
    return [request for request in requests if request < FIRST_OFFLINE]
