"""The gateway's listening sockets, and what all their connections share: turns, places, limits and time."""

from __future__ import annotations

import asyncio
import email.utils
import socket
import ssl
import time
from collections import Counter, deque
from collections.abc import Callable
from typing import Any, Protocol

from tenuto.deployments.entry.connection import BODY_S, UNREAD_BYTES, HttpConnection, Service
from tenuto.deployments.entry.encrypted import EncryptedConnection
from tenuto.deployments.entry.framing import KnownHeads
from tenuto.deployments.entry.open_connections import Holder, Limits, OpenConnections, Untaken
from tenuto.deployments.entry.turns import Turns
from tenuto.deployments.wire.arena import Arena
from tenuto.deployments.wire.status import FrontDoorStatus

_READ_BYTES = 1 << 16  # limit: of one read from a socket, bodies that have a place of their own aside
_CHECKED = 64  # limit: connections whose time is looked at in one turn of the loop


class ClientConnection(Holder, Protocol):
    """A connection as its server sees it. `is_idle`: no request is under way."""

    @property
    def is_idle(self) -> bool: ...

    def end(self) -> None:
        """Take no more requests, and close when those that are under way are answered."""

    def check_time(self, now_s: float) -> None:
        """End the connection when it has taken too long for what it is doing. It is called once a second."""


Speaks = Callable[[], Any]  # makes a `ClientConnection` that is a `BufferedProtocol`


class HttpServer:
    """The gateway's own listening sockets and their connections. Everything happens on one event loop."""

    def __init__(self, service: Service, arena: Arena, limits: Limits) -> None:
        """Take what answers requests, where large bodies go, and what clients may use."""
        self.service = service
        self.arena = arena
        self.limits = limits
        self.turns = Turns(asyncio.get_running_loop())
        self.heads = KnownHeads()
        self.chunked_bytes = 0  # of bodies that come in chunks and are not complete
        self.turned_away: Counter[str] = Counter()  # by reason: requests whose body was not wanted
        # Whoever is called with bytes in it uses them before the loop reads again.
        self.room = memoryview(bytearray(_READ_BYTES))
        self.is_draining = False
        self.date_line = b""
        self.places: OpenConnections[ClientConnection] = OpenConnections(limits, self.turned_away)
        self.untaken = Untaken(limits, self.turned_away)
        self._handshakes: OpenConnections[EncryptedConnection] = OpenConnections(limits, self.turned_away)
        self._handshakes.has_keys = True  # nobody has shown one yet
        self._servers: dict[tuple[str, int], tuple[asyncio.Server, bool, Speaks | None]] = {}
        self._ticker: asyncio.TimerHandle | None = None

    def status(self) -> FrontDoorStatus:
        """Return what the server holds, and how many requests and clients it turned away."""
        held_bytes = self.arena.used_bytes + self.chunked_bytes
        return FrontDoorStatus(len(self.places.taken()), held_bytes, dict(self.turned_away))

    def addresses(self, speaks: Speaks | None = None) -> list[tuple[str, int]]:
        """Return where the server listens for clients of this protocol. None: HTTP."""
        return [where for where, (_, _, spoken) in self._servers.items() if spoken is speaks]

    async def listen(
        self,
        host: str,
        port: int,
        *,
        is_shared: bool = False,
        tls: ssl.SSLContext | None = None,
        speaks: Speaks | None = None,
    ) -> None:
        """Listen at one more place.

        `is_shared`: other gateways of this machine listen there, too; so may any other process of this user that shares
        the port. `tls`: the connections are encrypted. `speaks`: makes what serves a new client of another protocol
        than HTTP/1.1.

        Raises:
            OSError: the port belongs to somebody else.
        """
        if (host, port) in self._servers:
            if self._servers[host, port][1] == is_shared:
                return
            await self.stop_listening(host, port)
        made = _listener(host, port, is_shared=is_shared)
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: self.connection(tls, speaks), sock=made, backlog=4096)
        self._servers[host, port] = server, is_shared, speaks
        if self._ticker is None:
            self.look_at_times()

    def connection(self, tls: ssl.SSLContext | None, speaks: Speaks | None = None) -> asyncio.BufferedProtocol:
        """Return what serves a new client."""
        made = HttpConnection(self) if speaks is None else speaks()
        return made if tls is None else EncryptedConnection(made, tls, self.turns, self._handshakes)

    async def stop_listening(self, host: str, port: int) -> None:
        """Take no more connections at this place."""
        if (host, port) in self._servers:
            self._servers.pop((host, port))[0].close()

    def look_at_times(self) -> None:
        """Begin to look at all connections; this happens once a second."""
        self.date_line = b"date: %b\r\n" % email.utils.formatdate(usegmt=True).encode()
        self._check_time(deque(self.places.taken()))
        self._ticker = asyncio.get_running_loop().call_later(1.0, self.look_at_times)

    def _check_time(self, unchecked: deque[ClientConnection]) -> None:
        """Look at some connections in this turn of the loop, and at the others in later turns."""
        now_s = time.monotonic()
        for _ in range(min(_CHECKED, len(unchecked))):
            unchecked.popleft().check_time(now_s)
        if unchecked:
            asyncio.get_running_loop().call_soon(self._check_time, unchecked)

    async def drain(self, limit_s: float) -> None:
        """Take no more connections. Requests that are under way are answered with `connection: close`. `close` then
        ends what is left."""
        self.is_draining = True
        for server, *_ in self._servers.values():
            server.close()
        until = time.monotonic() + limit_s
        while any(not connection.is_idle for connection in self.places.taken()) and time.monotonic() < until:
            await asyncio.sleep(0.02)

    def close(self) -> None:
        """End all timers, and every connection when all that was written to it has left."""
        for unfinished in self._handshakes.taken():
            unfinished.give_way()
        for connection in self.places.taken():
            connection.end()
        if self._ticker is not None:
            self._ticker.cancel()


def _listener(host: str, port: int, *, is_shared: bool) -> socket.socket:
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    made = socket.socket(family, kind, protocol)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if is_shared:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # accepted connections inherit these
        # The kernel keeps what is on its way, and so much more; else 4 MiB of what a client does not read.
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNREAD_BYTES)
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * BODY_S))
        made.bind(address)
    except OSError:
        made.close()
        raise
    made.setblocking(False)
    return made
