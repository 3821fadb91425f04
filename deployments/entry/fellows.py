"""The gateways of one system, to each other: what each has counted, so that operators see all of them whichever one
answers, and so that a key's rate holds for the system and not for each of them.

They meet at a dispatcher that all of them know; a gateway that schedules by itself is alone.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from typing import Any

from tenuto.deployments.entry.connection import HttpServer
from tenuto.deployments.entry.dispatcher_client import DispatcherClient
from tenuto.deployments.entry.service import InferenceService
from tenuto.deployments.operator.devices import DeviceFigures


class Fellows:
    """What this gateway says of itself, and what all of them said."""

    def __init__(self, service: InferenceService, server: HttpServer) -> None:
        """Take the clients' service and their socket."""
        self._service = service
        self._server = server
        self._id = f"{socket.gethostname()}:{os.getpid()}:{id(self):x}"
        self._started_at_s = time.time()
        self._devices = DeviceFigures()
        self._asked_rps: Mapping[str, float] = {}
        self._counted_s = time.monotonic()

    async def all(self) -> list[dict[str, Any]]:
        """Return the figures of every gateway, this one's as they are now; see `own`.

        Raises:
            TimeoutError: the dispatcher does not answer.
        """
        own = {**self.own(), "devices": await self._devices.read()}
        dispatchers = self._dispatchers
        return [own] if dispatchers is None else await dispatchers.tell_gateways(own)

    @property
    def _dispatchers(self) -> DispatcherClient | None:
        """The dispatchers in other processes; None where this gateway schedules by itself, or has no plan yet."""
        dispatching = self._service.maybe_dispatching
        return dispatching if isinstance(dispatching, DispatcherClient) else None

    def own(self) -> dict[str, Any]:
        """Return plain data: what only this gateway knows. `id` is another after every start."""
        service = self._service
        door = self._server.to_data()
        if service.lag.turned_away:
            door["turned_away"]["behind"] = service.lag.turned_away
        dispatchers = self._dispatchers
        return {
            "id": self._id, "started_at_s": self._started_at_s, "margin": service.margin.to_data(), "front_door": door,
            "proxied": {model: histogram.to_data() for model, histogram in service.proxied.items()},
            "asked_rps": self._asked_rps,
            "dispatchers": {} if dispatchers is None else dispatchers.connected(),
        }  # fmt: skip

    async def meet(self) -> None:
        """Tell the others this gateway's figures and share the keys' rates with them; call it once a second. A second
        without an answer changes nothing."""
        now_s = time.monotonic()
        self._asked_rps = self._service.callers.count(max(1e-3, now_s - self._counted_s))
        self._counted_s = now_s
        if self._dispatchers is None:
            return
        try:
            heard = await self.all()
        except TimeoutError:
            return
        self._service.callers.share([gateway["asked_rps"] for gateway in heard])
