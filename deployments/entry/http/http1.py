"""HTTP/1.1 on the gateway's own socket: it reads bytes, hands requests to the service, and sends responses.

A connection has one request at a time: the next one is read when the answer of the one before has been sent (RFC 9112,
9.3.2, allows it). `framing` says where requests begin and end. A connection puts large bodies where gpu-lets can read
them, and notes when bytes arrived. Everything that a client could make grow has a bound: connections, bodies, bytes
behind a request, unread answers, and the time that each of them may take. So slow clients end by timeouts, and a stream
that nobody reads is given up (backpressure).
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Sequence

import msgspec

from tenuto.deployments.entry.http.body_memory import SLOT_BYTES, Account, IncomingBody, unfinished
from tenuto.deployments.entry.http.exchange import STATUS_LINES, Exchange, Head, HttpError, fail, refuse, too_large
from tenuto.deployments.entry.http.framing import Framing
from tenuto.deployments.entry.http.relay import Relay, is_relayed
from tenuto.deployments.entry.http.server import (
    BODY_S,
    IDLE_S,
    READ_BYTES,
    UNREAD_BYTES,
    ClientConnection,
    HttpServer,
    many,
)
from tenuto.deployments.wire.tensors import Buffer

_READ_OVER_BYTES = 1 << 12  # limit: of one read that is not looked at in this turn, or before an answer has been sent
_JOINED_BYTES = 1 << 15  # derived: below it, one write of a joined copy costs less than a vectored one
_HEAD_S = 10.0  # limit: from the first byte of a request to the end of its headers
_LINGER_S = 5.0  # limit: for a client that goes on sending after its last answer
_REFUSED_S = 0.01  # pace: until one that has left altogether has refused what was sent; looked at again once a second
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


def _full() -> bytes:
    """Return the response to a client that finds no place."""
    error = many()
    payload, lines = error.payload(), error.lines()
    head = b"%b%bcontent-length: %d\r\nconnection: close\r\n\r\n"
    return head % (STATUS_LINES[error.status], lines, len(payload)) + payload


_FULL = _full()


class HttpExchange(Exchange, eq=False):
    """A request on our own socket."""

    _connection: HttpConnection | None = None
    keep_alive: bool = True
    is_answered: bool = False
    is_parted: bool = False  # its body is sent in chunks
    parts: list[bytes] = msgspec.field(default_factory=list)  # of a response in parts: what has not been written yet
    part_bytes: int = 0

    @property
    def address(self) -> str:
        return "" if self._connection is None else self._connection.address

    def spend(self, samples: int) -> None:
        """Count samples beyond the first as work of this turn."""
        if self._connection is not None:
            self._connection.server.budget.spend_samples(samples)

    def respond(self, status: int, headers: bytes, payload: Sequence[Buffer]) -> None:
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
        connection.answer(self, [b"".join(parts)] if size <= _JOINED_BYTES else parts)

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
        """Send a part of the body. The part must not be empty."""
        self._send(b"%x\r\n%b\r\n" % (len(part), part) if self.is_parted else part)

    def end(self) -> None:
        """Note that the body is complete."""
        if self.is_answered:
            return
        if self.is_parted:
            self._send(b"0\r\n\r\n")
        self.is_answered = True
        self.on_left = None
        if self._connection is not None:
            self._connection.answer(self, self.parts)

    def _send(self, data: bytes) -> None:
        if self._connection is not None and not self.is_answered:
            self.parts.append(data)
            self.part_bytes += len(data)
            self._connection.send_parts(self)

    def leave(self) -> None:
        self._connection = None
        super().leave()


class HttpConnection(ClientConnection):
    """One client. Invariant: at most one of its requests is open, so responses leave in the order of the requests."""

    def __init__(self, server: HttpServer) -> None:
        super().__init__(server)
        self._framing = Framing(server.heads)
        self._open: HttpExchange | None = None  # received or being received, and not answered
        self._is_receiving = False  # the body of the open request is not complete
        self._body: IncomingBody | None = None  # that is not complete
        self._account: Account | None = None  # of the request that is received
        self._unread: bytes | memoryview = b""  # received before its turn, or before the answer of the request before
        self._waits = False  # its turn comes
        self._chunk_bytes = 0
        self._arrived_ms = 0.0
        self._has_ended = False  # the client sends nothing more
        self._lingers = False  # the last answer has left; what still comes is thrown away
        self._is_slowed = False  # the answer to a wrong key waits
        self._relay: Relay | None = None  # the open request goes on to the store of batches

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
        self._is_receiving = False
        self._unread = b""
        self._forget_body()
        self._framing.close()
        if self._open is not None and self.server.budget.left <= 0:
            self._wait()
        else:
            self._leave()

    def _leave(self) -> None:
        """Drop the request that is open, because nobody waits for it."""
        exchange, self._open = self._open, None
        if exchange is not None:
            self.server.budget.spend(1)
            exchange.leave()

    def eof_received(self) -> bool:
        """Note that the client sends nothing more. It still gets what it asked for (RFC 9112, 9.6). With TLS a
        connection has no such half.

        A client that has left altogether looks the same, until something is sent to it. So it is sent an interim
        response, which a client must be able to read at any time (RFC 9110, 15.2).
        """
        self._has_ended = True
        exchange = self._open
        if not self._unread:
            exchange = self._forget_receiving()
        if self._lingers or self._is_encrypted or (exchange is None and not self._unread):
            return False
        if exchange is not None and not exchange.head.is_old:
            if not exchange.is_parted:  # amid a response none may stand, and its next part does the same
                self._write([_CONTINUE])
            asyncio.get_running_loop().call_later(_REFUSED_S, self._look_if_gone)
        return True

    def _forget_receiving(self) -> HttpExchange | None:
        """Drop the request that is being received: the rest of it will not come. Return the request that is open."""
        self._forget_body()
        if self._is_receiving:
            self._is_receiving = False
            self._leave()
        return self._open

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
        is_full = server.budget.left <= 0 or (self._awaits_answer and self._relay is None)
        return room[:_READ_OVER_BYTES] if is_full else room

    def buffer_updated(self, nbytes: int) -> None:
        if self._closes:
            return  # thrown away
        server, body = self.server, self._body
        if self._relay is not None:
            self.changed_s = time.monotonic()
            server.budget.spend(0, nbytes)
            self._relay.write(bytes(server.room[:nbytes]))
            return
        self._arrived_ms = server.budget.arrived_ms()
        is_placed = body is not None and body.slot is not None
        came = body.room(server.room)[:nbytes] if body is not None and is_placed else bytes(server.room[:nbytes])
        if server.budget.left <= 0 or self._awaits_answer:
            self._unread = b"".join((self._unread, came)) if self._unread else came
            self._update_reading()
        else:
            self._look_at(came)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._open is not None:
            self.send_parts(self._open)

    # --- receiving ----------------------------------------------------------------------------------------------

    @property
    def _awaits_answer(self) -> bool:
        """Whether a whole request has no answer yet. What comes behind it is not looked at."""
        return self._open is not None and not self._is_receiving

    def _wait(self) -> None:
        """Wait for a later turn."""
        if not self._waits:
            self._waits = True
            self.server.budget.wait(self)

    def resume(self) -> None:
        """Look at bytes that were received earlier, now that others have had their turn."""
        self._waits = False
        if self._transport is None:
            self._leave()
            return
        if self._is_paused:
            return  # not yet
        came, self._unread = self._unread, b""
        if came and not self._closes:
            self._look_at(came)
            self._update_reading()
            self._end_if_over()

    def _look_at(self, came: bytes | memoryview) -> None:
        """Take bytes of one request. Those behind it wait for its answer, and for a later turn."""
        self.server.budget.spend(1)
        body = self._body
        try:
            if body is None:
                self._take(bytes(came))
                if self._closes:
                    self._unread = b""
                elif self._unread:
                    self._update_reading()
                return
            self._framing.body(came)
            body.came(came)
        except HttpError as error:
            self._malformed(error)
        else:
            if not body.missing:
                self._complete()

    def _take(self, data: bytes) -> None:
        """Take bytes that begin a request or go on with one. What follows them is `_unread`."""
        framing = self._framing
        if framing.chunks is not None:
            self._take_chunks(data)
            return
        if framing.left:  # of a body that nobody wants
            unwanted, self._unread = data[: framing.left], data[framing.left :]
            framing.body(unwanted)
            return
        if not framing.is_amid_head:
            self.changed_s = self._arrived_ms / 1000.0
        framed = framing.head(data)
        if framed is None:
            return
        head, at = framed
        exchange, end = self._begin(head), at + head.length
        self._unread = data[end:]
        goes_on = self.server.store is not None and is_relayed(head.url)
        error = self._refusal(exchange, 0 if goes_on else head.length)
        if error is not None:
            self._turn_away(exchange, error)
        elif goes_on:
            self._unread = b""
            self._hand_on(exchange, data[at:])
        elif framing.is_over and head.length < SLOT_BYTES:
            exchange.body = data[at:end]
            self._complete()
        else:
            self._receive(exchange, data[at:end])

    def _begin(self, head: Head) -> HttpExchange:
        exchange = self._open = HttpExchange(head, self._arrived_ms, _connection=self, keep_alive=head.keep_alive)
        return exchange

    def _turn_away(self, exchange: HttpExchange, error: HttpError) -> None:
        """Refuse a request before its body has come."""
        head = exchange.head
        if head.is_chunked and not error.after_s:
            self._is_receiving = True
            self._malformed(error)
            return
        self.server.count_refusal(error)
        if head.expects or error.after_s:
            exchange.keep_alive = False  # nobody knows whether its body comes; and one wrong key is enough
        self._closes = not exchange.keep_alive
        self._fail(exchange, error)

    def _receive(self, exchange: HttpExchange, came: bytes) -> None:
        """Keep what has come of a body, and make room for the rest."""
        head, self._is_receiving = exchange.head, True
        account = self._account = self.server.account(self, exchange.key)
        if head.is_chunked:
            return
        body = self._body = IncomingBody(self.server.arena, account, head.length)
        body.take(came)
        if not body.missing:
            self._complete()
            return
        self.changed_s = self._arrived_ms / 1000.0
        if head.expects and not came:
            self._write([_CONTINUE])

    def _refusal(self, exchange: HttpExchange, length: int) -> HttpError | None:
        """Return why the body need not come, of which so many bytes are to be kept."""
        limits = self.server.limits
        if length > limits.most_body_bytes:
            return too_large(limits.most_body_bytes)
        error = self.server.service.refusal(exchange)
        if error is None and exchange.key and not self.show_key():
            error = many()
        if error is None and length >= SLOT_BYTES and not self.server.account(self, exchange.key).has_room(length):
            error = unfinished()
        return error

    def _complete(self) -> None:
        """Let the service answer the open request, which is whole."""
        exchange, body = self._open, self._body
        assert exchange is not None
        self._is_receiving, self._body = False, None
        if body is not None:
            exchange.body = body.data
            if body.slot is not None:
                exchange.slot = body.slot  # which it releases
            else:
                body.release()
        self._closes = not exchange.keep_alive
        exchange.arrived_ms = self._arrived_ms
        if len(exchange.body) > _READ_OVER_BYTES:
            self.server.budget.spend(0, min(len(exchange.body), READ_BYTES))  # larger ones are read aside
        try:
            self.server.service.handle(exchange)
        except Exception as error:
            refuse(exchange, error)

    def _take_chunks(self, data: bytes) -> None:
        framing, exchange, server = self._framing, self._open, self.server
        assert framing.chunks is not None
        assert exchange is not None
        server.budget.spend(0, len(data))
        is_whole = framing.take_chunks(data)
        if len(framing.chunks) > server.limits.most_body_bytes:
            raise too_large(server.limits.most_body_bytes)
        assert self._account is not None
        self._account.take(len(framing.chunks) - self._chunk_bytes)
        self._chunk_bytes = len(framing.chunks)
        if is_whole:
            exchange.body = bytes(framing.chunks) if len(framing.chunks) < SLOT_BYTES else memoryview(framing.chunks)
            exchange.keep_alive = False  # what follows a chunked body is not looked for
            self._forget_body()
            self._complete()

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
        self._is_receiving = False
        exchange = self._open or self._begin(Head(b"", b"", {}, keep_alive=False))
        exchange.keep_alive = False
        self.server.count_refusal(error)
        fail(exchange, error)

    # --- going on to the store of batches -----------------------------------------------------------------------

    def _hand_on(self, exchange: HttpExchange, came: bytes) -> None:
        assert self.server.store is not None
        self._framing.chunks = None
        exchange.keep_alive, exchange.is_parted = False, True
        relay = self._relay = Relay(self)
        exchange.on_left = relay.drop
        relay.begin(self.server.store, exchange.head, exchange.key, came)

    def take_relayed(self, data: bytes) -> None:
        self.changed_s = time.monotonic()
        self._write([data])

    def pause_relayed(self, *, pauses: bool) -> None:
        transport = self._transport
        if transport is not None and not transport.is_closing() and not self._has_ended:
            (transport.pause_reading if pauses else transport.resume_reading)()

    def end_relayed(self, error: HttpError | None) -> None:
        exchange, self._relay = self._open, None
        if exchange is None:
            return
        if error is not None:
            fail(exchange, error)
            return
        exchange.is_answered, exchange.on_left = True, None
        self.answer(exchange, ())

    # --- answering ----------------------------------------------------------------------------------------------

    def _fail(self, exchange: HttpExchange, error: HttpError) -> None:
        if error.after_s:
            self._is_slowed = True
            asyncio.get_running_loop().call_later(error.after_s, fail, exchange, error)
        else:
            fail(exchange, error)

    @property
    def gives_way(self) -> bool:
        return self._is_slowed or (self._open is None and not self._waits)

    @property
    def is_idle(self) -> bool:
        return self._open is None

    def answer(self, exchange: HttpExchange, response: Sequence[Buffer]) -> None:
        """Send the response of the open request, or its last parts. The next request may be read."""
        self._open = None
        self._write(response)
        if self._is_paused:
            self._count_untaken()
        else:
            self.changed_s = time.monotonic()
        self.server.places.note_use(self)
        if not exchange.keep_alive:
            self.end()
        elif self._unread:
            self._arrived_ms = time.monotonic() * 1000.0  # it is read now
            self._update_reading()
        if self._has_ended:
            self._end_if_over()

    def send_parts(self, exchange: HttpExchange) -> None:
        """Send the parts of a response that are there, when its client reads. A client that reads too slowly is given
        up, and its request is dropped."""
        if not exchange.parts:
            return
        if self._is_paused:
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
        return 0  # whatever is answered lies in the transport

    def _end_if_over(self) -> None:
        """End the connection when its client sends nothing more and has all its answers."""
        if self._has_ended and not self._unread and self._forget_receiving() is None:
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
        """Stop reading from a client that does not take its answers or has sent much ahead of them; read on when it no
        longer does. A little is read even before the answer, because the end of a connection is seen only by reading.
        """
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        if self._relay is not None:
            self._relay.pause(pauses=self._is_paused)
            return
        is_next = bool(self._unread) and not self._awaits_answer
        if is_next and not self._is_paused:
            self._wait()
        if self._has_ended:
            return
        if self._is_paused or is_next or len(self._unread) >= _READ_OVER_BYTES:
            transport.pause_reading()
        else:
            transport.resume_reading()

    def end(self) -> None:
        """Close the connection when all that was written has left and the client has closed its half (9.6).

        What the client still sends is read and thrown away. Otherwise the kernel would reset the connection, and the
        client would lose the answer.
        """
        self._closes = True
        self._unread = b""
        if self._has_ended or self.server.is_draining or self._is_encrypted:
            self._close()
        elif self._transport is not None and not self._lingers and not self._transport.is_closing():
            self._lingers = True
            with contextlib.suppress(OSError):  # the client has reset it
                self._transport.write_eof()
            self._transport.resume_reading()

    def check_time(self, now_s: float) -> None:
        passed_s = now_s - self.changed_s
        if self._has_ended or self._unread:
            self._look_if_gone()
        if self._relay is not None:
            if passed_s > BODY_S:
                self.give_up()
        elif self._lingers:
            if passed_s > _LINGER_S:
                self._close()
        elif self._is_receiving:
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
