"""Load clients as Ray actors, one process each, on any node of the cluster; and their group."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Sequence
from typing import Any

from tenuto.errors import EnvironmentFaultError
from tenuto.loadgen.clients.client import Client, ClientJob, ClientReport
from tenuto.loadgen.clients.group import PREPARE_TIMEOUT_S, RESULT_TIMEOUT_S
from tenuto.loadgen.records import Records, merge
from tenuto.loadgen.senders.make_sender import make_sender


class ClientActor:
    """An asyncio actor around `Client`, so that progress and stop are answered while a job runs."""

    def __init__(self) -> None:
        self._client: Client | None = None

    async def ready(self) -> bool:
        """Return once the process is up."""
        return True

    async def prepare(self, job: ClientJob) -> None:
        """Take a job and open its connections."""
        self._client = Client(job, make_sender(job.via, job.url, job.key), hands_over=True)
        await self._client.prepare()
        gc.freeze()  # so that garbage collections during the run do not look through schedule and bodies

    async def run(self, start_at: float) -> ClientReport:
        """Run the job to its end; `prepare` comes first."""
        if self._client is None:
            raise RuntimeError("run() before prepare()")
        return await self._client.run(start_at)

    async def progress(self) -> dict[str, int]:
        """Return counts so far."""
        return self._client.progress() if self._client is not None else {}

    async def take_ended(self) -> Records | None:
        """Return the requests that ended since the last call; see `Client.take_ended`."""
        return self._client.take_ended() if self._client is not None else None

    async def stop(self) -> None:
        """Send no more."""
        if self._client is not None:
            self._client.stop()


def _start_actors(count: int) -> list[Any]:
    """Start client actors on the Ray of this process, and wait until all are up.

    The actors reserve no CPU of Ray's: the serving side may hold all CPUs, and then a client would never start.

    Raises:
        EnvironmentFaultError: the actors did not start in time.
    """
    import ray

    # Limit: calls of an actor that run at once.
    kind = ray.remote(num_cpus=0, max_concurrency=16, max_restarts=0)(ClientActor)
    actors = [kind.remote() for _ in range(count)]
    try:
        ray.get([actor.ready.remote() for actor in actors], timeout=PREPARE_TIMEOUT_S)
    except (ray.exceptions.RayError, TimeoutError) as error:
        for actor in actors:
            ray.kill(actor)
        raise EnvironmentFaultError(
            f"the {count} load clients did not start ({type(error).__name__}). Use fewer --clients, or "
            "--clients 0 to send from this process."
        ) from error
    return actors


class RayClients:
    """One Ray actor per client. When a client is lost, the run is invalid, but only its last second is lost.

    With every `progress` the actors hand over the requests that have ended.
    """

    def __init__(self, count: int) -> None:
        """Start `count` actors on the Ray that this process has joined."""
        self.actors = _start_actors(count)
        self._runs: list[Any] = []
        self._asked: list[tuple[int, Any]] = []  # (client, reference to the records that it will hand over)
        self._ended: dict[int, list[Records]] = {}
        self._lock = threading.Lock()  # guards the two above

    def prepare(self, jobs: Sequence[ClientJob]) -> None:
        """Hand each actor its job.

        Raises:
            EnvironmentFaultError: an actor died or did not get ready in time.
        """
        import ray

        ready = [actor.prepare.remote(job) for actor, job in zip(self.actors, jobs, strict=True)]
        try:
            ray.get(ready, timeout=PREPARE_TIMEOUT_S)
        except ray.exceptions.RayError as error:
            raise EnvironmentFaultError(
                f"a load client did not get ready ({type(error).__name__}). "
                "Check the cluster with `ray status`, or pass --clients 0."
            ) from error

    def start(self, start_at: float) -> None:
        """Start every actor's schedule."""
        self._runs = [actor.run.remote(start_at) for actor in self.actors]

    def progress(self) -> dict[str, int]:
        """Ask all actors at once. An actor that does not answer within 2 s is left out of these counts."""
        import ray

        asked = [actor.progress.remote() for actor in self.actors]
        with self._lock:
            self._asked += [(index, actor.take_ended.remote()) for index, actor in enumerate(self.actors)]
        ready, _ = ray.wait(asked, num_returns=len(asked), timeout=2)
        total: dict[str, int] = {}
        for answer in ready:
            try:
                counts = ray.get(answer, timeout=PREPARE_TIMEOUT_S)
            except ray.exceptions.RayError:
                continue
            for key, value in counts.items():
                total[key] = total.get(key, 0) + value
        self._collect()
        return total

    def _collect(self) -> None:
        """Fetch the records that actors have handed over by now; later ones are fetched the next time."""
        import ray

        with self._lock:
            references = [reference for _, reference in self._asked]
            ready = set(ray.wait(references, num_returns=len(references), timeout=0.5)[0]) if references else set()
            here = [(index, reference) for index, reference in self._asked if reference in ready]
            self._asked = [(index, reference) for index, reference in self._asked if reference not in ready]
            for index, reference in here:
                try:
                    part = ray.get(reference, timeout=PREPARE_TIMEOUT_S)
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
        """Gather the reports of all actors within one time limit."""
        import ray

        found, lost = [], []
        limit = time.monotonic() + RESULT_TIMEOUT_S
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
