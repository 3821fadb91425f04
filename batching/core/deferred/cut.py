"""Rule 3: which batch is cut from a queue, and how long it may be; with it the batch's latest start and its priority.

A batch is cut by the window rule of Symphony's program (`gathering.py`): requests at the front are given up when they
keep the batch below `defend` times the staggered size. This is where the numbers learned while serving are applied: how
much longer the program takes on the batch's gpu-let, and how long the way to that gpu-let is.

When a model sends more than twice its planned rate (`allowance.py` finds such models) and only one gpu-let is idle, its
batch may only be as long as the models that keep to their plan can wait.
"""

from __future__ import annotations

from collections.abc import Sequence

from tenuto.batching.core.deferred.due import Holding
from tenuto.batching.core.deferred.waiting import WaitingPool, WaitingQueue
from tenuto.batching.core.gathering import window
from tenuto.batching.core.gpulets import Gpulets
from tenuto.batching.core.system import INF

BORROWED = 1_000_000  # derived: more than any priority: so much priority is taken from a program that exceeds its plan
ORDINARY_LOSS = 0.01  # fitted: smaller differences between losses do not count
WORST_FIRST = 1e6  # derived: requests per ms, more than any batch serves, so that the program that lost more goes first


class Cutter:
    """Cuts the batch that a queue would run now."""

    def __init__(self, gpulets: Gpulets[WaitingPool], holding: Holding, *, evens_out: bool) -> None:
        self._gpulets = gpulets
        self._holding = holding
        self._evens_out = evens_out

    def cut(self, queue: WaitingQueue, pool: WaitingPool, gpulet: int, now: float) -> None:
        """Cut the batch that the queue would run now on this gpu-let of the pool."""
        program, deadlines, gpulets = queue.program, queue.deadlines, self._gpulets
        batch = queue.batch
        batch.pool = pool
        run = pool.run[program]
        factor = batch.factor = gpulets.factor(program, gpulet)
        ctrl_ms, data_ms = gpulets.ctrl_ms, gpulets.data_ms
        size, head = min(len(deadlines), queue.costs.longest, len(run) - 1), deadlines[0]
        batch.due = self._holding.due_ms(queue, run, size, now)
        batch.cut_until = head - (ctrl_ms + data_ms * size + factor * run[size])
        if batch.cut_until < now:
            arrives_at = now + ctrl_ms
            defended = queue.costs.defend_on.get(pool.index, queue.costs.defend)
            skip, size = window(deadlines, defended, run, factor, arrives_at, data_ms, arrives_at)
            if size:
                head = deadlines[skip]
                if skip:
                    self._holding.has_defended = True
            elif pool is not queue.pools[0]:
                batch.size = 0
                return
            else:
                size = 1
            batch.due = now
        batch.size = size
        batch.way_ms = ctrl_ms + data_ms * size
        batch.latest = head - (batch.way_ms + factor * run[size])
        batch.density = queue.worth * size / (factor * run[size])
        batch.effective_priority = queue.priority
        if queue.allowance.borrowed:
            batch.density *= 1.0 - queue.allowance.borrowed
            if queue.allowance.exceeds and queue.allowance.owed < size:
                batch.effective_priority -= BORROWED
        if self._evens_out:
            batch.density += WORST_FIRST * round(queue.loss.share / ORDINARY_LOSS)

    def longest_beside_ms(self, queues: Sequence[WaitingQueue], pool: WaitingPool, now: float) -> float:
        """Return how long a program that exceeds its plan may run on the last idle gpu-let of a pool, in ms: no longer
        than each program that keeps to its plan can wait. A program for which another gpu-let ends in time sets no
        bound."""
        longest_ms = INF
        for other in map(queues.__getitem__, pool.run):
            ready = sum([self._gpulets.ready(place, now) for place in other.pools])
            if not other.allowance.exceeds and other.rate.rps and ready <= 1:
                costs, size = other.costs, other.costs.ripe
                way_ms = self._gpulets.way_ms(size)
                wait_ms = costs.budget_ms - way_ms - other.batch.factor * costs.run[size]
                if all(self._gpulets.free_by(place, now + way_ms)[1] > now + way_ms + wait_ms for place in other.pools):
                    longest_ms = min(longest_ms, wait_ms)
        return longest_ms
