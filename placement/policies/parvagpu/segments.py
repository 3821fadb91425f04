"""ParvaGPU's segment configurator: which instances, batches and numbers of processes carry a model's rate.

Lee et al., "ParvaGPU" (SC 2024), section III-D; the names are the paper's. A segment is a MIG instance with equal
processes of one model under CUDA MPS.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from tenuto.placement.costs import ModelOnGpu
from tenuto.profiles.mig_instances import ALL_GPCS

QUEUEING = 0.5  # paper: section III-D; half of the SLO is for waiting until a batch is full
SPARE = 0.9  # paper: its code's `slo_ltc/2 * 0.9`; what of that half a batch may take


@dataclass(frozen=True)
class Triplet:
    """An instance size with a batch size and a number of processes, and what all of them carry together."""

    gpcs: int
    batch_size: int
    processes: int
    latency_ms: float
    throughput_rps: float

    @property
    def per_gpc_rps(self) -> float:
        return self.throughput_rps / self.gpcs


@dataclass(frozen=True)
class ModelToServe:
    """A model with its best triplet of every instance size that keeps its SLO, by GPCs."""

    name: str
    rate_rps: float
    best: Mapping[int, Triplet]

    @property
    def optimal(self) -> Triplet:
        """The triplet with the most requests per second for its GPCs."""
        return max(self.best.values(), key=lambda triplet: (triplet.per_gpc_rps, -triplet.gpcs))

    def segments(self) -> list[Triplet]:
        """Return the segments that carry the rate: as many optimal ones as it fills, and the smallest that carries what
        is left; where none does, one optimal one more."""
        optimal = self.optimal
        count = math.ceil(self.rate_rps / optimal.throughput_rps - 1e-9) - 1
        left_rps = self.rate_rps - count * optimal.throughput_rps
        able = (self.best[gpcs] for gpcs in sorted(self.best) if self.best[gpcs].throughput_rps >= left_rps)
        return [optimal] * count + [next(able, optimal)]


def triplets_of(on: ModelOnGpu, gpcs: int, most_processes: int, context_mib: float) -> Iterable[Triplet]:
    """Yield the triplets of an instance size that were measured and fit into its memory; `on` is such an instance."""
    for point in on.profile.points:
        for processes, ms in ({1: point.latency_ms} | point.processes_ms).items():
            if processes <= most_processes and on.has_room_for(processes, point.batch_size, context_mib):
                rate = 1000.0 * point.batch_size * processes / ms
                yield Triplet(gpcs, point.batch_size, processes, ms, rate)


def best_triplets(costs: Mapping[int, ModelOnGpu], most_processes: int, context_mib: float) -> dict[int, Triplet]:
    """Return, by GPCs, the triplet with most throughput that keeps the SLO; sizes without one are left out.

    Args:
        costs: of the model inside instances, by GPCs.
        most_processes: in one instance.
        context_mib: memory of a process's CUDA context.
    """
    found = {}
    for gpcs, on in costs.items():
        most_ms = SPARE * QUEUEING * on.slo_ms
        able = [t for t in triplets_of(on, gpcs, most_processes, context_mib) if t.latency_ms < most_ms]
        if able and gpcs <= ALL_GPCS:
            found[gpcs] = max(able, key=lambda triplet: triplet.throughput_rps)
    return found
