"""Planning by patterns: never below its starts by the model that judges all plans, on clusters and where GPUs are
bought, and the objectives."""

from __future__ import annotations

import random

from tenuto.batching.planning.patterns import best_by_patterns
from tenuto.batching.planning.policy import TenutoPolicy
from tenuto.placement import Cluster, Plan, Workload, load_policy, solve
from tenuto.placement.solve import check_plan
from tenuto.profiles import Profiles
from tenuto.profiles.shipped import load_shipped

THESIS = Profiles([load_shipped("thesis-v100")])
NETWORKS = ("alexnet", "bert", "densenet121", "mobilenet_v2", "resnet50", "vgg19")
STARTS = ("ffd", "symphony", "sbp")


def many(count: int, seed: int, objective: str = "weighted") -> Workload:
    rng = random.Random(seed)
    models = [
        {"name": f"m{index}", "profile": rng.choice(NETWORKS), "rate_rps": rng.uniform(50, 400),
         "slo_ms": rng.choice([100, 200, 300])}
        for index in range(count)
    ]  # fmt: skip
    return Workload.model_validate({"models": models, "objective": objective})


def starts_of(load: Workload, cluster: Cluster) -> list[tuple[str, Plan]]:
    return [(name, solve(load_policy(name), load, cluster, THESIS)) for name in STARTS]


def parts(plan: Plan) -> list[float]:
    served = plan.expected.models
    return [served[m.name].goodput_rps / m.rate_rps if m.name in served else 0.0 for m in plan.models]


def test_a_full_cluster_serves_more_than_by_any_start() -> None:
    load, cluster = many(20, 1), Cluster.parse("v100:4")
    starts = starts_of(load, cluster)
    found = best_by_patterns("tenuto", load, cluster, THESIS, starts, 0.99)
    assert found is not None
    plan, how = found
    assert plan.expected.goodput_rps > 1.005 * max(start.expected.goodput_rps for _, start in starts)
    assert "patterns" in how
    check_plan(plan, cluster)


def test_what_is_bought_keeps_every_model_and_costs_no_more_than_a_start_that_does() -> None:
    load, cluster = many(10, 3), Cluster.parse("v100:1", elastic=True)
    starts = starts_of(load, cluster)
    kept = [start.expected.gpus_used for _, start in starts if min(parts(start)) >= 0.99]
    found = best_by_patterns("tenuto", load, cluster, THESIS, starts, 0.99)
    assert found is not None
    assert kept
    assert min(parts(found[0])) >= 0.99
    assert len({gpulet.gpu for gpulet in found[0].gpulets}) <= min(kept)


def test_fairness_is_never_below_that_of_the_fairest_start() -> None:
    load, cluster = many(12, 4, "each"), Cluster.parse("v100:2")
    starts = starts_of(load, cluster)
    found = best_by_patterns("tenuto", load, cluster, THESIS, starts, 0.99)
    assert found is not None
    assert min(parts(found[0])) >= max(min(parts(start)) for _, start in starts) - 1e-4


def test_a_cluster_that_is_too_small_is_shared_out_equally() -> None:
    load, cluster = many(45, 6, "each"), Cluster.parse("v100:7")
    plan = solve(TenutoPolicy(starts=("sbp", "gpulet")), load, cluster, THESIS)
    served = parts(plan)
    mean = sum(served) / len(served)
    assert mean < 0.8  # too small indeed
    assert min(served) >= 0.9 * mean
    starts = [solve(load_policy(name), load, cluster, THESIS) for name in ("sbp", "gpulet")]
    assert min(served) > 1.2 * max(min(parts(start)) for start in starts)


def test_more_than_forty_models_are_planned_without_a_trial_and_complete() -> None:
    load, cluster = many(41, 5), Cluster.parse("v100:3")
    plan = solve(TenutoPolicy(starts=STARTS), load, cluster, THESIS)
    assert any(note.startswith("chosen by its expectation") for note in plan.notes)
    assert all(r.latency is not None for g in plan.gpulets for r in g.models)
    in_part = [why for name, why in plan.unserved_reasons.items() if name not in plan.unserved]
    assert in_part
    assert {why.count("expected in time") for why in in_part} == {1}  # told once, also where the plan is a start's
    assert solve(TenutoPolicy(starts=STARTS), load, cluster, THESIS).dump() == plan.dump()
    assert solve(TenutoPolicy(starts=("none",)), load, cluster, THESIS).unserved == tuple(m.name for m in load.models)
