"""The status of a server as Prometheus text, with Prometheus' names and units (seconds, ratios, `_total`).

It is a pure function of the status, so a scrape shows what an operator reads at `GET /status`. Dashboards and alerts
may only name metrics from here; a test checks that. We write the text ourselves, because the writer of Prometheus'
library takes tens of times as long, and requests would wait. Tests read it with that library.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate
from typing import Generic, TypeVar

from tenuto.deployments.wire.status import Buckets, GpuletStatus, ModelStatus, SystemStatus

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

# Parts of a request's time on the server, in order. `proxy` is only there if a proxy in front says when it began.
STAGES: dict[str, Callable[[ModelStatus], Buckets | None]] = {
    "proxy": lambda model: model.proxy_s,
    "batching": lambda model: model.batching_s,
    "gpulet_queue": lambda model: model.gpulet_queue_s,
    "execution": lambda model: model.execution_s,
}

T = TypeVar("T")
Metric = list[str]  # the lines of one metric, without line ends


def render_metrics(status: SystemStatus) -> str:
    """Return the metrics of a server's status; metrics that are not known yet are left out."""
    parts = (
        _requests,
        _applications,
        _planned,
        _gpulets,
        _delays,
        _gateway,
        _schedulers,
        _controller,
        _offline,
        _devices,
    )
    lines = [line for part in parts for metric in part(status) for line in metric]
    return "\n".join(lines) + "\n" if lines else ""


class _Rows(Generic[T]):
    """Objects of one kind, each with the values of its labels. A figure that is None for an object is left out
    there."""

    def __init__(self, labels: tuple[str, ...], rows: Iterable[tuple[tuple[str, ...], T]]) -> None:
        self._rows = [
            (",".join([f'{name}="{_escaped(value)}"' for name, value in zip(labels, values, strict=True)]), thing)
            for values, thing in rows
        ]

    def counter(self, name: str, meaning: str, read: Callable[[T], float | None]) -> Metric:
        """Return a figure that only grows."""
        return self._plain(f"tenuto_{name}_total", "counter", meaning, read, 1.0)

    def gauge(self, name: str, meaning: str, read: Callable[[T], float | None], scale: float = 1.0) -> Metric:
        """Return a figure that rises and falls: the value in the status times `scale`."""
        return self._plain(f"tenuto_{name}", "gauge", meaning, read, scale)

    def _plain(self, full: str, kind: str, meaning: str, read: Callable[[T], float | None], scale: float) -> Metric:
        lines = []
        for labels, thing in self._rows:
            value = read(thing)
            if value is not None:
                named = f"{full}{{{labels}}}" if labels else full
                lines.append(f"{named} {float(value) * scale:.12g}")
        return [f"# HELP {full} {meaning}", f"# TYPE {full} {kind}", *lines] if lines else []

    def histogram(self, name: str, meaning: str, read: Callable[[T], Buckets | None]) -> Metric:
        """Return a distribution with its buckets."""
        full = f"tenuto_{name}"
        lines = []
        for labels, thing in self._rows:
            buckets = read(thing)
            if buckets is None or not buckets.counts:
                continue
            total = 0
            for bound, total in zip((*buckets.le, None), accumulate(buckets.counts), strict=True):
                shown = "+Inf" if bound is None else f"{bound:.12g}"
                lines.append(f'{full}_bucket{{{labels},le="{shown}"}} {total}')
            lines += (f"{full}_sum{{{labels}}} {buckets.sum:.12g}", f"{full}_count{{{labels}}} {total}")
        return [f"# HELP {full} {meaning}", f"# TYPE {full} histogram", *lines] if lines else []


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _of_models(status: SystemStatus) -> _Rows[ModelStatus]:
    return _Rows(("model",), (((name,), model) for name, model in status.models.items()))


def _requests(status: SystemStatus) -> Iterator[Metric]:
    models = status.models
    each = _of_models(status)
    outcomes = [((name, end), count) for name, model in models.items() for end, count in model.by_outcome.items()]
    stages = (((name, stage), read(model)) for name, model in models.items() for stage, read in STAGES.items())
    yield each.counter("requests_received", "Requests asked of the scheduler.", lambda m: m.submitted)
    yield _Rows(("model", "outcome"), outcomes).counter("requests", "Requests that ended, by outcome.", float)
    yield each.counter("requests_cancelled", "Requests whose client went away.", lambda m: m.cancelled)
    yield each.counter("inferences", "Samples that ran; a request asks for one or more.", lambda m: m.inferences)
    yield each.histogram(
        "request_duration_seconds",
        "Arrival to answer of executed requests, with buckets around the SLO.",
        lambda m: m.latency_s,
    )
    yield _Rows(("model", "stage"), stages).histogram(
        "request_stage_seconds",
        "Stages of a request's time: before a proxy in front, wait for a batch, wait at the gpu-let, execution.",
        lambda found: found,
    )
    yield each.histogram("batch_size", "Samples of one batch.", lambda m: m.batch_sizes)
    yield each.counter("batches", "Batches sent to gpu-lets.", lambda m: m.batches)
    yield each.counter("batched_requests", "Samples in these batches.", lambda m: m.batched)
    classes = [((name, str(row)), row) for name, model in models.items() for row in model.by_size]
    ends = [((*labels, end), count) for labels, row in classes for end, count in row.by_outcome.items()]
    yield _Rows(("model", "size", "outcome"), ends).counter(
        "sized_requests", "Requests that ended, by the largest sizes of their size class and by outcome.", float
    )
    by_size = _Rows(("model", "size"), classes)
    yield by_size.counter(
        "input_elements", "Tokens, pixels or samples of requests that were sent in batches.", lambda s: s.input_elements
    )
    yield by_size.counter(
        "computed_elements", "The same with what these batches were padded with.", lambda s: s.computed_elements
    )
    yield each.gauge("queue_length", "Samples that wait for a batch.", lambda m: m.queued)
    offline = {name: model.offline for name, model in models.items() if model.offline is not None}
    offline_ends = [((name, end), count) for name, row in offline.items() for end, count in row.by_outcome.items()]
    yield _Rows(("model", "outcome"), offline_ends).counter(
        "offline_requests", "Offline requests that ended, by outcome; they are in no other figure.", float
    )
    queued = _Rows(("model",), (((name,), row) for name, row in offline.items()))
    yield queued.gauge("offline_queue_length", "Offline requests that wait or are generated.", lambda row: row.queued)
    yield queued.counter("offline_gpu_seconds", "Time of GPUs that offline requests had.", lambda row: row.gpu_s)
    writing = _Rows(("model",), (((name,), model) for name, model in models.items() if model.written_tokens))
    yield writing.histogram("time_to_first_token_seconds", "Arrival to first token.", lambda m: m.ttft_s)
    yield writing.histogram(
        "request_time_per_output_token_seconds", "Mean time of the tokens after the first.", lambda m: m.tpot_s
    )
    yield writing.counter("prompt_tokens", "Tokens of prompts that were answered.", lambda m: m.prompt_tokens)
    yield writing.counter("generation_tokens", "Tokens that were made.", lambda m: m.written_tokens)


def _applications(status: SystemStatus) -> Iterator[Metric]:
    by_name = status.applications.items()
    each = _Rows(("application",), (((name,), counts) for name, counts in by_name))
    outcomes = [((name, end), count) for name, counts in by_name for end, count in counts.by_outcome.items()]
    stages = (((name, label), b) for name, counts in by_name for label, b in counts.stage_s.items())
    yield each.counter("application_requests_received", "Requests asked of an application.", lambda a: a.submitted)
    yield _Rows(("application", "outcome"), outcomes).counter(
        "application_requests", "Requests of an application that ended, by outcome.", float
    )
    yield each.counter("application_requests_cancelled", "Requests whose client went away.", lambda a: a.cancelled)
    yield each.gauge("application_requests_running", "Requests that have not ended.", lambda a: a.under_way)
    yield each.histogram(
        "application_request_duration_seconds",
        "Arrival to answer of answered requests, with buckets around the SLO.",
        lambda a: a.latency_s,
    )
    yield _Rows(("application", "stage"), stages).histogram(
        "application_stage_seconds",
        "Stages of answered requests, from due to the last answer.",
        lambda buckets: buckets,
    )
    lost = [((name, label), count) for name, counts in by_name for label, count in counts.lost_at.items()]
    yield _Rows(("application", "stage"), lost).counter(
        "application_stage_lost_requests", "Requests that ended without an answer at a stage.", float
    )
    yield each.gauge("application_slo_seconds", "Time allowed from arrival to answer.", lambda a: a.slo_ms, 1e-3)


def _planned(status: SystemStatus) -> Iterator[Metric]:
    each = _of_models(status)
    yield each.gauge("slo_seconds", "Time allowed from arrival to answer.", lambda m: m.slo_ms, 1e-3)
    yield each.gauge("planned_requests_per_second", "Arrival rate that the plan was made for.", lambda m: m.rate_rps)
    yield each.gauge(
        "planned_goodput_requests_per_second",
        "Requests in time per second that the plan expects.",
        lambda m: m.planned_goodput_rps,
    )
    yield each.gauge("planned_duration_seconds", "Latency that the plan expects.", lambda m: m.planned_latency_ms, 1e-3)


def _gpus(gpulet: GpuletStatus) -> str:
    """Return the GPU of a gpu-let, or all of them: `n0/0+n0/1`."""
    return "+".join((gpulet.gpu, *gpulet.also_on))


def _gpulets(status: SystemStatus) -> Iterator[Metric]:
    each = _Rows(("gpulet", "gpu"), (((gpulet.id, _gpus(gpulet)), gpulet) for gpulet in status.gpulets))
    yield each.gauge("gpulet_up", "1 while a gpu-let is connected.", lambda g: g.up)
    yield each.gauge("gpulet_share_ratio", "Share of the GPU that its process may use.", lambda g: g.share_pct, 1e-2)
    yield each.counter("gpulet_busy_seconds", "Time spent executing.", lambda g: g.busy_s)
    yield each.counter("gpulet_batches", "Batches executed.", lambda g: g.batches)
    yield each.counter("gpulet_predicted_seconds", "Time that these batches take by the plan.", lambda g: g.predicted_s)
    yield each.counter("gpulet_lost", "How often the connection to a gpu-let ended.", lambda g: g.lost)
    able = (g for g in status.gpulets if any(signature.generates for signature in g.signatures.values()))
    writing = _Rows(("gpulet", "gpu"), (((g.id, _gpus(g)), g) for g in able))
    yield writing.gauge(
        "num_requests_running", "Generations that read or write.", lambda g: max(0, g.generating - g.waiting)
    )
    yield writing.gauge("num_requests_waiting", "Generations that wait for memory.", lambda g: g.waiting)
    yield writing.gauge(
        "kv_cache_usage_perc",
        "Share of the memory for keys and values that generations hold (1: all of it).",
        lambda g: 1.0 - (g.free_blocks or 0) / g.blocks if g.blocks else None,
    )
    yield writing.counter(
        "num_preemptions", "How often a generation lost its memory, and was read again.", lambda g: g.preempted
    )
    places = _Rows(("place",), (((place,), place) for place in status.drained))
    yield places.gauge("drained", "1 for a drained node, rack or GPU, which must hold nothing.", lambda _place: True)


def _delays(status: SystemStatus) -> Iterator[Metric]:
    network = status.network
    parts = [] if network is None else [(("before",), network.ctrl_ms), (("after",), network.response_ms)]
    yield _Rows(("part",), parts).gauge(
        "budget_seconds", "Time kept of deadlines: before execution, and for the way back.", float, 1e-3
    )


def _gateway(status: SystemStatus) -> Iterator[Metric]:
    each = _Rows(("gateway",), (((gateway.id,), gateway) for gateway in status.gateways))
    turned_away = [
        ((reason, gateway.id), count)
        for gateway in status.gateways
        for reason, count in gateway.front_door.turned_away.items()
    ]
    yield each.gauge(
        "margin_seconds",
        "Time kept of deadlines for late timers and busy processors.",
        lambda g: g.margin.margin_ms,
        1e-3,
    )
    yield each.gauge("late_answers_ratio", "Share of recent answers that left late.", lambda g: g.margin.late_share)
    yield each.counter(
        "requests_refused_for_margin", "Requests given up for the margin alone.", lambda g: g.margin.refused_for_margin
    )
    yield each.gauge("connections", "Connections of clients that are open.", lambda g: g.front_door.connections)
    yield each.gauge(
        "unfinished_body_bytes", "Bytes of requests that are not answered.", lambda g: g.front_door.unfinished_bytes
    )
    yield _Rows(("reason", "gateway"), turned_away).counter(
        "requests_turned_away", "Requests refused before they reached the scheduler, by reason.", float
    )
    yield each.counter("wrong_keys", "Requests that showed an unknown key.", lambda g: g.front_door.wrong_keys)
    yield each.gauge("start_time_seconds", "When the gateway started (Unix time).", lambda g: g.started_at_s)
    known = [((status.version,), 1)] if status.version else []
    yield _Rows(("version",), known).gauge("build_info", "1, with the version.", float)


def _schedulers(status: SystemStatus) -> Iterator[Metric]:
    numbered = enumerate(status.schedulers)
    each = _Rows(("subcluster",), (((str(number),), s) for number, s in numbered if s.rehearsals is not None))
    yield each.counter("rehearsals", "Replays of arrivals under other settings.", lambda s: s.rehearsals)
    yield each.gauge("rehearsed_hold_ratio", "Part of Symphony's holding time that batches are held.", lambda s: s.hold)
    yield each.gauge("rehearsed_defend_ratio", "Part of the staggered batch that is defended.", lambda s: s.defend)
    yield each.gauge(
        "rehearsed_gain_ratio", "Share of the requests that the last change should save.", lambda s: s.expected_gain
    )
    yield each.gauge(
        "rehearsed_spared_ratio", "Share of the GPU time that the last change should save.", lambda s: s.expected_spared
    )


def _controller(status: SystemStatus) -> Iterator[Metric]:
    controller = status.controller
    if controller is None:
        return
    yield _Rows(("decision",), (((kind,), count) for kind, count in controller.decisions.items())).counter(
        "controller_decisions", "Decisions of the controller, by what was decided.", float
    )
    yield _Rows((), [((), controller)]).gauge(
        "controller_paused", "1 while the controller only watches.", lambda c: c.paused
    )
    yield _Rows(("gpu_type",), (((kind,), count) for kind, count in controller.missing_gpus.items())).gauge(
        "controller_missing_gpus", "GPUs that Ray's autoscaler was asked for and that are not there yet.", float
    )


def _offline(status: SystemStatus) -> Iterator[Metric]:
    if (offline := status.offline) is None:
        return
    answers = (("completed", offline.completed), ("failed", offline.failed))
    yield _Rows(("outcome",), (((name,), count) for name, count in answers)).counter(
        "offline_lines", "Lines of batches that have an answer.", float
    )
    each = _Rows((), [((), offline)])
    yield each.gauge("offline_lines_waiting", "Lines of batches without an answer.", lambda o: o.waiting)
    yield each.gauge("offline_batches_open", "Batches that are not over.", lambda o: o.open_batches)
    yield each.gauge("offline_bytes", "Files of clients, with those of batches that are over.", lambda o: o.bytes)
    yield each.gauge("offline_paused", "1 while nothing of batches is asked.", lambda o: bool(o.problem))


def _devices(status: SystemStatus) -> Iterator[Metric]:
    each = _Rows(("uuid", "name"), (((device.uuid, device.name), device) for device in status.devices))
    yield each.gauge("gpu_memory_used_bytes", "Device memory in use.", lambda d: d.memory_used_bytes)
    yield each.gauge("gpu_memory_total_bytes", "Device memory.", lambda d: d.memory_total_bytes)
    yield each.gauge("gpu_utilization_ratio", "Share of time in which a kernel ran.", lambda d: d.utilization_ratio)
    yield each.gauge("gpu_power_watts", "Power draw.", lambda d: d.power_watts)
    yield each.gauge("gpu_sm_clock_hertz", "Clock of the multiprocessors.", lambda d: d.sm_clock_hertz)
    yield each.gauge("gpu_temperature_celsius", "Temperature of the GPU.", lambda d: d.temperature_celsius)
    yield each.counter("gpu_xid_errors", "Xid errors since the gateway started.", lambda d: d.xid_errors)
