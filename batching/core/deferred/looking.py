"""When a request that came makes it necessary to look at its queue. It decides nothing: looking costs time, and is put
off until something may have come due. Looking more often would change no decision."""

from __future__ import annotations

from tenuto.batching.core.deferred.due import Holding
from tenuto.batching.core.deferred.waiting import Place, WaitingQueue
from tenuto.batching.core.gpulets import Gpulets
from tenuto.batching.core.system import INF


def look_at(queue: WaitingQueue, gpulets: Gpulets[Place], holding: Holding, now: float) -> float:
    """Return when to look at a queue with one request more; INF where an event that is looked at anyway comes first."""
    pools, watch, size = queue.pools, queue.watch, len(queue.ids)
    found = pools[0]  # with an idle gpu-let
    idle, most = len(found.idle), len(found.waiting)
    if found.is_enclosed:
        if not idle and not gpulets.ahead:
            return INF
    elif len(pools) > 1:
        idle = sum([len(pool.idle) for pool in pools])
        most = max([len(pool.waiting) for pool in pools])
        found = next((pool for pool in pools if pool.idle), found)
    if watch.is_tight and size >= queue.costs.ripe:
        look = now
    else:
        look = holding.due_ms(queue, found.run[queue.program], size, now)
        if most > idle:
            # The request makes its batch longer, and so at most by that much others start later in the plan.
            run = pools[-1].run[queue.program]
            look = min(look, watch.at - (run[size] - run[size - 1]) if 1 < size < len(run) else now)
    if not idle and gpulets.ahead:
        way_ms = gpulets.way_ms(min(size, queue.costs.longest))
        look = max(look, min([gpulets.open_at(pool, now)[0] for pool in pools]) - way_ms)
    return look
