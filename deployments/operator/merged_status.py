"""What several dispatchers and gateways report to operators, merged into what one of each would say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tenuto.placement import Plan


def merge_reports(
    what: str, reports: Sequence[Any], plan: Plan | None, gpulets: Sequence[Mapping[str, Any]]
) -> dict[str, Any] | list[dict[str, Any]]:
    """Return one report: of models those of every sub-cluster, of schedulers all that say anything, of delays the
    largest, of advice the sum."""
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
        "network": {key: max(network[key] for network in networks) for key in networks[0]} if networks else None,
        "events": sorted((event for report in reports for event in report.get("events", ())), key=lambda e: -e["at_s"]),
        "schedulers": [scheduler for report in reports for scheduler in report.get("schedulers", ())],
        "autoscale": _sum([report["autoscale"] for report in reports if report.get("autoscale")]),
    }


def merge_gateways(gateways: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the figures of all gateways as one, with each of them under `gateways`: of counts the sum, of margins the
    largest, of GPUs those of every node."""
    doors = [gateway["front_door"] for gateway in gateways]
    margins = [gateway["margin"] for gateway in gateways]
    reasons = {reason: None for door in doors for reason in door["turned_away"]}
    proxied: dict[str, dict[str, Any]] = {}
    for gateway in gateways:
        for model, histogram in gateway["proxied"].items():
            proxied[model] = _added(proxied.get(model), histogram)
    own = ("id", "started_at_s", "margin", "front_door", "dispatchers")
    return {
        "gateways": [{key: gateway[key] for key in own} for gateway in sorted(gateways, key=lambda each: each["id"])],
        "margin": {
            "margin_ms": max(margin["margin_ms"] for margin in margins),
            "late_share": max(margin["late_share"] for margin in margins),
            "refused_for_margin": sum(margin["refused_for_margin"] for margin in margins),
        },
        "front_door": {
            "connections": sum(door["connections"] for door in doors),
            "unfinished_bytes": sum(door["unfinished_bytes"] for door in doors),
            "turned_away": {reason: sum(door["turned_away"].get(reason, 0) for door in doors) for reason in reasons},
        },
        "proxied": proxied,
        "started_at_s": min(gateway["started_at_s"] for gateway in gateways),
        "devices": list({device["uuid"]: device for gateway in gateways for device in gateway["devices"]}.values()),
    }


def _added(one: dict[str, Any] | None, other: dict[str, Any]) -> dict[str, Any]:
    """Return the sum of two histograms; of the first where the second has other buckets, as after a changed SLO."""
    if one is None:
        return other
    if one["le"] != other["le"]:
        return one
    counts = [a + b for a, b in zip(one["counts"], other["counts"], strict=True)]
    return {"le": one["le"], "counts": counts, "sum": one["sum"] + other["sum"]}


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
