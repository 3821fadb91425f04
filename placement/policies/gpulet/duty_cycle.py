"""The duty cycle of a gpu-let: exactly whether models can take turns on it, and with which batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

ROUNDING = 1e-9  # derived: relative rounding error


@dataclass(frozen=True)
class Asked:
    """A model's demand on a gpu-let: rate, SLO, and l(b) there in ms by batch size (index 0 unused)."""

    rate_rps: float
    slo_ms: float
    latency_ms: Sequence[float]


@dataclass(frozen=True)
class Cycle:
    """Every `duty_ms` each model runs one batch of its size; together these take `busy_ms`."""

    duty_ms: float
    busy_ms: float
    batch_sizes: tuple[int, ...]


def find_cycle(tenants: Sequence[Asked]) -> Cycle | None:
    """Return the duty cycle with the least busy fraction in which all models keep rate and SLO, or None.

    With duty cycle d a model needs batches of ceil(d * rate). All batches together must fit into d. Each model needs d
    + l(b) <= SLO, because a request waits at most one cycle (Nexus, SOSP 2019, section 6.1). Batches change only where
    d * rate is whole, so one look between any two such points is exhaustive.
    """
    limit = min((a.slo_ms - a.latency_ms[1] for a in tenants), default=0.0)
    edges = {limit}
    for one in tenants:
        step = 1000.0 / one.rate_rps
        for size in range(1, len(one.latency_ms)):
            if size * step >= limit:
                break
            edges.add(size * step)
    ends = np.array(sorted(edges))
    able = np.ones(len(ends), dtype=bool)
    busy, latest = np.zeros(len(ends)), ends.copy()
    sizes = []
    for one in tenants:
        own = np.maximum(1, np.ceil(ends * one.rate_rps / 1000.0 - ROUNDING).astype(np.int64))
        able &= own < len(one.latency_ms)
        took = np.asarray(one.latency_ms)[np.minimum(own, len(one.latency_ms) - 1)]
        busy += took
        np.minimum(latest, one.slo_ms - took, out=latest)
        sizes.append(own)
    starts = np.concatenate([[0.0], ends[:-1]])
    able &= np.maximum(starts, busy) <= latest * (1 + ROUNDING)
    best: Cycle | None = None
    for at in np.flatnonzero(able).tolist():
        if best is None or busy[at] / latest[at] < best.busy_ms / best.duty_ms - ROUNDING:
            best = Cycle(float(latest[at]), float(busy[at]), tuple(int(own[at]) for own in sizes))
    return best
