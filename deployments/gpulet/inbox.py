"""What a gpu-let's worker has to do next: what other threads put, and what comes on sockets that it reads itself.

A batch that came over a thread of its own woke that thread, which woke the worker: one wake-up more, of 50 to 130 µs on
a shared machine. The worker reads when it would otherwise wait; what comes while it works stays in the socket.
"""

from __future__ import annotations

import contextlib
import os
import select
import time
from collections import deque
from typing import Generic, Protocol, TypeVar

ItemT = TypeVar("ItemT")

_SLEPT_S = 1e-4  # limit: a wait that ended sooner found something there


class Source(Protocol):
    """A socket that the worker reads."""

    def fileno(self) -> int:
        """Return its descriptor."""

    def readable(self, *, is_fresh: bool) -> bool:
        """Bytes have come: read them and put what they are. Return whether to go on watching.

        `is_fresh`: they have ended a wait, and so came just now; else they may have been there for a while.
        """

    def unwatched(self) -> None:
        """Nobody watches it any more. It may be closed now: its number, which another socket may then have, is
        forgotten."""


class Inbox(Generic[ItemT]):
    """A queue of one reader. Invariant: what was put, or had come to a watched socket, before `close` is still given
    out."""

    def __init__(self) -> None:
        self._items: deque[ItemT] = deque()
        self._sources: dict[int, Source] = {}
        self._epoll = select.epoll()
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll.register(self._bell, select.EPOLLIN)
        self._waits = False
        self._is_closed = False

    def __bool__(self) -> bool:
        """Whether something waits that was put, or read already."""
        return bool(self._items)

    def put(self, item: ItemT) -> None:
        """Add an item; any thread may."""
        self._items.append(item)
        self._ring()

    def watch(self, source: Source) -> None:
        """Let the reader read this socket from now on; any thread may ask."""
        descriptor = source.fileno()
        self._sources[descriptor] = source
        self._epoll.register(descriptor, select.EPOLLIN)

    def close(self) -> None:
        """Give out what is there and then None; any thread may ask."""
        self._is_closed = True
        self._ring()

    def _ring(self) -> None:
        if self._waits:
            os.eventfd_write(self._bell, 1)

    def get(self) -> ItemT | None:
        """Wait for the next item and return it; None when it is closed and empty. For one thread."""
        items = self._items
        while True:
            # From here on `put` rings: what it added before is seen below, what it adds later ends the wait.
            self._waits = True
            waits = not items and not self._is_closed
            begun_s = time.monotonic()
            ready = self._epoll.poll(None if waits else 0)
            self._waits = False
            is_fresh = waits and time.monotonic() - begun_s > _SLEPT_S
            for descriptor, _ in ready:
                if descriptor == self._bell:
                    with contextlib.suppress(BlockingIOError):
                        os.eventfd_read(descriptor)
                else:
                    self._read(descriptor, is_fresh=is_fresh)
            if items:
                return items.popleft()
            if self._is_closed and not ready:
                return None

    def _read(self, descriptor: int, *, is_fresh: bool) -> None:
        source = self._sources[descriptor]
        if not source.readable(is_fresh=is_fresh):
            del self._sources[descriptor]
            with contextlib.suppress(OSError):  # all are closed at the end
                self._epoll.unregister(descriptor)
            source.unwatched()
