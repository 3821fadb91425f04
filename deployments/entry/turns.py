"""How much of what clients ask is done in one turn of the event loop, however many of them ask at once."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Protocol

MOST_WORK = 16  # limit: of a turn, in requests of 0.1 to 0.3 ms each
_WORK_BYTES = 1 << 12  # derived: so many bytes of JSON or of chunks take as long as one request


class Asking(Protocol):
    """A connection that has received what it has not looked at."""

    def go_on(self) -> None:
        """Look at it: at one request of a client that has asked now, at more of one that sent ahead."""


class Turns:
    """The turns of a loop, and who waits for the next ones.

    In a turn so much work is done for those who ask once, in the order in which they came, and one connection goes on
    with what it has sent ahead. What carries no load has a turn of its own for each request. A connection finds out
    that the work of a turn is done when it has been read already: what came is kept, and no more is read.

    `left`: work that may be done before the loop has another turn; none where it is 0 or less. It is renewed only then:
    a callback in each turn would have the loop poll once more without a wait.
    """

    def __init__(self) -> None:
        self.left = MOST_WORK
        self._first: deque[Asking] = deque()
        self._ahead: deque[Asking] = deque()
        self._cold: deque[asyncio.Future[None]] = deque()
        self._handle: asyncio.Handle | None = None

    @property
    def waiting(self) -> int:
        """How many wait for a turn."""
        return len(self._first) + len(self._ahead) + len(self._cold)

    def spend(self, requests: int, size: int = 0) -> None:
        """Take note of work: of so many requests, and of so many bytes that are looked at one by one."""
        self.left -= requests + size // _WORK_BYTES
        if self.left <= 0:
            self._schedule()

    def wait(self, asking: Asking) -> None:
        """Let a connection go on when those before it have."""
        self._first.append(asking)
        self._schedule()

    def wait_behind(self, asking: Asking) -> None:
        """Let a connection go on with what it has sent ahead, after the others that have done so."""
        self._ahead.append(asking)
        self._schedule()

    async def cold(self) -> None:
        """Wait for a turn in which no other request that carries no load is answered."""
        turn = asyncio.get_running_loop().create_future()
        self._cold.append(turn)
        self._schedule()
        await turn

    def _schedule(self) -> None:
        if self._handle is None:
            self._handle = asyncio.get_running_loop().call_soon(self._next)

    def _next(self) -> None:
        """The loop has polled, or is about to."""
        self._handle = None
        self.left = MOST_WORK
        while self._first and self.left > 0:
            self._first.popleft().go_on()
        if self._ahead:
            self._ahead.popleft().go_on()
        while self._cold:
            turn = self._cold.popleft()
            if not turn.done():  # its client has not left
                turn.set_result(None)
                break
        if self._first or self._ahead or self._cold:
            self._schedule()
