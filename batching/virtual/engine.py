"""The one loop of virtual time: a schedule of arrivals, the scheduler that batches them, and emulated gpu-lets.

The engine owns the clock and the outcome of every request. It knows nothing about plans or how batches are chosen:
`simulate` gives it one scheduler for a whole run, `RunningSystem` a new one with every plan. Nothing here is random:
the same schedule and systems give the same bytes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from heapq import heappop, heappush
from itertools import chain
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from tenuto.batching.core.scheduler import Dispatch, Drop, Preempt, Reject, Scheduler
from tenuto.batching.core.scheduler_status import SchedulerStatus
from tenuto.batching.core.system import INF, System
from tenuto.batching.rehearsal.observer import Rehearsals, rehearsals_of
from tenuto.batching.rehearsal.replay import Replay
from tenuto.batching.virtual.generating_replicas import GeneratingReplicas
from tenuto.batching.virtual.offline_backlog import FIRST_OFFLINE, OfflineBacklog, online_of
from tenuto.batching.virtual.virtual_gpulets import EmulatedBatch, EmulatedGpulets
from tenuto.batching.virtual.virtual_steps import RequestTokens
from tenuto.errors import InvalidInputError
from tenuto.outcome import Outcome
from tenuto.profiles.size_classes import find_classes

# An event on the heap is (time in ms, source, stamp). The source is the place of a gpu-let whose batch begins or ends
# (stamp: version of its batch), -1 - n for a step of replica n that generates, or one of these.
_REHEARSAL = 1 << 60  # format: its result is due; stamp: the first gpu-let of the system that it was for
_GIVEN_UP = 1 << 61  # format: an answer that is not there in time; stamp: the request
_OFFLINE = 1 << 62  # format: an offline request comes
_ANSWERED = 1 << 63  # format: answers end their way back


class Follows(Protocol):
    """Says which requests follow on the ends of others, as the stages of an application do, and which are withdrawn.

    In the schedule, requests that follow stand behind all others and have the time NaN. Those that never arrive are not
    counted. `answered` and `given_up` return requests with their deadlines in ms: those arrive now. Requests with None
    are withdrawn: they end as expired, unless a gpu-let has them already.
    """

    def follow(self, system: System) -> None:
        """Take note of the system that serves from now on."""

    def arrived(self, request: int, now_ms: float) -> float | None:
        """Return the deadline of a request that arrives by the schedule; None: it is given up before it costs
        anything."""

    def whole_by_ms(self, request: int) -> float | None:
        """Return when the whole answer of a request to a model that generates must be there, or it is given up: INF
        where only its first token is due, at its deadline. None: the SLO of the model counts."""

    def answered(
        self, requests: Sequence[int], now_ms: float, first_ms: Mapping[int, float]
    ) -> Sequence[tuple[int, float | None]]:
        """Take note that these requests were answered. `first_ms`: when the first token of each came that was
        generated."""

    def given_up(self, requests: Sequence[int], outcome: Outcome, now_ms: float) -> Sequence[tuple[int, float | None]]:
        """Take note that these requests get no answer."""


class Engine:
    """Invariant: every arrival before number `next` has ended, waits in the scheduler, or runs on a gpu-let.

    `times_ms` and `deadlines_ms` are by request. `lost` has the requests that were never answered, by outcome.
    `followed` has the requests that arrived because others ended; `planned` is the number of all others.
    `batch_ended` is called with the time, the place of the gpu-let and the batch, after the scheduler was told.
    """

    def __init__(
        self,
        times_ms: NDArray[np.float64],
        model_index: NDArray[np.int32],
        deadlines_ms: NDArray[np.float64],
        follows: Follows | None = None,
        *,
        counted_from_ms: float = INF,
        tokens: RequestTokens | None = None,
        sizes: NDArray[np.int64] | None = None,
        offline: OfflineBacklog | None = None,
    ) -> None:
        """`counted_from_ms`: `lost_by_model` counts the lost requests that arrived from then on, of models with
        gpu-lets. `tokens`: needed when a model generates. `sizes`: a row for each request, needed when a model has size
        classes. `offline`: what waits beside these requests."""
        self.times_ms, self.models, self.deadlines_ms = times_ms, model_index, deadlines_ms
        self.planned = len(times_ms)
        if follows is not None:
            self.times_ms, self.deadlines_ms = times_ms.copy(), deadlines_ms.copy()
            self.planned = int(np.isfinite(times_ms).sum())
        self.now_ms = 0.0
        self.next = 0
        self.scheduler: Scheduler | None = None
        self._rehearsals: Rehearsals | None = None
        self._replay: Replay | None = None
        self.gpulets = EmulatedGpulets()
        # By model of the schedule: its place among those that the scheduler's system reports; -1: not served.
        self.reported_places: Sequence[int] = ()
        self._first_places = np.zeros(0, dtype=np.int64)  # likewise: its first place among the system's models
        self._size_places: NDArray[np.int64] | None = None  # by request, where models have size classes
        self.replicas = GeneratingReplicas(self.times_ms, tokens, self.gpulets.events, self.lose)
        self.batch_ended: Callable[[float, int, EmulatedBatch], None] | None = None
        self.lost: dict[Outcome, list[Sequence[int]]] = {
            outcome: [] for outcome in (Outcome.EXPIRED, Outcome.REJECTED, Outcome.FAILED)
        }
        self.lost_by_model: list[int] = []
        self.followed: list[int] = []
        self._retried: set[int] = set()
        self._follows = follows
        self._answers: deque[tuple[Sequence[int], Mapping[int, float]]] = deque()  # on their way back
        self._counted_from_ms = counted_from_ms
        self._sizes = sizes
        self._offline = offline

    def install(
        self, scheduler: Scheduler, index: Sequence[int], data_ms_by_model: Sequence[float] | None = None
    ) -> None:
        """Use this scheduler from now on. Batches that run on gpu-lets of the last scheduler end there.

        Args:
            scheduler: a fresh one.
            index: the place of each of the schedule's models among those that the scheduler's system reports; -1: not
                served.
            data_ms_by_model: see `simulate`.

        Raises:
            InvalidInputError: a model has size classes, and the requests have no sizes.
        """
        classes_of = scheduler.system.classes_of
        if self._offline is not None and self.scheduler is not None:
            self._offline.take_back(self.scheduler)
        self.scheduler, self.reported_places = scheduler, index
        self._first_places = np.array([-1 if place < 0 else classes_of[place][0] for place in index], dtype=np.int64)
        self._size_places = None
        if any(place >= 0 and len(classes_of[place]) > 1 for place in index):
            self._size_places = self._find_classes(scheduler.system)
        self._rehearsals, self._replay = rehearsals_of(scheduler), None
        self.lost_by_model = self.lost_by_model or [0] * len(index)
        self.gpulets.add(scheduler.system, data_ms_by_model)
        if scheduler.system.generating or self.replicas.steps:
            self.replicas.install(scheduler)
        if self._follows is not None:
            self._follows.follow(scheduler.system)
        if self._offline is not None:
            self._offline.follow(self._first_places.tolist(), scheduler.system)
            self._refill(self._offline, scheduler, self.now_ms)

    def _refill(self, offline: OfflineBacklog, scheduler: Scheduler, now: float) -> None:
        """Let offline requests come that are due, and run, and look again when the next one comes."""
        offline.arrive(now)
        offline.refill(scheduler, now)
        self.replicas.refill(now, offline)
        if offline.next_ms < INF:
            heappush(self.gpulets.events, (offline.next_ms, _OFFLINE, 0))

    def _find_classes(self, system: System) -> NDArray[np.int64]:
        """Return the model or size class of every request in the scheduler's system; -1: none serves it."""
        places = self._first_places[self.models]
        for model, place in enumerate(self.reported_places):
            classes = system.classes_of[place] if place >= 0 else ()
            if len(classes) > 1:
                if self._sizes is None:
                    raise InvalidInputError("a model has size classes: give the sizes of all requests.")
                grid = [system.models[each].sizes for each in classes]
                of_model = np.flatnonzero(self.models == model)
                within = find_classes(grid, self._sizes[of_model, : len(grid[0])])
                is_served = np.array([each in system.served for each in classes] + [False])
                places[of_model] = np.where(is_served[within], classes[0] + within, -1)
        return places

    def place_of(self, request: int) -> int:
        """Return the place of a request's model or size class among the models of the scheduler's system; -1: none."""
        return int(
            self._first_places[self.models[request]] if self._size_places is None else self._size_places[request]
        )

    def serve(self, last: int) -> None:
        """Let the arrivals before number `last` come, and do all events until then."""
        scheduler, rows = self.scheduler, range(self.next, last)
        if scheduler is None:
            if rows:
                self.lose(float(self.times_ms[last - 1]), Outcome.REJECTED, rows)
            self.next = last
            return
        events, now, settle, add = self.gpulets.events, self.now_ms, self.settle, scheduler.add_request
        rehearsals, generated, follows = self._rehearsals, self.replicas.by_model, self._follows
        places = (
            self._first_places[self.models[self.next : last]]
            if self._size_places is None
            else self._size_places[self.next : last]
        )
        for request, at, model, deadline in zip(
            rows,
            self.times_ms[self.next : last].tolist(),
            places.tolist(),
            self.deadlines_ms[self.next : last].tolist(),
            strict=True,
        ):
            if scheduler.next_wake_ms < at or (events and events[0][0] <= at):
                settle(at, now)
            now = at
            if follows is not None:
                deadline = follows.arrived(request, at)
                if deadline is not None:
                    self.deadlines_ms[request] = deadline
            if deadline is None:
                self.lose(at, Outcome.EXPIRED, (request,))
            elif model < 0:
                self.lose(at, Outcome.REJECTED, (request,))
            elif model in generated:
                self._write(at, model, request)
            else:
                if rehearsals is not None:
                    self._rehearse(rehearsals, at, model, deadline)
                add(at, model, request, deadline)
            if scheduler.decisions:
                self.carry_out(at)
        self.next, self.now_ms = last, now

    def settle(self, until: float, now: float) -> None:
        """Do all completions up to and including `until`, and all timers before it. `now` is the present time."""
        scheduler, events = self.scheduler, self.gpulets.events
        if scheduler is None:
            return
        while True:
            wake_at = scheduler.next_wake_ms
            if events and events[0][0] <= until and events[0][0] <= wake_at:
                at, source, stamp = heappop(events)
                if source >= _REHEARSAL:
                    has_happened = self._end_wait(scheduler, at, source, stamp)
                elif source < 0:
                    has_happened = self._end_step(at, -1 - source)
                else:
                    has_happened = self._end_batch(scheduler, at, source, stamp)
                if not has_happened:
                    continue
                now = at
            elif wake_at < until:
                now = max(now, wake_at)
                scheduler.wake(now)
            else:
                self.now_ms = now
                return
            if scheduler.decisions:
                self.carry_out(now)

    def _end_batch(self, scheduler: Scheduler, now: float, place: int, version: int) -> bool:
        """Begin or end the batch of a gpu-let; return False when the event is no longer about it."""
        gpulets = self.gpulets
        batch = gpulets.running[place]
        if gpulets.version[place] != version or batch is None:
            return False
        if not batch.has_begun:
            gpulets.begin(now, place)
            return True
        gpulets.finish(now, place)
        if place >= gpulets.first:
            scheduler.batch_done(now, place - gpulets.first)
        if self.batch_ended is not None:
            self.batch_ended(now, place, batch)
        self._answer(batch.ids, now, {})
        if batch.offline:
            self._answer_offline(batch.offline, now)
        return True

    def _end_step(self, now: float, place: int) -> bool:
        """End the step of a replica that generates; return False when none is due now."""
        steps = self.replicas.steps[place]
        if steps.due_ms != now:
            return False
        self._answer(self.replicas.advance(now, place), now, steps.first_ms)
        self._answer_offline(steps.take_offline_ended(), now)
        return True

    def _end_wait(self, scheduler: Scheduler, now: float, source: int, stamp: int) -> bool:
        """Do what is due by itself; return False for a rehearsal of a system before."""
        if source == _GIVEN_UP:
            if self.replicas.cancel(now, stamp):
                self.lose(now, Outcome.EXPIRED, (stamp,))
        elif source == _OFFLINE:
            if self._offline is not None and self._offline.next_ms <= now:
                self._refill(self._offline, scheduler, now)
        elif source == _ANSWERED:
            self._deliver(*self._answers.popleft(), now)
        elif stamp != self.gpulets.first or self._replay is None or self._rehearsals is None:
            return False
        else:
            replay, self._replay = self._replay, None
            self._rehearsals.learn(replay.run(), now)
        return True

    def add(self, request: int, now: float, unserved: Outcome) -> None:
        """Give the scheduler a request out of turn; when its model has no gpu-let, it ends as `unserved`."""
        model = self.place_of(request) if self.scheduler is not None else -1
        if model < 0 or self.scheduler is None:
            self.lose(now, unserved, (request,))
        elif model in self.replicas.by_model:
            self._write(now, model, request)
        else:
            deadline = float(self.deadlines_ms[request])
            if self._rehearsals is not None:
                self._rehearse(self._rehearsals, now, model, deadline)
            self.scheduler.add_request(now, model, request, deadline)

    def _write(self, now: float, model: int, request: int) -> None:
        """Let an answer be generated, or given up when it must be there."""
        last_ms = None if self._follows is None else self._follows.whole_by_ms(request)
        if last_ms is None:
            self.replicas.add(now, model, request)
            return
        if last_ms < INF:
            heappush(self.gpulets.events, (max(now, last_ms), _GIVEN_UP, request))
        self.replicas.add(now, model, request, float(self.deadlines_ms[request]), is_whole=last_ms < INF)

    def stop_writing(self, now: float, gpulets: Collection[str]) -> None:
        """End replicas that are lost; their sequences begin anew elsewhere, as their tokens are read again there."""
        stopped = self.replicas.stop(now, gpulets)
        if self._offline is not None:
            self._offline.give_back(request for request in stopped if request >= FIRST_OFFLINE)
        for request in online_of(stopped):
            self.add(request, now, Outcome.FAILED)

    def _rehearse(self, rehearsals: Rehearsals, now: float, model: int, deadline: float) -> None:
        """Tell the observer of an arrival. When that begins a replay, keep it until its result is due."""
        replay = rehearsals.arrived(now, model, deadline)
        if replay is not None:
            self._replay = replay
            heappush(self.gpulets.events, (rehearsals.due_ms(now, replay), _REHEARSAL, self.gpulets.first))

    def lose_gpulets(self, now: float, places: Iterable[int]) -> None:
        """Remove gpu-lets. Requests that they held are tried once more, as the live dispatcher does."""
        gpulets, scheduler = self.gpulets, self.scheduler
        for place in places:
            if place >= gpulets.first and scheduler is not None:
                scheduler.gpulet_lost(now, place - gpulets.first)
            batches = [gpulets.running[place], *gpulets.behind[place]]
            gpulets.behind[place].clear()
            gpulets.abort(now, place)
            for batch in batches:
                if batch is not None and self._offline is not None:
                    self._offline.give_back(batch.offline)
            for request in chain.from_iterable(batch.ids for batch in batches if batch is not None):
                if request in self._retried or self.deadlines_ms[request] <= now:
                    self.lose(now, Outcome.FAILED, (request,))
                else:
                    self._retried.add(request)
                    self.add(request, now, Outcome.FAILED)
        self.carry_out(now)

    def status(self) -> SchedulerStatus | None:
        """Return the status of the scheduler, with that of its observer if it has one."""
        if self._rehearsals is not None:
            return self._rehearsals.status()
        return None if self.scheduler is None else self.scheduler.status()

    def _answer(self, requests: Sequence[int], now: float, first_ms: Mapping[int, float]) -> None:
        """Do what follows on answers when they have gone their way back."""
        if self._follows is None or self.scheduler is None or not requests:
            return
        way_ms = self.scheduler.system.network.response_ms
        if way_ms:
            self._answers.append((requests, {each: at + way_ms for each, at in first_ms.items() if each in requests}))
            heappush(self.gpulets.events, (now + way_ms, _ANSWERED, 0))
        else:
            self._deliver(requests, first_ms, now)

    def _answer_offline(self, requests: Sequence[int], now: float) -> None:
        """Do what follows on the ends of offline requests."""
        if self._offline is not None and self.scheduler is not None:
            self._offline.answer(requests, now)
            self._offline.refill(self.scheduler, now)
            self.replicas.refill(now, self._offline)

    def _deliver(self, requests: Sequence[int], first_ms: Mapping[int, float], now: float) -> None:
        if self._follows is not None:
            self._follow(self._follows.answered(requests, now, first_ms), now)

    def _follow(self, requests: Sequence[tuple[int, float | None]], now: float) -> None:
        """Add the requests that have a deadline, and withdraw the others."""
        for request, deadline in requests:
            if deadline is not None:
                self.times_ms[request], self.deadlines_ms[request] = now, deadline
                self.followed.append(request)
                self.add(request, now, Outcome.REJECTED)
            elif self.replicas.cancel(now, request) or (
                self.scheduler is not None and self.scheduler.cancel(now, self.place_of(request), request)
            ):
                self.lose(now, Outcome.EXPIRED, (request,))

    def carry_out(self, now: float) -> None:
        """Carry out the scheduler's decisions."""
        scheduler, gpulets = self.scheduler, self.gpulets
        if scheduler is None:
            return
        while scheduler.decisions:  # what follows on a loss may make others
            for decision in scheduler.drain():
                if type(decision) is Dispatch:
                    gpulets.send(now, decision)
                elif type(decision) is Drop:
                    self.lose(now, Outcome.EXPIRED, decision.request_ids)
                elif type(decision) is Reject:
                    self.lose(now, Outcome.REJECTED, decision.request_ids)
                elif type(decision) is Preempt:
                    gpulets.abort(now, gpulets.first + decision.gpulet)
            if self._offline is not None:
                self._offline.refill(scheduler, now)

    def lose(self, now: float, outcome: Outcome, requests: Sequence[int]) -> None:
        """End requests without an answer."""
        self.lost[outcome].append(requests)
        if now > self._counted_from_ms:
            for request in requests:
                if self.times_ms[request] >= self._counted_from_ms:
                    model = self.models[request]
                    self.lost_by_model[model] += self.reported_places[model] >= 0
        if self._follows is not None:
            self._follow(self._follows.given_up(requests, outcome, now), now)
