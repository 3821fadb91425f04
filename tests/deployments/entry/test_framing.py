"""Where requests begin and end, against other servers: bytes that two servers may read in different ways carry one
client's request into another's (request smuggling). Ours may refuse what they take, never the reverse, and what all
take has the same requests in it."""

from __future__ import annotations

import os
import random
import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

import h11
import httptools
import pytest

from tenuto.deployments.entry.http.exchange import HttpError
from tenuto.deployments.entry.http.framing import Framing, KnownHeads

CASES = int(os.environ.get("TENUTO_FUZZ_CASES", "3000"))
NEXT = b"GET /next HTTP/1.1\r\nHost: x\r\n\r\n"


class Asked(NamedTuple):
    """A request as a server reads it: method, target, body."""

    method: bytes
    target: bytes
    body: bytes


class Read(NamedTuple):
    """What a server reads in bytes: requests, whether it refuses what follows, and whether it closes after them."""

    requests: list[Asked]
    refuses: bool
    closes: bool


def ours(data: bytes, cuts: Iterator[int] | None = None, known: KnownHeads | None = None) -> Read:
    """Return what our framing reads; `cuts`: how many bytes come at once; `known`: heads that came before."""
    framing = Framing(known or KnownHeads())
    found: list[Asked] = []
    head, body, closes = None, b"", False
    pieces = [data] if cuts is None else list(_cut(data, cuts))
    try:
        for piece in pieces:
            while piece and not closes:
                whole = False
                if head is None:
                    read = framing.head(piece)
                    if read is None:
                        break
                    head, at = read
                    body = piece[at : at + head.length]
                    piece = piece[at + len(body) :]
                    assert len(body) + framing.left == head.length
                    whole = framing.is_over
                    assert whole == (not framing.left and framing.chunks is None)
                elif framing.chunks is not None:
                    whole = framing.take_chunks(piece)
                    piece = b""
                    if whole:
                        body, closes = bytes(framing.chunks), True
                else:
                    part, piece = piece[: framing.left], piece[framing.left :]
                    framing.body(part)
                    body += part
                    whole = not framing.left
                if whole:
                    assert head is not None
                    found.append(Asked(head.method, head.url, body))
                    closes = closes or not head.keep_alive
                    head = None
    except HttpError:
        return Read(found, True, True)
    return Read(found, False, closes)


def _cut(data: bytes, cuts: Iterator[int]) -> Iterator[bytes]:
    at = 0
    for size in cuts:
        yield data[at : at + size]
        at += size
        if at >= len(data):
            return


def uvicorns(data: bytes) -> Read:
    """Return what httptools reads as uvicorn uses it: with a body kept from the parser's own cuts."""
    found: list[Asked] = []

    class Protocol:
        target = body = b""
        closes = False

        def on_message_begin(self) -> None:
            self.target = self.body = b""

        def on_headers_complete(self) -> None:
            self.closes = not parser.should_keep_alive()  # it forgets that once the request is whole

        def on_url(self, url: bytes) -> None:
            self.target += url

        def on_body(self, body: bytes) -> None:
            self.body += body

        def on_message_complete(self) -> None:
            found.append(Asked(parser.get_method(), self.target, self.body))

    protocol = Protocol()
    parser = httptools.HttpRequestParser(protocol)
    try:
        parser.feed_data(data)
    except httptools.HttpParserUpgrade:
        return Read(found, False, True)
    except httptools.HttpParserError as error:
        return Read(found, "after `Connection: close`" not in str(error), True)
    return Read(found, False, bool(found) and protocol.closes)


def h11s(data: bytes) -> Read:
    """Return what h11 reads, another author's reading of the same RFC; uvicorn's other protocol."""
    connection = h11.Connection(h11.SERVER, max_incomplete_event_size=1 << 20)
    found: list[Asked] = []
    connection.receive_data(data)
    asked, body = None, b""
    try:
        while True:
            event = connection.next_event()
            if event is h11.NEED_DATA:
                return Read(found, False, False)
            if event is h11.PAUSED:
                if connection.their_state is not h11.DONE:
                    return Read(found, False, True)
                connection.send(h11.Response(status_code=200, headers=[("content-length", "0")]))
                connection.send(h11.EndOfMessage())
                if connection.our_state is not h11.DONE or connection.their_state is not h11.DONE:
                    return Read(found, False, True)
                connection.start_next_cycle()
            elif isinstance(event, h11.Request):
                asked, body = event, b""
            elif isinstance(event, h11.Data):
                body += bytes(event.data)
            elif isinstance(event, h11.EndOfMessage):
                assert asked is not None
                found.append(Asked(asked.method, asked.target, body))
                if connection.their_state is h11.MUST_CLOSE:
                    return Read(found, False, True)
    except h11.RemoteProtocolError:
        return Read(found, True, True)


def check(data: bytes, *, also: tuple[Callable[[bytes], Read], ...] = (uvicorns, h11s)) -> Read:
    """Hold what we read in bytes to what others read, whether or not their heads are known."""
    known = KnownHeads()
    mine = ours(data, known=known)
    assert ours(data, known=known) == mine, data
    for other in also:
        theirs = other(data)
        count = len(mine.requests)
        assert _plain(mine.requests) == _plain(theirs.requests[:count]), (data, mine, theirs)
        if len(theirs.requests) > count:
            assert mine.closes, (data, mine, theirs)
        assert mine.closes or not (theirs.refuses or theirs.closes), (data, mine, theirs)
    return mine


def _plain(requests: list[Asked]) -> list[Asked]:
    return [Asked(r.method, re.sub(rb"(?i)^https?://[^/?]*", b"", r.target) or b"/", r.body) for r in requests]


def post(*lines: bytes, body: bytes = b"", first: bytes = b"POST /x HTTP/1.1") -> bytes:
    return b"\r\n".join([first, b"Host: x", *lines, b"", body])


SMUGGLED = b"GET /hidden HTTP/1.1\r\nHost: x\r\n\r\n"

REFUSED = {
    "length with a sign": post(b"Content-Length: +3", body=b"abc"),
    "length in hex": post(b"Content-Length: 0x3", body=b"abc"),
    "length with a space": post(b"Content-Length: 3 3", body=b"abc"),
    "length of nothing": post(b"Content-Length:", body=b"abc"),
    "length of 23 digits": post(b"Content-Length: 00000000000000000000048", body=b"a" * 48),
    "length of 16 digits": post(b"Content-Length: 0000000000000048", body=b"a" * 48),
    "length beyond all": post(b"Content-Length: 99999999999999999999999", body=b"abc"),
    "two lengths": post(b"Content-Length: 3", b"Content-Length: 3", body=b"abc"),
    "two other lengths": post(b"Content-Length: 3", b"Content-Length: 0", body=SMUGGLED),
    "a list of lengths": post(b"Content-Length: 3, 3", body=b"abc"),
    "length behind a vertical tab": post(b"Content-Length: \x0b3", body=b"abc"),
    "space before the colon": post(b"Content-Length : 3", body=b"abc"),
    "length and chunks": post(b"Content-Length: 5", b"Transfer-Encoding: chunked", body=b"0\r\n\r\n" + SMUGGLED),
    "chunks and length": post(b"Transfer-Encoding: chunked", b"Content-Length: 5", body=b"0\r\n\r\n" + SMUGGLED),
    "identity": post(b"Transfer-Encoding: identity", body=b"abc"),
    "identity, chunked": post(b"Transfer-Encoding: identity, chunked", body=b"0\r\n\r\n"),
    "gzip, chunked": post(b"Transfer-Encoding: gzip, chunked", body=b"0\r\n\r\n"),
    "gzip and chunked": post(b"Transfer-Encoding: gzip", b"Transfer-Encoding: chunked", body=b"0\r\n\r\n"),
    "chunked, identity": post(b"Transfer-Encoding: chunked, identity", body=b"0\r\n\r\n"),
    "chunked twice": post(b"Transfer-Encoding: chunked", b"Transfer-Encoding: chunked", body=b"0\r\n\r\n"),
    "xchunked": post(b"Transfer-Encoding: xchunked", body=b"0\r\n\r\n"),
    "chunked behind a vertical tab": post(b"Transfer-Encoding: \x0bchunked", body=b"0\r\n\r\n"),
    "no encoding": post(b"Transfer-Encoding:", body=b"0\r\n\r\n"),
    "chunks in HTTP/1.0": post(b"Transfer-Encoding: chunked", body=b"0\r\n\r\n", first=b"POST /x HTTP/1.0"),
    "chunk size in 0x": post(b"Transfer-Encoding: chunked", body=b"0x3\r\nabc\r\n0\r\n\r\n"),
    "chunk size with a sign": post(b"Transfer-Encoding: chunked", body=b"-3\r\nabc\r\n0\r\n\r\n"),
    "chunk size beyond all": post(b"Transfer-Encoding: chunked", body=b"fffffffffffffffff\r\nabc\r\n0\r\n\r\n"),
    "chunk size and a space": post(b"Transfer-Encoding: chunked", body=b"3 \r\nabc\r\n0\r\n\r\n"),
    "chunk with a bare LF": post(b"Transfer-Encoding: chunked", body=b"3\nabc\r\n0\r\n\r\n"),
    "chunk without an end": post(b"Transfer-Encoding: chunked", body=b"3\r\nabc0\r\n\r\n"),
    "chunk longer than it says": post(b"Transfer-Encoding: chunked", body=b"3\r\nabcd\r\n0\r\n\r\n"),
    "bare LF in an extension": post(b"Transfer-Encoding: chunked", body=b"3;a\nb\r\nabc\r\n0\r\n\r\n"),
    "length in a trailer": post(b"Transfer-Encoding: chunked", body=b"0\r\nContent-Length: 3\r\n\r\n"),
    "lines of LF": b"GET / HTTP/1.1\nHost: x\n\n",
    "one line of LF": b"GET / HTTP/1.1\r\nHost: x\nA: b\r\n\r\n",
    "a bare CR": post(b"A: b\rContent-Length: 3", body=b"abc"),
    "a NUL": post(b"A: b\x00c"),
    "a folded line": post(b"A: b", b" Content-Length: 3", body=b"abc"),
    "a folded first line": b"GET / HTTP/1.1\r\n Host: x\r\n\r\n",
    "no colon": post(b"Content-Length 3", body=b"abc"),
    "no name": post(b": 3", body=b"abc"),
    "no Host": b"GET / HTTP/1.1\r\n\r\n",
    "an empty Host": b"GET / HTTP/1.1\r\nHost:\r\n\r\n",
    "two Hosts": post(b"Host: y"),
    "two Hosts in one": b"GET / HTTP/1.1\r\nHost: x, y\r\n\r\n",
    "a Host with a path": b"GET / HTTP/1.1\r\nHost: x/y\r\n\r\n",
    "a Host with a name in it": b"GET / HTTP/1.1\r\nHost: a@x\r\n\r\n",
    "a Host with a port that is none": b"GET / HTTP/1.1\r\nHost: x:80a\r\n\r\n",
    "another Host in the target": b"GET http://y/ HTTP/1.1\r\nHost: x\r\n\r\n",
    "a target without a path": b"GET x HTTP/1.1\r\nHost: x\r\n\r\n",
    "a target with a fragment": b"GET /x#y HTTP/1.1\r\nHost: x\r\n\r\n",
    "a star for GET": b"GET * HTTP/1.1\r\nHost: x\r\n\r\n",
    "a tunnel": b"CONNECT x:80 HTTP/1.1\r\nHost: x\r\n\r\n" + SMUGGLED,
    "HTTP/0.9": b"GET /\r\n\r\n",
    "HTTP/0.9 by name": b"GET / HTTP/0.9\r\nHost: x\r\n\r\n",
    "HTTP/1.2": b"GET / HTTP/1.2\r\nHost: x\r\n\r\n",
    "HTTP/2.0": b"GET / HTTP/2.0\r\nHost: x\r\n\r\n",
    "HTTP/2's preface": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "RTSP": b"OPTIONS * RTSP/1.0\r\nHost: x\r\n\r\n",
    "ICE": b"SOURCE / ICE/1.0\r\nHost: x\r\n\r\n",
    "a space behind the version": b"GET / HTTP/1.1 \r\nHost: x\r\n\r\n",
    "two spaces": b"GET  / HTTP/1.1\r\nHost: x\r\n\r\n",
    "two other spaces": b"GET /  HTTP/1.1\r\nHost: x\r\n\r\n",
    "a tab for a space": b"GET\t/ HTTP/1.1\r\nHost: x\r\n\r\n",
    "an unknown method": b"FETCH / HTTP/1.1\r\nHost: x\r\n\r\n",
    "a method in lower case": b"get / HTTP/1.1\r\nHost: x\r\n\r\n",
    "bytes above ASCII in a target": b"GET /\xff HTTP/1.1\r\nHost: x\r\n\r\n",
    "bytes above ASCII in a name": post(b"Content-Length\xff: 3", body=b"abc"),
    "an empty line first": b"\r\n" + post(b"Content-Length: 3", body=b"abc"),
    "two empty lines first": b"\r\n\r\n" + NEXT,
    "an empty line of LF first": b"\n" + NEXT,
    "two keys": post(b"Authorization: Bearer a", b"Authorization: Bearer b"),
    "two lengths of the JSON part": post(b"Inference-Header-Content-Length: 1", b"Inference-Header-Content-Length: 2"),
    "TLS": bytes.fromhex("160301010001000100fc0303") + bytes(40) + b"\r\n\r\n",
}

TAKEN = {
    "plain": (post(b"Content-Length: 3", body=b"abc"), b"abc"),
    "space behind the length": (post(b"Content-Length: 3 ", body=b"abc"), b"abc"),
    "tab behind the length": (post(b"Content-Length: 3\t", body=b"abc"), b"abc"),
    "zeros before the length": (post(b"Content-Length: 000003", body=b"abc"), b"abc"),
    "no body": (post(), b""),
    "no length but the next request": (post(b"Content-Length: 0"), b""),
    "chunks": (post(b"Transfer-Encoding: chunked", body=b"3\r\nabc\r\n1\r\nd\r\n0\r\n\r\n"), b"abcd"),
    "CHUNKED": (post(b"transfer-encoding: CHUNKED", body=b"3\r\nabc\r\n0\r\n\r\n"), b"abc"),
    "extensions": (post(b"Transfer-Encoding: chunked", body=b'3;a=b;c="d"\r\nabc\r\n0;e\r\n\r\n'), b"abc"),
    "trailers": (post(b"Transfer-Encoding: chunked", body=b"3\r\nabc\r\n0\r\nA: b\r\n\r\n"), b"abc"),
    "an upgrade nobody makes": (
        post(b"Connection: Upgrade, HTTP2-Settings", b"Upgrade: h2c", b"Content-Length: 3", body=b"abc"),
        b"abc",
    ),
    "an upgrade with chunks": (
        post(b"Connection: upgrade", b"upgrade:h2c", b"Transfer-Encoding: chunked", body=b"3\r\nabc\r\n0\r\n\r\n"),
        b"abc",
    ),
    "absolute target": (post(b"Content-Length: 3", body=b"abc", first=b"POST http://x/x HTTP/1.1"), b"abc"),
    "HTTP/1.0": (post(b"Content-Length: 3", body=b"abc", first=b"POST /x HTTP/1.0"), b"abc"),
    "IPv6": (b"POST /x HTTP/1.1\r\nHost: [::1]:8000\r\nContent-Length: 3\r\n\r\nabc", b"abc"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_sure_to_be_read_alike_is_refused(name: str) -> None:
    for data in (REFUSED[name], REFUSED[name] + NEXT):
        found = ours(data)
        assert found.refuses, found
        assert not any(asked.target in (b"/hidden", b"/next") for asked in found.requests)
    check(REFUSED[name])
    assert ours(NEXT + REFUSED[name]).requests[0] == Asked(b"GET", b"/next", b"")


@pytest.mark.parametrize("name", TAKEN)
def test_what_is_taken_ends_where_it_ends_for_others(name: str) -> None:
    data, body = TAKEN[name]
    for _ in range(2):
        found = ours(data + NEXT)
        assert found.requests[0] == Asked(b"POST", b"/x", body)
        assert not found.refuses
        assert found.closes or found.requests[1:] == [Asked(b"GET", b"/next", b"")]
        known = KnownHeads()
        for size in (1, 2, 3, 7, 60, 90):
            assert ours(data + NEXT, iter(lambda: size, 0), known) == found  # noqa: B023
    if "upgrade" not in name:  # where the others stop reading
        check(data + NEXT)


CLOSING = (
    "close",
    "CLOSE",
    "TE, close",
    "close, TE",
    "TE,\tclose ",
    ",close",
    "keep-alive, close",
    "TE\r\nConnection: close",
)
STAYING = ("closer", "keep-alive", "TE", '"close"', "TE close", "")


@pytest.mark.parametrize(
    "first", ["GET /x", "HEAD /x", "POST /x", "POST /x\nContent-Length: 0", "POST /x\nContent-Length: 3"]
)
@pytest.mark.parametrize("option", CLOSING + STAYING)
def test_a_connection_ends_after_a_request_that_says_close_with_a_body_or_without(first: str, option: str) -> None:
    line, _, length = first.partition("\n")
    lines = [f"{line} HTTP/1.1", "Host: x", *([length] if length else []), f"Connection: {option}", "", ""]
    data = "\r\n".join(lines).encode() + b"abc" * length.endswith("3")
    assert check(data).closes == (option in CLOSING)


@pytest.mark.parametrize("wrong", [0, 1, 4, 6, 7, 9, 40, 5000])
def test_what_is_known_of_a_head_holds_only_where_llhttp_agrees(wrong: int) -> None:
    raw, known = post(b"Content-Length: 5"), KnownHeads()
    ours(raw, known=known)  # its body has not come: llhttp has not seen where it ends
    known.plain[raw].length = wrong
    for data in (raw + b"abcde", raw + b"abcde" + NEXT, raw + b"GET /", raw + NEXT):
        found = ours(data, known=known)
        assert found.refuses or not found.requests, found


# Of each part of a request, the right one first.
PARTS: dict[str, tuple[bytes, ...]] = {
    "before": (b"", b"\r\n", b"\n", b"\r", b" ", b"\r\n\r\n"),
    "method": (b"POST", b"GET", b"HEAD", b"OPTIONS", b"CONNECT", b"post", b"PRI", b"FOO", b""),
    "target": (b"/x", b"/x?a=b", b"http://x/x", b"http://y/", b"*", b"x", b"//x", b"/\x7f", b"/ x", b""),
    "version": (b"HTTP/1.1", b"HTTP/1.0", b"HTTP/1.2", b"HTTP/0.9", b"HTTP/2.0", b"http/1.1", b"HTTP/1.10", b""),
    "space": (b" ", b"  ", b"\t", b""),
    "end": (b"\r\n", b"\n", b"\r", b"\r\r\n", b" \r\n", b"\r\n "),
    "colon": (b": ", b":", b" : ", b":\t", b": \x0b", b": \xa0", b"", b"::"),
}
NAMES = (
    *(b"Content-Length", b"Transfer-Encoding", b"Connection", b"Upgrade", b"Expect", b"Host", b"X", b"content-length"),
    *(b"Content_Length", b"Trailer", b"TE", b"Keep-Alive", b"", b"Content-Length ", b" Content-Length", b"X\x80"),
    *(b"Transfer-Encoding\t", b"X Y", b"Proxy-Connection"),
)
VALUES = (
    *(b"3", b"0", b"5", b"chunked", b"Chunked", b"close", b"keep-alive", b"upgrade", b"h2c", b"3 ", b"3\t", b"+3"),
    *(b"-3", b"03", b"0x3", b"3,3", b"3, 3", b"3;a", b"0000000000000000003", b"identity", b"identity, chunked"),
    *(b"chunked, chunked", b"gzip, chunked", b"chunked;a=b", b'"chunked"', b"100-continue", b"x", b"x:80", b""),
    *(b"a\x00b", b"a\x80b", b"a\rb", b"close, keep-alive", b"TE, close", b"9" * 25),
)
CHUNKS = (
    *(b"3\r\nabc\r\n0\r\n\r\n", b"0\r\n\r\n", b"3;a=b\r\nabc\r\n0\r\n\r\n", b'3;a="b;c"\r\nabc\r\n0\r\nA: b\r\n\r\n'),
    *(b"3\r\nabc\r\n0\r\n", b"3\nabc\n0\n\n", b"0x3\r\nabc\r\n0\r\n\r\n", b"3 \r\nabc\r\n0\r\n\r\n", b"-1\r\n"),
    *(b"03\r\nabc\r\n0\r\n\r\n", b"3\r\nabc0\r\n\r\n", b"f" * 18 + b"\r\nabc", b"3;\r\nabc\r\n0\r\n\r\n"),
    *(b"0\r\nContent-Length: 3\r\n\r\nabc", b"0\r\nTransfer-Encoding: chunked\r\n\r\n", b"3\r\nabc\r\n00\r\n\r\n"),
    *(b"3;a\r\nabc\r\n0\r\n: b\r\n\r\n", b"3\r\nabc\r\n0\r\nA\r\n\r\n", SMUGGLED),
)


def made_up(dice: random.Random) -> bytes:
    """Return bytes that are almost a few requests: each part is mostly as it should be."""

    def one(part: str) -> bytes:
        return PARTS[part][0] if dice.random() < 0.97 else dice.choice(PARTS[part])

    def line(name: bytes, value: bytes) -> bytes:
        return name + one("colon") + value + one("end")

    whole = b""
    for _ in range(dice.choice((1, 1, 2, 3))):
        whole += one("before") + one("method") + one("space") + one("target") + one("space") + one("version")
        whole += one("end") + (line(b"Host", b"x") if dice.random() < 0.97 else b"")
        for _ in range(dice.choice((0, 0, 0, 1, 2))):
            whole += line(dice.choice(NAMES), dice.choice(VALUES))
        kind = dice.randrange(4)
        if kind == 0:
            whole += line(b"Content-Length", dice.choice((b"3", b"3 ", b"03", b"3\t", b"003"))) + one("end") + b"abc"
        elif kind == 1:
            whole += line(b"Transfer-Encoding", b"chunked") + one("end") + dice.choice(CHUNKS)
        else:
            whole += one("end")
    for _ in range(dice.choice((0, 0, 0, 0, 1, 2))):
        at, gone = dice.randrange(len(whole)), dice.randrange(2)
        whole = whole[:at] + dice.choice((b"", bytes([dice.randrange(256)]), b"\r\n", b"\n")) + whole[at + gone :]
    return whole + NEXT


def test_no_bytes_are_requests_here_that_others_refuse_or_cut_elsewhere() -> None:
    dice = random.Random(26)
    taken, known = 0, KnownHeads()
    for _ in range(CASES):
        data = made_up(dice)
        found = check(data)
        taken += bool(found.requests)
        assert ours(data, iter(lambda: dice.choice((1, 2, 5, 40)), 0)) == found, data
        for _ in range(3):  # read, agreed to, and not looked at again
            assert ours(data, known=known) == found, data
    assert CASES / 5 < taken < CASES / 2  # else it says nothing
