"""Both ways between our HTTP and ASGI. The service that answers our own socket also answers what comes through Serve's
proxies. FastAPI answers what carries no load, for both."""

from __future__ import annotations

import asyncio
from collections.abc import MutableMapping, Sequence
from typing import Any
from urllib.parse import unquote

import msgspec
from starlette.types import ASGIApp, Receive, Scope, Send

from tenuto.deployments.entry.exchange import Exchange, Head, HttpError, too_large
from tenuto.deployments.wire.tensors import Buffer


def _future() -> asyncio.Future[tuple[int, bytes, bytes]]:
    return asyncio.get_running_loop().create_future()


class WholeExchange(Exchange, eq=False):
    """A request that came whole through ASGI. It runs on the service's loop. Serve's proxy bounds how much comes at
    once, and its address is not the client's."""

    _parts: list[Buffer] = msgspec.field(default_factory=list)
    _begun: tuple[int, bytes] = (200, b"")
    _response: asyncio.Future[tuple[int, bytes, bytes]] = msgspec.field(default_factory=_future)

    def respond(self, status: int, headers: bytes, payload: Sequence[Buffer]) -> None:
        """Let `response` return."""
        self.on_left = None
        if not self._response.done():
            self._response.set_result((status, headers, b"".join(payload)))

    def begin(self, status: int, headers: bytes) -> None:
        """Collect a response that comes in parts, because ASGI is given all of it at once."""
        self._begun = status, headers

    def send(self, part: bytes) -> None:
        """Take a part of the body."""
        self._parts.append(part)

    def end(self) -> None:
        """Let `response` return."""
        self.respond(*self._begun, self._parts)

    async def response(self) -> tuple[int, bytes, bytes]:
        """Wait for status, raw header lines and payload. Serve cancels this when the client goes away."""
        try:
            return await self._response
        except asyncio.CancelledError:
            self.leave()
            raise


async def read_request(scope: Scope, receive: Receive, limit_bytes: int) -> tuple[Head, bytes]:
    """Return head and body of an ASGI request. The URL lacks the prefix at which the application is mounted.

    Raises:
        HttpError: 413 as soon as it is clear that the body exceeds the limit; 400 when the client stops within the
            body.
    """
    headers: dict[bytes, bytes] = {bytes(name): bytes(value) for name, value in scope["headers"]}
    raw = scope.get("raw_path") or scope["path"].encode()
    url = bytes(raw).removeprefix(scope.get("root_path", "").encode())
    query = scope.get("query_string", b"")
    length = headers.get(b"content-length", b"")
    if length.isdigit() and int(length) > limit_bytes:
        raise too_large(limit_bytes)
    chunks: list[bytes] = []
    total = 0
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise HttpError(400, "the connection closed within the body.")
        chunk = message.get("body", b"")
        total += len(chunk)
        if total > limit_bytes:
            raise too_large(limit_bytes)
        chunks.append(chunk)
        more = message.get("more_body", False)
    head = Head(scope["method"].encode(), url + (b"?" + query if query else b""), headers)
    return head, b"".join(chunks)


async def send_response(send: Send, status: int, lines: bytes, payload: bytes) -> None:
    """Send a response with raw header lines."""
    pairs = [line.partition(b": ")[::2] for line in lines.splitlines()]
    headers = [*pairs, (b"content-length", b"%d" % len(payload))]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": payload})


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
