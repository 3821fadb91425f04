"""A running system in virtual time whose plan changes: gpu-lets start, load, serve, drain, slow down and get lost.

It serves one schedule of arrivals with the scheduler of the present plan, as the live dispatcher does. With a new plan
comes a new scheduler; requests that wait move to it, and batches that run end on their gpu-lets. The system decides
nothing: its caller changes the plan by `apply`, and learns by `observe` what happened since.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tenuto.batching.core.build import NO_DELAY, from_plan
from tenuto.batching.core.scheduler import Scheduler
from tenuto.batching.core.system import INF, TIME_TOLERANCE_MS, NetworkDelay, System
from tenuto.batching.virtual.engine import Engine, Follows
from tenuto.batching.virtual.offline_backlog import OfflineBacklog
from tenuto.batching.virtual.result import BatchLog
from tenuto.batching.virtual.virtual_gpulets import EmulatedBatch
from tenuto.batching.virtual.virtual_steps import RequestTokens
from tenuto.outcome import OUTCOMES, Outcome
from tenuto.placement import Gpulet, Plan
from tenuto.placement.plan import GpuletProcess, PlannedGpu

_TOLD_AFTER = 3  # derived: as live: after so many batches of another latency than planned, the scheduler is told


@dataclass(frozen=True)
class Life:
    """How long the phases of a gpu-let's process take, in seconds; drawn evenly between the two numbers.

    `start_s` is from the start of the process until all its models are loaded and warm (10 to 15 s, gpulet section 5;
    10 s, iGniter section 5.3). `load_s` is what a running process needs to load one more model.
    """

    start_s: tuple[float, float] = (10.0, 15.0)  # paper: gpulet, 10 to 15 s
    load_s: tuple[float, float] = (2.0, 2.0)  # default


@dataclass(frozen=True)
class GpuletUse:
    """What one gpu-let did since the last look. `ratio` is measured over planned latency, for each program that
    differed from its plan."""

    busy_s: float
    batches: int
    ratio: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Look:
    """What happened since the last look, and what stands now.

    `arrived` counts requests by model (position in the schedule's names). `ended` counts requests that ended, by model
    and outcome (columns in the order of `OUTCOMES`). `ready` has the gpu-lets that can serve, `waiting` those that are
    starting or loading, and `broken` those that could not start, with the reason. `share_s` adds up, over gpu-lets,
    the share of a GPU (1.0: whole) times the seconds their process was there. `gpu_s` adds up the seconds during which
    each GPU held at least one process.
    """

    arrived: NDArray[np.int64]
    ended: NDArray[np.int64]
    gpulets: Mapping[str, GpuletUse]
    ready: frozenset[str]
    waiting: frozenset[str]
    broken: Mapping[str, str]
    share_s: float
    gpu_s: float
    generated: NDArray[np.int64]  # by model: requests that were answered, tokens of their prompts, of their answers


@dataclass
class _Process:
    """The process of a gpu-let. `ready_at` is when all its models are loaded; INF: never."""

    gpulet: Gpulet
    fixed: GpuletProcess
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
        tokens: RequestTokens | None = None,
        sizes: NDArray[np.int64] | None = None,
        offline: OfflineBacklog | None = None,
    ) -> None:
        """Prepare without a plan: until `apply` every request is rejected.

        Args:
            names: models of the schedule.
            slo_ms: the SLO of each model.
            times_ms: arrivals in ascending order; NaN for those that follow on answers, which stand behind the others.
            model_index: the model of each arrival, a position in `names`.
            make_scheduler: builds the scheduler of a plan's system.
            deadlines_ms: the deadline of each arrival; by default its time plus the SLO of its model.
            follows: which requests follow on the answers of others; without it none.
            life: how long processes take to start and to load.
            network: delays that are budgeted and that really occur.
            cannot_start: returns why a gpu-let's process never becomes ready; None if it does.
            seed: seed of the times to start and to load.
            tokens: of each request's prompt and output; needed when models generate.
            sizes: a row for each request; needed when models have size classes.
            offline: what waits beside these requests.
        """
        self.plan: Plan | None = None
        self.life = life or Life()
        self._names = tuple(names)
        if deadlines_ms is None:
            deadlines_ms = times_ms + np.asarray(slo_ms, dtype=np.float64)[model_index]
        self._engine = Engine(
            times_ms.copy(), model_index, deadlines_ms.copy(), follows, tokens=tokens, sizes=sizes, offline=offline
        )
        self._offline = offline
        self._batches_ms = self._offline_batches_ms = 0.0  # time spent in batches, and for offline requests in them
        self._engine.replicas.is_ready = self._is_ready
        self._tokens = tokens
        self._engine.batch_ended = self._batch_ended
        allowed_ms = (deadlines_ms - times_ms)[: self._engine.planned]
        self._longest_slo_ms = float(allowed_ms.max(initial=0.0))
        self._may_wait: list[int] = []  # requests that followed on others and may still wait
        self._make_scheduler = make_scheduler
        self._network = network
        self._cannot_start = cannot_start
        self._generator = np.random.default_rng(seed)
        self._system = System((), ())  # of the present plan
        self._gpus: dict[str, PlannedGpu] = {}  # of all plans, by id
        self._ids: list[str] = []  # ids of the gpu-lets of all plans, by place
        self._processes: dict[str, _Process] = {}  # by gpu-let
        self._idle: set[str] = set()  # gpu-lets on standby; their processes hold no share
        self._due: list[tuple[float, str]] = []  # a heap of (time, gpu-let): when its process should be ready
        self._factors: dict[str, float] = {}  # by program: real over planned latency of its batches
        self._odd: dict[tuple[int, int], int] = {}  # by (place, program): batches of another latency than planned
        self._looked_from = 0
        self._used_at_ms = 0.0
        self._share_s = self._gpu_s = 0.0

    # --- changes of the plan and of processes ---------------------------------------------------------------------

    def apply(self, plan: Plan, standby: Sequence[Gpulet] = (), *, later_s: Mapping[str, float] | None = None) -> None:
        """Serve by `plan` from now on, with idle processes for the gpu-lets on `standby` beside it.

        New gpu-lets are started. A gpu-let that gets more models loads them and does not serve meanwhile. A gpu-let
        that needs another process starts anew. A gpu-let that is not in the new plan ends the batches that it runs.
        `later_s`: by gpu-let, how many seconds later than others its process starts, as when its GPU is cut first.
        """
        now = self.now_ms
        self._charge()
        self._gpus |= {gpu.id: gpu for gpu in plan.gpus}
        processes: dict[str, _Process] = {}
        self._idle = {gpulet.id for gpulet in standby}
        fixed = plan.model_copy(update={"gpulets": (*plan.gpulets, *standby)}).processes() | plan.processes()
        for gpulet in (*plan.gpulets, *standby):
            process = self._processes.get(gpulet.id)
            if process is None or process.fixed != fixed[gpulet.id]:
                process = self._started(gpulet, fixed[gpulet.id], now + 1000.0 * (later_s or {}).get(gpulet.id, 0.0))
            else:
                missing = {r.name for r in gpulet.models} - {r.name for r in process.gpulet.models}
                process.gpulet = gpulet
                if missing and process.broken is None:
                    low, high = self.life.load_s
                    loading_ms = 1000.0 * len(missing) * float(self._generator.uniform(low, high))
                    self._await(process, max(now, process.ready_at) + loading_ms)
            processes[gpulet.id] = process
        self._processes = processes
        self._route(plan, now)

    def lose(self, gpulet_ids: Sequence[str]) -> None:
        """End the processes of these gpu-lets now. They do not come back; a later plan can bring gpu-lets of other
        ids."""
        now = self.now_ms
        self._charge()
        gone = set(gpulet_ids)
        for name in gone & self._processes.keys():
            process = self._processes[name]
            process.is_ready, process.ready_at, process.broken = False, INF, "lost"
        self._engine.stop_writing(now, gone)
        self._engine.lose_gpulets(now, [place for place, name in enumerate(self._ids) if name in gone])

    def slow_down(self, program: str, factor: float) -> None:
        """Let batches of this program take `factor` times the planned latency from now on, on every gpu-let."""
        self._factors[program] = factor
        self._odd.clear()
        self._stretch()

    # --- time -------------------------------------------------------------------------------------------------------

    @property
    def now_ms(self) -> float:
        """The present time."""
        return self._engine.now_ms

    def advance(self, until_ms: float) -> None:
        """Do all events up to and including `until_ms`."""
        while self._due and self._due[0][0] <= until_ms:
            at, name = heappop(self._due)
            self._serve(at)
            process = self._processes.get(name)
            if process is not None and not process.is_ready and process.ready_at <= at:
                process.is_ready = True
                self._offer(name, at)
        self._serve(until_ms)

    def _serve(self, until: float) -> None:
        engine = self._engine
        coming = engine.times_ms[engine.next : engine.planned]
        engine.serve(engine.next + int(np.searchsorted(coming, until, side="right")))
        engine.settle(until, engine.now_ms)
        engine.now_ms = max(engine.now_ms, until)

    # --- the scheduler of the present plan --------------------------------------------------------------------------

    def _route(self, plan: Plan, now: float) -> None:
        """Build the scheduler of a plan, and give it the gpu-lets that are ready and idle and the requests that
        wait."""
        waiting, engine = self._take_back(now), self._engine
        self.plan, self._system = plan, from_plan(plan, self._network)
        scheduler = self._make_scheduler(self._system)
        served = self._system.reported_served
        place = {model.name: index for index, model in enumerate(self._system.reported) if index in served}
        engine.install(scheduler, [place.get(name, -1) for name in self._names])
        self._odd.clear()
        self._stretch()
        self._ids += [gpulet.id for gpulet in plan.gpulets]
        for index in range(len(plan.gpulets)):
            scheduler.gpulet_lost(now, index)
        for gpulet in plan.gpulets:
            self._offer(gpulet.id, now)
        for request in waiting:
            engine.add(request, now, Outcome.FAILED)
        engine.carry_out(now)

    def _take_back(self, now: float) -> list[int]:
        """Take the waiting requests out of the present scheduler. Requests older than the longest SLO have ended."""
        engine, scheduler = self._engine, self._engine.scheduler
        if scheduler is None:
            return []
        first = int(np.searchsorted(engine.times_ms[: engine.next], now - self._longest_slo_ms - 1.0))
        requests = []
        for request in chain(range(first, engine.next), self._may_wait, engine.followed):
            model = engine.place_of(request)
            if model >= 0 and scheduler.cancel(now, model, request):
                requests.append(request)
        engine.carry_out(now)
        return requests

    def _is_ready(self, name: str) -> bool:
        """Whether the process of a gpu-let serves."""
        process = self._processes.get(name)
        return process is not None and process.is_ready

    def _offer(self, name: str, now: float) -> None:
        """Let the scheduler use a gpu-let that is ready and runs no batch, not even one of an earlier plan."""
        process, engine = self._processes.get(name), self._engine
        first, running = engine.gpulets.first, engine.gpulets.running
        if process is None or not process.is_ready or engine.scheduler is None or name not in self._ids[first:]:
            return
        if not any(batch is not None and self._ids[place] == name for place, batch in enumerate(running[:first])):
            engine.scheduler.gpulet_back(now, self._ids.index(name, first) - first)
            engine.carry_out(now)

    def _batch_ended(self, now: float, place: int, batch: EmulatedBatch) -> None:
        """Tell the scheduler when a gpu-let has ended its last batch of an earlier plan. Tell it also the real latency
        of a program, once there were a few batches."""
        engine = self._engine
        if place < engine.gpulets.first:
            if engine.gpulets.running[place] is None:
                self._offer(self._ids[place], now)
        elif self._factors and engine.scheduler is not None:
            factor = self._factors.get(self._system.programs[batch.program].name)
            if factor is not None:
                count = self._odd[place, batch.program] = self._odd.get((place, batch.program), 0) + 1
                if count == _TOLD_AFTER:
                    engine.scheduler.update_latency(batch.program, place - engine.gpulets.first, factor)

    def _stretch(self) -> None:
        """Give the batches of the present plan their real latencies."""
        programs = enumerate(self._system.programs)
        factors = {index: self._factors[p.name] for index, p in programs if p.name in self._factors}
        if factors:
            self._engine.gpulets.stretch(self._system, factors)

    # --- processes ----------------------------------------------------------------------------------------------------

    def _started(self, gpulet: Gpulet, fixed: GpuletProcess, now: float) -> _Process:
        low, high = self.life.start_s
        process = _Process(gpulet, fixed, INF, broken=self._cannot_start(gpulet))
        if process.broken is None:
            self._await(process, now + 1000.0 * float(self._generator.uniform(low, high)))
        return process

    def _await(self, process: _Process, ready_at: float) -> None:
        process.is_ready, process.ready_at = False, ready_at
        heappush(self._due, (ready_at, process.gpulet.id))

    def _charge(self) -> None:
        """Add up what the living processes have used since the last call."""
        seconds = (self.now_ms - self._used_at_ms) / 1000.0
        self._used_at_ms = self.now_ms
        alive = [process.gpulet for process in self._processes.values() if process.broken != "lost"]
        held: defaultdict[str, float] = defaultdict(float)
        for gpulet in alive:
            for gpu in gpulet.gpus:
                held[gpu] += 0.0 if gpulet.id in self._idle else gpulet.effective_share_pct / 100.0
        gpus = {name: self._gpus[name] for name in held}
        shares = (held[n] if gpu.cut_as is None else min(1.0, held[n]) * gpu.part for n, gpu in gpus.items())
        self._share_s += seconds * sum(shares)
        self._gpu_s += seconds * len({gpu.device for gpu in gpus.values()})

    # --- looks --------------------------------------------------------------------------------------------------------

    def observe(self) -> Look:
        """Return what happened since the last look."""
        self._charge()
        engine, models = self._engine, len(self._names)
        arrived = np.bincount(engine.models[self._looked_from : engine.next], minlength=models)
        self._looked_from = engine.next
        if engine.followed:
            arrived += np.bincount(engine.models[engine.followed], minlength=models)
            self._may_wait = [r for r in (*self._may_wait, *engine.followed) if engine.deadlines_ms[r] > self.now_ms]
            engine.followed = []
        ended, generated = np.zeros((models, len(OUTCOMES)), dtype=np.int64), self._read_written()
        ended[:, Outcome.OK : Outcome.LATE + 1] += generated[:, :2]
        for outcome, lost in engine.lost.items():
            if lost:
                requests = np.fromiter(chain.from_iterable(lost), dtype=np.int64)
                ended[:, outcome] += np.bincount(engine.models[requests], minlength=models)
                lost.clear()
        processes = self._processes.items()
        look = Look(
            arrived=arrived,
            gpulets=self._read_log(ended),
            ended=ended,
            ready=frozenset(name for name, process in processes if process.is_ready),
            waiting=frozenset(name for name, process in processes if not process.is_ready and process.broken is None),
            broken={name: process.broken for name, process in processes if process.broken is not None},
            share_s=self._share_s,
            gpu_s=self._gpu_s,
            generated=np.column_stack([generated[:, :2].sum(axis=1), generated[:, 2:]]),
        )
        self._share_s = self._gpu_s = 0.0
        return look

    def end_offline(self, gpu_s: float) -> Mapping[str, Any]:
        """Begin nothing more that is offline, and return the figures of what was until the last look, in so much GPU
        time; empty if there was none."""
        if self._offline is None:
            return {}
        self._offline.end()
        tokens, steps_ms, offline_ms = self._engine.replicas.offline_work()
        whole_ms = max(1.0, 1000.0 * gpu_s)
        offline_part = (self._offline_batches_ms + offline_ms) / whole_ms
        online_part = (self._batches_ms + steps_ms) / whole_ms - offline_part
        return self._offline.figures(self._names, tokens, offline_part, online_part)

    def _read_written(self) -> NDArray[np.int64]:
        """Return by model the requests generated to their end since the last look, in time and late, and the tokens of
        their prompts and outputs."""
        written, engine = np.zeros((len(self._names), 4), dtype=np.int64), self._engine
        slos = {} if self.plan is None else {spec.name: spec.slo for spec in self.plan.models}
        for request, place in engine.replicas.written:
            replica, model = engine.replicas.steps[place], int(engine.models[request])
            slo, first_ms, last_ms = slos.get(self._names[model]), replica.first_ms[request], replica.last_ms[request]
            if self._tokens is None:
                continue
            prompt, output = int(self._tokens.prompt[request]), int(self._tokens.output[request])
            took_ms = first_ms - engine.times_ms[request]
            is_late = slo is not None and not slo.is_met_by(took_ms, last_ms - first_ms, output, TIME_TOLERANCE_MS)
            written[model] += (not is_late, is_late, prompt, output)
        engine.replicas.written.clear()
        return written

    def _measured_ratios(self) -> dict[str, dict[str, float]]:
        """Return real over planned latency, by gpu-let and program, for programs with enough batches."""
        ratios: dict[str, dict[str, float]] = {}
        for (place, program), batches in self._odd.items():
            if batches >= _TOLD_AFTER:
                name = self._system.programs[program].name
                ratios.setdefault(self._ids[place], {})[name] = self._factors[name]
        return ratios

    def _read_log(self, ended: NDArray[np.int64]) -> dict[str, GpuletUse]:
        """Add the requests of ended batches to `ended`, and empty the log of batches; return what the gpu-lets did."""
        engine, log, measured = self._engine, self._engine.gpulets.log, self._measured_ratios()
        busy_ms: dict[str, list[float]] = {}
        for place, start_ms, finish_ms in zip(log.gpulet, log.start_ms, log.finish_ms, strict=True):
            busy_ms.setdefault(self._ids[place], []).append(finish_ms - start_ms)
            self._batches_ms += finish_ms - start_ms
        for row, count in enumerate(log.offline if self._offline is not None else ()):
            if count and not log.preempted[row]:
                part = count / (count + len(log.requests[row]))
                self._offline_batches_ms += part * (log.finish_ms[row] - log.start_ms[row])
        ended_rows = [row for row, preempted in enumerate(log.preempted) if not preempted]
        if ended_rows:
            sizes = [len(log.requests[row]) for row in ended_rows]
            requests = np.fromiter(chain.from_iterable(log.requests[r] for r in ended_rows), np.int64, count=sum(sizes))
            finish = np.repeat([log.finish_ms[row] for row in ended_rows], sizes) + self._network.response_ms
            in_time = finish <= engine.deadlines_ms[requests] + TIME_TOLERANCE_MS
            models = engine.models[requests]
            ended[:, Outcome.OK] += np.bincount(models[in_time], minlength=len(self._names))
            ended[:, Outcome.LATE] += np.bincount(models[~in_time], minlength=len(self._names))
        engine.gpulets.log = BatchLog()
        return {
            name: GpuletUse(sum(times) / 1000.0, len(times), measured.get(name, {})) for name, times in busy_ms.items()
        }
