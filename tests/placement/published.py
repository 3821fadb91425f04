"""The published data and answers that the placement tests compare with, and short ways to state a case."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tenuto.placement import Cluster, Plan, Policy, Workload
from tenuto.placement.planner import PlanTask, make_plan
from tenuto.placement.planner.completion import check_plan, usage_of
from tenuto.profiles import Profile, Profiles
from tenuto.profiles.shipped import load_shipped

DATA = Path(__file__).parent.parent / "data"
VISION = ("alexnet", "densenet121", "efficientnet_b7", "resnet50", "vgg19")
LANGUAGE_MIX = ("resnet50", "mobilenet_v2", "bert", "gpt2")


def facts(name: str) -> Any:
    """Return a file of published facts."""
    return json.loads((DATA / f"{name}.json").read_text())


def thesis() -> Profiles:
    """Return the V100 profile of the thesis."""
    return Profiles([load_shipped("thesis-v100")])


def equal_rates(models: Iterable[str], rate_rps: float, slo_ms: float) -> Workload:
    """Return a workload of models with the same rate and SLO."""
    return Workload.model_validate(
        {"models": [{"name": name, "rate_rps": rate_rps, "slo_ms": slo_ms} for name in models]}
    )


def v100s(count: int, *, elastic: bool = False) -> Cluster:
    """Return a node with V100s."""
    return Cluster.parse(f"v100:{count}", elastic=elastic)


def decided(policy: Policy, workload: Workload, cluster: Cluster, profiles: Profiles) -> Plan:
    """Return the policy's decision with what it believes, and what its GPUs cost. The completed plan has to be valid,
    without replicas for promises; it is not returned."""
    check_plan(make_plan(PlanTask(policy, workload, cluster, profiles, attainment=0.0)), cluster)
    plan = policy.place(workload, cluster, profiles)
    expected = plan.expected.model_copy(update=usage_of(plan, cluster.cut_as(plan.gpus)))
    return plan.model_copy(update={"models": workload.models, "expected": expected})


def planned(policy: Policy, workload: Workload, cluster: Cluster, profiles: Profiles | None = None) -> Plan:
    """Return the policy's decision; on the thesis profile unless another is given."""
    return decided(policy, workload, cluster, profiles or thesis())


def placed(plan: Plan) -> dict[str, list[int]]:
    """Return the batch sizes of every model's replicas."""
    found: dict[str, list[int]] = {}
    for gpulet in plan.gpulets:
        for replica in gpulet.models:
            found.setdefault(replica.name, []).append(replica.batch_size)
    return {name: sorted(sizes) for name, sizes in found.items()}


def together(plan: Plan) -> list[set[str]]:
    """Return the models on each GPU in use."""
    gpus = [{r.name for g in plan.on_gpu(gpu.id) for r in g.models} for gpu in plan.gpus]
    return [models for models in gpus if models]


def requirement_profile(needs: dict[str, dict[int, tuple[float, float, float]]], gpu_type: str = "v100") -> Profile:
    """Return a profile from (compute %, memory %, throughput) by model and batch size, on a GPU of 16,384 MiB."""
    models = {
        name: {
            "points": [
                {
                    "batch_size": size,
                    "latency_ms": 1000.0 * size / rps,
                    "throughput_rps": rps,
                    "memory_mib": memory / 100 * 16384,
                    "metrics": {"achieved_occupancy_pct": compute},
                }
                for size, (compute, memory, rps) in by_size.items()
            ]
        }
        for name, by_size in needs.items()
    }
    context = {"context_mib": 0.0}  # the papers count none
    head = {"name": "made-up", "gpu_type": gpu_type, "source": "test", "coefficients": context}
    return Profile.model_validate({**head, "models": models})
