"""Batching with a fixed size and a fixed wait, as in general serving systems."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from heapq import heappop, heappush

from tenuto.batching.core.scheduler import SchedulerOptions
from tenuto.batching.core.system import INF, System
from tenuto_lab.rivals.base import RivalQueue, RivalScheduler


@dataclass(frozen=True)
class TimeoutOptions(SchedulerOptions):
    """The two constants of these systems, and what happens to late requests.

    batch_size: requests per batch; 0: per model the largest b with 2 l(b) <= SLO, as a careful operator would set it.
    wait_ms: how long the oldest request waits for a full batch; negative: what the SLO leaves, SLO - 2 l(batch_size).
    drop: `late` gives up the requests that the batch being sent would answer late (this is kinder to the goodput than
    any of these systems). `queue` gives up the requests that have spent their whole SLO in the queue (Triton's queue
    policy with timeout action REJECT). `none` runs all requests, however late (TensorFlow Serving, @serve.batch).
    """

    batch_size: int = field(default=0, metadata={"minimum": 0})
    wait_ms: float = -1.0
    drop: str = field(default="late", metadata={"choices": ("late", "queue", "none")})


class TimeoutScheduler(RivalScheduler):
    """TensorFlow Serving's batching session, Triton's dynamic batcher and Ray Serve's `@serve.batch`.

    A batch is released when it is full or when its oldest request has waited `wait_ms`. While no gpu-let is idle, a
    released batch keeps filling up to its size. Released batches of different models run in order of release. (The
    systems differ there: TensorFlow Serving takes models in turn; Triton and Serve have a queue per model instance.)
    The requests of one model run in order of deadlines. That is the order of arrival unless clients set SLOs of their
    own; then the wait of a request counts from deadline - SLO.
    """

    name = "timeout"
    summary = "fixed batch size and wait, as TF-Serving, Triton and @serve.batch"
    options_type = TimeoutOptions

    def __init__(self, system: System, options: SchedulerOptions | None = None) -> None:
        self._chosen = options if isinstance(options, TimeoutOptions) else TimeoutOptions()
        self._sizes = [1] * len(system.programs)
        self._waits = [0.0] * len(system.programs)
        super().__init__(system, options)
        self._tables_changed()

    def _tables_changed(self) -> None:
        for queue in self._queues:
            if not queue.idle_pools:
                continue
            sent = queue.sent
            size = self._chosen.batch_size
            if not size:
                size = max((b for b in range(1, len(sent)) if 2 * sent[b] <= queue.budget_ms), default=1)
            self._sizes[queue.program] = size
            wait = self._chosen.wait_ms
            run = sent[min(size, len(sent) - 1)]
            self._waits[queue.program] = wait if wait >= 0 else max(0.0, queue.budget_ms - 2 * run)

    def _give_up_ms(self, queue: RivalQueue) -> float:
        if self._chosen.drop == "late":
            return queue.sent[1]
        return 0.0 if self._chosen.drop == "queue" else -INF

    def _arrived(self, now: float, queue: RivalQueue) -> None:
        if queue.rank == INF:
            self._consider(now, queue)

    def _head_changed(self, now: float, queue: RivalQueue) -> None:
        if not queue.deadlines:
            queue.rank = INF
        elif queue.rank == INF:
            self._consider(now, queue)

    def _consider(self, now: float, queue: RivalQueue) -> None:
        """Release the batch if it is full or old enough. Otherwise set a timer that releases it."""
        deadlines, index = queue.deadlines, queue.program
        while deadlines:
            release_at = deadlines[0] - queue.budget_ms + self._waits[index]
            if len(deadlines) < self._sizes[index] and release_at > now:
                if release_at < queue.timer_at:
                    queue.timer_at = release_at
                    self._push_timer(release_at, len(self._queues) + index)
                return
            gpulet = self._idle_for(queue)
            if gpulet < 0 or not self._run(now, queue, gpulet):
                if deadlines:
                    self._wait(queue, now)
                return

    def _timer(self, now: float, at: float, key: int) -> None:
        queue = self._queues[key]
        if at == queue.timer_at:
            queue.timer_at = INF
            if queue.rank == INF:
                self._consider(now, queue)

    def _run(self, now: float, queue: RivalQueue, gpulet: int) -> bool:
        """Send one batch. Return False if no request of the queue can run on this gpu-let in time."""
        sent = self._tables[gpulet][queue.program]
        deadlines = queue.deadlines
        limit = min(self._sizes[queue.program], len(sent) - 1)
        count, skip = len(deadlines), 0
        size = min(limit, count)
        if self._chosen.drop == "late":
            while size and deadlines[skip] < now + sent[size]:
                skip = bisect_left(deadlines, now + sent[size], skip)
                size = min(limit, count - skip)
        elif self._chosen.drop == "queue":
            skip = bisect_left(deadlines, now)
            size = min(limit, count - skip)
        if not size:
            return False
        if skip:
            self._drop(queue, skip)
        self._send(now, queue, gpulet, 0, size)
        return True

    def _freed(self, now: float, gpulet: int) -> None:
        pool = self._pool_of[gpulet]
        aside: list[tuple[float, int]] = []
        served = False
        while pool.waiting and not served:
            entry = heappop(pool.waiting)
            queue = self._queues[entry[1]]
            if entry[0] != queue.rank:
                continue
            served = self._run(now, queue, gpulet)
            if served:
                queue.rank = INF
                self._consider(now, queue)
            else:
                aside.append(entry)
        for entry in aside:
            heappush(pool.waiting, entry)
        if not served:
            self._set_idle(gpulet)
