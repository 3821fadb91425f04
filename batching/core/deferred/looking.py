"""When a new request makes it necessary to look at its queue. Looking costs time, so it is put off until a batch may
have come due. Nothing is decided here: to look more often would change no decision."""

from __future__ import annotations

from tenuto.batching.core.deferred.due import Holding
from tenuto.batching.core.deferred.waiting import WaitingPool, WaitingQueue
from tenuto.batching.core.gpulets import Gpulets
from tenuto.batching.core.system import INF


def look_at(queue: WaitingQueue, gpulets: Gpulets[WaitingPool], holding: Holding, now: float) -> float:
    """Return when to look at a queue that got another request; INF if an event comes first that brings a look
    anyway."""
    pools, watch, size = queue.pools, queue.watch, len(queue.ids)
    nearest = pools[0]  # a pool with an idle gpu-let, if there is one
    idle, most = len(nearest.idle), len(nearest.waiting)
    if nearest.is_enclosed:
        if not idle and not gpulets.ahead:
            return INF
    elif len(pools) > 1:
        idle = sum([len(pool.idle) for pool in pools])
        most = max([len(pool.waiting) for pool in pools])
        nearest = next((pool for pool in pools if pool.idle), nearest)
    if watch.is_tight and size >= queue.costs.ripe:
        look = now
    else:
        look = holding.due_ms(queue, nearest.run[queue.program], size, now)
        if most > idle:
            # The request makes its batch longer. Other batches start later in the plan by at most as much.
            run = pools[-1].run[queue.program]
            look = min(look, watch.at - (run[size] - run[size - 1]) if 1 < size < len(run) else now)
    if not idle and gpulets.ahead:
        way_ms = gpulets.way_ms(min(size, queue.costs.longest))
        look = max(look, min([gpulets.open_at(pool, now)[0] for pool in pools]) - way_ms)
    return look
