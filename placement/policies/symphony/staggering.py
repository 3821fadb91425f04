"""How large a batch may be when n GPUs take turns on one model: the analytic bounds of Symphony, section 3.

Without coordination a request may just miss a batch and wait for a whole one: 2*l(b) <= SLO. When the n GPUs start
their batches evenly staggered, one becomes free every l(b)/n, so it waits only that long: (1 + 1/n)*l(b) <= SLO.
"""

from __future__ import annotations

from tenuto.placement.costs import ModelOnGpu
from tenuto.placement.policies.symphony.partition import PartitionModel


class StaggeredModel:
    """A model on GPUs of one type, all of which hold it.

    Its batch is the staggered one for as many GPUs; a single request when even that has no slack; and never larger than
    fits into a GPU's memory.
    """

    def __init__(self, on: ModelOnGpu, max_batch: int, context_mib: float) -> None:
        self.on, self.spec = on, on.spec
        largest = on.largest_batch(on.slo_ms, most=max_batch)
        self.largest = on.batches_in_memory(on.gpu.memory_mib - context_mib, largest)
        self._steps = on.steps(most=max_batch)

    @property
    def is_late(self) -> bool:
        """Whether not even a single request is in time on this type."""
        return self._steps[1] > self.on.slo_ms * (1 + 1e-9)

    @property
    def why_not(self) -> str:
        """Why this type cannot serve it; empty when it can."""
        if self.is_late:
            return (
                f"SLO below batch 1: one request takes {self._steps[1]:.4g} of {self.on.slo_ms:g} ms on a "
                f"{self.on.gpu.type}"
            )
        return "" if self.largest else f"memory: one replica does not fit into a {self.on.gpu.type}"

    def batch(self, gpus: float) -> int:
        """Return the staggered batch on that many GPUs."""
        return max(1, min(self.largest, self.on.largest_batch(self.on.slo_ms / (1 + 1 / gpus), most=self.largest)))

    def latency_ms(self, gpus: float) -> float:
        """Return what that batch takes."""
        return self._steps[self.batch(gpus)]

    def need(self, gpus: float) -> float:
        """Return how many GPUs this model's rate keeps busy in full batches."""
        size = self.batch(gpus)
        return self.spec.rate_rps * self._steps[size] / size / 1000.0

    def entry(self, gpus: float) -> PartitionModel:
        """Return the model for the partition: weights are static, a batch's working memory is dynamic. When weights are
        not known apart, everything is static."""
        memory, weights = self.on.needs_mib(self.batch(gpus))
        static = memory if weights is None else min(memory or weights, weights)
        return PartitionModel(self.spec.name, self.need(gpus), self.spec.rate_rps, static, max(0.0, memory - static))
