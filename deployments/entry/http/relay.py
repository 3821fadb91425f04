"""Requests for files and batches go on, byte by byte and in both directions, to the process that has the store: they
may be larger than memory. The gateway has checked the client's key before, and tells the store whose it is.

The store answers one request on a connection, and ends it.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Protocol, cast

from tenuto.deployments.entry.http.exchange import Head, HttpError
from tenuto.deployments.wire.encryption import pinned_context
from tenuto.deployments.wire.frames import Address
from tenuto.deployments.wire.peer import Endpoint, Finder

CLIENT_HEADER, TOKEN_HEADER = "x-tenuto-client", "x-tenuto-token"
_PATHS = b"/v1/files", b"/v1/batches"
_BELOW = b"/v1/files/", b"/v1/batches/"
_CONNECTS_S = 5.0  # limit: for the store to be found and connected
_OF_CONNECTIONS = frozenset((b"connection", b"keep-alive", b"proxy-connection", b"upgrade", b"authorization"))
_OWN = frozenset((b"x-api-key", CLIENT_HEADER.encode(), TOKEN_HEADER.encode()))


def is_relayed(url: bytes) -> bool:
    """Return whether a URL is one of files or of batches."""
    path = url.partition(b"?")[0]
    return path in _PATHS or path.startswith(_BELOW)


def is_upload(url: bytes) -> bool:
    """Return whether a URL takes files, which may have any size."""
    return url.partition(b"?")[0] == _PATHS[0]


class RelayClient(Protocol):
    """The connection of a client whose request goes on."""

    def take_relayed(self, data: bytes) -> None:
        """Send bytes of the answer."""

    def pause_relayed(self, *, pauses: bool) -> None:
        """Read nothing more from the client, or read on."""

    def end_relayed(self, error: HttpError | None) -> None:
        """The answer is over; `error`: there was none."""


class Relay(asyncio.Protocol):
    """The gateway's end of a connection to the store, for one request."""

    def __init__(self, client: RelayClient) -> None:
        self._client = client
        self._transport: asyncio.Transport | None = None
        self._has_answered = self._is_over = False
        self._connects: asyncio.Task[None] | None = None

    def begin(self, store: StoreFinder, head: Head, key: str, came: bytes) -> None:
        """Connect, and send a request of a client with a key, of whose body some came already."""
        self._client.pause_relayed(pauses=True)
        self._connects = asyncio.create_task(self._begin(store, head, key, came), name="connect to the store")

    async def _begin(self, store: StoreFinder, head: Head, key: str, came: bytes) -> None:
        token = await store.connect(self)
        if token is None:
            self._end()
        elif self._transport is not None:
            self._transport.write(_head(head, key, token) + came)
            self._client.pause_relayed(pauses=False)

    def write(self, data: bytes) -> None:
        """Send bytes of the request."""
        if self._transport is not None:
            self._transport.write(data)

    def pause(self, *, pauses: bool) -> None:
        """Read no more of the answer while the client does not take it."""
        if self._transport is not None and not self._transport.is_closing():
            (self._transport.pause_reading if pauses else self._transport.resume_reading)()

    def drop(self) -> None:
        """Forget the request: its client is gone."""
        self._is_over = True
        if self._connects is not None:
            self._connects.cancel()
        if self._transport is not None:
            self._transport.abort()

    def _end(self) -> None:
        if not self._is_over:
            self._is_over = True
            reason = "the store of batches does not answer. Retry in a few seconds."
            self._client.end_relayed(None if self._has_answered else HttpError(503, reason, retry_after_s=2.0))

    # --- asyncio's side -----------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._has_answered = True
        self._client.take_relayed(data)

    def connection_lost(self, exc: Exception | None) -> None:
        del exc
        self._transport = None
        self._end()

    def pause_writing(self) -> None:
        self._client.pause_relayed(pauses=True)

    def resume_writing(self) -> None:
        self._client.pause_relayed(pauses=False)


class StoreFinder:
    """Where the store listens; it is looked for when it is needed, and again when it has gone."""

    def __init__(self, find: Finder) -> None:
        self._find = find
        self._endpoint: Endpoint | None = None

    def forget(self) -> None:
        """Look for the store anew: it may listen elsewhere, or with another certificate."""
        self._endpoint = None

    async def connect(self, relay: Relay) -> str | None:
        """Connect a relay, and return the token that the store expects; None if nobody answers."""
        for _ in range(2):  # the place that is known may be that of a process that has died
            known = self._endpoint
            with contextlib.suppress(Exception):  # Ray and Serve have many kinds while a process is replaced
                async with asyncio.timeout(_CONNECTS_S):
                    endpoint = self._endpoint = known or await self._find()
                    await _connect(relay, endpoint.address, endpoint.certificate)
                return endpoint.token
            self._endpoint = None
            if known is None:
                break
        return None


async def _connect(relay: Relay, address: Address, certificate: str) -> None:
    loop, tls = asyncio.get_running_loop(), pinned_context(certificate) if certificate else None
    assert isinstance(address, tuple)
    await loop.create_connection(lambda: relay, address[0], address[1], ssl=tls)


def _head(head: Head, key: str, token: str) -> bytes:
    """Return the head of a request as the store gets it."""
    dropped = _OF_CONNECTIONS | _OWN
    lines = [b"%b: %b\r\n" % pair for pair in head.headers.items() if pair[0] not in dropped]
    own = f"{CLIENT_HEADER}: {key}\r\n{TOKEN_HEADER}: {token}\r\nconnection: close\r\n\r\n".encode()
    return b"%b %b HTTP/1.1\r\n%b%b" % (head.method, head.url, b"".join(lines), own)
