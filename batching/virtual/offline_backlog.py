"""Offline requests in virtual time: those that wait from the beginning on, and those that come meanwhile.

They are numbers from `FIRST_OFFLINE` on, and in no figure of other requests. Schedulers get a few batches of them at a
time, as one that holds a million would decide the same. Requests of stages of offline applications come when all
stages before have ended.
"""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from tenuto.batching.applications.application_graph import ApplicationGraph
from tenuto.batching.applications.application_run import ApplicationRun
from tenuto.batching.applications.stage_times import StageTimes
from tenuto.batching.core.scheduler import Scheduler
from tenuto.batching.core.system import INF, System
from tenuto.placement.application import Application

FIRST_OFFLINE = 1 << 40  # unit: the number of the first one; a schedule has fewer requests
_BATCHES = 4  # derived: largest batches that wait at a scheduler: more than it sends before it gets others


class OfflineApplication:
    """An application that is offline; `models` are those of its stages, by place."""

    def __init__(self, application: Application, place: Mapping[str, int], seed: int) -> None:
        self.application, self._graph = application, ApplicationGraph.of(application)
        self.models = [place[stage.model] for stage in self._graph.stages]
        self._times, self._generator = StageTimes(), np.random.default_rng(seed)

    def begin(self, now_ms: float) -> ApplicationRun:
        """Begin a request."""
        return ApplicationRun(self._graph, now_ms, INF, self._times, is_offline=True)

    def draw_count(self, stage: int) -> int:
        """Return how many requests a stage makes."""
        (count,) = self.application.stages[stage].draw_counts(1, self._generator)
        return int(count)


class _Call(NamedTuple):
    """A request of a stage, of one of an application."""

    application: OfflineApplication
    run: ApplicationRun
    stage: int


class OfflineBacklog:
    """`came` are those so far that clients sent, by model or by the name of an application, and `ended` those of them
    that ended before the run did; `answered` are those of them from `counted_ms` on. `left` are the requests to models
    that no scheduler has got yet. Inf: they have no end."""

    def __init__(
        self,
        left: Mapping[int, float],
        lengths: Callable[[int], tuple[int, int]],
        arrivals: Sequence[tuple[float, int | OfflineApplication]] = (),
    ) -> None:
        """`lengths`: draws the tokens of prompt and output for a model that generates. `arrivals`: time, and model or
        application, of those that come later, ascending."""
        targets = dict.fromkeys(target for _, target in arrivals)
        staged = [model for each in targets if isinstance(each, OfflineApplication) for model in each.models]
        self.left = dict.fromkeys([*staged, *(each for each in targets if isinstance(each, int))], 0.0) | dict(left)
        self.came: dict[int | str, float] = {_key(each): 0.0 for each in [*targets, *left]}
        self.came.update(left.items())
        self.ended, self.answered, self.counted_ms = Counter[int | str](), Counter[int | str](), 0.0
        self._calls: dict[int, deque[_Call]] = {model: deque() for model in staged}  # they go before others
        self._sent: dict[int, tuple[int, _Call | None]] = {}  # of those under way, the model
        self._arrivals = deque(arrivals)
        self._lately = set[int]()  # the models of those that ended since the last look
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
            target = self._arrivals.popleft()[1]
            self.came[_key(target)] += 1
            if isinstance(target, OfflineApplication):
                run = target.begin(now_ms)
                self._come(target, run, run.begin(now_ms), now_ms)
            else:
                self.left[target] += 1

    def _come(self, application: OfflineApplication, run: ApplicationRun, due: list[int], now_ms: float) -> None:
        """Let the requests of stages come that are due, and the request of the application end with the last."""
        for stage in due:  # it grows by those that are due behind stages without requests
            model, count = application.models[stage], application.draw_count(stage)
            due += run.expand(stage, count, now_ms)
            self.left[model] += count
            self._calls[model].extend([_Call(application, run, stage)] * count)
        if run.is_complete:
            self._count(_key(application), now_ms)

    def answer(self, requests: Iterable[int], now_ms: float) -> None:
        """Let requests end; behind the end of the run nothing follows on them."""
        for request in requests if self.left else ():
            model, call = self._sent.pop(request)
            self._lately.add(model)
            if call is None:
                self._count(model, now_ms)
            else:
                self._come(call.application, call.run, call.run.answered(call.stage, now_ms), now_ms)

    def _count(self, target: int | str, now_ms: float) -> None:
        self.ended[target] += 1
        self.answered[target] += now_ms >= self.counted_ms

    def figures(self, names: Sequence[str], tokens: int, part: float | None, others: float | None) -> dict[str, Any]:
        """Return what these requests had so far, of models with these names; see `offline_figures`."""
        named = {each: each if isinstance(each, str) else names[each] for each in self.came}
        left = {name: self.came[each] - self.ended[each] for each, name in named.items()}
        return offline_figures({name: self.answered[each] for each, name in named.items()}, left, tokens, part, others)

    def models_at_work(self) -> set[int]:
        """Return the models whose requests wait or run, or have ended since the last call."""
        ended, self._lately = self._lately, set()
        waiting = {model for model, count in self.left.items() if count > 0}
        return waiting | {model for model, _ in self._sent.values()} | ended

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
                    scheduler.add_offline(now_ms, place, self._send(model), INF)

    def take_back(self, scheduler: Scheduler) -> None:
        """Take the requests back that wait at a scheduler, which decides nothing more: the newest that it has got."""
        for place, model in self._models.items():
            count = scheduler.queued_offline(self._program[place]) if place in self._most else 0
            self.give_back([each for each, (of, _) in reversed(self._sent.items()) if of == model][:count])

    def _send(self, model: int) -> int:
        """Return the number of the model's next request."""
        self.left[model] -= 1
        number, calls = next(self._numbers), self._calls.get(model)
        self._sent[number] = model, calls.popleft() if calls else None
        return number

    def give_back(self, requests: Iterable[int]) -> None:
        """Take requests back whose gpu-let was lost."""
        for model, call in (self._sent.pop(request) for request in requests):
            if model in self.left:
                self.left[model] += 1
                if call is not None:
                    self._calls[model].appendleft(call)

    def draw_sequence(self, place: int) -> tuple[int, int, int] | None:
        """Return the next sequence of a model at a place: its number, tokens of its prompt and output; None: none."""
        model = self._models.get(place, -1)
        if self.left.get(model, 0) < 1:
            return None
        return (self._send(model), *self._lengths(model))


def _key(target: int | OfflineApplication) -> int | str:
    return target if isinstance(target, int) else target.application.name


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
