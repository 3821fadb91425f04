"""However many connections become ready at once, the work of one turn of the loop is bounded, and nobody loses by it.

Work is counted: Python and C functions that are called between two events of the loop. No clock is asked."""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
from starlette.types import Receive, Scope, Send

from tenuto.deployments.entry.http.http1 import HttpConnection, HttpExchange
from tenuto.deployments.entry.http.loop_budget import MOST_WORK, LoopBudget
from tenuto.deployments.entry.http.open_connections import Limits
from tenuto.deployments.entry.http.server import HttpServer
from tenuto.deployments.entry.service.management import ManagementService
from tenuto.deployments.wire.arena import Arena
from tests.deployments.entry.test_endless import ENDLESS, Service
from tests.instruments import fake_transport
from tests.instruments.fake_transport import Calls, Deaf

pytestmark = pytest.mark.door

TOGETHER = 1000
MOST_CALLS = 20_000  # of a turn: one read of the smallest chunks has 11,000
# What each sends: first, and then as much as a read takes.
READ = 1 << 16
AT_ONCE = {name: (first, (more * (READ // len(more) + 1))[:READ]) for name, (first, more) in ENDLESS.items() if more}
AT_ONCE["a body's end"] = (b"POST /x HTTP/1.1\r\nHost: x\r\nContent-Length: 20000\r\n\r\n" + bytes(19_999), b"x")
# A connection that is put off costs its read and its place in the queue, and nothing of what it sent.
MOST_PUT_OFF = 25


@pytest.fixture
async def server() -> AsyncIterator[HttpServer]:
    arena = Arena(64 << 20)
    limits = Limits(body_bytes=1 << 18, unfinished_bytes=64 << 20, connections=2 * TOGETHER)
    made = HttpServer(Service(), arena, limits)
    yield made
    arena.close()


def connect(server: HttpServer, count: int) -> list[tuple[HttpConnection, Deaf]]:
    pairs = []
    for _ in range(count):
        transport = Deaf()
        connection = transport.connection = HttpConnection(server)
        connection.connection_made(transport)
        pairs.append((connection, transport))
    return pairs


def read(connection: HttpConnection, transport: Deaf, data: memoryview) -> memoryview:
    """Let a connection read what is there, as the loop does once in a turn; return what it left."""
    if not transport.reads or transport.is_closed:
        return data
    return fake_transport.read(connection, data)


@pytest.mark.parametrize("name", AT_ONCE)
async def test_no_turn_does_more_because_more_are_ready(server: HttpServer, name: str) -> None:
    first, block = AT_ONCE[name]
    pairs = connect(server, TOGETHER)
    for data in (first, block) if first else (block,):
        rest = [memoryview(data)] * TOGETHER
        for _turn in range(8):
            with Calls() as calls:
                for number, (connection, transport) in enumerate(pairs):
                    rest[number] = read(connection, transport, rest[number])
            assert calls.count < MOST_CALLS + TOGETHER * MOST_PUT_OFF
            with Calls() as calls:
                await asyncio.sleep(0)
            assert calls.count < MOST_CALLS
        for _ in range(10 * TOGETHER):
            await asyncio.sleep(0)
            if not server.budget.waiting or data is block:
                break
    for connection, _transport in pairs:
        connection.connection_lost(None)
    await _quiet(server)
    assert server.arena.used_bytes == server.unfinished_bytes == 0


async def _quiet(server: HttpServer) -> None:
    """Let all turns come that somebody waits for."""
    for _ in range(10 * TOGETHER):
        await asyncio.sleep(0)
        if server.budget.left > 0 and not server.budget.waiting:
            return
    raise AssertionError("somebody waits without end")


async def test_nor_because_all_leave_or_all_are_too_slow(server: HttpServer, monkeypatch: pytest.MonkeyPatch) -> None:
    left = []

    def keep(exchange: HttpExchange) -> None:
        exchange.on_left = lambda: [left.append(number) for number in range(20)]  # as much as to call off a request

    monkeypatch.setattr(server.service, "handle", keep)
    pairs = connect(server, TOGETHER)
    for connection, transport in pairs:
        read(connection, transport, memoryview(ENDLESS["requests"][1] * 40))
    while server.budget.waiting:
        await asyncio.sleep(0)
    with Calls() as calls:
        for connection, _transport in pairs:
            connection.connection_lost(None)
    assert calls.count < MOST_CALLS + TOGETHER * MOST_PUT_OFF
    while server.budget.waiting:
        with Calls() as calls:
            await asyncio.sleep(0)
        assert calls.count < MOST_CALLS
    assert len(left) == 20 * TOGETHER

    slow = connect(server, TOGETHER)
    for connection, transport in slow:
        while server.budget.left <= 0:
            await asyncio.sleep(0)
        read(connection, transport, memoryview(b"GET / HTTP/1.1\r\n"))
        connection.changed_s -= 1000.0
    with Calls() as calls:
        server.look_at_times()
    assert calls.count < MOST_CALLS
    for _ in range(TOGETHER):
        with Calls() as calls:
            await asyncio.sleep(0)
        assert calls.count < MOST_CALLS
    assert all(transport.has_ended for _, transport in slow)
    server.close()


async def test_one_request_in_a_turn_is_answered_by_the_application(server: HttpServer) -> None:
    begun = ended = 0
    most = 0

    async def app(_scope: Scope, _receive: Receive, send: Send) -> None:
        nonlocal begun
        begun += 1
        await send({"type": "http.response.start", "status": 200})
        await send({"type": "http.response.body", "body": b"{}"})

    server.service = ManagementService(server.budget, app)
    pairs = connect(server, 100)
    for connection, transport in pairs:
        read(connection, transport, memoryview(ENDLESS["requests"][1] * 5))
    pairs[7][0].connection_lost(None)  # one that leaves holds nobody up
    for _ in range(100_000):
        before = begun
        await asyncio.sleep(0)
        most = max(most, begun - before)
        ended = sum(connection.gives_way for connection, _ in pairs)
        if ended == len(pairs):
            break
    assert ended == len(pairs)
    assert most == 1


# --- nobody loses by it -----------------------------------------------------------------------------------------------


class Echo:
    """Answers each body with its length and sum, now or in a later turn."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance

    def refusal(self, exchange: HttpExchange) -> None:
        del exchange

    def handle(self, exchange: HttpExchange) -> None:
        body = bytes(exchange.body)
        payload = b"%d %d" % (len(body), sum(body))
        respond: Callable[[], None] = lambda: exchange.respond(200, b"", [payload])  # noqa: E731
        if self._chance.random() < 0.5:
            respond()
        else:
            asyncio.get_running_loop().call_soon(respond)


class Heard(Deaf):
    """Keeps what is written; its client is there."""

    def __init__(self) -> None:
        super().__init__()
        self.heard = b""

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.heard += bytes(data)

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self if name == "socket" else super().get_extra_info(name, default)

    def getsockopt(self, *_: int) -> int:
        return 0


def asked(chance: random.Random) -> Iterator[tuple[bytes, bytes]]:
    """Yield requests of one client, and what each is to be answered."""
    for number in range(chance.randrange(1, 30)):
        body = chance.randbytes(chance.choice([0, 1, 100, 5000, 20_000, 70_000]))
        told = b"%d %d" % (len(body), sum(body))
        if chance.random() < 0.05:
            cut = chance.randrange(1, 2000)
            parts = [body[at : at + cut] for at in range(0, len(body), cut)]
            chunks = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"
            yield b"POST /%d HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n" % number + chunks, told
            return  # what follows a chunked body is not looked for
        yield b"POST /%d HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (number, len(body), body), told


@pytest.mark.parametrize("seed", range(12))
async def test_whoever_is_put_off_gets_every_answer_in_order(server: HttpServer, seed: int) -> None:
    chance = random.Random(f"turns {seed}")
    server.service = Echo(chance)
    clients = []
    for _ in range(5 * MOST_WORK):
        transport = Heard()
        connection = transport.connection = HttpConnection(server)
        connection.connection_made(transport)
        requests = list(asked(chance))
        clients.append((connection, transport, memoryview(b"".join(request for request, _ in requests)), requests))
    ended = set()
    for _ in range(5000):
        for number, (connection, transport, data, requests) in enumerate(clients):
            if chance.random() < 0.05:
                connection.pause_writing()
                asyncio.get_running_loop().call_soon(connection.resume_writing)
            if not data and transport.reads and number not in ended:
                ended.add(number)  # its client closes its half, which is read where anything is read
                if not connection.eof_received():
                    transport.close()
                continue
            some = data[: chance.choice([50, 5000, 1 << 20])]
            taken = len(some) - len(read(connection, transport, some)) if some else 0
            clients[number] = connection, transport, data[taken:], requests
        await asyncio.sleep(0)
        if all(transport.is_closed or transport.has_ended for _, transport, _, _ in clients):
            break
    for connection, transport, data, requests in clients:
        assert not data
        found = re.sub(rb"HTTP/1.1 100 Continue\r\n\r\n", b"", transport.heard).split(b"HTTP/1.1 ")[1:]
        assert [answer.partition(b"\r\n\r\n")[2] for answer in found] == [told for _, told in requests]
        connection.connection_lost(None)
    await _quiet(server)
    assert server.arena.used_bytes == server.unfinished_bytes == 0


class Sending:
    """A connection that has always more to be looked at."""

    def __init__(self, budget: LoopBudget, takes: int) -> None:
        self.budget, self.takes, self.went_on = budget, takes, 0

    def resume(self) -> None:
        self.went_on += 1
        self.budget.spend(self.takes)
        self.budget.wait_behind(self)


@pytest.mark.parametrize(
    ("takes", "others", "least"), [(0, 0, 8), (1, 0, 5), (4, 0, 2), (MOST_WORK, 0, 1), (4, MOST_WORK, 1)]
)
async def test_who_sends_ahead_uses_what_a_turn_has_left(takes: int, others: int, least: int) -> None:
    budget = LoopBudget(asyncio.get_running_loop())
    ahead, first = Sending(budget, takes), [Sending(budget, 1) for _ in range(others)]
    budget.wait_behind(ahead)
    for each in first:
        budget.wait(each)
    await asyncio.sleep(0)
    assert least <= ahead.went_on <= MOST_WORK
    assert all(each.went_on == 1 for each in first)
    assert budget.left >= -takes - 1
