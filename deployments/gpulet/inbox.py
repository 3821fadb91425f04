"""The queue of a gpu-let's worker: items that other threads put, and messages on sockets that the worker reads itself.

If another thread read the socket, a batch would wake that thread, which would wake the worker. The second wake-up costs
50 to 130 µs on a shared machine. So the worker reads whenever it would otherwise wait; while it works, messages stay in
the socket.
"""

from __future__ import annotations

import contextlib
import os
import select
import time
from collections import deque
from typing import Generic, Protocol, TypeVar

ItemT = TypeVar("ItemT")

# Derived: less than the kernel takes to wake: a wait that ended sooner found bytes that were there already.
_SLEPT_S = 1e-4


class Source(Protocol):
    """A socket that the worker reads."""

    def fileno(self) -> int:
        """Return its descriptor."""

    def readable(self, *, is_fresh: bool) -> bool:
        """Read the bytes that have come, and put the items in them. Return whether to go on watching.

        `is_fresh`: the bytes have ended a wait, so they came just now; otherwise they may have come a while ago.
        """

    def unwatched(self) -> None:
        """Learn that the worker has stopped watching. The socket may be closed now: its number is forgotten, so another
        socket may get it."""


class Inbox(Generic[ItemT]):
    """A queue with one reader. Invariant: items that were put, or came to a watched socket, before `close` are still
    given out."""

    def __init__(self) -> None:
        self._items: deque[ItemT] = deque()
        self._sources: dict[int, Source] = {}
        self._epoll = select.epoll()
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll.register(self._bell, select.EPOLLIN)
        self._waits = False
        self._is_closed = False

    def __bool__(self) -> bool:
        """Whether an item waits that was put or read already."""
        return bool(self._items)

    def put(self, item: ItemT) -> None:
        """Add an item; any thread may."""
        self._items.append(item)
        self._ring()

    def watch(self, source: Source) -> None:
        """Let the reader read this socket from now on; any thread may call this."""
        descriptor = source.fileno()
        self._sources[descriptor] = source
        self._epoll.register(descriptor, select.EPOLLIN)

    @property
    def is_closed(self) -> bool:
        """Whether nothing more comes than what is there."""
        return self._is_closed

    def close(self) -> None:
        """Let `get` give out the items that are there, and then None; any thread may call this."""
        self._is_closed = True
        self._ring()

    def release(self) -> None:
        """Release the descriptors. Call it once the reader has ended."""
        self._epoll.close()
        os.close(self._bell)

    def _ring(self) -> None:
        if self._waits:
            os.eventfd_write(self._bell, 1)

    def get(self, wait_s: float | None = None) -> ItemT | None:
        """Wait for the next item and return it; None when the inbox is closed and empty, or when none has come within
        `wait_s`. For one thread only."""
        items = self._items
        while True:
            # From here on `put` rings. Items that were put before are seen below; later ones end the wait.
            self._waits = True
            waits = not items and not self._is_closed and wait_s != 0.0
            begun_s = time.monotonic()
            ready = self._epoll.poll(wait_s if waits else 0)
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
            if (self._is_closed or wait_s is not None) and not ready:
                return None

    def _read(self, descriptor: int, *, is_fresh: bool) -> None:
        source = self._sources[descriptor]
        if not source.readable(is_fresh=is_fresh):
            del self._sources[descriptor]
            with contextlib.suppress(OSError):  # the socket may be closed already, at the end
                self._epoll.unregister(descriptor)
            source.unwatched()
