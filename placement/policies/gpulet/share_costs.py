"""What one model can do on each share of a GPU type: the tables that gpulet, SBP and the ideal placement plan with."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from tenuto.placement.cluster import Cluster
from tenuto.placement.costs import ModelOnGpu, Steps, context_mib_of, costs_of
from tenuto.placement.program import Replica
from tenuto.placement.workload import ModelSpec, Workload
from tenuto.profiles import ModelProfile, Profiles
from tenuto.profiles.share_latency import WHOLE_GPU_PCT, ShareRule


@dataclass(frozen=True, eq=False)
class ShareCosts:
    """One model on one GPU type.

    `latency_ms` has, for each usable share, l(b) in ms by batch size (index 0 unused). Batches with 2 l(b) > SLO are
    left out: a request that just misses a batch waits for a whole one (Nexus, SOSP 2019, section 4.1). A share without
    any batch is absent. A share of the compute comes with the same share of the memory, less the context of the
    process.
    """

    on: ModelOnGpu
    latency_ms: dict[float, Steps] = field(default_factory=dict)
    context_mib: float = 0.0
    _capacity_rps: dict[float, float] = field(default_factory=dict)

    @property
    def spec(self) -> ModelSpec:
        """The workload's entry."""
        return self.on.spec

    @property
    def model(self) -> ModelProfile:
        """The profile row."""
        return self.on.profile

    @property
    def slo_ms(self) -> float:
        """The SLO in ms."""
        return self.on.slo_ms

    def capacity_rps(self, share_pct: float) -> float:
        """Return the highest rate the share carries within the SLO when it runs nothing else; 0 where it cannot."""
        if share_pct not in self._capacity_rps:  # asked for every gpu-let where a model might take a turn
            table = self.latency_ms.get(share_pct, ())
            fitting = (1000.0 * b / ms for b, ms in enumerate(table) if b and 2 * ms <= self.slo_ms)
            self._capacity_rps[share_pct] = max(fitting, default=0.0)
        return self._capacity_rps[share_pct]

    def value(self, rate_rps: float, price: float) -> float:
        """Return the part of a rate that its best share carries, per price of a GPU."""
        return min(rate_rps, max(self.capacity_rps(share) for share in self.latency_ms)) / max(price, 1e-9)

    def room_mib(self, share_pct: float) -> float:
        """Return the memory for replicas that comes with a share."""
        return self.on.gpu.memory_mib * share_pct / WHOLE_GPU_PCT - self.context_mib

    def memory_mib(self, batch_size: int) -> float:
        """Return the memory of a replica in MiB, 0 when not measured."""
        return self.on.memory_mib(batch_size) or 0.0


@dataclass(frozen=True)
class Turn:
    """A model's turn in a gpu-let: its batch per duty cycle, and the rate sent there."""

    costs: ShareCosts
    batch_size: int
    rate_rps: float
    slowdown: float = 1.0

    def replica(self, share_pct: float) -> Replica:
        """Return the replica for the plan."""
        latency_ms = self.costs.latency_ms[share_pct][self.batch_size] * self.slowdown
        return Replica.believed(self.costs.spec.name, self.batch_size, self.rate_rps, latency_ms)


CostsByType = Mapping[str, Mapping[str, ShareCosts]]
"""Costs by model and GPU type; a model that can run on no share of any type has none."""


def share_costs(
    workload: Workload, cluster: Cluster, profiles: Profiles, shares_pct: Iterable[float], max_batch: int
) -> tuple[CostsByType, dict[str, str]]:
    """Return every model's costs on the shares that its profile covers, and the reasons of models that can run on none.

    A share was measured or lies between two measured ones; the whole GPU may also be extrapolated from smaller shares.
    """
    shares = tuple(shares_pct)
    views: dict[str, dict[str, ShareCosts]] = {}
    reasons = {}
    for name, by_type in costs_of(workload, cluster, profiles).items():
        own = {kind: _view(on, shares, max_batch, context_mib_of(kind, profiles)) for kind, on in by_type.items()}
        views[name] = {kind: view for kind, view in own.items() if view.latency_ms}
        if not views[name]:
            reasons[name] = _why_none(by_type, shares)
    return views, reasons


def _view(on: ModelOnGpu, shares: Iterable[float], max_batch: int, context_mib: float) -> ShareCosts:
    view = ShareCosts(on, {}, context_mib)
    for share in shares:
        allowed: tuple[ShareRule, ...] = ("measured", "continued") if share >= WHOLE_GPU_PCT else ("measured",)
        if on.knows(share, allowed):
            size = on.largest_batch(on.slo_ms / 2, share, max_batch)
            size = on.batches_in_memory(view.room_mib(share), size)
            if size:
                view.latency_ms[share] = on.steps(share, max_batch)[: size + 1]
    return view


def _why_none(by_type: Mapping[str, ModelOnGpu], shares: tuple[float, ...]) -> str:
    """Return the reason why a model runs on none of the shares, on the type that comes nearest."""
    known = [(on, share) for on in by_type.values() for share in shares if on.knows(share, ("measured", "continued"))]
    if not known:
        return f"its latency on a share of {' or '.join(f'{share:g}' for share in shares)} % was not measured"
    on, share = min(known, key=lambda pair: pair[0].steps(pair[1])[1])
    first_ms = on.steps(share)[1]
    if 2 * first_ms > on.slo_ms:
        return f"SLO below batch 1: two single requests in a row take {2 * first_ms:.4g} of {on.slo_ms:g} ms"
    part = on.gpu.memory_mib * share / WHOLE_GPU_PCT
    return f"memory: one request needs {on.memory_mib(1) or 0.0:.0f} MiB of the {part:.0f} MiB that come with a share"
