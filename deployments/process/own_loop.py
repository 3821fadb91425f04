"""An event loop in a thread of its own, for the requests in a Serve replica.

Serve's loop belongs to Ray: Ray decides which kind of loop it is, and runs health checks, metrics and proxies on it.
Our requests have a uvloop for themselves. The two loops meet only when a plan comes, or when somebody asks for a
status. Measured, a server in such a thread is as fast as one without Ray (docs/reference/serving.md).
"""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from tenuto.errors import EnvironmentFaultError

ResultT = TypeVar("ResultT")

_STANDSTILL_S = 4.0  # limit: shorter than Serve waits for a health check, so that Serve's log says why it failed
# pace: new objects before a collection; with 700 (the default) open requests would be looked at all the time
_COLLECT_AFTER = 5_000


class OwnLoop:
    """Runs until `close`. Give it coroutines by `run`."""

    def __init__(self, name: str) -> None:
        """Start the thread."""
        import uvloop

        self.loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()
        self.loop.close()

    async def answers(self, owner: str) -> None:
        """Return once the loop has had a turn; for health checks.

        Raises:
            EnvironmentFaultError: the loop has ended.
            TimeoutError: the loop stands still.
        """
        if not self._thread.is_alive():
            raise EnvironmentFaultError(f"the event loop of {owner} has ended")
        async with asyncio.timeout(_STANDSTILL_S):
            await self.run(asyncio.sleep(0))

    async def run(self, coroutine: Coroutine[Any, Any, ResultT]) -> ResultT:
        """Run a coroutine on this loop, and wait for it on the caller's loop."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, self.loop))

    async def close(self) -> None:
        """End the loop and its thread. Coroutines that still run there are dropped."""
        self.loop.call_soon_threadsafe(self.loop.stop)
        await asyncio.get_running_loop().run_in_executor(None, self._thread.join, 5.0)  # limit: for the thread to end


def elsewhere(
    find: Callable[[], Awaitable[ResultT]], loop: asyncio.AbstractEventLoop
) -> Callable[[], Awaitable[ResultT]]:
    """Return a function that runs `find` on another loop. (Calls to Ray must run on Ray's loop.)"""

    async def there() -> ResultT:
        return await find()

    async def here() -> ResultT:
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(there(), loop))

    return here


def spare_the_collector() -> None:
    """Keep all present objects out of garbage collections. With Ray and FastAPI in the process a full collection takes
    160 to 250 ms, in which no request is answered.

    Requests leave no garbage that needs a collection (see `tenuto.deployments.dispatch.in_flight.Request`). When they
    did, 50,000 objects took 85 ms, every 5 s at 850 requests a second. A second call only looks at objects that came
    since the first.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_COLLECT_AFTER, 50, 100)
