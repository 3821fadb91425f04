"""The scheduler of a dispatcher that has no plan yet. It knows no model."""

from __future__ import annotations

from tenuto.batching.core.scheduler import Scheduler
from tenuto.batching.core.system import System


class UnplannedScheduler(Scheduler):
    """Decides nothing. To give it a request is a mistake of the caller, and raises KeyError."""

    name = "no plan"
    summary = "nothing is planned yet"

    def __init__(self) -> None:
        super().__init__(System((), ()))

    def add_request(self, now_ms: float, model: int, request_id: int, deadline_ms: float) -> None:  # noqa: ARG002
        raise KeyError(model)

    def cancel(self, now_ms: float, model: int, request_id: int) -> bool:  # noqa: ARG002
        return False

    def batch_done(self, now_ms: float, gpulet: int) -> None:
        """Do nothing: there is no gpu-let."""

    def wake(self, now_ms: float) -> None:
        """Do nothing: nothing is due."""

    def gpulet_lost(self, now_ms: float, gpulet: int) -> None:
        """Do nothing: there is no gpu-let."""

    def gpulet_back(self, now_ms: float, gpulet: int) -> None:
        """Do nothing: there is no gpu-let."""

    def queued(self, program: int) -> int:  # noqa: ARG002
        return 0
