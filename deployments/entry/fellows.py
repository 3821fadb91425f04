"""The gateways of one system, to each other: what each has counted, so that operators see all of them whichever one
answers, and so that a key's rate holds for the system and not for each of them.

They meet at a dispatcher that all of them know; a gateway that schedules by itself is alone.
"""

from __future__ import annotations

import os
import socket
import time

from msgspec.structs import replace

from tenuto.deployments.entry.connection import HttpServer
from tenuto.deployments.entry.service import InferenceService
from tenuto.deployments.machines.devices import DeviceFigures
from tenuto.deployments.wire.status import GatewayReport, GatewayStatus


class Fellows:
    """What this gateway says of itself, and what all of them said."""

    def __init__(self, service: InferenceService, server: HttpServer) -> None:
        """Take the clients' service and their socket."""
        self._service = service
        self._server = server
        self._id = f"{socket.gethostname()}:{os.getpid()}:{id(self):x}"
        self._started_at_s = time.time()
        self._devices = DeviceFigures()
        self._asked_rps: dict[str, float] = {}
        self._counted_s = time.monotonic()

    async def all(self) -> list[GatewayReport]:
        """Return the figures of every gateway, this one's as they are now.

        Raises:
            TimeoutError: the dispatcher does not answer.
        """
        own, dispatching = replace(self.own(), devices=await self._devices.read()), self._service.maybe_dispatching
        return [own] if dispatching is None else await dispatching.meet(own)

    def own(self) -> GatewayReport:
        """Return what only this gateway knows, without the GPUs of its node."""
        service = self._service
        door = replace(self._server.status(), wrong_keys=service.guesses.total)
        dispatching = service.maybe_dispatching
        if service.lag.turned_away:
            door = replace(door, turned_away={**door.turned_away, "behind": service.lag.turned_away})
        return GatewayReport(
            gateway=GatewayStatus(
                id=self._id,
                started_at_s=self._started_at_s,
                margin=service.margin.status(),
                front_door=door,
                dispatchers={} if dispatching is None else dispatching.connected(),
            ),
            proxied={model: histogram.buckets() for model, histogram in service.proxied.items()},
            asked_rps=self._asked_rps,
        )

    async def meet(self) -> None:
        """Tell the others this gateway's figures and share the keys' rates with them; call it once a second. A second
        without an answer changes nothing."""
        now_s = time.monotonic()
        self._asked_rps = self._service.callers.count(max(1e-3, now_s - self._counted_s))
        self._counted_s = now_s
        dispatching = self._service.maybe_dispatching
        if dispatching is None or not dispatching.connected():  # nobody else is asked
            return
        try:
            heard = await self.all()
        except TimeoutError:
            return
        self._service.callers.share([report.asked_rps for report in heard])
