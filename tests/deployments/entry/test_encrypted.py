"""However many clients begin TLS at once, and however they cut their part, one turn of the loop does one step of one
handshake. Steps are counted; no clock is asked."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tenuto.deployments.entry.connection import HttpConnection, HttpServer
from tenuto.deployments.entry.encrypted import EncryptedConnection
from tenuto.deployments.entry.open_connections import Limits
from tenuto.deployments.wire.arena import Arena
from tests.deployments.entry.test_access import certificate
from tests.deployments.entry.test_endless import Deaf, Service

TOGETHER = 200
REQUEST = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
ENDS: list[EncryptedConnection] = []  # of the test that runs


class Line(Deaf):
    """The server's end of a connection: what it writes waits for the client."""

    def __init__(self) -> None:
        super().__init__()
        self.to_client = b""

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.to_client += bytes(data)

    def _force_close(self, exc: BaseException | None) -> None:
        del exc
        self.close()


class Client:
    """A client that speaks TLS, `piece` bytes at a time."""

    def __init__(self, server: HttpServer, tls: ssl.SSLContext, trust: ssl.SSLContext, piece: int) -> None:
        self.piece = piece
        self.line = Line()
        made = server.connection(tls)
        assert isinstance(made, EncryptedConnection)
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
            sent, self._unsent = self._unsent[: self.piece], self._unsent[self.piece :]
            room = self.end.get_buffer(-1)
            room[: len(sent)] = sent
            self.end.buffer_updated(len(sent))


@pytest.fixture
async def server() -> AsyncIterator[HttpServer]:
    arena = Arena(1 << 20)
    made = HttpServer(Service(), arena, Limits(connections=4 * TOGETHER))
    yield made
    while ENDS:
        ENDS.pop().connection_lost(None)
    while made.turns.waiting:  # some wait for a turn, and are gone when it comes
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
        inner = EncryptedConnection.go_on

        def counted(connection: EncryptedConnection) -> None:
            self.count += 1
            inner(connection)

        monkeypatch.setattr(EncryptedConnection, "go_on", counted)


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
    while server.turns.waiting:
        await asyncio.sleep(0)
        for client in clients:
            client.speak()
    assert isinstance(server.service, Service)
    assert server.service.asked == TOGETHER


async def test_requests_go_before_handshakes(
    server: HttpServer, contexts: tuple[ssl.SSLContext, ssl.SSLContext]
) -> None:
    clients = [Client(server, *contexts, 1 << 16) for _ in range(TOGETHER)]
    for client in clients:
        client.speak()
    line = Line()
    known = HttpConnection(server)
    known.connection_made(line)
    room = known.get_buffer(-1)
    room[: len(REQUEST)] = REQUEST
    known.buffer_updated(len(REQUEST))
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
