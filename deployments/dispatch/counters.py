"""What a dispatcher counts and remembers for operators: counts and histograms per model, the last requests that ended,
and events of gpu-lets and plans."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Mapping
from copy import copy
from math import prod
from statistics import median_high

import msgspec

from tenuto.deployments.dispatch.histogram import BATCH_SIZES, TOKEN_TIMES, Histogram, buckets_around
from tenuto.deployments.dispatch.in_flight import Batch, OpenGeneration, Request
from tenuto.deployments.dispatch.request_log import RequestLog
from tenuto.deployments.wire.answers import Executed, Refused
from tenuto.deployments.wire.status import Event, ModelCounts, ModelStatus, OfflineCounts, SizeCounts
from tenuto.outcome import Outcome, Rule
from tenuto.placement import Plan
from tenuto.placement.plan import ExpectedModel
from tenuto.placement.workload import ModelSpec
from tenuto.profiles.networks.catalogue import ModelSignature
from tenuto.profiles.networks.shaped_runs import common_sizes, rows_by_run
from tenuto.profiles.size_classes import Sizes, class_of

_KEPT_EVENTS = 256  # limit: events that a status contains; older ones are in the log
_MOST_CLASSES = 32  # limit: size classes of a model that are counted apart; each is several series for Prometheus
_HISTOGRAMS = "latency_s", "batching_s", "gpulet_queue_s", "execution_s", "batch_sizes", "ttft_s", "tpot_s"


class ModelCounters(ModelCounts, kw_only=True):
    """Counts of one model since the dispatcher started, with the fields of the status. `batches` and `batched` give the
    mean batch size.

    The histograms are of executed requests, in seconds: `latency_s` from arrival to answer, `batching_s` the wait for a
    batch, `gpulet_queue_s` the wait at the gpu-let. Their buckets lie around the SLO. When the SLO changes, the
    histograms start anew. When the size classes change, the counts of `by_size` start anew; the last of these are of
    requests in no class. `class_rows` has these counts by the class' index in the core.
    """

    execution_ms: deque[float] = msgspec.field(default_factory=lambda: deque(maxlen=512))
    latency_s: Histogram = msgspec.field(default_factory=Histogram)
    batching_s: Histogram = msgspec.field(default_factory=Histogram)
    gpulet_queue_s: Histogram = msgspec.field(default_factory=Histogram)
    execution_s: Histogram = msgspec.field(default_factory=Histogram)
    batch_sizes: Histogram = msgspec.field(default_factory=lambda: Histogram(BATCH_SIZES))
    ttft_s: Histogram = msgspec.field(default_factory=lambda: Histogram(TOKEN_TIMES))
    tpot_s: Histogram = msgspec.field(default_factory=lambda: Histogram(TOKEN_TIMES))
    by_size: list[SizeCounts] = msgspec.field(default_factory=lambda: [SizeCounts()])
    class_rows: dict[int, SizeCounts] = msgspec.field(default_factory=dict)
    gpu_s: float = 0.0  # counted of offline requests only

    def follow(self, spec: ModelSpec, classes: Mapping[int, Sizes]) -> None:
        """From now on this is the model's entry. `classes`: the sizes of its size classes by their index in the core,
        in order. Of very many, some are counted with the next larger ones."""
        every = -(-len(classes) // _MOST_CLASSES) or 1
        counted = [*classes.values()][::-1][::every][::-1]
        rows = [SizeCounts(sizes=dict(zip(spec.sizes, sizes, strict=True))) for sizes in counted]
        if [row.sizes for row in rows] != [row.sizes for row in self.by_size[:-1]]:
            self.by_size = [*rows, SizeCounts()]
        places = {index: class_of(counted, sizes) for index, sizes in classes.items()}
        self.class_rows = {index: self.by_size[-1 if at is None else at] for index, at in places.items()}
        self.share_pct, self.shadow = spec.share_pct, spec.shadow
        bounds = buckets_around(spec.slo_ms)
        if bounds != self.latency_s.bounds:
            self.latency_s, self.batching_s, self.gpulet_queue_s, self.execution_s = (Histogram(bounds) for _ in "1234")

    def as_offline(self, queued: int) -> OfflineCounts:
        """Return the counts of a model's offline requests, of which so many wait."""
        self.queued = queued
        return OfflineCounts(**{name: getattr(self, name) for name in OfflineCounts.__struct_fields__})

    def status(self, spec: ModelSpec, expected: ExpectedModel | None, queued: int) -> ModelStatus:
        """Return the counts, and beside them what the plan asks of the model and expects of it."""
        self.slo_ms, self.rate_rps, self.queued, self.counted_at_s = spec.slo_ms, spec.rate_rps, queued, time.time()
        self.planned_goodput_rps = expected.goodput_rps if expected else None
        self.planned_latency_ms = expected.latency_ms if expected else None
        self.mean_batch = self.batched / self.batches if self.batches else None
        self.execution_p50_ms = median_high(self.execution_ms) if self.execution_ms else None
        return ModelStatus(
            **{name: getattr(self, name) for name in ModelCounts.__struct_fields__ if name != "by_size"},
            **{name: getattr(self, name).buckets() for name in _HISTOGRAMS},
            by_size=[copy(row) for row in self.by_size if row.sizes or row.ended or row.input_elements],
        )

    def of_size(self, request: Request) -> SizeCounts:
        """Return the counts of the size class of a request."""
        return self.class_rows.get(request.model, self.by_size[-1])


class Counters:
    """Invariant: every submitted request that is no longer open is counted under exactly one outcome or as cancelled.
    A client's request of several samples is one request, which ends with its last sample, or with the first that is
    refused. What is offline has counters of its own."""

    def __init__(self) -> None:
        self.counters: defaultdict[str, ModelCounters] = defaultdict(ModelCounters)
        self.offline: defaultdict[str, ModelCounters] = defaultdict(ModelCounters)
        self.ended = RequestLog()
        self.events: deque[Event] = deque(maxlen=_KEPT_EVENTS)  # of gpu-lets and plans, the newest first

    def happened(self, what: str, why: str) -> None:
        """Note an event for operators: what happened, and in `why` to which gpu-let or plan and for what reason."""
        self.events.appendleft(Event(time.time(), what, why))

    def of(self, request: Request | OpenGeneration) -> ModelCounters:
        """Return the counters of a request or generation."""
        return (self.offline if request.offline else self.counters)[request.name]

    def status(self, plan: Plan, waiting: Mapping[str, int], offline: Mapping[str, int]) -> dict[str, ModelStatus]:
        """Return the counts of every model of a plan, of which so many requests wait, and so many offline ones."""
        expected = plan.expected.models
        status = {
            spec.name: self.counters[spec.name].status(spec, expected.get(spec.name), waiting[spec.name])
            for spec in plan.models
        }
        for name in status.keys() & self.offline.keys():
            status[name].offline = self.offline[name].as_offline(offline[name])
        return status

    def executed(self, requests: list[Request], executed: Executed, now_ms: float) -> None:
        """Count and remember samples of one model that ran, and the requests that are answered with them. After its
        deadline an answer is `late`."""
        counters = self.of(requests[0])
        ended = [request for request in requests if request.samples is None or request.samples.end_one()]
        good, count = sum([now_ms <= request.deadline_ms for request in ended]), len(ended)
        if requests[0].sizes:
            for request in ended:
                counters.of_size(request).count(Outcome.OK if now_ms <= request.deadline_ms else Outcome.LATE)
        counters.inferences += len(requests)
        counters.ok += good
        counters.late += count - good
        counters.last_ms = round(1000.0 * time.time())
        counters.execution_ms.append(executed.execution_ms)
        counters.execution_s.add(executed.execution_ms / 1000.0, count)
        counters.gpulet_queue_s.add(executed.gpulet_queue_ms / 1000.0, count)
        sent_ms = executed.sent_ms
        counters.latency_s.add_all([(now_ms - request.arrived_ms) / 1000.0 for request in ended])
        counters.batching_s.add_all([(sent_ms - request.arrived_ms) / 1000.0 for request in ended])
        self.ended.add_executed(requests, executed, now_ms)

    def refused(self, request: Request, refused: Refused, now_ms: float) -> None:
        """Count and remember a request that is refused now."""
        if request.samples is None or request.samples.end_all():
            self._refused(request, refused, now_ms)
            if request.sizes:
                counters = self.of(request)
                of_size = counters.by_size[-1] if refused.rule is Rule.SIZE else counters.of_size(request)
                of_size.count(refused.outcome)
        self.ended.add_refused(
            request.client_id, request.name, request.arrived_ms, request.deadline_ms, refused, now_ms, request.sizes
        )

    def submitted(self, request: Request) -> None:
        """Count a sample that is asked for, and the request that it belongs to once."""
        counters, samples = self.of(request), request.samples
        counters.samples += 1
        if samples is None or not samples.is_counted:
            counters.submitted += 1
        if samples is not None:
            samples.is_counted = True

    def cancelled(self, request: Request) -> None:
        """Count a request whose client went away."""
        if request.samples is None or request.samples.end_all():
            self.of(request).cancelled += 1

    def _refused(self, request: Request | OpenGeneration, refused: Refused, now_ms: float) -> None:
        counters = self.of(request)
        counters.failed_ms += max(0.0, now_ms - request.arrived_ms)
        counters.count(refused.outcome)

    def generation_submitted(self, generation: OpenGeneration) -> None:
        """Count a generation that is asked for."""
        counters = self.of(generation)
        counters.submitted += 1
        counters.samples += 1

    def token_came(self, generation: OpenGeneration, now_ms: float) -> None:
        """Count a token that comes now, whatever becomes of its generation."""
        counters = self.of(generation)
        counters.written_tokens += 1
        if not generation.made:
            counters.ttft_s.add((now_ms - generation.arrived_ms) / 1000.0)

    def generated(self, generation: OpenGeneration, now_ms: float) -> None:
        """Count and remember a generation that ended by itself."""
        counters = self.of(generation)
        is_good = generation.missed is Rule.NONE
        counters.ok += is_good
        counters.late += not is_good
        counters.inferences += 1
        counters.last_ms = round(1000.0 * time.time())
        counters.prompt_tokens += len(generation.prompt)
        counters.generated_tokens += generation.tokens
        counters.latency_s.add((now_ms - generation.arrived_ms) / 1000.0)
        if generation.tokens > 1:
            counters.tpot_s.add(generation.measured_tpot_ms / 1000.0)
        self.ended.add_generated(generation, now_ms)

    def generation_refused(self, generation: OpenGeneration, refused: Refused, now_ms: float) -> None:
        """Count and remember a generation that is refused, or fails after some tokens."""
        self._refused(generation, refused, now_ms)
        self.ended.add_refused(
            generation.client_id, generation.name, generation.arrived_ms, generation.first_by_ms, refused, now_ms
        )

    def offline_ran(self, models: Mapping[str, int], of: int, execution_ms: float) -> None:
        """Count the GPU time of offline requests: so many of each model of all `of` that ran together."""
        for name, count in models.items():
            self.offline[name].gpu_s += execution_ms / 1000.0 * count / of

    def batch_sent(self, batch: Batch, signature: ModelSignature | None) -> None:
        """Count a batch that was sent, for each model in it, unless it is all offline. `signature`: of the model, if
        requests have sizes."""
        if batch.online_part == 0.0:
            return
        for model, rows in batch.members:
            counters = self.counters[model]
            counters.batches += 1
            counters.batched += rows
            counters.batch_sizes.add(rows)
        if signature is None or not batch.requests[0].sizes:
            return
        own = [request.sizes for request in batch.requests]
        counters = self.counters[batch.name]
        for run in rows_by_run(signature, own):
            computed = prod(common_sizes(signature, [own[row] for row in run]))
            for row in run:
                of_size = counters.of_size(batch.requests[row])
                of_size.input_elements += prod(own[row])
                of_size.computed_elements += computed
