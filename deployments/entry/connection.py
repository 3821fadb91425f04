"""HTTP/1.1 on the gateway's own socket: bytes in, requests handed to the service, responses out in order.

Parsing is httptools'; what is here is what it leaves open: bodies received where gpu-lets can read them, the moment at
which bytes arrived, and bounds on everything a client could make grow: connections, headers, bodies, pipelined
requests, unread answers, and the time any of them may take.
"""

from __future__ import annotations

import asyncio
import email.utils
import socket
import ssl
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol, cast

import httptools

from tenuto.deployments.entry.http import Head, HttpError, crash, fail, status_line, too_large
from tenuto.deployments.wire.arena import Arena, Slot
from tenuto.deployments.wire.tensors import Buffer

_READ_BYTES = 1 << 16
_SLOT_BYTES = 1 << 14  # bodies from here on are received into shared memory; below, one more copy costs less
_JOINED_BYTES = 1 << 15
_MOST_HEADER_BYTES = 1 << 15
_MOST_PIPELINED = 16
_HEAD_S = 10.0  # from the first byte of a request to the end of its headers
_BODY_S = 60.0  # from there to the end of its body; and for answers to be taken
_IDLE_S = 300.0  # between two requests
_LINGER_S = 5.0  # for a client that goes on sending after its last answer
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_HEAD_END = b"\r\n\r\n"
_KEPT_HEADS = 1024
_OWN_NAMES = frozenset((b"x-request-id", b"traceparent", b"x-request-start"))
_LONGEST_KEPT_HEAD_BYTES = 2048
# Why a request was turned away before its body was taken, as operators read it.
_REASONS = {400: "malformed", 401: "key", 403: "model", 404: "unknown", 408: "slow", 413: "size", 429: "rate",
            431: "size", 503: "full", 504: "expired"}  # fmt: skip
_MANY = HttpError(503, "too many connections are open. Use fewer, or connect again in a moment.", retry_after_s=1.0)
_UNFINISHED = HttpError(503, "too many requests are unfinished. Retry in a moment.", retry_after_s=1.0)
_FULL = b"%b%bcontent-length: %d\r\nconnection: close\r\n\r\n%b" % (
    status_line(_MANY.status), _MANY.lines(), len(_MANY.payload()), _MANY.payload()
)  # fmt: skip


class Limits:
    """What clients may use. `unfinished_bytes` is the size of the arena, and of bodies outside of it again."""

    def __init__(
        self, *, body_bytes: int = 64 << 20, unfinished_bytes: int = 512 << 20, connections: int = 4096
    ) -> None:
        self.body_bytes = body_bytes
        self.unfinished_bytes = unfinished_bytes
        self.connections = connections


class Service(Protocol):
    """What answers requests."""

    def refusal(self, exchange: HttpExchange) -> HttpError | None:
        """Return why a request need not send its body; called when its headers are there."""

    def handle(self, exchange: HttpExchange) -> None:
        """Answer a request, now or later; called when its body is there."""


class ArrivalClock:
    """Says when the bytes that are read now arrived.

    An event loop gets to them later: what comes while it works off a turn is found by its next poll. Of such bytes only
    bounds are known, and the earlier one is taken, the end of the poll before, so that no client waits longer than the
    server thinks. Bytes that ended a sleep of the loop came now.
    """

    _SLEPT_S = 2e-4  # a poll that returns sooner found something waiting

    def __init__(self, loop: asyncio.AbstractEventLoop, clock: Callable[[], float] = time.monotonic) -> None:
        self._loop = loop
        self._clock = clock
        self._has_read = False  # in this turn
        self._found_s = self._polled_s = clock()
        self._arrived_s = 0.0

    def arrived_ms(self) -> float:
        """Return it in ms on the monotonic clock; call it once for every read."""
        if not self._has_read:
            self._has_read = True
            self._loop.call_soon(self._poll)
            now_s = self._clock()
            has_slept = now_s - self._polled_s > self._SLEPT_S
            self._arrived_s = now_s if has_slept else self._found_s
            self._found_s = now_s if has_slept else self._polled_s
        return self._arrived_s * 1000.0

    def _poll(self) -> None:
        """The turn is over, the loop polls next."""
        self._has_read = False
        self._polled_s = self._clock()


class HttpExchange:
    """See `tenuto.deployments.entry.http.Exchange`."""

    __slots__ = (
        "_connection", "arrived_ms", "body", "head", "is_answered", "is_in_slot", "keep_alive", "on_left", "response",
        "slots",
    )  # fmt: skip

    def __init__(self, connection: HttpConnection, head: Head, arrived_ms: float) -> None:
        self._connection: HttpConnection | None = connection
        self.head = head
        self.arrived_ms = arrived_ms
        self.keep_alive = head.keep_alive
        self.body: Buffer = b""
        self.slots: list[Slot] = []
        self.is_in_slot = False
        self.is_answered = False
        self.response: Sequence[Buffer] = ()  # once it is answered
        self.on_left: Callable[[], None] | None = None

    def respond(self, status: int, headers: bytes, payload: Sequence[Buffer]) -> None:
        """Send the response as soon as those of the requests before have left."""
        if self.is_answered:
            return
        self.is_answered = True
        self.on_left = None
        if self.slots:
            self._let_go()
        connection = self._connection
        if connection is None:
            return
        server = connection.server
        size = len(payload[0]) if len(payload) == 1 else sum([len(part) for part in payload])
        closing = b""
        if server.is_draining or not self.keep_alive:
            self.keep_alive = False
            closing = b"connection: close\r\n"
        head = b"%b%b%bcontent-length: %d\r\n%b\r\n" % (status_line(status), headers, server.date_line, size, closing)
        if self.head.is_head:
            self.response = [head]
        elif size <= _JOINED_BYTES:
            self.response = [b"".join([head, *payload])]
        else:
            self.response = [head, *payload]
        connection.answered(self)

    def _let_go(self) -> None:
        """Give back the memory of the tensors; whoever still reads it holds it."""
        self.body = b""
        for slot in self.slots:
            slot.release()
        self.slots = []

    def leave(self) -> None:
        """The client is gone."""
        self._connection = None
        left, self.on_left = self.on_left, None
        if left is not None:
            left()
        self._let_go()


class HttpConnection(asyncio.BufferedProtocol):
    """One client. Invariant: responses leave in the order of the requests.

    A head that was seen before is known by its bytes, and what follows it is cut by its length. Other heads, and bodies
    without a length, are httptools'; it is also the one who says what is not HTTP.
    """

    def __init__(self, server: HttpServer) -> None:
        self.server = server
        self._transport: asyncio.Transport | None = None
        self._open: deque[HttpExchange] = deque()  # received or being received, and not answered
        self._receiving: HttpExchange | None = None  # its body is not complete
        self._rest: memoryview | None = None  # of the memory of a body, what is still to come
        self._skips = 0  # bytes of a refused body that are still to come
        self._parser: httptools.HttpRequestParser | None = None  # while it is at work
        self._raw_head = bytearray()  # what it was given of a head
        self._url = b""
        self._headers: dict[bytes, bytes] = {}
        self._header_bytes = 0
        self._chunks: list[bytes] = []
        self._chunk_bytes = 0
        self._arrived_ms = 0.0
        self._is_paused = False
        self._closes = False
        self._lingers = False  # the last answer has left; what still comes is thrown away
        self.changed_s = time.monotonic()  # when its state changed last, for the time limits

    # --- asyncio's side -----------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        if not self.server.admit(self):
            self._transport.write(_FULL)
            self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        del exc
        self._transport = None
        self.server.forget(self)
        self._rest = self._receiving = self._parser = None
        self._forget_chunks()
        while self._open:
            self._open.popleft().leave()

    def eof_received(self) -> bool:
        return False  # the client has gone, or wants nothing more: no answer reaches it

    def get_buffer(self, sizehint: int) -> memoryview:
        del sizehint
        return self.server.room if self._rest is None else self._rest

    def buffer_updated(self, nbytes: int) -> None:
        self._arrived_ms = self.server.clock.arrived_ms()
        rest = self._rest
        if self._lingers:
            self._skips -= nbytes
            if self._skips <= 0:
                self._close()
        elif rest is None:
            self._take(bytes(self.server.room[:nbytes]))
        elif nbytes < len(rest):
            self._rest = rest[nbytes:]
        else:
            self._rest = None
            exchange = self._receiving
            if exchange is not None:
                self._complete(exchange)

    def pause_writing(self) -> None:
        self._is_paused = True
        self._update_reading()

    def resume_writing(self) -> None:
        self._is_paused = False
        self._update_reading()

    # --- receiving ----------------------------------------------------------------------------------------------

    def _take(self, data: bytes) -> None:
        """Take bytes that begin with a request, or go on with one."""
        while data and not self._closes:
            if self._skips:
                skipped = min(self._skips, len(data))
                self._skips -= skipped
                data = data[skipped:]
            elif self._parser is not None:
                self._parse(data)
                return
            else:
                end = data.find(_HEAD_END) + 4
                head = self.server.heads.get(data[:end]) if end > 3 else None
                if head is None:
                    self._begin_parsing(data)
                    return
                data = self._take_body(self._begin(head), data, end)

    def _begin(self, head: Head) -> HttpExchange:
        exchange = HttpExchange(self, head, self._arrived_ms)
        self._open.append(exchange)
        if len(self._open) > _MOST_PIPELINED:
            self._update_reading()
        return exchange

    def _take_body(self, exchange: HttpExchange, data: bytes, at: int) -> bytes:
        """Take the body of a request whose head has just been read, and return what follows it."""
        length = exchange.head.length or 0
        came = len(data) - at
        error = self._refusal(exchange, length)
        if error is not None:
            self.server.turned_away[_REASONS.get(error.status, "other")] += 1
            if b"expect" in exchange.head.headers:
                exchange.keep_alive = False  # nobody knows whether its body comes
            self._skips = max(0, length - came)
            fail(exchange, error)
            return data[at + length :]
        if came >= length and not exchange.is_in_slot:
            exchange.body = data[at : at + length]
            self._complete(exchange)
            return data[at + length :]
        memory = exchange.slots[0].data if exchange.is_in_slot else memoryview(bytearray(length))
        exchange.body = memory
        came = min(came, length)
        memory[:came] = memoryview(data)[at : at + came]
        if came == length:
            self._complete(exchange)
        else:
            self._receiving = exchange
            self._rest = memory[came:]
            self.changed_s = self._arrived_ms / 1000.0
            if b"expect" in exchange.head.headers and len(self._open) == 1 and not came:
                self._write([_CONTINUE])
        return data[at + length :]

    def _refusal(self, exchange: HttpExchange, length: int) -> HttpError | None:
        """Return why the body need not come; else find it a place, where it is large."""
        limits = self.server.limits
        if length > limits.body_bytes:
            return too_large(limits.body_bytes)
        error = self.server.service.refusal(exchange)
        if error is not None or length < _SLOT_BYTES:
            return error
        slot = self.server.arena.take(length)
        if slot is None:
            return _UNFINISHED
        exchange.slots.append(slot)
        exchange.is_in_slot = True
        return None

    def _complete(self, exchange: HttpExchange) -> None:
        """A request is whole: answer it."""
        self._receiving = None
        exchange.arrived_ms = self._arrived_ms
        try:
            self.server.service.handle(exchange)
        except Exception as error:
            crash(exchange, error)

    # --- heads that were not seen before (httptools calls the `on_` methods) ------------------------------------

    def _begin_parsing(self, data: bytes) -> None:
        self._parser = httptools.HttpRequestParser(self)
        self._raw_head.clear()
        self._url, self._headers, self._header_bytes = b"", {}, 0
        self.changed_s = self._arrived_ms / 1000.0
        self._parse(data)

    def _parse(self, data: bytes) -> None:
        """Give the parser what belongs to the head, and cut the body where its length is known."""
        parser = self._parser
        if parser is None:
            return
        held = len(self._raw_head)
        self._raw_head += data
        end = self._raw_head.find(_HEAD_END, max(0, held - 3)) + 4 if self._receiving is None else 0
        fed = data if end <= 3 else data[: end - held]
        try:
            parser.feed_data(fed)
        except httptools.HttpParserUpgrade:
            pass  # nobody is upgraded here: the request is answered as it stands
        except httptools.HttpParserError as error:
            self._malformed(HttpError(400, f"this is not HTTP/1.1: {error}. Send a well-formed request."))
            return
        if self._receiving is not None:
            if self._chunk_bytes > self.server.limits.body_bytes:
                self._malformed(too_large(self.server.limits.body_bytes))
            elif self.server.chunked_bytes > self.server.limits.unfinished_bytes:
                self._malformed(_UNFINISHED)
        elif self._header_bytes > _MOST_HEADER_BYTES or (end <= 3 and len(self._raw_head) > 2 * _MOST_HEADER_BYTES):
            self._malformed(HttpError(431, f"the headers exceed {_MOST_HEADER_BYTES >> 10} KiB. Send fewer."))
        elif end > 3:
            self._head_is_there(parser, bytes(self._raw_head[:end]), bytes(self._raw_head[end:]))

    def _head_is_there(self, parser: httptools.HttpRequestParser, raw: bytes, rest: bytes) -> None:
        headers = self._headers
        head = Head(parser.get_method(), self._url, headers, keep_alive=parser.should_keep_alive())
        if b"upgrade" in headers or parser.get_http_version() == "1.0":
            head.keep_alive = False
        exchange = self._begin(head)
        if b"transfer-encoding" not in headers:
            self._parser = None
            self.server.remember(raw, head)
            self._take(self._take_body(exchange, rest, 0))
            return
        self._receiving = exchange
        error = self._refusal(exchange, 0)
        if error is not None:
            self._malformed(error)
            return
        self._raw_head.clear()
        if rest:
            self._parse(rest)

    def on_url(self, url: bytes) -> None:
        self._header_bytes += len(url)
        if self._header_bytes <= _MOST_HEADER_BYTES:
            self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._header_bytes += len(name) + len(value) + 4
        if self._header_bytes <= _MOST_HEADER_BYTES:
            self._headers[name.lower()] = value

    def on_body(self, body: bytes) -> None:
        self._chunks.append(body)
        self._chunk_bytes += len(body)
        self.server.chunked_bytes += len(body)
        self._raw_head.clear()

    def on_message_complete(self) -> None:
        exchange = self._receiving
        if exchange is not None:
            self._parser = None
            exchange.body = b"".join(self._chunks)
            exchange.keep_alive = False  # what follows a chunked body is not looked for
            self._closes = True
            self._forget_chunks()
            self._complete(exchange)

    def _forget_chunks(self) -> None:
        self.server.chunked_bytes -= self._chunk_bytes
        self._chunks, self._chunk_bytes = [], 0

    def _malformed(self, error: HttpError) -> None:
        """Answer what cannot be read on, and end the connection."""
        self._closes = True
        self._parser = self._rest = None
        self._forget_chunks()
        exchange, self._receiving = self._receiving, None
        if exchange is None:
            exchange = self._begin(Head(b"", b"", {}, keep_alive=False))
        exchange.keep_alive = False
        self.server.turned_away[_REASONS.get(error.status, "other")] += 1
        self._skips = self.server.limits.body_bytes  # at most; how much it still wants to send is not known
        fail(exchange, error)

    # --- answering ----------------------------------------------------------------------------------------------

    @property
    def is_idle(self) -> bool:
        """Whether no request is under way."""
        return not self._open

    def answered(self, exchange: HttpExchange) -> None:
        """A request has its response: send it, and those behind it that have waited for it."""
        waiting = self._open
        if not waiting or waiting[0] is not exchange:
            return
        was_full = len(waiting) > _MOST_PIPELINED
        ends = False
        while waiting and waiting[0].is_answered and not ends:
            first = waiting.popleft()
            self._write(first.response)
            ends = not first.keep_alive
        self.changed_s = time.monotonic()
        if ends:
            self.end()
        elif was_full:
            self._update_reading()

    def _write(self, parts: Sequence[Buffer]) -> None:
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        if len(parts) == 1:
            transport.write(parts[0])
        else:
            transport.writelines(parts)

    def _update_reading(self) -> None:
        """Read nothing more from a client that does not take its answers, or sends ahead of them without end."""
        if self._transport is None or self._transport.is_closing():
            return
        if self._is_paused or len(self._open) > _MOST_PIPELINED:
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()

    def end(self) -> None:
        """Close the connection after what was written has left.

        From a client that is still sending, what it sends is taken and thrown away: the kernel would else reset the
        connection, and the answer would be lost with it.
        """
        self._closes = True
        if not self._skips or self.server.is_draining:
            self._close()
        elif self._transport is not None and not self._lingers and not self._transport.is_closing():
            self._lingers = True
            if self._transport.get_extra_info("sslcontext") is None:  # TLS has no half of a connection to close
                self._transport.write_eof()
            self._transport.resume_reading()

    def _close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def check_time(self, now_s: float) -> None:
        """End a connection that has taken too long for what it is doing."""
        passed_s = now_s - self.changed_s
        if self._lingers:
            if passed_s > _LINGER_S:
                self._close()
        elif self._receiving is not None:
            if passed_s > _BODY_S:
                self._malformed(HttpError(408, f"the body took more than {_BODY_S:g} s. Send it faster, or in parts."))
        elif self._parser is not None:
            if passed_s > _HEAD_S:
                self._malformed(HttpError(408, f"the headers took more than {_HEAD_S:g} s. Send them at once."))
        elif self._is_paused:
            if passed_s > _BODY_S and self._transport is not None:
                self._transport.abort()
        elif self.is_idle and passed_s > _IDLE_S:
            self.end()


class HttpServer:
    """The gateway's own listening sockets and their connections. Everything happens on one event loop."""

    def __init__(self, service: Service, arena: Arena, limits: Limits) -> None:
        """Take what answers requests, where large bodies go, and what clients may use."""
        self.service = service
        self.arena = arena
        self.limits = limits
        self.clock = ArrivalClock(asyncio.get_running_loop())
        self.heads: dict[bytes, Head] = {}
        self.chunked_bytes = 0  # of bodies that come in chunks and are not complete
        self.turned_away: Counter[str] = Counter()  # by reason: requests whose body was not wanted
        # Whoever is called with bytes in it uses them before the loop reads again.
        self.room = memoryview(bytearray(_READ_BYTES))
        self.is_draining = False
        self.date_line = b""
        self._connections: set[HttpConnection] = set()
        self._servers: dict[tuple[str, int], asyncio.Server] = {}
        self._shared: set[tuple[str, int]] = set()
        self._ticker: asyncio.TimerHandle | None = None

    def to_data(self) -> dict[str, Any]:
        """Return plain data for the status."""
        return {
            "connections": len(self._connections),
            "unfinished_bytes": self.arena.used_bytes + self.chunked_bytes,
            "turned_away": dict(self.turned_away),
        }

    @property
    def addresses(self) -> list[tuple[str, int]]:
        """Where it listens."""
        return list(self._servers)

    async def listen(
        self, host: str, port: int, *, is_shared: bool = False, tls: ssl.SSLContext | None = None
    ) -> None:
        """Listen there too; `is_shared`: with other gateways of this machine, and then with whoever else of this user
        shares it too; `tls`: encrypted.

        Raises:
            OSError: the port belongs to somebody else.
        """
        if (host, port) in self._servers:
            if ((host, port) in self._shared) == is_shared:
                return
            await self.stop_listening(host, port)
        loop = asyncio.get_running_loop()
        made = _listener(host, port, is_shared=is_shared)
        if is_shared:
            self._shared.add((host, port))
        self._servers[host, port] = await loop.create_server(
            lambda: HttpConnection(self), sock=made, backlog=4096, ssl=tls
        )
        if self._ticker is None:
            self._tick()

    async def stop_listening(self, host: str, port: int) -> None:
        """Take no more connections there."""
        server = self._servers.pop((host, port), None)
        self._shared.discard((host, port))
        if server is not None:
            server.close()

    def admit(self, connection: HttpConnection) -> bool:
        """Take note of a new connection; False when there are too many."""
        if len(self._connections) >= self.limits.connections:
            self.turned_away["full"] += 1
            return False
        self._connections.add(connection)
        return True

    def remember(self, raw: bytes, head: Head) -> None:
        """Keep a head, to know it by its bytes; those of requests with a name of their own never come again."""
        if len(raw) > _LONGEST_KEPT_HEAD_BYTES or not _OWN_NAMES.isdisjoint(head.headers):
            return
        if len(self.heads) >= _KEPT_HEADS:
            self.heads.clear()
        self.heads[raw] = head

    def forget(self, connection: HttpConnection) -> None:
        """A connection is gone."""
        self._connections.discard(connection)

    def _tick(self) -> None:
        """Once a second."""
        self.date_line = b"date: %b\r\n" % email.utils.formatdate(usegmt=True).encode()
        now_s = time.monotonic()
        for connection in list(self._connections):
            connection.check_time(now_s)
        self._ticker = asyncio.get_running_loop().call_later(1.0, self._tick)

    async def drain(self, limit_s: float) -> None:
        """Take no more connections, answer what is under way with `connection: close`, then close the rest."""
        self.is_draining = True
        for server in self._servers.values():
            server.close()
        until = time.monotonic() + limit_s
        while any(not connection.is_idle for connection in self._connections) and time.monotonic() < until:
            await asyncio.sleep(0.02)
        for connection in list(self._connections):
            connection.end()

    def close(self) -> None:
        """End all timers."""
        if self._ticker is not None:
            self._ticker.cancel()


def _listener(host: str, port: int, *, is_shared: bool) -> socket.socket:
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    made = socket.socket(family, kind, protocol)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if is_shared:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # accepted connections inherit it
        made.bind(address)
    except OSError:
        made.close()
        raise
    made.setblocking(False)
    return made
