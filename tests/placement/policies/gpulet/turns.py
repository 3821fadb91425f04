"""Workloads on the V100 partition grid, and what every plan of gpu-lets with duty cycles must keep."""

from __future__ import annotations

import math

from tenuto.placement import Plan, Workload
from tenuto.profiles import Profiles
from tenuto.profiles.shipped import load_shipped

IGNITER = Profiles([load_shipped("igniter-v100")])
# The grid has four networks; the fifth model of gpulet's scenarios is a second client of ResNet-50.
FIVE = {"alexnet": "alexnet", "resnet50": "resnet50", "resnet50-b": "resnet50", "ssd": "ssd", "vgg19": "vgg19"}


def slo_ms(row: str) -> float:
    """Return twice the solo latency at a batch of 32 on the whole GPU, the paper's rule."""
    return 2 * IGNITER.get(row, "v100").latency_ms(32)


def five_models(**rates: float) -> Workload:
    """Return a workload of the five models (`resnet50_b` for `resnet50-b`); rates of 0 leave a model out."""
    named = {name.replace("_", "-"): rate for name, rate in rates.items()}
    return Workload.model_validate(
        {
            "models": [
                {"name": name, "profile": FIVE[name], "rate_rps": rate, "slo_ms": slo_ms(FIVE[name])}
                for name, rate in named.items()
                if rate
            ]
        }
    )


def carried(plan: Plan, workload: Workload) -> bool:
    """Say whether the plan accepts the workload: every rate is carried."""
    return all(
        spec.name in plan.expected.models and plan.expected.models[spec.name].goodput_rps >= spec.rate_rps * (1 - 1e-5)
        for spec in workload.models
    )


def slowed_down(plan: Plan) -> set[str]:
    """Return the gpu-lets on which the policy believes batches to take longer than alone on their share."""
    return {
        gpulet.id
        for gpulet in plan.gpulets
        for replica in gpulet.models
        if (replica.latency_ms or 0.0)
        > 1.0001 * IGNITER.get(FIVE[replica.name], "v100").latency_ms(replica.batch_size, gpulet.effective_share_pct)
    }


def assert_turns_are_kept(plan: Plan, workload: Workload) -> None:
    """Check duty cycles, SLOs, rates and shares of every gpu-let."""
    rates: dict[str, float] = {}
    for gpulet in plan.gpulets:
        duty = gpulet.duty_cycle_ms
        assert duty is not None
        assert sum(r.latency_ms or math.inf for r in gpulet.models) <= duty + 1e-4
        for replica in gpulet.models:
            assert replica.latency_ms is not None
            assert replica.rate_rps is not None
            assert duty + replica.latency_ms <= workload[replica.name].slo_ms + 1e-4
            assert replica.batch_size >= duty * replica.rate_rps / 1000 - 1e-4
            rates[replica.name] = rates.get(replica.name, 0.0) + replica.rate_rps
    for gpu in plan.gpus:
        assert sum(g.effective_share_pct for g in plan.on_gpu(gpu.id)) <= 100 + 1e-6
    for name, rate in rates.items():
        assert rate <= workload[name].rate_rps * (1 + 1e-6)
    assert set(rates) | set(plan.unserved) == {spec.name for spec in workload.models}
