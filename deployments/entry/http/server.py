"""The gateway's own listening sockets, and what their connections have in common, whatever protocol they speak.

Everything that clients could make grow together has a bound here: connections, bodies, answers that nobody takes, and
the work of one turn of the loop.
"""

from __future__ import annotations

import abc
import asyncio
import email.utils
import socket
import ssl
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, cast

from tenuto.deployments.entry.http.body_memory import Account, BodyMemory
from tenuto.deployments.entry.http.exchange import Exchange, HttpError
from tenuto.deployments.entry.http.file_descriptors import most_connections
from tenuto.deployments.entry.http.framing import KnownHeads
from tenuto.deployments.entry.http.loop_budget import LoopBudget
from tenuto.deployments.entry.http.open_connections import Limits, OpenConnections, Untaken
from tenuto.deployments.entry.http.relay import StoreFinder
from tenuto.deployments.entry.http.tls import TlsConnection
from tenuto.deployments.security.certificate import Certificate
from tenuto.deployments.wire.arena import Arena
from tenuto.deployments.wire.status import FrontDoorStatus

READ_BYTES = 1 << 16  # limit: of one read from a socket, bodies that have a place of their own aside
BODY_S = 60.0  # limit: from the end of a head to that of its body; and for answers to be taken
IDLE_S = 300.0  # limit: between two requests
_STRANGERS_PART = 1 / 16  # limit: of `unfinished_bytes`, beside the others'; all that they send has 64 KiB at most
_CHECKED = 64  # limit: connections whose time is looked at in one turn of the loop
UNREAD_BYTES = 1 << 16  # limit: of a response in parts that its client does not read, behind what the socket takes
# Why a request was turned away before its body was taken, as operators read it.
_REASONS = {
    400: "malformed",
    401: "key",
    403: "model",
    404: "unknown",
    408: "slow",
    413: "size",
    429: "rate",
    431: "size",
    503: "full",
    504: "expired",
}


def many() -> HttpError:
    """Return the refusal of a client that finds no place."""
    return HttpError(503, "too many connections are open. Use fewer, or connect again in a moment.", retry_after_s=1.0)


class HttpService(Protocol):
    """What answers requests."""

    def refusal(self, exchange: Exchange) -> HttpError | None:
        """Return why the client need not send the body. It is called when the headers are there."""

    def handle(self, exchange: Exchange) -> None:
        """Answer a request, now or later. It is called when the body is there."""


class ClientConnection(asyncio.BufferedProtocol, abc.ABC):
    """One client: its socket, whether it takes what it is sent, and its place among all connections."""

    def __init__(self, server: HttpServer) -> None:
        """Take the server of the connection."""
        self.server = server
        self.address = ""  # where the client is; "" when that is not known
        self.has_key = False  # its client has shown a key
        self.account: Account | None = None  # of the memory of requests without a key
        self.changed_s = time.monotonic()  # when its state changed last, for the time limits
        self._transport: asyncio.Transport | None = None
        self._is_paused = False  # the client does not take what it is sent
        self._closes = False  # nothing more is read

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        name = transport.get_extra_info("peername")
        self.address = str(name[0]) if name else ""

    def connection_lost(self, exc: Exception | None) -> None:
        del exc
        self._transport = None
        self._closes = True
        self.server.places.forget(self)
        self.server.untaken.forget(self)

    def pause_writing(self) -> None:
        self._is_paused = True
        self.changed_s = time.monotonic()
        self._update_reading()
        self._count_untaken()

    def resume_writing(self) -> None:
        self._is_paused = False
        self._update_reading()
        self._count_untaken()

    @abc.abstractmethod
    def _update_reading(self) -> None:
        """Stop reading from a client that does not take its answers; read on when it does."""

    @abc.abstractmethod
    def _waiting_bytes(self) -> int:
        """Return how many bytes of answers wait here for the client."""

    def _count_untaken(self) -> None:
        """Tell the server how many bytes of answers wait for this client, here and in the transport."""
        waiting = self._waiting_bytes()
        if self._is_paused and self._transport is not None:
            waiting += self._transport.get_write_buffer_size()
        self.server.untaken.holds(self, waiting)

    @property
    @abc.abstractmethod
    def is_idle(self) -> bool:
        """Whether no request is under way."""

    @property
    @abc.abstractmethod
    def gives_way(self) -> bool:
        """Whether nobody waits for an answer here, so that another client may have this place."""

    def show_key(self) -> bool:
        """Note that the client has shown a key. Return False when too many connections of clients with a key are
        open."""
        return self.has_key or self.server.places.admit_key(self)

    def give_way(self) -> None:
        """Close at once, so that its file descriptor is free: a client that is silent would not end TLS, either. A
        client must expect an idle connection to be closed at any time (RFC 9112, 9.5), and asks again on another."""
        self.give_up()

    def give_up(self) -> None:
        """Close the connection of a client that does not take its answers. What it has not taken is lost."""
        self._closes = True
        if self._transport is not None:
            self._transport.abort()

    def _close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    @abc.abstractmethod
    def end(self) -> None:
        """Take no more requests, and close when those that are under way are answered."""

    @abc.abstractmethod
    def check_time(self, now_s: float) -> None:
        """End the connection when it has taken too long for what it is doing. It is called once a second."""


Speaks = Callable[["HttpServer"], ClientConnection]  # makes what serves a new client, by its protocol


@dataclass
class _Door:
    """A place where a server listens: for whom, and with which certificate."""

    is_shared: bool
    speaks: Speaks
    tls: Certificate | None
    server: asyncio.Server | None = None

    def close(self) -> None:
        """Take no more connections."""
        if self.server is not None:
            self.server.close()


class HttpServer:
    """The gateway's own listening sockets and their connections. Everything happens on one event loop."""

    def __init__(self, service: HttpService, arena: Arena, limits: Limits) -> None:
        """Take what answers requests, where large bodies go, and what clients may use."""
        self.service = service
        self.arena = arena
        self.limits = limits
        self.budget = LoopBudget(asyncio.get_running_loop())
        self.heads = KnownHeads()
        self._bodies = BodyMemory(limits)
        self._strangers_bodies = BodyMemory(limits, _STRANGERS_PART)  # of clients without a key, where others have one
        self._accounts: dict[str, Account] = {}  # by key
        self.turned_away: Counter[str] = Counter()  # by reason: requests whose body was not wanted
        # Whoever is called with bytes in it uses them before the loop reads again.
        self.room = memoryview(bytearray(READ_BYTES))
        self.is_draining = False
        self.store: StoreFinder | None = None  # where requests for files and batches go
        self.date_line = b""
        self.places: OpenConnections[ClientConnection] = OpenConnections(limits, self.turned_away)
        self.untaken = Untaken(limits, self.turned_away)
        self._handshakes: OpenConnections[TlsConnection] = OpenConnections(limits, self.turned_away)
        self._handshakes.has_keys = True  # nobody has shown one yet
        self._doors: dict[tuple[str, int], _Door] = {}
        self._ticker: asyncio.TimerHandle | None = None

    def status(self) -> FrontDoorStatus:
        """Return what the server holds, and how many requests and clients it turned away."""
        return FrontDoorStatus(len(self.places.taken()), self.unfinished_bytes, dict(self.turned_away))

    @property
    def unfinished_bytes(self) -> int:
        """How many bytes have come of requests that are not answered."""
        return self._bodies.bytes + self._strangers_bodies.bytes

    def account(self, connection: ClientConnection, key: str) -> Account:
        """Return where the memory of a request counts: where its key does, or without one its connection."""
        if key:
            return self._accounts.setdefault(key, Account(self._bodies))
        pool = self._strangers_bodies if self.places.has_keys else self._bodies
        if connection.account is None or connection.account.pool is not pool:
            connection.account = Account(pool)
        return connection.account

    def limit_connections(self, most: int) -> None:
        """Let clients have so many connections, or fewer where there are not so many file descriptors."""
        self.limits.connections = most_connections(most, len(self.places) + len(self._handshakes))
        self.places.fit()
        self._handshakes.fit()

    def count_refusal(self, error: HttpError) -> None:
        """Count a request whose body is not wanted."""
        self.turned_away[_REASONS.get(error.status, "other")] += 1

    def addresses(self, speaks: Speaks) -> list[tuple[str, int]]:
        """Return where the server listens for clients of this protocol."""
        return [where for where, door in self._doors.items() if door.speaks == speaks]

    async def listen(
        self, host: str, port: int, speaks: Speaks, *, is_shared: bool = False, tls: Certificate | None = None
    ) -> None:
        """Listen at one more place.

        `speaks`: makes what serves a new client. `is_shared`: other gateways of this machine listen there, too; so may
        any other process of this user that shares the port. `tls`: new connections are encrypted.

        Raises:
            OSError: the port belongs to somebody else.
        """
        known = self._doors.get((host, port))
        if known is not None:
            if (known.is_shared, known.speaks) == (is_shared, speaks):
                known.tls = tls
                return
            self.stop_listening(host, port)
        door = _Door(is_shared, speaks, tls)
        made = _listener(host, port, is_shared=is_shared)
        loop = asyncio.get_running_loop()
        door.server = await loop.create_server(
            lambda: self.connection(speaks, None if door.tls is None else door.tls.context), sock=made, backlog=4096
        )
        self._doors[host, port] = door
        if self._ticker is None:
            self.look_at_times()

    def connection(self, speaks: Speaks, tls: ssl.SSLContext | None) -> asyncio.BufferedProtocol:
        """Return what serves a new client."""
        made = speaks(self)
        return made if tls is None else TlsConnection(made, tls, self.budget, self._handshakes)

    def certificate_at(self, host: str, port: int) -> Certificate | None:
        """Return the certificate of one of its places; None if it does not listen there, or without TLS."""
        door = self._doors.get((host, port))
        return None if door is None else door.tls

    def renew_certificates(self) -> None:
        """Look whether the files of certificates have changed."""
        for door in list(self._doors.values()):
            if door.tls is not None:
                door.tls.renew()

    def stop_listening(self, host: str, port: int) -> None:
        """Take no more connections at one of its places."""
        self._doors.pop((host, port)).close()

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
        for door in self._doors.values():
            door.close()
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
