"""iGniter's published plans, and what it does at the edges."""

from __future__ import annotations

import pytest

from lab.tests.baselines.igniter.cases import FACTS, placed, profiles, three, together, twelve
from tenuto.errors import InvalidInputError
from tenuto.placement import Cluster, Plan, Policy, Workload, solve
from tenuto.profiles import Profile, Profiles
from tenuto.profiles.shipped import load_shipped
from tenuto_lab.baselines.first_fit import FirstFitPlusPlus
from tenuto_lab.baselines.igniter.igniter import Igniter
from tenuto_lab.baselines.igniter.packing import demands_of
from tests.placement.published import decided, thesis, v100s


def solved(policy: Policy, workload: Workload, cluster: Cluster | None = None) -> Plan:
    return decided(policy, workload, cluster or v100s(1, elastic=True), profiles())


def test_table_1() -> None:
    plan = solved(Igniter(), three())
    published = FACTS["table1_example"]["igniter"]
    assert plan.expected.gpus_used == published["gpus"]
    for model in ("alexnet", "resnet50", "vgg19"):
        assert placed(plan)[model] == (published[model]["share_pct"], published[model]["batch"])


def test_twelve_workloads_take_six_gpus_placed_as_stated() -> None:
    plan = solved(Igniter(), twelve())
    found, gpus, stated = placed(plan), together(plan), FACTS["plan_facts_stated"]
    assert plan.expected.gpus_used == FACTS["headline"]["gpus"]["igniter"]
    assert plan.expected.cost_per_hour == FACTS["headline"]["cost_per_h_usd"]["igniter"]
    assert found["W4"] == (stated["W4"]["igniter"]["share_pct"], stated["W4"]["igniter"]["batch"])
    assert found["W9"][0] == stated["W9"]["igniter_share_pct"]
    assert found["W2"][0] == stated["W2"]["igniter"]["share_pct"]
    assert "W2" in gpus[stated["W2"]["igniter"]["gpu"] - 1]
    assert gpus[3] == {"W9", "W10"}
    assert gpus[4] == {"W1", "W5", "W11"}


def test_every_batch_takes_at_most_half_its_slo() -> None:
    workload = twelve()
    for gpulet in solved(Igniter(), workload).gpulets:
        replica = gpulet.models[0]
        assert replica.latency_ms is not None
        assert replica.latency_ms <= workload[replica.name].slo_ms / 2


@pytest.mark.parametrize("policy", [Igniter(), FirstFitPlusPlus()])
def test_a_model_alone_on_a_new_gpu_gets_its_lower_bound_unless_asked_otherwise(policy: Policy) -> None:
    workload = Workload.model_validate({"models": [{"name": "vgg19", "rate_rps": 510, "slo_ms": 40}]})
    [demand], _ = demands_of(workload.models[0], "v100", profiles())
    assert demand.lower_units is not None
    unit_pct = demand.hardware.share_unit_pct
    assert placed(solved(policy, workload))["vgg19"][0] == demand.lower_units * unit_pct
    raising = type(policy)(raise_alone=True)
    [gpulet] = solved(raising, workload).gpulets
    assert (gpulet.share_pct or 0) > demand.lower_units * unit_pct
    assert (gpulet.models[0].latency_ms or 99) <= 20


def test_a_fixed_cluster_names_what_it_cannot_serve() -> None:
    plan = solved(Igniter(), twelve(), v100s(2))
    assert plan.unserved
    assert all("no GPU" in plan.unserved_reasons[name] for name in plan.unserved)


def test_a_rate_above_one_gpu_is_split() -> None:
    plan = solved(Igniter(), three().scaled(6))
    assert not plan.unserved
    assert len(plan.hosts_of("vgg19")) > 1
    assert plan.expected.goodput_rps == pytest.approx(6600)


def slower(gpu_type: str, factor: float, without: tuple[str, ...] = ()) -> Profile:
    """Return iGniter's profile for a made-up GPU type on which batches take `factor` times as long."""
    data = load_shipped("igniter-v100").model_dump(by_alias=True)
    data.update(name=f"made-up-{gpu_type}", gpu_type=gpu_type)
    data["models"] = {name: model for name, model in data["models"].items() if name not in without}
    for model in data["models"].values():
        for key in ("k1", "k2", "k3", "k5"):
            model["coefficients"][key] *= factor
        for point in model["points"]:
            point["latency_ms"] *= factor
    return Profile.model_validate(data)


def test_an_elastic_cluster_buys_the_type_that_serves_all_at_the_lowest_price() -> None:
    check_what_an_elastic_cluster_buys(Igniter())


def check_what_an_elastic_cluster_buys(policy: Policy) -> None:
    both = Profiles([*profiles(), slower("t4", 1.5)])
    cluster = Cluster.parse("v100:1,t4:1", elastic=True)
    plan = decided(policy, three(), cluster, both)
    assert {gpu.type for gpu in plan.gpus} == {"t4"}
    assert not plan.unserved
    dear = Cluster.model_validate(
        {
            "elastic": True,
            "nodes": [
                {"name": "n0", "gpus": [{"type": "v100", "price_per_hour": 0.1}, {"type": "t4", "price_per_hour": 3.0}]}
            ],
        }
    )
    assert {gpu.type for gpu in decided(policy, three(), dear, both).gpus} == {"v100"}


def test_models_in_different_mig_instances_of_a_gpu_do_not_slow_each_other() -> None:
    instances = [{"profile": "3g.40gb", "start": start} for start in (4, 0)]
    group = {"type": "a100-80gb", "count": 2, "mig": "fixed", "instances": instances}
    cluster = Cluster.model_validate({"nodes": [{"name": "n0", "gpus": [group]}]})
    plan = solve(Igniter(), three(), cluster, Profiles([slower("a100-80gb-3g.40gb", 1.0)]))
    assert not plan.unserved
    assert {gpu.type for gpu in plan.gpus} == {"a100-80gb-3g.40gb"}
    assert plan.expected.gpus_used == len({gpu.device for gpu in plan.gpus if plan.on_gpu(gpu.id)})
    for gpu in plan.gpus:
        assert sum(gpulet.effective_share_pct for gpulet in plan.on_gpu(gpu.id)) <= 100.0
    apart = {gpulet.gpu for gpulet in plan.gpulets if len(plan.on_gpu(gpulet.gpu)) == 1}
    assert all(replica.slowdown == 1.0 for g in plan.gpulets if g.gpu in apart for replica in g.models)
    assert len(apart) < len(plan.gpulets)  # others do share an instance
    assert max(replica.slowdown for gpulet in plan.gpulets for replica in gpulet.models) > 1.0


def test_what_the_cheap_type_cannot_serve_goes_to_the_other() -> None:
    both = Profiles([*profiles(), slower("t4", 3.0)])
    plan = decided(Igniter(), twelve(), Cluster.parse("v100:1,t4:1", elastic=True), both)
    types = {gpu.id: gpu.type for gpu in plan.gpus}
    assert set(types.values()) == {"v100", "t4"}
    assert not plan.unserved
    assert len(types) == len(plan.gpus)
    cost, all_v100 = plan.expected.cost_per_hour, FACTS["headline"]["cost_per_h_usd"]["igniter"]
    assert cost is not None
    assert cost < all_v100


def test_a_fixed_cluster_of_two_types_uses_all_its_gpus() -> None:
    both = Profiles([*profiles(), slower("t4", 1.5, without=("ssd",))])
    plan = decided(Igniter(), twelve(), Cluster.parse("v100:2,t4:2"), both)
    used = {gpu_id for gpu_id, gpulets in plan.by_gpu().items() if gpulets}
    assert used == {gpu.id for gpu in plan.gpus}
    assert plan.unserved
    assert all(reason.startswith("no GPU time left") for reason in plan.unserved_reasons.values())
    alone = decided(Igniter(), twelve(), Cluster.parse("v100:2"), both)
    assert plan.expected.goodput_rps > alone.expected.goodput_rps


def test_memory_counts_where_it_was_measured() -> None:
    data = load_shipped("igniter-v100").model_dump(by_alias=True)
    for model in data["models"].values():
        for point in model["points"]:
            point["memory_mib"] = 6000.0
    big = Profiles([Profile.model_validate(data)])
    assert decided(Igniter(), three(), v100s(1, elastic=True), big).expected.gpus_used == 2


def test_batches_beyond_the_measured_ones_need_memory_too() -> None:
    data = load_shipped("igniter-v100").model_dump(by_alias=True)
    for model in data["models"].values():
        for point in model["points"]:
            point["memory_mib"] = 1000.0 + 40.0 * point["batch_size"]
    cluster = Cluster.model_validate(
        {"elastic": True, "nodes": [{"name": "n0", "gpus": [{"type": "v100", "memory_mib": 3000.0}]}]}
    )
    models = [{"name": f"resnet50-{index}", "profile": "resnet50", "rate_rps": 745, "slo_ms": 97} for index in range(2)]
    workload = Workload.model_validate({"models": models})
    plan = solve(Igniter(), workload, cluster, Profiles([Profile.model_validate(data)]))
    assert not plan.unserved
    assert all(g.models[0].memory_mib for g in plan.gpulets)


def test_profiles_without_coefficients_are_refused() -> None:
    with pytest.raises(InvalidInputError, match="coefficients"):
        decided(Igniter(), three(), v100s(1), thesis())
