"""Whom a batch would block: gpu-lets are kept free for models that cannot wait for the batches of their neighbours.

A request can wait for its model's *patience*: the SLO less the time of a request alone. Where that is shorter than the
batches of its neighbours, every request is lost that comes while all gpu-lets run such batches. So before a batch takes
an idle gpu-let, two figures are compared over the time until the next gpu-let ends, or the batch itself:

* what the batch serves. When gpu-lets are too few for all that waits, that is its part of this time: the rest of the
  batch would be served later as well. Else it is the whole batch.
* what impatient models would lose more with one gpu-let less. A model that lost no request lately loses nothing.

When the second is more, the batch waits until the next gpu-let is about to end. A program whose gpu-lets all idle is
never kept waiting: of one gpu-let nothing can be set aside.

How much is lost on c gpu-lets is known of the queue M/M/c whose customers leave after a fixed time of waiting (Barrer,
Operations Research 5, 1957). Batching and fixed service times lose less; as the rule compares c gpu-lets with c - 1,
most of that cancels. No number here is fitted.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import exp, expm1

from tenuto.batching.core.deferred.waiting import Place, WaitingQueue
from tenuto.batching.core.gpulets import Gpulets
from tenuto.batching.core.system import INF


def kept_until(
    queue: WaitingQueue,
    pool: Place,
    losing: Iterable[WaitingQueue],
    gpulets: Gpulets[Place],
    now: float,
    *,
    is_tight: bool,
) -> float:
    """Return until when the batch of a queue leaves an idle gpu-let of the pool to others; `now` where it may go.

    Args:
        queue: the batch is cut.
        pool: where it would run.
        losing: the queues that lost requests lately.
        gpulets: when they end.
        now: ms.
        is_tight: gpu-lets are too few for all batches that wait.
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
    costs: list[tuple[float, float]] = []  # patience, and what is lost more per ms beyond it
    for patience, _, other in impatient:
        rate = (other.rate.rps or 0.0) / 1000.0
        if not rate:
            continue
        # The most impatient goes first, so that it has all gpu-lets to itself, and the next what is left.
        load += rate * other.costs.run[1]
        per_ms += rate
        found = [gpulets.free_by(place, arrives + patience) for place in other.pools]
        free = sum([count for count, _ in found])
        soonest = min([end for _, end in found])
        if soonest - arrives > patience:
            more = refused(load, per_ms, free - 1, patience) - refused(load, per_ms, free, patience)
            costs.append((patience, other.worth * rate * more))
            ends_ms = min(ends_ms, soonest - arrives)
            again = min(again, soonest - patience - way_ms)
    lost = sum([worth * (ends_ms - patience) for patience, worth in costs if patience < ends_ms])
    served = queue.worth * batch.size * (ends_ms / run_ms if is_tight else 1.0)
    return now if lost <= served else again


def refused(load: float, per_ms: float, gpulets: int, patience_ms: float) -> float:
    """Return the part of requests that find no gpu-let within their patience: M/M/c with impatient customers.

    With Erlang's B for c gpu-lets, a = load, r = a / c and g = exp(-(c / a - 1) * per_ms * patience):

        refused = g / (1 / B - 1 + (1 - g) / (1 - r) + g)

    With no patience g is 1, and this is B.

    Args:
        load: the gpu-lets that requests keep busy one by one (Erlang).
        per_ms: requests per ms.
        gpulets: c; none refuse everything.
        patience_ms: how long a request waits.
    """
    if gpulets <= 0:
        return 1.0
    by_blocked = 1.0  # 1 / B; infinite where gpu-lets are very many
    for count in range(1, gpulets + 1):
        by_blocked = 1.0 + count / load * by_blocked
    spare = 1.0 - load / gpulets
    # Under overload g grows; the result is the same to the last digit long before e**100.
    exponent = min(100.0, -spare * gpulets / load * per_ms * patience_ms)
    left = exp(exponent)
    waits = -expm1(exponent) / spare if spare else per_ms * patience_ms
    return left / (by_blocked - 1.0 + waits + left)
