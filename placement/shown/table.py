"""A plan as rows for people: one per program, one per unserved model, and totals. No printing happens here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tenuto.placement.copy_times import hidden_copies_ms
from tenuto.placement.plan import Plan


@dataclass(frozen=True)
class PlanRow:
    """One program, with several members as `a+b`: where it is, what it runs and what is expected of it; None where
    unknown.

    `share_pct` None: the gpu-let is unrestricted. `latency_ms` is that of one full batch beside its neighbours;
    streaming hides `hidden_ms` of it. A group has its strictest SLO and the sum of its rates.
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
    hidden_ms: float | None = None


@dataclass(frozen=True)
class PlanTotals:
    """What a whole plan costs and yields; `believed_rps` is the policy's own figure, None when it gave none."""

    goodput_rps: float
    believed_rps: float | None
    offered_rps: float
    gpus_used: int
    gpus: int
    cost_per_hour: float | None
    served: int
    models: int


def rows_of(plan: Plan) -> list[PlanRow]:
    """Return a row per program, in the order of GPUs, gpu-lets and models of the plan. A gpu-let on
    several GPUs has a row on each, and its rate on the first."""
    slos = {spec.name: spec.slo_ms for spec in plan.models if not spec.offline}
    rows = []
    by_gpu = plan.by_gpu()
    for gpu in plan.gpus:
        for gpulet in by_gpu[gpu.id]:
            for program in gpulet.programs:
                slo_ms = min((slos[r.name] for r in program.members if r.name in slos), default=None)
                rows.append(
                    PlanRow(
                        gpu.id,
                        gpu.type,
                        gpulet.id,
                        gpulet.share_pct,
                        program.name,
                        program.batch_size,
                        program.latency_ms,
                        slo_ms,
                        program.rate_rps if gpu.id == gpulet.gpu else None,
                        program.memory_mib,
                        hidden_copies_ms(plan, program) * program.batch_size or None,
                    )
                )
    return rows


def totals_of(plan: Plan) -> PlanTotals:
    """Return the totals of a plan."""
    return PlanTotals(
        goodput_rps=plan.expected.goodput_rps,
        believed_rps=None if plan.believed is None else plan.believed.goodput_rps,
        offered_rps=sum(spec.rate_rps for spec in plan.models),
        gpus_used=plan.expected.gpus_used,
        gpus=len({gpu.device for gpu in plan.gpus}),
        cost_per_hour=plan.expected.cost_per_hour,
        served=len(plan.models) - len(plan.unserved),
        models=len(plan.models),
    )


def why_unserved(plan: Plan) -> list[tuple[str, str]]:
    """Return (model, reason) of every model that the plan does not serve, in plan order."""
    return [(name, plan.unserved_reasons.get(name, "the policy gave no reason")) for name in plan.unserved]


def why_below(plan: Plan) -> list[tuple[str, str]]:
    """Return (model, figure and reason) of every served model that should stay below its attainment."""
    reasons = plan.unserved_reasons
    return [
        (spec.name, reasons[spec.name])
        for spec in plan.models
        if spec.name in reasons and spec.name not in plan.unserved
    ]


def losses_told(plan: Plan) -> list[str]:
    """Return a line for the loss of each GPU, node or rack: what it takes from models with `spread` or `survive`. One
    line stands for all losses that take nothing."""
    lines, harmless = [], 0
    for loss in plan.expected.losses:
        promised = {name: model.goodput_rps for name, model in plan.expected.models.items()}
        less = [(n, left, promised.get(n, 0.0)) for n, left in loss.goodput_rps.items() if left < promised.get(n, 0.0)]
        if less:
            shown = ", ".join(f"{name} keeps {left:,.4g} of {whole:,.4g} rps" for name, left, whole in less)
            lines.append(f"loss of {loss.domain}: {shown}")
        else:
            harmless += 1
    if harmless:
        lines.append(f"{harmless} of {len(plan.expected.losses)} losses leave every such model its planned rate")
    return lines


def compare_rows(plans: Mapping[str, Plan]) -> list[tuple[str, dict[str, str]]]:
    """Return plans side by side: for each model a text by policy, `replicas×batch on share: expected rps`.

    Replicas with the same batch and share are counted together. A member of `a+b` (`in a+b`) has the joint batch. An
    unserved model reads `-`.
    """
    names = list(dict.fromkeys(spec.name for plan in plans.values() for spec in plan.models))
    return [(name, {policy: _summary(plan, name) for policy, plan in plans.items()}) for name in names]


def _summary(plan: Plan, model: str) -> str:
    kinds: dict[tuple[int, float | None, str], int] = {}
    for gpulet in plan.hosts_of(model):
        program = next(program for program in gpulet.programs if model in program.models)
        key = (program.batch_size, gpulet.share_pct, program.name if program.is_joint else "")
        kinds[key] = kinds.get(key, 0) + 1
    if not kinds:
        return "-"
    shown = ", ".join(
        f"{count}×b{batch}" + (f"@{share:g}%" if share is not None else "") + (f" in {joint}" if joint else "")
        for (batch, share, joint), count in sorted(kinds.items(), key=str)
    )
    expected = plan.expected.models.get(model)
    return f"{shown}: {expected.goodput_rps:,.6g} rps" if expected else shown
