"""HTTP on our own socket: real sockets, a service that answers when told to."""

from __future__ import annotations

import asyncio
import resource
import socket
import time
from collections.abc import AsyncIterator, Callable

import pytest

from tenuto.deployments.entry.http.exchange import HttpError
from tenuto.deployments.entry.http.http1 import HttpConnection, HttpExchange
from tenuto.deployments.entry.http.loop_budget import LoopBudget
from tenuto.deployments.entry.http.open_connections import Limits
from tenuto.deployments.entry.http.server import HttpServer
from tenuto.deployments.wire.arena import Arena
from tests.instruments.asking import until
from tests.instruments.live import PATIENCE_S

LARGE = 300_000  # received into shared memory
ARENA = 1 << 20


class EchoService:
    """Answers each body with itself; with `hold` only when `release` is called. `/no` needs no body."""

    def __init__(self) -> None:
        self.hold = False
        self.held: list[HttpExchange] = []
        self.in_slot: list[bool] = []
        self.left = 0

    def refusal(self, exchange: HttpExchange) -> HttpError | None:
        if exchange.head.url == b"/wrong":
            return HttpError(401, "not known", after_s=0.05)
        exchange.key = "ann" if exchange.head.url == b"/key" else ""
        return HttpError(404, "not here") if exchange.head.url == b"/no" else None

    def handle(self, exchange: HttpExchange) -> None:
        if exchange.head.url == b"/bug":
            raise ZeroDivisionError
        self.in_slot.append(exchange.slot is not None)
        exchange.on_left = self._leave
        if self.hold:
            self.held.append(exchange)
        else:
            self.answer(exchange)

    def answer(self, exchange: HttpExchange) -> None:
        exchange.respond(200, b"", [bytes(exchange.body)])

    def _leave(self) -> None:
        self.left += 1


class Client:
    """A connection that says and hears bytes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    def say(self, data: bytes) -> None:
        self.writer.write(data)

    async def hear(self) -> tuple[int, bytes, dict[bytes, bytes]]:
        """Return the next response: status, body, headers."""
        async with asyncio.timeout(PATIENCE_S):
            lines = (await self.reader.readuntil(b"\r\n\r\n")).splitlines()
            headers = dict(line.lower().split(b": ", 1) for line in lines[1:-1])
            body = await self.reader.readexactly(int(headers[b"content-length"]))
        return int(lines[0].split()[1]), body, headers

    async def hear_until(self, end: bytes) -> bytes:
        async with asyncio.timeout(PATIENCE_S):
            return await self.reader.readuntil(end)

    async def hear_end(self) -> bytes:
        """Return what comes until the server closes; it may reset what it has not read."""
        async with asyncio.timeout(PATIENCE_S):
            try:
                return await self.reader.read()
            except ConnectionResetError:
                return b""

    def leave(self) -> None:
        self.writer.transport.abort()


class Bench:
    """A server on a free port of the loopback interface."""

    def __init__(self) -> None:
        self.service = EchoService()
        self.arena = Arena(ARENA)
        self.limits = Limits(body_bytes=ARENA // 2, unfinished_bytes=ARENA, connections=8)
        self.server = HttpServer(self.service, self.arena, self.limits)
        self.port = 0
        self._clients: list[Client] = []

    async def start(self) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        await self.server.listen("127.0.0.1", self.port, HttpConnection)

    async def client(self) -> Client:
        client = Client(*await asyncio.open_connection("127.0.0.1", self.port))
        self._clients.append(client)
        return client

    async def close(self) -> None:
        for client in self._clients:
            client.leave()
        await self.server.drain(1.0)
        await asyncio.sleep(0)
        self.server.close()
        self.arena.close()


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    made = Bench()
    await made.start()
    yield made
    await made.close()


def request(body: bytes = b"", url: bytes = b"/x", headers: bytes = b"", method: bytes = b"POST") -> bytes:
    return b"%b %b HTTP/1.1\r\nHost: x\r\n%bContent-Length: %d\r\n\r\n%b" % (method, url, headers, len(body), body)


def chunked(*chunks: bytes) -> bytes:
    parts = b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks)
    return b"POST /x HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n" + parts + b"0\r\n\r\n"


@pytest.mark.parametrize(
    ("piece", "size"), [(1, 3), *((piece, n) for piece in (977, 1 << 20) for n in (0, 1, 1000, 20_000, 70_000, LARGE))]
)
async def test_a_body_of_any_size_in_pieces_of_any_size_arrives_whole(bench: Bench, size: int, piece: int) -> None:
    client = await bench.client()
    body = bytes(n * 7 % 251 for n in range(size))
    for _ in range(2):  # the second head is known by its bytes
        sent = request(body)
        for at in range(0, len(sent), piece):
            client.say(sent[at : at + piece])
            if size < 5000:
                await asyncio.sleep(0.001)
        assert (await client.hear())[:2] == (200, body)
    assert bench.service.in_slot == [size >= 1 << 14] * 2
    assert bench.arena.used_bytes == 0


async def test_requests_sent_ahead_are_answered_one_after_the_other(bench: Bench) -> None:
    bench.service.hold = True
    client = await bench.client()
    bodies = [b"%d" % n * (40_000 if n == 2 else 1) for n in range(6)]
    client.say(b"".join(request(body) for body in bodies))
    for number, body in enumerate(bodies):
        await until(lambda: len(bench.service.held) > number)  # noqa: B023
        await asyncio.sleep(0.002)
        assert len(bench.service.held) == number + 1  # the next one is not read before the answer
        bench.service.answer(bench.service.held[number])
        assert (await client.hear())[1] == body


async def test_a_request_sent_ahead_counts_its_time_from_the_answer_of_the_one_before(bench: Bench) -> None:
    bench.service.hold = True
    client = await bench.client()
    client.say(request(b"1") + request(b"2"))
    await until(lambda: len(bench.service.held) == 1)
    answered_ms = time.monotonic() * 1000.0
    bench.service.answer(bench.service.held[0])
    await until(lambda: len(bench.service.held) == 2)
    assert bench.service.held[1].arrived_ms >= answered_ms


async def test_little_is_read_ahead_of_an_answer(bench: Bench) -> None:
    bench.service.hold = True
    client = await bench.client()
    client.say(request(b"x") * 200_000)  # more than both sockets hold
    await until(lambda: len(bench.service.held) == 1)
    await asyncio.sleep(0.05)
    assert client.writer.transport.get_write_buffer_size() > 0
    assert len(bench.service.held) == 1
    bench.service.hold = False
    bench.service.answer(bench.service.held[0])
    for _ in range(5000):
        assert (await client.hear())[0] == 200


@pytest.mark.parametrize("ahead", [0, 1, 50])
async def test_a_client_that_leaves_before_its_answer_is_noticed(bench: Bench, ahead: int) -> None:
    bench.service.hold = True
    client = await bench.client()
    client.say(request(b"x") + request(b"y") * ahead)
    await until(lambda: len(bench.service.held) == 1)
    await asyncio.sleep(0.01)
    client.leave()
    await until(lambda: bench.service.left == 1)
    await until(lambda: not bench.server.status().connections)


async def test_who_asks_once_waits_for_one_request_of_each_that_sent_ahead(bench: Bench) -> None:
    bench.limits.connections = 100
    honest, *greedy = [await bench.client() for _ in range(41)]
    for client in greedy:
        client.say(request() * 400)
    served = bench.service.in_slot
    await until(lambda: len(served) >= len(greedy))
    before = len(served)
    honest.say(request(b"mine"))
    assert (await honest.hear())[1] == b"mine"
    assert len(served) - before < 4 * len(greedy)  # a round until its bytes are read, another until its turn
    for client in greedy:
        for _ in range(400):
            assert (await client.hear())[0] == 200


async def test_refused_requests_cost_no_memory_and_the_next_one_is_read(bench: Bench) -> None:
    client = await bench.client()
    client.say(request(bytes(LARGE), url=b"/no"))
    assert (await client.hear())[:2] == (404, b'{"error":"not here"}')
    client.say(request(bytes(ARENA)))
    assert (await client.hear())[0] == 413
    client.say(request(b"next"))
    assert (await client.hear())[1] == b"next"
    assert bench.arena.used_bytes == 0


async def test_a_client_that_sends_all_before_it_reads_gets_its_refusal(bench: Bench) -> None:
    def ask() -> bytes:
        with socket.create_connection(("127.0.0.1", bench.port)) as connection:
            connection.sendall(request(bytes(8 * ARENA), headers=b"Connection: close\r\n"))
            return connection.recv(100)

    heard = await asyncio.wait_for(asyncio.get_running_loop().run_in_executor(None, ask), PATIENCE_S)
    assert heard.startswith(b"HTTP/1.1 413 ")
    await until(lambda: not bench.server.status().connections)


async def test_a_refused_body_that_was_announced_is_not_waited_for(bench: Bench) -> None:
    client = await bench.client()
    client.say(b"POST /no HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 99999\r\n\r\n")
    assert (await client.hear())[0] == 404
    assert await client.hear_end() == b""


async def test_a_body_that_asks_first_is_asked_for(bench: Bench) -> None:
    client = await bench.client()
    client.say(b"POST /x HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 3\r\n\r\n")
    async with asyncio.timeout(PATIENCE_S):
        assert await client.reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
    client.say(b"abc")
    assert (await client.hear())[1] == b"abc"


async def test_when_all_memory_is_in_use_the_next_body_is_refused_and_later_ones_are_not(bench: Bench) -> None:
    bench.service.hold = True
    holders = [await bench.client() for _ in range(2)]
    for client in holders:
        client.say(request(bytes(LARGE)))
    await until(lambda: len(bench.service.held) == 2)
    late = await bench.client()
    late.say(request(bytes(LARGE)))
    status, body, headers = await late.hear()
    assert (status, headers[b"retry-after"]) == (503, b"1")
    assert b"unfinished" in body
    bench.service.hold = False
    for exchange in bench.service.held:
        bench.service.answer(exchange)
    late.say(request(bytes(LARGE)))
    assert (await late.hear())[0] == 200


async def test_chunked_bodies_are_joined_and_end_their_connection(bench: Bench) -> None:
    client = await bench.client()
    client.say(chunked(b"ab", b"c" * 30_000, b"d"))
    status, body, headers = await client.hear()
    assert (status, body, headers[b"connection"]) == (200, b"ab" + b"c" * 30_000 + b"d", b"close")
    assert await client.hear_end() == b""
    client = await bench.client()
    client.say(chunked(*[bytes(60_000)] * 20))
    assert (await client.hear())[0] == 413
    assert bench.server.unfinished_bytes == 0


@pytest.mark.parametrize(
    ("said", "status"),
    [
        (b"nonsense\r\n\r\n", 400),
        (b"POST /x HTTP/1.1\r\nContent-Length: many\r\n\r\n", 400),
        (b"POST /x HTTP/1.1\r\n" + b"X-Long: " + b"x" * 40_000 + b"\r\n\r\n", 431),
        (b"POST /x HTTP/1.1\r\n" + b"X: y\r\n" * 20_000, 431),
    ],
)
async def test_what_is_no_http_is_answered_and_its_connection_closed(bench: Bench, said: bytes, status: int) -> None:
    client = await bench.client()
    client.say(said)
    assert (await client.hear())[0] == status
    assert await client.hear_end() == b""
    other = await bench.client()
    other.say(request(b"fine"))
    assert (await other.hear())[1] == b"fine"


async def test_connections_end_as_their_client_wishes(bench: Bench) -> None:
    client = await bench.client()
    client.say(request(b"x", headers=b"Connection: close\r\n") + request(b"not read"))
    assert (await client.hear())[2][b"connection"] == b"close"
    assert await client.hear_end() == b""
    client = await bench.client()
    client.say(b"GET /x HTTP/1.1\r\nHost: x\r\nConnection: TE, close\r\n\r\n")
    assert (await client.hear())[2][b"connection"] == b"close"
    assert await client.hear_end() == b""
    client = await bench.client()
    client.say(b"GET /x HTTP/1.0\r\n\r\n")
    assert (await client.hear())[0] == 200
    assert await client.hear_end() == b""
    client = await bench.client()
    client.say(request(b"", method=b"HEAD"))
    async with asyncio.timeout(PATIENCE_S):
        assert b"content-length: 0" in await client.reader.readuntil(b"\r\n\r\n")


async def test_a_client_that_leaves_frees_what_it_held(bench: Bench) -> None:
    bench.service.hold = True
    waiting, sending = await bench.client(), await bench.client()
    waiting.say(request(bytes(LARGE)))
    sending.say(request(bytes(LARGE))[: LARGE // 2])
    await until(lambda: len(bench.service.held) == 1 and bench.arena.used_bytes > LARGE + 65536)
    waiting.leave()
    sending.leave()
    await until(lambda: bench.service.left == 1 and bench.arena.used_bytes == 0)
    bench.service.answer(bench.service.held[0])  # too late, and silent


async def test_a_client_that_sends_nothing_more_gets_what_it_has_asked_for(bench: Bench) -> None:
    bench.service.hold = True
    client = await bench.client()
    client.say(request(b"1") + request(b"2") + request(b"cut")[:-1])
    client.writer.write_eof()
    for number in range(2):
        await until(lambda: len(bench.service.held) > number)  # noqa: B023
        bench.service.answer(bench.service.held[number])
    async with asyncio.timeout(PATIENCE_S):
        assert await client.reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
    assert [(await client.hear())[1] for _ in range(2)] == [b"1", b"2"]
    assert await client.hear_end() == b""
    await until(lambda: not bench.server.status().connections)


async def test_a_defect_is_an_answer_and_the_connection_goes_on(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    client = await bench.client()
    client.say(request(url=b"/bug") + request(b"next"))
    status, body, _ = await client.hear()
    assert (status, b"ZeroDivisionError" in body) == (500, False)
    assert (await client.hear())[1] == b"next"
    assert "a request to b'/bug' failed" in caplog.text
    assert "ZeroDivisionError" in caplog.text


async def test_more_connections_than_allowed_are_turned_away_and_the_others_stay(bench: Bench) -> None:
    bench.service.hold = True
    clients = [await bench.client() for _ in range(8)]
    for client in clients:
        client.say(request(b"x"))
    await until(lambda: len(bench.service.held) == 8)
    ninth = await bench.client()
    status, body, headers = await ninth.hear()
    assert (status, headers[b"retry-after"], headers[b"connection"]) == (503, b"1", b"close")
    assert b"too many connections" in body
    for exchange in bench.service.held:
        bench.service.answer(exchange)
    for client in clients:
        assert (await client.hear())[1] == b"x"


async def test_the_connection_that_was_idle_for_longest_gives_way_to_a_new_one(bench: Bench) -> None:
    clients = [await bench.client() for _ in range(8)]
    await _connections(bench, 8)
    for client in (clients[0], *clients[2:]):
        client.say(request(b"x"))
        assert (await client.hear())[0] == 200
    for _ in range(2):
        ninth = await bench.client()
        ninth.say(request(b"y"))
        assert (await ninth.hear())[1] == b"y"
    assert await clients[1].hear_end() == b""  # which never asked
    assert await clients[0].hear_end() == b""
    for client in clients[2:]:
        client.say(request(b"z"))
        assert (await client.hear())[1] == b"z"


async def test_connections_without_a_key_take_none_of_those_with_one(bench: Bench) -> None:
    bench.server.places.has_keys = True  # 8 places, 2 of them for strangers
    clients = []
    for _ in range(6):
        client = await bench.client()
        client.say(request(b"x", url=b"/key"))
        assert (await client.hear())[0] == 200
        clients.append(client)
    strangers = [await bench.client() for _ in range(30)]
    for number, stranger in enumerate(strangers):
        stranger.say((b"", b"POST /x HTTP", request(b"x", headers=b"X-Api-Key: no\r\n"))[number % 3])
    await until(lambda: bench.server.turned_away["idle"] >= 28)
    assert bench.server.status().connections <= 8
    for client in clients:
        client.say(request(b"y", url=b"/key"))
        assert (await client.hear())[1] == b"y"
    late = await bench.client()  # a place of the strangers, then that of the client that was idle for longest
    late.say(request(b"late", url=b"/key"))
    assert (await late.hear())[1] == b"late"
    assert await clients[0].hear_end() == b""
    bench.service.hold = True
    for client in (late, *clients[1:]):
        client.say(request(b"z", url=b"/key"))
    await until(lambda: len(bench.service.held) == 6)
    one_more = await bench.client()
    one_more.say(request(b"z", url=b"/key"))
    assert (await one_more.hear())[0] == 503
    stranger = await bench.client()
    stranger.say(request(b"no", url=b"/no"))
    assert (await stranger.hear())[0] == 404


async def test_the_answer_to_a_wrong_key_waits_and_holds_nobody_up(bench: Bench) -> None:
    slowed, other = await bench.client(), await bench.client()
    slowed.say(request(b"x", url=b"/wrong") * 2)
    await until(lambda: bench.server.turned_away["key"] == 1)
    other.say(request(b"x"))
    assert (await other.hear())[0] == 200
    status, _, headers = await slowed.hear()
    assert (status, headers[b"connection"]) == (401, b"close")
    assert await slowed.hear_end() == b""
    assert bench.server.turned_away["key"] == 1


@pytest.mark.parametrize(
    ("said", "passed_s", "answer"),
    [(b"POST /x HT", 11.0, b"408"), (request(b"abc")[:-1], 61.0, b"408"), (b"", 301.0, b"")],
)
async def test_slow_senders_and_idle_connections_are_ended(
    bench: Bench, said: bytes, passed_s: float, answer: bytes
) -> None:
    client = await bench.client()
    (connection,) = await _connections(bench, 1)
    idle_since_s = connection.changed_s
    client.say(said)
    await until(lambda: not said or connection.changed_s != idle_since_s)
    connection.check_time(connection.changed_s + passed_s - 2.0)
    await asyncio.sleep(0.01)
    assert (client.reader.at_eof(), bench.server.turned_away["slow"]) == (False, 0)
    connection.check_time(connection.changed_s + passed_s)
    heard = await client.hear_end()
    assert heard.split(b" ", 2)[1:2] == ([answer] if answer else [])


async def test_a_thousand_idle_and_half_spoken_connections_cost_the_others_nothing(bench: Bench) -> None:
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    many = min(1000, (files - 200) // 2)  # both ends are here
    bench.limits.connections = many + 1
    for number in range(many):
        client = await bench.client()
        client.say(b"" if number % 2 else request(b"x" * LARGE)[:20])
    await _connections(bench, many)
    busy = await bench.client()
    for number in range(20):
        busy.say(request(b"%d" % number))
        assert (await busy.hear())[:2] == (200, b"%d" % number)
    assert bench.arena.used_bytes == bench.server.unfinished_bytes == 0  # no memory before the headers are there


async def _connections(bench: Bench, count: int) -> list[HttpConnection]:
    await until(lambda: len(bench.server.places.taken()) == count)
    return bench.server.places.taken()


async def test_draining_answers_what_is_under_way_and_says_that_it_ends(bench: Bench) -> None:
    bench.service.hold = True
    client, idle = await bench.client(), await bench.client()
    client.say(request(b"last"))
    await _connections(bench, 2)
    await until(lambda: len(bench.service.held) == 1)
    draining = asyncio.create_task(bench.server.drain(PATIENCE_S))
    await asyncio.sleep(0)
    bench.service.answer(bench.service.held[0])
    _, body, headers = await client.hear()
    assert (body, headers[b"connection"]) == (b"last", b"close")
    await draining
    bench.server.close()
    assert await idle.hear_end() == b""
    with pytest.raises(OSError, match=r"refused|Connect call failed"):
        await bench.client()


async def test_gateways_of_one_machine_share_a_port(bench: Bench) -> None:
    second = HttpServer(EchoService(), bench.arena, bench.limits)
    for is_shared in (False, True):
        with pytest.raises(OSError, match="in use"):  # what is not shared cannot be shared by others
            await second.listen("127.0.0.1", bench.port, HttpConnection, is_shared=is_shared)
    await bench.server.listen("127.0.0.1", bench.port, HttpConnection, is_shared=True)
    await second.listen("127.0.0.1", bench.port, HttpConnection, is_shared=True)
    reached = set()
    for _ in range(60):
        client = await bench.client()
        client.say(request(b"x", headers=b"Connection: close\r\n"))
        assert (await client.hear())[0] == 200
        reached.add(bool(second.service.in_slot) if isinstance(second.service, EchoService) else None)
        client.leave()
    assert bench.service.in_slot
    assert reached == {True, False} or reached == {True}
    await second.drain(0.0)
    second.close()


class Loop:
    """A loop whose turns the test runs, and a clock that it sets."""

    def __init__(self) -> None:
        self.now_s = 10.0
        self.later: list[Callable[[], None]] = []

    def call_soon(self, callback: Callable[[], None]) -> None:
        self.later.append(callback)

    def end_turn(self) -> None:
        later, self.later = self.later, []
        for callback in later:
            callback()


def test_bytes_that_waited_for_the_loop_are_dated_back_and_others_are_not() -> None:
    loop = Loop()
    turns = LoopBudget(loop, clock=lambda: loop.now_s)  # type: ignore[arg-type]
    loop.now_s = 10.050  # the loop slept: they came now
    assert turns.arrived_ms() == 10_050.0
    loop.now_s = 10.080  # the same turn, after 30 ms of work
    assert turns.arrived_ms() == 10_050.0
    loop.end_turn()
    assert turns.arrived_ms() == 10_050.0  # found by the next poll at once: since the one before, which ended then
    loop.end_turn()
    loop.now_s = 10.0801
    assert turns.arrived_ms() == 10_080.0


async def test_a_response_in_parts_leaves_part_by_part_and_in_turn(bench: Bench) -> None:
    bench.service.hold = True
    client = await bench.client()
    client.say(request() + request())
    await until(lambda: len(bench.service.held) == 1)
    (first,) = bench.service.held
    first.begin(200, b"x-n: 1\r\n")
    first.send(b"early")
    head = await client.hear_until(b"\r\n\r\n")
    assert b"transfer-encoding: chunked" in head
    assert b"content-length" not in head
    assert await client.hear_until(b"early\r\n") == b"5\r\nearly\r\n"
    assert len(bench.service.held) == 1
    first.send(b"late")
    first.end()
    assert await client.hear_until(b"0\r\n\r\n") == b"4\r\nlate\r\n0\r\n\r\n"
    await until(lambda: len(bench.service.held) == 2)
    first.send(b"too late")
    first.end()
    bench.service.held[1].respond(200, b"", [b"second"])
    assert (await client.hear())[1] == b"second"
    bench.service.hold = False
    client.say(request(b"again"))
    assert (await client.hear())[1] == b"again"


async def begun(bench: Bench, said: bytes, part: bytes) -> tuple[Client, HttpExchange]:
    """Return a client whose response has begun with a part."""
    bench.service.hold = True
    client = await bench.client()
    client.say(said)
    await until(lambda: bool(bench.service.held))
    (exchange,) = bench.service.held
    exchange.begin(200, b"")
    exchange.send(part)
    return client, exchange


async def test_an_old_client_hears_parts_until_the_connection_closes(bench: Bench) -> None:
    client, exchange = await begun(bench, b"POST /x HTTP/1.0\r\nContent-Length: 0\r\n\r\n", b"one,")
    exchange.send(b"two")
    exchange.end()
    head, _, body = (await client.hear_end()).partition(b"\r\n\r\n")
    assert b"connection: close" in head
    assert b"transfer-encoding" not in head
    assert body == b"one,two"


async def test_a_client_that_leaves_amid_parts_is_noticed(bench: Bench) -> None:
    client, exchange = await begun(bench, request(), b"one")
    await client.hear_until(b"one\r\n")
    client.leave()
    await asyncio.sleep(0.05)
    exchange.send(b"two")
    await until(lambda: bench.service.left == 1)
    exchange.send(b"three")  # nobody hears it
    exchange.end()


async def test_a_client_that_sends_no_more_hears_all_parts(bench: Bench) -> None:
    client, exchange = await begun(bench, request(), b"one")
    await client.hear_until(b"one\r\n")
    client.writer.write_eof()
    await asyncio.sleep(0.05)
    exchange.send(b"two")
    exchange.end()
    assert await client.hear_end() == b"3\r\ntwo\r\n0\r\n\r\n"
