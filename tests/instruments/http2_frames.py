"""Frames and header blocks of HTTP/2 as a test writes them, well-formed or not (RFC 9113, RFC 7541)."""

from __future__ import annotations

import struct

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(10)
END_STREAM, END_HEADERS = 1, 4


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """Return a frame."""
    return struct.pack(">HBBBL", len(payload) >> 8, len(payload) & 255, kind, flags, stream) + payload


def literal(name: bytes, value: bytes) -> bytes:
    """Return a header that nobody puts into a table, so that blocks of such headers need no state."""
    return b"\0%b%b%b%b" % (_length(name), name, _length(value), value)


def _length(text: bytes) -> bytes:
    size, rest = len(text), bytearray()
    if size < 127:
        return bytes((size,))
    size -= 127
    while size > 127:
        rest.append(size & 127 | 128)
        size >>= 7
    return bytes((127, *rest, size))
