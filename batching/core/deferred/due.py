"""Rule 1: when a batch is due.

A batch is due when it has used the part `hold` of the time for which Symphony would hold it: 1 is Symphony's frontrun,
0 sends at once. Holding makes batches larger, which saves GPU time and delays every request. So no batch is held under
light load: that is, when gpu-lets would be busy for less than `save_above` of the time if every request ran alone.
Above that, no batch is held longer than it takes to bring them down to `save_above`. And no batch waits longer than
that for another request: when the load ends, the last requests are answered soon.
"""

from __future__ import annotations

from math import ceil

from tenuto.batching.core.deferred.waiting import WaitingPool, WaitingQueue
from tenuto.batching.core.gpulets import Gpulets
from tenuto.batching.core.staggered import staggered_batch
from tenuto.batching.core.system import INF

# The part of its staggered size from which a batch may start before it is due, when there are too few gpu-lets.
RIPE = 0.5  # fitted: on 43 random scenarios; one of them loses 2.9 points when batches of any size may start


class Holding:
    """How long batches are held: `hold` and `defend`, and the bounds on holding for each program. `has_defended`: the
    front of a queue was given up for the size of a batch, so that another `defend` may decide otherwise."""

    def __init__(self, gpulets: Gpulets[WaitingPool], hold: float, defend: float, save_above: float) -> None:
        self.hold, self.defend = hold, defend
        self.has_defended = False
        self.save_above = save_above
        self.also_light_until = -INF  # until then hold under light load too, as requests were lost lately
        self._gpulets = gpulets

    def due_ms(self, queue: WaitingQueue, run: list[float], size: int, now: float) -> float:
        """Return when a batch is due: now, if it cannot become larger.

        Args:
            queue: the queue of the batch.
            run: planned l(b) on the pool where the batch would run.
            size: the number of its requests.
            now: the present time in ms.
        """
        costs, next_size = queue.costs, size + 1
        if size >= costs.longest or next_size >= len(run):
            return now
        bounds = queue.hold
        if bounds.is_light and now >= self.also_light_until and self._is_light(queue, now):
            return queue.oldest
        gpulets, hold, head, until = self._gpulets, self.hold, queue.deadlines[0], queue.oldest + costs.held_ms
        sent_ms = gpulets.ctrl_ms + gpulets.data_ms * next_size + queue.batch.factor * run[next_size]
        due = (head if head < until else until) - (1.0 - hold) * costs.budget_ms - hold * sent_ms
        if bounds.is_bounded:
            run_ms = queue.batch.factor * costs.run[min(size, len(costs.run) - 1)]
            due = min(due, queue.oldest + min(bounds.most_ms, bounds.patience * run_ms))
        lull = queue.newest + bounds.lull_ms
        return lull if lull < due else due

    def _is_light(self, queue: WaitingQueue, now: float) -> bool:
        """Whether as many gpu-lets are ready as under light load. (The load may have risen since it was measured.)"""
        ready = 0
        for pool in queue.pools:
            ready += self._gpulets.ready(pool, now)
        return ready >= (1.0 - self.save_above) * queue.costs.gpulets

    def set_patience(self, queue: WaitingQueue) -> None:
        """Find how long batches of a queue may be held, as a multiple of their own latency.

        When m programs share a gpu-let and hold batches for k times their latency, each program keeps the gpu-let busy
        for at most 1/k of the time, and all of them for at most m/k. The bound is the k with m/k = `save_above`. When a
        batch reaches its staggered size within that time, at the rate of the last seconds, there is no bound. But no
        batch waits for another request for k times the latency of a staggered batch: batches sent so far apart keep
        the gpu-let busy for less than that part of the time, whatever the rate was before.
        """
        if not queue.pools:
            return
        rps, hold, costs = queue.rate.rps, queue.hold, queue.costs
        hold.is_light = max([pool.alone for pool in queue.pools]) < self.save_above
        hold.patience = max([pool.crowd for pool in queue.pools]) / self.save_above if self.save_above else INF
        hold.lull_ms = hold.patience * queue.batch.factor * costs.run[costs.staggered]
        if rps is not None and rps / 1000.0 * hold.patience * costs.run[costs.staggered] >= costs.staggered:
            hold.patience = INF
        hold.is_bounded = hold.is_light or hold.patience < INF or hold.most_ms < INF

    def set_staggered(self, queue: WaitingQueue) -> None:
        costs = queue.costs
        costs.staggered = self._staggered(queue, costs.run)
        costs.ripe = ceil(RIPE * costs.staggered)
        costs.defend = max(1, round(self.defend * costs.staggered))
        for pool in queue.larger() if len(queue.pools) > 1 else ():
            staggered = self._staggered(queue, pool.run[queue.program])
            costs.defend_on[pool.index] = max(costs.defend, round(self.defend * staggered))
        per_ms = (queue.rate.rps or 0.0) / 1000.0
        costs.busy = per_ms * queue.batch.factor * costs.run[costs.staggered] / costs.staggered
        costs.alone = queue.rate.recent_rps / 1000.0 * costs.run[1] / costs.gpulets
        queue.loss.follow(queue.rate.rps or 0.0)

    def _staggered(self, queue: WaitingQueue, run: list[float]) -> int:
        costs, gpulets = queue.costs, self._gpulets
        return staggered_batch(
            run,
            costs.budget_ms - gpulets.ctrl_ms,
            queue.rate.rps,
            longest=min(costs.longest, len(run) - 1),
            factor=queue.batch.factor,
            data_ms=gpulets.data_ms,
        )
