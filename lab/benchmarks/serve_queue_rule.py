"""Ray Serve's own autoscaling in virtual time, as a rival of the controller: every model a deployment of its own, each
replica on a GPU of its own, scaled by the number of ongoing requests.

The rule is that of Ray Serve 2.60 with its defaults: every 10 s the ongoing requests, averaged over 30 s, are divided
by `target_ongoing_requests`. When the result was higher than the replicas for 30 s, more are started; when it was lower
for 600 s, some end. The other settings are those of a careful user: the largest batch of which two fit into the SLO, a
target of one batch per replica, and requests that wait for a batch for at most the rest of half the SLO. This flatters
Serve: a model has one queue (no router that errs), and nothing between client and replica takes time.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

__all__ = ["Served", "serve_by_queue"]

TICK_S, LOOK_BACK, UPSCALE_S, DOWNSCALE_S = 10.0, 3, 30.0, 600.0


@dataclass
class Served:
    """What became of one model: requests, those not in time, GPU-seconds, and changes of its number of replicas."""

    requests: int = 0
    late: int = 0
    gpu_s: float = 0.0
    changes: int = 0


def serve_by_queue(
    times_ms: list[float],
    latency_ms: Callable[[int], float],
    slo_ms: float,
    duration_s: float,
    *,
    replicas: int,
    start_s: float,
    most: int,
) -> Served:
    """Serve one model's arrivals.

    Args:
        times_ms: of the arrivals, ascending.
        latency_ms: of a batch of so many.
        slo_ms: time allowed.
        duration_s: of the run.
        replicas: at the beginning, ready.
        start_s: what a new replica takes, its GPU counted from when it is asked for.
        most: replicas at most.
    """
    batch = max([1, *(size for size in range(1, 65) if 2.0 * latency_ms(size) <= slo_ms)])
    lengths = [0.0, *(latency_ms(size) for size in range(1, batch + 1))]
    wait_ms = max(0.0, slo_ms / 2.0 - lengths[batch])
    free = [0.0] * replicas  # when each replica is free
    running: list[tuple[float, int]] = []  # (end, size) of batches
    samples: deque[int] = deque(maxlen=LOOK_BACK)
    found = Served(len(times_ms))
    above_s = below_s = None
    now, tick = 0, TICK_S * 1000.0
    while now < len(times_ms) or tick <= 1000.0 * duration_s:
        go = math.inf
        if now < len(times_ms):
            full = times_ms[now + batch - 1] if now + batch <= len(times_ms) else math.inf
            go = max(free[0], min(full, times_ms[now] + wait_ms))
        if tick <= go:
            while running and running[0][0] <= tick:
                heappop(running)
            samples.append(bisect_right(times_ms, tick, now) - now + sum(size for _, size in running))
            wanted = min(most, max(1, math.ceil(sum(samples) / len(samples) / batch)))
            count = len(free)
            above_s = (above_s or tick) if wanted > count else None
            below_s = (below_s or tick) if wanted < count else None
            if above_s is not None and tick - above_s >= 1000.0 * UPSCALE_S:
                for _ in range(wanted - count):
                    heappush(free, tick + 1000.0 * start_s)
                found.changes, above_s = found.changes + 1, None
            elif below_s is not None and tick - below_s >= 1000.0 * DOWNSCALE_S:
                free = sorted(free)[:wanted]
                heapify(free)
                found.changes, below_s = found.changes + 1, None
            found.gpu_s += len(free) * TICK_S
            tick += TICK_S * 1000.0
            continue
        heappop(free)
        size = min(batch, max(1, bisect_right(times_ms, go, now) - now))
        end = go + lengths[size]
        found.late += bisect_left(times_ms, end - slo_ms - 1e-6, now, now + size) - now
        heappush(free, end)
        heappush(running, (end, size))
        now += size
    return found
