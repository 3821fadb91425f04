"""When a batch leaves a gpu-let free for models that cannot wait until the batch has ended.

A request can wait for its model's *patience*: the SLO less the latency of a request alone. When the patience is shorter
than the batches of other models on the same gpu-lets, each request that comes while all gpu-lets run such batches is
lost. So before a batch takes an idle gpu-let, two figures are compared. Both are over the time until the batch or
another gpu-let ends, whichever is sooner:

* the requests that the batch serves. When there are too few gpu-lets for all waiting batches, only the part of the
  batch counts that falls into this time, as the rest could be served later too. Otherwise the whole batch counts.
* the requests that impatient models would lose in addition with one gpu-let less. When a model lost no request lately,
  it counts as losing none.

When the second figure is higher, the batch waits until the next gpu-let is about to end. A program whose gpu-lets are
all idle never waits, because otherwise a program with one gpu-let would never run.

The loss on c gpu-lets follows the queue M/M/c whose customers leave after a fixed waiting time (Barrer, Operations
Research 5, 1957). With batches and fixed service times less is lost. The rule compares c gpu-lets with c - 1, so most
of that error cancels. No number here is fitted.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import exp, expm1

from tenuto.batching.core.deferred.waiting import WaitingPool, WaitingQueue
from tenuto.batching.core.gpulets import Gpulets
from tenuto.batching.core.system import INF


def kept_until(
    queue: WaitingQueue,
    pool: WaitingPool,
    losing: Iterable[WaitingQueue],
    gpulets: Gpulets[WaitingPool],
    now: float,
    *,
    is_tight: bool,
) -> float:
    """Return until when the batch of a queue must leave an idle gpu-let of the pool to others; `now` if it may start.

    Args:
        queue: the queue, whose batch is cut.
        pool: the pool on which the batch would run.
        losing: the queues that lost requests lately.
        gpulets: all gpu-lets, and when they end.
        now: the present time in ms.
        is_tight: there are too few gpu-lets for all waiting batches.
    """
    batch = queue.batch
    run_ms = batch.factor * pool.run[queue.program][batch.size]
    impatient = [
        (other.costs.patience_ms, other.program, other)
        for other in losing
        if other is not queue and other.program in pool.run and 0.0 <= other.costs.patience_ms < run_ms
    ]
    way_ms = gpulets.way_ms(1)
    arrives = now + way_ms
    if not impatient or all(gpulets.free_by(place, arrives)[1] == INF for place in queue.pools):
        return now
    impatient.sort()
    ends_ms, again = run_ms, INF
    load = per_ms = 0.0
    costs: list[tuple[float, float]] = []  # (patience, additional loss per ms after it)
    for patience, _, other in impatient:
        rate = (other.rate.rps or 0.0) / 1000.0
        if not rate:
            continue
        # The most impatient model goes first and has all gpu-lets; the next has what the first leaves.
        load += rate * other.costs.run[1]
        per_ms += rate
        free_by_pool = [gpulets.free_by(place, arrives + patience) for place in other.pools]
        free = sum([count for count, _ in free_by_pool])
        soonest = min([end for _, end in free_by_pool])
        if soonest - arrives > patience:
            additional = refused(load, per_ms, free - 1, patience) - refused(load, per_ms, free, patience)
            costs.append((patience, other.worth * rate * additional))
            ends_ms = min(ends_ms, soonest - arrives)
            again = min(again, soonest - patience - way_ms)
    lost = sum([worth * (ends_ms - patience) for patience, worth in costs if patience < ends_ms], 0.0)
    served = queue.worth * batch.size * (ends_ms / run_ms if is_tight else 1.0)
    return now if lost <= served else again


def refused(load: float, per_ms: float, gpulets: int, patience_ms: float) -> float:
    """Return the part of requests that find no gpu-let within their patience: M/M/c with impatient customers.

    With Erlang's B for c gpu-lets, a = load, r = a / c and g = exp(-(c / a - 1) * per_ms * patience):

        refused = g / (1 / B - 1 + (1 - g) / (1 - r) + g)

    When the patience is 0, g is 1 and the result is B.

    Args:
        load: how many gpu-lets the requests would keep busy if each ran alone (Erlang).
        per_ms: requests per ms.
        gpulets: c; with 0 or fewer all requests are refused.
        patience_ms: how long a request waits.
    """
    if gpulets <= 0:
        return 1.0
    by_blocked = 1.0  # 1 / B; infinite with very many gpu-lets
    for count in range(1, gpulets + 1):
        by_blocked = 1.0 + count / load * by_blocked
    spare = 1.0 - load / gpulets
    # Under overload g grows without bound, but from e**100 on the result no longer changes.
    exponent = min(100.0, -spare * gpulets / load * per_ms * patience_ms)
    left = exp(exponent)
    waits = -expm1(exponent) / spare if spare else per_ms * patience_ms
    return left / (by_blocked - 1.0 + waits + left)
