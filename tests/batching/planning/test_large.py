"""Large workloads: what is expected decides, where GPUs are bought too, and the objective `each`."""

from __future__ import annotations

import random

import pytest

from tenuto.batching.planning.tenuto_policy import TenutoPolicy
from tenuto.placement import Cluster, Plan, Workload, load_policy, solve
from tenuto.placement.demand import HEADROOM, fluid_of, group_models, room_of
from tenuto.placement.fleet.traffic_spread import CellRoom, spread_traffic
from tenuto.profiles import Profile, Profiles
from tenuto.profiles.shipped import load_shipped

THESIS = Profiles([load_shipped("thesis-v100")])
NETWORKS = ("alexnet", "bert", "densenet121", "mobilenet_v2", "resnet50", "vgg19")
STARTS = ("ffd", "symphony", "sbp")


def many(count: int, seed: int, objective: str = "weighted") -> Workload:
    rng = random.Random(seed)
    models = [
        {
            "name": f"m{index}",
            "profile": rng.choice(NETWORKS),
            "rate_rps": rng.uniform(50, 400),
            "slo_ms": rng.choice([100, 200, 300]),
        }
        for index in range(count)
    ]
    return Workload.model_validate({"models": models, "objective": objective})


def parts(plan: Plan) -> list[float]:
    served = plan.expected.models
    return [served[m.name].goodput_rps / m.rate_rps if m.name in served else 0.0 for m in plan.models]


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
    assert any("by the model of queueing" in note for note in plan.notes)
    assert all(r.latency is not None for g in plan.gpulets for r in g.models)
    in_part = [why for name, why in plan.unserved_reasons.items() if name not in plan.unserved]
    assert in_part
    assert {why.count("expected in time") for why in in_part} == {1}  # told once, also where the plan is a start's
    assert solve(TenutoPolicy(starts=STARTS), load, cluster, THESIS).dump() == plan.dump()
    assert solve(TenutoPolicy(starts=("none",)), load, cluster, THESIS).unserved == tuple(m.name for m in load.models)


def test_what_is_bought_for_many_keeps_every_model_and_costs_no_more_than_a_start_that_does() -> None:
    load, cluster = many(45, 3), Cluster.parse("v100:1", elastic=True)
    starts = [solve(load_policy(name), load, cluster, THESIS) for name in STARTS]
    kept = [start.expected.gpus_used for start in starts if min(parts(start)) >= 0.97]
    plan = solve(TenutoPolicy(starts=STARTS), load, cluster, THESIS)
    assert min(parts(plan)) >= 0.97
    assert all(plan.expected.gpus_used <= gpus for gpus in kept)


SPEED = {"v100": (1.0, 1.0), "a100": (0.4, 0.9), "t4": (1.5, 4.0)}


def on_three_types(seed: int) -> tuple[Workload, Cluster, Profiles]:
    """Return a load of 80 % of the price of GPUs of three types, on which networks differ in how fast they are."""
    rng, [measured] = random.Random(seed), [load_shipped("thesis-v100")]
    rows = {k: {row: measured.models[row].scaled(rng.uniform(*SPEED[k])) for row in NETWORKS} for k in SPEED}
    made = (measured.model_copy(update={"name": k, "gpu_type": k, "models": rows[k]}) for k in SPEED)
    profiles = Profiles(Profile.model_validate(profile) for profile in made)
    load, cluster = many(12, seed), Cluster.parse("v100:14,a100:14,t4:14")
    room = room_of(cluster)
    price = 0.8 * sum(count * kind[1] for kind, count in room.items())
    for _ in range(3):  # what a rate takes depends on it
        load = load.scaled(price / fluid_of(group_models(load, cluster, profiles), room).cost)
    return load, cluster, profiles


def test_gpus_of_several_types_serve_the_models_that_they_serve_for_least() -> None:
    lacking = {"plan": 0, "start": 0}
    for seed in range(8):
        load, cluster, profiles = on_three_types(seed)
        plan = solve(TenutoPolicy(starts=("symphony",)), load, cluster, profiles)
        start = solve(load_policy("symphony"), load, cluster, profiles)
        assert len(plan.unserved_reasons) <= len(start.unserved_reasons)
        lacking["plan"] += len(plan.unserved_reasons)
        lacking["start"] += len(start.unserved_reasons)
        room, [share] = room_of(cluster), [CellRoom.of("c", cluster, room_of(cluster))]
        fluid = fluid_of(group_models(load, cluster, profiles), {kind: n / HEADROOM for kind, n in room.items()})
        used = spread_traffic(group_models(load, cluster, profiles), [share], fluid).used["c"]
        assert sum(n * kind[1] for kind, n in used.items()) == pytest.approx(HEADROOM * fluid.cost)
    assert lacking["plan"] < 0.6 * lacking["start"]
