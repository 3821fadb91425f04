"""Squishy bin packing: which models share a GPU, at which batch sizes and in which duty cycle (Nexus, SOSP 2019, §6.1).

It is "squishy" because a model takes less of a GPU when the duty cycle, and with it the batch, gets shorter. These are
pure functions of rates and latencies. All GPUs are alike and can hold any model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Demand:
    """What a model asks for: its key, its rate, its SLO, and l(b) in ms by batch size.

    Index 0 of `latency_ms` is unused; its last index is the largest batch size.
    """

    model: int
    rate_rps: float
    slo_ms: float
    latency_ms: Sequence[float]


@dataclass(frozen=True)
class Part:
    """A model on a GPU: the batch size that runs once per duty cycle, and the rate that is routed to the GPU."""

    model: int
    batch: int
    rate_rps: float


@dataclass
class Bin:
    """One GPU. In each duty cycle every part runs its batch once; `busy_ms` is the sum of their latencies."""

    duty_ms: float
    busy_ms: float
    parts: list[Part] = field(default_factory=list)
    demands: list[Demand] = field(default_factory=list)

    @property
    def occupancy(self) -> float:
        """The share of the duty cycle that is used."""
        return self.busy_ms / self.duty_ms


def full_batch(demand: Demand, slack_ms: float = 0.0) -> int:
    """Return the largest b with 2 l(b) <= SLO - slack, or 1.

    The factor is 2 because a request that just misses a batch waits for that whole batch first.
    """
    latency = demand.latency_ms
    largest = 1
    for size in range(2, len(latency)):
        if 2 * latency[size] <= demand.slo_ms - slack_ms:
            largest = size
    return largest


def pack(
    demands: Sequence[Demand],
    *,
    slack_ms: float = 0.0,
    fits: Callable[[Sequence[Part]], bool] | None = None,
    most: int | None = None,
) -> list[Bin]:
    """Return the GPUs needed to carry these rates.

    Each model first gets whole GPUs at its full batch. The rest of its rate gets a duty cycle d, the time in which its
    batch collects: d = b / rate, with the largest b that keeps (b - 1) / rate + l(b) <= SLO and d <= SLO - l(b). These
    remainders are then merged, the fullest first, each into the GPU that becomes fullest. Two that are merged have the
    shorter of both duty cycles and batches of ceil(d * rate).

    Args:
        demands: models with positive rates.
        slack_ms: time that is subtracted from the SLO when full batches are sized (2 ms in the published program).
        fits: whether a GPU has room for these parts together, for example in its memory; None: always.
        most: at most this many GPUs are returned, so that a rate far beyond a fixed cluster costs no time.
    """
    full: list[Bin] = []
    rest: list[Bin] = []
    for demand in demands:
        size = full_batch(demand, slack_ms)
        latency = demand.latency_ms[size]
        carries = 1000.0 * size / latency
        count = int(demand.rate_rps / carries + 1e-9)
        wanted = count if most is None else min(count, most - len(full))
        full += [Bin(latency, latency, [Part(demand.model, size, carries)], [demand]) for _ in range(wanted)]
        left = demand.rate_rps - count * carries
        if left > 1e-9 * demand.rate_rps:
            rest.append(_remainder(demand, left, size))
    rest.sort(key=lambda node: -node.occupancy)
    merged: list[Bin] = []
    for node in rest:
        best, place = None, -1
        for position, other in enumerate(merged):
            both = _merge(other, node)
            if both is None or (fits is not None and not fits(both.parts)):
                continue
            if best is None or both.occupancy > best.occupancy:
                best, place = both, position
        if best is None:
            merged.append(node)
        else:
            merged[place] = best
    return (full + merged)[:most]


def _remainder(demand: Demand, rate_rps: float, largest: int) -> Bin:
    latency, per_ms = demand.latency_ms, rate_rps / 1000.0
    size = 1
    for b in range(2, largest + 1):
        if (b - 1) / per_ms + latency[b] <= demand.slo_ms:
            size = b
    duty = max(latency[size], min(demand.slo_ms - latency[size], size / per_ms))
    return Bin(duty, latency[size], [Part(demand.model, size, rate_rps)], [demand])


def _merge(first: Bin, second: Bin) -> Bin | None:
    """Return both bins merged into one duty cycle, or None if they do not fit."""
    duty = min(first.duty_ms, second.duty_ms)
    parts: list[Part] = []
    busy = 0.0
    demands = first.demands + second.demands
    for part, demand in zip(first.parts + second.parts, demands, strict=True):
        exact = duty * part.rate_rps / 1000.0
        size = min(len(demand.latency_ms) - 1, max(1, -int(-(exact - 1e-9) // 1)))
        if size + 1e-6 < exact:
            return None
        busy += demand.latency_ms[size]
        if busy > duty or duty + demand.latency_ms[size] > demand.slo_ms + 1e-9:
            return None
        parts.append(Part(part.model, size, part.rate_rps))
    return Bin(duty, busy, parts, demands)
