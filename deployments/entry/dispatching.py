"""What a gateway needs of the scheduling side, whether it is in the same process or in others."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Protocol

from tenuto.deployments.dispatch.in_flight import Asker, Request
from tenuto.deployments.wire.answers import Answer, Executed, Refused
from tenuto.deployments.wire.arena import Held
from tenuto.deployments.wire.status import DispatchingStatus, EndedRequest, GatewayReport, GpuletStatus
from tenuto.deployments.wire.tensors import InputPart
from tenuto.placement import Plan
from tenuto.profiles.networks.catalogue import ModelSignature


class Dispatching(Protocol):
    """`Dispatcher` in the gateway's own process, `DispatcherClient` where several gateways feed other processes."""

    @property
    def plan(self) -> Plan | None:
        """The plan that is being served."""

    def admit(
        self,
        model: str,
        asker: Asker,
        *,
        arrived_ms: float | None = None,
        slo_ms: float | None = None,
        client_id: str = "",
        reserve_ms: float = 0.0,
    ) -> Request:
        """Ask for one request before its tensors are read; see `Dispatcher.admit`. `start` or `cancel` must follow."""

    def start(self, request: Request, parts: Sequence[InputPart], memory: Held | None = None) -> None:
        """Give an admitted request its tensors."""

    def cancel(self, request: Request) -> None:
        """Forget a request whose client went away, and free its place."""

    def is_ready(self, model: str | None = None) -> bool:
        """Whether every gpu-let is usable; with a model, whether at least one of its gpu-lets is."""

    def signature(self, model: str) -> ModelSignature | None:
        """Return a model's signature as a gpu-let reported it; None before."""

    def gpulets(self) -> list[GpuletStatus]:
        """Return what every gpu-let reported when it connected, and whether it is up."""

    # Each of these raises `TimeoutError` where a dispatcher in another process does not answer.

    async def status(self) -> DispatchingStatus:
        """Return the plan, the gpu-lets as they are, and counts."""

    async def waiting(self) -> dict[str, int]:
        """Return how many requests of every model wait for a batch."""

    async def ended(self, id: str | None, limit: int) -> list[EndedRequest]:
        """Return the last requests that ended, newest first, at most `limit`; with an id, those of it."""

    async def meet(self, told: GatewayReport) -> list[GatewayReport]:
        """Tell the other gateways of this system what this one counts, and return what all of them told last."""

    def connected(self) -> dict[str, int]:
        """Return how many dispatchers of every sub-cluster are connected; none where this process schedules."""

    async def close(self) -> None:
        """Answer everything that waits as failed, and disconnect."""


class _Future:
    """Asks for one request and keeps its answer as a future."""

    def __init__(self) -> None:
        self.answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()

    def executed(self, request: Request, executed: Executed, row: int) -> None:
        if not self.answer.done():
            self.answer.set_result(Answer.of_row(request.arrived_ms, executed, row))

    def refused(self, request: Request, refused: Refused) -> None:
        if not self.answer.done():
            waited_ms = time.monotonic() * 1000.0 - request.arrived_ms
            self.answer.set_result(Answer.of_refusal(waited_ms, refused))


def ask(
    dispatching: Dispatching,
    model: str,
    parts: Sequence[InputPart],
    *,
    memory: Held | None = None,
    slo_ms: float | None = None,
    client_id: str = "",
    reserve_ms: float = 0.0,
) -> asyncio.Future[Answer]:
    """Send one request and return the future of its answer; cancelling the future frees its place.

    Raises:
        KeyError: the plan has no such model.
    """
    asker = _Future()
    request = dispatching.admit(model, asker, slo_ms=slo_ms, client_id=client_id, reserve_ms=reserve_ms)
    if not asker.answer.done():
        dispatching.start(request, parts, memory)

        def settled(done: asyncio.Future[Answer]) -> None:
            if done.cancelled():
                dispatching.cancel(request)

        asker.answer.add_done_callback(settled)
    return asker.answer
