"""A gateway as operators watch it: what its dispatchers report, with what only the gateway knows."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from tenuto import __version__
from tenuto.deployments.entry.connection import HttpServer
from tenuto.deployments.entry.dispatching import Dispatching
from tenuto.deployments.entry.http import HttpError
from tenuto.deployments.entry.service import InferenceService
from tenuto.deployments.operator.devices import DeviceFigures

__all__ = ["WatchedGateway"]


class WatchedGateway:
    """See `tenuto.deployments.operator.app.Watched`."""

    def __init__(self, service: InferenceService, server: HttpServer) -> None:
        """Take the clients' service and their socket."""
        self._service = service
        self._server = server
        self._started_at_s = time.time()
        self._started_s = time.monotonic()
        self._devices = DeviceFigures()

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
        """Return the status of all dispatchers, with this gateway's margin, front door, proxies and node's GPUs."""
        service = self._service
        found: dict[str, Any] = await self._dispatching.report("status")
        models = {
            name: {**model, "proxy_s": service.proxied[name].to_data()} if name in service.proxied else model
            for name, model in found["models"].items()
        }
        door = self._server.to_data()
        if service.lag.turned_away:
            door["turned_away"]["behind"] = service.lag.turned_away
        return {
            **found, "models": models, "margin": service.margin.to_data(), "front_door": door,
            "version": __version__, "started_at_s": self._started_at_s,
            "uptime_s": time.monotonic() - self._started_s, "devices": await self._devices.read(),
        }  # fmt: skip

    async def queue(self) -> Mapping[str, int]:
        """Return how many requests of each model wait for a batch."""
        found: dict[str, int] = await self._dispatching.report("queue")
        return found

    async def requests(self, id: str | None, limit: int) -> list[dict[str, Any]]:
        """Return the last requests that ended, newest first."""
        found: list[dict[str, Any]] = await self._dispatching.report("requests", id=id, limit=limit)
        return found
