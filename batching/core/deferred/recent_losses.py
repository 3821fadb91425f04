"""Which programs lost requests lately, and whom that turns away: a program that exceeds its plan, and under the
objective `each` one that is served better than another."""

from __future__ import annotations

from tenuto.batching.core.deferred.waiting import WaitingQueue
from tenuto.batching.core.staggered import ArrivalRate
from tenuto.batching.core.system import INF

LATELY_MS = 2.0 * ArrivalRate.WINDOW_MS  # derived: how long a lost request counts as lost lately


class RecentLosses:
    """The losses of all programs."""

    def __init__(self, queues: list[WaitingQueue]) -> None:
        self._queues = queues
        self._lost_until: dict[int, float] = {}  # by program that lost requests: until when its loss counts as recent
        self._worst_share, self._worst_until = 0.0, -INF  # the largest share that is lost; until when it holds

    @property
    def programs(self) -> int:
        """How many programs lost requests lately, as of the last look."""
        return len(self._lost_until)

    def note(self, queue: WaitingQueue, now: float) -> float:
        """Note that a queue lost requests; returns until when that counts as recent."""
        until = self._lost_until[queue.program] = now + LATELY_MS
        return until

    def queues(self, now: float) -> list[WaitingQueue]:
        """Return the queues that lost requests lately."""
        losing = self._lost_until
        for program in [program for program, until in losing.items() if until < now]:
            del losing[program]
        return [self._queues[program] for program in losing]

    def are_due_to(self, queue: WaitingQueue, now: float) -> bool:
        """Say whether another program that keeps to its plan lost requests lately on gpu-lets of this program."""
        return any(
            other is not queue
            and not other.allowance.exceeds
            and any(queue.program in pool.run for pool in other.pools)
            for other in self.queues(now)
        )

    def favour(self, queue: WaitingQueue, provided_rps: float, now: float) -> bool:
        """Say whether more of a program is served than the plan has room for, while more of another one is lost."""
        if (1.0 - queue.loss.share) * (queue.rate.rps or 0.0) <= provided_rps:
            return False
        if now >= self._worst_until:
            lost = [q.loss.share for q in self._queues if q.pools and not q.rate.is_silent(now)]
            self._worst_share, self._worst_until = max(lost, default=0.0), now + ArrivalRate.STEP_MS
        return queue.loss.share < self._worst_share
