"""The load that the offered requests are for the gpu-lets. The costs of batches, their sizes and their holding times
follow from it."""

from __future__ import annotations

from heapq import heappush, heapreplace

from tenuto.batching.core.deferred.due import Holding
from tenuto.batching.core.deferred.waiting import WaitingPool, WaitingQueue
from tenuto.batching.core.gpulets import Gpulets
from tenuto.batching.core.system import INF, System


class OfferedLoad:
    """Follows the measured rate of every queue.

    `load`: the part of the time for which the offered requests would keep the gpu-lets busy in staggered batches.
    """

    def __init__(
        self, system: System, queues: list[WaitingQueue], gpulets: Gpulets[WaitingPool], holding: Holding
    ) -> None:
        self.load = 0.0
        self._system = system
        self._queues = queues
        self._gpulets = gpulets
        self._holding = holding
        self._size = 1  # gpu-lets
        self._heavy = 0  # pools that are not under light load
        self._is_light = False  # no program needs the GPU time that holding saves
        self._silent: list[tuple[float, int]] = []  # a heap of (time, program): when to ask whether it became silent

    def adopt_all(self, response_ms: float) -> None:
        """Plan with the present gpu-lets and their measured latencies."""
        pools, holding = self._gpulets.pools, self._holding
        for pool in pools:
            pool.alone = pool.crowd = 0.0
        for queue in self._queues:
            self.adopt(queue, response_ms)
            if queue.pools:
                holding.set_staggered(queue)
            for pool in queue.pools:
                pool.alone += queue.costs.alone
                pool.crowd += 1.0 / queue.costs.gpulets
        self._size = max(1, sum([pool.size for pool in pools]))
        self.load = sum([queue.costs.busy for queue in self._queues], 0.0) / self._size
        self._heavy = sum(pool.alone >= holding.save_above for pool in pools)
        for pool in pools:
            pool.is_enclosed = all(len(self._queues[program].pools) == 1 for program in pool.run)
        for queue in self._queues:
            holding.set_patience(queue)

    def adopt(self, queue: WaitingQueue, response_ms: float) -> None:
        """Plan a queue with the measured latencies of gpu-lets and the measured delay to them."""
        system, program = self._system, queue.program
        longest_ms = max(system.models[m].slo_ms for m in system.programs[program].members)
        shortest_ms = system.offered[program].slo_ms
        queue.adopt_costs(self._gpulets, shortest_ms - response_ms, longest_ms - response_ms)

    def follow(self, queue: WaitingQueue, now: float, response_ms: float) -> None:
        """Adopt a changed rate of one queue, and find the queues whose requests have stopped."""
        silent = self._silent
        if not queue.is_weighed:
            queue.is_weighed = True
            heappush(silent, (queue.rate.silent_at(now), queue.program))
        while silent[0][0] <= now:
            other = self._queues[silent[0][1]]
            if other.pools and other is not queue and other.rate.is_silent(now):
                other.rate.look_back(now)
                self._weigh(other)
            heapreplace(silent, (other.rate.silent_at(now), other.program))
        self.adopt(queue, response_ms)
        self._weigh(queue)
        self._holding.set_patience(queue)
        self.see_whether_light()

    def see_whether_light(self) -> None:
        """Forget the losses of a heavy load once it has become light, and the other way round: requests lost under
        heavy load say nothing about light load."""
        if self._is_light != (not self._heavy):
            self._is_light = not self._heavy
            self._holding.also_light_until = -INF

    def _weigh(self, queue: WaitingQueue) -> None:
        """Adopt a changed load of one queue on its gpu-lets."""
        before, was_busy = queue.costs.alone, queue.costs.busy
        self._holding.set_staggered(queue)
        self.load += (queue.costs.busy - was_busy) / self._size
        for pool in queue.pools:
            was_heavy = pool.alone >= self._holding.save_above
            pool.alone += queue.costs.alone - before
            self._heavy += (pool.alone >= self._holding.save_above) - was_heavy
