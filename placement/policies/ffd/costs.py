"""What one model costs first-fit decreasing on one GPU type: eligible batches, busy fractions, needed shares."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from tenuto.placement.workload import ModelSpec
from tenuto.profiles import LatencyTable, LinearLatency, ModelProfile

__all__ = ["Batch", "ModelCost"]

SLACK = 1e-9


@dataclass(frozen=True)
class Batch:
    """A batch size with its latency in ms and the memory of a replica that runs it (0 where unknown)."""

    size: int
    latency_ms: float
    memory_mib: float

    @property
    def capacity_rps(self) -> float:
        """Requests per second when full batches follow each other without a gap."""
        return 1000.0 * self.size / self.latency_ms


class ModelCost:
    """One model on one GPU type. `in_space`: its gpu-lets get a share; otherwise it takes turns on the whole GPU."""

    def __init__(self, spec: ModelSpec, model: ModelProfile, fill: float, sharing: str, max_batch: int) -> None:
        self.spec, self.model, self.fill, self.max_batch = spec, model, fill, max_batch
        parts = tuple(share for share in model.shares() if share < 100.0)
        self.assumes_proportional = sharing == "space" and not parts
        self.in_space = sharing == "space" or (sharing == "auto" and bool(parts))
        if self.assumes_proportional:
            self._shares = tuple(float(share) for share in range(5, 101, 5))
        else:
            self._shares = model.shares() if self.in_space else (100.0,)
        self._frontiers: dict[float, tuple[Batch, ...]] = {}

    @property
    def whole_gpu_unknown(self) -> bool:
        """True when turns are asked for but the whole GPU was never measured."""
        return not self.in_space and 100.0 not in self.model.shares()

    @cached_property
    def frontier(self) -> tuple[Batch, ...]:
        """Eligible batches on the largest share, each more efficient than the ones before."""
        return () if self.whole_gpu_unknown else self._frontier(self._shares[-1])

    @cached_property
    def best_rps(self) -> float:
        """The rate one replica on the largest share is planned for at most; 0 when no batch is eligible."""
        return max((batch.capacity_rps for batch in self.frontier if self.in_time(batch)), default=0.0) * self.fill

    @cached_property
    def smallest_memory_mib(self) -> float:
        """Memory of a replica with the smallest eligible batch, in MiB."""
        return min((batch.memory_mib for batch in self.frontier), default=0.0)

    @property
    def why_not(self) -> str:
        """Why no batch is eligible at all."""
        if self.whole_gpu_unknown:
            return "measured on shares of the GPU only, but taking turns needs the whole GPU's latency"
        latency = self.latency(self._shares[-1]).at(1)
        return f"a batch of one takes {latency:.4g} ms, more than half of the SLO of {self.spec.slo_ms:g} ms"

    def latency(self, share_pct: float) -> LatencyTable | LinearLatency:
        """Return l(b) on a share, by the proportional assumption where that is in force."""
        if self.assumes_proportional:
            return self.model.latency(100.0).scaled(100.0 / share_pct)
        return self.model.latency(share_pct)

    def assumed_latency(self, share_pct: float | None) -> LatencyTable | LinearLatency | None:
        """Return l(b) where it is assumed instead of looked up, for the plan's record."""
        if not self.assumes_proportional or share_pct is None:
            return None
        return self.latency(share_pct)

    def _frontier(self, share_pct: float) -> tuple[Batch, ...]:
        if share_pct in self._frontiers:
            return self._frontiers[share_pct]
        latency = self.latency(share_pct)
        largest = min(self.max_batch, latency.largest_batch(self.spec.slo_ms / 2 * (1 + SLACK)))
        found: list[Batch] = []
        for size in range(1, largest + 1):
            ms = latency.at(size)
            memory = self.model.memory_mib(size) or 0.0
            while found and ms <= found[-1].latency_ms:
                found.pop()  # a larger batch in no more time
            if not found or ms / size < found[-1].latency_ms / found[-1].size:
                found.append(Batch(size, ms, memory))
        self._frontiers[share_pct] = tuple(found)
        return self._frontiers[share_pct]

    def after(self, batch: Batch) -> Batch | None:
        """Return the next more efficient batch on the whole GPU, or None."""
        return next((larger for larger in self.frontier if larger.size > batch.size), None)

    def filled(self, batch: Batch) -> int:
        """Return how many requests a batch collects at most when its first one must still be answered in time.

        All replicas of a model share one queue, so the model's whole rate fills a batch; head-room counts as load here,
        because a batch is needed at its planned size just when the load is at its peak.
        """
        spare_ms = self.spec.slo_ms - batch.latency_ms
        return min(batch.size, 1 + int(self.spec.rate_rps / self.fill * spare_ms / 1000.0 + SLACK))

    def busy(self, batch: Batch, rate_rps: float) -> float:
        """Return the fraction of time spent on `rate_rps` with batches as full as they get."""
        return rate_rps * batch.latency_ms / 1000.0 / self.filled(batch)

    def in_time(self, batch: Batch, wait_ms: float = 0.0) -> bool:
        """Say whether a batch fills, waits for a running batch of `wait_ms` and executes within the SLO.

        The smallest measured batch need not fill: fewer requests take no longer.
        """
        fills = batch.size == self.frontier[0].size or self.filled(batch) == batch.size
        return fills and batch.latency_ms + wait_ms <= self.spec.slo_ms * (1 + SLACK)

    def smallest_share(self, rate_rps: float, free_pct: float, free_mib: float) -> tuple[float, Batch] | None:
        """Return the smallest share up to `free_pct` that carries a rate, with its smallest such batch."""
        for share in self._shares:
            if share > free_pct + SLACK:
                return None
            for batch in self._frontier(share):
                carries = self.busy(batch, rate_rps) <= self.fill * (1 + SLACK)
                if carries and self.in_time(batch) and batch.memory_mib <= free_mib:
                    return share, batch
        return None

    def need(self, rate_rps: float) -> float:
        """Return the GPUs needed for a rate: a share or busy fraction as 0..1, more where it must be split."""
        if rate_rps > self.best_rps:
            return rate_rps / self.best_rps * (self._shares[-1] / 100.0)
        if self.in_space:
            choice = self.smallest_share(rate_rps, 100.0, float("inf"))
            return choice[0] / 100.0 if choice else 1.0
        busy = [self.busy(batch, rate_rps) for batch in self.frontier if self.in_time(batch)]
        return min(busy, default=1.0) / self.fill
