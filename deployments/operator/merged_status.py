"""Several dispatchers' reports to operators, merged into the one that a single dispatcher would give."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tenuto.placement import Plan

__all__ = ["merge_reports"]


def merge_reports(
    what: str, reports: Sequence[Any], plan: Plan | None, gpulets: Sequence[Mapping[str, Any]]
) -> dict[str, Any] | list[dict[str, Any]]:
    """Return one report: of models those of every sub-cluster, of delays the largest, of advice the sum."""
    if what == "requests":
        return sorted((entry for report in reports for entry in report), key=lambda e: -e["received_at_s"])
    if what == "queue":
        return {name: length for report in reports for name, length in report.items()}
    known = {gpulet["id"]: gpulet for report in reports for gpulet in report["gpulets"]}
    networks = [report["network"] for report in reports if report.get("network")]
    return {
        "plan": plan.to_data() if plan is not None else None,
        "policy": plan.policy.name if plan is not None else None,
        "gpulets": [{**gpulet, **known.get(gpulet["id"], {})} for gpulet in gpulets],
        "models": {name: model for report in reports for name, model in report["models"].items()},
        "network": {key: max(network[key] for network in networks) for key in networks[0]}
        if networks
        else None,
        "events": sorted((event for report in reports for event in report.get("events", ())), key=lambda e: -e["at_s"]),
        "autoscale": _sum([report["autoscale"] for report in reports if report.get("autoscale")]),
    }


def _sum(advices: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    if not advices:
        return None
    gpus = sum(advice["gpus"] for advice in advices)
    requests = sum(advice["requests"] for advice in advices)
    bad = sum(advice["bad_rate"] * advice["requests"] for advice in advices)
    return {
        "gpus": gpus,
        "requests": requests,
        "bad_rate": bad / requests if requests else 0.0,
        "idle_fraction": sum(advice["idle_fraction"] * advice["gpus"] for advice in advices) / gpus,
        "delta_gpus": sum(advice["delta_gpus"] for advice in advices),
        "window_s": max(advice["window_s"] for advice in advices),
        "unchanged_s": min(advice["unchanged_s"] for advice in advices),
    }
