"""Load clients as Ray actors, one process each, on any node of the cluster; and their group."""

from __future__ import annotations

import contextlib
import gc
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from tenuto.errors import EnvironmentFaultError
from tenuto.loadgen.clients.client import Client, ClientJob, ClientReport
from tenuto.loadgen.clients.group import PREPARE_TIMEOUT_S, RESULT_TIMEOUT_S
from tenuto.loadgen.senders.http_sender import HttpSender


class ClientActor:
    """An asyncio actor around `Client`, so that progress and stop are answered while a job runs."""

    def __init__(self) -> None:
        self._client: Client | None = None

    async def ready(self) -> bool:
        """Return once the process is up."""
        return True

    async def prepare(self, job: ClientJob) -> None:
        """Take a job and open its connections."""
        self._client = Client(job, HttpSender(job.url, job.key))
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
    """One Ray actor per client. When a client is lost, the run is invalid, and its requests count as not sent."""

    def __init__(self, count: int) -> None:
        """Start `count` actors on the Ray that this process has joined."""
        self.actors = _start_actors(count)
        self._runs: list[Any] = []

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

        counts = [actor.progress.remote() for actor in self.actors]
        ready, _ = ray.wait(counts, num_returns=len(counts), timeout=2)
        total: Counter[str] = Counter()
        for answer in ready:
            with contextlib.suppress(ray.exceptions.RayError):
                total.update(ray.get(answer, timeout=PREPARE_TIMEOUT_S))
        return dict(total)

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

        reports, lost = [], []
        limit = time.monotonic() + RESULT_TIMEOUT_S
        for index, run in enumerate(self._runs):
            try:
                reports.append(ray.get(run, timeout=max(0.0, limit - time.monotonic())))
            except ray.exceptions.RayError as error:
                lost.append(f"client {index} was lost ({type(error).__name__}); its requests count as not sent")
        return reports, lost

    def close(self) -> None:
        """End the actors."""
        import ray

        for actor in self.actors:
            ray.kill(actor)
