"""The system as operators watch it from any of its gateways: what the dispatchers report, what gateways count, what the
controller decided."""

from __future__ import annotations

import time

from tenuto import __version__
from tenuto.deployments.entry.decisions import AskController, ControllerFigures
from tenuto.deployments.entry.dispatching import Dispatching
from tenuto.deployments.entry.fellows import Fellows
from tenuto.deployments.entry.http import HttpError
from tenuto.deployments.entry.service import InferenceService
from tenuto.deployments.operator.merged_status import merge_system
from tenuto.deployments.wire.status import EndedRequest, SystemStatus


class WatchedGateway:
    """See `tenuto.deployments.operator.app.Watched`."""

    def __init__(self, service: InferenceService, fellows: Fellows, ask_controller: AskController) -> None:
        """Take the clients' service, the gateways with their figures, and what asks the controller."""
        self._service = service
        self._fellows = fellows
        self._controller = ControllerFigures(ask_controller)

    @property
    def _dispatching(self) -> Dispatching:
        try:
            return self._service.dispatching
        except HttpError as error:
            raise TimeoutError(error.message) from None

    def missing(self) -> list[str]:
        """Return the gpu-lets that cannot be used yet."""
        dispatching = self._dispatching
        if dispatching.is_ready():
            return []
        return [gpulet.id for gpulet in dispatching.gpulets() if not gpulet.up] or ["no gpu-let is ready"]

    async def status(self) -> SystemStatus:
        """Return the status of all dispatchers, with the gateways' margins, front doors, proxies and nodes' GPUs, and
        with the controller's decisions."""
        found = await self._dispatching.status()
        reports = await self._fellows.all()
        return merge_system(found, reports, await self._controller.read(), version=__version__, now_s=time.time())

    async def waiting(self) -> dict[str, int]:
        """Return how many requests of each model wait for a batch."""
        return await self._dispatching.waiting()

    async def ended(self, id: str | None, limit: int) -> list[EndedRequest]:
        """Return the last requests that ended, newest first."""
        return await self._dispatching.ended(id, limit)

    def close(self) -> None:
        """Ask nobody any more."""
        self._controller.close()
