"""Rule 1: when a batch is due.

A batch is due when it has used the part `hold` of the time for which Symphony would hold it: 1 is Symphony's frontrun,
0 sends at once. Holding makes batches longer, which saves GPU time and delays every request. So nothing is held under
light load, while single requests would keep gpu-lets busy for less than `save_above` of the time, and otherwise no
longer than takes them to that.
"""

from __future__ import annotations

from math import ceil

from tenuto.batching.core.deferred.waiting import Place, WaitingQueue
from tenuto.batching.core.gpulets import Gpulets
from tenuto.batching.core.staggered import staggered_batch
from tenuto.batching.core.system import INF

# Part of the staggered batch that may go before it is due where gpu-lets are short.
RIPE = 0.5  # fitted: on 43 random scenarios, of which one loses 2.9 points where batches of any size may go


class Holding:
    """For how long batches are held: `hold` and `defend`, and what bounds them for each program."""

    def __init__(self, gpulets: Gpulets[Place], hold: float, defend: float, save_above: float) -> None:
        self.hold, self.defend = hold, defend
        self.save_above = save_above
        self.in_full_until = -INF  # requests were lost lately, and are fewer where all are held in full
        self._gpulets = gpulets

    def due_ms(self, queue: WaitingQueue, run: list[float], size: int, now: float) -> float:
        """Return when a batch of so many is due: now, if none can be longer.

        Args:
            queue: whose batch it is.
            run: l(b) where it would run, by plan.
            size: its requests.
            now: the present time.
        """
        costs, more = queue.costs, size + 1
        if size >= costs.longest or more >= len(run):
            return now
        bounds = queue.hold
        if bounds.is_light and now >= self.in_full_until and self._is_light(queue, now):
            return queue.oldest
        gpulets, hold, head, until = self._gpulets, self.hold, queue.deadlines[0], queue.oldest + costs.held_ms
        sent_ms = gpulets.ctrl_ms + gpulets.data_ms * more + queue.batch.factor * run[more]
        due = (head if head < until else until) - (1.0 - hold) * costs.budget_ms - hold * sent_ms
        if bounds.is_bounded:
            longest_ms = INF if now < self.in_full_until else bounds.patience * queue.batch.factor * costs.run[size]
            due = min(due, queue.oldest + min(bounds.most_ms, longest_ms))
        return due

    def _is_light(self, queue: WaitingQueue, now: float) -> bool:
        """Whether as many gpu-lets are ready as under light load: the load may have risen since its rate was taken."""
        ready = 0
        for pool in queue.pools:
            ready += self._gpulets.ready(pool, now)
        return ready >= (1.0 - self.save_above) * queue.costs.gpulets

    def set_patience(self, queue: WaitingQueue) -> None:
        """Find for how many times their own length batches of a queue are held at most.

        With m programs per gpu-let and batches held for k times their length, each program keeps a gpu-let busy for at
        most 1/k of the time, and all together for at most m/k: the bound is the k that makes this `save_above`. Where a
        batch has its staggered size by then, there is none.
        """
        if not queue.pools:
            return
        rps, hold, costs = queue.rate.rps, queue.hold, queue.costs
        hold.is_light = max([pool.alone for pool in queue.pools]) < self.save_above
        hold.patience = max([pool.crowd for pool in queue.pools]) / self.save_above if self.save_above else INF
        if rps is not None and rps / 1000.0 * hold.patience * costs.run[costs.staggered] >= costs.staggered:
            hold.patience = INF
        hold.is_bounded = hold.is_light or hold.patience < INF or hold.most_ms < INF

    def set_staggered(self, queue: WaitingQueue) -> None:
        gpulets, costs = self._gpulets, queue.costs
        costs.staggered = staggered_batch(
            costs.run,
            costs.budget_ms - gpulets.ctrl_ms,
            queue.rate.rps,
            longest=costs.longest,
            factor=queue.batch.factor,
            data_ms=gpulets.data_ms,
        )
        costs.ripe = ceil(RIPE * costs.staggered)
        costs.defend = max(1, round(self.defend * costs.staggered))
        costs.alone = queue.rate.recent_rps / 1000.0 * costs.run[1] / costs.gpulets
        queue.loss.follow(queue.rate.rps or 0.0)
