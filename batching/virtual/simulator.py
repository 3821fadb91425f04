"""The virtual-time driver: feeds a schedule of arrivals to a scheduler and carries out its decisions on emulated
gpu-lets.

It owns the clock and the outcome of every request; it knows nothing about how batches are chosen. Nothing here is
random: the same schedule and system give the same bytes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from heapq import heappop
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from tenuto.batching.core.scheduler import Dispatch, Drop, Preempt, Rehearse, Reject, Scheduler
from tenuto.batching.core.system import INF
from tenuto.batching.virtual.gpulets import EmulatedGpulets
from tenuto.batching.virtual.result import SimulationResult
from tenuto.errors import InvalidInputError, refused

# followers(requests that have just been answered, now) -> (request, deadline) of those that arrive now because of it.
Followers = Callable[[list[int], float], Sequence[tuple[int, float]]]


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
    cluster = EmulatedGpulets(system, data_ms_by_model)
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
        scheduler=scheduler.status(),
    )


def _check_schedule(times_ms: NDArray[np.float64], model_index: NDArray[np.int32], models: int, *, total: int) -> None:
    if total != len(model_index):
        raise InvalidInputError("times_ms and model_index must have the same length. Give one model per arrival.")
    if not len(times_ms):
        return
    if not np.isfinite(times_ms).all() or times_ms[0] < 0:
        raise refused("times_ms", float(times_ms[0]), "arrivals must be finite and not negative", "Correct them.")
    steps = np.diff(times_ms)
    if (steps < 0).any():
        where = int(np.argmax(steps < 0)) + 1
        raise refused(f"times_ms[{where}]", float(times_ms[where]), "arrivals must be ascending", "Sort them.")
    if model_index.min() < 0 or model_index.max() >= models:
        raise refused("model_index", int(model_index.max()), f"there are {models} models", "Use an index below.")
