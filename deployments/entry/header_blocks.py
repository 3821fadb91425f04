"""Header blocks of HTTP/2 (HPACK, RFC 7541): jh2's decoder reads them, behind checks that it leaves out; and what makes
the headers of a request malformed. Section numbers without another are those of RFC 9113."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence

from jh2.connection import Decoder
from jh2.hpack.huffman_constants import REQUEST_CODES_LENGTH

_DECODED = 64  # limit: fields that are decoded at once; each may have the 4 KiB of the table
_MOST_DECODED_BYTES = 1 << 18  # limit: of a block; its work is some ms, and proxies pass on a quarter at most
_OVERHEAD = 32  # format: of a header beside its name and value (6.5.2)
Headers = Sequence[tuple[bytes, bytes, bool]]
"""As jh2 has them; the last says whether proxies may index it."""

_NAME = re.compile(rb":?[!#$%&'*+.^_`|~0-9a-z-]+")  # format: tokens in lower case (8.2.1)
_VALUE = re.compile(rb"(?![ \t])[^\0\r\n]*(?<![ \t])")  # format: likewise
_PSEUDO = frozenset((b":method", b":scheme", b":path", b":authority"))  # format: (8.3.1)
_OF_HTTP1 = frozenset(
    (b"connection", b"proxy-connection", b"keep-alive", b"transfer-encoding", b"upgrade")
)  # format: (8.2.2)


def literal(name: bytes, value: bytes) -> bytes:
    """Return a header for a block of ours. The client does not put it into its table, so our blocks need no state."""
    return b"\0%b%b%b%b" % (_length(name), name, _length(value), value)


def _length(text: bytes) -> bytes:
    size, found = len(text), bytearray()
    if size < 127:
        return bytes((size,))
    size -= 127
    while size > 127:
        found.append(size & 127 | 128)
        size >>= 7
    return bytes((127, *found, size))


def read_block(decoder: Decoder, block: bytes, most_bytes: int) -> Headers | None:
    """Return the headers of a block; None when they have more than `most_bytes`, as the protocol counts them (6.5.2).
    The decoder then is in step with the client, and no more than some headers were held at once.

    Raises:
        IndexError: the block holds far too much, or is malformed, though jh2's decoder (5.0.15) takes it.
        BaseException: jh2's decoder refuses the block. A panic of Rust is no `Exception`.
    """
    coded, cuts = _coded(block)
    checks = iter(coded)
    check = next(checks, None)
    headers: list[tuple[bytes, bytes, bool]] = []
    size = first = 0
    for begin, end in itertools.pairwise(cuts):
        found: Headers = decoder.decode(block[begin:end], True)
        while check is not None and check[0] < first + len(found):
            field, is_value, raw = check
            name, value, _ = found[field - first]
            unused = 8 * len(raw) - sum(map(REQUEST_CODES_LENGTH.__getitem__, value if is_value else name))
            if not 0 <= unused < 8 or ~raw[-1] & ((1 << unused) - 1):  # padding is fewer than eight ones (7541, 5.2)
                raise IndexError
            check = next(checks, None)
        first += len(found)
        size += sum([len(name) + len(value) + _OVERHEAD for name, value, _ in found])
        if size > _MOST_DECODED_BYTES:
            raise IndexError
        if size <= most_bytes:
            headers += found
    return headers if size <= most_bytes else None


def _coded(block: bytes) -> tuple[list[tuple[int, bool, bytes]], list[int]]:
    """Return the texts in Huffman's code: the number of the field, whether the text is the field's value, and the code.
    Return also where the block can be cut: in front of some fields, and at its end.

    Raises `IndexError` for a block that ends within a field. There jh2's decoder would panic, and Rust writes every
    panic to the log. Raises it also for a size of the table that stands behind a field (RFC 7541, 4.2).
    """
    at, end, field, found, cuts = 0, len(block), 0, [], [0]
    while at < end:
        first = block[at]
        if 0x80 <= first < 0xFF:  # one byte, as most fields
            at += 1
        else:
            most = 0x7F if first >= 0x80 else 0x3F if first >= 0x40 else 0x1F if first >= 0x20 else 0x0F
            _, at = _integer(block, at, most)
            if 0x20 <= first < 0x40:
                if field:
                    raise IndexError
                continue
            if first < 0x80:
                for is_value in (True,) if first & most else (False, True):
                    is_coded = block[at] & 0x80
                    size, at = _integer(block, at, 0x7F)
                    if is_coded and size:
                        found.append((field, is_value, block[at : at + size]))
                    at += size
        field += 1
        if not field % _DECODED:
            cuts.append(at)
    if at > end:
        raise IndexError
    if cuts[-1] < end:
        cuts.append(end)
    return found, cuts


def _integer(block: bytes, at: int, most: int) -> tuple[int, int]:
    """Return the number at this place (RFC 7541, 5.1), and where it ends."""
    value, shift = block[at] & most, 0
    at += 1
    if value == most:
        while True:
            byte = block[at]
            at += 1
            value += (byte & 127) << shift
            shift += 7
            if byte < 128:
                break
            if shift > 28:
                raise IndexError
    return value, at


def flaw(headers: Headers, *, behind: bool = False) -> str:
    """Return what makes the headers of a request malformed, as a sentence; "" when they are well-formed (8.2, 8.3).
    `behind`: they are trailers."""
    found: dict[bytes, bytes] = {}
    for name, value, _ in headers:
        if _NAME.fullmatch(name) is None or _VALUE.fullmatch(value) is None:
            return "A header is no name in lower case with a value."
        if name[:1] == b":" and (behind or name not in _PSEUDO or not found.keys() <= _PSEUDO):
            return "A header with a colon is unknown, or not in front of all others."
        if name in _OF_HTTP1 or (name == b"te" and value != b"trailers"):
            return f"{name.decode()} has no meaning here."
        if name in found and (name in _PSEUDO or name in (b"host", b"content-length")):
            return f"{name.decode()} is given twice."
        found[name] = value
    if behind:
        return ""
    if not found.keys() >= _PSEUDO - {b":authority"} or not found[b":path"]:
        return "A call has :method, :scheme and :path."
    named = found.get(b":authority", found.get(b"host"))
    if named is None or found.get(b"host", named) != named:
        return "A call has one :authority."
    return "" if found.get(b"content-length", b"0").isdigit() else "content-length is no number."
