"""The virtual-time driver: feeds a schedule of arrivals to a scheduler and carries out its decisions on emulated
gpu-lets.

It owns the clock and the outcome of every request; it knows nothing about how batches are chosen. Nothing here is
random: the same schedule and system give the same bytes.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from tenuto.batching.core.scheduler import Dispatch, Drop, Preempt, Rehearsal, Rehearse, Reject, Scheduler
from tenuto.batching.core.system import INF
from tenuto.batching.virtual.interference import Interference
from tenuto.batching.virtual.result import BatchLog, SimulationResult
from tenuto.errors import InvalidInputError, Problem

__all__ = ["Followers", "simulate"]

# followers(requests that have just been answered, now) -> (request, deadline) of those that arrive now because of it.
Followers = Callable[[list[int], float], Sequence[tuple[int, float]]]


class _Batch:
    """A batch on a gpu-let, from its dispatch to its end."""

    __slots__ = ("has_begun", "ids", "program", "ready_at", "sent_at", "start_at")

    def __init__(self, program: int, ids: list[int], sent_at: float, ready_at: float) -> None:
        self.program = program
        self.ids = ids
        self.sent_at = sent_at
        self.ready_at = ready_at
        self.start_at = 0.0
        self.has_begun = True  # False: on a shared GPU, its data still on the way


class _Cluster:
    """The emulated gpu-lets: each runs one batch at a time, in the order sent. Emits completions to `events`."""

    def __init__(self, scheduler: Scheduler, data_ms_by_model: Sequence[float] | None) -> None:
        system = scheduler.system
        network = system.network
        self.ctrl_ms = network.ctrl_ms
        by_model = data_ms_by_model or [network.data_ms_per_request] * len(system.models)
        self.data_ms = [max(by_model[member] for member in program.members) for program in system.programs]
        tables: dict[int, dict[int, tuple[float, ...]]] = {}
        for gpulet in system.gpulets:
            if id(gpulet.hosts) not in tables:
                tables[id(gpulet.hosts)] = {program: host.latency_ms for program, host in gpulet.hosts.items()}
        self.latency = [tables[id(gpulet.hosts)] for gpulet in system.gpulets]
        count = len(system.gpulets)
        self.running: list[_Batch | None] = [None] * (count + 1)  # the last place is never taken
        self.behind: list[deque[_Batch]] = [deque() for _ in range(count)]
        self.version = [0] * (count + 1)
        self.events: list[tuple[float, int, int]] = []  # (time, gpu-let, version); gpu-let `count`: a rehearsal is due
        self.rehearsal: Rehearsal | None = None
        self.interference = Interference(system)
        self.log = BatchLog()

    def send(self, now: float, decision: Dispatch) -> None:
        gpulet, program, ids = decision[0], decision[1], decision[2]
        batch = _Batch(program, ids, now, now + self.ctrl_ms + self.data_ms[program] * len(ids))  # type: ignore[arg-type]
        if self.running[gpulet] is None:
            self.start(now, gpulet, batch)
        else:
            self.behind[gpulet].append(batch)

    def start(self, now: float, gpulet: int, batch: _Batch) -> None:
        """Give the gpu-let to a batch; it executes from the moment its data is there."""
        self.running[gpulet] = batch
        start = batch.start_at = now if now > batch.ready_at else batch.ready_at
        version = self.version[gpulet] = self.version[gpulet] + 1
        if gpulet not in self.interference.shared:
            heappush(self.events, (start + self.latency[gpulet][batch.program][len(batch.ids)], gpulet, version))
        elif start > now:
            batch.has_begun = False
            heappush(self.events, (start, gpulet, version))
        else:
            self.begin(now, gpulet)

    def rehearse(self, decision: Rehearse) -> None:
        """Keep a job until its result is due."""
        self.rehearsal = decision.job
        heappush(self.events, (decision.due_ms, len(self.running) - 1, 0))

    def begin(self, now: float, gpulet: int) -> None:
        """Start executing on a GPU shared with other gpu-lets."""
        batch = self.running[gpulet]
        if batch is None:
            return
        batch.has_begun = True
        work_ms = self.latency[gpulet][batch.program][len(batch.ids)]
        self._move(self.interference.begin(now, gpulet, batch.program, work_ms))

    def _move(self, finishes: list[tuple[int, float]]) -> None:
        for gpulet, finish in finishes:
            self.version[gpulet] += 1
            heappush(self.events, (finish, gpulet, self.version[gpulet]))

    def finish(self, now: float, gpulet: int) -> None:
        """End the running batch and begin the one behind it."""
        batch = self.running[gpulet]
        if batch is None:
            return
        self.log.add(gpulet, batch.program, batch.ids, batch.sent_at, batch.start_at, now, False)
        self._free(now, gpulet)

    def abort(self, now: float, gpulet: int) -> None:
        """Throw away the running batch; what it did until now is lost."""
        batch = self.running[gpulet]
        if batch is None:
            return
        self.version[gpulet] += 1
        self.log.add(gpulet, batch.program, batch.ids, batch.sent_at, min(batch.start_at, now), now, True)
        self._free(now, gpulet)

    def _free(self, now: float, gpulet: int) -> None:
        self.running[gpulet] = None
        if gpulet in self.interference.shared:
            self._move(self.interference.end(now, gpulet))
        if self.behind[gpulet]:
            self.start(now, gpulet, self.behind[gpulet].popleft())


def simulate(
    scheduler: Scheduler,
    times_ms: NDArray[np.float64],
    model_index: NDArray[np.int32],
    *,
    duration_s: float | None = None,
    warmup_s: float | None = None,
    stop: Callable[[list[int]], bool] | None = None,
    observe: Callable[[Scheduler, float], None] | None = None,
    data_ms_by_model: Sequence[float] | None = None,
    followers: Followers | None = None,
    given_up: Callable[[Sequence[int]], None] | None = None,
    deadlines_ms: NDArray[np.float64] | None = None,
) -> SimulationResult:
    """Run a schedule of arrivals to its end in virtual time.

    Args:
        scheduler: fresh, built for the system to simulate.
        times_ms: arrival times from 0, ascending.
        model_index: the model of each arrival, an index into `scheduler.system.models`.
        duration_s: length of the schedule; default: the last arrival.
        warmup_s: arrivals before this are served but not counted; default: the first 5 %.
        stop: called every few thousand arrivals with the requests lost so far by model, of those lost after the
            warm-up; True ends the run there.
        observe: called at the same moments with the scheduler and the time, for progress and inspection.
        followers: called with the requests of every batch that ended and the time; the requests it returns arrive
            then. Their times in `times_ms` are NaN, behind all others; those that never arrive are counted nowhere.
        given_up: called with requests that were dropped or rejected, or whose model has no host; what would have
            followed on them need not.
        deadlines_ms: of every request; default: its arrival and the SLO of its model.
        data_ms_by_model: what the data of one request really takes to its gpu-let, where models differ; the scheduler
            still budgets its system's.

    Raises:
        InvalidInputError: arrivals that are not ascending, negative, not finite, or of unknown models.
    """
    started = time.perf_counter()
    system = scheduler.system
    planned = len(times_ms) if followers is None else int(np.isfinite(times_ms).sum())
    _check_schedule(times_ms[:planned], model_index, len(system.models), total=len(times_ms))
    served = system.served
    total = planned
    slo = np.array([model.slo_ms for model in system.models], dtype=np.float64)
    if deadlines_ms is None:
        deadlines_ms = times_ms + slo[model_index] if total else np.zeros(0)
    if followers is not None:
        times_ms, deadlines_ms = times_ms.copy(), deadlines_ms.copy()
    cluster = _Cluster(scheduler, data_ms_by_model)
    events, running = cluster.events, cluster.running
    dropped: list[Sequence[int]] = []
    rejected: list[Sequence[int]] = []
    lost_by_model = [0] * len(system.models)
    duration_s = duration_s if duration_s is not None else (float(times_ms[total - 1]) / 1000.0 if total else 0.0)
    warmup_s = 0.05 * duration_s if warmup_s is None else warmup_s
    # A request dropped later than this arrived after the warm-up.
    counted_from_ms = warmup_s * 1000.0 + (float(slo.max()) if len(slo) else 0.0)
    now = 0.0

    def lose(now: float, kept: list[Sequence[int]], decision: Drop | Reject) -> None:
        kept.append(decision.request_ids)
        if given_up is not None:
            given_up(decision.request_ids)
        if now > counted_from_ms:
            for request in decision.request_ids:
                lost_by_model[model_index[request]] += 1

    def carry_out(now: float) -> None:
        for decision in scheduler.drain():
            if type(decision) is Dispatch:
                cluster.send(now, decision)
            elif type(decision) is Drop:
                lose(now, dropped, decision)
            elif type(decision) is Reject:
                lose(now, rejected, decision)
            elif type(decision) is Preempt:
                cluster.abort(now, decision.gpulet)
            elif type(decision) is Rehearse:
                cluster.rehearse(decision)

    def advance(until: float) -> None:
        """Do all completions up to and including `until`, and all timers before it."""
        nonlocal now
        version = cluster.version
        while True:
            wake_at = scheduler.next_wake_ms
            if events and events[0][0] <= until and events[0][0] <= wake_at:
                at, gpulet, stamp = heappop(events)
                batch = running[gpulet]
                if version[gpulet] != stamp or batch is None:
                    if cluster.rehearsal is None or gpulet < len(system.gpulets):
                        continue
                    now = at
                    job, cluster.rehearsal = cluster.rehearsal, None
                    scheduler.rehearsed(at, job.run())
                elif not batch.has_begun:
                    now = at
                    cluster.begin(at, gpulet)
                    continue
                else:
                    now = at
                    cluster.finish(at, gpulet)
                    scheduler.batch_done(at, gpulet)
                    if followers is not None:
                        for request, deadline in followers(batch.ids, at):
                            times_ms[request], deadlines_ms[request] = at, deadline
                            if model_index[request] in served:
                                scheduler.add_request(at, int(model_index[request]), request, deadline)
                            elif given_up is not None:
                                given_up((request,))
            elif wake_at < until:
                if wake_at > now:
                    now = wake_at
                scheduler.wake(now)
            else:
                return
            if scheduler.decisions:
                carry_out(now)

    add = scheduler.add_request
    unserved = set(range(len(system.models))) - served
    chunk = 8192
    done = total
    for first in range(0, total, chunk):
        last = min(total, first + chunk)
        rows = zip(
            range(first, last),
            times_ms[first:last].tolist(),
            model_index[first:last].tolist(),
            deadlines_ms[first:last].tolist(),
            strict=True,
        )
        for request, at, model, deadline in rows:
            if scheduler.next_wake_ms < at or (events and events[0][0] <= at):
                advance(at)
            if unserved and model in unserved:
                if given_up is not None:
                    given_up((request,))
                continue
            now = at
            add(at, model, request, deadline)
            if scheduler.decisions:
                carry_out(at)
        if observe is not None:
            observe(scheduler, now)
        if stop is not None and stop(lost_by_model):
            done = last
            break
    advance(INF)
    kept = done if followers is None else len(times_ms)
    if followers is not None:
        times_ms[done:total] = np.nan  # a run that ended early never got to these
    return SimulationResult.build(
        system,
        times_ms[:kept],
        model_index[:kept],
        deadlines_ms[:kept],
        cluster.log,
        np.fromiter(chain.from_iterable(dropped), dtype=np.int64),
        np.fromiter(chain.from_iterable(rejected), dtype=np.int64),
        unserved,
        duration_s=duration_s if done == total else now / 1000.0,
        warmup_s=warmup_s,
        wall_s=time.perf_counter() - started,
    )


def _check_schedule(times_ms: NDArray[np.float64], model_index: NDArray[np.int32], models: int, *, total: int) -> None:
    if total != len(model_index):
        raise InvalidInputError("times_ms and model_index must have the same length. Give one model per arrival.")
    if not len(times_ms):
        return
    if not np.isfinite(times_ms).all() or times_ms[0] < 0:
        raise InvalidInputError(
            Problem("times_ms", float(times_ms[0]), "arrivals must be finite and not negative", "Correct them.")
        )
    steps = np.diff(times_ms)
    if (steps < 0).any():
        where = int(np.argmax(steps < 0)) + 1
        raise InvalidInputError(
            Problem(f"times_ms[{where}]", float(times_ms[where]), "arrivals must be ascending", "Sort them.")
        )
    if model_index.min() < 0 or model_index.max() >= models:
        raise InvalidInputError(
            Problem("model_index", int(model_index.max()), f"there are {models} models", "Use an index below.")
        )
