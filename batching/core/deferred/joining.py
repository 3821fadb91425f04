"""Rule 4: which requests of other sizes join a batch that is sent.

Requests of a model's other size classes may join the batch, which is then padded to the smallest class that covers all.
They join when the padded batch ends by every deadline in it, and when it takes less time in addition than they would
take in batches of their own. Where gpu-lets are short, no waiting batch may start too late for it.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field

from tenuto.batching.core.deferred.waiting import WaitingPool, WaitingQueue
from tenuto.batching.core.gathering import longest_within
from tenuto.batching.core.gpulets import Gpulets
from tenuto.batching.core.system import INF, TIME_TOLERANCE_MS


@dataclass(slots=True, eq=False)
class JointBatch:
    """A batch with the requests of several size classes. `parts` has (queue, place of the first request, requests) of
    those that join; `saved_ms` is what the batch takes less than all batches by themselves."""

    target: WaitingQueue
    end: float
    parts: list[tuple[WaitingQueue, int, int]] = field(default_factory=list)
    saved_ms: float = 0.0


def find_joint_batch(
    queue: WaitingQueue, pool: WaitingPool, place: int, size: int, gpulets: Gpulets[WaitingPool], now: float
) -> JointBatch | None:
    """Return the joint batch that saves most time on the next gpu-let of a pool; None if none saves any.

    Args:
        queue: the queue whose batch is sent.
        pool: where it is sent to.
        place: how many of its requests stay in front of the batch.
        size: the number of its requests in the batch.
        gpulets: all gpu-lets.
        now: the present time in ms.
    """
    alone = _JointBatches(queue, pool, place, size, gpulets, now)
    best: JointBatch | None = None
    for target in [queue, *dict.fromkeys([target for other, target in queue.siblings if other.ids])]:
        if target.program in pool.run and (best is None or target is not queue):
            joint = alone.padded_to(target, INF)
            if joint is not None and (best is None or joint.saved_ms > best.saved_ms):
                best = joint
    if best is not None and len(pool.waiting) > gpulets.ready(pool, now):
        end_by = alone.end_by(best)
        if best.end > end_by + TIME_TOLERANCE_MS:
            best = alone.padded_to(best.target, end_by)
    return best


class _JointBatches:
    """The joint batches of one batch that is sent."""

    def __init__(
        self, queue: WaitingQueue, pool: WaitingPool, place: int, size: int, gpulets: Gpulets[WaitingPool], now: float
    ) -> None:
        self._queue, self._pool, self._size, self._gpulets = queue, pool, size, gpulets
        self._free_at, self._gpulet = gpulets.open_at(pool, now)
        self._arrives_at = now + gpulets.ctrl_ms
        self._head = queue.deadlines[place]
        self._run_ms = self._factor(queue) * pool.run[queue.program][size]

    def _factor(self, queue: WaitingQueue) -> float:
        return self._gpulets.factor(queue.program, self._gpulet)

    def _start(self, size: int) -> float:
        return max(self._arrives_at + self._gpulets.data_ms * size, self._free_at)

    def padded_to(self, target: WaitingQueue, end_by: float) -> JointBatch | None:
        """Return the joint batch that is padded to a class and ends by a time; None if it saves nothing."""
        run, factor, size = self._pool.run[target.program], self._factor(target), self._size
        if size >= len(run):
            return None
        head = min(self._head, end_by)
        run_ms = factor * run[size]
        if self._start(size) + run_ms > head + TIME_TOLERANCE_MS:
            return None
        joint = JointBatch(target, 0.0)
        joint.saved_ms = self._run_ms - run_ms
        covered = [other for other, both in target.siblings if both is target]
        for other in [target, *reversed(covered)]:
            if other is self._queue or not other.ids or size + 1 >= len(run):
                continue
            own_ms = _own_ms(other, self._pool)
            end = self._start(size + 1) + factor * run[size + 1]
            first = bisect_left(other.deadlines, end - TIME_TOLERANCE_MS)
            most = len(other.ids) - first
            if most <= 0:
                continue
            limit = min(head, other.deadlines[first]) + TIME_TOLERANCE_MS
            longest = longest_within(run, limit - self._arrives_at, factor, self._gpulets.data_ms)
            if self._free_at > self._arrives_at:
                longest = min(longest, longest_within(run, limit - self._free_at, factor))
            most = min(most, longest - size)
            best, best_ms = 0, 0.0
            for count in range(most, 0, -1):
                saved_ms = count * own_ms - (factor * run[size + count] - run_ms)
                if saved_ms > best_ms:
                    best, best_ms = count, saved_ms
            if best:
                joint.parts.append((other, first, best))
                joint.saved_ms += best_ms
                size += best
                run_ms = factor * run[size]
                head = min(head, other.deadlines[first])
        joint.end = self._start(size) + run_ms
        return joint if joint.parts and joint.saved_ms > TIME_TOLERANCE_MS else None

    def end_by(self, joint: JointBatch) -> float:
        """Return when the joint batch must end so that no waiting batch starts too late for it that would not after
        the batch alone. Batches whose requests all join do not count."""
        alone_ms, end_by = self._start(self._size) + self._run_ms, INF
        joined = {queue.program: count for queue, _, count in joint.parts}
        for other in self._pool.waiting.values():
            if other is not self._queue and joined.get(other.program, 0) < len(other.ids) and other.batch.size:
                start_by = other.batch.latest + other.batch.way_ms
                if start_by >= alone_ms - TIME_TOLERANCE_MS:
                    end_by = min(end_by, start_by)
        return end_by


def _own_ms(queue: WaitingQueue, pool: WaitingPool) -> float:
    """Return how long a request takes in a batch of its own class, as large as usual or as its queue is now."""
    costs = queue.costs
    run = pool.run.get(queue.program, costs.run)
    size = min(max(costs.staggered, min(len(queue.ids), costs.longest)), len(run) - 1)
    return queue.batch.factor * run[size] / size
