"""Candidates for the place of a running plan: each of them has everything that follows from its gpu-lets."""

from __future__ import annotations

import random

import pytest

from tenuto.placement import Cluster, Plan, Workload, solve
from tenuto.placement.expectation.outlook import Traffic
from tenuto.placement.planner import PlanTask
from tenuto.placement.planner.candidates import Candidates
from tenuto.placement.policies.gpulet.gpulet import GpuletPolicy
from tenuto.profiles import Profiles
from tenuto.profiles.shipped import load_shipped
from tenuto_lab.baselines.igniter.igniter import Igniter
from tests.instruments.plans import running

PROFILES = Profiles([load_shipped("igniter-v100")])  # of models that slow their neighbours down
SCENES = 8


def candidates_of(seed: int) -> Candidates:
    """Return the candidates of a random plan whose traffic changes at random."""
    rng = random.Random(seed)
    names = rng.sample(["alexnet", "resnet50", "vgg19", "ssd"], 3)
    models = [{"name": name, "rate_rps": rng.choice([60.0, 150.0, 400.0]), "slo_ms": 200} for name in names]
    if seed % 3 == 0:
        models[0] |= {"spread": "gpu", "survive": 0.5}
    workload, cluster = Workload.model_validate({"models": models}), Cluster.parse(f"v100:{rng.randint(2, 4)}")
    policy = GpuletPolicy() if seed % 2 else Igniter()
    plan = solve(policy, workload, cluster, PROFILES)
    grows = [0.1] if seed % 3 == 1 else [0.6, 1.1, 1.4, 2.5]
    rates = {spec.name: spec.rate_rps * rng.choice(grows) for spec in workload.models}
    runs = running(plan, Traffic(rates), slowdowns={names[0]: 1.3} if seed % 4 == 0 else {})
    return Candidates(PlanTask(policy, workload, cluster, PROFILES, running=runs))


def figures(plan: Plan) -> dict[str, float]:
    """Return what completion gives gpu-lets, by gpu-let and model; 0 for what is not known."""
    caps_mib = {gpulet.id: gpulet.memory_mib or 0.0 for gpulet in plan.gpulets}
    held = [(f"{gpulet.id} {replica.name}", replica) for gpulet in plan.gpulets for replica in gpulet.models]
    slow = {f"{name} slowdown": replica.slowdown for name, replica in held}
    return caps_mib | slow | {f"{name} ms": replica.latency_ms or 0.0 for name, replica in held}


def test_nothing_changes_when_a_candidate_is_completed_once_more() -> None:
    """A plan with the slowdowns of other neighbours promises what it does not keep."""
    ways = set()
    for seed in range(SCENES):
        candidates = candidates_of(seed)
        for how, plan in candidates.all():
            again = candidates.completed(plan)
            assert figures(again) == pytest.approx(figures(plan), abs=1e-5), (seed, how)
            assert again.unserved == plan.unserved, (seed, how)
            if how == "kept":
                assert plan.processes() == candidates.running.plan.processes(), seed
            ways.add(how)
        assert not candidates.faults
    assert ways == {"planned anew", "kept", "extended", "trimmed", "arranged"}
