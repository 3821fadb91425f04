"""A lean HTTP/1.1 sender for load: keep-alive connections, prepared request bytes, only the headers that matter are read.

A general HTTP client costs several times as much per request, which on a shared machine is taken from the server under test.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import cast
from urllib.parse import urlsplit

from tenuto.errors import InvalidInputError

__all__ = ["HttpSender", "Reply", "prepare"]


@dataclass(slots=True)
class Reply:
    """What came back: status 0 means that no answer came, and `error` says why."""

    status: int
    batching_ms: float = float("nan")
    gpulet_queue_ms: float = float("nan")
    execution_ms: float = float("nan")
    batch_size: int = 0
    gpulet: str = ""
    error: str = ""


OnReply = Callable[[Reply], None]


def prepare(path: str, body: bytes, headers: Mapping[str, str], host: str) -> bytes:
    """Return the bytes of a POST request."""
    lines = [f"POST {path} HTTP/1.1", f"Host: {host}", f"Content-Length: {len(body)}", *(f"{k}: {v}" for k, v in headers.items())]
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body


class _Connection(asyncio.Protocol):
    """One keep-alive connection with at most one request under way."""

    def __init__(self, idle: list[_Connection]) -> None:
        self._idle = idle
        self._transport: asyncio.Transport | None = None
        self._buffer = b""
        self._on_reply: OnReply | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def send(self, request: bytes, on_reply: OnReply) -> None:
        assert self._transport is not None
        self._on_reply = on_reply
        self._transport.write(request)

    def data_received(self, data: bytes) -> None:
        self._buffer = data if not self._buffer else self._buffer + data
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            return
        head = self._buffer[:end].lower()
        length = _number(head, b"content-length: ")
        if length is None or len(self._buffer) < end + 4 + int(length):
            return
        reply = Reply(int(head[9:12]))
        if (batching := _number(head, b"x-tenuto-batching-ms: ")) is not None:
            reply.batching_ms = batching
            reply.gpulet_queue_ms = (_number(head, b"x-tenuto-queue-ms: ") or 0.0) - batching
            reply.execution_ms = _number(head, b"x-tenuto-execution-ms: ") or 0.0
            reply.batch_size = int(_number(head, b"x-tenuto-batch-size: ") or 0)
            reply.gpulet = _text(self._buffer[:end], head, b"x-tenuto-gpulet: ")
        if reply.status >= 400:
            reply.error = self._buffer[end + 4 : end + 4 + min(int(length), 300)].decode("utf-8", "replace")
        self._buffer = b""
        on_reply, self._on_reply = self._on_reply, None
        if self._transport is not None and not self._transport.is_closing() and b"connection: close" not in head:
            self._idle.append(self)
        if on_reply is not None:
            on_reply(reply)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if self in self._idle:
            self._idle.remove(self)
        on_reply, self._on_reply = self._on_reply, None
        if on_reply is not None:
            on_reply(Reply(0, error=f"the connection closed before an answer came ({exc or 'by the server'})"))

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()


def _number(head: bytes, name: bytes) -> float | None:
    at = head.find(b"\r\n" + name)
    if at < 0:
        return None
    start = at + 2 + len(name)
    end = head.find(b"\r\n", start)
    try:
        return float(head[start : end if end >= 0 else len(head)])
    except ValueError:
        return None


def _text(original: bytes, head: bytes, name: bytes) -> str:
    at = head.find(b"\r\n" + name)
    if at < 0:
        return ""
    start = at + 2 + len(name)
    end = head.find(b"\r\n", start)
    return original[start : end if end >= 0 else len(original)].decode("latin-1")


class HttpSender:
    """Sends prepared requests to one server, opening a connection whenever none is idle: nothing limits requests in flight."""

    def __init__(self, url: str) -> None:
        """Take the server's base URL; raises `InvalidInputError` unless it is http:// or https://."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise InvalidInputError(f"{url!r} is not an HTTP address. Write it like http://127.0.0.1:8000.")
        self.host = parts.netloc
        self._target = (parts.hostname, parts.port or (443 if parts.scheme == "https" else 80))
        self._ssl = ssl.create_default_context() if parts.scheme == "https" else None
        self._idle: list[_Connection] = []
        self._all: list[_Connection] = []
        self._opening: set[asyncio.Task[None]] = set()

    async def open(self, connections: int) -> None:
        """Open connections ahead of time, so that the first requests do not pay for it; failures show when sending."""
        for _ in range(connections):
            try:
                self._idle.append(await self._connect())
            except OSError:
                return

    async def _connect(self) -> _Connection:
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(lambda: _Connection(self._idle), *self._target, ssl=self._ssl)
        self._all.append(connection)
        return connection

    def send(self, request: bytes, on_reply: OnReply) -> None:
        """Send now; `on_reply` is called exactly once, on the event loop."""
        if self._idle:
            self._idle.pop().send(request, on_reply)
            return
        task = asyncio.ensure_future(self._open_and_send(request, on_reply))
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)

    async def _open_and_send(self, request: bytes, on_reply: OnReply) -> None:
        try:
            connection = await self._connect()
        except OSError as error:
            on_reply(Reply(0, error=f"cannot connect to {self._target[0]}:{self._target[1]}: {error}"))
            return
        connection.send(request, on_reply)

    def close(self) -> None:
        """Close every connection; requests still under way get a reply with status 0."""
        for task in list(self._opening):
            task.cancel()
        for connection in self._all:
            connection.close()
