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

_Sample = tuple[tuple[str, ...], float | None]
Metric = list[str]  # the lines of one, without an end


def render_metrics(status: Mapping[str, Any]) -> str:
    """Return the metrics of a server's status; one that is not known yet is left out."""
    parts = (_requests, _planned, _gpulets, _delays, _gateway, _advice, _schedulers, _controller, _devices)
    lines = [line for part in parts for metric in part(status) for line in metric]
    return "\n".join(lines) + "\n" if lines else ""


def _counter(name: str, meaning: str, labels: tuple[str, ...], samples: Iterable[_Sample]) -> Metric:
    return _plain(f"tenuto_{name}_total", "counter", meaning, labels, samples)


def _gauge(name: str, meaning: str, labels: tuple[str, ...], samples: Iterable[_Sample]) -> Metric:
    return _plain(f"tenuto_{name}", "gauge", meaning, labels, samples)


def _plain(full: str, kind: str, meaning: str, labels: tuple[str, ...], samples: Iterable[_Sample]) -> Metric:
    lines = []
    for values, value in samples:
        if value is not None:
            given = _labels(labels, values)
            lines.append(f"{full}{{{given}}} {float(value):.12g}" if given else f"{full} {float(value):.12g}")
    return [f"# HELP {full} {meaning}", f"# TYPE {full} {kind}", *lines] if lines else []


def _histogram(
    name: str, meaning: str, labels: tuple[str, ...], samples: Iterable[tuple[tuple[str, ...], Any]]
) -> Metric:
    full = f"tenuto_{name}"
    lines = []
    for values, data in samples:
        if not data:
            continue
        given = _labels(labels, values)
        total = 0
        for bound, total in zip((*data["le"], None), accumulate(data["counts"]), strict=True):
            shown = "+Inf" if bound is None else f"{bound:.12g}"
            lines.append(f'{full}_bucket{{{given},le="{shown}"}} {total}')
        lines += (f"{full}_sum{{{given}}} {data['sum']:.12g}", f"{full}_count{{{given}}} {total}")
    return [f"# HELP {full} {meaning}", f"# TYPE {full} histogram", *lines] if lines else []


def _labels(names: tuple[str, ...], values: tuple[str, ...]) -> str:
    return ",".join([f'{name}="{_escaped(value)}"' for name, value in zip(names, values, strict=True)])


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _requests(status: Mapping[str, Any]) -> Iterator[Metric]:
    models: Mapping[str, Mapping[str, Any]] = status["models"]

    def each(key: str) -> Iterator[_Sample]:
        return (((name,), model.get(key)) for name, model in models.items())

    def each_histogram(key: str) -> Iterator[tuple[tuple[str, ...], Any]]:
        return (((name,), model.get(key)) for name, model in models.items())

    yield _counter("requests_received", "Requests asked of the scheduler.", ("model",), each("submitted"))
    yield _counter(
        "requests", "Requests that ended, by outcome.", ("model", "outcome"),
        (((name, o), model[o]) for name, model in models.items() for o in OUTCOMES),
    )  # fmt: skip
    yield _counter("requests_cancelled", "Requests whose client went away.", ("model",), each("cancelled"))
    yield _histogram(
        "request_duration_seconds", "Arrival to answer of executed requests, with buckets around the SLO.",
        ("model",), each_histogram("latency_s"),
    )  # fmt: skip
    yield _histogram(
        "request_stage_seconds", "Parts of that: before a proxy in front, for a batch, at the gpu-let, executing.",
        ("model", "stage"),
        (((name, stage), model.get(f"{stage}_s")) for name, model in models.items() for stage in STAGES),
    )  # fmt: skip
    yield _histogram("batch_size", "Requests of one batch.", ("model",), each_histogram("batch_sizes"))
    yield _counter("batches", "Batches sent to gpu-lets.", ("model",), each("batches"))
    yield _counter("batched_requests", "Requests in these batches.", ("model",), each("batched"))
    yield _gauge("queue_length", "Requests that wait for a batch.", ("model",), each("queued"))


def _planned(status: Mapping[str, Any]) -> Iterator[Metric]:
    models: Mapping[str, Mapping[str, Any]] = status["models"]

    def each(key: str, scale: float = 1.0) -> Iterator[_Sample]:
        return (((name,), _scaled(model.get(key), scale)) for name, model in models.items())

    yield _gauge("slo_seconds", "Time allowed from arrival to answer.", ("model",), each("slo_ms", 1e-3))
    yield _gauge(
        "planned_requests_per_second", "Arrival rate that the plan was made for.", ("model",), each("rate_rps")
    )
    yield _gauge(
        "planned_goodput_requests_per_second", "Requests in time per second that the plan expects.", ("model",),
        each("planned_goodput_rps"),
    )  # fmt: skip
    yield _gauge(
        "planned_duration_seconds", "Latency that the plan expects.", ("model",), each("planned_latency_ms", 1e-3)
    )


def _gpulets(status: Mapping[str, Any]) -> Iterator[Metric]:
    gpulets: list[Mapping[str, Any]] = status["gpulets"]
    labels = ("gpulet", "gpu")

    def named(gpulet: Mapping[str, Any]) -> tuple[str, str]:
        return gpulet["id"], str(gpulet.get("gpu", ""))

    def each(key: str, scale: float = 1.0) -> Iterator[_Sample]:
        return ((named(gpulet), _scaled(gpulet.get(key), scale)) for gpulet in gpulets)

    yield _gauge("gpulet_up", "1 while a gpu-let is connected.", labels, each("up"))
    yield _gauge("gpulet_share_ratio", "Share of the GPU that its process may use.", labels, each("share_pct", 1e-2))
    yield _counter("gpulet_busy_seconds", "Time spent executing.", labels, each("busy_s"))
    yield _counter("gpulet_batches", "Batches executed.", labels, each("batches"))
    yield _counter(
        "gpulet_predicted_seconds", "What the plan says that these batches take.", labels, each("predicted_s")
    )
    yield _counter("gpulet_lost", "Times that a connected gpu-let went away.", labels, each("lost"))


def _delays(status: Mapping[str, Any]) -> Iterator[Metric]:
    network: Mapping[str, Any] = status.get("network") or {}
    yield _gauge(
        "budget_seconds", "Kept of deadlines: before execution, and for the way back.", ("part",),
        (((part,), _scaled(network.get(f"{of}_ms"), 1e-3)) for part, of in (("before", "ctrl"), ("after", "response"))),
    )  # fmt: skip


def _gateway(status: Mapping[str, Any]) -> Iterator[Metric]:
    gateways: list[Mapping[str, Any]] = status.get("gateways") or []
    labels = ("gateway",)

    def each(part: str, key: str, scale: float = 1.0) -> Iterator[_Sample]:
        return (((gateway["id"],), _scaled(gateway[part].get(key), scale)) for gateway in gateways)

    yield _gauge(
        "margin_seconds", "Kept of deadlines for late timers and busy processors.", labels,
        each("margin", "margin_ms", 1e-3),
    )  # fmt: skip
    yield _gauge("late_answers_ratio", "Share of recent answers that left late.", labels, each("margin", "late_share"))
    yield _counter(
        "requests_refused_for_margin", "Requests given up for the margin alone.", labels,
        each("margin", "refused_for_margin"),
    )  # fmt: skip
    yield _gauge("connections", "Connections of clients that are open.", labels, each("front_door", "connections"))
    yield _gauge(
        "unfinished_body_bytes", "Bytes of requests that are not answered.", labels,
        each("front_door", "unfinished_bytes"),
    )  # fmt: skip
    yield _counter(
        "requests_turned_away", "Requests refused before they reached the scheduler, by reason.", ("reason", *labels),
        (
            ((reason, gateway["id"]), count)
            for gateway in gateways for reason, count in gateway["front_door"]["turned_away"].items()
        ),
    )  # fmt: skip
    yield _gauge(
        "start_time_seconds", "When the gateway started (Unix time).", labels,
        (((gateway["id"],), gateway["started_at_s"]) for gateway in gateways),
    )  # fmt: skip
    version = status.get("version")
    yield _gauge("build_info", "1, with the version.", ("version",), [((version,), 1.0)] if version else [])


def _advice(status: Mapping[str, Any]) -> Iterator[Metric]:
    advice: Mapping[str, Any] = status.get("autoscale") or {}
    yield _gauge("autoscale_gpus", "GPUs in use.", (), [((), advice.get("gpus"))])
    yield _gauge(
        "autoscale_delta_gpus", "GPUs to add (positive) or to release (negative) by the advice.", (),
        [((), advice.get("delta_gpus"))],
    )  # fmt: skip
    yield _gauge(
        "autoscale_bad_ratio", "Share of requests not ok in the last window.", (), [((), advice.get("bad_rate"))]
    )
    yield _gauge("autoscale_idle_ratio", "Idle share of the GPUs' time.", (), [((), advice.get("idle_fraction"))])


def _schedulers(status: Mapping[str, Any]) -> Iterator[Metric]:
    schedulers = enumerate(status.get("schedulers") or ())
    rehearsing = [(str(number), scheduler) for number, scheduler in schedulers if "rehearsals" in scheduler]
    labels = ("subcluster",)

    def each(key: str) -> Iterator[_Sample]:
        return (((name,), scheduler[key]) for name, scheduler in rehearsing)

    yield _counter("rehearsals", "Replays of arrivals under other settings.", labels, each("rehearsals"))
    yield _gauge("rehearsed_hold_ratio", "Part of the time they have for which batches are held.", labels, each("hold"))
    yield _gauge("rehearsed_defend_ratio", "Part of the staggered batch that is defended.", labels, each("defend"))
    yield _gauge(
        "rehearsed_gain_ratio", "Share of requests that the last change was expected to lose less.", labels,
        each("expected_gain"),
    )  # fmt: skip
    yield _gauge(
        "rehearsed_spared_ratio", "Share of GPU time that the last change was expected to spare.", labels,
        each("expected_spared"),
    )  # fmt: skip


def _controller(status: Mapping[str, Any]) -> Iterator[Metric]:
    controller: Mapping[str, Any] = status.get("controller") or {}
    yield _counter(
        "controller_decisions", "Decisions of the controller, by what was decided.", ("decision",),
        (((decision,), count) for decision, count in (controller.get("decisions") or {}).items()),
    )  # fmt: skip
    yield _gauge("controller_paused", "1 while the controller only watches.", (), [((), controller.get("paused"))])


def _devices(status: Mapping[str, Any]) -> Iterator[Metric]:
    devices: list[Mapping[str, Any]] = status.get("devices") or []

    def each(key: str) -> Iterator[_Sample]:
        return (((device["uuid"], device["name"]), device.get(key)) for device in devices)

    labels = ("uuid", "name")
    yield _gauge("gpu_memory_used_bytes", "Device memory in use.", labels, each("memory_used_bytes"))
    yield _gauge("gpu_memory_total_bytes", "Device memory.", labels, each("memory_total_bytes"))
    yield _gauge("gpu_utilization_ratio", "Share of time in which a kernel ran.", labels, each("utilization_ratio"))
    yield _gauge("gpu_power_watts", "Power draw.", labels, each("power_watts"))
    yield _gauge("gpu_sm_clock_hertz", "Clock of the multiprocessors.", labels, each("sm_clock_hertz"))
    yield _gauge("gpu_temperature_celsius", "Temperature of the GPU.", labels, each("temperature_celsius"))
    yield _counter("gpu_xid_errors", "Xid errors since the gateway started.", labels, each("xid_errors"))


def _scaled(value: float | None, scale: float) -> float | None:
    return None if value is None else float(value) * scale
