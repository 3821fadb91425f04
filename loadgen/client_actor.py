"""Load clients as Ray actors: one process each, on any node of the cluster."""

from __future__ import annotations

import gc
from typing import Any

from tenuto.errors import EnvironmentFaultError
from tenuto.loadgen.client import Client, ClientJob, ClientReport
from tenuto.loadgen.records import Records
from tenuto.loadgen.senders.choose import make_sender

__all__ = ["ClientActor", "start_actors"]


class ClientActor:
    """An asyncio actor around `Client`, so that progress and stop are answered while a job runs."""

    def __init__(self) -> None:
        self._client: Client | None = None

    async def ready(self) -> bool:
        """Return once the process is up."""
        return True

    async def prepare(self, job: ClientJob) -> None:
        """Take a job and open its connections."""
        self._client = Client(job, make_sender(job), hands_over=True)
        await self._client.prepare()
        gc.freeze()  # the schedule and the bodies are not looked through again in every collection of the run

    async def run(self, start_at: float) -> ClientReport:
        """Run the job to its end; `prepare` comes first."""
        if self._client is None:
            raise RuntimeError("run() before prepare()")
        return await self._client.run(start_at)

    async def progress(self) -> dict[str, int]:
        """Return counts so far."""
        return self._client.progress() if self._client is not None else {}

    async def take_ended(self) -> Records | None:
        """Return what ended since the last call; see `Client.take_ended`."""
        return self._client.take_ended() if self._client is not None else None

    async def stop(self) -> None:
        """Send no more."""
        if self._client is not None:
            self._client.stop()


def start_actors(count: int) -> list[Any]:
    """Start client actors and wait until all are up; without a Ray cluster, start a small local one for them.

    They reserve no CPU in Ray's ledger: the serving side may hold it, and a client that waits for it would never start.

    Raises:
        EnvironmentFaultError: they did not start within a minute.
    """
    import ray

    _join_ray()
    kind = ray.remote(num_cpus=0, max_concurrency=16, max_restarts=0)(ClientActor)
    actors = [kind.remote() for _ in range(count)]
    try:
        ray.get([actor.ready.remote() for actor in actors], timeout=60)
    except (ray.exceptions.RayError, TimeoutError) as error:
        for actor in actors:
            ray.kill(actor)
        raise EnvironmentFaultError(
            f"the {count} load clients did not start ({type(error).__name__}). Use fewer --clients, or "
            "--clients 0 to send from this process."
        ) from error
    return actors


def _join_ray() -> None:
    """Join the running cluster, or start a small local one for the clients alone."""
    import logging

    import ray

    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR, "namespace": "tenuto"}
    if not ray.is_initialized():
        try:
            ray.init(address="auto", **quiet)
        except ConnectionError:
            from tenuto.deployments.serve.launcher import start_local_ray

            start_local_ray(num_gpus=0)
