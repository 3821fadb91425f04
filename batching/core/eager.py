"""Eager batching: waiting requests run as soon as a gpu-let is idle."""

from __future__ import annotations

from heapq import heapify, heappop, heappush

from tenuto.batching.core.by_deadline import DeadlineScheduler, Queue
from tenuto.batching.core.gathering import longest_within
from tenuto.batching.core.gpulets import Gpulets, Pool
from tenuto.batching.core.scheduler import Drop, SchedulerOptions
from tenuto.batching.core.system import INF, TIME_TOLERANCE_MS, System


class EagerScheduler(DeadlineScheduler[Pool, Queue[Pool]]):
    """Symphony's own comparison (arXiv 2308.07470 §3): the deferred scheduler without deferring.

    When a gpu-let is idle, an arrival runs once all arrivals of the same moment are there. (If it ran alone, requests
    that a server reads together would make batches of one.) When none is idle, the program waits. Its rank is the
    latest start of the largest batch that its head allows; a gpu-let that becomes free takes the smallest rank, as in
    Symphony. The paper does not say which idle GPU an eager scheduler takes; here it is the one of the smallest index.
    """

    name = "eager"
    summary = "run what waits as soon as a gpu-let is idle, most urgent model first"

    def __init__(self, system: System, options: SchedulerOptions | None = None) -> None:
        gpulets = Gpulets(system, Pool)
        queues = [Queue(program, pools) for program, pools in enumerate(gpulets.pools_of)]
        super().__init__(system, options, gpulets, queues)
        self._waiting: dict[int, Queue[Pool]] = {}

    # What a subclass may override ------------------------------------------------------------------------------------

    def _size(self, queue: Queue[Pool], pool: Pool, limit: int, slack_ms: float) -> int:
        """Return the largest batch of at most `limit` that an idle gpu-let of a pool ends within the slack."""
        gpulets, program = self._gpulets, queue.program
        gpulet = pool.idle[0] if pool.idle else pool.gpulets[0]
        room_ms = slack_ms + TIME_TOLERANCE_MS - gpulets.ctrl_ms
        return min(limit, longest_within(pool.run[program], room_ms, gpulets.factor(program, gpulet), gpulets.data_ms))

    def _rank(self, queue: Queue[Pool], now: float) -> float:
        """Return the latest start of the largest batch that could start now; the smallest rank goes first."""
        pool, head = queue.pools[0], queue.deadlines[0]
        size = max(1, self._size(queue, pool, len(queue.ids), head - now))
        return head - self._gpulets.way_ms(size) - queue.least_factor * pool.run[queue.program][size]

    # Events ----------------------------------------------------------------------------------------------------------

    def add_request(self, now_ms: float, model: int, request_id: int, deadline_ms: float) -> None:
        queue = self._queue_of[model]
        due = deadline_ms - self._response_ms
        if not queue.pools or now_ms + self._quickest_ms(queue) > due + TIME_TOLERANCE_MS:
            self.decisions.append(Drop(queue.program, [request_id]))
            return
        queue.insert(due, request_id, now_ms)
        self._waiting[queue.program] = queue
        if queue.ids[0] == request_id:
            self._expire_later(queue)
        if _has_idle(queue):
            self.next_wake_ms = now_ms

    def batch_done(self, now_ms: float, gpulet: int) -> None:
        if self._gpulets.done(gpulet, now_ms):
            self._serve(now_ms)

    def wake(self, now_ms: float) -> None:
        self._expire(now_ms)
        self._serve(now_ms)
        self.next_wake_ms = self._expiries[0][0] if self._expiries else INF

    def _serve(self, now: float) -> None:
        """Give idle gpu-lets to what waits, the most urgent first."""
        waiting = [queue for queue in self._waiting.values() if queue.ids]
        self._waiting = {queue.program: queue for queue in waiting}
        ready = [queue for queue in waiting if _has_idle(queue)]
        ranked = [(self._rank(queue, now) if len(ready) > 1 else 0.0, queue.program) for queue in ready]
        heapify(ranked)
        while ranked:
            queue = self._queues[heappop(ranked)[1]]
            pool = next((pool for pool in queue.pools if pool.idle), None)
            if pool is not None and self._run(queue, pool, now) and queue.ids:
                heappush(ranked, (self._rank(queue, now), queue.program))

    def _run(self, queue: Queue[Pool], pool: Pool, now: float) -> bool:
        """Send a batch to the first idle gpu-let of a pool; False if that gpu-let can meet no request."""
        skip, size = self._cut(queue, pool, 1, now)
        if size:
            self._send(queue, pool, skip, size, now)
        return size > 0

    def gpulet_back(self, now_ms: float, gpulet: int) -> None:
        self._gpulets.back(gpulet)
        self._serve(now_ms)


def _has_idle(queue: Queue[Pool]) -> bool:
    return any(pool.idle for pool in queue.pools)
