"""One measured run against a live endpoint: schedule, clients, records, verdict."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from tenuto.errors import EnvironmentFaultError, InvalidInputError
from tenuto.loadgen.client import Client, ClientJob, ModelTarget
from tenuto.loadgen.payloads import make_bodies
from tenuto.loadgen.records import Records, merge
from tenuto.loadgen.schedule import Schedule, make_schedule, seed_for
from tenuto.loadgen.verdict import Verdict, judge, summarise
from tenuto.placement import ModelSpec

__all__ = ["BenchOptions", "BenchResult", "run_bench"]

Progress = Callable[[str], None]


@dataclass(frozen=True)
class BenchOptions:
    """Settings of a run; `clients` 0 sends from this process, without Ray."""

    url: str
    duration_s: float = 30.0
    seed: int = 0
    rate_scale: float = 1.0
    slo_scale: float = 1.0
    warmup_s: float | None = None
    clients: int = 1
    grace_s: float = 5.0


@dataclass
class BenchResult:
    """Everything measured. `summary` has the keys of `tenuto simulate --json` plus the latency split."""

    records: Records
    schedule: Schedule
    summary: dict[str, Any]
    verdict: Verdict
    errors: list[str] = field(default_factory=list)


class _Clients(Protocol):
    def start(self, jobs: Sequence[ClientJob]) -> None: ...

    def progress(self) -> dict[str, int]: ...

    def is_done(self) -> bool: ...

    def stop(self) -> None: ...

    def results(self) -> tuple[list[Records], list[str]]: ...

    def close(self) -> None: ...


class _LocalClient:
    """One client on a thread of this process."""

    def __init__(self) -> None:
        self._client = Client()
        self._records: Records | None = None
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    def start(self, jobs: Sequence[ClientJob]) -> None:
        def work() -> None:
            try:
                self._records = asyncio.run(self._client.run(jobs[0]))
            except BaseException as error:
                self._error = error

        self._thread = threading.Thread(target=work, name="load client", daemon=True)
        self._thread.start()

    def progress(self) -> dict[str, int]:
        return self._client.progress()

    def is_done(self) -> bool:
        return self._thread is not None and not self._thread.is_alive()

    def stop(self) -> None:
        self._client.stop()

    def results(self) -> tuple[list[Records], list[str]]:
        if self._thread is not None:
            self._thread.join()
        return ([self._records] if self._records is not None else []), ([f"0 failed: {self._error}"] if self._error else [])

    def close(self) -> None:
        self.stop()


class _RayClients:
    """One Ray actor per client; a lost one costs its part of the records and the run's validity, not the rest."""

    def __init__(self, count: int) -> None:
        from tenuto.loadgen.client_actor import start_actors

        self._actors = start_actors(count)
        self._runs: list[Any] = []

    def start(self, jobs: Sequence[ClientJob]) -> None:
        self._runs = [actor.run.remote(job) for actor, job in zip(self._actors, jobs, strict=True)]

    def progress(self) -> dict[str, int]:
        import ray

        total: dict[str, int] = {}
        for actor in self._actors:
            try:
                counts = ray.get(actor.progress.remote(), timeout=2)
            except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError):
                continue
            for key, value in counts.items():
                total[key] = total.get(key, 0) + value
        return total

    def is_done(self) -> bool:
        import ray

        return len(ray.wait(self._runs, num_returns=len(self._runs), timeout=0)[0]) == len(self._runs)

    def stop(self) -> None:
        for actor in self._actors:
            actor.stop.remote()

    def results(self) -> tuple[list[Records], list[str]]:
        import ray

        found, lost = [], []
        for index, run in enumerate(self._runs):
            try:
                found.append(ray.get(run, timeout=120))
            except (ray.exceptions.RayError, ray.exceptions.GetTimeoutError) as error:
                lost.append(f"{index} was lost ({type(error).__name__}); its requests are missing")
        return found, lost

    def close(self) -> None:
        import ray

        for actor in self._actors:
            ray.kill(actor)


def run_bench(models: Sequence[ModelSpec], options: BenchOptions, progress: Progress = lambda _text: None) -> BenchResult:
    """Send a schedule to an endpoint and judge what comes back. Ctrl-C ends it early; the part that ran is returned as INVALID.

    Raises:
        EnvironmentFaultError: the endpoint does not answer or a model is not ready.
        InvalidInputError: unusable arrival process, rate, duration or seed.
    """
    if options.clients < 0:
        raise InvalidInputError(f"--clients is {options.clients}; give 0 (this process) or more.")
    schedule = make_schedule(models, options.duration_s, options.seed, options.rate_scale)
    targets = tuple(_target(options, spec) for spec in models)
    rate = len(schedule) / options.duration_s
    n_clients = max(1, options.clients)
    pool = min(400, int(rate / n_clients * min(2.0, max(t.slo_ms for t in targets) / 1000.0)) + 16) if targets else 1
    clients: _Clients = _RayClients(options.clients) if options.clients else _LocalClient()
    interrupted = False
    try:
        start_at = time.time() + 1.0 + 0.002 * pool
        jobs = [
            ClientJob(
                options.url, targets, np.arange(part, len(schedule), n_clients, dtype=np.int64),
                schedule.times_ms[part::n_clients], schedule.model_index[part::n_clients], start_at, options.grace_s, pool,
                send_slo=options.slo_scale != 1.0,
            )
            for part in range(n_clients)
        ]  # fmt: skip
        clients.start(jobs)
        try:
            _watch(clients, start_at, len(schedule), options, progress)
        except KeyboardInterrupt:
            interrupted = True
            clients.stop()
        parts, lost = clients.results()
    finally:
        clients.close()
    records = merge(parts)
    warmup_s = options.warmup_s if options.warmup_s is not None else 0.05 * options.duration_s
    end_ms = options.duration_s * 1000.0
    if interrupted:
        sent = records.where(~np.isnan(records.sent_ms))
        records = sent
        end_ms = max(warmup_s * 1000.0 + 1.0, float(sent.scheduled_ms.max()) if len(sent) else 0.0)
    summary = summarise(records, schedule.names, warmup_ms=warmup_s * 1000.0, duration_ms=end_ms)
    verdict = judge(records, summary, [t.slo_ms for t in targets], interrupted=interrupted, lost_clients=lost)
    return BenchResult(records, schedule, summary, verdict, errors=_errors(records))


def _target(options: BenchOptions, spec: ModelSpec) -> ModelTarget:
    from tenuto.deployments.endpoint import model_metadata

    metadata = model_metadata(options.url, spec.name)
    if "inputs" not in metadata:
        raise EnvironmentFaultError(f"{options.url}: '{spec.name}' cannot be asked: {metadata.get('error', metadata)}")
    bodies = make_bodies(metadata, seed_for(options.seed, "payloads", spec.name))
    return ModelTarget(spec.name, spec.slo_ms * options.slo_scale, tuple(bodies))


def _watch(clients: _Clients, start_at: float, total: int, options: BenchOptions, progress: Progress) -> None:
    """Print one line a second until the clients are done; they end by themselves."""
    limit = start_at + options.duration_s + options.grace_s + 30.0
    next_line = start_at + 1.0
    while not clients.is_done():
        time.sleep(0.05)
        now = time.time()
        if now >= next_line:
            counts = clients.progress()
            second = min(math.floor(now - start_at), math.ceil(options.duration_s))
            shown = "  ".join(f"{key} {counts.get(key, 0)}" for key in ("ok", "late", "expired", "rejected", "failed"))
            progress(f"{second:4d} s  sent {counts.get('sent', 0)}/{total}  {shown}")
            next_line = now - (now - start_at) % 1.0 + 1.0
        if now > limit:
            clients.stop()
            return


def _errors(records: Records) -> list[str]:
    """Return one line per kind of failure, most frequent first."""
    failed = records.where(records.outcome == 4)
    found = {}
    for status in failed.status.tolist():
        found[status] = found.get(status, 0) + 1
    return [
        f"{count} requests " + (f"answered with HTTP {status}" if status else "got no answer")
        for status, count in sorted(found.items(), key=lambda item: -item[1])
    ]
