"""The duty cycle of a gpu-let: whether models can take turns on it, exactly, and with which batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Asked", "Cycle", "find_cycle"]

ROUNDING = 1e-9


@dataclass(frozen=True)
class Asked:
    """What a model asks of a gpu-let: rate, SLO and l(b) in ms there by batch size (index 0 unused)."""

    rate_rps: float
    slo_ms: float
    latency_ms: Sequence[float]


@dataclass(frozen=True)
class Cycle:
    """Every `duty_ms` each model runs one batch of its size; `busy_ms` is what these take together."""

    duty_ms: float
    busy_ms: float
    batch_sizes: tuple[int, ...]


def find_cycle(asked: Sequence[Asked]) -> Cycle | None:
    """Return the duty cycle with the least busy fraction in which all models keep rate and SLO, or None.

    With duty cycle d a model needs batches of ceil(d * rate), all batches together must fit into d, and each model
    needs d + l(b) <= SLO, because a request waits at most one cycle (Nexus, SOSP 2019, section 6.1). Batches change
    only where d * rate is whole, so one look at each stretch between two such points is exhaustive.
    """
    limit = min((a.slo_ms - a.latency_ms[1] for a in asked), default=0.0)
    edges = {limit}
    for one in asked:
        step = 1000.0 / one.rate_rps
        for size in range(1, len(one.latency_ms)):
            if size * step >= limit:
                break
            edges.add(size * step)
    best: Cycle | None = None
    start = 0.0
    for end in sorted(edges):
        sizes = tuple(max(1, -int(-(end * a.rate_rps / 1000.0 - ROUNDING) // 1)) for a in asked)
        if any(size >= len(a.latency_ms) for size, a in zip(sizes, asked, strict=True)):
            break
        latencies = [a.latency_ms[size] for size, a in zip(sizes, asked, strict=True)]
        busy = sum(latencies)
        latest = min([end, *(a.slo_ms - ms for a, ms in zip(asked, latencies, strict=True))])
        if max(start, busy) <= latest * (1 + ROUNDING) and (
            best is None or busy / latest < best.busy_ms / best.duty_ms - ROUNDING
        ):
            best = Cycle(latest, busy, sizes)
        start = end
    return best
