"""Clients that ask and do not read what they are answered, over real sockets: whatever kind of answer it is, the server
keeps little of it, gives the client up in time, and others do not wait."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import ssl
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tenuto.deployments.entry.http.http1 import HttpConnection
from tenuto.deployments.entry.http.open_connections import Limits
from tenuto.deployments.entry.http.server import HttpServer, Speaks
from tenuto.deployments.security.certificate import Certificate
from tenuto.deployments.serve.launcher import unused_port
from tenuto.deployments.wire.arena import Arena
from tests.deployments.entry.test_access import certificate
from tests.instruments import http2_frames as http2
from tests.instruments.asking import until
from tests.instruments.live import PATIENCE_S

grpc_calls = pytest.importorskip("tenuto.deployments.entry.protocols.grpc_calls")

from tests.deployments.entry.test_endless_http2 import REFLECTED, REFLECTION, data, head  # noqa: E402
from tests.deployments.entry.test_http2 import ANSWER, begun, message, number  # noqa: E402

pytestmark = pytest.mark.door

CLIENTS = 12
LARGE = 1 << 20
UNFINISHED_BYTES = 8 << 20
PIECE = b"data: " + json.dumps({"model_name": "m", "model_version": "1", "text_output": "x" * 900}).encode()
# Of a stream that nobody reads, all kernels and servers keep together less than this.
MOST_OF_A_STREAM = 1 << 20
HTTP = "GET /{} HTTP/1.1\r\nHost: x\r\n\r\n"
EVERY_WINDOW = http2.frame(4, 0, 0, b"\0\4" + number((1 << 31) - 1)) + http2.frame(8, 0, 0, number((1 << 31) - 65_536))
NO_WINDOW = http2.frame(4, 0, 0, b"\0\4" + number(0))
INFER = "inference.GRPCInferenceService/ModelInfer"


class Service:
    """Answers at once with a megabyte, or in parts without end."""

    def __init__(self) -> None:
        self.streams: list[Stream] = []
        self.kind = ""

    def refusal(self, exchange: Any) -> None:
        del exchange

    def handle(self, exchange: Any, _given: Any = None) -> None:
        kind = exchange.head.url[1:].decode()
        kind = self.kind if kind.startswith("v2") and self.kind else kind
        if kind == "stream":
            self.streams.append(Stream(exchange))
        elif kind == "small":
            exchange.respond(200, b"", [b"here"])
        elif exchange.head.url.startswith(b"/v2"):
            exchange.respond(200, b"", [ANSWER % (LARGE, LARGE), bytes(LARGE)])
        else:
            exchange.respond(200, b"", [bytes(LARGE)])


class Stream:
    """An answer in parts, as fast as the loop goes, until its client is given up."""

    def __init__(self, exchange: Any) -> None:
        self.exchange = exchange
        self.sent = 0
        self.is_left = False
        exchange.on_left = self._leave
        exchange.begin(200, b"")
        self._send()

    def _leave(self) -> None:
        self.is_left = True

    def _send(self) -> None:
        if not self.is_left:
            self.exchange.send(PIECE)
            self.sent += len(PIECE)
            asyncio.get_running_loop().call_soon(self._send)


class Bench:
    def __init__(self) -> None:
        self.service = Service()
        self.arena = Arena(1 << 24)
        limits = Limits(unfinished_bytes=UNFINISHED_BYTES)
        self.server = HttpServer(self.service, self.arena, limits)
        self.port = unused_port()
        self._open: list[socket.socket] = []
        self._writers: list[asyncio.StreamWriter] = []

    async def ask(self, sent: bytes, tls: ssl.SSLContext | None) -> None:
        """Send this on a connection of its own, and never read."""
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.setblocking(False)
        await asyncio.get_running_loop().sock_connect(connection, ("127.0.0.1", self.port))
        if tls is None:
            self._open.append(connection)
            with contextlib.suppress(OSError, TimeoutError):
                async with asyncio.timeout(0.5):  # the server reads no more, which is as well
                    await asyncio.get_running_loop().sock_sendall(connection, sent)
        else:
            _, writer = await asyncio.open_connection(sock=connection, ssl=tls, server_hostname="127.0.0.1", limit=1)
            writer.write(sent)
            self._writers.append(writer)

    def kept_in_kernel(self) -> int:
        """Bytes that the kernel keeps of this server's answers, by its table of connections."""
        rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        return sum(int(row[4].split(":")[0], 16) for row in rows if row[1].endswith(f":{self.port:04X}"))

    async def close(self) -> None:
        for connection in self._open:
            connection.close()
        for writer in self._writers:
            writer.transport.abort()
        await until(lambda: not self.server.places.taken())
        assert self.server.untaken.bytes == self.server.unfinished_bytes == self.arena.used_bytes == 0
        self.server.stop_listening("127.0.0.1", self.port)
        self.server.close()
        self.arena.close()


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    made = Bench()
    yield made
    await made.close()


def piped(kind: str, count: int) -> bytes:
    return (HTTP.format(kind) * count).encode()


def called(windows: bytes, kind: str, calls: int, messages: int = 1) -> bytes:
    made = begun() + windows
    for stream in range(1, 2 * calls, 2):
        made += head(stream, kind) + data(stream, message() * messages, 1 if kind == INFER else 0)
    return made


STREAMED = INFER.replace("Model", "ModelStream")
# What is asked, and whether the answers come in parts: such a client is given up as soon as it is behind.
KINDS: dict[str, tuple[bytes, bool]] = {
    "a stream": (piped("stream", 1), True),
    "streams one behind the other": (piped("stream", 3), True),
    "whole answers": (piped("large", 100), False),
    "small answers": (piped("small", 20_000), False),
    "gRPC: a stream": (called(EVERY_WINDOW, STREAMED, 1), True),
    "gRPC: a stream without a window": (called(NO_WINDOW, STREAMED, 1), True),
    "gRPC: many streams": (called(EVERY_WINDOW, STREAMED, 30), True),
    "gRPC: whole answers": (called(EVERY_WINDOW, INFER, 100), False),
    "gRPC: whole answers without a window": (called(NO_WINDOW, INFER, 100), False),
    "gRPC: answers of a stream": (called(EVERY_WINDOW, STREAMED, 3, 100), False),
    "gRPC: answers of a stream without a window": (called(NO_WINDOW, STREAMED, 3, 100), False),
    "gRPC: what there is": (begun() + EVERY_WINDOW + head(1, REFLECTION) + data(1, REFLECTED * 30_000), False),
    "gRPC: pings": (begun() + http2.frame(http2.PING, 0, 0, bytes(8)) * 100_000, False),
}


@pytest.mark.parametrize("encrypted", [False, True], ids=["plain", "TLS"])
@pytest.mark.parametrize("name", KINDS)
async def test_a_client_that_reads_nothing_is_given_up_and_nobody_waits_for_it(
    bench: Bench, tmp_path: Path, name: str, encrypted: bool
) -> None:
    sent, is_stream = KINDS[name]
    server, service = bench.server, bench.service
    tls = trust = None
    if encrypted:
        cert, key = certificate(tmp_path)
        tls = Certificate(str(cert), str(key), ["h2" if name.startswith("gRPC") else "http/1.1"])
        trust = ssl.create_default_context(cafile=cert)
    speaks: Speaks = HttpConnection
    if name.startswith("gRPC"):
        speaks = grpc_calls.GrpcServer(service).connection
        service.kind = "stream" if is_stream else ""
    await server.listen("127.0.0.1", bench.port, speaks, tls=tls)
    for _ in range(CLIENTS):
        await bench.ask(sent, trust)
    asked_of = unused_port()
    await server.listen("127.0.0.1", asked_of, HttpConnection)
    reader, writer = await asyncio.open_connection("127.0.0.1", asked_of)
    seen = most = 0
    async with asyncio.timeout(PATIENCE_S):
        for _ in range(200):
            writer.write(piped("small", 1))
            await writer.drain()
            assert (await reader.readuntil(b"here")).startswith(b"HTTP/1.1 200")
            most = max(most, server.untaken.bytes)
            seen += 1
    assert seen == 200
    assert most <= UNFINISHED_BYTES + LARGE  # the last answer is counted once it is there
    if is_stream:
        async with asyncio.timeout(PATIENCE_S):
            while not all(stream.is_left for stream in service.streams):
                await asyncio.sleep(0)
        assert max(stream.sent for stream in service.streams) < MOST_OF_A_STREAM
    else:
        if not encrypted:
            assert bench.kept_in_kernel() < CLIENTS * MOST_OF_A_STREAM
        for connection in server.places.taken():  # a minute later
            connection.check_time(time.monotonic() + 61.0)
        await until(lambda: server.untaken.bytes == 0)
        writer.write(piped("small", 1))
        await writer.drain()
    writer.close()
    server.stop_listening("127.0.0.1", asked_of)
