"""However the network cuts a stream of requests into pieces, the server sees the same requests and says the same."""

from __future__ import annotations

import asyncio
import gc
import random
import re
from collections.abc import AsyncIterator, Iterable, Iterator
from typing import Any

import pytest

from tenuto.deployments.entry.http.exchange import HttpError
from tenuto.deployments.entry.http.http1 import HttpConnection, HttpExchange
from tenuto.deployments.entry.http.open_connections import Limits
from tenuto.deployments.entry.http.server import HttpServer
from tenuto.deployments.wire.arena import Arena

HOST = b"Host: localhost\r\n"
CHUNKED = b"POST /c HTTP/1.1\r\n" + HOST + b"Transfer-Encoding: chunked\r\n\r\n"
HIDDEN = b"GET /hidden HTTP/1.1\r\n" + HOST + b"\r\n"
SIZED = b"POST /s HTTP/1.1\r\n" + HOST + b"Content-Length: %d\r\n\r\n"
STREAMS = {
    "an empty chunked body": CHUNKED + b"0\r\n\r\n",
    "one chunk": CHUNKED + b"5\r\nhello\r\n0\r\n\r\n",
    "a chunk that reads as a request": CHUNKED + b"%x\r\n" % len(HIDDEN) + HIDDEN + b"\r\n0\r\n\r\n",
    "a request behind a chunked one": CHUNKED + b"0\r\n\r\n" + HIDDEN,
    "extensions and trailers": CHUNKED + b"1;a=b\r\nx\r\n0;c\r\nx-after: 1\r\n\r\n",
    "a size that is none": CHUNKED + b"zz\r\n" + HIDDEN,
    "a cut chunk": CHUNKED + b"5\r\nhe",
    "a length": SIZED % 5 + b"hello" + HIDDEN,
    "a length of nothing": SIZED % 0 + HIDDEN,
    "a large length": SIZED % 40_000 + HIDDEN * (40_000 // len(HIDDEN)) + bytes(40_000 % len(HIDDEN)) + HIDDEN,
    "a body that nobody wants": b"POST /no HTTP/1.1\r\n" + HOST + b"Content-Length: 5\r\n\r\nhello" + HIDDEN,
    "chunks that nobody wants": b"POST /no HTTP/1.1\r\n"
    + HOST
    + b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
    + HIDDEN,
    "both": b"POST / HTTP/1.1\r\n" + HOST + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "three at once": HIDDEN * 3,
    "no host": b"GET / HTTP/1.1\r\n\r\n" + HIDDEN,
}


class Heard(asyncio.Transport):
    """A socket whose client hears everything."""

    def __init__(self) -> None:
        super().__init__()
        self.written = bytearray()
        self.is_closed = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written += data

    def writelines(self, parts: Iterable[Any]) -> None:
        for part in parts:
            self.write(part)

    def is_closing(self) -> bool:
        return self.is_closed

    def close(self) -> None:
        self.is_closed = True

    abort = close

    def pause_reading(self) -> None:
        pass

    resume_reading = write_eof = pause_reading

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return ("127.0.0.1", 1) if name == "peername" else default


class Echo:
    """Answers each body with itself, and keeps what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[bytes, bytes]] = []

    def refusal(self, exchange: HttpExchange) -> HttpError | None:
        return HttpError(404, "not here") if exchange.head.url == b"/no" else None

    def handle(self, exchange: HttpExchange) -> None:
        self.asked.append((exchange.head.url, bytes(exchange.body)))
        exchange.respond(200, b"", [bytes(exchange.body)])


@pytest.fixture
async def server() -> AsyncIterator[HttpServer]:
    arena = Arena(4 << 20)
    limits = Limits(body_bytes=1 << 18, unfinished_bytes=4 << 20, connections=8)
    yield HttpServer(Echo(), arena, limits)
    arena.close()


async def played(server: HttpServer, pieces: Iterable[bytes]) -> tuple[list[tuple[bytes, bytes]], bytes]:
    """Return what was asked and what was answered, dates left out."""
    service = server.service
    assert isinstance(service, Echo)
    service.asked = []
    connection, transport = HttpConnection(server), Heard()
    connection.connection_made(transport)
    for piece in pieces:
        left = memoryview(piece)
        while left:
            room = connection.get_buffer(-1)
            size = min(len(room), len(left))
            room[:size] = left[:size]
            connection.buffer_updated(size)
            left = left[size:]
        await asyncio.sleep(0)
    await asyncio.sleep(0)
    connection.connection_lost(None)
    return service.asked, re.sub(rb"date: [^\r]*\r\n", b"", bytes(transport.written))


def cuts(stream: bytes) -> Iterator[list[bytes]]:
    """Cut in two at each place of the first and last 400 bytes, into single bytes, and at random."""
    for at in range(1, len(stream)):
        if at < 400 or at > len(stream) - 400:
            yield [stream[:at], stream[at:]]
    if len(stream) < 1000:
        yield [stream[at : at + 1] for at in range(len(stream))]
    rng = random.Random(5)
    for _ in range(40):
        places = sorted(rng.sample(range(1, len(stream)), min(len(stream) - 1, rng.randint(2, 12))))
        yield [stream[a:b] for a, b in zip([0, *places], [*places, len(stream)], strict=True)]


@pytest.mark.parametrize("name", STREAMS)
async def test_pieces_change_nothing(server: HttpServer, name: str) -> None:
    stream = STREAMS[name]
    whole = await played(server, [stream])
    for pieces in cuts(stream):
        assert await played(server, pieces) == whole, pieces[:4]
    assert server.unfinished_bytes == 0


async def test_what_lies_in_a_chunk_is_never_a_request(server: HttpServer) -> None:
    for name in ("a chunk that reads as a request", "a request behind a chunked one"):
        for pieces in cuts(STREAMS[name]):
            asked, _ = await played(server, pieces)
            assert [url for url, _ in asked] == [b"/c"]


@pytest.mark.parametrize("name", STREAMS)
async def test_a_connection_that_is_gone_leaves_no_circle(server: HttpServer, name: str) -> None:
    """A collection of garbage stops the loop: 45 ms for what 5,000 connections with a circle each leave."""
    stream = STREAMS[name]
    for pieces in ([stream], [stream[:9], stream[9:]], [stream[: len(stream) // 2]]):
        await played(server, pieces)
        gc.collect()
        gc.disable()
        gc.freeze()  # what else is there is not looked through
        try:
            await played(server, pieces)
            gc.set_debug(gc.DEBUG_SAVEALL)
            gc.collect()
            left = [
                type(each).__name__ for each in gc.garbage if type(each).__module__.startswith(("tenuto", "httptools"))
            ]
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
            gc.unfreeze()
            gc.enable()
        assert left == []
