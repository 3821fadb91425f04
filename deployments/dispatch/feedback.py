"""What batches really took, told to the scheduler core: corrected latencies, delays to budget, and ends told early."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tenuto.batching.core.scheduler import Scheduler
from tenuto.deployments.dispatch.correction import LatencyCorrection, NetworkMeter
from tenuto.deployments.dispatch.early_release import EarlyRelease
from tenuto.deployments.dispatch.in_flight import Batch
from tenuto.placement import Plan
from tenuto.placement.copy_times import longest_copies_ms

__all__ = ["Feedback"]


class Feedback:
    """Invariant: the core of the present plan is told only of batches that it dispatched itself."""

    def __init__(self, network: NetworkMeter, now_ms: Callable[[], float], free: Callable[[Batch], None]) -> None:
        """Prepare without a core.

        Args:
            network: measures the delays.
            now_ms: the core's time.
            free: called when a batch on a streaming gpu-let is to be told as done though it is not answered yet.
        """
        self._network = network
        self._correction = LatencyCorrection()
        self._early = EarlyRelease(now_ms, free)
        self._scheduler: Scheduler | None = None

    def follow(self, scheduler: Scheduler, plan: Plan) -> None:
        """Tell this core from now on, forgetting what was learned of the plan before."""
        self._scheduler = scheduler
        self._correction.restart()
        if plan.streaming:
            largest = max((p.batch_size for gpulet in plan.gpulets for p in gpulet.programs), default=1)
            self._early.follow(scheduler, largest, longest_copies_ms(plan))
            scheduler.update_network(self._early.budget(self._network.told))
        else:
            self._early.follow(None)

    def stop(self) -> None:
        """Tell of no more batches early."""
        self._early.follow(None)

    def sent(self, batch: Batch, start_ms: float, finish_ms: float) -> None:
        """Take note of a batch that left and of when the core expects it to start and to end."""
        self._early.sent(batch, start_ms, finish_ms)

    def lost(self, gpulet: int) -> None:
        """Forget what ran on a gpu-let that is gone."""
        self._early.lost(gpulet)

    def answered(self, batch: Batch, header: Mapping[str, Any], now_ms: float, *, is_of_this_plan: bool) -> bool:
        """Learn from an answered batch of a gpu-let of the plan; True when the core was told before that it is done."""
        was_told = self._early.answered(batch, header.get("execution_ms"))
        if is_of_this_plan and "error" not in header:
            self._learn(batch, header, now_ms)
        return was_told

    def _learn(self, batch: Batch, header: Mapping[str, Any], now_ms: float) -> None:
        assert self._scheduler is not None
        execution_ms = float(header["execution_ms"])
        travel_ms = now_ms - batch.dispatched_ms - execution_ms - float(header["queue_ms"])
        copies_ms = float(header.get("copy_in_ms", 0.0)) + float(header.get("copy_out_ms", 0.0))
        self._network.record(travel_ms, len(batch.requests), copies_ms)
        planned = self._scheduler.system.gpulets[batch.gpulet].hosts[batch.program].planned_ms()[len(batch.requests)]
        factor = self._correction.record(batch.program, batch.gpulet, execution_ms / planned)
        if factor is not None:
            self._scheduler.update_latency(batch.program, batch.gpulet, factor)
        delay = self._network.news()
        if delay is not None:
            self._scheduler.update_network(self._early.budget(delay))
