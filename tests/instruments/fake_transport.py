"""A connection of the server without a socket: the test says what comes and when, and counts the work that it makes."""

from __future__ import annotations

import asyncio
import gc
import sys
from types import FrameType
from typing import Any, TypeVar

from tenuto.deployments.entry.http.http1 import HttpConnection

__all__ = ["Calls", "Deaf", "Line", "read"]

Sent = TypeVar("Sent", bytes, memoryview)


def read(connection: asyncio.BufferedProtocol, sent: Sent) -> Sent:
    """Let a connection read once; return what it left."""
    room = memoryview(connection.get_buffer(-1))
    size = min(len(room), len(sent))
    room[:size] = sent[:size]
    connection.buffer_updated(size)
    return sent[size:]


class Deaf(asyncio.Transport):
    """The socket of a client that reads nothing, unless `hears`."""

    def __init__(self, *, hears: bool = True) -> None:
        super().__init__()
        self.hears = hears
        self.reads = True
        self.is_closed = self.has_ended = False
        self.written = self.waiting = 0
        self.connection: HttpConnection | None = None

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written += len(data)
        if not self.hears:
            self.waiting += len(data)
            if self.waiting > 1 << 16 and self.connection is not None:
                self.connection.pause_writing()

    def writelines(self, parts: Any) -> None:
        for part in parts:
            self.write(part)

    def get_write_buffer_size(self) -> int:
        return self.waiting

    def pause_reading(self) -> None:
        self.reads = False

    def resume_reading(self) -> None:
        self.reads = True

    def is_closing(self) -> bool:
        return self.is_closed

    def close(self) -> None:
        self.is_closed = True

    abort = close

    def write_eof(self) -> None:
        self.has_ended = True

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return ("127.0.0.1", 1) if name == "peername" else default


class Line(Deaf):
    """The socket of a client that the test plays: what is written waits for it."""

    def __init__(self) -> None:
        super().__init__()
        self.to_client = b""

    def get_write_buffer_size(self) -> int:
        return len(self.to_client)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.to_client += bytes(data)


class Calls:
    """Counts the Python and C functions that are called."""

    def __init__(self) -> None:
        self.count = 0

    def __enter__(self) -> Calls:
        self.count = 0
        gc.disable()  # what other tests left is not counted
        sys.setprofile(self._seen)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        gc.enable()

    def _seen(self, _frame: FrameType, event: str, _argument: object) -> None:
        if event in ("call", "c_call"):
            self.count += 1
