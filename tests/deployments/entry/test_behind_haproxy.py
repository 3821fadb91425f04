"""Request smuggling, tried: a real HAProxy in front, which gives the connections to us to whichever client comes next.

Every request that it forwards has a secret in its head. A request without it is one that HAProxy never saw as one."""

from __future__ import annotations

import asyncio
import os
import random
import secrets
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tenuto.deployments.entry.http.exchange import HttpError
from tenuto.deployments.entry.http.http1 import HttpConnection, HttpExchange
from tenuto.deployments.entry.http.open_connections import Limits
from tenuto.deployments.entry.http.server import HttpServer
from tenuto.deployments.serve.launcher import unused_port
from tenuto.deployments.wire.arena import Arena
from tests.deployments.entry.test_framing import REFUSED, TAKEN, made_up, post
from tests.instruments.live import PATIENCE_S

CASES = int(os.environ.get("TENUTO_FUZZ_CASES", "300"))
HAPROXY = shutil.which("haproxy", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
pytestmark = [
    pytest.mark.door,
    pytest.mark.skipif(HAPROXY is None, reason="no HAProxy on this machine (Debian: apt install haproxy)"),
]
CONFIG = """
global
    maxconn 2000
defaults
    mode http
    timeout connect 5s
    timeout client 5s
    timeout server 5s
    retries 0
frontend strict
    bind 127.0.0.1:{strict}
    http-request set-header X-Front {secret}
    default_backend ours
frontend lenient
    bind 127.0.0.1:{lenient}
    option accept-invalid-http-request
    http-request set-header X-Front {secret}
    default_backend ours
backend ours
    http-reuse always
    option http-keep-alive
    server ours 127.0.0.1:{ours} pool-max-conn 4
"""


class Behind:
    """Our server, which answers each request with its own path and body, and HAProxy in front of it."""

    def __init__(self) -> None:
        self.secret = secrets.token_hex(8)
        self.ours, self.strict, self.lenient = (unused_port() for _ in range(3))
        self.arena = Arena(1 << 20)
        self.server = HttpServer(self, self.arena, Limits(body_bytes=1 << 16, unfinished_bytes=1 << 20))
        self.unseen: list[bytes] = []  # requests that HAProxy never saw
        self.asked = 0

    def refusal(self, exchange: HttpExchange) -> HttpError | None:
        self.asked += 1
        if exchange.head.headers.get(b"x-front") != self.secret.encode():
            self.unseen.append(exchange.head.url)
        return None

    def handle(self, exchange: HttpExchange) -> None:
        exchange.respond(200, b"", [exchange.head.url, b" ", bytes(exchange.body)])


@pytest.fixture
async def behind(tmp_path: Path) -> AsyncIterator[Behind]:
    assert HAPROXY is not None
    made = Behind()
    await made.server.listen("127.0.0.1", made.ours, HttpConnection)
    file = tmp_path / "haproxy.cfg"
    file.write_text(CONFIG.format(secret=made.secret, strict=made.strict, lenient=made.lenient, ours=made.ours))
    process = await asyncio.create_subprocess_exec(HAPROXY, "-db", "-q", "-f", str(file))
    async with asyncio.timeout(PATIENCE_S):
        while True:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", made.strict)
            except OSError:
                await asyncio.sleep(0.01)
                continue
            writer.close()
            break
    yield made
    process.kill()
    await process.wait()
    await made.server.drain(0.0)
    made.server.close()
    await asyncio.sleep(0)
    made.arena.close()


async def sent(port: int, data: bytes, *, ends: bool = False) -> bytes:
    """Send bytes as another client, which may end its half then; return what comes back until nothing more does."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)
    if ends:
        writer.write_eof()
    try:
        async with asyncio.timeout(PATIENCE_S):
            return await reader.read()
    except ConnectionError:
        return b""
    finally:
        writer.close()


async def check(behind: Behind, attacks: list[bytes]) -> int:
    """Send each of them, and ask as two other clients after it; return how many of these got their own answer."""
    answered = 0
    for number, data in enumerate(attacks):
        for port in (behind.strict, behind.lenient):
            await sent(port, data, ends=True)
            for _ in range(2):
                victim = b"GET /victim/%d HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n" % number
                got = await sent(port, victim)
                own = b"/victim/%d " % number
                # Where we closed the connection HAProxy says 502 to whoever comes next, which is nobody else's answer.
                assert got.endswith(own) or got.startswith((b"HTTP/1.1 502", b"HTTP/1.0 502")), (data, got)
                answered += got.endswith(own)
            assert not behind.unseen, (data, behind.unseen)
    return answered


async def test_nobodys_answer_goes_to_another_client(behind: Behind) -> None:
    hidden = b"GET /hidden HTTP/1.1\r\nHost: x\r\n\r\n"
    lengths = [b"%d " % len(hidden), b"%d\t" % len(hidden), b"%d" % len(hidden), b"%048d" % len(hidden)]
    smuggled = [post(b"Content-Length: " + length, body=hidden) for length in lengths]
    attacks = [*smuggled * 5, *REFUSED.values(), *(data for data, _ in TAKEN.values())]
    attacks += [data + hidden for data in REFUSED.values()]
    assert await check(behind, attacks) > len(attacks) * 3


async def test_nor_with_bytes_that_are_made_up(behind: Behind) -> None:
    dice = random.Random(26)
    assert await check(behind, [made_up(dice) for _ in range(CASES)]) > CASES * 3
    assert behind.asked > CASES * 4
