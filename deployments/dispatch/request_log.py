"""The last requests that ended, with their id and times: what joins a client's record with a gpu-let's.

All times of a record are ms after `received_at_s`, on one clock. `start_ms` and `end_ms` are None for a gpu-let whose
clock is not this one's (another node): the difference of two clocks is never printed as a duration.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from itertools import islice
from typing import Any, NamedTuple

from tenuto.deployments.wire.answers import Answer
from tenuto.outcome import Outcome

__all__ = ["RequestLog"]

_KEPT = 4096


class _Ended(NamedTuple):
    """Plain values only, so that neither inputs nor outputs are kept."""

    ended_at_s: float
    id: str
    model: str
    outcome: str
    gpulet: str
    batch_size: int
    batching_ms: float
    start_ms: float
    execution_ms: float
    lasted_ms: float
    reason: str


class RequestLog:
    """Keeps the last few thousand; adding costs about a microsecond."""

    def __init__(self, wall_clock: Callable[[], float] = time.time) -> None:
        self._wall_clock = wall_clock
        self._ended: deque[_Ended] = deque(maxlen=_KEPT)

    def add(self, client_id: str, model: str, answer: Answer, lasted_ms: float, *, in_time: bool) -> None:
        """Take a request that ended now, `lasted_ms` after its receipt."""
        outcome = "late" if answer.outcome is Outcome.OK and not in_time else answer.outcome.word
        self._ended.append(
            _Ended(
                self._wall_clock(),
                client_id,
                model,
                outcome,
                answer.gpulet,
                answer.batch_size,
                answer.batching_ms,
                answer.start_ms,
                answer.execution_ms,
                lasted_ms,
                answer.reason,
            )
        )

    def to_data(self, request_id: str | None = None, limit: int = 100) -> list[dict[str, Any]]:
        """Return the newest records first; with an id, those of that id (a request of several samples has several)."""
        matching = (e for e in reversed(self._ended) if request_id is None or e.id == request_id)
        return [_record(ended) for ended in islice(matching, max(0, limit))]


def _record(ended: _Ended) -> dict[str, Any]:
    started = not math.isnan(ended.start_ms)
    return {
        "id": ended.id,
        "model": ended.model,
        "outcome": ended.outcome,
        "gpulet": ended.gpulet or None,
        "batch_size": ended.batch_size,
        "received_at_s": ended.ended_at_s - ended.lasted_ms / 1000.0,
        "dispatched_ms": ended.batching_ms if ended.batch_size else None,
        "start_ms": ended.start_ms if started else None,
        "end_ms": ended.start_ms + ended.execution_ms if started else None,
        "answered_ms": ended.lasted_ms,
        "reason": ended.reason or None,
    }
