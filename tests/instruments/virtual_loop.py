"""An asyncio event loop whose time jumps to the next timer instead of waiting for it, for runs without a real clock.

Only timers and callbacks advance it; whatever waits for another thread or process must not run on it.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["LoopTimer", "VirtualLoop"]


class _Jump(selectors.BaseSelector):
    """Looks for ready files without waiting, and lets the time pass that would have been waited."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.oversleep_s: Callable[[], float] = lambda: 0.0
        self._files = selectors.DefaultSelector()

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = self._files.select(0)
        if not ready:
            if timeout is None:
                raise RuntimeError("nothing is left that could happen: every task waits and no timer is set")
            if timeout > 0.0:
                self.now_s += timeout + self.oversleep_s()
        return ready

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        return self._files.register(fileobj, events, data)

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._files.unregister(fileobj)

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return self._files.get_map()

    def close(self) -> None:
        self._files.close()


class VirtualLoop(asyncio.SelectorEventLoop):
    """Starts at 0 s. Use with `asyncio.Runner(loop_factory=VirtualLoop)`."""

    def __init__(self) -> None:
        self._jump = _Jump()
        super().__init__(self._jump)

    def time(self) -> float:
        """Return the virtual time in seconds."""
        return self._jump.now_s

    def oversleep(self, by_s: Callable[[], float]) -> None:
        """Wake up later than asked by what this returns, each time."""
        self._jump.oversleep_s = by_s


class LoopTimer:
    """The running loop's time as the clock of a load client, which begins at 0 s."""

    def now(self) -> float:
        return asyncio.get_running_loop().time()

    wall = now

    async def wait_until(self, at: float) -> None:
        await asyncio.sleep(max(0.0, at - self.now()))

    def close(self) -> None:
        pass
