"""The scheduler of a dispatcher that has no plan yet: it knows no model, so that nothing can be asked of it."""

from __future__ import annotations

from tenuto.batching.core.scheduler import Scheduler
from tenuto.batching.core.system import System


class UnplannedScheduler(Scheduler):
    """Decides nothing; whoever asks it for a model made a mistake."""

    name = "no plan"
    summary = "nothing is planned yet"

    def __init__(self) -> None:
        super().__init__(System((), ()))

    def add_request(self, now_ms: float, model: int, request_id: int, deadline_ms: float) -> None:  # noqa: ARG002
        raise KeyError(model)

    def cancel(self, now_ms: float, model: int, request_id: int) -> bool:  # noqa: ARG002
        return False

    def batch_done(self, now_ms: float, gpulet: int) -> None:
        """There is no gpu-let."""

    def wake(self, now_ms: float) -> None:
        """Nothing is due."""

    def gpulet_lost(self, now_ms: float, gpulet: int) -> None:
        """There is no gpu-let."""

    def gpulet_back(self, now_ms: float, gpulet: int) -> None:
        """There is no gpu-let."""

    def queued(self, program: int) -> int:  # noqa: ARG002
        return 0
