"""A client of gRPC that may send what none sends: frames as the test makes them, over a real socket. Nothing of the
server's own code is used."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Iterable, Sequence

from hpack import Decoder, Encoder

__all__ = ["CONTINUATION", "DATA", "END_HEADERS", "END_STREAM", "HEADERS", "WINDOW_UPDATE", "Http2Client", "message"]

DATA, HEADERS, _RST_STREAM, _SETTINGS, _GOAWAY, WINDOW_UPDATE, CONTINUATION = 0, 1, 3, 4, 7, 8, 9
END_STREAM, END_HEADERS = 1, 4
_MOST_FRAME_BYTES = 1 << 14
INFER = "inference.GRPCInferenceService/ModelInfer"


def message(data: bytes = b"", *, announced: int | None = None, compressed: int = 0) -> bytes:
    """Return a message of gRPC, or the beginning of one that announces more bytes."""
    return struct.pack(">BL", compressed, len(data) if announced is None else announced) + data


class Http2Client:
    """One connection. Calls have odd numbers that rise."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self.is_lost = False  # the server has ended the connection
        self._encoder, self._decoder = Encoder(), Decoder()
        self._last = -1
        self._ends: dict[int, str | None] = {}  # of the calls that are not heard of yet; None: it is open

    @classmethod
    async def connect(cls, port: int) -> Http2Client:
        made = cls(*await asyncio.open_connection("127.0.0.1", port))
        made.writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
        made.frame(_SETTINGS, 0, 0)
        made.frame(WINDOW_UPDATE, 0, 0, struct.pack(">L", 1 << 30))  # it takes whatever comes
        return made

    def frame(self, kind: int, flags: int, stream: int, payload: bytes = b"") -> None:
        """Send one frame."""
        self.writer.write(struct.pack(">HBBBL", len(payload) >> 8, len(payload) & 255, kind, flags, stream) + payload)

    def begin(self, path: str = INFER, *more: tuple[str, str], is_whole: bool = False, method: str = "POST") -> int:
        """Begin a call with metadata, and return its number."""
        self._last += 2
        self._ends[self._last] = None
        headers = [(":method", method), (":scheme", "http"), (":path", f"/{path}"), (":authority", "127.0.0.1")]
        given = [("content-type", "application/grpc"), ("te", "trailers")]
        names = {name for name, _ in more}
        block = self._encoder.encode(
            [*headers, *[each for each in given if each[0] not in names], *more], huffman=False
        )
        self.send_block(self._last, block, is_last=is_whole)
        return self._last

    def trailers(self, stream: int, headers: Iterable[tuple[str, str]], *, is_last: bool = True) -> None:
        """Send headers behind the messages of a call."""
        self.send_block(stream, self._encoder.encode(list(headers), huffman=False), is_last=is_last)

    def send_block(self, stream: int, block: bytes, *, is_last: bool) -> None:
        """Send a header block, in as many frames as it takes."""
        parts = [block[at : at + _MOST_FRAME_BYTES] for at in range(0, len(block), _MOST_FRAME_BYTES)] or [b""]
        for number, part in enumerate(parts):
            flags = END_HEADERS if part is parts[-1] else 0
            kind = CONTINUATION if number else HEADERS
            self.frame(kind, flags | (END_STREAM if is_last and not number else 0), stream, part)

    def data(self, stream: int, data: bytes, *, is_last: bool = False) -> None:
        """Send bytes of a call, in as many frames as it takes; more than the server lets."""
        parts = [data[at : at + _MOST_FRAME_BYTES] for at in range(0, len(data), _MOST_FRAME_BYTES)] or [b""]
        for number, part in enumerate(parts):
            self.frame(DATA, END_STREAM if is_last and number == len(parts) - 1 else 0, stream, part)

    def reset(self, stream: int) -> None:
        """Give a call up."""
        self.frame(_RST_STREAM, 0, stream, struct.pack(">L", 8))
        self._ends.pop(stream, None)

    async def hear(self, stream: int) -> str:
        """Return how a call ended: its status of gRPC, `reset CODE`, or `goaway CODE` and `lost` for all calls."""
        while (end := self._ends[stream]) is None:
            try:
                head = await self.reader.readexactly(9)
                payload = await self.reader.readexactly(int.from_bytes(head[:3], "big"))
            except (asyncio.IncompleteReadError, ConnectionError):
                self.is_lost = True
                return "lost"
            kind, flags, number = head[3], head[4], int.from_bytes(head[5:9], "big")
            if kind == _GOAWAY:
                return f"goaway {int.from_bytes(payload[4:8], 'big')}"
            if kind == _RST_STREAM and number in self._ends:
                self._ends[number] = self._ends[number] or f"reset {int.from_bytes(payload, 'big')}"
            elif kind == HEADERS:
                headers: Sequence[tuple[str, str]] = self._decoder.decode(payload)
                status = dict(headers).get("grpc-status")
                if flags & END_STREAM and number in self._ends:
                    self._ends[number] = "ended" if status is None else status
        del self._ends[stream]
        return end

    def leave(self) -> None:
        """Close at once."""
        self.writer.transport.abort()
