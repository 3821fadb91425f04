"""The autoscale advice of a running dispatcher. It counts ended requests and how long GPUs were busy, by windows."""

from __future__ import annotations

import logging

from tenuto.batching.core.autoscale import Advice, AutoscaleAdvisor, AutoscaleOptions
from tenuto.deployments.wire.status import AdviceStatus
from tenuto.placement import Plan

logger = logging.getLogger("ray.serve")

# Three windows of ten seconds must agree before GPUs are released, so that a short pause of clients releases none.
LIVE_OPTIONS = AutoscaleOptions(settle_windows=3)


class LiveAdvice:
    """Times are seconds of the dispatcher's clock. A GPU is busy while any of its gpu-lets is."""

    def __init__(self, options: AutoscaleOptions = LIVE_OPTIONS) -> None:
        self._options = options
        self._advisor: AutoscaleAdvisor | None = None
        self._gpus_of: dict[str, tuple[str, ...]] = {}
        self._busy_s: dict[str, float] = {}
        self._good = self._bad = 0
        self._ticked_s = 0.0
        self._latest: Advice | None = None
        self._since_s = 0.0

    def follow(self, plan: Plan, now_s: float) -> None:
        """Count with the GPUs of this plan from now on."""
        self._gpus_of = {gpulet.id: gpulet.gpus for gpulet in plan.gpulets}
        gpus = max(1, len(plan.used_gpus))
        if self._advisor is None:
            self._advisor = AutoscaleAdvisor(gpus, self._options, start_s=now_s)
            self._ticked_s = self._since_s = now_s
        else:
            self.tick(now_s)
            self._take(self._advisor.set_gpus(now_s, gpus))
            if self._latest is not None and self._latest.gpus != gpus:
                self._latest = None  # that advice was for another number of GPUs
        self._busy_s = dict.fromkeys(plan.used_gpus, 0.0)

    def ended(self, *, good: int = 0, bad: int = 0) -> None:
        """Count requests that ended; everything but an answer in time is bad."""
        self._good += good
        self._bad += bad

    def executed(self, gpulet: str, execution_ms: float) -> None:
        """Count a batch. A batch of a gpu-let that left the plan does not count."""
        for gpu in self._gpus_of.get(gpulet, ()):
            self._busy_s[gpu] = self._busy_s.get(gpu, 0.0) + execution_ms / 1000.0

    def tick(self, now_s: float) -> None:
        """Hand the counts to the advisor; call about once a second. A change of the advice is logged."""
        if self._advisor is None:
            return
        passed_s = now_s - self._ticked_s
        busy_s = 0.0
        for gpu, busy in self._busy_s.items():
            # A batch is counted when it ends. Busy time beyond the time since the last tick belongs to earlier ticks.
            busy_s += min(busy, passed_s)
            self._busy_s[gpu] = 0.0
        good, bad, self._good, self._bad = self._good, self._bad, 0, 0
        # Events between two ticks belong to the window of the first tick.
        self._take(self._advisor.add(self._ticked_s, good=good, bad=bad, busy_gpu_s=busy_s))
        self._take(self._advisor.add(now_s))
        self._ticked_s = now_s

    def _take(self, advices: list[Advice]) -> None:
        for advice in advices:
            if self._latest is None or advice.delta_gpus != self._latest.delta_gpus:
                self._since_s = advice.end_s
                if self._latest is not None or advice.delta_gpus:
                    logger.info("autoscale advice: %s", _told(advice, 0.0))
            self._latest = advice

    def status(self, now_s: float) -> AdviceStatus | None:
        """Return the latest advice and how long it has been the same; None before the first window ended."""
        return None if self._latest is None else _told(self._latest, max(0.0, now_s - self._since_s))


def _told(advice: Advice, unchanged_s: float) -> AdviceStatus:
    return AdviceStatus(
        gpus=advice.gpus,
        requests=advice.requests,
        bad_rate=advice.bad_rate,
        idle_fraction=advice.idle_fraction,
        delta_gpus=advice.delta_gpus,
        window_s=advice.end_s - advice.start_s,
        unchanged_s=unchanged_s,
    )
