"""HTTP/2 below gRPC: another author's client is answered, and what attackers send is bounded. The transport is a fake,
so that every turn of the loop is the test's."""

from __future__ import annotations

import asyncio
import random
import time
import tracemalloc
from collections.abc import AsyncIterator
from typing import Any

import pytest

jh2 = pytest.importorskip("jh2.connection")


from hpack import Decoder  # noqa: E402
from jh2.config import H2Configuration  # noqa: E402
from jh2.events import ConnectionTerminated, DataReceived, ResponseReceived, StreamReset, TrailersReceived  # noqa: E402

from tenuto.deployments.entry.http.http2 import MOST_STREAMS  # noqa: E402
from tenuto.deployments.entry.http.open_connections import Limits  # noqa: E402
from tenuto.deployments.entry.http.server import HttpServer  # noqa: E402
from tenuto.deployments.entry.protocols.grpc_calls import GrpcServer  # noqa: E402
from tenuto.deployments.entry.protocols.grpc_messages import InferRequest, InferResponse  # noqa: E402
from tenuto.deployments.wire.arena import Arena  # noqa: E402
from tests.instruments import http2_frames as http2  # noqa: E402
from tests.instruments.fake_transport import Line, read  # noqa: E402

ANSWER = b'{"model_name":"m","model_version":"1","outputs":[{"name":"y","datatype":"UINT8","shape":[%d],'
ANSWER += b'"parameters":{"binary_data_size":%d}}]}'
HEADERS = [
    (":method", "POST"),
    (":scheme", "http"),
    (":path", "/inference.GRPCInferenceService/ModelInfer"),
    (":authority", "here"),
    ("content-type", "application/grpc"),
    ("te", "trailers"),
]
BLOCK = b"".join(http2.literal(name.encode(), value.encode()) for name, value in HEADERS)


class Service:
    """Answers with as many bytes as it is told, at once or when the test says so."""

    def __init__(self) -> None:
        self.size = 3
        self.waits = False
        self.asked: list[Any] = []
        self.left = 0

    def refusal(self, exchange: Any) -> None:
        return None

    def handle(self, exchange: Any, _given: Any = None) -> None:
        self.asked.append(exchange)
        exchange.on_left = self._leave
        if not self.waits:
            self.answer(exchange)

    def answer(self, exchange: Any) -> None:
        exchange.respond(200, b"", [ANSWER % (self.size, self.size), bytes(self.size)])

    def _leave(self) -> None:
        self.left += 1


class Bench:
    def __init__(self) -> None:
        self.service = Service()
        self.arena = Arena(1 << 26)
        self.server = HttpServer(self.service, self.arena, Limits(unfinished_bytes=1 << 26))  # type: ignore[arg-type]
        self._grpc = GrpcServer(self.service)  # type: ignore[arg-type]
        self.connection, self.line = self.connected()
        self._decoder = Decoder()

    def connected(self) -> tuple[Any, Line]:
        """A new client."""
        connection, line = self._grpc.connection(self.server), Line()
        connection.connection_made(line)
        return connection, line

    def came(self, data: bytes) -> None:
        """Let bytes come, as many at once as the server reads; some in each turn of the loop."""
        while data and self.line.reads and not self.line.is_closed:
            data = read(self.connection, data)
        self.unread = data

    async def all_came(self, data: bytes) -> int:
        """Let bytes come until the server has looked at all of them; returns the turns that this took."""
        self.came(data)
        for turn in range(100_000):
            if not (self.unread or self.server.budget.waiting) or self.line.is_closed:
                return turn
            await asyncio.sleep(0)
            if self.unread and self.line.reads:
                self.came(self.unread)
        raise AssertionError("never read")

    def frames(self) -> list[tuple[int, int, int, bytes]]:
        """Kind, flags, stream and payload of what was sent, which is taken. A header block is told line by line."""
        self.connection.write_out()  # the turn has ended
        data, self.line.to_client, found, at = self.line.to_client, b"", [], 0
        while at < len(data):
            size, number = int.from_bytes(data[at : at + 3], "big"), int.from_bytes(data[at + 5 : at + 9], "big")
            payload = data[at + 9 : at + 9 + size]
            if data[at + 3] == http2.HEADERS:
                payload = b"\n".join(b": ".join(each) for each in self._decoder.decode(payload, raw=True))
            found.append((data[at + 3], data[at + 4], number, payload))
            at += 9 + size
        return found

    def resets(self) -> dict[int, int]:
        """The codes with which calls ended, by their numbers: the first one of each, as others follow late data."""
        codes: dict[int, int] = {}
        for kind, _, stream, payload in self.frames():
            if kind == http2.RST_STREAM:
                codes.setdefault(stream, int.from_bytes(payload, "big"))
        return codes

    def ended_with(self) -> int | None:
        """The code of the GOAWAY that was sent."""
        codes = [int.from_bytes(payload[4:8], "big") for kind, _, _, payload in self.frames() if kind == http2.GOAWAY]
        return codes[-1] if codes else None


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    made = Bench()
    yield made
    made.connection.connection_lost(None)
    assert made.server.unfinished_bytes == made.arena.used_bytes == 0
    assert made.service.left + sum(exchange.on_left is None for exchange in made.service.asked) >= len(
        made.service.asked
    )
    made.server.close()
    made.arena.close()


def message(size: int = 3, *, count: int = 1) -> bytes:
    asked = InferRequest(model_name="m", raw_input_contents=[bytes(size)])
    asked.inputs.add(name="x", datatype="UINT8", shape=[size])
    data: bytes = asked.SerializeToString()
    return (b"\0" + len(data).to_bytes(4, "big") + data) * count


def call(number: int, data: bytes | None = None) -> bytes:
    data = message() if data is None else data
    begun: bytes = http2.frame(http2.HEADERS, 4, number, BLOCK)
    return begun + http2.frame(http2.DATA, 1, number, data)


def begun() -> bytes:
    settings: bytes = http2.frame(http2.SETTINGS, 0, 0)
    return http2.PREFACE + settings


def number(value: int) -> bytes:
    return value.to_bytes(4, "big")


@pytest.mark.parametrize(
    ("size", "piece"), [(0, 7), (3, 1 << 30), (3, 7), (70_000, 1 << 30), (70_000, 7), (3_000_000, 1000)]
)
async def test_another_authors_client_is_answered(bench: Bench, size: int, piece: int) -> None:
    """Its state machine refuses whatever breaks the protocol: windows, order of frames, headers."""
    client = jh2.H2Connection(config=H2Configuration(client_side=True, header_encoding="utf-8"))
    client.initiate_connection()
    client.increment_flow_control_window(1 << 20)
    bench.service.size = size
    calls, left, found, trailers = [1, 3, 5], {}, {}, {}
    for each in calls:
        client.send_headers(each, HEADERS)
        left[each], found[each] = message(size), b""
    for _ in range(200_000):
        for each in calls:
            most = min(client.local_flow_control_window(each), client.max_outbound_frame_size, len(left[each]))
            if most > 0 and left[each]:
                client.send_data(each, left[each][:most], end_stream=most == len(left[each]))
                left[each] = left[each][most:]
        data = client.data_to_send()
        for at in range(0, len(data), piece):
            await bench.all_came(data[at : at + piece])
        bench.connection.write_out()
        answered, bench.line.to_client = bench.line.to_client, b""
        for event in client.receive_data(answered):
            if isinstance(event, DataReceived):
                found[event.stream_id] += event.data
                client.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
            elif isinstance(event, ResponseReceived):
                assert dict(event.headers)[":status"] == "200"
            elif isinstance(event, TrailersReceived):
                trailers[event.stream_id] = dict(event.headers)["grpc-status"]
            assert not isinstance(event, ConnectionTerminated | StreamReset)
        if len(trailers) == len(calls):
            break
    assert trailers == dict.fromkeys(calls, "0")
    for each in calls:
        told = InferResponse.FromString(found[each][5:])
        assert list(told.raw_output_contents) == [bytes(size)]


BOMB = b"\x40\x01a\x7f\x81\x1e" + bytes(3968) + b"\xbe" * 9000  # a header of 4 KB, 9,001 times
MALFORMED: list[tuple[str, bytes, int]] = [
    ("no preface", b"GET / HTTP/1.1\r\n\r\n" * 2, 1),
    ("a long frame", begun() + (1 << 20).to_bytes(3, "big") + bytes(6), 6),
    ("settings that are cut", begun() + http2.frame(http2.SETTINGS, 0, 0, b"12345"), 6),
    ("settings of a call", begun() + http2.frame(http2.SETTINGS, 0, 1), 1),
    ("a window beyond all", begun() + http2.frame(http2.SETTINGS, 0, 0, b"\0\4\xff\xff\xff\xff"), 3),
    ("a ping of no size", begun() + http2.frame(http2.PING, 0, 0, b"1"), 6),
    ("data of nothing", begun() + http2.frame(http2.DATA, 0, 0, b"1"), 1),
    ("data of a call to come", begun() + http2.frame(http2.DATA, 0, 5, b"1"), 1),
    ("a reset of a call to come", begun() + http2.frame(http2.RST_STREAM, 0, 5, number(8)), 1),
    ("a promise", begun() + http2.frame(http2.PUSH_PROMISE, 4, 1, number(2)), 1),
    ("a window that does not grow", begun() + http2.frame(http2.WINDOW_UPDATE, 0, 0, number(0)), 1),
    ("a window that is too large", begun() + http2.frame(http2.WINDOW_UPDATE, 0, 0, number(2**31 - 1)), 3),
    ("a call of the server", begun() + http2.frame(http2.HEADERS, 5, 2, BLOCK), 1),
    ("all padding", begun() + http2.frame(http2.HEADERS, 12, 1, b"\xff" + BLOCK), 1),
    ("a continuation of nothing", begun() + http2.frame(http2.CONTINUATION, 4, 1, BLOCK), 1),
    ("a ping within headers", begun() + http2.frame(http2.HEADERS, 0, 1, BLOCK) + http2.frame(6, 0, 0, bytes(8)), 1),
    ("headers that end too soon", begun() + http2.frame(http2.HEADERS, 5, 1, b"\x40\x0a"), 1),
    ("an index of nothing", begun() + http2.frame(http2.HEADERS, 5, 1, b"\xff\xff\x7f"), 1),
    ("a header bomb", begun() + http2.frame(http2.HEADERS, 5, 1, BOMB), 11),
]


@pytest.mark.parametrize(("data", "code"), [row[1:] for row in MALFORMED], ids=[row[0] for row in MALFORMED])
async def test_what_breaks_the_protocol_ends_the_connection(bench: Bench, data: bytes, code: int) -> None:
    await bench.all_came(data)
    assert (bench.ended_with(), bench.line.is_closed) == (code, True)
    assert bench.server.turned_away["malformed"] == 1


@pytest.mark.parametrize("size", [0, 100, 2000])
async def test_a_continuation_flood_ends_with_the_header_block(bench: Bench, size: int) -> None:
    flood = http2.frame(http2.HEADERS, 0, 1, BLOCK) + http2.frame(http2.CONTINUATION, 0, 1, b"\x82" * size) * 10_000
    await bench.all_came(begun() + flood)
    assert bench.ended_with() in (1, 11)  # h2 counts frames, and this server bytes
    assert len(bench.service.asked) == 0


async def test_calls_that_are_reset_at_once_are_no_more_than_others_in_a_turn(bench: Bench) -> None:
    """Rapid reset: calls are begun and given up. Each is counted as work, and nothing of it is kept."""
    bench.service.waits = True
    flood = b"".join(call(each) + http2.frame(http2.RST_STREAM, 0, each, number(8)) for each in range(1, 8001, 2))
    turns = await bench.all_came(begun() + flood)
    assert len(bench.service.asked) == bench.service.left == 4000
    assert turns >= 4000 / 16 - 2  # what a turn may do
    assert bench.connection.is_idle


async def test_at_most_so_many_calls_are_under_way(bench: Bench) -> None:
    bench.service.waits = True
    await bench.all_came(begun() + b"".join(map(call, range(1, 401, 2))))
    assert len(bench.service.asked) == MOST_STREAMS
    assert bench.resets() == dict.fromkeys(range(2 * MOST_STREAMS + 1, 401, 2), 7)
    for exchange in list(bench.service.asked):
        bench.service.answer(exchange)
    bench.service.waits = False
    await bench.all_came(call(401))
    assert len(bench.service.asked) == MOST_STREAMS + 1


async def test_answers_wait_for_the_clients_window_and_not_for_ever(bench: Bench) -> None:
    """A window of nothing, then of a byte at a time, then of all."""
    bench.service.size = 100_000
    await bench.all_came(begun() + http2.frame(http2.SETTINGS, 0, 0, b"\0\4\0\0\0\0") + call(1) + call(3))
    assert [kind for kind, *_ in bench.frames() if kind == http2.DATA] == []
    await bench.all_came(http2.frame(http2.WINDOW_UPDATE, 0, 3, number(1)) * 10)
    trickled = [(each, len(payload)) for kind, _, each, payload in bench.frames() if kind == http2.DATA]
    assert sum(size for _, size in trickled) == 10
    assert {each for each, _ in trickled} == {3}
    wide = http2.frame(http2.WINDOW_UPDATE, 0, 0, number(1 << 20)) + http2.frame(
        http2.WINDOW_UPDATE, 0, 1, number(1 << 20)
    )
    await bench.all_came(wide)
    sent = bench.frames()
    assert sum(len(payload) for kind, _, each, payload in sent if kind == http2.DATA and each == 1) > 100_000
    assert [flags for kind, flags, each, _ in sent if kind == http2.HEADERS and each == 1][-1] == 5
    bench.connection.check_time(bench.connection.changed_s + 59.0)
    assert not bench.connection.is_idle
    bench.connection.check_time(time.monotonic() + 61.0)
    assert [payload for kind, _, each, payload in bench.frames() if (kind, each) == (http2.RST_STREAM, 3)] == [
        number(11)
    ]
    assert bench.connection.is_idle


async def test_a_message_that_does_not_come_is_given_up(bench: Bench) -> None:
    await bench.all_came(
        begun() + http2.frame(http2.HEADERS, 4, 1, BLOCK) + http2.frame(http2.DATA, 0, 1, message(50_000)[:9000])
    )
    assert bench.server.unfinished_bytes
    bench.frames()
    bench.connection.check_time(asyncio.get_running_loop().time() + 61.0)
    assert not bench.server.unfinished_bytes
    _, trailers = [payload for kind, _, _, payload in bench.frames() if kind == http2.HEADERS]
    assert b"grpc-status: 4" in trailers


async def test_more_bytes_than_may_be_unfinished_are_refused(bench: Bench) -> None:
    bench.server.limits.unfinished_bytes = 100_000
    announced = b"\0" + number(16_000) + bytes(10_000)
    begins = [http2.frame(1, 4, each, BLOCK) + http2.frame(0, 0, each, announced) for each in range(1, 41, 2)]
    await bench.all_came(begun() + b"".join(begins))
    assert bench.server.unfinished_bytes <= 50_000  # one client leaves as much to the others
    refused = [payload for kind, _, _, payload in bench.frames() if kind == http2.HEADERS and b"grpc-status" in payload]
    assert len(refused) == 20 - 4  # each may announce 16,000, while as much is left


async def test_a_connection_that_drains_takes_no_more_calls(bench: Bench) -> None:
    bench.service.waits = True
    await bench.all_came(begun() + call(1))
    bench.connection.end()
    await bench.all_came(call(3))
    assert bench.resets() == {3: 7}
    assert not bench.line.is_closed
    bench.service.answer(bench.service.asked[0])
    assert bench.line.is_closed


@pytest.mark.parametrize("seed", [11, *(pytest.param(seed, marks=pytest.mark.night) for seed in range(12, 16))])
async def test_random_bytes_end_in_a_refusal_or_an_answer(seed: int) -> None:
    """Whole conversations with bytes changed."""
    draw = random.Random(seed)
    whole = begun() + call(1) + http2.frame(http2.PING, 0, 0, bytes(8)) + call(3) + call(5, message(count=2))
    for _ in range(600):
        data = bytearray(whole)
        for _ in range(draw.randint(1, 5)):
            data[draw.randrange(24, len(data))] = draw.randrange(256)
        bench = Bench()
        await bench.all_came(bytes(data))
        bench.connection.connection_lost(None)
        assert bench.server.unfinished_bytes == bench.arena.used_bytes == 0
        bench.server.close()
        bench.arena.close()


async def test_settings_that_nobody_knows_do_not_pile_up(bench: Bench) -> None:
    await bench.all_came(begun())
    for name in range(100, 400, 10):
        settings = b"".join(number(each)[2:] + number(0) for each in range(name, name + 10))
        await bench.all_came(http2.frame(http2.SETTINGS, 0, 0, settings))
    assert (bench.ended_with(), bench.line.is_closed) == (11, True)


async def test_a_client_cannot_have_a_large_table_of_headers_kept_for_it(bench: Bench) -> None:
    """Each refusal names what the client sent, so that each has headers of its own."""
    table = http2.frame(http2.SETTINGS, 0, 0, b"\0\1" + number((1 << 32) - 1))
    await bench.all_came(begun() + table + call(1))
    asked = {each: {**dict(HEADERS), ":path": f"/{each}" + "x" * 4000} for each in range(3, 403, 2)}
    blocks = {
        each: b"".join(http2.literal(name.encode(), value.encode()) for name, value in headers.items())
        for each, headers in asked.items()
    }
    tracemalloc.start()
    try:
        for each, block in blocks.items():
            await bench.all_came(http2.frame(http2.HEADERS, 5, each, block))
            bench.line.to_client = b""
        assert tracemalloc.get_traced_memory()[0] < 1 << 19
    finally:
        tracemalloc.stop()
