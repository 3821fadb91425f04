"""What must hold for every policy of this set on generated workloads and clusters."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tenuto.errors import InvalidInputError
from tenuto.placement import Cluster, Plan, Policy, Workload, solve
from tenuto.placement.policies.ao_milp import AoMilp
from tenuto.placement.policies.ffd import FirstFitDecreasing
from tenuto.placement.policies.symphony import Symphony
from tenuto.placement.policies.usher import Usher
from tenuto.placement.policies.wao_usher import WaoUsher
from tenuto.placement.policies.wsm_milp import WsmMilp
from tenuto.placement.solve import check_inputs
from tenuto.profiles import Profiles

from .published import thesis

# The part of the SLO within which a policy keeps the latency of a batch.
POLICIES: dict[str, tuple[Callable[[], Policy], float]] = {
    "ffd": (FirstFitDecreasing, 0.5), "usher": (Usher, 1.0), "wao-usher": (WaoUsher, 1.0), "ao-milp": (AoMilp, 1.0),
    "wsm-milp": (WsmMilp, 1.0), "symphony": (Symphony, 1.0),
}
ROWS = sorted(thesis().for_type("v100"))
PROFILES = thesis()

models = st.lists(
    st.tuples(st.sampled_from(ROWS), st.floats(1, 2000), st.floats(140, 900)), min_size=0, max_size=6
).map(
    lambda entries: Workload.model_validate({"models": [
        {"name": f"{row}-{index}", "profile": row, "rate_rps": rate, "slo_ms": slo}
        for index, (row, rate, slo) in enumerate(entries)
    ]})
)
clusters = st.builds(
    lambda count, elastic, memory: Cluster.model_validate({
        "nodes": [{"name": "n0", "gpus": [{"type": "v100", "count": count, "memory_mib": memory}]}], "elastic": elastic,
    }),
    st.integers(1, 6), st.booleans(), st.sampled_from([6000, 16384]),
)


def assert_valid(plan: Plan, workload: Workload, cluster: Cluster, part_of_slo: float) -> None:
    memory = {gpu.type: gpu.memory_mib for gpu in cluster.gpus}
    overcommits = any("over-commit" in note for note in plan.notes)
    for gpu in plan.gpus:
        gpulets = plan.on_gpu(gpu.id)
        assert sum(r.memory_mib or 0 for g in gpulets for r in g.models) <= memory[gpu.type] + 1e-6
        assert overcommits or sum(g.effective_share_pct for g in gpulets) <= 100 + 1e-6
    if not cluster.elastic:
        assert {gpu.id for gpu in plan.gpus} == {gpu.id for gpu in cluster.gpus}
    rates: dict[str, float] = {}
    for gpulet in plan.gpulets:
        for replica in gpulet.models:
            assert replica.latency_ms is not None
            assert replica.latency_ms <= workload[replica.name].slo_ms * part_of_slo + 1e-6
            rates[replica.name] = rates.get(replica.name, 0.0) + (replica.rate_rps or 0.0)
    names = {spec.name for spec in workload.models}
    assert set(rates) | set(plan.unserved) == names
    assert not set(rates) & set(plan.unserved)
    assert set(plan.unserved_reasons) == set(plan.unserved)
    assert all(plan.unserved_reasons.values())
    for name, rate in rates.items():
        assert rate <= workload[name].rate_rps * (1 + 1e-6)
        assert plan.expected.models[name].goodput_rps == pytest.approx(rate, rel=1e-5, abs=1e-4)


@pytest.mark.parametrize("name", POLICIES)
@given(workload=models, cluster=clusters)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.differing_executors])
def test_plans_are_valid_deterministic_and_leave_their_input_alone(
    name: str, workload: Workload, cluster: Cluster
) -> None:
    make, part_of_slo = POLICIES[name]
    before = (workload.model_dump_json(), cluster.model_dump_json())
    try:
        check_inputs(workload, cluster, PROFILES)
    except InvalidInputError:
        return  # refused before any policy runs
    plan = solve(make(), workload, cluster, PROFILES)
    assert_valid(plan, workload, cluster, part_of_slo)
    assert solve(make(), workload, cluster, PROFILES).dump() == plan.dump()
    assert Plan.from_data(yaml.safe_load(plan.dump())) == plan
    assert (workload.model_dump_json(), cluster.model_dump_json()) == before


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("elastic", [False, True])
def test_an_empty_workload_gives_an_empty_plan(name: str, elastic: bool) -> None:
    plan = solve(POLICIES[name][0](), Workload(), Cluster.parse("v100:2", elastic=elastic), PROFILES)
    assert plan.gpulets == ()
    assert plan.unserved == ()
    assert plan.expected.goodput_rps == 0


@pytest.mark.parametrize("name", POLICIES)
def test_a_cluster_without_gpus_serves_nobody_but_names_everybody(name: str) -> None:
    workload = Workload()
    plan = solve(POLICIES[name][0](), workload, Cluster(), Profiles([]))
    assert plan.gpus == ()


@pytest.mark.parametrize("name", POLICIES)
def test_a_model_that_fits_nowhere_is_reported_not_dropped(name: str) -> None:
    workload = Workload.model_validate({"models": [
        {"name": "resnet50", "rate_rps": 100, "slo_ms": 150},
        {"name": "bloom_560", "rate_rps": 5000, "slo_ms": 150},
        {"name": "bert", "rate_rps": 9000, "slo_ms": 150},
    ]})
    plan = solve(POLICIES[name][0](), workload, Cluster.parse("v100:1"), PROFILES)
    served = {r.name for g in plan.gpulets for r in g.models}
    assert served | set(plan.unserved) == {"resnet50", "bloom_560", "bert"}
    assert all(plan.unserved_reasons[name] for name in plan.unserved)
    assert plan.expected.goodput_rps < 14_100


@given(workload=models, count=st.integers(1, 5))
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@pytest.mark.parametrize("policy", [AoMilp, WsmMilp])
def test_one_more_gpu_never_lowers_the_goodput_of_the_milp(
    policy: Callable[[], Policy], workload: Workload, count: int
) -> None:
    try:
        fewer = solve(policy(), workload, Cluster.parse(f"v100:{count}"), PROFILES)
        more = solve(policy(), workload, Cluster.parse(f"v100:{count + 1}"), PROFILES)
    except InvalidInputError:
        return
    if all(plan.notes and plan.notes[0].startswith("optimal") for plan in (fewer, more)):
        assert more.expected.goodput_rps >= fewer.expected.goodput_rps - 1e-3
