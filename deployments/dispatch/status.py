"""The status of one dispatcher as plain data: what is served against what was planned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tenuto.batching.core.system import NetworkDelay
from tenuto.deployments.dispatch.accounts import ModelCounters
from tenuto.placement import Plan


def dispatcher_status(
    plan: Plan | None,
    plan_data: Mapping[str, Any] | None,
    *,
    counters: Mapping[str, ModelCounters],
    queued: Mapping[str, int],
    gpulets: Sequence[Mapping[str, Any]],
    delay: NetworkDelay,
    advice: Mapping[str, Any] | None,
    scheduler: Mapping[str, Any],
    events: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """Return the plan, the gpu-lets as they are, counts, measured against planned figures, and what happened.

    `plan_data` is the plan as plain data, made once for each plan: a status is asked for every second.
    """
    if plan is None:
        return {"plan": None, "gpulets": [], "models": {}, "events": list(events)}
    models = {}
    for spec in plan.models:
        expected = plan.expected.models.get(spec.name)
        models[spec.name] = {
            **counters[spec.name].to_data(),
            "slo_ms": spec.slo_ms,
            "rate_rps": spec.rate_rps,
            "planned_goodput_rps": expected.goodput_rps if expected else None,
            "planned_latency_ms": expected.latency_ms if expected else None,
            "queued": queued.get(spec.name, 0),
        }
    return {
        "plan": plan_data,
        "policy": plan.policy.name,
        "gpulets": list(gpulets),
        "models": models,
        "network": {
            "ctrl_ms": delay.ctrl_ms,
            "data_ms_per_request": delay.data_ms_per_request,
            "response_ms": delay.response_ms,
        },
        "autoscale": advice,
        "scheduler": scheduler,
        "events": list(events),
    }
