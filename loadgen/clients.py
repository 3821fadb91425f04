"""The load clients of a run as one group: a thread of this process, or Ray actors on any node."""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

from tenuto.errors import EnvironmentFaultError
from tenuto.loadgen.client import Client, ClientJob, ClientReport
from tenuto.loadgen.records import Records, merge
from tenuto.loadgen.senders.choose import make_sender
from tenuto.loadgen.senders.http import Sender

__all__ = ["ClientGroup", "LocalClient", "RayClients"]

_PREPARE_TIMEOUT_S = 60.0
_RESULT_TIMEOUT_S = 120.0
_SWITCH_S = 0.0002  # how long another thread of this process, one that prints, may keep the client waiting; else 5 ms


class ClientGroup(Protocol):
    """Runs jobs, one per client: `prepare` once, then `start` once."""

    def prepare(self, jobs: Sequence[ClientJob]) -> None:
        """Hand out the jobs; return when every client is ready to send."""
        ...

    def start(self, start_at: float) -> None:
        """Start every client's schedule at that `time.time()`, and return."""
        ...

    def progress(self) -> dict[str, int]:
        """Return counts so far, over all clients that answer."""
        ...

    def is_done(self) -> bool:
        """Whether every client has ended, one way or another."""
        ...

    def stop(self) -> None:
        """Ask every client to send no more."""
        ...

    def results(self) -> tuple[list[ClientReport], list[str]]:
        """Wait for the end; return the reports of the clients that lived, and one line per client that did not."""
        ...

    def close(self) -> None:
        """End whatever is left."""
        ...


class LocalClient:
    """One client on a thread of this process."""

    def __init__(self, make_sender: Callable[[ClientJob], Sender] = make_sender) -> None:
        """`make_sender` makes the sender a job asks for."""
        self._make_sender = make_sender
        self._client: Client | None = None
        self._start_at: Future[float] = Future()
        self._prepared = threading.Event()
        self._report: ClientReport | None = None
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    def prepare(self, jobs: Sequence[ClientJob]) -> None:
        """Start the thread with the only job; return when its connections are open."""
        self._client = Client(jobs[0], self._make_sender(jobs[0]))
        self._thread = threading.Thread(target=self._work, args=(self._client,), name="load client", daemon=True)
        self._thread.start()
        self._prepared.wait(_PREPARE_TIMEOUT_S)

    def _work(self, client: Client) -> None:
        async def job() -> ClientReport:
            await client.prepare()
            gc.freeze()  # the schedule and the bodies are not looked through again in every collection of the run
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
        """Let the thread go on."""
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
        """Join the thread."""
        if self._thread is not None:
            self._thread.join(_RESULT_TIMEOUT_S)
        if self._report is not None:
            return [self._report], []
        return [], [f"client 0 was lost ({self._error!r}); its requests count as not sent"]

    def close(self) -> None:
        """Send no more; the thread ends by itself."""
        self.stop()
        if not self._start_at.done():
            self._start_at.set_result(0.0)


def _run_loop(main: Coroutine[Any, Any, ClientReport]) -> ClientReport:
    """Run on uvloop where it is installed, as it is with Ray Serve: half the processor time per request."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(main)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main)


class RayClients:
    """One Ray actor per client; a lost one costs the run's validity and its last second, not the rest.

    With every `progress` the actors hand over which requests have ended.
    """

    def __init__(self, count: int) -> None:
        """Start `count` actors on the running Ray cluster, or on a local one."""
        from tenuto.loadgen.client_actor import start_actors

        self.actors = start_actors(count)
        self._runs: list[Any] = []
        self._asked: list[tuple[int, Any]] = []  # client, what it will hand over
        self._ended: dict[int, list[Records]] = {}
        self._lock = threading.Lock()  # of the two above

    def prepare(self, jobs: Sequence[ClientJob]) -> None:
        """Hand each actor its job.

        Raises:
            EnvironmentFaultError: an actor died or did not get ready in time.
        """
        import ray

        ready = [actor.prepare.remote(job) for actor, job in zip(self.actors, jobs, strict=True)]
        try:
            ray.get(ready, timeout=_PREPARE_TIMEOUT_S)
        except ray.exceptions.RayError as error:
            raise EnvironmentFaultError(
                f"a load client did not get ready ({type(error).__name__}). "
                "Check the cluster with `ray status`, or pass --clients 0."
            ) from error

    def start(self, start_at: float) -> None:
        """Start every actor's schedule."""
        self._runs = [actor.run.remote(start_at) for actor in self.actors]

    def progress(self) -> dict[str, int]:
        """Ask all at once; who does not answer within 2 s is left out of this line."""
        import ray

        asked = [actor.progress.remote() for actor in self.actors]
        with self._lock:
            self._asked += [(index, actor.take_ended.remote()) for index, actor in enumerate(self.actors)]
        ready, _ = ray.wait(asked, num_returns=len(asked), timeout=2)
        total: dict[str, int] = {}
        for answer in ready:
            try:
                counts = ray.get(answer)
            except ray.exceptions.RayError:
                continue
            for key, value in counts.items():
                total[key] = total.get(key, 0) + value
        self._collect()
        return total

    def _collect(self) -> None:
        """Fetch what the actors have handed over by now; what is not here yet is fetched the next time."""
        import ray

        with self._lock:
            references = [reference for _, reference in self._asked]
            ready = set(ray.wait(references, num_returns=len(references), timeout=0.5)[0]) if references else set()
            here = [(index, reference) for index, reference in self._asked if reference in ready]
            self._asked = [(index, reference) for index, reference in self._asked if reference not in ready]
            for index, reference in here:
                try:
                    part = ray.get(reference)
                except ray.exceptions.RayError:
                    continue  # lost with its actor
                if part is not None:
                    self._ended.setdefault(index, []).append(part)

    def is_done(self) -> bool:
        """Whether every run has a result or an error."""
        import ray

        return len(ray.wait(self._runs, num_returns=len(self._runs), timeout=0, fetch_local=False)[0]) == len(
            self._runs
        )

    def stop(self) -> None:
        """Ask every actor to send no more."""
        for actor in self.actors:
            actor.stop.remote()

    def results(self) -> tuple[list[ClientReport], list[str]]:
        """Gather the reports; all share one time limit."""
        import ray

        found, lost = [], []
        limit = time.monotonic() + _RESULT_TIMEOUT_S
        for index, run in enumerate(self._runs):
            try:
                found.append(ray.get(run, timeout=max(0.0, limit - time.monotonic())))
            except ray.exceptions.RayError as error:
                self._collect()
                parts = self._ended.get(index, [])
                rest = "what it had not handed over yet counts" if parts else "its requests count"
                lost.append(f"client {index} was lost ({type(error).__name__}); {rest} as not sent")
                if parts:
                    found.append(ClientReport(merge(parts)))
        return found, lost

    def close(self) -> None:
        """End the actors."""
        import ray

        for actor in self.actors:
            ray.kill(actor)
