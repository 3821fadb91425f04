"""A lean HTTP/1.1 sender for load. It keeps connections alive and prepares the bytes of requests; httptools reads the
answers.

A general HTTP client costs several times as much processor time per request. On a shared machine that would slow the
server under test."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Mapping
from typing import cast
from urllib.parse import urlsplit

from tenuto.errors import InvalidInputError
from tenuto.loadgen.sender import Body, OnReply, Reply
from tenuto.placement.versions import path_of

_LONGEST_IDLE_S = 4.0  # limit: idle time of a connection; servers close idle connections after 5 s or more


def post_bytes(path: str, body: bytes, headers: Mapping[str, str], host: str) -> bytes:
    """Return the bytes of a POST request."""
    lines = [
        f"POST {path} HTTP/1.1",
        f"Host: {host}",
        f"Content-Length: {len(body)}",
        *(f"{k}: {v}" for k, v in headers.items()),
    ]
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body


class _Connection(asyncio.Protocol):
    """One keep-alive connection with at most one open request."""

    def __init__(self, sender: HttpSender) -> None:
        from tenuto.loadgen.senders.answer_reader import AnswerReader  # which planning in virtual time does not need

        self._sender = sender
        self._transport: asyncio.Transport | None = None
        self._answers = AnswerReader()
        self._token = -1
        self._idle_at = time.monotonic()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    @property
    def is_fresh(self) -> bool:
        """Whether the server has surely not closed it yet: servers close connections that are idle for 5 s or more."""
        return self.is_open and time.monotonic() - self._idle_at < _LONGEST_IDLE_S

    def send(self, request: bytes, token: int) -> None:
        self._token = token
        if self._transport is None:  # the connection was lost since it was opened
            self.connection_lost(None)
        else:
            self._transport.write(request)

    def data_received(self, data: bytes) -> None:
        try:
            reply = self._answers.feed(data)
        except ValueError as error:
            self.close()
            self._answered(Reply(0, error=f"the answer cannot be read ({error})"))
            return
        if reply is None:
            return
        if self.is_open:
            if self._answers.keeps_connection:
                self._idle_at = time.monotonic()
                self._sender.idle.append(self)
            else:
                self.close()
        self._answered(reply)

    def _answered(self, reply: Reply) -> None:
        token, self._token = self._token, -1
        if token >= 0:
            self._sender.on_reply(token, reply)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._sender.forget(self)
        self._answered(Reply(0, error=f"the connection closed before an answer came ({exc or 'by the server'})"))

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()


class HttpSender:
    """Sends prepared requests to one server. When no connection is idle, it opens another, so that nothing limits the
    number of open requests.
    """

    def __init__(self, url: str, key: str = "") -> None:
        """Take the server's base URL and an API key; raises `InvalidInputError` unless it is http:// or https://."""
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError:
            raise InvalidInputError(f"{url!r} is not an HTTP address. Write it like http://127.0.0.1:8000.") from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise InvalidInputError(f"{url!r} is not an HTTP address. Write it like http://127.0.0.1:8000.")
        self._host = parts.netloc
        self._key = key
        self._target = (parts.hostname, port or (443 if parts.scheme == "https" else 80))
        self._ssl = ssl.create_default_context() if parts.scheme == "https" else None
        self.idle: list[_Connection] = []
        self._all: set[_Connection] = set()
        self._opening: set[asyncio.Task[None]] = set()
        self.on_reply: OnReply = lambda _token, _reply: None

    async def open(self, connections: int, on_reply: OnReply) -> None:
        """Open connections before the run, so that the first requests need not. Failures show when sending."""
        self.on_reply = on_reply
        for _ in range(connections):
            try:
                self.idle.append(await self._connect())
            except OSError:
                return

    async def _connect(self) -> _Connection:
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(lambda: _Connection(self), *self._target, ssl=self._ssl)
        self._all.add(connection)
        return connection

    def prepare(self, model: str, body: Body, slo_ms: float | None = None) -> tuple[bytes, bytes]:
        """Return the request in two parts; `send` puts the id between them."""
        is_binary = body.is_raw or body.json_length is not None
        headers = {"Content-Type": "application/octet-stream" if is_binary else "application/json"}
        if body.json_length is not None:
            headers["Inference-Header-Content-Length"] = str(body.json_length)
        if slo_ms is not None:
            headers["X-SLO-Ms"] = f"{slo_ms:g}"
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        action = "generate_stream" if body.is_streamed else "infer"
        path = f"/predict/{path_of(model)}" if body.is_raw else f"/v2/models/{path_of(model)}/{action}"
        if body.is_prompt:
            path = "/v1/completions"
        line, rest = post_bytes(path, body.data, headers, self._host).split(b"\r\n", 1)
        return line, rest

    def send(self, prepared: tuple[bytes, bytes], request_id: str, token: int) -> None:
        """Send with the id as a header."""
        line, rest = prepared
        self.send_bytes(b"%b\r\nX-Request-Id: %b\r\n%b" % (line, request_id.encode("latin-1"), rest), token)

    def send_bytes(self, request: bytes, token: int) -> None:
        """Send now on an idle connection, or on a new one as soon as it is open."""
        while self.idle:
            connection = self.idle.pop()
            if connection.is_fresh:
                connection.send(request, token)
                return
            connection.close()
        task = asyncio.ensure_future(self._open_and_send(request, token))
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)

    async def _open_and_send(self, request: bytes, token: int) -> None:
        try:
            connection = await self._connect()
        except OSError as error:
            reason = error.strerror or str(error)
            self.on_reply(token, Reply(0, error=f"cannot connect to {self._target[0]}:{self._target[1]}: {reason}"))
            return
        connection.send(request, token)

    def forget(self, connection: _Connection) -> None:
        """Drop a connection that is gone; called by connections."""
        self._all.discard(connection)
        if connection in self.idle:
            self.idle.remove(connection)

    def close(self) -> None:
        """Close every connection; open requests get no answer any more."""
        for task in list(self._opening):
            task.cancel()
        for connection in list(self._all):
            connection.close()
