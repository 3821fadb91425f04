"""A running system in virtual time whose plan changes: gpu-lets start, load, serve, drain, slow down and get lost.

It serves one schedule of arrivals with the scheduler of the plan of the moment, as the live dispatcher does: a new plan
brings a new scheduler, requests that wait move over to it, and batches that run end where they run. It decides nothing:
who changes the plan calls `apply`, and asks with `look` what happened since.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import chain
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from tenuto.batching.core.build import NO_DELAY, from_plan
from tenuto.batching.core.scheduler import Dispatch, Drop, Preempt, Rehearse, Reject, Scheduler
from tenuto.batching.core.system import INF, TIME_TOLERANCE_MS, NetworkDelay, System
from tenuto.batching.virtual.gpulets import EmulatedBatch, EmulatedGpulets
from tenuto.batching.virtual.result import BatchLog
from tenuto.outcome import OUTCOMES, Outcome
from tenuto.placement import Gpulet, Plan

_CHUNK = 8192  # arrivals turned into Python numbers at a time
_TOLD_AFTER = 3  # batches of a program that took another time than planned before the scheduler is told, as live


class Follows(Protocol):
    """Which requests follow on which, as the stages of an application do."""

    def answered(self, requests: Sequence[int], now_ms: float) -> Sequence[tuple[int, float]]:
        """Return the requests that arrive because these have been answered, each with its deadline in ms."""

    def given_up(self, requests: Sequence[int], outcome: Outcome) -> None:
        """Take note that these get no answer, or none in time."""


@dataclass(frozen=True)
class Life:
    """How long the phases of a gpu-let's process take, in seconds; drawn evenly between the two numbers.

    `start_s` is from nothing to ready with all models loaded and warm (10 to 15 s, gpulet section 5; 10 s, iGniter
    section 5.3), `load_s` what a process that runs needs for each model it has to load as well.
    """

    start_s: tuple[float, float] = (10.0, 15.0)
    load_s: tuple[float, float] = (2.0, 2.0)


@dataclass(frozen=True)
class GpuletUse:
    """What one gpu-let did since the last look. `ratio` is measured over planned execution, by program that differed
    from its plan."""

    busy_s: float
    batches: int
    ratio: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Look:
    """What happened since the last look, and what stands now.

    `arrived` counts requests by model (position in the schedule's names), `ended` those that ended by model and
    outcome (columns in the order of `OUTCOMES`). `ready` are the gpu-lets that can serve, `waiting` those that are
    starting or loading, `broken` those that could not start, with the reason. `share_s` is the sum over gpu-lets of
    their share of a GPU (1.0: whole) times the seconds their process was there, `gpu_s` the seconds during which GPUs
    held at least one.
    """

    arrived: NDArray[np.int64]
    ended: NDArray[np.int64]
    gpulets: Mapping[str, GpuletUse]
    ready: frozenset[str]
    waiting: frozenset[str]
    broken: Mapping[str, str]
    share_s: float
    gpu_s: float


@dataclass
class _Process:
    """The process of a gpu-let. `ready_at` is when it has loaded everything; INF: it never will."""

    gpulet: Gpulet
    ready_at: float
    is_ready: bool = False
    broken: str | None = None


class RunningSystem:
    """Invariant: every arrival up to the present time has ended, waits in the scheduler, or runs on a gpu-let."""

    def __init__(
        self,
        names: Sequence[str],
        slo_ms: Sequence[float],
        times_ms: NDArray[np.float64],
        model_index: NDArray[np.int32],
        make_scheduler: Callable[[System], Scheduler],
        *,
        deadlines_ms: NDArray[np.float64] | None = None,
        follows: Follows | None = None,
        life: Life | None = None,
        network: NetworkDelay = NO_DELAY,
        cannot_start: Callable[[Gpulet], str | None] = lambda _gpulet: None,
        seed: int = 0,
    ) -> None:
        """Prepare without a plan: until `apply` every request is rejected.

        Args:
            names: models of the schedule.
            slo_ms: of each of them.
            times_ms: arrivals in ascending order; NaN for those that follow on answers, which stand behind the others.
            model_index: the model of each arrival, a position in `names`.
            make_scheduler: builds the scheduler of a plan's system.
            deadlines_ms: of each arrival, where it is not its model's SLO after it.
            follows: which requests follow on which; without it none.
            life: how long processes take to start and to load.
            network: delays that are budgeted and that really occur.
            cannot_start: why a gpu-let's process never becomes ready; None where it does.
            seed: of the times to start and to load.
        """
        self.now_ms = 0.0
        self.plan: Plan | None = None
        self._names = tuple(names)
        self._times, self._models = (times_ms if follows is None else times_ms.copy()), model_index
        if deadlines_ms is None:
            deadlines_ms = times_ms + np.asarray(slo_ms, dtype=np.float64)[model_index]
        self._deadlines = deadlines_ms.copy()
        self._planned = len(times_ms) if follows is None else int(np.isfinite(times_ms).sum())
        allowed_ms = self._deadlines[: self._planned] - times_ms[: self._planned]
        self._longest_slo_ms = float(allowed_ms.max(initial=0.0))
        self._follows = follows
        self._followed: list[int] = []  # requests that have followed since the last look
        self._may_wait: list[int] = []  # those of them, and earlier ones, that may not have ended
        self._make_scheduler = make_scheduler
        self.life = life or Life()
        self._network = network
        self._cannot_start = cannot_start
        self._generator = np.random.default_rng(seed)
        self._scheduler: Scheduler | None = None
        self._index = [-1] * len(names)  # of the schedule's models in the plan; -1: not served
        self._cluster: EmulatedGpulets | None = None
        self._leaving: list[tuple[EmulatedGpulets, list[str]]] = []  # of earlier plans, until looked at
        self._ids: list[str] = []  # of the plan's gpu-lets
        self._processes: dict[str, _Process] = {}
        self._idle: set[str] = set()  # of them, those that wait on standby: they hold no share
        self._due: list[tuple[float, str]] = []  # (time, gpu-let): its process should be ready
        self._next = 0  # the next arrival
        self._skipped_ms = 0.0  # by which its own clock, which all times here are of, is behind that of the arrivals
        self._passed = np.zeros(len(names), dtype=np.int64)  # requests by model that were skipped since the last look
        self._retried: set[int] = set()
        self._factors: dict[str, float] = {}  # by program: what batches take over what the plan says
        self._odd: dict[tuple[int, int], int] = {}  # batches of (gpu-let, program) that took another time than planned
        self._looked_from = 0
        self._lost_ids: dict[Outcome, list[Sequence[int]]] = {
            Outcome.EXPIRED: [], Outcome.REJECTED: [], Outcome.FAILED: []
        }  # fmt: skip
        self._used_at_ms = 0.0
        self._share_s = self._gpu_s = 0.0

    # --- what changes it ------------------------------------------------------------------------------------------

    def apply(self, plan: Plan, standby: Sequence[Gpulet] = ()) -> None:
        """Serve by `plan` from now on, with idle processes for the gpu-lets on `standby` beside it.

        Gpu-lets it has and the last one had not are started, those with more models load them (and do not serve
        meanwhile), those with another GPU or share start anew, and those that are gone end what they run.
        """
        now = self.now_ms
        self._charge()
        kept: dict[str, _Process] = {}
        self._idle = {gpulet.id for gpulet in standby}
        for gpulet in (*plan.gpulets, *standby):
            process = self._processes.get(gpulet.id)
            if process is None or _is_other_process(process.gpulet, gpulet):
                process = self._started(gpulet, now)
            else:
                missing = {r.name for r in gpulet.models} - {r.name for r in process.gpulet.models}
                process.gpulet = gpulet
                if missing and process.broken is None:
                    low, high = self.life.load_s
                    loading_ms = 1000.0 * len(missing) * float(self._generator.uniform(low, high))
                    self._await(process, max(now, process.ready_at) + loading_ms)
            kept[gpulet.id] = process
        self._processes = kept
        self._route(plan, now)

    def lose(self, gpulet_ids: Sequence[str]) -> None:
        """The processes of these gpu-lets die now, and stay away until a plan brings gpu-lets of other names."""
        now = self.now_ms
        self._charge()
        gone = set(gpulet_ids)
        for name in gone & self._processes.keys():
            process = self._processes[name]
            process.is_ready, process.ready_at, process.broken = False, INF, "lost"
        if self._cluster is not None and self._scheduler is not None:
            for index, name in enumerate(self._ids):
                if name in gone:
                    self._scheduler.gpulet_lost(now, index)
                    self._abandon(self._cluster, index, now)
            self._carry_out(now)
        for cluster, ids in self._leaving:
            for index, name in enumerate(ids):
                if name in gone:
                    self._abandon(cluster, index, now)

    def slow_down(self, program: str, factor: float) -> None:
        """Batches of this program take `factor` times what plans say, from now on and on every gpu-let."""
        self._factors[program] = factor
        self._odd.clear()
        if self._cluster is not None and self._scheduler is not None:
            self._stretch(self._cluster, self._scheduler.system)

    # --- time -------------------------------------------------------------------------------------------------------

    def advance(self, until_ms: float) -> None:
        """Let everything happen up to and including `until_ms`."""
        until = until_ms - self._skipped_ms
        while self._due and self._due[0][0] <= until:
            at, name = heappop(self._due)
            self._serve(at)
            process = self._processes.get(name)
            if process is not None and not process.is_ready and process.ready_at <= at:
                process.is_ready = True
                self._offer(name, at)
        self._serve(until)

    def skip(self, until_ms: float, coming: NDArray[np.int64]) -> None:
        """Take the requests up to and including `until_ms`, which are those `coming`, as served like those before them,
        without serving any of them. What waits and runs stands still meanwhile, so that those that follow meet what
        these would have met.

        A model without a gpu-let has its requests rejected, all others have them in time. Only where `is_steady`.
        """
        if not self._skipped_ms:
            self._times = self._times.copy()  # the caller's until now
        first = self._next
        self._next += int(coming.sum())
        self._passed += coming
        self._times[first : self._next] = self.now_ms
        passed_ms = until_ms - self._skipped_ms - self.now_ms
        self._skipped_ms += passed_ms
        self._used_at_ms -= passed_ms

    def coming(self, until_ms: float) -> NDArray[np.int64]:
        """Return how many requests by model the schedule has next, up to and including `until_ms`."""
        count = int(np.searchsorted(self._times[self._next :], until_ms, side="right"))
        return np.bincount(self._models[self._next : self._next + count], minlength=len(self._names))

    @property
    def is_steady(self) -> bool:
        """Whether no process starts, loads or drains, and none is broken."""
        return not (self._due or self._leaving) and all(process.is_ready for process in self._processes.values())

    def _serve(self, until: float) -> None:
        scheduler = self._scheduler
        coming = self._times[self._next : self._planned]
        end = self._next + int(np.searchsorted(coming, until + self._skipped_ms, side="right"))
        if scheduler is None or self._cluster is None:
            if end > self._next:
                self._lose(Outcome.REJECTED, range(self._next, end))
            self._next = end
            self.now_ms = max(self.now_ms, until)
            return
        events, index, now = self._cluster.events, self._index, self.now_ms
        add = scheduler.add_request
        while self._next < end:
            first, last = self._next, min(end, self._next + _CHUNK)
            rows = slice(first, last)
            if self._skipped_ms:
                self._times[rows] -= self._skipped_ms
                self._deadlines[rows] -= self._skipped_ms
            times, models, deadlines = self._times[rows].tolist(), self._models[rows].tolist(), self._deadlines[rows]
            for request, at, place, deadline in zip(
                range(first, last), times, models, deadlines.tolist(), strict=True
            ):
                if scheduler.next_wake_ms < at or (events and events[0][0] <= at) or self._leaving:
                    self._settle(at, now)
                now = at
                model = index[place]
                if model < 0:
                    self._lose(Outcome.REJECTED, (request,))
                    continue
                add(at, model, request, deadline)
                if scheduler.decisions:
                    self._carry_out(at)
            self._next = last
        self._settle(until, now)
        self.now_ms = max(self.now_ms, until)

    def _settle(self, until: float, now: float) -> None:
        """Do all completions up to and including `until`, and all timers before it; `now` is the present time."""
        scheduler, cluster = self._scheduler, self._cluster
        assert scheduler is not None
        assert cluster is not None
        events, running, version = cluster.events, cluster.running, cluster.version
        last = len(running) - 1
        while True:
            wake_at = scheduler.next_wake_ms
            if self._leaving:
                at = self._settle_leaving(min(until, max(now, wake_at), events[0][0] if events else INF))
                if at is not None:
                    now = at
                    continue
            if events and events[0][0] <= until and events[0][0] <= wake_at:
                now, gpulet, stamp = heappop(events)
                batch = running[gpulet]
                if gpulet == last:
                    job, cluster.rehearsal = cluster.rehearsal, None
                    if job is not None:
                        scheduler.rehearsed(now, job.run())
                elif version[gpulet] != stamp or batch is None:
                    continue
                elif not batch.has_begun:
                    cluster.begin(now, gpulet)
                    continue
                else:
                    cluster.finish(now, gpulet)
                    scheduler.batch_done(now, gpulet)
                    if self._factors:
                        self._tell(scheduler, gpulet, batch)
                    if self._follows is not None:
                        self._add_following(batch.ids, now)
            elif wake_at < until:
                now = max(now, wake_at)
                scheduler.wake(now)
            else:
                return
            if scheduler.decisions:
                self._carry_out(now)

    def _settle_leaving(self, until: float) -> float | None:
        """End one batch of an earlier plan that ends by `until` and return when; None if there is none."""
        cluster, ids = min(self._leaving, key=lambda pair: pair[0].events[0][0] if pair[0].events else INF)
        if not cluster.events or cluster.events[0][0] > until:
            return None
        now, gpulet, stamp = heappop(cluster.events)
        batch = cluster.running[gpulet]
        if batch is not None and cluster.version[gpulet] == stamp:
            if not batch.has_begun:
                cluster.begin(now, gpulet)
            else:
                cluster.finish(now, gpulet)
                if self._follows is not None:
                    self._add_following(batch.ids, now)
                    self._carry_out(now)
                if cluster.running[gpulet] is None:
                    self._offer(ids[gpulet], now)
        return now

    def _add_following(self, ids: Sequence[int], now: float) -> None:
        """Let those requests arrive that follow on these, which have been answered."""
        assert self._follows is not None
        for request, deadline in self._follows.answered(ids, now):
            self._times[request], self._deadlines[request] = now, deadline
            self._followed.append(request)
            self._add_again(request, now, Outcome.REJECTED)

    def _lose(self, outcome: Outcome, ids: Sequence[int]) -> None:
        self._lost_ids[outcome].append(ids)
        if self._follows is not None:
            self._follows.given_up(ids, outcome)

    # --- the scheduler of the plan ----------------------------------------------------------------------------------

    def _route(self, plan: Plan, now: float) -> None:
        """Build the scheduler of a plan, hand it what waits, and the gpu-lets that are ready and idle."""
        waiting = self._take_back(now)
        if self._cluster is not None:
            self._leaving.append((self._cluster, self._ids))
        system = from_plan(plan, self._network)
        scheduler = self._make_scheduler(system)
        self.plan, self._scheduler = plan, scheduler
        self._cluster = EmulatedGpulets(system)
        self._odd.clear()
        self._stretch(self._cluster, system)
        self._ids = [gpulet.id for gpulet in plan.gpulets]
        place = {model.name: index for index, model in enumerate(system.models) if index in system.served}
        self._index = [place.get(name, -1) for name in self._names]
        for index in range(len(self._ids)):
            scheduler.gpulet_lost(now, index)
        for name in self._ids:
            self._offer(name, now)
        for request in waiting:
            self._add_again(request, now)
        self._carry_out(now)

    def _take_back(self, now: float) -> list[int]:
        """Take what waits out of the present scheduler; whatever arrived longer ago than the longest SLO has ended."""
        scheduler = self._scheduler
        if scheduler is None:
            return []
        first = int(np.searchsorted(self._times[: self._next], now - self._longest_slo_ms - 1.0))
        found = []
        for request, model in enumerate(self._models[first : self._next].tolist(), first):
            if self._index[model] >= 0 and scheduler.cancel(now, self._index[model], request):
                found.append(request)
        for request in (*self._may_wait, *self._followed):
            if scheduler.cancel(now, self._index[int(self._models[request])], request):
                found.append(request)
        self._carry_out(now)
        return found

    def _add_again(self, request: int, now: float, unserved: Outcome = Outcome.FAILED) -> None:
        model = self._index[int(self._models[request])]
        if model < 0 or self._scheduler is None:
            self._lose(unserved, (request,))
        else:
            self._scheduler.add_request(now, model, request, float(self._deadlines[request]))

    def _offer(self, name: str, now: float) -> None:
        """Let the scheduler use a gpu-let that is ready and runs nothing."""
        process = self._processes.get(name)
        if process is None or not process.is_ready or name not in self._ids or self._scheduler is None:
            return
        for cluster, ids in self._leaving:
            if name in ids and cluster.running[ids.index(name)] is not None:
                return
        self._scheduler.gpulet_back(now, self._ids.index(name))
        self._carry_out(now)

    def _carry_out(self, now: float) -> None:
        scheduler, cluster = self._scheduler, self._cluster
        assert scheduler is not None
        assert cluster is not None
        while scheduler.decisions:
            for decision in scheduler.drain():
                if type(decision) is Dispatch:
                    cluster.send(now, decision)
                elif type(decision) is Drop:
                    self._lose(Outcome.EXPIRED, decision.request_ids)
                elif type(decision) is Reject:
                    self._lose(Outcome.REJECTED, decision.request_ids)
                elif type(decision) is Preempt:
                    cluster.abort(now, decision.gpulet)
                elif type(decision) is Rehearse:
                    cluster.rehearse(decision)

    # --- processes ----------------------------------------------------------------------------------------------------

    def _started(self, gpulet: Gpulet, now: float) -> _Process:
        low, high = self.life.start_s
        process = _Process(gpulet, INF, broken=self._cannot_start(gpulet))
        if process.broken is None:
            self._await(process, now + 1000.0 * float(self._generator.uniform(low, high)))
        return process

    def _await(self, process: _Process, ready_at: float) -> None:
        process.is_ready, process.ready_at = False, ready_at
        heappush(self._due, (ready_at, process.gpulet.id))

    def _abandon(self, cluster: EmulatedGpulets, index: int, now: float) -> None:
        """Requests of a lost process are tried once more, as the dispatcher does."""
        batches = [cluster.running[index], *cluster.behind[index]]
        cluster.behind[index].clear()
        if cluster.running[index] is not None:
            cluster.abort(now, index)
        for request in chain.from_iterable(batch.ids for batch in batches if batch is not None):
            if request in self._retried or self._deadlines[request] <= now:
                self._lose(Outcome.FAILED, (request,))
            else:
                self._retried.add(request)
                self._add_again(request, now)

    def _stretch(self, cluster: EmulatedGpulets, system: System) -> None:
        """Write what batches really take into a cluster's tables."""
        factors = {
            index: self._factors[program.name]
            for index, program in enumerate(system.programs)
            if program.name in self._factors
        }
        if factors:
            cluster.latency = [
                {
                    index: tuple(factors.get(index, 1.0) * ms for ms in host.latency_ms)
                    for index, host in gpulet.hosts.items()
                }
                for gpulet in system.gpulets
            ]

    def _tell(self, scheduler: Scheduler, gpulet: int, batch: EmulatedBatch) -> None:
        """Tell the scheduler what batches of a program really take, once there were a few."""
        factor = self._factors.get(scheduler.system.programs[batch.program].name)
        if factor is not None:
            count = self._odd[gpulet, batch.program] = self._odd.get((gpulet, batch.program), 0) + 1
            if count == _TOLD_AFTER:
                scheduler.update_latency(batch.program, gpulet, factor)

    def _charge(self) -> None:
        """Add up what the processes that are there have used since the last call."""
        seconds = (self.now_ms - self._used_at_ms) / 1000.0
        self._used_at_ms = self.now_ms
        alive = [process.gpulet for process in self._processes.values() if process.broken != "lost"]
        held_pct = sum(gpulet.effective_share_pct for gpulet in alive if gpulet.id not in self._idle)
        self._share_s += seconds * held_pct / 100.0
        self._gpu_s += seconds * len({gpulet.gpu for gpulet in alive})

    # --- what happened ------------------------------------------------------------------------------------------------

    def look(self) -> Look:
        """Return what happened since the last look."""
        self._charge()
        models = len(self._names)
        arrived = np.bincount(self._models[self._looked_from : self._next], minlength=models)
        self._looked_from = self._next
        if self._followed:
            arrived += np.bincount(self._models[self._followed], minlength=models)
            self._may_wait = [r for r in (*self._may_wait, *self._followed) if self._deadlines[r] > self.now_ms]
            self._followed = []
        ended = np.zeros((models, len(OUTCOMES)), dtype=np.int64)
        served = np.array(self._index) >= 0
        ended[served, Outcome.OK] = self._passed[served]
        ended[~served, Outcome.REJECTED] = self._passed[~served]
        self._passed[:] = 0
        use: dict[str, list[float]] = {}
        for cluster, ids in [*self._leaving, *([(self._cluster, self._ids)] if self._cluster is not None else [])]:
            self._read_log(cluster, ids, ended, use)
        self._leaving = [pair for pair in self._leaving if pair[0].events]
        for outcome, lost in self._lost_ids.items():
            if lost:
                requests = np.fromiter(chain.from_iterable(lost), dtype=np.int64)
                ended[:, outcome] += np.bincount(self._models[requests], minlength=models)
                lost.clear()
        measured = self._measured_ratios()
        look = Look(
            arrived,
            ended,
            {
                name: GpuletUse(busy_ms / 1000.0, int(batches), measured.get(name, {}))
                for name, (busy_ms, batches) in use.items()
            },
            frozenset(name for name, process in self._processes.items() if process.is_ready),
            frozenset(n for n, process in self._processes.items() if not process.is_ready and process.broken is None),
            {name: process.broken for name, process in self._processes.items() if process.broken is not None},
            self._share_s,
            self._gpu_s,
        )
        self._share_s = self._gpu_s = 0.0
        return look

    def _measured_ratios(self) -> dict[str, dict[str, float]]:
        """Return what batches of programs take over what the plan says, by gpu-let, where enough of them have run."""
        found: dict[str, dict[str, float]] = {}
        for (gpulet, program), batches in self._odd.items():
            if batches >= _TOLD_AFTER and self._scheduler is not None:
                name = self._scheduler.system.programs[program].name
                found.setdefault(self._ids[gpulet], {})[name] = self._factors[name]
        return found

    def _read_log(
        self, cluster: EmulatedGpulets, ids: Sequence[str], ended: NDArray[np.int64], use: dict[str, list[float]]
    ) -> None:
        """Count the batches that ended on a cluster, and forget them."""
        log = cluster.log
        for gpulet, start_ms, finish_ms in zip(log.gpulet, log.start_ms, log.finish_ms, strict=True):
            entry = use.setdefault(ids[gpulet], [0.0, 0.0])
            entry[0] += finish_ms - start_ms
            entry[1] += 1
        kept = [place for place, preempted in enumerate(log.preempted) if not preempted]
        if kept:
            sizes = [len(log.requests[place]) for place in kept]
            requests = np.fromiter(chain.from_iterable(log.requests[p] for p in kept), np.int64, count=sum(sizes))
            finish = np.repeat([log.finish_ms[place] for place in kept], sizes) + self._network.response_ms
            in_time = finish <= self._deadlines[requests] + TIME_TOLERANCE_MS
            models = self._models[requests]
            ended[:, Outcome.OK] += np.bincount(models[in_time], minlength=len(self._names))
            ended[:, Outcome.LATE] += np.bincount(models[~in_time], minlength=len(self._names))
        cluster.log = BatchLog()


def _is_other_process(before: Gpulet, after: Gpulet) -> bool:
    return (before.gpu, before.share_pct, before.memory_mib) != (after.gpu, after.share_pct, after.memory_mib)
