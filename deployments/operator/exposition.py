"""The status of a server as Prometheus text: the figures of `tenuto status`, by the names an operator's alerts use."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from tenuto.outcome import OUTCOMES

__all__ = ["CONTENT_TYPE", "render_metrics"]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

Sample = tuple[Mapping[str, str], float | None]


def render_metrics(status: Mapping[str, Any]) -> str:
    """Return the metrics of a dispatcher's `status`; one that is not known yet is left out."""
    models: Mapping[str, Mapping[str, Any]] = status["models"]
    lines: list[str] = []

    def add(name: str, kind: str, meaning: str, samples: Iterable[Sample]) -> None:
        known = [(labels, value) for labels, value in samples if value is not None]
        if known:
            lines.append(f"# HELP tenuto_{name} {meaning}")
            lines.append(f"# TYPE tenuto_{name} {kind}")
            lines.extend(f"tenuto_{name}{_labels(labels)} {value:.12g}" for labels, value in known)

    def by_model(key: str) -> Iterable[Sample]:
        return (({"model": name}, model[key]) for name, model in models.items())

    add(
        "requests_total",
        "counter",
        "Requests that ended, by outcome.",
        (({"model": name, "outcome": o}, model[o]) for name, model in models.items() for o in OUTCOMES),
    )
    add("requests_cancelled_total", "counter", "Requests whose client went away.", by_model("cancelled"))
    add("queue_length", "gauge", "Requests that wait for a batch.", by_model("queued"))
    add("batches_total", "counter", "Batches sent to gpu-lets.", by_model("batches"))
    add("batched_requests_total", "counter", "Requests in these batches.", by_model("batched"))
    add("execution_p50_ms", "gauge", "Median execution time of the last 512 batches.", by_model("execution_p50_ms"))
    add(
        "gpulet_up",
        "gauge",
        "1 while a gpu-let is connected.",
        (({"gpulet": gpulet["id"]}, float(gpulet["up"])) for gpulet in status["gpulets"]),
    )
    network = status.get("network") or {}
    add("network_ctrl_ms", "gauge", "Budgeted delay from dispatch to execution.", [({}, network.get("ctrl_ms"))])
    add("network_response_ms", "gauge", "Budgeted delay from execution's end on.", [({}, network.get("response_ms"))])
    advice = status.get("autoscale") or {}
    add("autoscale_gpus", "gauge", "GPUs in use.", [({}, advice.get("gpus"))])
    add(
        "autoscale_delta_gpus",
        "gauge",
        "GPUs to add (positive) or to release (negative) by the advice.",
        [({}, advice.get("delta_gpus"))],
    )
    add("autoscale_bad_rate", "gauge", "Share of requests not ok in the last window.", [({}, advice.get("bad_rate"))])
    add("autoscale_idle_fraction", "gauge", "Idle share of the GPUs' time.", [({}, advice.get("idle_fraction"))])
    return "\n".join(lines) + "\n"


def _labels(labels: Mapping[str, str]) -> str:
    if not labels:
        return ""
    escaped = (
        (key, value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")) for key, value in labels.items()
    )
    return "{" + ",".join(f'{key}="{value}"' for key, value in escaped) + "}"
