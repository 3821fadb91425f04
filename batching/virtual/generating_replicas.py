"""The replicas of models that generate, in virtual time: which one writes an answer, and what becomes of sequences."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from heapq import heappush

import numpy as np
from numpy.typing import NDArray

from tenuto.batching.core.scheduler import Scheduler
from tenuto.batching.core.step_scheduler import TRIES, emptiest
from tenuto.batching.core.system import INF, GeneratingGpulet
from tenuto.batching.virtual.offline_backlog import FIRST_OFFLINE, OfflineBacklog
from tenuto.batching.virtual.virtual_steps import RequestTokens, VirtualSteps
from tenuto.outcome import Outcome

_FEW = 4  # pace: offline sequences that wait at a replica


@dataclass(slots=True, eq=False)
class GeneratingReplica:
    """A replica on a gpu-let, with the bounds that its order of steps keeps. `rate_rps` is planned."""

    gpulet: str
    steps: VirtualSteps
    ttft_ms: float
    tpot_ms: float
    rate_rps: float


class GeneratingReplicas:
    """All replicas of a run; those of former plans end what they have begun.

    `steps` has their sequences, in the order of the systems. `by_model` has the places in it, by model of the present
    system. `is_ready` says whether a gpu-let can begin to generate. `written` has the requests that were generated to
    their end, with the place.
    """

    def __init__(
        self,
        times_ms: NDArray[np.float64],
        tokens: RequestTokens | None,
        events: list[tuple[float, int, int]],
        lose: Callable[[float, Outcome, Sequence[int]], None],
    ) -> None:
        """Take what the engine shares.

        Args:
            times_ms: when each request arrives.
            tokens: of each request; needed once a model generates.
            events: the heap of the engine, where place p of a replica is -1 - p.
            lose: ends requests without an answer.
        """
        self.steps: list[VirtualSteps] = []
        self.by_model: dict[int, list[int]] = {}
        self.is_ready: Callable[[str], bool] = lambda _gpulet: True
        self.written: list[tuple[int, int]] = []
        self._times_ms, self._tokens, self._events, self._lose = times_ms, tokens, events, lose
        self._replicas: list[GeneratingReplica] = []
        self._known: dict[tuple[str, str], tuple[GeneratingGpulet, int]] = {}  # with its place, by gpu-let and model

    def install(self, scheduler: Scheduler) -> None:
        """Use the replicas of this scheduler's system from now on. A replica that is as before goes on."""
        system, before = scheduler.system, self._known
        self._known, self.by_model = {}, {}
        for planned in system.generating:
            key = system.gpulets[planned.gpulet].id, system.models[planned.model].name
            old, place = before.pop(key, (None, -1))
            if old is None or replace(planned, gpulet=old.gpulet, model=old.model, rate_rps=old.rate_rps) != old:
                place, order = len(self.steps), scheduler.step_order(planned)
                self.steps.append(
                    VirtualSteps(planned.limits, planned.cost, decided_ahead=planned.decided_ahead, order=order)
                )
                bounds_ms = (INF, INF) if order is None else (planned.ttft_ms, planned.tpot_ms)
                self._replicas.append(GeneratingReplica(key[0], self.steps[place], *bounds_ms, planned.rate_rps))
            self._known[key], self._replicas[place].rate_rps = (planned, place), planned.rate_rps
            self.by_model.setdefault(planned.model, []).append(place)

    def add(self, now: float, model: int, request: int) -> None:
        """Let the emptiest replica generate the answer, or the next one where that refuses it."""
        ready = [place for place in self.by_model[model] if self.is_ready(self._replicas[place].gpulet)]
        outcome = Outcome.REJECTED if ready else Outcome.FAILED
        for _ in range(min(TRIES, len(ready))):
            loads = ((self.steps[place].scheduler.sequences, self._replicas[place].rate_rps) for place in ready)
            if self._is_taken(now, ready.pop(emptiest(loads)), request):
                return
        self._lose(now, outcome, (request,))

    def refill(self, now: float, offline: OfflineBacklog) -> None:
        """Give replicas more offline sequences; their lengths are those of other requests of their model."""
        for model, places in self.by_model.items():
            for place in places:
                steps = self.steps[place]
                while steps.waiting_offline < _FEW and (sequence := offline.draw_sequence(model)) is not None:
                    due_ms = steps.due_ms
                    steps.add(now, *sequence, offline=True)
                    if steps.due_ms != due_ms:
                        heappush(self._events, (steps.due_ms, -1 - place, 0))

    def _is_taken(self, now: float, place: int, request: int) -> bool:
        replica, steps, tokens = self._replicas[place], self.steps[place], self._tokens
        if tokens is None:
            raise ValueError(f"request {request} is for a model that generates: give the tokens of all requests.")
        due_ms = steps.due_ms
        lengths = int(tokens.prompt[request]), int(tokens.output[request])
        first_by_ms = float(self._times_ms[request]) + replica.ttft_ms
        refusal = steps.add(now, request, *lengths, first_by_ms, replica.tpot_ms)
        self._lose_expired(now, steps)
        if steps.due_ms != due_ms:
            heappush(self._events, (steps.due_ms, -1 - place, 0))
        return refusal is None

    def advance(self, now: float, place: int) -> list[int]:
        """Do what is due on a replica now; returns the requests that have ended."""
        steps = self.steps[place]
        steps.advance(now)
        if steps.due_ms < INF:
            heappush(self._events, (steps.due_ms, -1 - place, 0))
        self._lose_expired(now, steps)
        ended, steps.ended = steps.ended, []
        self.written += [(request, place) for request in ended]
        return ended

    def _lose_expired(self, now: float, steps: VirtualSteps) -> None:
        if steps.scheduler.expired:
            expired, steps.scheduler.expired = steps.scheduler.expired, []
            self._lose(now, Outcome.EXPIRED, expired)

    def stop(self, now: float, gpulets: Collection[str]) -> list[int]:
        """End the replicas on gpu-lets that are lost; returns the requests that begin anew elsewhere, as their tokens
        are read again there."""
        lost = [one.steps for one in self._replicas if one.gpulet in gpulets and one.steps.due_ms < INF]
        return [request for steps in lost for request in steps.stop(now) if request < FIRST_OFFLINE]
