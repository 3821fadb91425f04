"""ParvaGPU's segment configurator: which instances, batches and numbers of processes carry a model's rate.

Lee et al., "ParvaGPU" (SC 2024), section III-D; the names are the paper's. A segment is a MIG instance with equal
processes of one model under CUDA MPS: the paper's triplet of instance size, batch size and number of processes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from tenuto.placement.policies.shared.mig_cutting import InstanceModel, InstanceWay

QUEUEING = 0.5  # paper: section III-D; half of the SLO is for waiting until a batch is full
SPARE = 0.9  # paper: its code's `slo_ltc/2 * 0.9`; what of that half a batch may take


@dataclass(frozen=True)
class Segment:
    """An instance of so many GPCs, and how the model runs in it."""

    model: str
    gpcs: int
    way: InstanceWay

    @property
    def throughput_rps(self) -> float:
        """The requests per second of all its processes."""
        return self.way.rate_rps


@dataclass(frozen=True)
class Service:
    """A model with its best segment of every instance size that keeps its SLO, by GPCs."""

    rate_rps: float
    best: Mapping[int, Segment]

    @classmethod
    def of(cls, model: InstanceModel, sizes: Mapping[int, str], most_processes: int) -> Service:
        """Return the service of a model: of each size the segment with most throughput that keeps the SLO.

        Args:
            model: with its ways in instances.
            sizes: the MIG profile by GPCs.
            most_processes: in one instance.
        """
        most_ms, best = SPARE * QUEUEING * model.spec.slo_ms, {}
        for gpcs, size in sizes.items():
            ways = model.ways.get(size, ())
            able = [way for way in ways if way.processes <= most_processes and way.latency_ms < most_ms]
            if able:
                best[gpcs] = Segment(model.spec.name, gpcs, max(able, key=lambda way: way.rate_rps))
        return cls(model.spec.rate_rps, best)

    def segments(self) -> list[Segment]:
        """Return the segments that carry the rate: as many optimal ones as it fills, and the smallest that carries what
        is left; where none does, one optimal one more. Optimal is the one with most throughput for its GPCs."""
        optimal = max(self.best.values(), key=lambda segment: (segment.throughput_rps / segment.gpcs, -segment.gpcs))
        count = math.ceil(self.rate_rps / optimal.throughput_rps - 1e-9) - 1
        left_rps = self.rate_rps - count * optimal.throughput_rps
        able = (self.best[gpcs] for gpcs in sorted(self.best) if self.best[gpcs].throughput_rps >= left_rps)
        return [optimal] * count + [next(able, optimal)]

    def small_segments(self, rate_rps: float) -> list[Segment]:
        """Return the segments of 1 and 2 GPCs that carry a rate; none where the model has none of these sizes."""
        one, two = self.best.get(1), self.best.get(2)
        if one is None or two is None:
            only = one or two
            return [] if only is None else [only] * max(0, math.ceil(rate_rps / only.throughput_rps - 1e-9))
        twos = math.floor(rate_rps / two.throughput_rps + 1e-9) if two.throughput_rps / 2 > one.throughput_rps else 0
        left_rps = rate_rps - twos * two.throughput_rps
        return [two] * max(0, twos) + [one] * max(0, math.ceil(left_rps / one.throughput_rps - 1e-9))
