"""However many clients begin TLS at once, and however they cut their part, one turn of the loop does one step of one
handshake or ending, and decrypts as much as it can work on. Steps and calls are counted; no clock is asked."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tenuto.deployments.entry.http.http1 import HttpConnection
from tenuto.deployments.entry.http.loop_budget import MOST_WORK
from tenuto.deployments.entry.http.open_connections import Limits
from tenuto.deployments.entry.http.server import HttpServer
from tenuto.deployments.entry.http.tls import TlsConnection
from tenuto.deployments.serve.launcher import unused_port
from tenuto.deployments.wire.arena import Arena
from tests.deployments.entry.test_access import certificate
from tests.deployments.entry.test_endless import Service
from tests.deployments.entry.test_turns import MOST_PUT_OFF
from tests.instruments import fake_transport
from tests.instruments.fake_transport import Calls, read
from tests.instruments.live import PATIENCE_S

TOGETHER = 200
REQUEST = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
POST = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 40000\r\n\r\n" + bytes(40_000)
ENDS: list[TlsConnection] = []  # of the test that runs


class Line(fake_transport.Line):
    """As the transport below TLS."""

    def _force_close(self, exc: BaseException | None) -> None:
        del exc
        self.close()


class Client:
    """A client that speaks TLS, `piece` bytes at a time."""

    def __init__(self, server: HttpServer, tls: ssl.SSLContext, trust: ssl.SSLContext, piece: int) -> None:
        self.piece = piece
        self.line = Line()
        made = server.connection(HttpConnection, tls)
        assert isinstance(made, TlsConnection)
        self.end = made
        self._came, self._leaves = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.tls = trust.wrap_bio(self._came, self._leaves, server_hostname="127.0.0.1")
        self._unsent = b""
        self.is_shaken = False
        self.end.connection_made(self.line)
        ENDS.append(self.end)

    def speak(self) -> None:
        """Read what has come, and send a piece of what there is to say, if the server reads."""
        self._came.write(self.line.to_client)
        self.line.to_client = b""
        if not self.is_shaken:
            try:
                self.tls.do_handshake()
                self.is_shaken = True
                self.tls.write(REQUEST)
            except ssl.SSLWantReadError:
                pass
        self._unsent += self._leaves.read()
        if self._unsent and self.line.reads and not self.line.is_closed:
            self._unsent = read(self.end, self._unsent[: self.piece]) + self._unsent[self.piece :]


@pytest.fixture
async def server() -> AsyncIterator[HttpServer]:
    arena = Arena(1 << 20)
    made = HttpServer(Service(), arena, Limits(connections=4 * TOGETHER))
    yield made
    while ENDS:
        ENDS.pop().connection_lost(None)
    while made.budget.waiting:  # some wait for a turn, and are gone when it comes
        await asyncio.sleep(0)
    arena.close()


@pytest.fixture(scope="module")
def contexts(tmp_path_factory: pytest.TempPathFactory) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    cert, key = certificate(Path(tmp_path_factory.mktemp("tls")))
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(cert, key)
    return tls, ssl.create_default_context(cafile=str(cert))


class Steps:
    """Counts the steps of handshakes that the server does."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        inner = TlsConnection.resume

        def counted(connection: TlsConnection) -> None:
            self.count += 1
            inner(connection)

        monkeypatch.setattr(TlsConnection, "resume", counted)


@pytest.mark.parametrize("piece", [1 << 16, 100])
async def test_a_turn_does_one_step_of_one_handshake(
    server: HttpServer, contexts: tuple[ssl.SSLContext, ssl.SSLContext], monkeypatch: pytest.MonkeyPatch, piece: int
) -> None:
    steps = Steps(monkeypatch)
    clients = [Client(server, *contexts, piece) for _ in range(TOGETHER)]
    for _turn in range(40 * TOGETHER):
        before = steps.count
        for client in clients:
            client.speak()
            assert not client.line.to_client  # reading does none
        await asyncio.sleep(0)
        assert steps.count <= before + 1
        if all(client.is_shaken for client in clients):
            break
    assert all(client.is_shaken for client in clients)
    while server.budget.waiting:
        await asyncio.sleep(0)
        for client in clients:
            client.speak()
    assert isinstance(server.service, Service)
    assert server.service.asked == TOGETHER


async def shaken(server: HttpServer, contexts: tuple[ssl.SSLContext, ssl.SSLContext]) -> list[Client]:
    """Return clients whose handshakes are over, and whose first request is answered."""
    clients = [Client(server, *contexts, 1 << 16) for _ in range(TOGETHER)]
    while server.budget.waiting or not all(client.is_shaken for client in clients):
        for client in clients:
            client.speak()
        await asyncio.sleep(0)
    return clients


async def test_a_turn_decrypts_what_it_has_work_left_for(
    server: HttpServer, contexts: tuple[ssl.SSLContext, ssl.SSLContext], monkeypatch: pytest.MonkeyPatch
) -> None:
    decrypted = 0
    inner = HttpConnection.buffer_updated

    def counted(connection: HttpConnection, nbytes: int) -> None:
        nonlocal decrypted
        decrypted += 1
        inner(connection, nbytes)

    monkeypatch.setattr(HttpConnection, "buffer_updated", counted)  # asyncio keeps the method that it finds first
    clients = await shaken(server, contexts)
    decrypted = 0
    for client in clients:
        client.tls.write(POST)
    most = 0
    while server.budget.waiting or decrypted < TOGETHER:
        before = decrypted
        with Calls() as calls:
            for client in clients:
                client.speak()
        await asyncio.sleep(0)
        most = max(most, calls.count)
        assert decrypted <= before + 3 * MOST_WORK  # read, gone on with, and read on
    held = max(client.end._incoming.pending for client in clients)
    assert held <= 2 * TlsConnection.max_size + (1 << 14)
    assert most < MOST_WORK * 200 + TOGETHER * MOST_PUT_OFF


async def test_a_turn_ends_one_of_those_that_leave_together(
    server: HttpServer, contexts: tuple[ssl.SSLContext, ssl.SSLContext], monkeypatch: pytest.MonkeyPatch
) -> None:
    clients = await shaken(server, contexts)
    begun = [Client(server, *contexts, 1 << 16) for _ in range(TOGETHER)]  # amid the handshake
    steps = Steps(monkeypatch)
    for ends in (lambda client: client.end.eof_received(), lambda client: client.end.connection_lost(None)):
        with Calls() as calls:
            for client in (*clients, *begun):
                ends(client)
        assert calls.count < 2 * TOGETHER * MOST_PUT_OFF
        while server.budget.waiting:
            before = steps.count
            await asyncio.sleep(0)
            assert steps.count <= before + 1
        assert all(client.line.is_closed for client in (*clients, *begun))
    await asyncio.sleep(0)
    assert not server.places.taken()
    ENDS.clear()


@pytest.mark.parametrize("is_encrypted", [False, True])
def test_a_turn_takes_few_of_those_who_come_together(
    contexts: tuple[ssl.SSLContext, ssl.SSLContext], is_encrypted: bool
) -> None:
    """The loop's library decides this; of libuv's versions some take all."""
    uvloop = pytest.importorskip("uvloop")
    together: list[int] = []

    async def come() -> None:
        arena = Arena(1 << 20)
        server = HttpServer(Service(), arena, Limits(connections=4 * TOGETHER))
        port = unused_port()
        inner = server.connection
        made = 0

        def counted(*given: Any) -> asyncio.BufferedProtocol:
            nonlocal made
            made += 1
            return inner(*given)

        server.connection = counted  # type: ignore[method-assign]
        await server.listen(
            "127.0.0.1", port, HttpConnection, tls=SimpleNamespace(context=contexts[0]) if is_encrypted else None
        )
        with contextlib.ExitStack() as open_sockets:
            for _ in range(TOGETHER):
                open_sockets.enter_context(socket.create_connection(("127.0.0.1", port)))
            while sum(together) < TOGETHER:
                made = 0
                await asyncio.sleep(0)
                together.append(made)
            await server.drain(0.0)
        while server.budget.waiting or server.places.taken():
            await asyncio.sleep(0.001)
        server.close()
        arena.close()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(asyncio.wait_for(come(), PATIENCE_S))
    assert max(together) <= MOST_WORK


async def test_requests_go_before_handshakes(
    server: HttpServer, contexts: tuple[ssl.SSLContext, ssl.SSLContext]
) -> None:
    clients = [Client(server, *contexts, 1 << 16) for _ in range(TOGETHER)]
    for client in clients:
        client.speak()
    line = Line()
    known = HttpConnection(server)
    known.connection_made(line)
    read(known, REQUEST)
    assert line.to_client.startswith(b"HTTP/1.1 200")


async def test_clients_that_never_say_hello_give_way_and_those_that_wait_for_their_turn_do_not(
    server: HttpServer, contexts: tuple[ssl.SSLContext, ssl.SSLContext]
) -> None:
    most = server.limits.connections // 4
    silent, *speaking = [Client(server, *contexts, 1 << 16) for _ in range(most)]
    for client in speaking:
        client.speak()
    newcomer = Client(server, *contexts, 1 << 16)
    assert silent.line.is_closed
    assert not newcomer.line.is_closed
    newcomer.speak()
    assert Client(server, *contexts, 1 << 16).line.is_closed  # all wait for their turn, which comes soon
    assert not any(client.line.is_closed for client in (*speaking, newcomer))
