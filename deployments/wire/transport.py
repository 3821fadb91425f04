"""The wire between the dispatcher and a gpu-let: length-prefixed frames of a small JSON header and raw tensor bytes.

A batch crosses here once each way. Nothing is pickled, so a peer can never make the other side run code; the first
frame of a connection must carry the token that the gpu-let handed out over Ray. Addresses are TCP or Unix sockets.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import socket
import struct
import sys
from collections.abc import Callable, Sequence
from typing import Any, cast

import orjson

__all__ = ["Address", "FrameProtocol", "connect", "listen"]

logger = logging.getLogger("ray.serve")

_PREFIX = struct.Struct("<IQ")  # header bytes, body bytes
_MAX_HEADER = 1 << 24
_MAX_BODY = 1 << 34
_LARGE = 16 << 20

# A Unix socket name, or (host, port).
Address = str | tuple[str, int]
OnFrame = Callable[["FrameProtocol", dict[str, Any], memoryview], None]
OnConnect = Callable[["FrameProtocol"], None]
OnLost = Callable[["FrameProtocol", BaseException | None], None]


class _LargeBuffers:
    """Keeps the memory of large bodies for the next ones, once nobody looks at it any more.

    The C library gives blocks over 32 MiB back to the system at once and gets new ones page by page, which for 50 MB
    took longer than the transfer. A view keeps its buffer alive, so that a reference count tells who still looks.
    """

    _KEPT = 2  # one batch runs, one waits behind it

    def __init__(self) -> None:
        self._buffers: list[bytearray] = []

    def take(self, size: int) -> memoryview:
        """Return `size` bytes of any content."""
        for buffer in self._buffers:
            # Three references: the list's, this loop's, and the call's own.
            if len(buffer) >= size and sys.getrefcount(buffer) == 3:
                return memoryview(buffer)[:size]
        buffer = bytearray(size)
        self._buffers = [*self._buffers[-(self._KEPT - 1) :], buffer]
        return memoryview(buffer)


class FrameProtocol(asyncio.BufferedProtocol):
    """One end of a connection. Received bodies are written straight into their own buffer, sent ones are not joined.

    `on_frame(protocol, header, body)` is called on the event loop for every frame; `body` is the callee's to keep.
    """

    def __init__(
        self,
        on_frame: OnFrame,
        on_lost: OnLost,
        *,
        expect_token: str | None = None,
        on_connect: OnConnect | None = None,
    ) -> None:
        self._on_frame = on_frame
        self._on_connect = on_connect
        self._on_lost = on_lost
        self._expect_token = expect_token
        self._transport: asyncio.Transport | None = None
        self._large = _LargeBuffers()
        self._begin(memoryview(bytearray(_PREFIX.size)))
        self._header: dict[str, Any] | None = None
        self._lengths: tuple[int, int] | None = None

    def _begin(self, target: memoryview) -> None:
        self._target = target
        self._filled = 0

    # asyncio calls the four methods below.
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transports do not derive from asyncio's

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._on_lost(self, exc)

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002
        return self._target[self._filled :]

    def buffer_updated(self, nbytes: int) -> None:
        self._filled += nbytes
        while self._filled == len(self._target):
            if not self._advance():
                return

    def _advance(self) -> bool:
        """Take the next step once the current part is complete; return False when the connection was closed."""
        if self._lengths is None:
            header_length, body_length = _PREFIX.unpack(self._target)
            if not 2 <= header_length <= _MAX_HEADER or body_length > _MAX_BODY:
                logger.warning("closing a connection that does not speak the frame protocol")
                self.close()
                return False
            self._lengths = (header_length, body_length)
            self._begin(memoryview(bytearray(header_length)))
            return True
        if self._header is None:
            try:
                self._header = orjson.loads(self._target)
            except orjson.JSONDecodeError:
                logger.warning("closing a connection with a malformed frame header")
                self.close()
                return False
            length = self._lengths[1]
            self._begin(self._large.take(length) if length > _LARGE else memoryview(bytearray(length)))
            return True
        header, body = self._header, self._target
        self._header = self._lengths = None
        self._begin(memoryview(bytearray(_PREFIX.size)))
        if self._expect_token is not None:
            if not hmac.compare_digest(str(header.get("token", "")), self._expect_token):
                logger.warning("closing a connection with a wrong token")
                self.close()
                return False
            self._expect_token = None
            if self._on_connect is not None:
                self._on_connect(self)
            return True
        self._on_frame(self, header, body)
        return self._transport is not None

    @property
    def is_connected(self) -> bool:
        """Whether frames can be sent."""
        return self._transport is not None and not self._transport.is_closing()

    def send(self, header: dict[str, Any], buffers: Sequence[bytes | memoryview] = ()) -> None:
        """Send one frame; the buffers are the body, in order. Must be called on the event loop; silent when closed."""
        if self._transport is None:
            return
        encoded = orjson.dumps(header)
        length = sum(memoryview(buffer).nbytes for buffer in buffers)
        self._transport.writelines([_PREFIX.pack(len(encoded), length), encoded, *buffers])

    def close(self) -> None:
        """Close the connection after what was sent has left."""
        if self._transport is not None:
            self._transport.close()


async def listen(
    address: Address, token: str, on_frame: OnFrame, on_lost: OnLost, on_connect: OnConnect | None = None
) -> asyncio.Server:
    """Serve connections that present `token`; `address` is a Unix socket name or (host, port), port 0 for any.

    `on_connect(protocol)` is called for each connection once its token was accepted.
    """
    loop = asyncio.get_running_loop()

    def accept() -> FrameProtocol:
        return FrameProtocol(on_frame, on_lost, expect_token=token, on_connect=on_connect)

    if isinstance(address, str):
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(address)
        return await loop.create_unix_server(accept, sock=listener)
    return await loop.create_server(accept, host=address[0], port=address[1])


async def connect(
    address: Address, token: str, on_frame: OnFrame, on_lost: OnLost, *, timeout_s: float = 5.0
) -> FrameProtocol:
    """Connect and present the token.

    Raises:
        OSError: nobody listens there.
        TimeoutError: no connection within `timeout_s`.
    """
    loop = asyncio.get_running_loop()

    def build() -> FrameProtocol:
        return FrameProtocol(on_frame, on_lost)

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
            _, protocol = await loop.create_connection(build, host=address[0], port=address[1])
    protocol.send({"token": token})
    return protocol
