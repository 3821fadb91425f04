"""The status of a server as Prometheus text: names and units as that field has them (seconds, ratios, `_total`).

A pure function of the status (`GET /status`): what a scrape shows is what an operator reads there. Everything that
dashboards and alerts name comes from here, and a test holds them to it. The text is written here and only read by
Prometheus' library (in the tests): its writer takes tens of times as long, which requests would wait for.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate
from typing import Any

from tenuto.outcome import OUTCOMES

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

# Parts of a request's time on the server, in order; `proxy` only where a proxy in front says when it began.
STAGES = ("proxy", "batching", "gpulet_queue", "execution")

Metric = list[str]  # the lines of one, without an end


def render_metrics(status: Mapping[str, Any]) -> str:
    """Return the metrics of a server's status; one that is not known yet is left out."""
    parts = (_requests, _planned, _gpulets, _delays, _gateway, _advice, _schedulers, _controller, _devices)
    lines = [line for part in parts for metric in part(status) for line in metric]
    return "\n".join(lines) + "\n" if lines else ""


class _Rows:
    """Things of one kind, each with the values of its labels and its figures by key; one that is None is left out."""

    def __init__(self, labels: tuple[str, ...], rows: Iterable[tuple[tuple[str, ...], Mapping[str, Any]]]) -> None:
        self._rows = [
            (",".join([f'{name}="{_escaped(value)}"' for name, value in zip(labels, values, strict=True)]), figures)
            for values, figures in rows
        ]

    def counter(self, name: str, meaning: str, key: str) -> Metric:
        """Return what only grows."""
        return self._plain(f"tenuto_{name}_total", "counter", meaning, key, 1.0)

    def gauge(self, name: str, meaning: str, key: str, scale: float = 1.0) -> Metric:
        """Return what rises and falls, `scale` times what the status has."""
        return self._plain(f"tenuto_{name}", "gauge", meaning, key, scale)

    def _plain(self, full: str, kind: str, meaning: str, key: str, scale: float) -> Metric:
        lines = []
        for labels, figures in self._rows:
            value = figures.get(key)
            if value is not None:
                named = f"{full}{{{labels}}}" if labels else full
                lines.append(f"{named} {float(value) * scale:.12g}")
        return [f"# HELP {full} {meaning}", f"# TYPE {full} {kind}", *lines] if lines else []

    def histogram(self, name: str, meaning: str, key: str) -> Metric:
        """Return a distribution by its buckets."""
        full = f"tenuto_{name}"
        lines = []
        for labels, figures in self._rows:
            data = figures.get(key)
            if not data:
                continue
            total = 0
            for bound, total in zip((*data["le"], None), accumulate(data["counts"]), strict=True):
                shown = "+Inf" if bound is None else f"{bound:.12g}"
                lines.append(f'{full}_bucket{{{labels},le="{shown}"}} {total}')
            lines += (f"{full}_sum{{{labels}}} {data['sum']:.12g}", f"{full}_count{{{labels}}} {total}")
        return [f"# HELP {full} {meaning}", f"# TYPE {full} histogram", *lines] if lines else []


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _of_models(status: Mapping[str, Any]) -> _Rows:
    return _Rows(("model",), (((name,), model) for name, model in status["models"].items()))


def _requests(status: Mapping[str, Any]) -> Iterator[Metric]:
    models: Mapping[str, Mapping[str, Any]] = status["models"]
    each = _of_models(status)
    outcomes = (((name, outcome), {"count": model[outcome]}) for name, model in models.items() for outcome in OUTCOMES)
    stages = (((name, stage), {"s": model.get(f"{stage}_s")}) for name, model in models.items() for stage in STAGES)
    yield each.counter("requests_received", "Requests asked of the scheduler.", "submitted")
    yield _Rows(("model", "outcome"), outcomes).counter("requests", "Requests that ended, by outcome.", "count")
    yield each.counter("requests_cancelled", "Requests whose client went away.", "cancelled")
    yield each.histogram(
        "request_duration_seconds", "Arrival to answer of executed requests, with buckets around the SLO.", "latency_s"
    )
    yield _Rows(("model", "stage"), stages).histogram(
        "request_stage_seconds", "Parts of that: before a proxy in front, for a batch, at the gpu-let, executing.", "s"
    )
    yield each.histogram("batch_size", "Requests of one batch.", "batch_sizes")
    yield each.counter("batches", "Batches sent to gpu-lets.", "batches")
    yield each.counter("batched_requests", "Requests in these batches.", "batched")
    yield each.gauge("queue_length", "Requests that wait for a batch.", "queued")


def _planned(status: Mapping[str, Any]) -> Iterator[Metric]:
    each = _of_models(status)
    yield each.gauge("slo_seconds", "Time allowed from arrival to answer.", "slo_ms", 1e-3)
    yield each.gauge("planned_requests_per_second", "Arrival rate that the plan was made for.", "rate_rps")
    yield each.gauge(
        "planned_goodput_requests_per_second", "Requests in time per second that the plan expects.",
        "planned_goodput_rps",
    )  # fmt: skip
    yield each.gauge("planned_duration_seconds", "Latency that the plan expects.", "planned_latency_ms", 1e-3)


def _gpulets(status: Mapping[str, Any]) -> Iterator[Metric]:
    each = _Rows(("gpulet", "gpu"), (((g["id"], str(g.get("gpu", ""))), g) for g in status["gpulets"]))
    yield each.gauge("gpulet_up", "1 while a gpu-let is connected.", "up")
    yield each.gauge("gpulet_share_ratio", "Share of the GPU that its process may use.", "share_pct", 1e-2)
    yield each.counter("gpulet_busy_seconds", "Time spent executing.", "busy_s")
    yield each.counter("gpulet_batches", "Batches executed.", "batches")
    yield each.counter("gpulet_predicted_seconds", "What the plan says that these batches take.", "predicted_s")
    yield each.counter("gpulet_lost", "Times that a connected gpu-let went away.", "lost")


def _delays(status: Mapping[str, Any]) -> Iterator[Metric]:
    network: Mapping[str, Any] = status.get("network") or {}
    parts = (((part,), {"ms": network.get(f"{of}_ms")}) for part, of in (("before", "ctrl"), ("after", "response")))
    yield _Rows(("part",), parts).gauge(
        "budget_seconds", "Kept of deadlines: before execution, and for the way back.", "ms", 1e-3
    )


def _gateway(status: Mapping[str, Any]) -> Iterator[Metric]:
    gateways: list[Mapping[str, Any]] = status.get("gateways") or []
    each = _Rows(("gateway",), (((g["id"],), {**g, **g["margin"], **g["front_door"]}) for g in gateways))
    turned_away = (
        ((reason, gateway["id"]), {"count": count})
        for gateway in gateways for reason, count in gateway["front_door"]["turned_away"].items()
    )  # fmt: skip
    yield each.gauge("margin_seconds", "Kept of deadlines for late timers and busy processors.", "margin_ms", 1e-3)
    yield each.gauge("late_answers_ratio", "Share of recent answers that left late.", "late_share")
    yield each.counter("requests_refused_for_margin", "Requests given up for the margin alone.", "refused_for_margin")
    yield each.gauge("connections", "Connections of clients that are open.", "connections")
    yield each.gauge("unfinished_body_bytes", "Bytes of requests that are not answered.", "unfinished_bytes")
    yield _Rows(("reason", "gateway"), turned_away).counter(
        "requests_turned_away", "Requests refused before they reached the scheduler, by reason.", "count"
    )
    yield each.gauge("start_time_seconds", "When the gateway started (Unix time).", "started_at_s")
    version = status.get("version")
    known = [((version,), {"is_known": True})] if version else []
    yield _Rows(("version",), known).gauge("build_info", "1, with the version.", "is_known")


def _advice(status: Mapping[str, Any]) -> Iterator[Metric]:
    advice = _Rows((), [((), status.get("autoscale") or {})])
    yield advice.gauge("autoscale_gpus", "GPUs in use.", "gpus")
    yield advice.gauge(
        "autoscale_delta_gpus", "GPUs to add (positive) or to release (negative) by the advice.", "delta_gpus"
    )
    yield advice.gauge("autoscale_bad_ratio", "Share of requests not ok in the last window.", "bad_rate")
    yield advice.gauge("autoscale_idle_ratio", "Idle share of the GPUs' time.", "idle_fraction")


def _schedulers(status: Mapping[str, Any]) -> Iterator[Metric]:
    schedulers = enumerate(status.get("schedulers") or ())
    rehearsing = (((str(number),), scheduler) for number, scheduler in schedulers if "rehearsals" in scheduler)
    each = _Rows(("subcluster",), rehearsing)
    yield each.counter("rehearsals", "Replays of arrivals under other settings.", "rehearsals")
    yield each.gauge("rehearsed_hold_ratio", "Part of the time they have for which batches are held.", "hold")
    yield each.gauge("rehearsed_defend_ratio", "Part of the staggered batch that is defended.", "defend")
    yield each.gauge(
        "rehearsed_gain_ratio", "Share of requests that the last change was expected to lose less.", "expected_gain"
    )
    yield each.gauge(
        "rehearsed_spared_ratio", "Share of GPU time that the last change was expected to spare.", "expected_spared"
    )


def _controller(status: Mapping[str, Any]) -> Iterator[Metric]:
    controller: Mapping[str, Any] = status.get("controller") or {}
    decisions = (((decision,), {"count": count}) for decision, count in (controller.get("decisions") or {}).items())
    yield _Rows(("decision",), decisions).counter(
        "controller_decisions", "Decisions of the controller, by what was decided.", "count"
    )
    yield _Rows((), [((), controller)]).gauge("controller_paused", "1 while the controller only watches.", "paused")


def _devices(status: Mapping[str, Any]) -> Iterator[Metric]:
    each = _Rows(("uuid", "name"), (((d["uuid"], d["name"]), d) for d in status.get("devices") or ()))
    yield each.gauge("gpu_memory_used_bytes", "Device memory in use.", "memory_used_bytes")
    yield each.gauge("gpu_memory_total_bytes", "Device memory.", "memory_total_bytes")
    yield each.gauge("gpu_utilization_ratio", "Share of time in which a kernel ran.", "utilization_ratio")
    yield each.gauge("gpu_power_watts", "Power draw.", "power_watts")
    yield each.gauge("gpu_sm_clock_hertz", "Clock of the multiprocessors.", "sm_clock_hertz")
    yield each.gauge("gpu_temperature_celsius", "Temperature of the GPU.", "temperature_celsius")
    yield each.counter("gpu_xid_errors", "Xid errors since the gateway started.", "xid_errors")
