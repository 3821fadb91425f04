"""Requests that carry no load (metadata, health, statistics, documentation, the operators' pages). An ASGI application
answers them, one in each turn of the loop."""

from __future__ import annotations

import asyncio
from collections.abc import MutableMapping
from typing import Any
from urllib.parse import unquote

from starlette.types import ASGIApp

from tenuto.deployments.entry.http.exchange import Exchange, HttpError, refuse
from tenuto.deployments.entry.http.loop_budget import LoopBudget
from tenuto.deployments.security.keys import Caller


class ManagementService:
    """Answers requests by an ASGI application. It is also the whole service behind the operators' port, where the bound
    of bodies is the port's."""

    def __init__(self, budget: LoopBudget, app: ASGIApp) -> None:
        """Take the turns of the loop, and the application, which may be replaced by assignment."""
        self.app = app
        self._budget = budget
        self._tasks: set[asyncio.Task[None]] = set()

    def refusal(self, _exchange: Exchange) -> HttpError | None:
        """Refuse nothing before its body."""
        return None

    def handle(self, exchange: Exchange) -> None:
        """Answer a request of whoever asks."""
        self.answer(exchange, None)

    def answer(self, exchange: Exchange, caller: Caller | None) -> None:
        """Answer a request of a client with a key, and stop when the client leaves."""
        task = asyncio.create_task(self._answer(exchange, caller), name="management request")
        exchange.on_left = task.cancel
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, exchange: Exchange, caller: Caller | None) -> None:
        try:
            await self._budget.management()
            await answer_with(self.app, exchange, caller)
        except Exception as error:
            refuse(exchange, error)


async def answer_with(app: ASGIApp, exchange: Exchange, user: Any = None) -> None:
    """Let an ASGI application answer a request of our own socket. HEAD is answered as GET, and the socket leaves the
    body out. `user`: who asks, when that is known."""
    method = b"GET" if exchange.head.method == b"HEAD" else exchange.head.method
    path, _, query = exchange.head.url.partition(b"?")
    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "scheme": "http",
        "method": method.decode("latin-1"),
        "path": unquote(path.decode("latin-1")),
        "raw_path": path,
        "query_string": query,
        "root_path": "",
        "headers": list(exchange.head.headers.items()),
        "server": ("tenuto", 0),
        "client": None,
        "user": user,
    }
    body: bytes | None = bytes(exchange.body)
    status, lines, payload = 500, b"", []

    async def receive() -> MutableMapping[str, Any]:
        nonlocal body
        if body is None:
            return {"type": "http.disconnect"}
        sent, body = body, None
        return {"type": "http.request", "body": sent, "more_body": False}

    async def send(message: MutableMapping[str, Any]) -> None:
        nonlocal status, lines
        if message["type"] == "http.response.start":
            status = message["status"]
            pairs = ((bytes(name), bytes(value)) for name, value in message.get("headers", ()))
            lines = b"".join([b"%b: %b\r\n" % pair for pair in pairs if pair[0].lower() != b"content-length"])
        elif message["type"] == "http.response.body":
            payload.append(message.get("body", b""))

    await app(scope, receive, send)
    exchange.respond(status, lines, payload)
