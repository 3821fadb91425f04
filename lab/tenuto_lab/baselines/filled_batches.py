"""What one model costs first-fit decreasing on one GPU type: eligible batches, busy fractions, needed shares."""

from __future__ import annotations

from dataclasses import dataclass

from tenuto.placement.costs import SLACK, ModelOnGpu, Steps
from tenuto.profiles import Latency
from tenuto.profiles.share_latency import WHOLE_GPU_PCT


@dataclass(frozen=True, slots=True)
class FilledBatch:
    """A batch size with its latency in ms, the memory of a replica that runs it (0: unknown), the part `static_mib` of
    that memory which it also holds while others run, and the fraction of time that it keeps busy per request per
    second when it is as full as it gets."""

    size: int
    latency_ms: float
    memory_mib: float
    static_mib: float
    busy_s: float

    @property
    def working_mib(self) -> float:
        """The memory that only a running batch needs."""
        return self.memory_mib - self.static_mib

    @property
    def capacity_rps(self) -> float:
        """Requests per second when full batches follow each other without a gap."""
        return 1000.0 * self.size / self.latency_ms


class FfdCost:
    """One model on one GPU type. `in_space`: its gpu-lets get a share; otherwise it takes turns on the whole GPU."""

    def __init__(self, on: ModelOnGpu, fill: float, sharing: str, max_batch: int, context_mib: float) -> None:
        self.on, self.spec, self.fill, self.max_batch = on, on.spec, fill, max_batch
        self.context_mib = context_mib
        measured = on.profile.shares()
        parts = tuple(share for share in measured if share < WHOLE_GPU_PCT)
        self.assumes_proportional = sharing == "space" and not parts
        self.in_space = sharing == "space" or (sharing == "auto" and bool(parts))
        if self.assumes_proportional:
            self._shares = tuple(float(share) for share in range(5, 101, 5))
        else:
            self._shares = measured if self.in_space else (WHOLE_GPU_PCT,)
        self.whole_gpu_unknown = not self.in_space and WHOLE_GPU_PCT not in measured
        self._frontiers: dict[float, tuple[FilledBatch, ...]] = {}
        self.frontier = () if self.whole_gpu_unknown else self._frontier(self._shares[-1])
        able = [batch for batch in self.frontier if self.in_time(batch)]
        self.best_rps = max((batch.capacity_rps for batch in able), default=0.0) * fill
        self.least_busy_s = min((batch.busy_s for batch in able), default=float("inf"))
        self.smallest_memory_mib = min((batch.memory_mib for batch in self.frontier), default=0.0)

    @property
    def why_not(self) -> str:
        """Why no batch is eligible at all."""
        if self.whole_gpu_unknown:
            return "measured on shares of the GPU only, but taking turns needs the whole GPU's latency"
        latency_ms = self._steps(self._shares[-1])[1]
        return (
            f"SLO below batch 1: two single requests in a row take {2 * latency_ms:.4g} of {self.spec.slo_ms:g} ms "
            f"on a {self.on.gpu.type}"
        )

    def assumed_latency(self, share_pct: float | None) -> Latency | None:
        """Return l(b) where it is assumed instead of looked up; None elsewhere."""
        if not self.assumes_proportional or share_pct is None:
            return None
        return self.on.latency().scaled(WHOLE_GPU_PCT / share_pct)

    def _steps(self, share_pct: float) -> Steps:
        if self.assumes_proportional:
            return tuple(ms * WHOLE_GPU_PCT / share_pct for ms in self.on.steps(WHOLE_GPU_PCT, self.max_batch))
        return self.on.steps(share_pct, self.max_batch)

    def _frontier(self, share_pct: float) -> tuple[FilledBatch, ...]:
        """Return the eligible batches on a share, each more efficient than the ones before; l(b) <= SLO/2."""
        if share_pct in self._frontiers:
            return self._frontiers[share_pct]
        found: list[FilledBatch] = []
        for size, ms in enumerate(self._steps(share_pct)):
            if ms > self.spec.slo_ms / 2 * (1 + SLACK):
                break
            if size:
                while found and ms <= found[-1].latency_ms:
                    found.pop()  # a larger batch in no more time
                if not found or ms / size < found[-1].latency_ms / found[-1].size:
                    busy_s = ms / 1000.0 / self._filled(size, ms)
                    memory, weights = self.on.needs_mib(size)
                    static = memory if weights is None else min(weights, memory)
                    found.append(FilledBatch(size, ms, memory, static, busy_s))
        self._frontiers[share_pct] = tuple(found)
        return self._frontiers[share_pct]

    def _filled(self, size: int, latency_ms: float) -> int:
        """Return how many requests a batch collects at most when its first one must still be answered in time.

        All replicas of a model share one queue, so the model's whole rate fills a batch. Head-room counts as load here,
        because batches of the planned size are needed when the load is at its peak.
        """
        spare_ms = self.spec.slo_ms - latency_ms
        return min(size, 1 + int(self.spec.rate_rps / self.fill * spare_ms / 1000.0 + SLACK))

    def in_time(self, batch: FilledBatch, wait_ms: float = 0.0) -> bool:
        """Say whether a batch fills, waits for a running batch of `wait_ms` and executes within the SLO.

        The smallest measured batch need not fill: fewer requests take no longer.
        """
        fills = batch.size == self.frontier[0].size or self._filled(batch.size, batch.latency_ms) == batch.size
        return fills and batch.latency_ms + wait_ms <= self.spec.slo_ms * (1 + SLACK)

    def smallest_share(self, rate_rps: float, free_pct: float, free_mib: float) -> tuple[float, FilledBatch] | None:
        """Return the smallest share up to `free_pct` that carries a rate, with its smallest such batch."""
        for share in self._shares:
            if share > free_pct + SLACK:
                return None
            for batch in self._frontier(share):
                carries = batch.busy_s * rate_rps <= self.fill * (1 + SLACK)
                if carries and self.in_time(batch) and batch.memory_mib <= free_mib:
                    return share, batch
        return None

    def need(self, rate_rps: float) -> float:
        """Return the GPUs needed for a rate: a share or busy fraction from 0 to 1; more when it must be split."""
        if rate_rps > self.best_rps:
            return rate_rps / self.best_rps * (self._shares[-1] / 100.0)
        if self.in_space:
            choice = self.smallest_share(rate_rps, 100.0, float("inf"))
            return choice[0] / 100.0 if choice else 1.0
        return min(1.0, self.least_busy_s * rate_rps) / self.fill
