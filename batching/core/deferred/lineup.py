"""Rule 2: all batches that wait for the same gpu-lets, lined up by their latest start.

Each batch gets the gpu-let on which it would end first; a gpu-let that runs a batch is free from the known end of that
batch. When a batch would start too late, the batch that serves the fewest requests per ms of all lined up so far is
pushed out. That is the algorithm of Moore and Hodgson (Management Science 15, 1968: fewest late jobs on one machine),
used as an approximation for several machines and for batches of many requests.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from heapq import heapify, heappop, heappush

from tenuto.batching.core.deferred.waiting import WaitingPool, WaitingQueue
from tenuto.batching.core.system import INF, TIME_TOLERANCE_MS


def line_up(waiting: list[WaitingQueue], now: float) -> tuple[bool, float]:
    """Line the batches up by their latest start, mark those that are pushed out, and find the slack in ms of each pool.

    The slack of a pool is the shortest time from the planned start of a batch until it is due, over all batches that
    the pool could run. It is below 0 when one of them is due already, and at most 0 when one is pushed out. Slack
    shrinks as time passes for batches that could start now and for those lined up behind them. A batch that only waits
    for running batches keeps its slack, as holding it costs nothing.

    Returns:
        Whether a pool has no slack, and in how many ms the next pool may have none.
    """
    passing_ms = INF
    from_now: set[float] = set()  # ends of batches whose start moves on with the time
    waiting.sort(key=_latest)
    pools_used = _find_frees(waiting, now)
    for number, queue in enumerate(waiting):
        batch, pools = queue.batch, queue.pools
        batch.is_out = False
        batch.placed = None
        limit = batch.latest + TIME_TOLERANCE_MS
        way_ms = batch.way_ms
        while True:
            if len(pools) > 1:
                chosen, run_ms = _soonest(queue)
            else:
                chosen, run_ms = pools[0], batch.factor * queue.costs.run[batch.size]
            free = chosen.free
            if not free:
                break
            # The batch must leave before the gpu-let is free, by as long as it is on its way.
            start = max(free[0] - way_ms, now)
            if start <= limit:
                passes = start == now or free[0] in from_now
                del free[0]
                batch.placed = chosen
                batch.end = start + way_ms + run_ms
                batch.run_ms = run_ms
                insort(free, batch.end)
                if chosen.least:
                    heappush(chosen.least, (batch.effective_priority, batch.density, number, queue))
                spare = (batch.due if batch.due > now else now) - start
                for pool in pools:
                    if spare < pool.slack:
                        pool.slack = spare
                if passes:
                    from_now.add(batch.end)
                    if TIME_TOLERANCE_MS < spare < passing_ms:
                        passing_ms = spare
                break
            # A batch can take the place of another one only on its own gpu-lets.
            least, least_of = (batch.effective_priority, batch.density, number, queue), chosen
            for pool in pools:
                if not pool.least:
                    lined = enumerate(waiting[:number])
                    pool.least = [
                        (q.batch.effective_priority, q.batch.density, place, q)
                        for place, q in lined
                        if q.batch.placed is pool
                    ]
                    heapify(pool.least)
                if pool.least and pool.least[0] < least:
                    least, least_of = pool.least[0], pool
            out = least[3]
            out.batch.is_out = True
            for pool in out.pools:
                pool.slack = min(pool.slack, 0.0)
            if out is queue:
                break
            heappop(least_of.least)
            out.batch.placed = None
            # The gpu-let of the batch that is pushed out is free earlier. A batch lined up behind it ends earlier.
            free = least_of.free
            place = min(bisect_left(free, out.batch.end), len(free) - 1)
            insort(free, free.pop(place) - out.batch.run_ms)
    return min([pool.slack for pool in pools_used]) <= TIME_TOLERANCE_MS, passing_ms


def _latest(queue: WaitingQueue) -> float:
    return queue.batch.latest


def _find_frees(waiting: list[WaitingQueue], now: float) -> list[WaitingPool]:
    """Find when gpu-lets become free, for each pool that a waiting batch can use; at most one gpu-let per batch."""
    most = len(waiting)
    pools = list(dict.fromkeys([pool for queue in waiting for pool in queue.pools]))
    for pool in pools:
        pool.slack = INF
        pool.least = []
        if pool.size == 1 and pool.idle:
            pool.free = [now]
            continue
        free = [now] * min(most, len(pool.idle))
        if len(free) < most:
            free += [end if end > now else now for end, _ in pool.busy[: most - len(free)]]
            if pool.full:
                free += [end for end, _ in pool.full[:most]]
                free.sort()
                del free[most:]
        pool.free = free
    return pools


def _soonest(queue: WaitingQueue) -> tuple[WaitingPool, float]:
    """Return the pool of a queue on which its batch would end first by the plan, and how long it would run there."""
    best, best_ms = queue.pools[0], 0.0
    batch, least = queue.batch, INF
    for pool in queue.pools:
        if pool.free:
            run = pool.run[queue.program]
            run_ms = batch.factor * (run[batch.size] if batch.size < len(run) else run[-1])
            if pool.free[0] + run_ms < least:
                best, best_ms, least = pool, run_ms, pool.free[0] + run_ms
    return best, best_ms


def is_short(queue: WaitingQueue) -> bool:
    """Whether the plan has no slack where the batch of a queue can run."""
    for pool in queue.pools:  # noqa: SIM110 (a generator costs twice as much)
        if pool.slack <= TIME_TOLERANCE_MS:
            return True
    return False


def rank(queue: WaitingQueue) -> tuple[bool, float, float]:
    """Return the sort key of batches that may start: those in the plan by their latest start, then the others."""
    batch = queue.batch
    if batch.is_out:
        return True, -batch.effective_priority, -batch.density
    return False, batch.latest, 0.0
