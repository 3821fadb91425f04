"""What all schedulers share. A queue keeps the requests of one program in order of their deadlines. The base class
gives requests up in time, cuts a batch for a gpu-let and sends it."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from heapq import heappop, heappush
from typing import Generic, TypeVar

from mypy_extensions import mypyc_attr

from tenuto.batching.core.gathering import window
from tenuto.batching.core.gpulets import Gpulets, P, Pool
from tenuto.batching.core.scheduler import Dispatch, Drop, Scheduler, SchedulerOptions
from tenuto.batching.core.system import EXPIRY_MARGIN_MS, INF, TIME_TOLERANCE_MS, NetworkDelay, System


@mypyc_attr(allow_interpreted_subclasses=True)
class Queue(Generic[P]):
    """The requests of one program in order of their deadlines, and where they can run.

    `deadlines` says when the batch of each request must have ended, `arrived` when each request came. `pools` has the
    fastest pool first. `least_factor` is the smallest ratio of measured to planned latency that any gpu-let ever
    showed. `expire_at` is when the head may have to be given up.
    """

    __slots__ = ("arrived", "deadlines", "expire_at", "ids", "least_factor", "pools", "program")

    def __init__(self, program: int, pools: list[P]) -> None:
        self.program = program
        self.pools = pools
        self.deadlines: list[float] = []
        self.ids: list[int] = []
        self.arrived: list[float] = []
        self.least_factor = 1.0
        self.expire_at = INF

    def insert(self, deadline: float, request_id: int, now: float) -> bool:
        """Add a request; returns whether it is now the head of the queue."""
        deadlines = self.deadlines
        if not deadlines or deadline >= deadlines[-1]:
            deadlines.append(deadline)
            self.ids.append(request_id)
            self.arrived.append(now)
            return len(deadlines) == 1
        place = bisect_right(deadlines, deadline)
        deadlines.insert(place, deadline)
        self.ids.insert(place, request_id)
        self.arrived.insert(place, now)
        return not place

    def remove(self, begin: int, end: int) -> list[int]:
        """Remove the requests at these places; returns their ids."""
        taken = self.ids[begin:end]
        del self.ids[begin:end], self.deadlines[begin:end], self.arrived[begin:end]
        return taken


Q = TypeVar("Q", bound=Queue)  # type: ignore[type-arg]


@mypyc_attr(allow_interpreted_subclasses=True)
class DeadlineScheduler(Scheduler, Generic[P, Q]):
    """Base of the schedulers. To learn a latency or a delay costs one assignment, however many gpu-lets there are."""

    def __init__(self, system: System, options: SchedulerOptions | None, gpulets: Gpulets[P], queues: list[Q]) -> None:
        """`queues`: one per program, in their order."""
        super().__init__(system, options)
        self._gpulets = gpulets
        self._queues = queues
        self._queue_of = [queues[program] for program in system.program_of]
        self._expiries: list[tuple[float, int]] = []  # a heap of (time, program), stale unless it is `expire_at`
        self._adopt(system.network)

    def _adopt(self, network: NetworkDelay) -> None:
        self._network = network
        self._response_ms = network.response_ms
        self._gpulets.adopt(network)

    # Requests that cannot be met -------------------------------------------------------------------------------------

    def _quickest_ms(self, queue: Q) -> float:
        """Return how long a request alone takes at least, from its dispatch to its end."""
        fastest: Pool = queue.pools[0]
        return self._gpulets.way_ms(1) + queue.least_factor * fastest.run[queue.program][1]

    def _expire_later(self, queue: Q) -> None:
        """Set the timer that gives up the head once it cannot be met."""
        at = queue.deadlines[0] - self._quickest_ms(queue) + EXPIRY_MARGIN_MS
        if at < queue.expire_at:
            queue.expire_at = at
            heappush(self._expiries, (at, queue.program))
            if at < self.next_wake_ms:
                self.next_wake_ms = at

    def _expire(self, now: float) -> None:
        """Give up the requests that cannot be met even alone on the fastest gpu-let."""
        expiries = self._expiries
        while expiries and expiries[0][0] <= now:
            at, program = heappop(expiries)
            queue = self._queues[program]
            if at != queue.expire_at:
                continue
            queue.expire_at = INF
            if queue.ids:
                gone = bisect_left(queue.deadlines, now + self._quickest_ms(queue) - TIME_TOLERANCE_MS)
                if gone:
                    self._drop(queue, gone, now)
            if queue.ids:
                self._expire_later(queue)

    def _drop(self, queue: Q, count: int, now: float) -> None:  # noqa: ARG002
        """Give up the first requests of a queue."""
        self.decisions.append(Drop(queue.program, queue.remove(0, count)))

    # Batches ---------------------------------------------------------------------------------------------------------

    def _cut(self, queue: Q, pool: P, defended: int, now: float) -> tuple[int, int]:
        """Cut a batch for the next gpu-let of a pool, and give up the requests that no gpu-let can meet.

        Returns:
            How many requests stay in the queue before the batch, and its size (0: this gpu-let can meet nothing).
        """
        gpulets, deadlines = self._gpulets, queue.deadlines
        free_at, gpulet = gpulets.open_at(pool, now)
        factor, arrives_at = gpulets.factor(queue.program, gpulet), now + gpulets.ctrl_ms
        skip, size = window(deadlines, defended, pool.run[queue.program], factor, arrives_at, gpulets.data_ms, free_at)
        lost = skip
        if skip and pool is not queue.pools[0]:  # a faster gpu-let may still meet what this one is too slow for
            lost = bisect_left(deadlines, now + self._quickest_ms(queue) - TIME_TOLERANCE_MS, 0, skip)
        if lost:
            self._drop(queue, lost, now)
        return skip - lost, size

    def _send(self, queue: Q, pool: P, skip: int, size: int, now: float) -> None:
        """Send requests as one batch to the next gpu-let of a pool."""
        self._send_ids(queue.program, pool, queue.remove(skip, skip + size), now)

    def _send_ids(self, program: int, pool: P, ids: list[int], now: float) -> None:
        """Send these requests, which wait no more, as one batch of a program to the next gpu-let of a pool."""
        gpulets, size = self._gpulets, len(ids)
        free_at, gpulet = gpulets.open_at(pool, now)
        start, run_ms = (
            max(now + gpulets.way_ms(size), free_at),
            gpulets.factor(program, gpulet) * pool.run[program][size],
        )
        self.decisions.append(Dispatch(gpulet, program, ids, start, start + run_ms))
        gpulets.send(gpulet, run_ms, start + run_ms)

    # What a driver calls ---------------------------------------------------------------------------------------------

    def cancel(self, now_ms: float, model: int, request_id: int) -> bool:
        queue = self._queue_of[model]
        if request_id not in queue.ids:
            return False
        place = queue.ids.index(request_id)
        queue.remove(place, place + 1)
        self._cancelled(queue, now_ms)
        return True

    def _cancelled(self, queue: Q, now: float) -> None:
        """React to a request that was taken back; the queue may be empty now."""

    def gpulet_lost(self, now_ms: float, gpulet: int) -> None:  # noqa: ARG002
        self._gpulets.lose(gpulet)

    def queued(self, program: int) -> int:
        return len(self._queues[program].ids)

    def update_latency(self, program: int, gpulet: int, factor: float) -> None:
        self._gpulets.correct(program, gpulet, factor)
        queue = self._queues[program]
        queue.least_factor = min(queue.least_factor, factor)

    def update_network(self, network: NetworkDelay) -> None:
        self._adopt(network)
