"""What the dispatcher keeps of requests and batches while they are its own, and the counts it keeps afterwards."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tenuto.deployments.answers import Answer, Outcome

__all__ = ["Batch", "ModelCounters", "Request"]


@dataclass(slots=True)
class Request:
    """A request between arrival and answer.

    `parts` holds one buffer per input of the model, in signature order; `client_id` is what its client calls it.
    """

    id: int
    name: str
    model: int  # queue in the present plan: the model's own, or that of the group it is merged with
    deadline_ms: float
    received_ms: float
    parts: Sequence[bytes | memoryview]
    future: asyncio.Future[Answer]
    client_id: str = ""
    reserve_ms: float = 0.0  # kept for the way back through another process
    dispatched_ms: float = 0.0
    retried: bool = False


@dataclass(slots=True)
class Batch:
    """A batch from its dispatch until its answer; `aborted` ones were preempted and their answer is ignored.

    `members` are the models of a joint batch with their rows, in the order of the requests; empty for a plain one.
    """

    sequence: int
    name: str
    model: int
    gpulet: int
    requests: list[Request]
    dispatched_ms: float  # as the core dates it
    sent_ms: float  # on the clock, which is a little earlier where the core was woken early
    aborted: bool = False
    members: Sequence[tuple[str, int]] = ()

    @property
    def rows(self) -> Sequence[tuple[str, int]]:
        """The models in it, with the number of their requests."""
        return self.members or ((self.name, len(self.requests)),)


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
