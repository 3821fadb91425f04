"""One load client: sends its part of the schedule open-loop at absolute times and records what came back.

Runs on any event loop; `tenuto.loadgen.client_actor` wraps it in a Ray actor.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tenuto.loadgen.http_sender import HttpSender, Reply, prepare
from tenuto.loadgen.records import NAN, Outcome, Records

__all__ = ["Client", "ClientJob", "ModelTarget"]


@dataclass(frozen=True)
class ModelTarget:
    """Where and how one model is asked. `bodies` are (body, headers) to draw from."""

    name: str
    slo_ms: float
    bodies: tuple[tuple[bytes, dict[str, str]], ...]


@dataclass(frozen=True)
class ClientJob:
    """What one client has to send: requests by index, with their times in ms from the common start."""

    url: str
    targets: tuple[ModelTarget, ...]
    request: Any  # int64 array
    times_ms: Any  # float64 array
    model_index: Any  # int32 array
    start_at: float  # time.time() of the common start
    grace_s: float
    connections: int
    send_slo: bool = False


@dataclass
class _Row:
    sent_ms: float = NAN
    answered_ms: float = NAN
    reply: Reply = field(default_factory=lambda: Reply(0, error="not sent"))


class Client:
    """Runs one job. `progress` may be read while `run` is under way; `stop` ends it early, keeping what was recorded."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._stopped = False

    def progress(self) -> dict[str, int]:
        """Return counts so far: sent, answered, ok, late, expired, rejected, failed."""
        return dict(self._counts)

    def stop(self) -> None:
        """Send no more; `run` returns after what is under way has been answered or the grace period has passed."""
        self._stopped = True

    async def run(self, job: ClientJob) -> Records:
        """Send every request at its time, wait for stragglers up to the grace period, return one row per request."""
        sender = HttpSender(job.url)
        await sender.open(job.connections)
        prepared = [
            [prepare(f"/v2/models/{t.name}/infer", body, _headers(headers, t, job.send_slo), sender.host) for body, headers in t.bodies]
            for t in job.targets
        ]
        # One clock for the whole run: the wall clock is read once, so that an adjustment during the run cannot bend it.
        origin = time.monotonic() + (job.start_at - time.time())
        rows = [_Row() for _ in range(len(job.request))]
        pending = 0
        done = asyncio.Event()

        def now_ms() -> float:
            return (time.monotonic() - origin) * 1000.0

        for position, (at_ms, model) in enumerate(zip(job.times_ms.tolist(), job.model_index.tolist(), strict=True)):
            wait_ms = at_ms - now_ms()
            if wait_ms > 0:
                await asyncio.sleep(wait_ms / 1000.0)
            elif position % 16 == 0:
                await asyncio.sleep(0)  # behind schedule: let answers be read between sends
            if self._stopped:
                break
            row = rows[position]
            target = job.targets[model]
            pending += 1

            def on_reply(reply: Reply, row: _Row = row, at_ms: float = at_ms, slo_ms: float = target.slo_ms) -> None:
                nonlocal pending
                row.answered_ms = now_ms()
                row.reply = reply
                pending -= 1
                self._counts["answered"] += 1
                self._counts[_outcome(reply.status, row.answered_ms - at_ms, slo_ms).name.lower()] += 1
                if pending == 0:
                    done.set()

            row.sent_ms = now_ms()
            row.reply = Reply(0, error="no answer within the grace period")
            done.clear()
            sender.send(prepared[model][position % len(prepared[model])], on_reply)
            self._counts["sent"] += 1
        if pending:
            try:
                await asyncio.wait_for(done.wait(), job.grace_s)
            except TimeoutError:
                pass  # stragglers count as misses: their rows say so
        records = _records(job, rows)
        sender.close()
        return records


def _headers(headers: dict[str, str], target: ModelTarget, send_slo: bool) -> dict[str, str]:
    return {**headers, "X-SLO-Ms": f"{target.slo_ms:g}"} if send_slo else headers


def _outcome(status: int, latency_ms: float, slo_ms: float) -> Outcome:
    if status == 200:
        return Outcome.OK if latency_ms <= slo_ms else Outcome.LATE
    return {504: Outcome.EXPIRED, 429: Outcome.REJECTED}.get(status, Outcome.FAILED)


def _records(job: ClientJob, rows: Sequence[_Row]) -> Records:
    scheduled = np.asarray(job.times_ms, dtype=np.float64)
    answered = [row.answered_ms if row.reply.status else NAN for row in rows]
    outcome = [
        _outcome(row.reply.status, row.answered_ms - at, job.targets[model].slo_ms)
        for row, at, model in zip(rows, scheduled.tolist(), np.asarray(job.model_index).tolist(), strict=True)
    ]
    return Records.from_lists(
        {
            "request": job.request, "model": job.model_index, "scheduled_ms": scheduled,
            "sent_ms": [row.sent_ms for row in rows], "answered_ms": answered,
            "status": [row.reply.status for row in rows], "outcome": outcome,
            "batching_ms": [row.reply.batching_ms for row in rows],
            "gpulet_queue_ms": [row.reply.gpulet_queue_ms for row in rows],
            "execution_ms": [row.reply.execution_ms for row in rows],
            "batch_size": [row.reply.batch_size for row in rows],
            "gpulet": [row.reply.gpulet for row in rows],
        }
    )  # fmt: skip
