"""The gateway's connection to one gpu-let: find it over Ray, connect, send batches, notice its death, find it again."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

from tenuto.deployments.wire.transport import Address, FrameProtocol, connect

__all__ = ["Finder", "GpuletLink", "Link", "LinkEvents"]

logger = logging.getLogger("ray.serve")

# Returns what the gpu-let's `describe` answers: address, token, pid, device, models; waits until its replica is ready.
Finder = Callable[[], Awaitable[dict[str, Any]]]

_RETRY_S = (0.1, 0.2, 0.5, 1.0)


class LinkEvents(Protocol):
    """What the owner of a link is told, always on the event loop."""

    def link_up(self, index: int) -> None:
        """The gpu-let is connected and idle."""

    def link_down(self, index: int, reason: str) -> None:
        """The connection is gone; batches that were sent and not answered are lost."""

    def described(self, index: int) -> None:
        """The gpu-let said anew what it holds; see `GpuletLink.description`."""

    def batch_answered(self, index: int, header: dict[str, Any], body: memoryview) -> None:
        """The gpu-let answered a batch."""


class Link(Protocol):
    """A way to one gpu-let; `GpuletLink` over sockets, others where no process is at the far end."""

    index: int  # in the present plan; negative once the gpu-let left it

    @property
    def gpulet_id(self) -> str:
        """The gpu-let at the far end."""

    @property
    def description(self) -> dict[str, Any]:
        """What the gpu-let last said it is and holds; empty before."""

    @property
    def is_up(self) -> bool:
        """Whether batches can be sent now."""

    def start(self) -> None:
        """Begin to connect; returns at once."""

    async def stop(self) -> None:
        """Close for good."""

    def send(self, header: dict[str, Any], buffers: Sequence[bytes | memoryview]) -> None:
        """Send a batch, or the notice that one is aborted."""


class GpuletLink:
    """Keeps one gpu-let connected for as long as it exists. Invariant: at most one connection at a time."""

    def __init__(self, index: int, gpulet_id: str, find: Finder, events: LinkEvents, kind: str = "gpu-let") -> None:
        self._name = f"{kind} {gpulet_id}"
        self.index = index
        self.gpulet_id = gpulet_id
        self.description: dict[str, Any] = {}
        self._find = find
        self._events = events
        self._protocol: FrameProtocol | None = None
        self._lost = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._is_stopping = False

    @property
    def is_up(self) -> bool:
        """Whether batches can be sent now."""
        return self._protocol is not None and self._protocol.is_connected

    def start(self) -> None:
        """Begin to look for the gpu-let; returns at once."""
        self._task = asyncio.create_task(self._keep_connected(), name=f"link {self._name}")

    async def stop(self) -> None:
        """Close the connection and stop looking."""
        self._is_stopping = True
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        if self._protocol is not None:
            self._protocol.close()

    def send(self, header: dict[str, Any], buffers: Sequence[bytes | memoryview]) -> None:
        """Send a batch; silent when the connection has just gone (`link_down` follows)."""
        if self._protocol is not None:
            self._protocol.send(header, buffers)

    async def _keep_connected(self) -> None:
        failures = 0
        last_pid: int | None = None
        while True:
            try:
                description = await self._find()
                address = _address(description["address"])
                self._lost.clear()
                self._protocol = await connect(address, description["token"], self._on_frame, self._on_lost)
            except asyncio.CancelledError:
                raise
            except Exception as error:  # Ray raises many kinds while an application starts or restarts
                if failures in (0, 30):
                    logger.info("%s cannot be reached yet: %s: %s", self._name, type(error).__name__, error)
                await asyncio.sleep(_RETRY_S[min(failures, len(_RETRY_S) - 1)])
                failures += 1
                continue
            failures = 0
            again = "again, " if last_pid not in (None, description["pid"]) else ""
            last_pid = description["pid"]
            logger.info("%s is connected %s(pid %s, %s)", self._name, again, last_pid, description["device"])
            self.description = description
            self._events.link_up(self.index)
            await self._lost.wait()
            self._protocol = None

    def _on_frame(self, _protocol: FrameProtocol, header: dict[str, Any], body: memoryview) -> None:
        if "description" in header:
            self.description = {**self.description, **header["description"]}
            self._events.described(self.index)
        else:
            self._events.batch_answered(self.index, header, body)

    def _on_lost(self, protocol: FrameProtocol, error: BaseException | None) -> None:
        if protocol is self._protocol:
            self._protocol = None
            reason = f"{self._name} closed its connection" + (f" ({error})" if error else "")
            if not self._is_stopping:
                logger.warning("%s", reason)
            self._events.link_down(self.index, reason)
        self._lost.set()


def _address(raw: str | list[Any]) -> Address:
    return raw if isinstance(raw, str) else (str(raw[0]), int(raw[1]))
