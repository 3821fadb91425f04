"""Frames between our processes: a length prefix, one message (`tenuto.deployments.wire.messages`), and raw bytes.

Nothing is pickled. A process that connects must first send `Hello` with the token that Ray handed out, in time and in a
small frame; before that, nothing is allocated for it. The owner of a connection says how large bodies may be, by what
its models can need (`limit_bodies`); until then no body is taken. `FrameProtocol` is the end of a connection on an
event loop, `FrameSocket` the end in a thread that waits for nothing else. Both send `Beat` when they have nothing else
to send, and can notice that a peer has fallen silent (`tenuto.deployments.wire.liveness`).
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hmac
import logging
import select
import socket
import struct
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import cast

import msgspec
import numpy as np

from tenuto.deployments.wire.encryption import Identity, TlsSocket, ended_after, pinned_context
from tenuto.deployments.wire.liveness import BEAT_S, GIVEN_UP_S, LEASE_S, Silence, end_if_stopped, process_behind
from tenuto.deployments.wire.messages import Beat, Hello, Message, decode, encode
from tenuto.deployments.wire.tensors import Buffer

logger = logging.getLogger("ray.serve")

_PREFIX = struct.Struct("<IQ")  # bytes of the message, bytes of the body
_FIRST_FRAME_BYTES = 4096  # limit: bytes that a peer without a token may send
FIRST_FRAME_S = 5.0  # limit: time for a new peer to send its token
_MOST_MESSAGE_BYTES = 1 << 24  # limit: bytes of a message, without its tensors
_ROOM_BYTES = 1 << 16  # limit: bytes of one read from a socket
_JOINED_BYTES = 1 << 15  # derived: below this, to join the buffers and write once costs less than a vectored write
_LARGE_BYTES = 16 << 20  # derived: larger bodies reuse memory, as fresh pages would cost more than the copy
# limit: s without an acknowledgement from another machine, after which the machine or the way to it counts as lost
_UNHEARD_S = 1
_COUNT = struct.Struct("i")
_ACKNOWLEDGED = struct.Struct("120xQ")  # in Linux' tcp_info: bytes that the other machine has acknowledged
_TIME = struct.Struct("ll")  # s, us
_GONE = OSError, ValueError  # errors of a socket that the other end, or another thread here, has closed
_NO_LINGERING = struct.pack("ii", 1, 0)  # an aborted connection drops bytes that were not sent yet
NO_BYTES = memoryview(b"")

# A name in the abstract Unix namespace (the first byte is zero), or (host, port).
Address = str | tuple[str, int]


class WrongFrameError(Exception):
    """The peer does not speak this protocol, or sends more than it may."""


class _LargeBodies:
    """Keeps the memory of large bodies and reuses it once nothing refers to it any more.

    The C library gives blocks over 32 MiB back to the system at once and gets new ones page by page. For 50 MB that
    took longer than the transfer. A view keeps its array alive, so the reference count tells whether it is in use.
    """

    _KEPT = 2  # derived: one batch runs, one waits behind it

    def __init__(self) -> None:
        self._arrays: list[np.ndarray[tuple[int], np.dtype[np.uint8]]] = []

    def take(self, size: int) -> memoryview:
        """Return `size` bytes of any content."""
        for array in self._arrays:
            # Three references: the list's, this loop's, and the call's own.
            if array.nbytes >= size and sys.getrefcount(array) == 3:
                return array.data[:size]
        array = np.empty(size, np.uint8)
        self._arrays = [*self._arrays[-(self._KEPT - 1) :], array]
        return array.data


class FrameReader:
    """Cuts received bytes into frames. A body that does not fit the room is received into memory of its own.

    Write bytes into `room()`, call `received` with their number, then call `next_frame` until it returns None.
    """

    def __init__(self, most_body_bytes: int = 0) -> None:
        self.most_message_bytes = _MOST_MESSAGE_BYTES
        self.most_body_bytes = most_body_bytes
        self._room = memoryview(bytearray(_ROOM_BYTES))
        self._start = self._end = 0
        self._message: Message | None = None
        self._body = NO_BYTES
        self._filled = 0
        self._large = _LargeBodies()

    def room(self) -> memoryview:
        """Return the memory for the next bytes; never empty."""
        return self._room[self._end :] if self._message is None else self._body[self._filled :]

    @property
    def is_amid_body(self) -> bool:
        """Whether a body that did not fit the room is only received in part."""
        return self._message is not None

    def received(self, count: int) -> None:
        """Take note of bytes that were written into the room."""
        if self._message is None:
            self._end += count
        else:
            self._filled += count

    def next_frame(self) -> tuple[Message, memoryview] | None:
        """Return the next complete frame, or None. The caller may keep the body.

        Raises:
            WrongFrameError: the connection must be closed.
        """
        if self._message is not None:
            if self._filled < len(self._body):
                return None
            frame = (self._message, self._body)
            self._message, self._body = None, NO_BYTES
            return frame
        held = self._end - self._start
        if held < _PREFIX.size:
            self._make_room(_PREFIX.size)
            return None
        message_bytes, body_bytes = _PREFIX.unpack_from(self._room, self._start)
        if message_bytes > self.most_message_bytes or body_bytes > self.most_body_bytes:
            raise WrongFrameError(f"a frame of {message_bytes} and {body_bytes} bytes")
        if held < _PREFIX.size + message_bytes:
            self._make_room(_PREFIX.size + message_bytes)
            return None
        begin = self._start + _PREFIX.size
        end = begin + message_bytes
        try:
            message = decode(self._room[begin:end])
        except msgspec.DecodeError as error:
            raise WrongFrameError(str(error)) from error
        self._start = end
        if body_bytes > self._end - end:
            self._receive_body(message, body_bytes)
            return None
        self._start = end + body_bytes
        return message, memoryview(bytes(self._room[end : self._start])) if body_bytes else NO_BYTES

    def _receive_body(self, message: Message, size: int) -> None:
        self._message = message
        self._body = self._large.take(size) if size > _LARGE_BYTES else np.empty(size, np.uint8).data
        self._filled = self._end - self._start
        self._body[: self._filled] = self._room[self._start : self._end]
        self._start = self._end = 0

    def _make_room(self, needed: int) -> None:
        """Make sure that `needed` bytes of the present frame fit into the room. If not, move its bytes to the front."""
        if self._start == self._end:
            self._start = self._end = 0
        if len(self._room) - self._start >= needed and self._end < len(self._room):
            return
        held = bytes(self._room[self._start : self._end])
        if needed > len(self._room):
            self._room = memoryview(bytearray(needed))
        self._room[: len(held)] = held
        self._start, self._end = 0, len(held)


def framed(message: Message, buffers: Sequence[Buffer]) -> list[Buffer]:
    """Return the bytes of a frame, as one buffer when joining is cheaper."""
    encoded = encode(message)
    size = sum([memoryview(buffer).nbytes for buffer in buffers])
    head = _PREFIX.pack(len(encoded), size) + encoded
    if size <= _JOINED_BYTES:
        return [b"".join([head, *buffers])]
    return [head, *buffers]


class _End:
    """Base of both kinds of ends: a reader of frames, and the watch over a peer that may fall silent."""

    def __init__(self, pid: int = 0) -> None:
        self._reader = FrameReader()
        self._has_sent = self._has_heard = False  # since the last tick
        self._pid = pid  # of a peer on this machine
        self._silence: Silence | None = None

    def watch(self) -> None:
        """Give the peer up when it has sent nothing for `GIVEN_UP_S`, unless it waited for a processor. Then the
        connection is aborted; if the peer is a stopped process of this machine, it is killed."""
        self._silence = Silence(self._pid)

    def limit_bodies(self, most_bytes: int) -> None:
        """Take bodies of up to `most_bytes` from now on; a longer one closes the connection. Any thread may call this.
        The limit never sinks, as a body under the earlier limit may be on its way."""
        self._reader.most_body_bytes = max(self._reader.most_body_bytes, most_bytes)


class FrameProtocol(_End, asyncio.BufferedProtocol):
    """One end of a connection, on an event loop.

    `on_message(protocol, message, body)` is called for every frame, and `on_lost(protocol, error)` once at the end.
    After the greeting it sends beats. After `watch` it ends by itself when the peer falls silent.
    """

    def __init__(
        self,
        on_message: Callable[[FrameProtocol, Message, memoryview], None],
        on_lost: Callable[[FrameProtocol, BaseException | None], None],
        *,
        expect_token: str | None = None,
        on_hello: Callable[[FrameProtocol, Hello], None] = lambda _protocol, _hello: None,
    ) -> None:
        """Prepare for a connection.

        Args:
            on_message: see above.
            on_lost: see above.
            expect_token: for the listening side: the token that the peer must present before anything else is taken.
            on_hello: called when the token was accepted.
        """
        super().__init__()
        self._on_message = on_message
        self._on_lost = on_lost
        self._expect_token = expect_token
        self._on_hello = on_hello
        self._transport: asyncio.Transport | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._ticker: asyncio.TimerHandle | None = None
        self._ending: TimeoutError | None = None
        if expect_token is not None:
            self._reader.most_message_bytes = _FIRST_FRAME_BYTES

    # asyncio calls the four methods below.
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transports do not derive from asyncio's
        connection = transport.get_extra_info("socket")
        _notice_loss(connection)
        self._pid = process_behind(connection)
        if self._expect_token is not None:
            self._deadline = asyncio.get_running_loop().call_later(FIRST_FRAME_S, self._refuse, "it said nothing")
        else:
            self._begin_to_beat()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        for timer in (self._deadline, self._ticker):
            if timer is not None:
                timer.cancel()
        self._on_lost(self, self._ending or exc)

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002
        return self._reader.room()

    def buffer_updated(self, nbytes: int) -> None:
        self._has_heard = True
        self._reader.received(nbytes)
        try:
            while self._transport is not None and (frame := self._reader.next_frame()) is not None:
                message, body = frame
                if type(message) is Beat:
                    continue
                if self._expect_token is None:
                    self._on_message(self, message, body)
                elif isinstance(message, Hello) and _is_same(message.token, self._expect_token):
                    self._greeted(message)
                else:
                    raise WrongFrameError("its token is wrong")
        except WrongFrameError as error:
            self._refuse(str(error))

    def _greeted(self, hello: Hello) -> None:
        self._expect_token = None
        if self._deadline is not None:
            self._deadline.cancel()
        self._reader.most_message_bytes = _MOST_MESSAGE_BYTES
        self._begin_to_beat()
        self._on_hello(self, hello)

    def _begin_to_beat(self) -> None:
        self._ticker = asyncio.get_running_loop().call_later(BEAT_S, self._tick)

    def _tick(self) -> None:
        if self._transport is None:
            return
        self._begin_to_beat()
        if not self._has_sent and self.is_connected:
            self.send(Beat())
        self._has_sent = False
        has_heard, self._has_heard = self._has_heard, False
        if self._silence is not None and self._silence.count_tick(heard=has_heard):
            self._ending = TimeoutError(f"nothing was heard of it for {GIVEN_UP_S:g} s")
            end_if_stopped(self._pid)
            self.abort()

    def abort(self) -> None:
        """Close the connection at once. Bytes not sent yet are dropped, as another peer will get the requests."""
        if self._transport is not None:
            connection = self._transport.get_extra_info("socket")
            if connection.family != socket.AF_UNIX:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGERING)
            self._transport.abort()

    def _refuse(self, why: str) -> None:
        logger.warning("closing a connection of an unknown peer: %s", why)
        self.close()

    @property
    def is_connected(self) -> bool:
        """Whether frames can be sent."""
        return self._transport is not None and not self._transport.is_closing()

    def send(self, message: Message, buffers: Sequence[Buffer] = ()) -> None:
        """Send one frame; the buffers are its body, in order. Call it on the event loop. Does nothing when closed."""
        if self._transport is None:
            return
        self._has_sent = True
        parts = framed(message, buffers)
        if len(parts) == 1:
            self._transport.write(parts[0])
        else:
            self._transport.writelines(parts)

    def close(self) -> None:
        """Close the connection after all sent bytes have left."""
        if self._transport is not None:
            self._transport.close()


def _is_same(presented: str, token: str) -> bool:
    """Whether a token is the right one. The time this takes does not tell how much of the token is right."""
    return hmac.compare_digest(presented.encode(), token.encode())


class FrameSocket(_End):
    """One end of a connection, for threads: one thread receives, any thread may send."""

    def __init__(self, connection: socket.socket | TlsSocket) -> None:
        """Take a connected, blocking socket."""
        self._socket = connection
        plain = self._plain = connection.plain if isinstance(connection, TlsSocket) else connection
        super().__init__(process_behind(plain))
        self._sending = threading.Lock()
        self._takes, self._has_ended = select.poll(), select.poll()  # each is used by one thread
        self._takes.register(plain, select.POLLOUT)
        self._has_ended.register(plain, select.POLLRDHUP)
        # A peer that takes no bytes for this long is given up.
        limit = _TIME.pack(int(GIVEN_UP_S), int(GIVEN_UP_S % 1 * 1e6))
        plain.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        # `_sent_at`: when bytes were last sent. `_known_at`: when bytes were sent that are acknowledged by now.
        # `_mark`: a time, and the number of bytes that were sent by then and must be acknowledged next.
        self._sent_at = self._known_at = time.monotonic()
        self._mark = (self._sent_at, 0)
        if plain.family != socket.AF_UNIX:
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        _notice_loss(plain)

    def greet(self, token: str) -> Hello | None:
        """Receive the first frame and return it if it presents the token; otherwise return None."""
        reader = self._reader
        reader.most_message_bytes = _FIRST_FRAME_BYTES
        try:
            with ended_after(self._plain, FIRST_FRAME_S):
                while (frame := reader.next_frame()) is None:
                    self._receive()
            hello = frame[0]
            if not isinstance(hello, Hello) or not _is_same(hello.token, token):
                raise WrongFrameError("its token is wrong")
        except (OSError, WrongFrameError) as error:
            logger.warning("closing a connection of an unknown peer: %s", error)
            return None
        reader.most_message_bytes = _MOST_MESSAGE_BYTES
        return hello

    def tick(self) -> None:
        """Send a beat if nothing was sent since the last tick, and check whether a watched peer is silent. If it is,
        the receiving thread is told that the peer is gone. One thread must call this every `BEAT_S`; it does not
        wait."""
        if not self._has_sent and self._sending.acquire(blocking=False):
            try:
                if self._takes.poll(0) == [(self._plain.fileno(), select.POLLOUT)]:
                    self._write(framed(Beat(), ()))
            finally:
                self._sending.release()
        self._has_sent = False
        self._note_acknowledged()
        # Unread bytes count as heard, even if nobody knows when they came: a worker reads only between two batches.
        has_heard, self._has_heard = self._has_heard or self._holds_unread(), False
        if self._silence is not None and self._silence.count_tick(heard=has_heard):
            logger.warning("a peer is given up: nothing was heard of it for %g s", GIVEN_UP_S)
            end_if_stopped(self._pid)
            self._shut_down()

    def _holds_unread(self) -> bool:
        with contextlib.suppress(*_GONE):
            return fcntl.ioctl(self._plain, termios.FIONREAD, _COUNT.pack(0)) != _COUNT.pack(0)
        return False

    def is_lost(self) -> bool:
        """Whether the peer has closed the connection, or may have given us up by now because it acknowledged nothing
        that was sent within `LEASE_S`. Bytes that the peer sent earlier may still lie here unread. Does not wait."""
        return bool(self._has_ended.poll(0)) or not self._note_acknowledged()

    def _note_acknowledged(self) -> bool:
        """Note what the peer's machine has acknowledged; return whether it has acknowledged bytes that were sent within
        `LEASE_S`. Received bytes would not tell that, as they may have been on their way for long."""
        if self._plain.family == socket.AF_UNIX:
            return True
        sent_at, (marked_at, marked) = self._sent_at, self._mark
        try:
            waiting = _COUNT.unpack(fcntl.ioctl(self._plain, termios.TIOCOUTQ, _COUNT.pack(0)))[0]
            info = self._plain.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _ACKNOWLEDGED.size)
        except _GONE:
            return False
        acknowledged = _ACKNOWLEDGED.unpack(info)[0]
        if acknowledged >= marked:
            self._known_at = marked_at if waiting else sent_at
            self._mark = sent_at, acknowledged + waiting
        return time.monotonic() - self._known_at <= LEASE_S

    def receive(self) -> tuple[Message, memoryview]:
        """Wait for the next frame and return it.

        Raises:
            OSError: the connection is gone.
            WrongFrameError: the peer does not speak the protocol.
        """
        while True:
            while (frame := self._reader.next_frame()) is None:
                self._receive()
            if type(frame[0]) is not Beat:
                return frame

    def fileno(self) -> int:
        """Return the descriptor of a socket without encryption."""
        assert isinstance(self._socket, socket.socket)
        return self._socket.fileno()

    def received(self) -> Iterator[tuple[Message, memoryview]]:
        """Return the frames that are complete by now; does not wait. The socket must be without encryption.

        Raises:
            OSError: the connection is gone.
            WrongFrameError: the peer does not speak the protocol.
        """
        assert isinstance(self._socket, socket.socket)
        with contextlib.suppress(BlockingIOError):
            self._note(self._socket.recv_into(self._reader.room(), 0, socket.MSG_DONTWAIT))
        while (frame := self._reader.next_frame()) is not None:
            if type(frame[0]) is not Beat:
                yield frame

    @property
    def is_amid_body(self) -> bool:
        """Whether the rest of a body has yet to come."""
        return self._reader.is_amid_body

    def _receive(self) -> None:
        self._note(self._socket.recv_into(self._reader.room()))

    def _note(self, count: int) -> None:
        if not count:
            raise ConnectionResetError("closed by the peer")
        self._has_heard = True
        self._reader.received(count)

    def send(self, message: Message, buffers: Sequence[Buffer] = ()) -> None:
        """Send one frame. Does nothing when the connection is gone; closes it when the peer takes no bytes."""
        parts = framed(message, buffers)
        with self._sending:
            self._write(parts)

    def _write(self, parts: Sequence[Buffer]) -> None:
        self._has_sent = True
        sent_at = time.monotonic()
        try:
            if len(parts) == 1:
                self._socket.sendall(parts[0])
            else:
                self._send_parts([memoryview(part).cast("B") for part in parts])
            self._sent_at = sent_at
        except OSError:  # also after `GIVEN_UP_S` in which no bytes could be sent: half a frame cannot be taken back
            self._shut_down()

    def _shut_down(self) -> None:
        """End the connection; the receiving thread notices."""
        with contextlib.suppress(OSError):
            self._plain.shutdown(socket.SHUT_RDWR)

    def _send_parts(self, parts: list[memoryview]) -> None:
        while parts:
            sent = self._socket.sendmsg(parts[:512])
            while parts and sent >= len(parts[0]):
                sent -= len(parts[0])
                parts.pop(0)
            if parts:
                parts[0] = parts[0][sent:]

    def close(self) -> None:
        """Close the connection; a thread that receives is woken."""
        self._shut_down()
        self._plain.close()


def _notice_loss(connection: socket.socket) -> None:
    """Let a connection end soon when the machine at its far end vanishes, as after a loss of power. By default the
    kernel sends again for ten seconds and more, and while nothing is sent it does not notice at all."""
    if connection.family == socket.AF_UNIX:
        return
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_KEEPIDLE, 1),
        (socket.TCP_KEEPINTVL, 1),
        (socket.TCP_USER_TIMEOUT, 1000 * _UNHEARD_S),
    ):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


def listener(address: Address) -> socket.socket:
    """Return a listening socket; port 0 takes a free one."""
    family = socket.AF_UNIX if isinstance(address, str) else socket.AF_INET
    made = socket.socket(family, socket.SOCK_STREAM)
    try:
        if family == socket.AF_INET:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(address)
        made.listen(128)
    except OSError:
        made.close()
        raise
    return made


async def listen(
    address: Address, accept: Callable[[], FrameProtocol], identity: Identity | None = None
) -> asyncio.Server:
    """Serve connections on the running loop; `accept` makes the protocol of each. With an `identity`, TCP connections
    are encrypted."""
    loop = asyncio.get_running_loop()
    if isinstance(address, str):
        return await loop.create_unix_server(accept, sock=listener(address))
    tls = None if identity is None else identity.context
    return await loop.create_server(accept, host=address[0], port=address[1], ssl=tls)


async def connect(
    address: Address,
    hello: Hello,
    on_message: Callable[[FrameProtocol, Message, memoryview], None],
    on_lost: Callable[[FrameProtocol, BaseException | None], None],
    *,
    certificate: str = "",
    timeout_s: float = 5.0,  # limit: for the connection
) -> FrameProtocol:
    """Connect and send `hello`. When the peer's certificate is given, the connection is encrypted.

    Raises:
        OSError: nobody listens there, or the peer has another certificate.
        TimeoutError: no connection within `timeout_s`.
    """
    loop = asyncio.get_running_loop()

    def build() -> FrameProtocol:
        return FrameProtocol(on_message, on_lost)

    async with asyncio.timeout(timeout_s):
        if isinstance(address, str):
            # uvloop refuses abstract names in create_unix_connection, but takes a connected socket.
            connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            connected.setblocking(False)
            try:
                connected.connect(address)
            except OSError:
                connected.close()
                raise
            _, protocol = await loop.create_unix_connection(build, sock=connected)
        else:
            tls = pinned_context(certificate) if certificate else None
            _, protocol = await loop.create_connection(
                build, host=address[0], port=address[1], ssl=tls, server_hostname="" if tls else None
            )
    protocol.send(hello)
    return protocol
