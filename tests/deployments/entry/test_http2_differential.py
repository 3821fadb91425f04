"""What h2 takes for no request when it gets a conversation frame by frame is none here, where connections have turns
and limits: a list of conversations, and made-up ones. `TENUTO_FUZZ_CASES` makes it a long run."""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Callable, Iterator

import pytest
from google.protobuf.message import DecodeError

h2 = pytest.importorskip("h2.connection")

from h2.config import H2Configuration  # noqa: E402
from h2.events import DataReceived, RequestReceived  # noqa: E402
from h2.exceptions import InvalidBodyLengthError, ProtocolError  # noqa: E402
from h2.utilities import HeaderValidationFlags, validate_headers  # noqa: E402
from hpack import Encoder  # noqa: E402

from tenuto.deployments.entry.protocols.grpc_messages import InferRequest  # noqa: E402
from tests.deployments.entry.test_http2 import BLOCK, HEADERS, Bench, number  # noqa: E402
from tests.instruments import http2_frames as http2  # noqa: E402

CASES = int(os.environ.get("TENUTO_FUZZ_CASES", "400"))
Header = tuple[bytes, bytes]
AT_A_SERVER = HeaderValidationFlags(is_client=False, is_trailer=False, is_response_header=False, is_push_promise=False)
GOOD: list[Header] = [(name.encode(), value.encode()) for name, value in HEADERS]
SETTINGS = http2.frame(http2.SETTINGS, 0, 0)


def message(name: str, size: int = 3) -> bytes:
    """A request whose answer can be told from every other."""
    asked = InferRequest(model_name="m", id=name, raw_input_contents=[name.encode() * size])
    asked.inputs.add(name="x", datatype="UINT8", shape=[size * len(name)])
    data: bytes = asked.SerializeToString()
    return b"\0" + len(data).to_bytes(4, "big") + data


def named(data: bytes) -> list[str]:
    """The names of the whole messages in what came of a call."""
    found = []
    while len(data) >= 5 and len(data) >= 5 + (size := int.from_bytes(data[1:5], "big")):
        with contextlib.suppress(DecodeError):
            found.append(InferRequest.FromString(data[5 : 5 + size]).id)
        data = data[5 + size :]
    return found


def theirs(sent: bytes) -> tuple[set[str], bool]:
    """The names of the requests that h2 reads, and whether it refuses the rest. Two things end a connection of h2 and
    not one of RFC 9113: malformed headers of one call (8.1.1), and a goodbye, behind which the calls go on that were
    begun (6.8). RFC 7838 (4) has a client's ALTSVC (10) ignored, whatever is in it."""
    config = H2Configuration(client_side=False, header_encoding=None, validate_inbound_headers=False)
    server = h2.H2Connection(config=config)
    server.initiate_connection()
    came: dict[int, bytes] = {}
    malformed: set[int] = set()
    is_refused = False
    try:
        for part in frames(sent):
            if part[3:4] == b"\x0a" or (part[3:4] == b"\x07" and len(part) >= 17 and part[5:9] == bytes(4)):
                continue
            for event in server.receive_data(part):
                if isinstance(event, RequestReceived):
                    came[event.stream_id] = b""
                    with contextlib.suppress(ProtocolError):
                        list(validate_headers(event.headers, AT_A_SERVER))
                        continue
                    malformed.add(event.stream_id)
                    server.reset_stream(event.stream_id)  # what else comes of this call means nothing (5.1)
                elif isinstance(event, DataReceived):
                    came[event.stream_id] += event.data
                    if event.flow_controlled_length:
                        server.increment_flow_control_window(event.flow_controlled_length)
                        server.increment_flow_control_window(event.flow_controlled_length, event.stream_id)
    except InvalidBodyLengthError:
        raise
    except (ProtocolError, KeyError):
        is_refused = True
    return {name for each, data in came.items() if each not in malformed for name in named(data)}, is_refused


def frames(sent: bytes) -> Iterator[bytes]:
    """What is sent frame by frame: h2 tells nothing of what it read beside a mistake."""
    yield sent[:24]
    at = 24
    while at < len(sent):
        end = at + 9 + int.from_bytes(sent[at : at + 3], "big")
        yield sent[at:end]
        at = end


async def ours(sent: bytes, piece: int = 1 << 30) -> tuple[set[str], bool]:
    """The names of the requests, and whether the rest is refused."""
    bench = Bench()
    for at in range(0, len(sent), piece):
        await bench.all_came(sent[at : at + piece])
    is_refused = bench.line.is_closed
    bench.connection.connection_lost(None)
    assert bench.server.unfinished_bytes == bench.arena.used_bytes == bench.server.untaken.bytes == 0
    bench.server.close()
    bench.arena.close()
    return {exchange.id for exchange in bench.service.asked}, is_refused


def block(headers: list[Header], encoder: Encoder | None = None) -> bytes:
    if encoder is None:
        return b"".join(http2.literal(*each) for each in headers)
    made: bytes = encoder.encode(headers)
    return made


def call(headers: list[Header], data: bytes | None = None, *, flags: int = 4, stream: int = 1) -> bytes:
    data = message("x") if data is None else data
    begun: bytes = http2.frame(http2.HEADERS, flags, stream, block(headers))
    return http2.PREFACE + SETTINGS + begun + http2.frame(http2.DATA, 1, stream, data)


def without(name: bytes) -> list[Header]:
    return [each for each in GOOD if each[0] != name]


SPELLED: dict[str, list[Header]] = {
    "no method": without(b":method"),
    "no scheme": without(b":scheme"),
    "no path": without(b":path"),
    "an empty path": [*without(b":path")[:3], (b":path", b""), *GOOD[4:]],
    "no authority": without(b":authority"),
    "two methods": [GOOD[0], *GOOD],
    "two authorities": [(b":authority", b"there"), *GOOD],
    "another host": [*GOOD, (b"host", b"there")],
    "two hosts": [*without(b":authority"), (b"host", b"here"), (b"host", b"there")],
    "a pseudo-header behind others": [*GOOD[1:], GOOD[0]],
    "an unknown pseudo-header": [(b":more", b"x"), *GOOD],
    "an answer's pseudo-header": [(b":status", b"200"), *GOOD],
    "a name with a capital": [*GOOD, (b"X-Slo-Ms", b"1")],
    "an empty name": [*GOOD, (b"", b"1")],
    "a colon alone": [(b":", b"1"), *GOOD],
    "a space in a name": [*GOOD, (b"a b", b"1")],
    "a colon in a name": [*GOOD, (b"a:b", b"1")],
    "a line's end in a name": [*GOOD, (b"a\r\nb", b"1")],
    "a line's end in a value": [*GOOD, (b"a", b"1\r\nb: 2")],
    "a zero in a value": [*GOOD, (b"a", b"1\0")],
    "a space before a value": [*GOOD, (b"a", b" 1")],
    "a space behind a value": [*GOOD, (b"a", b"1 ")],
    "connection": [*GOOD, (b"connection", b"close")],
    "keep-alive": [*GOOD, (b"keep-alive", b"1")],
    "proxy-connection": [*GOOD, (b"proxy-connection", b"close")],
    "transfer-encoding": [*GOOD, (b"transfer-encoding", b"chunked")],
    "upgrade": [*GOOD, (b"upgrade", b"h2c")],
    "te": [*without(b"te"), (b"te", b"gzip")],
    "a length that is short": [*GOOD, (b"content-length", b"3")],
    "a length that is long": [*GOOD, (b"content-length", b"3000")],
    "a length that is none": [*GOOD, (b"content-length", b"-1")],
    "two lengths": [*GOOD, (b"content-length", b"3"), (b"content-length", b"%d" % len(message("x")))],
}
BEGUN = http2.PREFACE + SETTINGS
_HEADED = http2.frame(http2.HEADERS, 4, 1, BLOCK)
_DATA = http2.frame(http2.DATA, 1, 1, message("x"))
FRAMED: dict[str, bytes] = {  # what is judged before h2 has a frame, or beside it; h2spec tries the rest
    "half a preface": http2.PREFACE[:12] + SETTINGS + _HEADED + _DATA,
    "HTTP/1.1": b"POST / HTTP/1.1\r\nHost: x\r\n\r\n" + SETTINGS + _HEADED + _DATA,
    "a goodbye": BEGUN + http2.frame(http2.GOAWAY, 0, 0, bytes(8)) + _HEADED + _DATA,
    "a goodbye that is cut": BEGUN + http2.frame(http2.GOAWAY, 0, 0, bytes(7)) + _HEADED + _DATA,
    "data after a reset": BEGUN + _HEADED + http2.frame(http2.RST_STREAM, 0, 1, number(8)) + _DATA,
    "trailers with a pseudo-header": BEGUN
    + _HEADED
    + http2.frame(0, 0, 1, message("x")[:-1])
    + http2.frame(1, 5, 1, http2.literal(b":path", b"/"))
    + http2.frame(0, 0, 1, message("x")[-1:]),
    "a continuation of another": BEGUN + http2.frame(1, 0, 1, BLOCK) + http2.frame(http2.CONTINUATION, 4, 3) + _DATA,
    "a frame amid headers": BEGUN + http2.frame(1, 0, 1, BLOCK) + SETTINGS + http2.frame(9, 4, 1) + _DATA,
    "an unknown frame amid headers": BEGUN + http2.frame(1, 0, 1, BLOCK) + http2.frame(99, 0, 1) + _DATA,
}


def test_the_other_reader_takes_what_is_well_formed() -> None:
    """Else nothing would be compared below."""
    assert theirs(call(GOOD)) == ({"x"}, False)


@pytest.mark.parametrize("name", [*SPELLED, *FRAMED])
async def test_what_another_reader_refuses_is_refused(name: str) -> None:
    sent = call(SPELLED[name]) if name in SPELLED else FRAMED[name]
    with contextlib.suppress(InvalidBodyLengthError):
        assert (name == "a goodbye") == bool(theirs(sent)[0])  # `theirs` tells h2 nothing of it
    for piece in (1, 9, 1 << 30):
        assert (await ours(sent, piece))[0] == set()


@pytest.mark.parametrize("name", [name for name in SPELLED if "length" not in name])
async def test_malformed_headers_end_their_call_and_no_other(name: str) -> None:
    bench = Bench()
    good = http2.frame(http2.HEADERS, 4, 3, BLOCK) + http2.frame(http2.DATA, 1, 3, message("y"))
    await bench.all_came(call(SPELLED[name]) + good)
    assert [exchange.id for exchange in bench.service.asked] == ["y"]
    assert bench.resets() == {1: 1}
    assert bench.server.turned_away == {"malformed": 1}
    bench.connection.connection_lost(None)
    bench.server.close()
    bench.arena.close()


@pytest.mark.parametrize("headers", [GOOD, [*GOOD, (b"content-length", b"%d" % len(message("x")))]])
async def test_what_is_well_formed_is_taken(headers: list[Header]) -> None:
    padded = http2.frame(http2.HEADERS, 4 | 8 | 32, 3, b"\2" + number(0) + b"\0" + block(headers) + b"\0\0")
    padded += http2.frame(http2.DATA, 9, 3, b"\3" + message("y") + b"\0\0\0")
    for piece in (1, 9, 1 << 30):
        assert await ours(call(headers) + http2.frame(99, 7, 3, b"unknown") + padded, piece) == ({"x", "y"}, False)


# A wrong length ends the connection.
MALFORMED = [headers for name, headers in SPELLED.items() if "length" not in name]


def made_up(draw: random.Random, *more: Header, message: Callable[[str], bytes] = message) -> bytes:
    """A conversation that is mostly well-formed: calls in pieces, with other frames between them. `more`: a header that
    every call has."""
    encoder = Encoder()
    sent = [http2.PREFACE, SETTINGS]
    waiting: dict[int, bytes] = {}
    begun: list[int] = []
    stream = 1
    for step in range(draw.randrange(3, 14)):
        kind = draw.random()
        if kind < 0.4 or not begun:
            headers = draw.choice([GOOD] * 9 + [draw.choice(MALFORMED)])
            data = message(f"{step}-{stream}") * draw.choice([1] * 6 + [2, 0])
            if draw.random() < 0.3 and headers is GOOD:
                length = max(0, len(data) + draw.choice([0] * 9 + [1, -1]))
                headers = [*headers, (b"content-length", b"%d" % length)]
            made = block([*headers, *more], draw.choice([encoder, None]))
            flags = draw.choice([0] * 20 + [8, 32, 40, 1])
            payload = made[: draw.randrange(len(made) + 1)] if draw.random() < 0.3 else made
            rest = made[len(payload) :]
            if flags & 32:
                payload = number(draw.choice([0, 0, 0, 0, stream])) + b"\x10" + payload
            if flags & 8:
                size = draw.randrange(20)
                payload = bytes((size,)) + payload + bytes(size)
            sent.append(http2.frame(http2.HEADERS, flags | (0 if rest else 4), stream, payload))
            if rest:
                sent.append(http2.frame(http2.CONTINUATION, 4, draw.choice([stream] * 30 + [stream + 2]), rest))
            waiting[stream] = data
            begun.append(stream)
            stream += draw.choice([2] * 60 + [4, 1, 0])
        elif kind < 0.9 and waiting:
            each = draw.choice(list(waiting))
            size = draw.choice([len(waiting[each]), draw.randrange(len(waiting[each]) + 1)])
            part, waiting[each] = waiting[each][:size], waiting[each][size:]
            if draw.random() < 0.2:
                pad = draw.randrange(9)
                sent.append(http2.frame(http2.DATA, 8, each, bytes((pad,)) + part + bytes(pad)))
            else:
                is_last = not waiting[each] and draw.random() < 0.7
                sent.append(http2.frame(http2.DATA, int(is_last), each, part))
                if is_last:
                    del waiting[each]
        else:
            each = draw.choice([*begun * 9, 0, stream])
            setting = bytes((0, draw.randrange(9))) + number(draw.choice([0, 1, 100, 16_384, 1 << 31]))
            sent.append(
                draw.choice(
                    [
                        http2.frame(http2.SETTINGS, draw.choice([0, 0, 1]), 0, draw.choice([b"", setting])),
                        http2.frame(http2.PING, draw.choice([0, 1]), 0, bytes(8)),
                        http2.frame(http2.PRIORITY, 0, each, number(draw.choice([0, 0, 0, 1])) + b"\1"),
                        http2.frame(http2.RST_STREAM, 0, each, number(8)),
                        http2.frame(http2.PING, 0, 0, bytes(8)),
                        http2.frame(http2.WINDOW_UPDATE, 0, each, number(draw.choice([1] * 6 + [0, (1 << 31) - 1]))),
                        http2.frame(http2.GOAWAY, 0, 0, bytes(8)),
                        http2.frame(draw.choice([5, 10, 200, 201, 202]), draw.randrange(256), each, draw.randbytes(5)),
                        http2.frame(http2.HEADERS, 5, each, block([(b"trailer", b"1")])),
                    ]
                )
            )
    if draw.random() < 0.7:
        sent += [http2.frame(http2.DATA, 1, each, rest) for each, rest in waiting.items()]
    whole = bytearray(b"".join(sent))
    for _ in range(draw.choice([0] * 9 + [1, 3])):
        at = draw.randrange(24, len(whole))
        whole[at] = draw.choice([draw.randrange(256), whole[at] ^ 1 << draw.randrange(8)])
    return bytes(whole)


async def test_nothing_made_up_is_a_request_here_that_another_reader_refuses() -> None:
    draw = random.Random(os.environ.get("TENUTO_FUZZ_SEED", "26"))
    taken = refused = 0
    for case in range(CASES):
        sent = made_up(draw)
        asked, is_refused = await ours(sent, draw.choice([1 << 30, 1 << 30, 13, 1]))
        try:
            known, _ = theirs(sent)
        except InvalidBodyLengthError:  # of a call that may be over here, as it has a second message
            continue
        assert asked <= known, f"case {case}: {sent!r}"
        taken += len(asked)
        refused += is_refused
    assert taken > CASES / 2
    assert refused > CASES / 4
