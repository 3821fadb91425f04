"""Eager batching: whatever waits runs as soon as a gpu-let is idle."""

from __future__ import annotations

from bisect import bisect_right
from heapq import heappop, heappush

from tenuto.batching.core.by_deadline import DeadlineQueue, DeadlineScheduler, head_first_batch
from tenuto.batching.core.scheduler import SchedulerOptions
from tenuto.batching.core.system import INF, System


class EagerScheduler(DeadlineScheduler):
    """Symphony's own comparison (arXiv 2308.07470 §3): the deferred scheduler without deferring.

    An arrival that finds a gpu-let idle runs as soon as all of the same moment are there: one by one those that a
    server reads together would make batches of one. Otherwise its model waits under the latest start of the
    largest batch its head allows; a gpu-let that becomes free takes the smallest, as in Symphony. The paper does not
    say which idle GPU an eager scheduler takes; here that of the smallest index.
    """

    name = "eager"
    summary = "run what waits as soon as a gpu-let is idle, most urgent model first"

    def __init__(self, system: System, options: SchedulerOptions | None = None) -> None:
        super().__init__(system, options)
        self._came: dict[int, DeadlineQueue] = {}  # at this moment, while a gpu-let was idle

    def _largest(self, sent: list[float], limit: int, slack_ms: float) -> int:
        """Return the largest batch of at most `limit` that ends within the slack."""
        return min(limit, bisect_right(sent, slack_ms) - 1)

    def _gather(self, now: float, queue: DeadlineQueue, sent: list[float]) -> tuple[int, int]:
        return head_first_batch(queue.deadlines, now, sent)

    def _arrived(self, now: float, queue: DeadlineQueue) -> None:
        self._rank(now, queue)
        if self._idle_for(queue) >= 0:
            self._came[queue.index] = queue
            self.next_wake_ms = now

    def wake(self, now_ms: float) -> None:
        super().wake(now_ms)
        came, self._came = self._came, {}
        for queue in sorted(came.values(), key=lambda queue: queue.rank):
            while queue.deadlines and (gpulet := self._idle_for(queue)) >= 0 and self._run(now_ms, queue, gpulet):
                pass

    def _run(self, now: float, queue: DeadlineQueue, gpulet: int) -> bool:
        """Send the model's batch to the gpu-let; False if nothing can be met there."""
        skip, size = self._gather(now, queue, self._tables[gpulet][queue.index])
        if not size:
            return False
        self._send(now, queue, gpulet, skip, size)
        queue.rank = INF
        if queue.deadlines:
            self._rank(now, queue)
        return True

    def _rank(self, now: float, queue: DeadlineQueue) -> None:
        """Wait under the latest start of the largest batch that could start now."""
        deadlines = queue.deadlines
        head = deadlines[0]
        size = self._largest(queue.sent, len(deadlines), head - now)
        self._wait(queue, head - queue.sent[max(1, size)])

    def _head_changed(self, now: float, queue: DeadlineQueue) -> None:
        if queue.deadlines:
            self._rank(now, queue)
        else:
            queue.rank = INF

    def _freed(self, now: float, gpulet: int) -> None:
        pool = self._pool_of[gpulet]
        waiting = pool.waiting
        aside: list[tuple[float, int]] = []
        served = False
        while waiting and not served:
            entry = heappop(waiting)
            queue = self._queues[entry[1]]
            if entry[0] != queue.rank:
                continue
            if entry[0] < now and self._shrinks(now, queue):
                waiting = pool.waiting
                continue
            served = self._run(now, queue, gpulet)
            waiting = pool.waiting
            if not served and queue.rank == entry[0]:
                aside.append(entry)
        for entry in aside:
            heappush(pool.waiting, entry)
        if not served:
            self._set_idle(gpulet)

    def _shrinks(self, now: float, queue: DeadlineQueue) -> bool:
        """The batch the model waits with can no longer start: give up lost heads and rank it anew. True if that
        changed."""
        before = queue.rank
        self._expire(now, queue)
        if queue.deadlines and queue.rank == before:
            self._rank(now, queue)
        return queue.rank != before
