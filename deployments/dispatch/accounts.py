"""What a dispatcher counts and remembers of requests and batches: counts per model, the last ended requests, and what
the autoscale advice is made of."""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass, field
from typing import Any

from tenuto.deployments.dispatch.advice import LiveAdvice
from tenuto.deployments.dispatch.in_flight import Batch, Request
from tenuto.deployments.dispatch.request_log import RequestLog
from tenuto.deployments.wire.answers import Answer
from tenuto.outcome import Outcome

__all__ = ["Accounts", "ModelCounters"]


@dataclass
class ModelCounters:
    """Counts since the dispatcher started; `batches` and `batched` give the mean batch size."""

    submitted: int = 0
    ok: int = 0
    late: int = 0
    expired: int = 0
    rejected: int = 0
    failed: int = 0
    cancelled: int = 0
    batches: int = 0
    batched: int = 0
    execution_ms: deque[float] = field(default_factory=lambda: deque(maxlen=512))

    def count(self, outcome: Outcome, *, in_time: bool) -> None:
        """Count a request's end; an `ok` answer after its deadline is `late`."""
        if outcome is Outcome.EXPIRED:
            self.expired += 1
        elif outcome is Outcome.REJECTED:
            self.rejected += 1
        elif outcome is not Outcome.OK:
            self.failed += 1
        elif in_time:
            self.ok += 1
        else:
            self.late += 1

    def to_data(self) -> dict[str, Any]:
        """Return plain data for the status."""
        executions = sorted(self.execution_ms)
        return {
            "submitted": self.submitted,
            "ok": self.ok,
            "late": self.late,
            "expired": self.expired,
            "rejected": self.rejected,
            "failed": self.failed,
            "cancelled": self.cancelled,
            "batches": self.batches,
            "batched": self.batched,
            "mean_batch": self.batched / self.batches if self.batches else None,
            "execution_p50_ms": executions[len(executions) // 2] if executions else None,
        }


class Accounts:
    """Invariant: every request that was submitted and is not open any more is counted under exactly one end."""

    def __init__(self) -> None:
        self.counters: defaultdict[str, ModelCounters] = defaultdict(ModelCounters)
        self.ended = RequestLog()
        self.advice = LiveAdvice()

    def request_submitted(self, model: str) -> None:
        """Count a request that came."""
        self.counters[model].submitted += 1

    def request_ended(self, request: Request, answer: Answer, now_ms: float) -> None:
        """Count and remember a request that gets this answer now."""
        in_time = now_ms <= request.deadline_ms
        self.counters[request.name].count(answer.outcome, in_time=in_time)
        self.advice.ended(in_time=in_time and answer.outcome is Outcome.OK)
        self.ended.add(request.client_id, request.name, answer, now_ms - request.received_ms, in_time=in_time)

    def request_cancelled(self, model: str) -> None:
        """Count a request whose client went away before its answer."""
        self.counters[model].cancelled += 1

    def batch_sent(self, batch: Batch) -> None:
        """Count a batch that left, for each model in it."""
        for model, rows in batch.rows:
            counters = self.counters[model]
            counters.batches += 1
            counters.batched += rows

    def batch_executed(self, batch: Batch, gpulet_id: str, execution_ms: float) -> None:
        """Remember how long a batch executed, for each model in it."""
        for model, _ in batch.rows:
            self.counters[model].execution_ms.append(execution_ms)
        self.advice.executed(gpulet_id, execution_ms)
