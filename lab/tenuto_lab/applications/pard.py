"""PARD (Zhao et al., arXiv 2602.08747): requests are dropped before they cost more, by an estimate of what comes.

At module k, a request is dropped when t_e - t_s + d_k + L_sub exceeds the SLO, where t_e is when its batch begins and
L_sub is the largest sum over the modules behind k of the queueing delay and the batch's duration, and of a batch wait:
a quantile of the sum of waits that are uniform up to each duration. Under overload the requests with the highest budget
left run first, else those with the lowest.

Our readings. The quantile is 0.1 and the queueing delay is a mean over 5 s; we had the paper's abstract and summaries
of it, not its text, and could not check both. The deadline that a stage's request is given is the application's less
L_sub, which drops the same requests; L_sub is taken when the request is sent. A batch begins when its gpu-let is idle,
so that the measured time until then has the batch wait in it; its mean, half a duration, is subtracted. The batch of a
module is the largest that takes half of the budget of Nexus' split. Modules that share gpu-lets take turns by the
latest start of their heads, and overload is judged for all modules together.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Mapping

import numpy as np

from tenuto.batching.applications.application_graph import ApplicationGraph
from tenuto.batching.applications.application_run import ApplicationRun
from tenuto.batching.applications.stage_times import StageTimes
from tenuto.batching.core.by_deadline import Queue
from tenuto.batching.core.eager import EagerScheduler
from tenuto.batching.core.gpulets import Pool
from tenuto.batching.core.scheduler import SchedulerOptions
from tenuto.batching.core.system import TIME_TOLERANCE_MS, System

WAIT_QUANTILE = 0.1
WINDOW_MS = 5000.0


class PardEstimates:
    """What a system of PARD knows of its modules: durations of their batches, and recent queueing delays."""

    def __init__(self, duration_ms: Mapping[str, float]) -> None:
        """`duration_ms` is by model, of its planned batch."""
        self.duration_ms = duration_ms
        self._delays: dict[str, deque[tuple[float, float]]] = {name: deque() for name in duration_ms}
        self._sums = dict.fromkeys(duration_ms, 0.0)
        self._waits: dict[tuple[str, ...], float] = {}
        self._paths: dict[tuple[str, int], list[tuple[str, ...]]] = {}

    def note(self, model: str, took_ms: float, now: float) -> None:
        """Take note of a request that was answered."""
        duration_ms = self.duration_ms[model]
        delay = max(0.0, took_ms - 1.5 * duration_ms)
        delays = self._delays[model]
        delays.append((now, delay))
        self._sums[model] += delay
        while delays[0][0] < now - WINDOW_MS:
            self._sums[model] -= delays.popleft()[1]

    def behind_ms(self, graph: ApplicationGraph, stage: int) -> float:
        """Return L_sub of a stage."""
        key = graph.name, stage
        if key not in self._paths:
            self._paths[key] = _paths(graph, stage)
        return max(self._path_ms(path) for path in self._paths[key])

    def _path_ms(self, path: tuple[str, ...]) -> float:
        if path not in self._waits:
            draws = np.random.default_rng(0).random((10_000, len(path)))
            sums = draws @ np.array([self.duration_ms[name] for name in path]) if path else np.zeros(1)
            self._waits[path] = float(np.quantile(sums, WAIT_QUANTILE))
        queued = sum(self._sums[name] / len(self._delays[name]) for name in path if self._delays[name])
        return queued + sum(self.duration_ms[name] for name in path) + self._waits[path]


def _paths(graph: ApplicationGraph, stage: int) -> list[tuple[str, ...]]:
    later = graph.stages[stage].later
    return [(graph.stages[s].model, *path) for s in later for path in _paths(graph, s)] or [()]


class PardRun(ApplicationRun):
    """A request of an application under PARD's rule."""

    def __init__(
        self,
        graph: ApplicationGraph,
        arrived_ms: float,
        deadline_ms: float,
        times: StageTimes,
        estimates: PardEstimates,
    ) -> None:
        super().__init__(graph, arrived_ms, deadline_ms, times)
        self._end_ms, self._estimates = deadline_ms, estimates
        self._sent_ms = [0.0] * len(graph.stages)

    def deadline_ms(self, stage: int, now: float) -> float:
        self._sent_ms[stage] = now
        return self._end_ms - self._estimates.behind_ms(self.graph, stage)

    def cannot_end(self, stage: int, now: float) -> bool:  # noqa: ARG002
        return False  # the scheduler drops by the deadline

    def answered(self, stage: int, now: float) -> list[int]:
        self._estimates.note(self.graph.stages[stage].model, now - self._sent_ms[stage], now)
        return super().answered(stage, now)


class PardScheduler(EagerScheduler):
    """Eager batches of at most the planned size, in PARD's order of priority."""

    name = "pard"
    summary = "PARD: drops by an estimate of the whole pipeline, high budgets first under overload"

    def __init__(self, system: System, options: SchedulerOptions | None = None) -> None:
        super().__init__(system, options)
        self._arrivals: deque[tuple[float, float]] = deque()  # (time, GPU time of a request in a full batch)
        self._work_ms = 0.0
        self._is_overloaded = False

    def add_request(self, now_ms: float, model: int, request_id: int, deadline_ms: float) -> None:
        queue = self._queue_of[model]
        if queue.pools:
            run = queue.pools[0].run[queue.program]
            room = sum(pool.size for pool in queue.pools)
            work_ms = run[-1] / (len(run) - 1) / room
            self._arrivals.append((now_ms, work_ms))
            self._work_ms += work_ms
            while self._arrivals[0][0] < now_ms - WINDOW_MS:
                self._work_ms -= self._arrivals.popleft()[1]
        super().add_request(now_ms, model, request_id, deadline_ms)

    def _run(self, queue: Queue[Pool], pool: Pool, now: float) -> bool:
        deadlines, run = queue.deadlines, pool.run[queue.program]
        size = min(len(deadlines), len(run) - 1)
        while size:
            first = bisect_left(deadlines, now + run[size] - TIME_TOLERANCE_MS)
            if len(deadlines) - first >= size:
                break
            size = min(size - 1, max(1, len(deadlines) - first)) if size > 1 else 0
        if not size:
            self._drop(queue, len(deadlines), now)
            return False
        span_ms = min(WINDOW_MS, max(now, 1.0))
        load = self._work_ms / span_ms
        # Delayed transition: the order changes only when the load is clearly on the other side.
        self._is_overloaded = load > (0.95 if self._is_overloaded else 1.05)
        if first:
            self._drop(queue, first, now)
        skip = len(deadlines) - size if self._is_overloaded else 0
        self._send(queue, pool, skip, size, now)
        return True
