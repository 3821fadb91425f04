"""Shows operators what runs beside the gateways. Serve is asked only while an operator looks, and no question waits
long."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from tenuto.deployments.wire.status import Beside

logger = logging.getLogger("ray.serve")

AskController = Callable[[], Awaitable[Beside]]

_EVERY_S = 2.0  # pace: between two questions to the controller, which looks as often
_ABSENT_S = 10.0  # pace: time until the next question, when no controller runs
_WAITED_S = 1.0  # limit: for an answer that is under way; else the last one is shown
_LASTS_S = 20.0  # limit: of one question


async def nothing() -> Beside:
    """The answer when there is no Serve."""
    return Beside()


class ControllerStatusCache:
    """What last ran beside the gateways. All awaits must come from one event loop."""

    def __init__(self, ask: AskController, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Take the function that asks Serve, and a clock in seconds."""
        self._ask = ask
        self._clock = clock
        self._next_s = clock()
        self._latest = Beside()
        self._asking: asyncio.Task[None] | None = None

    async def read(self) -> Beside:
        """Return what runs; while Serve answers, it is some seconds old at most."""
        if self._asking is None and self._clock() >= self._next_s:
            self._asking = asyncio.create_task(self._refresh(), name="ask the controller")
        if self._asking is not None:
            await asyncio.wait([self._asking], timeout=_WAITED_S)
        return self._latest

    async def _refresh(self) -> None:
        try:
            async with asyncio.timeout(_LASTS_S):
                self._latest = await self._ask()
        except Exception as error:  # Ray and Serve have many kinds while an application starts, restarts or goes
            logger.info("the controller does not say what it does: %s: %s", type(error).__name__, error)
        finally:
            self._next_s = self._clock() + (_ABSENT_S if self._latest.controller is None else _EVERY_S)
            self._asking = None

    def close(self) -> None:
        """End the questions."""
        if self._asking is not None:
            self._asking.cancel()
