"""The figures that the gateways of one system tell each other and operators.

So operators see all gateways, whichever one answers, and a key's rate holds for the whole system. Gateways exchange
their figures at a dispatcher that all of them know. A gateway that schedules by itself is alone.
"""

from __future__ import annotations

import os
import socket
import time

from msgspec.structs import replace

from tenuto import __version__
from tenuto.deployments.entry.http.exchange import HttpError
from tenuto.deployments.entry.http.server import HttpServer
from tenuto.deployments.entry.service.controller_cache import AskController, ControllerStatusCache
from tenuto.deployments.entry.service.dispatching import Dispatching
from tenuto.deployments.entry.service.inference import InferenceService
from tenuto.deployments.machines.devices import DeviceFigures
from tenuto.deployments.operator.combined_status import combine_system
from tenuto.deployments.process.ray_address import cluster_address
from tenuto.deployments.serve.config import application_name
from tenuto.deployments.wire.status import EndedRequest, GatewayReport, GatewayStatus, SystemStatus


class GatewayMetrics:
    """The figures of this gateway, and of all; see `tenuto.deployments.operator.app.Watched`."""

    def __init__(self, service: InferenceService, server: HttpServer, ask_beside: AskController) -> None:
        """Take the clients' service, their socket, and the function that asks what runs beside the gateways."""
        self._service = service
        self._server = server
        self._beside = ControllerStatusCache(ask_beside)
        self._id = f"{socket.gethostname()}:{os.getpid()}:{id(self):x}"
        self._started_at_s = time.time()
        self._devices = DeviceFigures()
        self._asked_rps: dict[str, float] = {}
        self._counted_s = time.monotonic()

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
        reports = await self._all()
        beside = await self._beside.read()
        strays = sorted(beside.gpulets - {application_name(gpulet.id) for gpulet in found.gpulets})
        merged = combine_system(found, reports, beside.controller, version=__version__, now_s=time.time())
        return replace(merged, cluster=cluster_address(), strays=strays, offline=beside.offline)

    async def waiting(self) -> dict[str, int]:
        """Return how many requests of each model wait for a batch."""
        return await self._dispatching.waiting()

    async def ended(self, id: str | None, limit: int) -> list[EndedRequest]:
        """Return the last requests that ended, newest first: those to models, and those of applications. Other gateways
        may have told nobody yet of those of the last second."""
        ended = [*self._service.application_counters.newest(id, limit), *await self._dispatching.ended(id, limit)]
        return sorted(ended, key=lambda each: -each.received_at_s)

    async def meet(self) -> None:
        """Tell the others this gateway's figures and share the keys' rates with them; call it once a second. A second
        without an answer changes nothing."""
        now_s = time.monotonic()
        self._asked_rps = self._service.callers.count(max(1e-3, now_s - self._counted_s))
        self._counted_s = now_s
        try:
            if self._dispatching.connected():  # otherwise there is no other gateway to ask
                self._service.callers.share([report.asked_rps for report in await self._all()])
        except TimeoutError:
            pass

    async def _all(self) -> list[GatewayReport]:
        """Return the figures of every gateway, this one's as they are now; raises `TimeoutError`."""
        service, dispatching = self._service, self._dispatching
        door = replace(self._server.status(), wrong_keys=service.guesses.total)
        if service.lag.turned_away:
            door = replace(door, turned_away={**door.turned_away, "behind": service.lag.turned_away})
        devices = await self._devices.read()
        own = GatewayReport(  # what has ended is on no way while anything is waited for
            gateway=GatewayStatus(
                id=self._id,
                started_at_s=self._started_at_s,
                margin=service.margin.status(),
                front_door=door,
                dispatchers=dispatching.connected(),
            ),
            applications=service.application_counters.status(),
            ended=(ended := service.application_counters.take_ended()),
            proxied={model: histogram.buckets() for model, histogram in service.proxied.items()},
            asked_rps=self._asked_rps,
            devices=devices,
        )
        try:
            reports = await dispatching.meet(own)
        except TimeoutError:
            service.application_counters.put_back(ended)
            raise
        for report in reports:
            service.application_counters.put_back(report.ended)  # there was no dispatcher to take them
        return reports

    def close(self) -> None:
        """End the questions."""
        self._beside.close()
