"""iGniter's published plans, and what it does at the edges."""

from __future__ import annotations

import pytest

from tenuto.errors import InvalidInputError
from tenuto.placement import Cluster, Plan, Policy, Workload, solve
from tenuto.placement.policies.ffd_plus_plus import FirstFitPlusPlus
from tenuto.placement.policies.igniter import Igniter
from tests.placement.igniter_cases import FACTS, placed, profiles, three, together, twelve
from tests.placement.published import thesis, v100s


def solved(policy: Policy, workload: Workload, cluster: Cluster | None = None) -> Plan:
    return solve(policy, workload, cluster or v100s(1, elastic=True), profiles())


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


def test_ffd_plus_takes_five_gpus() -> None:
    plan = solved(FirstFitPlusPlus(interference=False), twelve())
    assert plan.expected.gpus_used == FACTS["headline"]["gpus"]["ffd_plus"]
    assert plan.expected.cost_per_hour == FACTS["headline"]["cost_per_h_usd"]["ffd_plus"]
    assert "W2" in together(plan)[FACTS["plan_facts_stated"]["W2"]["ffd_plus"]["gpu"] - 1]


def test_every_batch_takes_at_most_half_its_slo() -> None:
    for policy in (Igniter(), FirstFitPlusPlus()):
        workload = twelve()
        for gpulet in solved(policy, workload).gpulets:
            replica = gpulet.models[0]
            assert replica.latency_ms is not None
            assert replica.latency is not None
            assert replica.latency_ms <= workload[replica.name].slo_ms / 2
            alone = replica.latency.at(replica.batch_size)
            assert alone * replica.slowdown == pytest.approx(replica.latency_ms, rel=1e-5)


def test_a_fixed_cluster_names_what_it_cannot_serve() -> None:
    plan = solved(Igniter(), twelve(), v100s(2))
    assert plan.unserved
    assert all("no GPU" in plan.unserved_reasons[name] for name in plan.unserved)


def test_a_rate_above_one_gpu_is_split() -> None:
    plan = solved(Igniter(), three().scaled(6))
    assert not plan.unserved
    assert len(plan.hosts_of("vgg19")) > 1
    assert plan.expected.goodput_rps == pytest.approx(6600)


def test_plans_are_deterministic_and_survive_yaml() -> None:
    plan = solved(Igniter(), twelve())
    assert plan == solved(Igniter(), twelve()) == Plan.from_data(plan.to_data())


def test_empty_workload() -> None:
    assert solved(Igniter(), Workload()).gpulets == ()


def test_profiles_without_coefficients_are_refused() -> None:
    with pytest.raises(InvalidInputError, match="coefficients"):
        solve(Igniter(), three(), v100s(1), thesis())
