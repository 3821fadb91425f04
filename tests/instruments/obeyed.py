"""What a plan owes models that say where they lie and what they keep after a loss."""

from __future__ import annotations

from tenuto.placement import Plan
from tenuto.placement.placement_constraints import domain_of, may_lie

__all__ = ["assert_obeys"]


def assert_obeys(plan: Plan) -> None:
    """Replicas lie where they may, every model is served or unserved, and a model without a reason keeps its part after
    the loss of any domain, as the plan says."""
    gpus = {gpu.id: gpu for gpu in plan.gpus}
    for gpulet in plan.gpulets:
        assert all(may_lie(plan.model(replica.name), gpus[gpu]) for replica in gpulet.models for gpu in gpulet.gpus)
    left_rps = {loss.domain: loss.goodput_rps for loss in plan.expected.losses}
    for spec in plan.models:
        if spec.survive is None or spec.name not in plan.expected.models:
            continue
        kind = spec.spread or "gpu"
        hosts = {domain_of(gpus[gpulet.gpu], kind) for gpulet in plan.hosts_of(spec.name)}
        left = [left_rps[f"{kind} {domain}"][spec.name] for domain in hosts]
        if spec.name not in plan.unserved_reasons:
            assert len(hosts) > 1
            assert min(left) >= 0.989 * spec.survive * plan.expected.models[spec.name].goodput_rps
    writing = [replica for gpulet in plan.gpulets for replica in gpulet.models if replica.steps is not None]
    assert all(replica.planned_rps > 0.0 for replica in writing)  # the emptiest for its planned rate is asked
    held = {replica.name for gpulet in plan.gpulets for replica in gpulet.models}
    assert held | {*plan.unserved} == {spec.name for spec in plan.models}
