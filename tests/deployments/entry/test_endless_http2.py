"""A client of gRPC that sends one part of a call without end, or takes no answer: what it may hold is bounded, and so
is what is done at once. As `test_endless.py` has it for HTTP/1.1, with what attackers do to HTTP/2 besides."""

from __future__ import annotations

import asyncio
import tracemalloc
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from hpack import Encoder

pytest.importorskip("h2")

from tenuto.deployments.entry.protocols.grpc_messages import HEALTH, SERVICE, InferRequest
from tests.deployments.entry.test_http2 import HEADERS, Bench, begun, message, number
from tests.instruments import http2_frames as http2
from tests.instruments.fake_transport import Calls, Line, read

pytestmark = pytest.mark.door

SENT_BYTES = 2 << 20
SENT_FRAMES = 1500  # of small ones
UNFINISHED_BYTES = 1 << 18
MOST_HELD_BYTES = 7 << 18  # what may be unfinished, and what a transport and the connection hold back
MOST_CALLS = 20_000  # between two events
MOST_CALLS_BESIDE = 50_000  # until a call beside many is answered; a frame has some 150 in h2, of 0.1 us each
CLIENTS = 100
ROUNDS = 5
FOUND_OUT = 2  # from this round on, who sends too much waits behind others
ANSWERED = Encoder().encode([(b"grpc-status", b"0")])  # of the first call of a connection
REFLECTION = "grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"


def block(call: str, *more: tuple[str, str]) -> bytes:
    headers = [(name, f"/{call}" if name == ":path" else value) for name, value in HEADERS]
    return b"".join(http2.literal(name.encode(), value.encode()) for name, value in [*headers, *more])


def head(stream: int = 1, call: str = f"{SERVICE}/ModelStreamInfer", flags: int = 4) -> bytes:
    made: bytes = http2.frame(http2.HEADERS, flags, stream, block(call))
    return made


def data(stream: int, payload: bytes, flags: int = 0) -> bytes:
    parts = [payload[at : at + 16_000] for at in range(0, len(payload), 16_000)]
    return b"".join(http2.frame(http2.DATA, flags if part is parts[-1] else 0, stream, part) for part in parts)


WIDE = http2.frame(http2.SETTINGS, 0, 0, b"\0\4" + number((1 << 31) - 1)) + http2.frame(
    http2.WINDOW_UPDATE, 0, 0, number((1 << 31) - 1 - 65_535)
)
NARROW = http2.frame(http2.SETTINGS, 0, 0, b"\0\4" + number(0))
DESCRIBED = InferRequest(model_name="m" * 200_000).SerializeToString()
REFLECTED = b"\0\0\0\0\2" + b"\x3a\x00"  # list_services


def calls(first: bytes, *, each: bytes = b"", path: str = f"{SERVICE}/ModelInfer", is_reset: bool = False) -> Any:
    """Calls one after the other, each with new bytes where `each` has room for its number."""

    def more() -> Iterator[bytes]:
        yield first
        for stream in range(1, 2 * SENT_FRAMES, 2):
            sent = head(stream, path) + data(stream, each, 1)
            yield sent + (http2.frame(http2.RST_STREAM, 0, stream, number(8)) if is_reset else b"")

    return more


def again(first: bytes, block: bytes) -> Any:
    def more() -> Iterator[bytes]:
        yield first
        for _ in range(SENT_FRAMES):
            yield block

    return more


def metadata() -> Iterator[bytes]:
    """Calls whose metadata and model are always others."""
    yield begun() + WIDE
    for stream in range(1, 2 * SENT_FRAMES, 2):
        asked = InferRequest(model_name=f"{stream}" + "m" * 300).SerializeToString()
        yield http2.frame(http2.HEADERS, 4, stream, block(f"{SERVICE}/ModelInfer", ("x", f"{stream}" * 1000)))
        yield data(stream, b"\0" + len(asked).to_bytes(4, "big") + asked, 1)


def window(first: bytes) -> Any:
    """128 calls that are answered and have no window of their own, and a window for all that grows by a byte."""

    def more() -> Iterator[bytes]:
        yield first
        for stream in range(1, 257, 2):
            yield head(stream, f"{SERVICE}/ModelInfer") + data(stream, message(), 1)
        for _ in range(SENT_FRAMES):
            yield http2.frame(http2.WINDOW_UPDATE, 0, 0, number(1))

    return more


STREAM = begun() + head()
ENDLESS: dict[str, Any] = {
    "zeros": again(b"", bytes(9)),
    "settings": again(begun(), http2.frame(http2.SETTINGS, 0, 0, b"\0\4\0\0\0\1")),
    "many settings": again(begun(), http2.frame(http2.SETTINGS, 0, 0, b"\0\x10\0\0\0\1" * 2700)),
    "windows in settings": again(STREAM, NARROW + WIDE[:15]),
    "acknowledgements": again(begun(), http2.frame(http2.SETTINGS, 1, 0)),
    "pings": again(begun(), http2.frame(http2.PING, 0, 0, bytes(8))),
    "priorities": again(begun(), http2.frame(http2.PRIORITY, 0, 3, bytes(5))),
    "unknown frames": again(begun(), http2.frame(77, 0, 0, bytes(16_000))),
    "empty unknown frames": again(begun(), http2.frame(77, 0, 0)),
    "windows of all": again(begun(), http2.frame(http2.WINDOW_UPDATE, 0, 0, number(1))),
    "windows of a call": again(STREAM, http2.frame(http2.WINDOW_UPDATE, 0, 1, number(1))),
    "windows of stuck calls": window(begun() + NARROW),
    "one long frame": again(begun(), b"\xff\xff\xff" + bytes(70_000)),
    "a header block": again(begun() + head(flags=0), http2.frame(http2.CONTINUATION, 0, 1, b"\x82" * 1000)),
    "empty continuations": again(begun() + head(flags=0), http2.frame(http2.CONTINUATION, 0, 1)),
    "a header's value": again(begun() + head(flags=0)[:-1] + b"x", http2.frame(9, 0, 1, b"x" * 16_000)),
    "calls without data": calls(begun()),
    "calls that are reset": calls(begun(), each=message(), is_reset=True),
    "calls of their own metadata": metadata,
    "calls of nothing": calls(begun(), path="nothing"),
    "messages": again(STREAM, data(1, message(count=100))),
    "messages of nothing": again(STREAM, data(1, bytes(5) * 3000)),
    "long descriptions": again(STREAM, data(1, b"\0" + len(DESCRIBED).to_bytes(4, "big") + DESCRIBED)),
    "a long message": again(STREAM + data(1, b"\0" + number(1 << 20)), data(1, bytes(16_000))),
    "a longer message than any": again(STREAM + data(1, b"\0" + number(1 << 31)), data(1, bytes(16_000))),
    "a second message": again(begun() + head(1, f"{SERVICE}/ModelInfer") + data(1, message()), data(1, bytes(16_000))),
    "empty data": again(STREAM, http2.frame(http2.DATA, 0, 1)),
    "padding": again(STREAM, http2.frame(http2.DATA, 8, 1, b"\xff" + bytes(255))),
    "more than the window": again(STREAM + data(1, message(5000, count=20)), data(1, bytes(16_000))),
    "trailers": again(STREAM, http2.frame(http2.HEADERS, 5, 1, http2.literal(b"x", b"y"))),
    "what follows an end": again(STREAM + http2.frame(http2.DATA, 1, 1), http2.frame(http2.DATA, 0, 1, b"x")),
    "questions of what there is": again(begun() + head(1, REFLECTION), data(1, REFLECTED)),
    "questions without a window": again(begun() + NARROW + head(1, REFLECTION), data(1, REFLECTED)),
    "questions with every window": again(begun() + WIDE + head(1, REFLECTION), data(1, REFLECTED)),
    "messages with every window": again(begun() + WIDE + head(), data(1, message(5000, count=10))),
    "messages without a window": again(begun() + NARROW + head(), data(1, message(5000, count=10))),
    "a long question of health": again(
        begun() + head(1, f"{HEALTH}/Check") + data(1, b"\0" + number(1 << 20)), data(1, bytes(16_000))
    ),
}
# What costs a connection nothing that it keeps: it is looked at, in turns, as long as the client sends it.
LOOKED_AT = {
    *("settings", "windows in settings", "acknowledgements", "pings", "priorities", "calls that are reset"),
    *("unknown frames", "empty unknown frames", "empty data", "padding", "questions without a window"),
    *("windows of all", "windows of a call", "windows of stuck calls", "calls without data"),
    *("calls of nothing", "what follows an end"),
}


def pieces(sent: Iterator[bytes]) -> Iterator[bytes]:
    """What is sent, as much of it as a read takes."""
    waiting = bytearray()
    for each in sent:
        waiting += each
        if len(waiting) >= 1 << 16:
            yield bytes(waiting)
            waiting.clear()
    yield bytes(waiting)


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    made = Bench()
    made.service.size = 20_000
    made.server.limits.unfinished_bytes = UNFINISHED_BYTES
    yield made
    made.connection.connection_lost(None)
    assert made.server.unfinished_bytes == made.arena.used_bytes == made.server.untaken.bytes == 0
    made.server.close()
    made.arena.close()


@pytest.mark.parametrize("how", ["answered", "never answered", "never reads"])
@pytest.mark.parametrize("name", ENDLESS)
async def test_nothing_a_client_sends_without_end_is_kept_or_worked_on_without_end(
    bench: Bench, name: str, how: str
) -> None:
    bench.service.waits = how == "never answered"
    connection, line = bench.connection, bench.line
    with Calls() as counted:
        await asyncio.sleep(0)
    idle = counted.count
    given = written = 0
    tracemalloc.start()
    try:
        for piece in pieces(ENDLESS[name]()):
            rest = memoryview(piece)
            while rest and line.reads and not line.is_closed:
                before = len(rest)
                with Calls() as counted:
                    rest = read(connection, rest)
                assert counted.count < MOST_CALLS
                given += before - len(rest)
                for _ in range(20_000):
                    with Calls() as counted:
                        await asyncio.sleep(0)
                    assert counted.count < MOST_CALLS
                    if how == "never reads":
                        if len(line.to_client) > 1 << 16:
                            connection.pause_writing()
                    else:
                        written += len(line.to_client)
                        line.to_client = b""
                    if counted.count <= idle:
                        break
                assert tracemalloc.get_traced_memory()[0] < MOST_HELD_BYTES
            bench.service.asked.clear()  # it keeps them for tests
            if rest or line.is_closed or given > SENT_BYTES:
                break
        assert tracemalloc.get_traced_memory()[1] < MOST_HELD_BYTES
    finally:
        tracemalloc.stop()
    assert bench.server.unfinished_bytes + bench.arena.used_bytes <= 2 * UNFINISHED_BYTES
    if how == "never reads":
        assert len(line.to_client) < 1 << 20
    # It is refused, or not read any more, or answered; or what it sends is looked at and forgotten.
    assert line.is_closed or not line.reads or written > 1000 or name in LOOKED_AT or given > SENT_BYTES


@pytest.mark.parametrize("name", ENDLESS)
async def test_who_asks_once_does_not_wait_for_many_who_send_without_end(name: str) -> None:
    """Each of many clients sends more than it may in a turn. A call beside them is answered before theirs are."""
    bench = Bench()
    bench.server.limits.unfinished_bytes = UNFINISHED_BYTES
    floods: list[tuple[Any, Line, memoryview]] = []
    for _ in range(CLIENTS):
        connection, line = bench.connected()
        floods.append((connection, line, memoryview(next(pieces(ENDLESS[name]())))))
    for round in range(ROUNDS):
        for index, (connection, line, rest) in enumerate(floods):
            if rest and line.reads and not line.is_closed:
                floods[index] = connection, line, read(connection, rest)
            line.to_client = b""
        if not round:  # all came at once; who has sent too much is known once it has had a turn
            for _ in range(4 * CLIENTS):
                await asyncio.sleep(0)
        honest, its_line = bench.connected()
        read(honest, begun() + head(1, f"{SERVICE}/ModelInfer") + data(1, message(), 1))
        with Calls() as counted:
            while ANSWERED not in its_line.to_client:
                await asyncio.sleep(0)
        if round >= FOUND_OUT:
            assert counted.count < MOST_CALLS_BESIDE
        honest.connection_lost(None)
    for connection, _, _ in floods:
        connection.connection_lost(None)
    assert bench.server.unfinished_bytes == bench.arena.used_bytes == bench.server.untaken.bytes == 0
    bench.connection.connection_lost(None)
    bench.server.close()
    bench.arena.close()
