"""The load clients of a run as one group, and the client that is a thread of this process."""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

from tenuto.loadgen.clients.client import Client, ClientJob, ClientReport
from tenuto.loadgen.sender import Sender
from tenuto.loadgen.senders.http_sender import HttpSender

PREPARE_TIMEOUT_S = 120.0  # limit: time for the clients to start
RESULT_TIMEOUT_S = 120.0  # limit: time for the clients to hand over their results after the last answer
# pace: how long another thread of this process, such as one that prints, may keep the client waiting; Python's default
# is 5 ms
_SWITCH_S = 0.0002


class ClientGroup(Protocol):
    """Runs jobs, one per client: `prepare` once, then `start` once."""

    def prepare(self, jobs: Sequence[ClientJob]) -> None:
        """Hand out the jobs; return when every client is ready to send."""

    def start(self, start_at: float) -> None:
        """Start every client's schedule at that `time.time()`, and return."""

    def progress(self) -> dict[str, int]:
        """Return counts so far, over all clients that answer."""

    def is_done(self) -> bool:
        """Whether every client has ended, with a result or an error."""

    def stop(self) -> None:
        """Ask every client to send no more."""

    def results(self) -> tuple[list[ClientReport], list[str]]:
        """Wait for the end; return the reports of the clients that lived, and one line per client that did not."""

    def close(self) -> None:
        """End all clients that are left."""


class LocalClient:
    """One client on a thread of this process."""

    def __init__(self, make_sender: Callable[[str, str], Sender] = HttpSender) -> None:
        """`make_sender` makes the sender for a job's `url` and `key`."""
        self._make_sender = make_sender
        self._client: Client | None = None
        self._start_at: Future[float] = Future()
        self._prepared = threading.Event()
        self._report: ClientReport | None = None
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    def prepare(self, jobs: Sequence[ClientJob]) -> None:
        """Start the thread with the only job; return when its connections are open."""
        self._client = Client(jobs[0], self._make_sender(jobs[0].url, jobs[0].key))
        self._thread = threading.Thread(target=self._work, args=(self._client,), name="load client", daemon=True)
        self._thread.start()
        self._prepared.wait(PREPARE_TIMEOUT_S)

    def _work(self, client: Client) -> None:
        async def job() -> ClientReport:
            await client.prepare()
            gc.freeze()  # so that garbage collections during the run do not look through schedule and bodies
            switch_s = sys.getswitchinterval()
            sys.setswitchinterval(_SWITCH_S)
            self._prepared.set()
            try:
                return await client.run(await asyncio.wrap_future(self._start_at))
            finally:
                sys.setswitchinterval(switch_s)
                gc.unfreeze()

        try:
            self._report = _run_loop(job())
        except BaseException as error:
            self._error = error
        finally:
            self._prepared.set()

    def start(self, start_at: float) -> None:
        """Let the thread start the schedule."""
        self._start_at.set_result(start_at)

    def progress(self) -> dict[str, int]:
        """Return counts so far."""
        return self._client.progress() if self._client is not None else {}

    def is_done(self) -> bool:
        """Whether the thread has ended."""
        return self._thread is not None and not self._thread.is_alive()

    def stop(self) -> None:
        """Send no more."""
        if self._client is not None:
            self._client.stop()

    def results(self) -> tuple[list[ClientReport], list[str]]:
        """Wait for the thread; return its report, or why it is lost."""
        if self._thread is not None:
            self._thread.join(RESULT_TIMEOUT_S)
        if self._report is not None:
            return [self._report], []
        return [], [f"client 0 was lost ({self._error!r}); its requests count as not sent"]

    def close(self) -> None:
        """Send no more; the thread ends by itself."""
        self.stop()
        if not self._start_at.done():
            self._start_at.set_result(0.0)


def _run_loop(main: Coroutine[Any, Any, ClientReport]) -> ClientReport:
    """Run on uvloop if it is installed (Ray Serve brings it), as it takes half the processor time per request."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(main)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main)
