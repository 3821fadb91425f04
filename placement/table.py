"""A plan as rows for people: one per replica, one per unserved model, and totals. No printing happens here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tenuto.placement.plan import Plan

__all__ = ["PlanRow", "PlanTotals", "compare_rows", "rows_of", "totals_of", "why_unserved"]


@dataclass(frozen=True)
class PlanRow:
    """One replica: where it is, what it runs and what is expected of it; None where unknown.

    `share_pct` None: the gpu-let is unrestricted. `latency_ms` is that of one full batch, neighbours included.
    """

    gpu: str
    gpu_type: str
    gpulet: str
    share_pct: float | None
    model: str
    batch_size: int
    latency_ms: float | None
    slo_ms: float | None
    rate_rps: float | None
    memory_mib: float | None


@dataclass(frozen=True)
class PlanTotals:
    """What a plan costs and yields as a whole."""

    goodput_rps: float
    offered_rps: float
    gpus_used: int
    gpus: int
    cost_per_hour: float | None
    served: int
    models: int


def rows_of(plan: Plan) -> list[PlanRow]:
    """Return a row per replica, in the order of GPUs, gpu-lets and models of the plan."""
    slos = {spec.name: spec.slo_ms for spec in plan.models}
    rows = []
    by_gpu = plan.by_gpu()
    for gpu in plan.gpus:
        for gpulet in by_gpu[gpu.id]:
            for replica in gpulet.models:
                rows.append(
                    PlanRow(gpu.id, gpu.type, gpulet.id, gpulet.share_pct, replica.name, replica.batch_size,
                            replica.latency_ms, slos.get(replica.name), replica.rate_rps, replica.memory_mib)
                )
    return rows


def totals_of(plan: Plan) -> PlanTotals:
    """Return the totals of a plan."""
    return PlanTotals(
        goodput_rps=plan.expected.goodput_rps,
        offered_rps=sum(spec.rate_rps for spec in plan.models),
        gpus_used=plan.expected.gpus_used,
        gpus=len(plan.gpus),
        cost_per_hour=plan.expected.cost_per_hour,
        served=len(plan.models) - len(plan.unserved),
        models=len(plan.models),
    )


def why_unserved(plan: Plan) -> list[tuple[str, str]]:
    """Return (model, reason) of every model that the plan does not serve, in plan order."""
    return [(name, plan.unserved_reasons.get(name, "the policy gave no reason")) for name in plan.unserved]


def compare_rows(plans: Mapping[str, Plan]) -> list[tuple[str, dict[str, str]]]:
    """Return plans side by side: per model a text by policy, `replicas×batch on share: expected rps`.

    Replicas with the same batch and share are counted together; an unserved model reads `-`.
    """
    names = list(dict.fromkeys(spec.name for plan in plans.values() for spec in plan.models))
    return [(name, {policy: _summary(plan, name) for policy, plan in plans.items()}) for name in names]


def _summary(plan: Plan, model: str) -> str:
    kinds: dict[tuple[int, float | None], int] = {}
    for gpulet in plan.gpulets:
        for replica in gpulet.models:
            if replica.name == model:
                key = (replica.batch_size, gpulet.share_pct)
                kinds[key] = kinds.get(key, 0) + 1
    if not kinds:
        return "-"
    shown = ", ".join(
        f"{count}×b{batch}" + (f"@{share:g}%" if share is not None else "")
        for (batch, share), count in sorted(kinds.items(), key=str)
    )
    expected = plan.expected.models.get(model)
    return f"{shown}: {expected.goodput_rps:,.6g} rps" if expected else shown
