"""The last requests that ended, with their clients' ids and their times.

All times of a record are ms after `received_at_s`, on one clock. `start_ms` and `end_ms` are None when the gpu-let is
on another node, with another clock: the difference of two clocks is never printed as a duration.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Sequence
from functools import partial
from itertools import islice
from operator import attrgetter

from tenuto.deployments.dispatch.in_flight import OpenGeneration, Request
from tenuto.deployments.wire.answers import Executed, Refused, late_loop
from tenuto.deployments.wire.status import EndedRequest, Tokens
from tenuto.outcome import Rule

_KEPT = 4096  # limit: requests that the log shows
# The end (wall clock, s), id, model, arrival, end and deadline (ms), and the times or the refusal. The request itself,
# its inputs and its outputs are not kept; its sizes are. Of an application's request there is a record.
_Ended = tuple[
    float, str, str, float, float, float, tuple[int, ...], "_Times | Refused | tuple[str, Tokens, Rule] | EndedRequest"
]
_Times = tuple[str, int, float, float, float, float]
_times_of = attrgetter("gpulet", "batch_size", "sent_ms", "started_ms", "execution_ms", "planned_ms")


class RequestLog:
    """Keeps the last few thousand requests; to add one costs about a microsecond."""

    def __init__(self) -> None:
        self._ended: deque[_Ended] = deque(maxlen=_KEPT)

    def add_executed(self, requests: list[Request], executed: Executed, ended_ms: float) -> None:
        """Keep the requests of a batch that are answered now."""
        times, now_s = _times_of(executed), time.time()
        self._ended.extend(
            [(now_s, r.client_id, r.name, r.arrived_ms, ended_ms, r.deadline_ms, r.sizes, times) for r in requests]
        )

    def add_refused(
        self,
        client_id: str,
        model: str,
        arrived_ms: float,
        deadline_ms: float,
        refused: Refused,
        ended_ms: float,
        sizes: tuple[int, ...] = (),
    ) -> None:
        """Keep a request that is refused now."""
        self._ended.append((time.time(), client_id, model, arrived_ms, ended_ms, deadline_ms, sizes, refused))

    def add_generated(self, generation: OpenGeneration, ended_ms: float) -> None:
        """Keep a generation that ended by itself."""
        g = generation
        tokens = Tokens(len(g.prompt), g.tokens, g.first_ms - g.arrived_ms, g.measured_tpot_ms)
        ended = g.arrived_ms, ended_ms, g.first_by_ms, (), (g.gpulet, tokens, g.missed)
        self._ended.append((time.time(), g.client_id, g.name, *ended))

    def add_records(self, ended: Sequence[EndedRequest]) -> None:
        """Keep requests of applications that ended at a gateway."""
        self._ended.extend([(0.0, each.id, each.model, 0.0, 0.0, 0.0, (), each) for each in ended])

    def newest(self, request_id: str | None = None, limit: int = 100) -> list[EndedRequest]:
        """Return records, the newest first; with an id, only those with this id. (A request with several samples has
        several records.)"""
        matching = (ended for ended in reversed(self._ended) if request_id is None or ended[1] == request_id)
        return [_record(ended) for ended in islice(matching, max(0, limit))]


def _record(ended: _Ended) -> EndedRequest:
    ended_at_s, request_id, model, arrived_ms, ended_ms, deadline_ms, sizes, what = ended
    lasted_ms = ended_ms - arrived_ms
    received_at_s = ended_at_s - lasted_ms / 1000.0
    when = partial(EndedRequest, received_at_s=received_at_s, answered_ms=lasted_ms)
    record = partial(when, id=request_id, model=model, sizes=sizes or None)
    if isinstance(what, EndedRequest):
        return what
    if isinstance(what, Refused):
        return record(
            outcome=what.outcome.word,
            gpulet=what.gpulet or None,
            reason=what.reason or None,
            rule=what.rule or None,
            loop=what.loop or None,
        )
    if isinstance(what[1], Tokens):
        gpulet, tokens, missed = what
        outcome = "late" if missed else "ok"
        return record(outcome=outcome, gpulet=gpulet, rule=missed or None, tokens=tokens)
    gpulet, batch_size, sent_ms, started_ms, execution_ms, planned_ms = what
    late_ms = ended_ms - deadline_ms
    start_ms = None if math.isnan(started_ms) else started_ms - arrived_ms
    return record(
        outcome="ok" if late_ms <= 0.0 else "late",
        loop=None if late_ms <= 0.0 else late_loop(execution_ms, planned_ms, late_ms),
        gpulet=gpulet,
        batch_size=batch_size,
        dispatched_ms=sent_ms - arrived_ms,
        start_ms=start_ms,
        end_ms=None if start_ms is None else start_ms + execution_ms,
    )
