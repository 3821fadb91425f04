"""What is proposed on clusters that can grow: whatever came, ends, rose or runs slower, GPUs are asked for until every
model is carried, or a limit or the model itself stands against it."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest

from tenuto.placement import Cluster, ModelSpec, Plan, Workload, load_policy, solve
from tenuto.placement.cluster import Gpu, SpotTerms
from tenuto.placement.expectation.outlook import Outlooks, Traffic
from tenuto.placement.plan_edits import for_workload
from tenuto.placement.planner import ChangeTerms, Durations, PlanRequest, Proposal, RunningPlan, propose
from tenuto.placement.planner.candidates import Candidates, gpus_used
from tenuto.profiles import Profile, Profiles
from tenuto.profiles.shipped import load_shipped
from tests.instruments.plans import gpu

FAST = load_shipped("symphony-1080ti")
SLOWER = {"t4": 1.5, "v100": 1.0}
PROFILES = Profiles(
    [
        load_shipped("symphony-a100"),
        *(
            Profile(name=kind, gpu_type=kind, source="-", models={n: m.scaled(by) for n, m in FAST.models.items()})
            for kind, by in SLOWER.items()
        ),
    ]
)
PRICES = {"a100": 3.67, "t4": 0.35, "v100": 1.2}
ROUNDS = 8  # of GPUs that come


def drawn_model(rng: random.Random, name: str, *, is_profiled: bool) -> ModelSpec:
    rate_rps = rng.choice([5, 20, 50, 100, 200, 400, 700]) * rng.uniform(0.5, 1.5)
    if is_profiled:
        row = rng.choice([name for name, model in FAST.models.items() if model.line is not None])
        slo_ms = FAST.models[row].coefficients["slo_ms"] * rng.uniform(1.2, 6.0)
        return ModelSpec(name=name, profile=row, rate_rps=min(100.0, rate_rps), slo_ms=slo_ms)
    latency = {"alpha_ms": rng.choice([0.2, 0.5, 1.0, 2.0, 4.0]), "beta_ms": rng.choice([1.0, 2.0, 4.0, 10.0, 20.0])}
    if rng.random() < 0.1:
        return ModelSpec.model_validate({"name": name, "offline": True, "latency": latency})
    slo_ms = sum(latency.values()) * rng.choice([2.5, 4.0, 8.0, 20.0, 100.0])
    return ModelSpec.model_validate({"name": name, "rate_rps": rate_rps, "slo_ms": slo_ms, "latency": latency})


def drawn_request(seed: int) -> PlanRequest:
    """Return a question about a policy's plan for one to four models on one to four GPUs. Models came and left, rates
    moved and are expected to move on, batches are slower, and there are limits, prices, whole nodes and spot nodes."""
    rng = random.Random(f"growing {seed}")
    policy = load_policy(rng.choice(["gpulet", "gpulet", "symphony"]))
    is_profiled = rng.random() < 0.4
    before = [drawn_model(rng, name, is_profiled=is_profiled) for name in "abcd"[: rng.randint(1, 4)]]
    kinds = rng.sample(list(PRICES), rng.choice([1, 1, 2]))
    cluster = Cluster.parse(",".join(f"{kind}:{rng.randint(1, 2)}" for kind in kinds))
    plan = solve(policy, Workload(models=tuple(before)), cluster, PROFILES)
    came = [drawn_model(rng, name, is_profiled=is_profiled) for name in "uvw"[: rng.choice([0, 0, 1, 1, 2])]]
    after = [*before, *came]
    if len(after) > 1 and rng.random() < 0.15:
        after.remove(rng.choice(before))
    rates_rps = {spec.name: spec.rate_rps * rng.choice([1.0, 1.0, 1.0, 0.02, 0.3, 1.3, 2.0, 4.0]) for spec in after}
    spread = {name: rng.choice([1.0, 1.0, 2.0, 5.0]) for name in rates_rps}
    traffic = Traffic(rates_rps, spread, rng.choice([0.0, 2.33]))
    expected_rps = {name: rate * rng.choice([1.0, 1.0, 1.0, 0.0, 0.01, 0.5, 1.5]) for name, rate in rates_rps.items()}
    growth = tuple(kind for kind in PRICES if rng.random() < 0.6) or ("t4",)
    present = Counter(gpu.type for gpu in cluster.gpus)
    most = {kind: max(present[kind], rng.choice([1, 2, 4, 24]) if kind in growth else 0) for kind in PRICES}
    durations = Durations(rng.choice([1.0, 10.0, 30.0]), rng.choice([0.5, 5.0]))
    terms = ChangeTerms(
        expected_rps, durations, rng.choice([60.0, 300.0, 900.0]), 0.2, 20.0, rng.choice([60.0, 120.0, 3600.0])
    )
    running = RunningPlan(
        for_workload(plan, Workload(models=tuple(before))),
        traffic,
        terms,
        growth=growth,
        by_node=frozenset(kind for kind in growth if rng.random() < 0.15),
        limits=most,
        prices={kind: price * rng.choice([0.1, 1.0, 1.0, 10.0]) for kind, price in PRICES.items()},
        spot={kind: SpotTerms(life_hours=4.0, notice_s=120.0) for kind in growth if rng.random() < 0.3},
        slowdowns={name: rng.choice([0.9, 1.005, 1.03, 1.2, 1.6]) for name in rates_rps if rng.random() < 0.5},
    )
    weighted = tuple(spec.model_copy(update={"weight": rng.choice([1.0, 1.0, 1.0, 3.0, 10.0])}) for spec in after)
    return PlanRequest(Workload(models=weighted), cluster.gpus, plan.policy, running)


def lacking(request: PlanRequest, plan: Plan) -> set[str]:
    """Return the models of which a plan promises less than it has to, by more than noise."""
    running = request.running
    parts = Outlooks(running.slowdowns).attained_parts(plan, running.traffic, running.attainment)
    return {name for name, part in parts.items() if part < 0.997}


def is_possible(request: PlanRequest, name: str, kinds: list[str]) -> bool:
    """Whether the policy carries a model that is alone on as many new GPUs as it takes."""
    (spec,) = (spec for spec in request.workload.models if spec.name == name)
    traffic = request.running.traffic
    alone = Traffic({name: traffic.mean_rps[name]}, traffic.dispersion, traffic.sigmas)
    asked = replace(request, workload=Workload(models=(spec,)), running=replace(request.running, traffic=alone))
    groups = [{"type": kind} for kind in kinds]
    elastic = Cluster.model_validate({"nodes": [{"name": "n", "gpus": groups}], "elastic": True})
    candidates = Candidates(asked.task(PROFILES))
    return not candidates.missing(candidates.planned_anew(elastic))


def fault(request: PlanRequest) -> str:
    """Return what is wrong once no more GPUs are asked for and no change pays; empty where every model is carried, no
    GPU more may come, or none would help."""
    for turn in range(ROUNDS):
        running = request.running
        present = Counter(each.type for each in request.gpus)
        answer: Proposal = propose(request, PROFILES)
        plan = for_workload(running.plan, request.workload)
        if answer.plan is not None and answer.worth.pays:
            plan = answer.plan
        if not (less := lacking(request, plan)):
            return ""
        asked = {kind: (answer.needed_gpus or {}).get(kind, 0) for kind in running.growth}
        new = {kind: min(count, running.limits[kind]) - present[kind] for kind, count in asked.items()}
        come = [kind for kind, count in new.items() for _ in range(count)]
        if not come and plan.gpulets == running.plan.gpulets:
            kinds = [kind for kind in running.growth if running.limits[kind] > present[kind]]
            idle = present - gpus_used(plan)  # what could lie there carries less of others
            able = {name for name in less if kinds and not idle and is_possible(request, name, kinds)}
            return f"{sorted(able)}: {answer.how}, {answer.worth.why}, {answer.needed_gpus}" if able else ""
        more: list[Gpu] = [gpu(f"{kind}-{turn}/{place}", kind=kind) for place, kind in enumerate(come)]
        request = replace(request, gpus=(*request.gpus, *more), running=replace(running, plan=plan))
    return "no rest"


@pytest.mark.parametrize("seed", [*range(8), 29, 36, 93, 176, 188, 265])
def test_gpus_are_asked_for_until_all_models_are_carried(seed: int) -> None:
    """Of the first 300 seeds 9 once kept a model that nothing carried while no GPU was asked for; most are here."""
    assert fault(drawn_request(seed)) == ""
