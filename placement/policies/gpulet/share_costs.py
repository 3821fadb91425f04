"""What one model costs on each share of a GPU type: the tables that gpulet, SBP and the ideal placement plan with."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from tenuto.errors import InvalidInputError
from tenuto.placement.cluster import Gpu
from tenuto.placement.workload import ModelSpec, profile_of
from tenuto.profiles import LatencyTable, LinearLatency, ModelProfile, Profiles

__all__ = ["CANNOT_RUN", "WHOLE_GPU", "ShareCosts", "largest_batch", "share_costs", "whole_gpu_points"]

WHOLE_GPU = 100.0
CANNOT_RUN = (
    "on {shares} of the GPU its latency is unknown, or two single requests in a row exceed the SLO, or one does not "
    "fit into that part of the memory"
)


@dataclass(frozen=True)
class ShareCosts:
    """One model on one GPU type.

    `latency_ms` has, for each share the model can use, l(b) in ms by batch size (index 0 unused). Batches with
    2 l(b) > SLO are left out: a request that just misses a batch waits for a whole one (Nexus, SOSP 2019, section 4.1),
    so a share on which not even a single request can run is absent.
    """

    spec: ModelSpec
    model: ModelProfile
    latency_ms: dict[float, tuple[float, ...]] = field(default_factory=dict)

    def capacity_rps(self, share_pct: float, slowdown: float = 1.0) -> float:
        """Return the highest rate the share carries within the SLO when it runs nothing else; 0 where it cannot."""
        table = self.latency_ms.get(share_pct, ())
        fitting = (1000.0 * b / (ms * slowdown) for b, ms in enumerate(table) if b and 2 * ms * slowdown <= self.slo_ms)
        return max(fitting, default=0.0)

    @property
    def slo_ms(self) -> float:
        return self.spec.slo_ms

    def memory_mib(self, batch_size: int, share_pct: float) -> float:
        """Return the memory of a replica in MiB, 0 where none was measured."""
        return self.model.memory_mib(batch_size, share_pct) or 0.0

    def curve(self, share_pct: float, batch_size: int) -> LatencyTable | LinearLatency:
        """Return l(b) up to a batch size, for the plan; a line stays a line."""
        if self.model.line is not None:
            return self.model.line
        table = self.latency_ms[share_pct]
        return LatencyTable(points={b: round(table[b], 6) for b in range(1, batch_size + 1)})


def share_costs(
    spec: ModelSpec, gpu: Gpu, profiles: Profiles, shares_pct: Iterable[float], max_batch: int
) -> ShareCosts:
    """Return a model's costs on those of the shares of a GPU for which the profile has an answer.

    A share of the compute comes with the same share of the memory, and batches that need more are left out.

    Raises:
        InvalidInputError: the profiles do not know the model on this GPU type.
    """
    model = profile_of(spec, gpu.type, profiles)
    tables: dict[float, tuple[float, ...]] = {}
    for share in shares_pct:
        try:
            latency = LatencyTable(points=whole_gpu_points(model)) if _extends(model, share) else model.latency(share)
        except InvalidInputError:
            continue  # not measured there, nor between two measured shares
        size = min(max_batch, largest_batch(latency, spec.slo_ms / 2))
        room = gpu.memory_mib * share / WHOLE_GPU
        while size and (model.memory_mib(size, share) or 0.0) > room:
            size -= 1
        if size:
            tables[share] = (0.0, *(latency.at(b) for b in range(1, size + 1)))
    return ShareCosts(spec, model, tables)


def largest_batch(latency: LatencyTable | LinearLatency, budget_ms: float) -> int:
    """Return the largest batch size within the budget, such that every smaller one is within it as well; or 0."""
    size = latency.largest_batch(budget_ms)
    return next((b - 1 for b in range(1, size + 1) if latency.at(b) > budget_ms), size)


def _extends(model: ModelProfile, share_pct: float) -> bool:
    return share_pct == WHOLE_GPU and model.line is None and model.shares()[-1] < WHOLE_GPU and len(model.shares()) > 1


def whole_gpu_points(model: ModelProfile) -> dict[int, float]:
    """Return l(b) on the whole GPU for a profile that was measured on smaller shares only.

    The line in 1/share through the two largest measured shares, which is how profiles interpolate (compute-bound work,
    iGniter eq. 11 with k4 = 0), is continued to 100 %. It is kept between two bounds that hold for any program: not
    slower than on the largest measured share, and not faster than in proportion to the compute gained.
    """
    below, above = model.shares()[-2:]
    weight = (1 / below - 1 / WHOLE_GPU) / (1 / below - 1 / above)
    points = {}
    for size in sorted(set(model.batch_sizes(below)) & set(model.batch_sizes(above))):
        low, high = model.latency_ms(size, below), model.latency_ms(size, above)
        points[size] = min(high, max(high * above / WHOLE_GPU, low * (1 - weight) + high * weight))
    return points
