"""A client that sends one part of a request without end: what it may hold is bounded, and so is what is done at once.

Work is counted: Python calls between two events of the loop, and bytes that are held. No clock is asked."""

from __future__ import annotations

import asyncio
import itertools
import tracemalloc
from collections.abc import AsyncIterator, Iterator

import pytest

from tenuto.deployments.entry.http.exchange import HttpError
from tenuto.deployments.entry.http.http1 import HttpConnection, HttpExchange
from tenuto.deployments.entry.http.open_connections import Limits
from tenuto.deployments.entry.http.server import HttpServer
from tenuto.deployments.wire.arena import Arena
from tests.instruments.fake_transport import Calls, Deaf, Line, read

SENT_BYTES = 1 << 19
BODY_BYTES = 1 << 16
MOST_HELD_BYTES = 1 << 20  # twice a body and what a transport holds back
MOST_CALLS = 40_000  # between two events; a read of 64 KiB has up to 11,000 chunks, of one byte each


class Service:
    """Answers everything at once with a kilobyte, or never."""

    def __init__(self) -> None:
        self.answers = True
        self.asked = 0

    def refusal(self, exchange: HttpExchange) -> HttpError | None:
        return HttpError(404, "not here") if exchange.head.url == b"/no" else None

    def handle(self, exchange: HttpExchange) -> None:
        self.asked += 1
        if self.answers:
            exchange.respond(200, b"", [bytes(1024)])


@pytest.fixture
async def server() -> AsyncIterator[HttpServer]:
    arena = Arena(4 << 20)
    made = HttpServer(Service(), arena, Limits(body_bytes=BODY_BYTES, unfinished_bytes=4 << 20, connections=8))
    yield made
    arena.close()


POST = b"POST /x HTTP/1.1\r\nHost: x\r\n"
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"
GET = b"GET /x HTTP/1.1\r\nHost: x\r\n\r\n"
ENDLESS: dict[str, tuple[bytes, bytes]] = {
    "method": (b"", b"POST"),
    "target": (b"GET /", b"x"),
    "query": (b"GET /?", b"a=b&"),
    "version": (b"GET / HTTP/1.", b"1"),
    "empty lines": (b"", b"\r\n"),
    "spaces": (b"GET ", b" "),
    "header name": (POST, b"x"),
    "header value": (POST + b"X: ", b"x"),
    "spaces before a value": (POST + b"X:", b" "),
    "headers": (POST, b"X: y\r\n"),
    "headers of many names": (POST, b""),  # made below
    "length": (POST + b"Content-Length: ", b"0"),
    "keys": (POST + b"Authorization: Bearer ", b"k"),
    "body beyond the limit": (POST + b"Content-Length: 99999999999\r\n\r\n", b"x"),
    "body that is refused": (b"POST /no HTTP/1.1\r\nHost: x\r\nContent-Length: 999999\r\n\r\n", b"x"),
    "chunks": (CHUNKED, b"1000\r\n" + b"x" * 4096 + b"\r\n"),
    "chunks of one byte": (CHUNKED, b"1\r\nx\r\n"),
    "one chunk": (CHUNKED + b"ffffffff\r\n", b"x"),
    "chunk size": (CHUNKED, b"0"),
    "extension name": (CHUNKED + b"1;", b"x"),
    "extension value": (CHUNKED + b"1;a=", b"x"),
    "extension in quotes": (CHUNKED + b'1;a="', b"x"),
    "extensions": (CHUNKED + b"1", b";a=b"),
    "extensions of each chunk": (CHUNKED, b"1;%b\r\nx\r\n" % (b"a" * 400)),
    "trailer name": (CHUNKED + b"0\r\n", b"x"),
    "trailer value": (CHUNKED + b"0\r\nX: ", b"x"),
    "trailers": (CHUNKED + b"0\r\n", b"X: y\r\n"),
    "requests": (b"", GET),
    "refused requests": (b"", GET.replace(b"/x", b"/no")),
    "requests with a body": (b"", POST + b"Content-Length: 1\r\n\r\nx"),
    "requests after a close": (POST + b"Connection: close\r\n\r\n", GET),
    "upgrades": (b"", POST + b"Connection: upgrade\r\nUpgrade: websocket\r\n\r\n"),
    "frames after an upgrade": (POST + b"Connection: upgrade\r\nUpgrade: websocket\r\n\r\n", b"\x81\x7e\xff\xff"),
    "HTTP/2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", bytes(9)),
    "TLS": (bytes.fromhex("160301020001000100fc0303"), b"\xaa"),
    "zeros": (b"", b"\0"),
}
# Bodies of refused requests, and what comes after the last request that a connection answers.
THROWN_AWAY = {name for name in ENDLESS if "body" in name} | {
    "requests after a close",
    "upgrades",
    "frames after an upgrade",
}


def sent(name: str, piece: int) -> Iterator[bytes]:
    """Return what a client sends, in pieces."""
    first, more = ENDLESS[name]
    block = more * max(1, (1 << 16) // len(more)) if more else b""
    waiting = bytearray(first)
    for number in itertools.count():
        waiting += block or b"".join(b"X%d: y\r\n" % (number * 5000 + n) for n in range(5000))
        while len(waiting) >= piece:
            yield bytes(waiting[:piece])
            del waiting[:piece]


@pytest.mark.parametrize(
    "how", ["answered", *(pytest.param(how, marks=pytest.mark.door) for how in ("never answered", "never reads"))]
)
@pytest.mark.parametrize("name", ENDLESS)
async def test_nothing_a_client_sends_without_end_is_kept_or_worked_on_without_end(
    server: HttpServer, name: str, how: str
) -> None:
    service = server.service
    assert isinstance(service, Service)
    service.answers = how != "never answered"
    transport = Deaf(hears=how != "never reads")
    connection = transport.connection = HttpConnection(server)
    connection.connection_made(transport)
    with Calls() as calls:
        await asyncio.sleep(0)
    idle = calls.count
    turn = idle + MOST_CALLS
    tracemalloc.start()
    given = 0
    try:
        for piece in sent(name, 1 << 16):
            rest = memoryview(piece)
            while rest and transport.reads and not transport.is_closed:
                with Calls() as calls:
                    rest = read(connection, rest)
                assert calls.count < MOST_CALLS
            given += len(piece) - len(rest)
            for _ in range(2000):  # what is read and not looked at yet
                if transport.reads or transport.is_closed:
                    break
                with Calls() as calls:
                    await asyncio.sleep(0)
                assert calls.count < turn
                if calls.count <= idle:
                    break
            if transport.is_closed or not transport.reads or given > SENT_BYTES:
                break
            assert tracemalloc.get_traced_memory()[0] < MOST_HELD_BYTES
        assert tracemalloc.get_traced_memory()[1] < MOST_HELD_BYTES
    finally:
        tracemalloc.stop()
    assert server.arena.used_bytes + server.unfinished_bytes <= 2 * BODY_BYTES
    # It is refused, or not read any more, or reads its answers; or what it sends is thrown away, which takes no memory.
    ends = transport.has_ended or transport.is_closed or not transport.reads
    assert ends or transport.written > 1024 or name in THROWN_AWAY
    connection.connection_lost(None)
    assert server.arena.used_bytes == server.unfinished_bytes == 0


@pytest.mark.door  # how requests are cut has no part in what they are: `test_framing.py` by day
@pytest.mark.parametrize("name", [name for name in ENDLESS if "body" not in name])
async def test_nor_what_comes_in_small_pieces(server: HttpServer, name: str) -> None:
    transport = Deaf()
    connection = transport.connection = HttpConnection(server)
    connection.connection_made(transport)
    work = given = 0
    for piece in itertools.islice(sent(name, 7), 6000):  # more than a head may have
        if transport.is_closed or transport.has_ended or not transport.reads:
            break
        with Calls() as calls:
            read(connection, piece)
        assert calls.count < 1000
        work += calls.count
        given += 7
        await asyncio.sleep(0)
    assert work < 40 * given + 1000
    connection.connection_lost(None)


def asked(server: HttpServer, transport: Deaf) -> tuple[HttpConnection, HttpExchange]:
    """Return a connection, and what its client has asked there."""
    kept: list[HttpExchange] = []
    server.service.handle = kept.append  # type: ignore[method-assign]
    connection = transport.connection = HttpConnection(server)
    connection.connection_made(transport)
    read(connection, GET)
    return connection, kept[0]


async def test_a_stream_that_nobody_reads_is_given_up(server: HttpServer) -> None:
    transport = Deaf(hears=False)
    connection, stream = asked(server, transport)
    left: list[int] = []
    stream.on_left = lambda: left.append(1)
    stream.begin(200, b"")
    given = 0
    with Calls() as calls:
        while not transport.is_closed:
            stream.send(bytes(1000))
            given += 1000
            assert given < 3 << 16
    assert calls.count < 40 * given // 1000  # each costs as much as the first
    connection.connection_lost(None)
    assert left == [1]
    assert server.turned_away["slow"] == 1
    stream.send(b"x")
    stream.end()  # the step that ran has brought it


async def test_a_stream_that_is_read_slowly_is_whole(server: HttpServer) -> None:
    transport = Line()
    connection, stream = asked(server, transport)
    stream.begin(200, b"")
    for number in range(1000):
        stream.send(b"%d," % number)
        if number % 70 == 0:
            connection.pause_writing()
        elif number % 70 == 50:
            connection.resume_writing()
    connection.pause_writing()
    stream.send(b"last")
    stream.end()
    chunks = transport.to_client.partition(b"\r\n\r\n")[2].split(b"\r\n")[1::2]
    assert b"".join(chunks) == b"".join(b"%d," % number for number in range(1000)) + b"last"
    assert transport.to_client.endswith(b"0\r\n\r\n")
