"""Fairness among connections: the turns of the gateway's event loop. They bound how much work is done in one turn, so
that no client starves the others, and say when the bytes arrived that are read in it."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

MOST_WORK = 16  # limit: requests in a turn, which take 0.1 to 0.3 ms each
_WORK_AHEAD = 4  # derived: the least that a connection takes when it goes on with what it has sent ahead
_WORK_SAMPLES = 16  # derived: taking so many more samples of a request takes as long as one request
_WORK_BYTES = 1 << 12  # derived: reading this many bytes of JSON or of chunks takes as long as one request


class Resumable(Protocol):
    """A connection that has received bytes and has not looked at them yet."""

    def resume(self) -> None:
        """Look at the bytes: at one request of HTTP/1.1, at several calls of gRPC that were sent ahead."""


class LoopBudget:
    """The turns of a loop, and the connections that wait for the next turns.

    In each turn, at most `MOST_WORK` requests of clients that ask once are answered, in the order in which they came.
    Then one connection of gRPC goes on with calls that it has sent ahead, and others after it while there is work left
    for them. One TLS handshake or ending goes on by a step, and one request that carries no load is answered. When the
    work of a turn is used up, a connection keeps the bytes that it has read, and reads no more.

    The loop reads bytes later than they come: its next poll finds what came while it worked. When a poll has slept, its
    bytes came just now. When a poll has not slept, its bytes came after the poll before it. The moment of that earlier
    poll is taken then, so that no client waits longer than the server thinks.

    `left`: the work that may still be done in this turn; 0 or less: none.
    """

    # Derived: less than the kernel takes to wake; a poll that returns sooner found bytes that were there already.
    _SLEPT_S = 2e-4

    def __init__(self, loop: asyncio.AbstractEventLoop, clock: Callable[[], float] = time.monotonic) -> None:
        """Take the loop and its clock, in monotonic seconds."""
        self.left = MOST_WORK
        self._loop = loop
        self._clock = clock
        self._first: deque[Resumable] = deque()
        self._ahead: deque[Resumable] = deque()
        self._tls: deque[Resumable] = deque()
        self._management: deque[asyncio.Future[None]] = deque()
        self._handle: asyncio.Handle | None = None
        self._has_read = False  # in this turn
        self._found_s = self._polled_s = clock()
        self._arrived_s = 0.0

    @property
    def waiting(self) -> int:
        """How many connections and requests wait for a turn."""
        return len(self._first) + len(self._ahead) + len(self._tls) + len(self._management)

    def arrived_ms(self) -> float:
        """Return when the bytes came that are read now, in ms on the monotonic clock. Call it once for every read."""
        if not self._has_read:
            self._has_read = True
            self._schedule()
            now_s = self._clock()
            has_slept = now_s - self._polled_s > self._SLEPT_S
            self._arrived_s = now_s if has_slept else self._found_s
            self._found_s = now_s if has_slept else self._polled_s
        return self._arrived_s * 1000.0

    def spend(self, requests: int, size: int = 0) -> None:
        """Count work that is done in this turn: requests, and `size` bytes that are looked at one by one."""
        self.left -= requests + size // _WORK_BYTES
        if self._handle is None:
            self._schedule()

    def spend_samples(self, samples: int) -> None:
        """Count the work for a request that has so many samples."""
        if samples >= _WORK_SAMPLES:
            self.spend(samples // _WORK_SAMPLES)

    def wait(self, asking: Resumable) -> None:
        """Let a connection go on after those that wait already."""
        self._first.append(asking)
        self._schedule()

    def wait_behind(self, asking: Resumable) -> None:
        """Let a connection go on with requests that it has sent ahead, after the others that wait to do so."""
        self._ahead.append(asking)
        self._schedule()

    def wait_for_tls(self, asking: Resumable) -> None:
        """Let a handshake or the end of a TLS connection go on by a step, after the others that wait to do so."""
        self._tls.append(asking)
        self._schedule()

    async def management(self) -> None:
        """Wait for a turn in which no other request that carries no load is answered."""
        turn = self._loop.create_future()
        self._management.append(turn)
        self._schedule()
        await turn

    def _schedule(self) -> None:
        if self._handle is None:
            self._handle = self._loop.call_soon(self._next)

    def _next(self) -> None:
        """Begin the next turn: the connections that waited for it go on. The loop polls afterwards."""
        self._handle = None
        self.left = MOST_WORK
        while self._first and self.left > 0:
            self._first.popleft().resume()
        is_one = True
        while self._ahead and (is_one or self.left > _WORK_AHEAD):
            is_one = False
            self._ahead.popleft().resume()
            self.left -= 1
        if self._tls:
            self._tls.popleft().resume()
        while self._management:
            turn = self._management.popleft()
            if not turn.done():  # its client has not left
                turn.set_result(None)
                break
        if self.waiting:
            self._schedule()
        self._has_read = False
        self._polled_s = self._clock()
