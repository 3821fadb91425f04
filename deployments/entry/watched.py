"""The system as operators watch it from any of its gateways: what the dispatchers report, what gateways count, what the
controller decided."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from tenuto import __version__
from tenuto.deployments.entry.dispatching import Dispatching
from tenuto.deployments.entry.fellows import Fellows
from tenuto.deployments.entry.http import HttpError
from tenuto.deployments.entry.service import InferenceService
from tenuto.deployments.operator.decisions import AskController, ControllerFigures
from tenuto.deployments.operator.merged_status import merge_gateways


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
        return [entry["id"] for entry in dispatching.gpulets() if not entry["up"]] or ["no gpu-let is ready"]

    async def status(self) -> Mapping[str, Any]:
        """Return the status of all dispatchers, with the gateways' margins, front doors, proxies and nodes' GPUs, and
        with the controller's decisions."""
        found: dict[str, Any] = await self._dispatching.report("status")
        merged = merge_gateways(await self._fellows.all())
        proxied = merged.pop("proxied")
        models = {
            name: {**model, "proxy_s": proxied[name]} if name in proxied else model
            for name, model in found["models"].items()
        }
        return {
            **found, **merged, "models": models, "version": __version__,
            "uptime_s": time.time() - merged["started_at_s"], "controller": await self._controller.read(),
        }  # fmt: skip

    async def queue(self) -> Mapping[str, int]:
        """Return how many requests of each model wait for a batch."""
        found: dict[str, int] = await self._dispatching.report("queue")
        return found

    async def requests(self, id: str | None, limit: int) -> list[dict[str, Any]]:
        """Return the last requests that ended, newest first."""
        found: list[dict[str, Any]] = await self._dispatching.report("requests", id=id, limit=limit)
        return found

    def close(self) -> None:
        """Ask nobody any more."""
        self._controller.close()
