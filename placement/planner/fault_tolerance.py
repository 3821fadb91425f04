"""What survives the loss of a GPU, a node or a rack: what a plan then promises, and which models keep less than their
`survive` asks for."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from tenuto.placement.components import connected_components
from tenuto.placement.expectation.outlook import IN_FULL, Outlooks
from tenuto.placement.placement_constraints import domain_of, is_at, may_lie, prefers
from tenuto.placement.plan import ExpectedLoss, Plan
from tenuto.placement.workload import ModelSpec

UNTRIED = "what losses leave follows from the formulas, and was not tried"
SLIGHT = 1e-4  # derived: a part of a rate this small is below what the expectation can tell

Trial = Callable[[Plan], Mapping[str, float] | None]
"""Tries a plan: returns the part of each model's requests that is served in time, or 1 if that is at least `IN_FULL`.
None: the plan is too large to be tried."""


def preferences_missed(plan: Plan) -> dict[str, str]:
    """Return which models lie elsewhere than where they prefer, in whole or in part, and why."""
    gpus, missed = {gpu.id: gpu for gpu in plan.gpus}, {}
    for spec in plan.models:
        held = [gpus[gpu] for gpulet in plan.hosts_of(spec.name) for gpu in gpulet.gpus]
        away = [gpu for gpu in held if spec.prefer is not None and not prefers(spec, gpu)]
        if away:
            usable = {gpu.type for gpu in plan.gpus if prefers(spec, gpu) and not is_at(gpu, plan.drained)}
            missing = sorted({gpu.type for gpu in away} - usable)
            why = "no exchange of what whole GPUs hold brings it there at no cost"
            if missing:
                why = f"no {' and no '.join(missing)} there may hold anything"
            ids = ", ".join(dict.fromkeys(gpu.id for gpu in away))
            missed[spec.name] = f"{len(away)} of {len(held)} replicas on {ids}, not on {spec.prefer}: {why}"
    return missed


def unmet(plan: Plan) -> dict[str, float]:
    """Return the models whose wishes for their places the plan does not meet, and how much each lacks: of what is to
    survive the part that the worst loss takes, and 1 where it lies where it must not. `expected` must be that of this
    plan."""
    specs, gpus = {spec.name: spec for spec in plan.models}, {gpu.id: gpu for gpu in plan.gpus}
    held = [(r.name, gpu) for g in plan.gpulets for gpu in g.gpus for r in g.models if r.name in specs]
    wrong = {name: 1.0 for name, gpu in held if not may_lie(specs[name], gpus[gpu])}
    return {name: 1.0 - part for name, (part, _) in _worst_losses(plan).items()} | wrong


def with_losses(plan: Plan, trial: Trial | None = None) -> Plan:
    """Return a plan with its promises after each loss of a domain that holds a model with `spread` or `survive`.

    When a trial of the loss serves less than the formulas give, the plan promises that. When there is no trial, the
    last assumption of the plan says so.
    """
    concerned = [spec for spec in plan.models if spec.spread is not None or spec.survive is not None]
    outlooks, losses, is_tried = Outlooks(), [], True
    for domain in failure_domains(plan, concerned):
        left = domain.without(plan)
        served = trial(left) if trial is not None else None
        is_tried = is_tried and served is not None
        parts = least_parts(served, left, shared_parts(left, outlooks.promised(left)[0]))
        rates = {s.name: round(parts.get(s.name, 0.0) * s.rate_rps, 6) for s in concerned if s.name in domain.models}
        losses.append(ExpectedLoss(domain=domain.name, goodput_rps=rates))
    others = tuple(line for line in plan.expected.assumptions if line != UNTRIED)
    update = {"losses": tuple(losses), "assumptions": others if is_tried else (*others, UNTRIED)}
    return plan.model_copy(update={"expected": plan.expected.model_copy(update=update)})


def shared_parts(plan: Plan, parts: Mapping[str, float]) -> dict[str, float]:
    """Return for each model the least part that is left to any model with which it shares gpu-lets, directly or through
    others. The scheduler decides which of these models an overload falls on, so that no more can be promised."""
    together = connected_components([replica.name for replica in gpulet.models] for gpulet in plan.gpulets)
    return {name: min(parts.get(other, 0.0) for other in names) for names in together for name in names}


def least_parts(served: Mapping[str, float] | None, left: Plan, parts: Mapping[str, float]) -> Mapping[str, float]:
    """Return for each model the part of its requests that the rest of a plan is expected to serve. When a trial served
    less, that counts."""
    if served is None:
        return parts
    least = shared_parts(left, served)
    return {name: min(part, least.get(name, 0.0)) for name, part in parts.items()}


def not_surviving(plan: Plan) -> dict[str, str]:
    """Return by model why it keeps less than its `survive` asks for: the loss that leaves it least."""
    return {name: why for name, (_, why) in _worst_losses(plan).items()}


def _worst_losses(plan: Plan) -> dict[str, tuple[float, str]]:
    """Return by model that keeps less than its `survive` asks for which part of that, and why."""
    worst: dict[str, tuple[float, str]] = {}
    for loss, spec in product(plan.expected.losses, plan.models):
        promised, left = plan.expected.models.get(spec.name), loss.goodput_rps.get(spec.name)
        if spec.survive is None or promised is None or left is None or promised.goodput_rps <= 0.0:
            continue
        part = left / (promised.goodput_rps * spec.survive)
        if part < IN_FULL - SLIGHT and part < worst.get(spec.name, (1.0, ""))[0]:
            why = f"the loss of {loss.domain} leaves it {left:.4g} of {promised.goodput_rps:.4g} rps"
            worst[spec.name] = part, f"{why}, and {100 * spec.survive:g} % of it are to survive"
    return worst


@dataclass(frozen=True)
class FailureDomain:
    """GPUs that are lost at once, and the models that care for this loss."""

    name: str
    gpus: frozenset[str]
    models: frozenset[str]

    def without(self, plan: Plan) -> Plan:
        """Return the plan that runs after the loss."""
        return plan.model_copy(update={"gpulets": tuple(g for g in plan.gpulets if self.gpus.isdisjoint(g.gpus))})


def failure_domains(plan: Plan, concerned: Sequence[ModelSpec]) -> list[FailureDomain]:
    """Return the domains whose loss takes a replica of a model that names their kind."""
    by_gpu = plan.by_gpu()
    domains = []
    for kind in ("gpu", "node", "rack"):
        names = {spec.name for spec in concerned if (spec.spread or "gpu") == kind}
        together: dict[str, set[str]] = defaultdict(set)
        for gpu in plan.gpus if names else ():
            together[domain_of(gpu, kind)].add(gpu.id)
        for domain, gpus in together.items():
            models = names & {r.name for gpu in gpus for gpulet in by_gpu[gpu] for r in gpulet.models}
            if models:
                domains.append(FailureDomain(f"{kind} {domain}", frozenset(gpus), frozenset(models)))
    return domains
