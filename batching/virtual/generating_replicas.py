"""The replicas of models that generate, in virtual time: which one writes an answer, and what becomes of sequences."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from heapq import heappush

import numpy as np
from numpy.typing import NDArray

from tenuto.batching.core.scheduler import Scheduler
from tenuto.batching.core.step_scheduler import TRIES, emptiest
from tenuto.batching.core.system import INF, TIME_TOLERANCE_MS, GeneratingGpulet
from tenuto.batching.virtual.offline_backlog import OfflineBacklog
from tenuto.batching.virtual.virtual_steps import RequestTokens, VirtualSteps
from tenuto.outcome import Outcome
from tenuto.placement.generates import TokenSlo

_FEW = 4  # pace: offline sequences that wait at a replica


@dataclass(slots=True, eq=False)
class GeneratingReplica:
    """A replica on a gpu-let, with the SLO that its order of steps keeps, if it keeps one, and the mean length of an
    answer. `rate_rps` is planned."""

    gpulet: str
    steps: VirtualSteps
    slo: TokenSlo | None
    output_tokens: float
    rate_rps: float

    def bounds_ms(
        self, now: float, arrived_ms: float, output_tokens: int, due_ms: float | None, *, is_whole: bool
    ) -> tuple[float, float]:
        """Return when a first token is due, and the time for each further one. The whole answer may be due at a time,
        or the first token."""
        if self.slo is None:
            return INF, INF
        if due_ms is None or not is_whole:
            return arrived_ms + self.slo.ttft_ms if due_ms is None else due_ms, self.slo.tpot_ms
        slo = self.slo.within(max(due_ms - now, TIME_TOLERANCE_MS), min(self.output_tokens, output_tokens))
        return now + slo.ttft_ms, slo.tpot_ms


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
        self._places: dict[int, int] = {}  # of requests under way
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
                slo, tokens = None, 1.0
                if order is not None and planned.ttft_ms < INF:
                    slo = TokenSlo(ttft_ms=planned.ttft_ms, tpot_ms=planned.tpot_ms)
                    tokens += (system.models[planned.model].slo_ms - slo.ttft_ms) / slo.tpot_ms
                self._replicas.append(GeneratingReplica(key[0], self.steps[place], slo, tokens, planned.rate_rps))
            self._known[key], self._replicas[place].rate_rps = (planned, place), planned.rate_rps
            self.by_model.setdefault(planned.model, []).append(place)

    def add(self, now: float, model: int, request: int, due_ms: float | None = None, *, is_whole: bool = False) -> None:
        """Let the emptiest replica generate the answer, or the next one where that refuses it. `due_ms`: when its first
        token is due, or the whole answer (`is_whole`); None: the SLO of the model counts."""
        ready = [place for place in self.by_model[model] if self.is_ready(self._replicas[place].gpulet)]
        outcome = Outcome.REJECTED if ready else Outcome.FAILED
        for _ in range(min(TRIES, len(ready))):
            loads = ((self.steps[place].scheduler.sequences, self._replicas[place].rate_rps) for place in ready)
            if self._try_replica(now, ready.pop(emptiest(loads)), request, due_ms, is_whole=is_whole):
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

    def offline_work(self) -> tuple[int, float, float]:
        """Return of all replicas until now: the tokens of offline sequences, and how long steps took, in all and by
        these sequences, in ms."""
        tokens, spent_ms = sum(steps.offline_tokens for steps in self.steps), [0.0, 0.0]
        for steps in self.steps:
            for place, spans in enumerate((steps.busy, steps.busy_offline)):
                spent_ms[place] += sum(end - begin for begin, end in spans)
        return tokens, spent_ms[0], spent_ms[1]

    def _try_replica(self, now: float, place: int, request: int, due_ms: float | None, *, is_whole: bool) -> bool:
        replica, steps, tokens = self._replicas[place], self.steps[place], self._tokens
        if tokens is None:
            raise ValueError(f"request {request} is for a model that generates: give the tokens of all requests.")
        ends_ms = steps.due_ms
        lengths = int(tokens.prompt[request]), int(tokens.output[request])
        bounds_ms = replica.bounds_ms(now, float(self._times_ms[request]), lengths[1], due_ms, is_whole=is_whole)
        refusal = steps.add(now, request, *lengths, *bounds_ms)
        if refusal is None:
            self._places[request] = place
        self._lose_expired(now, steps)
        if steps.due_ms != ends_ms:
            heappush(self._events, (steps.due_ms, -1 - place, 0))
        return refusal is None

    def cancel(self, now: float, request: int) -> bool:
        """Forget a request whose answer is not written to its end; False if there is none."""
        place = self._places.pop(request, -1)
        if place < 0 or not self.steps[place].cancel(now, request):
            return False
        if self.steps[place].due_ms < INF:
            heappush(self._events, (self.steps[place].due_ms, -1 - place, 0))
        return True

    def advance(self, now: float, place: int) -> list[int]:
        """Do what is due on a replica now; returns the requests that have ended."""
        steps = self.steps[place]
        steps.advance(now)
        if steps.due_ms < INF:
            heappush(self._events, (steps.due_ms, -1 - place, 0))
        self._lose_expired(now, steps)
        ended, steps.ended = steps.ended, []
        for request in ended:
            self._places.pop(request, None)
        self.written += [(request, place) for request in ended]
        return ended

    def _lose_expired(self, now: float, steps: VirtualSteps) -> None:
        if steps.scheduler.expired:
            expired, steps.scheduler.expired = steps.scheduler.expired, []
            for request in expired:
                self._places.pop(request, None)
            self._lose(now, Outcome.EXPIRED, expired)

    def stop(self, now: float, gpulets: Collection[str]) -> list[int]:
        """End the replicas on gpu-lets that are lost; returns the requests that begin anew elsewhere, as their tokens
        are read again there."""
        lost = [one.steps for one in self._replicas if one.gpulet in gpulets and one.steps.due_ms < INF]
        return [request for steps in lost for request in steps.stop(now)]
