"""Where requests begin and end on a connection, and what their heads say. No I/O.

llhttp decides both. It is used through httptools, with none of its leniencies, and gets the bytes of a connection in
order. This module cuts the bytes where a head or a body should end, and llhttp has to agree. It also refuses heads that
llhttp takes although servers and proxies read them in different ways. Sections are those of RFC 9112.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import httptools

from tenuto.deployments.entry.http.bounded_cache import BoundedCache
from tenuto.deployments.entry.http.exchange import (
    PRIORITY_HEADER,
    SLO_HEADERS,
    TPOT_HEADERS,
    TTFT_HEADERS,
    Head,
    HttpError,
)
from tenuto.deployments.wire.tensors import Buffer

_HEAD_END = b"\r\n\r\n"
_MOST_HEADER_BYTES = 1 << 15  # limit: of a head
_MOST_FRAMING_BYTES = 1 << 15  # limit: of a chunked body beyond eight for each byte of it: `1 CR LF x CR LF` are five
MOST_CACHED_HEADS = 1024  # limit: heads whose reading is remembered
LONGEST_CACHED_HEAD_BYTES = 2048  # limit: of a head whose reading is remembered
# Headers whose heads come only once, and headers that have to be read each time.
_NOT_CACHED = frozenset((b"x-request-id", b"traceparent", b"x-request-start", b"transfer-encoding", b"upgrade"))
_UNFIT = "its head and its length do not fit together"
# One space between the parts (3), and a version that is ours (2.3). llhttp also takes more spaces, empty lines before,
# RTSP, ICE, HTTP/0.9 and 2.0.
_REQUEST_LINE = re.compile(rb"[A-Z-]+ [^ ]+ HTTP/1\.([01])\r\n")
_UPGRADE = re.compile(rb"(?i)\r\nupgrade:")
_ABSOLUTE = re.compile(rb"(?i)https?://([^/?]*)(.*)", re.DOTALL)
_HOST = re.compile(rb"([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(?::[0-9]{1,5})?")
_LENGTH = re.compile(rb"[0-9]{1,15}")
# If one of these came twice, its meaning would depend on which of the two is read.
_ONCE = frozenset(
    (
        b"host",
        b"content-length",
        b"transfer-encoding",
        b"expect",
        b"authorization",
        b"x-api-key",
        b"content-encoding",
        b"inference-header-content-length",
        PRIORITY_HEADER,
        *SLO_HEADERS,
        *TTFT_HEADERS,
        *TPOT_HEADERS,
    )
)


def malformed(reason: object) -> HttpError:
    """Return the refusal of bytes that two servers might read in different ways."""
    return HttpError(400, f"this is not HTTP/1.1: {reason}. Send a well-formed request.")


class Framing:
    """The requests of one connection: a head, then the bytes of its body, then the next head.

    Invariant: a head or a body ends here only where it ends for llhttp. A refusal (`HttpError`) ends the connection,
    because nobody knows where the next request would begin.
    """

    def __init__(self, known: KnownHeads) -> None:
        """Begin a connection; `known`: heads that were read before, on whichever connection."""
        self.left = 0  # bytes of the body that are still to come
        self.chunks: bytearray | None = None  # of a body without a length, what has come; then nothing follows it
        self._heads = known
        self._known = known.plain.get
        self.is_amid_head = False  # one has begun and is not complete
        self._began = bytearray()  # the bytes of that head so far
        self._is_headed = self.is_over = False  # by llhttp, the head under way, and the request
        self._framing_bytes = 0
        # None once the connection is gone: the parser and this refer to each other, and only a collection would free
        # them.
        self._parser: httptools.HttpRequestParser | None = httptools.HttpRequestParser(self)

    def close(self) -> None:
        """The connection is gone; nothing is read any more."""
        self._parser = None

    def head(self, data: bytes) -> tuple[Head, int] | None:
        """Take bytes of a head and of the body that may follow. Return the head and the place in `data` where it ends,
        or None if it goes on.

        Raises:
            HttpError: 400 for what is not well-formed, 431 for what is too long.
        """
        began = self._began
        held = len(began)
        if held:
            began += data
            end = began.find(_HEAD_END, max(0, held - 3)) + 4
        else:
            end = data.find(_HEAD_END) + 4
            known = self._known(data[:end])
            if known is not None:
                size, came = end + known.length, len(data)
                # The head is known. llhttp only has to agree on all bytes of it.
                left = self.left = size - came if size > came else 0
                is_upgrade = self._feed(data if size >= came else data[:size])
                if is_upgrade or not self._is_headed or self.is_over == (left > 0):
                    raise malformed(_UNFIT)
                return known, end
        is_whole = end > 3  # format: the four bytes that end a head
        if (end if is_whole else held + len(data)) > _MOST_HEADER_BYTES:
            raise HttpError(431, f"the headers exceed {_MOST_HEADER_BYTES >> 10} KiB. Send fewer.")
        self.on_message_begin()
        raw = data[: end - held] if is_whole else data
        is_upgrade = self._feed(raw)
        if not is_whole:
            if not held:
                began += data
                self.is_amid_head = True
            if self._is_headed:
                raise malformed("the head does not end with an empty line")
            return None
        if held:
            raw = bytes(began[:end])
            began.clear()
            self.is_amid_head = False
        head = self._heads.find(raw)
        if is_upgrade:  # no protocol is changed here, so it is a field like others (RFC 9110, 7.8)
            raw = _UPGRADE.sub(b"\r\nx-upgrade:", raw)
            self._begin_anew(raw)
        self.left = head.length
        if not self._is_headed or self.is_over != (not head.length and not head.is_chunked):
            raise malformed(_UNFIT)
        if head.is_chunked:
            self.chunks = bytearray()
            self._begin_anew(raw)
        end -= held
        if head.length and len(data) > end:
            self.body(data[end : end + head.length])
        return head, end

    def body(self, data: Buffer) -> None:
        """Take bytes of a body, at most as many as are `left`."""
        self._feed(data)
        self.left -= len(data)
        if self.is_over != (not self.left):
            raise malformed("its body does not end where its length says")

    def take_chunks(self, data: bytes) -> bool:
        """Take bytes of a body without a length; return whether it is complete. Bytes that follow are ignored."""
        assert self.chunks is not None
        held = len(self.chunks)
        try:
            self._feed(data)
        except HttpError:
            if not self.is_over:
                raise
        # Limit: eight bytes and the byte itself.
        self._framing_bytes = max(0, self._framing_bytes + len(data) - 9 * (len(self.chunks) - held))
        if self._framing_bytes > _MOST_FRAMING_BYTES:
            raise malformed("there is little in its chunks beside extensions or trailers")
        return self.is_over

    def _begin_anew(self, raw: bytes) -> None:
        """Read a head once more, with a parser that gives the chunks of a body if it has any."""
        self.on_message_begin()
        self._parser = httptools.HttpRequestParser(self if self.chunks is None else _Chunked(self))
        if self._feed(raw):
            raise malformed("it asks for a tunnel")

    def _feed(self, data: Buffer) -> bool:
        """Give bytes to llhttp; return whether they end with a request to change the protocol."""
        if self._parser is None:
            return False
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            return True
        except httptools.HttpParserError as error:
            raise malformed(error) from None
        return False

    # --- llhttp's side ------------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        self._is_headed = self.is_over = False

    def on_headers_complete(self) -> None:
        self._is_headed = True

    def on_message_complete(self) -> None:
        self.is_over = True

    def add_chunk(self, data: bytes) -> None:
        """Take a part of a chunked body."""
        if self.chunks is not None and not self.is_over:
            self.chunks += data


class _Chunked:
    """The same for a body in chunks; bytes after it are ignored. llhttp copies the chunks that it hands out. Bodies
    with a length need no such copy."""

    def __init__(self, framing: Framing) -> None:
        self.on_headers_complete = framing.on_headers_complete
        self.on_message_complete = framing.on_message_complete
        self.on_body = framing.add_chunk


class KnownHeads:
    """What heads say, by their bytes: clients send the same head again and again.

    `plain` are heads whose body has a length, and that ask for no other protocol.
    """

    def __init__(self) -> None:
        self.plain: BoundedCache[bytes, Head] = BoundedCache(MOST_CACHED_HEADS)

    def find(self, raw: bytes) -> Head:
        """Return what a head says; raises `HttpError` 400."""
        head = self.plain.get(raw)
        if head is None:
            head = read_head(raw)
            if len(raw) <= LONGEST_CACHED_HEAD_BYTES and _NOT_CACHED.isdisjoint(head.headers):
                head.is_cached = True
                self.plain.add(raw, head)
        return head


class _Fields:
    """What llhttp says of a head."""

    def __init__(self) -> None:
        self.url = b""
        self.headers: dict[bytes, bytes] = {}

    def on_url(self, url: bytes) -> None:
        self.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        name, value = name.lower(), value.strip(b" \t")
        before = self.headers.get(name)
        if before is not None:
            if name in _ONCE:
                raise malformed(f"{name.decode('latin-1')} is given twice")
            value = before + b", " + value  # RFC 9110, 5.3
        self.headers[name] = value


def read_head(raw: bytes) -> Head:
    """Return what a whole head says.

    Raises:
        HttpError: 400 for a head that is not well-formed, or that others may read in another way.
    """
    line = _REQUEST_LINE.match(raw)
    if line is None:
        raise malformed("the first line is not `METHOD TARGET HTTP/1.1`")
    fields = _Fields()
    parser = httptools.HttpRequestParser(fields)
    try:
        parser.feed_data(raw)
    except httptools.HttpParserUpgrade:
        pass
    except httptools.HttpParserError as error:
        raise (error.__context__ if isinstance(error.__context__, HttpError) else malformed(error)) from None
    headers = fields.headers
    is_old = line[1] == b"0"
    encoding = headers.get(b"transfer-encoding")
    if encoding is not None and (is_old or encoding.lower() != b"chunked"):  # 6.1
        raise malformed("Transfer-Encoding must be `chunked`")
    length = headers.get(b"content-length", b"0")
    if _LENGTH.fullmatch(length) is None:
        raise malformed("Content-Length must be a number of at most 15 digits")
    host = _host(headers, is_old=is_old)
    return Head(
        parser.get_method(),
        _target(fields.url, parser.get_method(), host),
        headers,
        keep_alive=not (is_old or b"upgrade" in headers or _closes(headers)),
        length=int(length),
        is_chunked=encoding is not None,
        expects=not is_old and headers.get(b"expect", b"").lower() == b"100-continue",
        is_old=is_old,
    )


def _closes(headers: Mapping[bytes, bytes]) -> bool:
    """Return whether nothing follows the request (9.3). llhttp says this only until a request is whole, and a request
    without a body is whole with its head. llhttp reads Proxy-Connection in the same way, and nothing follows it here,
    either."""
    options = headers.get(b"connection", b"") + b"," + headers.get(b"proxy-connection", b"")
    return b"close" in [option.strip() for option in options.lower().split(b",")]


def _host(headers: Mapping[bytes, bytes], *, is_old: bool) -> bytes:
    """Return the Host of a request (3.2); HTTP/1.0 needs none."""
    host = headers.get(b"host")
    if host is None and is_old:
        return b""
    if host is None or _HOST.fullmatch(host) is None:
        raise malformed("it needs one Host, `NAME` or `NAME:PORT`")
    return host.lower()


def _target(url: bytes, method: bytes, host: bytes) -> bytes:
    """Return path and query of a request's target (3.2.1, 3.2.2, 3.2.4)."""
    absolute = _ABSOLUTE.fullmatch(url)
    if absolute is not None:
        if absolute[1].lower() != host:
            raise malformed("its target names another server than Host")
        path: bytes = absolute[2]
        url = path if path.startswith(b"/") else b"/" + path
    is_path = url.startswith(b"/") or (url == b"*" and method == b"OPTIONS")
    if not is_path or b"#" in url:
        raise malformed("its target is no path")
    return url
