"""What a dispatcher counts and remembers of requests and batches: counts per model, the last ended requests, and what
the autoscale advice is made of."""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass, field
from typing import Any

from tenuto.deployments.dispatch.advice import LiveAdvice
from tenuto.deployments.dispatch.in_flight import Batch, Request
from tenuto.deployments.dispatch.request_log import RequestLog
from tenuto.deployments.wire.answers import Executed, Refused
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

    def executed(self, requests: list[Request], executed: Executed, now_ms: float) -> None:
        """Count and remember requests of one model that are answered now; after its deadline an answer is `late`."""
        counters = self.counters[requests[0].name]
        good = sum([now_ms <= request.deadline_ms for request in requests])
        counters.ok += good
        counters.late += len(requests) - good
        counters.execution_ms.append(executed.execution_ms)
        self.advice.ended(good=good, bad=len(requests) - good)
        self.ended.add_executed(requests, executed, now_ms)

    def refused(self, request: Request, refused: Refused, now_ms: float) -> None:
        """Count and remember a request that is refused now."""
        counters = self.counters[request.name]
        if refused.outcome is Outcome.EXPIRED:
            counters.expired += 1
        elif refused.outcome is Outcome.REJECTED:
            counters.rejected += 1
        else:
            counters.failed += 1
        self.advice.ended(bad=1)
        self.ended.add_refused(request, refused, now_ms)

    def batch_sent(self, batch: Batch) -> None:
        """Count a batch that left, for each model in it."""
        for model, rows in batch.members:
            counters = self.counters[model]
            counters.batches += 1
            counters.batched += rows
