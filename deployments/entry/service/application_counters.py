"""What a gateway counts of the requests for applications, and the last of them that ended. Requests to the models of
their stages are counted by dispatchers, as all others."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import islice

from tenuto.deployments.dispatch.histogram import Histogram, buckets_around
from tenuto.deployments.wire.answers import Refused
from tenuto.deployments.wire.status import ApplicationStatus, EndedRequest, RequestCounts, StageRecord
from tenuto.outcome import Outcome
from tenuto.placement.application import Application

_KEPT = 4096  # limit: requests that a dispatcher has not taken into its log, which has as many


class _Counters:
    """The counts of one application. When its SLO or stages change, its histograms start anew."""

    def __init__(self) -> None:
        self.counts = RequestCounts()
        self.latency_s = Histogram()
        self.stage_s: dict[str, Histogram] = {}
        self.lost_at: dict[str, int] = {}

    def follow(self, application: Application) -> None:
        """From now on this is its entry in the plan."""
        self.counts.slo_ms, self.counts.rate_rps = application.slo_ms, application.rate_rps
        bounds, labels = buckets_around(application.slo_ms), [stage.label for stage in application.stages]
        if (bounds, labels) != (self.latency_s.bounds, list(self.stage_s)):
            self.latency_s, self.stage_s = Histogram(bounds), {label: Histogram(bounds) for label in labels}
            self.lost_at = {label: self.lost_at.get(label, 0) for label in labels}

    def status(self) -> ApplicationStatus:
        """Return the counts so far."""
        stage_s = {label: histogram.buckets() for label, histogram in self.stage_s.items()}
        fields = {name: getattr(self.counts, name) for name in RequestCounts.__struct_fields__}
        latency_s, lost_at = self.latency_s.buckets(), dict(self.lost_at)
        return ApplicationStatus(**fields, latency_s=latency_s, stage_s=stage_s, lost_at=lost_at)


class ApplicationCounters:
    """Invariant: every request that began and is over is counted under exactly one outcome, or as cancelled."""

    def __init__(self) -> None:
        self._counters: dict[str, _Counters] = {}
        self._ended: deque[EndedRequest] = deque(maxlen=_KEPT)  # the newest last

    def follow(self, applications: Sequence[Application]) -> None:
        """Count the requests of these applications, and those under way of others until they have ended."""
        known = self._counters
        self._counters = {name: counters for name, counters in known.items() if counters.counts.under_way}
        for application in applications:
            counters = self._counters[application.name] = known.get(application.name) or _Counters()
            counters.follow(application)

    def status(self) -> dict[str, ApplicationStatus]:
        """Return the counts of every application of the plan, and of those that left it with requests under way."""
        return {name: counters.status() for name, counters in self._counters.items()}

    def begin_request(self, application: str, samples: int) -> None:
        """Count a request of so many samples."""
        if (counters := self._counters.get(application)) is not None:
            counters.counts.submitted += 1
            counters.counts.samples += samples

    def cancel_request(self, application: str) -> None:
        """Count a request whose client went away."""
        if (counters := self._counters.get(application)) is not None:
            counters.counts.cancelled += 1

    def end_request(
        self,
        application: str,
        client_id: str,
        took_ms: float,
        stages: Mapping[str, StageRecord],
        ended: Refused | int,
        lost_at: str,
        *,
        is_late: bool,
        is_counted: bool = True,
    ) -> None:
        """Count and remember a request that is answered now, or refused.

        Args:
            application: its name.
            client_id: the client's id of the request.
            took_ms: from when it came to its answer, of a stream to its first token.
            stages: those that are complete, by label.
            ended: the refusal, or how many samples were answered.
            lost_at: the label of the stage at which it was refused; empty if at none.
            is_late: whether it took longer than it was allowed.
            is_counted: False for one that only the models of its stages count.
        """
        refused = None if isinstance(ended, int) else ended
        outcome = refused.outcome if refused is not None else Outcome.LATE if is_late else Outcome.OK
        record = EndedRequest(
            id=client_id,
            model=application,
            outcome=outcome.word,
            received_at_s=time.time() - took_ms / 1000.0,
            answered_ms=took_ms,
            reason=None if refused is None else refused.reason or None,
            rule=None if refused is None else refused.rule or None,
            stages=dict(stages),
        )
        self._ended.append(record)
        if not is_counted or (counters := self._counters.get(application)) is None:
            return  # it came when the plan had it no more
        counts = counters.counts
        counts.count(outcome)
        if isinstance(ended, Refused):
            counts.failed_ms += took_ms
            if lost_at in counters.lost_at:
                counters.lost_at[lost_at] += 1
            return
        counts.inferences += ended
        counts.last_ms = round(1000.0 * time.time())
        counters.latency_s.add(took_ms / 1000.0)
        for label, stage in stages.items():
            if label in counters.stage_s:
                counters.stage_s[label].add((stage.end_ms - stage.begin_ms) / 1000.0)

    def take_ended(self) -> list[EndedRequest]:
        """Return the requests that have ended since the last call, oldest first; they are no longer remembered."""
        ended = list(self._ended)
        self._ended.clear()
        return ended

    def put_back(self, ended: Sequence[EndedRequest]) -> None:
        """Remember again what `take_ended` returned."""
        self._ended = deque([*ended, *self._ended], maxlen=_KEPT)

    def newest(self, request_id: str | None, limit: int) -> list[EndedRequest]:
        """Return the remembered requests, newest first; with an id, only those with it."""
        matching = (ended for ended in reversed(self._ended) if request_id is None or ended.id == request_id)
        return list(islice(matching, max(0, limit)))
