"""HTTP/1.1 on the gateway's own socket: it reads bytes, hands requests to the service, and sends responses in order.

`tenuto.deployments.entry.framing` says where requests begin and end. A connection puts large bodies where gpu-lets can
read them, and notes when bytes arrived. Everything that a client could make grow has a bound: connections, bodies,
pipelined requests, unread answers, and the time that each of them may take.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections import deque
from collections.abc import Sequence

import msgspec

from tenuto.deployments.entry.exchange import STATUS_LINES, Exchange, Head, HttpError, fail, refuse, too_large
from tenuto.deployments.entry.framing import Framing
from tenuto.deployments.entry.http_server import (
    BODY_S,
    IDLE_S,
    MOST_PIPELINED,
    READ_BYTES,
    UNREAD_BYTES,
    ClientConnection,
    HttpServer,
    many,
)
from tenuto.deployments.entry.incoming import SLOT_BYTES, Account, IncomingBody, unfinished
from tenuto.deployments.entry.turns import MOST_WORK
from tenuto.deployments.wire.tensors import Buffer

_READ_OVER_BYTES = 1 << 12  # limit: of one that is not looked at in this turn
_JOINED_BYTES = 1 << 15  # derived: below it, one write of a joined copy costs less than a vectored one
_HEAD_S = 10.0  # limit: from the first byte of a request to the end of its headers
_LINGER_S = 5.0  # limit: for a client that goes on sending after its last answer
_REFUSED_S = 0.01  # limit: until one that has left altogether has refused what was sent; looked at again once a second
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


def _full() -> bytes:
    """Return the response to a client that finds no place."""
    error = many()
    payload, lines = error.payload(), error.lines()
    head = b"%b%bcontent-length: %d\r\nconnection: close\r\n\r\n"
    return head % (STATUS_LINES[error.status], lines, len(payload)) + payload


_FULL = _full()


class HttpExchange(Exchange, eq=False):
    """A request on our own socket. `response` is there once the request is answered."""

    _connection: HttpConnection | None = None
    keep_alive: bool = True
    is_answered: bool = False
    is_parted: bool = False  # its body is sent in chunks
    response: Sequence[Buffer] = ()
    parts: list[bytes] = msgspec.field(default_factory=list)  # of a response in parts: what has not been written yet
    part_bytes: int = 0

    @property
    def address(self) -> str:
        return "" if self._connection is None else self._connection.address

    def spend(self, samples: int) -> None:
        """Count samples beyond the first as work of this turn."""
        if self._connection is not None:
            self._connection.server.turns.spend_samples(samples)

    def respond(self, status: int, headers: bytes, payload: Sequence[Buffer]) -> None:
        """Send the response, after the responses of the requests before it."""
        if self.is_answered:
            return
        self.is_answered = True
        self.on_left = None
        if self.slot is not None:
            self.let_go()
        connection = self._connection
        if connection is None:
            return
        server = connection.server
        size = sum(map(len, payload))
        end = b"\r\n"
        if server.is_draining or not self.keep_alive:
            self.keep_alive = False
            end = b"connection: close\r\n\r\n"
        head = b"%b%b%bcontent-length: %d\r\n%b" % (STATUS_LINES[status], headers, server.date_line, size, end)
        parts = [head] if self.head.method == b"HEAD" else [head, *payload]
        self.response = [b"".join(parts)] if size <= _JOINED_BYTES else parts
        connection.answered(self)

    def begin(self, status: int, headers: bytes) -> None:
        """Send the head of a response whose body comes in parts: `send` each, then `end`."""
        self.let_go()
        connection = self._connection
        if connection is None:
            return
        framing = b"transfer-encoding: chunked\r\n"
        self.is_parted = not self.head.is_old
        if not self.is_parted or connection.server.is_draining or not self.keep_alive:
            self.keep_alive = False
            framing = (framing if self.is_parted else b"") + b"connection: close\r\n"
        self._send(b"%b%b%b%b\r\n" % (STATUS_LINES[status], headers, connection.server.date_line, framing))

    def send(self, part: bytes) -> None:
        """Send a part of the body, after the responses of the requests before it. The part must not be empty."""
        self._send(b"%x\r\n%b\r\n" % (len(part), part) if self.is_parted else part)

    def end(self) -> None:
        """Note that the body is complete."""
        self.is_answered = True
        self.on_left = None
        if self.is_parted:
            self._send(b"0\r\n\r\n")
        if self._connection is not None:
            self.response, self.parts = self.parts, []
            self._connection.answered(self)

    def _send(self, data: bytes) -> None:
        if self._connection is not None:
            self.parts.append(data)
            self.part_bytes += len(data)
            self._connection.goes_on(self)

    def leave(self) -> None:
        self._connection = None
        super().leave()


class HttpConnection(ClientConnection):
    """One client. Invariant: responses leave in the order of the requests."""

    def __init__(self, server: HttpServer) -> None:
        super().__init__(server)
        self._framing = Framing(server.heads)
        self._open: deque[HttpExchange] = deque()  # received or being received, and not answered
        self._receiving: HttpExchange | None = None  # its body is not complete
        self._body: IncomingBody | None = None  # that is not complete
        self._account: Account | None = None  # of the request that is received
        self._ahead: bytes | memoryview = b""  # received, and not looked at before others had their turn
        self._waits = False  # its turn comes
        self._is_first = False  # it is that of one who asks once
        self._chunk_bytes = 0
        self._arrived_ms = 0.0
        self._has_ended = False  # the client sends nothing more
        self._lingers = False  # the last answer has left; what still comes is thrown away
        self._is_slowed = False  # the answer to a wrong key waits

    # --- asyncio's side -----------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        if not self.server.places.admit(self):
            self._write([_FULL])
            if self._is_encrypted:  # its client might not end TLS, and it has no place
                self._closes = True
                asyncio.get_running_loop().call_soon(self.give_up)
            else:
                self._close()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._receiving = None
        self._ahead = b""
        self._forget_body()
        self._framing.close()
        if self._open and self.server.turns.left <= 0:
            self._wait()
        else:
            self._leave()

    def _leave(self) -> None:
        """Drop all requests that are open, because nobody waits for them."""
        self.server.turns.spend(len(self._open))
        while self._open:
            self._open.popleft().leave()

    def eof_received(self) -> bool:
        """Note that the client sends nothing more. It still gets what it asked for (RFC 9112, 9.6). With TLS a
        connection has no such half.

        A client that has left altogether looks the same, until something is sent to it. So it is sent an interim
        response, which a client must be able to read at any time (RFC 9110, 15.2).
        """
        self._has_ended = True
        if not self._ahead:
            self._forget_receiving()
        if self._lingers or self._is_encrypted or not (self._open or self._ahead):
            return False
        if self._open and not self._open[-1].head.is_old:
            if not self._open[0].is_parted:  # amid a response none may stand, and its next part does the same
                self._write([_CONTINUE])
            asyncio.get_running_loop().call_later(_REFUSED_S, self._look_if_gone)
        return True

    def _forget_receiving(self) -> None:
        """Drop the request that is being received: the rest of it will not come."""
        exchange, self._receiving = self._receiving, None
        self._forget_body()
        if exchange is not None:
            self._open.remove(exchange)
            exchange.leave()

    def _look_if_gone(self) -> None:
        transport = self._transport
        if transport is not None and transport.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            transport.abort()

    @property
    def _is_encrypted(self) -> bool:
        return self._transport is not None and self._transport.get_extra_info("sslcontext") is not None

    def get_buffer(self, sizehint: int) -> memoryview:
        del sizehint
        server, body = self.server, self._body
        room = server.room if body is None else body.room(server.room)
        return room if server.turns.left > 0 else room[:_READ_OVER_BYTES]

    def buffer_updated(self, nbytes: int) -> None:
        if self._closes:
            return  # thrown away
        server, body = self.server, self._body
        self._arrived_ms = server.turns.arrived_ms()
        is_placed = body is not None and body.slot is not None
        came = body.room(server.room)[:nbytes] if body is not None and is_placed else bytes(server.room[:nbytes])
        if server.turns.left <= 0:
            self._ahead = came
            self._wait()
            self._update_reading()
        else:
            self._look_at(came)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._open:
            self.goes_on(self._open[0])

    # --- receiving ----------------------------------------------------------------------------------------------

    def _wait(self) -> None:
        """Wait for a later turn."""
        self._waits = self._is_first = True
        self.server.turns.wait(self)

    def go_on(self) -> None:
        """Look at bytes that were received earlier, now that others have had their turn."""
        is_first, self._is_first, self._waits = self._is_first, False, False
        if self._transport is None:
            self._leave()
            return
        if len(self._open) > MOST_PIPELINED or self._is_paused:
            return  # not yet
        came, self._ahead = self._ahead, b""
        if came and not self._closes:
            if is_first or self._body is not None:
                self._look_at(came)
            else:
                self._take(bytes(came), MOST_PIPELINED)
            self._update_reading()
            self._end_if_over()

    def _look_at(self, came: bytes | memoryview) -> None:
        """Take the bytes of one read. At most one request of them is looked at now."""
        body = self._body
        if body is None:
            self._take(bytes(came), 1)
            return
        self.server.turns.spend(1)
        try:
            self._framing.body(came)
            body.came(came)
        except HttpError as error:
            self._malformed(error)
        else:
            if not body.missing and self._receiving is not None:
                self._complete(self._receiving)

    def _take(self, data: bytes, most: int) -> None:
        """Take bytes that begin a request or go on with one. At most `most` requests are taken; the bytes behind them
        wait for a later turn."""
        try:
            while True:
                self.server.turns.spend(1)
                data = self._take_one(data)
                if not data or self._closes:
                    return
                most -= 1
                if not most or len(self._open) > MOST_PIPELINED or self.server.turns.left <= -MOST_WORK:
                    break
        except HttpError as error:
            self._malformed(error)
            return
        self._ahead = data
        self._update_reading()

    def _take_one(self, data: bytes) -> bytes:
        """Take bytes of one request, and return what follows them."""
        framing = self._framing
        if framing.chunks is not None:
            self._take_chunks(data)
            return b""
        if framing.left:  # of a body that nobody wants
            unwanted, data = data[: framing.left], data[framing.left :]
            framing.body(unwanted)
            return data
        if not framing.is_amid_head:
            self.changed_s = self._arrived_ms / 1000.0
        found = framing.head(data)
        if found is None:
            return b""
        head, at = found
        exchange, end = self._begin(head), at + head.length
        error = self._refusal(exchange, head.length)
        if error is not None:
            self._turn_away(exchange, error)
        elif framing.is_over and head.length < SLOT_BYTES:
            exchange.body = data[at:end]
            self._complete(exchange)
        else:
            self._receive(exchange, data[at:end])
        return data[end:]

    def _begin(self, head: Head) -> HttpExchange:
        exchange = HttpExchange(head, self._arrived_ms, _connection=self, keep_alive=head.keep_alive)
        self._open.append(exchange)
        if len(self._open) > MOST_PIPELINED:
            self._update_reading()
        return exchange

    def _turn_away(self, exchange: HttpExchange, error: HttpError) -> None:
        """Refuse a request before its body has come."""
        head = exchange.head
        if head.is_chunked and not error.after_s:
            self._receiving = exchange
            self._malformed(error)
            return
        self.server.count_refusal(error)
        if head.expects or error.after_s:
            exchange.keep_alive = False  # nobody knows whether its body comes; and one wrong key is enough
        self._closes = not exchange.keep_alive
        self._fail(exchange, error)

    def _receive(self, exchange: HttpExchange, came: bytes) -> None:
        """Keep what has come of a body, and make room for the rest."""
        head, self._receiving = exchange.head, exchange
        account = self._account = self.server.account(self, exchange.key)
        if head.is_chunked:
            return
        body = self._body = IncomingBody(self.server.arena, account, head.length)
        body.take(came)
        if not body.missing:
            self._complete(exchange)
            return
        self.changed_s = self._arrived_ms / 1000.0
        if head.expects and len(self._open) == 1 and not came:
            self._write([_CONTINUE])

    def _refusal(self, exchange: HttpExchange, length: int) -> HttpError | None:
        """Return why the body need not come."""
        limits = self.server.limits
        if length > limits.most_body_bytes:
            return too_large(limits.most_body_bytes)
        error = self.server.service.refusal(exchange)
        if error is None and exchange.key and not self.show_key():
            error = many()
        if error is None and length >= SLOT_BYTES and not self.server.account(self, exchange.key).has_room(length):
            error = unfinished()
        return error

    def _complete(self, exchange: HttpExchange) -> None:
        """Let the service answer a request that is whole."""
        body, self._receiving, self._body = self._body, None, None
        if body is not None:
            exchange.body = body.data
            if body.slot is not None:
                exchange.slot = body.slot  # which it releases
            else:
                body.release()
        self._closes = not exchange.keep_alive
        exchange.arrived_ms = self._arrived_ms
        if len(exchange.body) > _READ_OVER_BYTES:
            self.server.turns.spend(0, min(len(exchange.body), READ_BYTES))  # larger ones are read aside
        try:
            self.server.service.handle(exchange)
        except Exception as error:
            refuse(exchange, error)

    def _take_chunks(self, data: bytes) -> None:
        framing, exchange, server = self._framing, self._receiving, self.server
        assert framing.chunks is not None
        assert exchange is not None
        server.turns.spend(0, len(data))
        is_whole = framing.chunked(data)
        if len(framing.chunks) > server.limits.most_body_bytes:
            raise too_large(server.limits.most_body_bytes)
        assert self._account is not None
        self._account.take(len(framing.chunks) - self._chunk_bytes)
        self._chunk_bytes = len(framing.chunks)
        if is_whole:
            exchange.body = bytes(framing.chunks) if len(framing.chunks) < SLOT_BYTES else memoryview(framing.chunks)
            exchange.keep_alive = False  # what follows a chunked body is not looked for
            self._forget_body()
            self._complete(exchange)

    def _forget_body(self) -> None:
        """Forget what has come of a body that is over."""
        if self._body is not None:
            self._body.release()
        if self._account is not None:
            self._account.give(self._chunk_bytes)
        self._body = self._account = self._framing.chunks = None
        self._chunk_bytes = 0

    def _malformed(self, error: HttpError) -> None:
        """Refuse a request behind which nothing can be read, and end the connection."""
        self._closes = True
        self._forget_body()
        exchange, self._receiving = self._receiving, None
        if exchange is None:
            exchange = self._begin(Head(b"", b"", {}, keep_alive=False))
        exchange.keep_alive = False
        self.server.count_refusal(error)
        fail(exchange, error)

    # --- answering ----------------------------------------------------------------------------------------------

    def _fail(self, exchange: HttpExchange, error: HttpError) -> None:
        if error.after_s:
            self._is_slowed = True
            asyncio.get_running_loop().call_later(error.after_s, fail, exchange, error)
        else:
            fail(exchange, error)

    @property
    def gives_way(self) -> bool:
        return not self._open or self._is_slowed

    @property
    def is_idle(self) -> bool:
        return not self._open

    def answered(self, exchange: HttpExchange) -> None:
        """Send the response of a request, and the responses behind it that waited for this one."""
        waiting = self._open
        if not waiting or waiting[0] is not exchange:
            self._count_untaken()
            return
        was_full = len(waiting) > MOST_PIPELINED
        while True:
            waiting.popleft()
            self._write(exchange.response)
            if not exchange.keep_alive or not waiting or not waiting[0].is_answered:
                break
            exchange = waiting[0]
        if not self._is_paused:
            self.changed_s = time.monotonic()
        if self._is_paused or waiting:
            self._count_untaken()
        self.server.places.has_asked(self)
        if exchange.keep_alive and waiting:
            self.goes_on(waiting[0])
        if not exchange.keep_alive:
            self.end()
        elif was_full:
            self._update_reading()
        if self._has_ended:
            self._end_if_over()

    def goes_on(self, exchange: HttpExchange) -> None:
        """Send the parts of a response that are there, when it is the first in line and its client reads. A client that
        reads too slowly is given up, and its requests are dropped."""
        if not exchange.parts:
            return
        if self._is_paused or not self._open or self._open[0] is not exchange:
            if exchange.part_bytes > UNREAD_BYTES and self._transport is not None:
                self.server.turned_away["slow"] += 1
                self.give_up()
        else:
            self._write(exchange.parts)
            exchange.parts, exchange.part_bytes = [], 0
            self.changed_s = time.monotonic()
            if self._has_ended:
                asyncio.get_running_loop().call_later(_REFUSED_S, self._look_if_gone)

    def _waiting_bytes(self) -> int:
        return sum([len(part) for exchange in self._open for part in exchange.response])

    def _end_if_over(self) -> None:
        """End the connection when its client sends nothing more and has all its answers."""
        if self._has_ended and not self._ahead:
            self._forget_receiving()
            if not self._open:
                self._close()

    def _write(self, parts: Sequence[Buffer]) -> None:
        transport = self._transport
        if transport is None or transport.is_closing() or not parts:
            return
        if len(parts) == 1:
            transport.write(parts[0])
        else:
            transport.writelines(parts)

    def _update_reading(self) -> None:
        """Stop reading from a client that does not take its answers or sends too far ahead of them; read on when it no
        longer does."""
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        waits = self._is_paused or len(self._open) > MOST_PIPELINED
        if waits or self._ahead:
            transport.pause_reading()
        else:
            transport.resume_reading()
        if self._ahead and not waits and not self._waits:
            self._waits = True
            self.server.turns.wait_behind(self)

    def end(self) -> None:
        """Close the connection when all that was written has left and the client has closed its half (9.6).

        What the client still sends is read and thrown away. Otherwise the kernel would reset the connection, and the
        client would lose the answer.
        """
        self._closes = True
        self._ahead = b""
        if self._has_ended or self.server.is_draining or self._is_encrypted:
            self._close()
        elif self._transport is not None and not self._lingers and not self._transport.is_closing():
            self._lingers = True
            with contextlib.suppress(OSError):  # the client has reset it
                self._transport.write_eof()
            self._transport.resume_reading()

    def check_time(self, now_s: float) -> None:
        passed_s = now_s - self.changed_s
        if self._has_ended:
            self._look_if_gone()
        if self._lingers:
            if passed_s > _LINGER_S:
                self._close()
        elif self._receiving is not None:
            if passed_s > BODY_S:
                self._malformed(HttpError(408, f"the body took more than {BODY_S:g} s. Send it faster, or in parts."))
        elif self._framing.is_amid_head:
            if passed_s > _HEAD_S:
                self._malformed(HttpError(408, f"the headers took more than {_HEAD_S:g} s. Send them at once."))
        elif self._is_paused or self._framing.left:
            if passed_s > BODY_S:
                self.give_up()
        elif self.is_idle and passed_s > IDLE_S:
            self.end()
