"""The scheduling side as a gateway uses it, whether it is in the same process or in others."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

from tenuto.deployments.dispatch.dispatcher import Dispatcher
from tenuto.deployments.dispatch.in_flight import Request
from tenuto.deployments.entry.service.dispatcher_client import DispatcherClient
from tenuto.deployments.wire.answers import Answer, Executed, Refused
from tenuto.deployments.wire.arena import Held
from tenuto.deployments.wire.tensors import InputPart

# Either the dispatcher in the gateway's own process, or the client of dispatchers that several gateways feed. `admit`
# asks for a place before the tensors of a request are read; `start` or `cancel` must follow. Reports raise
# `TimeoutError` when no dispatcher answers.
Dispatching = Dispatcher | DispatcherClient


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
    dispatching: Dispatching, model: str, parts: Sequence[InputPart], *, memory: Held | None = None, **how: Any
) -> asyncio.Future[Answer]:
    """Send one request and return the future of its answer; cancelling the future frees its place. `how`: arguments of
    `Dispatcher.admit`.

    Raises:
        KeyError: the plan has no such model.
    """
    asker = _Future()
    request = dispatching.admit(model, asker, **how)
    if not asker.answer.done():
        dispatching.start(request, parts, memory)

        def settled(done: asyncio.Future[Answer]) -> None:
            if done.cancelled():
                dispatching.cancel(request)

        asker.answer.add_done_callback(settled)
    return asker.answer
