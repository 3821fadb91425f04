"""What `explain` says of a plan: every claim is tried."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tenuto.loadgen.simulated import Simulation
from tenuto.placement import Cluster, Plan, Workload, load_policy, solve
from tenuto.placement.expectation.outlook import IN_FULL, expected_of
from tenuto.placement.explaining import Explained, explain
from tenuto.profiles import Profiles

CLUSTER = Cluster.parse("v100:2")
FAST, SLOW = {"alpha_ms": 0.5, "beta_ms": 3.0}, {"alpha_ms": 2.0, "beta_ms": 10.0}

models = st.lists(
    st.fixed_dictionaries(
        {
            "rate_rps": st.sampled_from([20.0, 100.0, 300.0, 900.0]),
            "slo_ms": st.sampled_from([40.0, 120.0]),
            "latency": st.sampled_from([FAST, SLOW]),
        }
    ),
    min_size=1,
    max_size=3,
)


def planned(entries: list[dict[str, Any]], policy: str, gpus: str = "v100:2") -> Plan:
    workload = Workload.model_validate({"models": [{"name": f"m{i}"} | entry for i, entry in enumerate(entries)]})
    options = {"time_limit_s": "0"} if policy == "symphony" else {}
    return solve(load_policy(policy, options), workload, Cluster.parse(gpus), Profiles([]))


def explained(plan: Plan) -> Explained:
    return explain(plan, CLUSTER.gpus, Profiles([]))


def in_full(plan: Plan) -> set[str]:
    promised = expected_of(plan).models
    return {
        s.name
        for s in plan.models
        if s.name in promised and promised[s.name].goodput_rps >= (IN_FULL - 1e-3) * s.rate_rps
    }


def changed(plan: Plan, name: str | None, **factors: float) -> Plan:
    """Return the plan with fields of a model, or of all, multiplied."""
    new = [
        spec.model_copy(update={key: getattr(spec, key) * factor for key, factor in factors.items()})
        if name in (None, spec.name)
        else spec
        for spec in plan.models
    ]
    return plan.model_copy(update={"models": tuple(new)})


@settings(max_examples=settings.default.max_examples // 3)
@given(models, st.sampled_from(("symphony", "gpulet")))
def test_what_is_said_of_rates_slos_and_growth_is_so_when_it_is_tried(
    entries: list[dict[str, Any]], policy: str
) -> None:
    plan = planned(entries, policy)
    found, before = explained(plan), in_full(plan)
    for model in found.models:
        if model.most_rps is not None and model.least_slo_ms is not None:
            assert before <= in_full(changed(plan, model.name, rate_rps=model.most_rps / model.rate_rps))
            assert before <= in_full(changed(plan, model.name, slo_ms=model.least_slo_ms / model.slo_ms))
        if model.enough_rps is not None:
            assert model.name in in_full(changed(plan, model.name, rate_rps=model.enough_rps / model.rate_rps))
        if model.enough_slo_ms is not None:
            assert model.name in in_full(changed(plan, model.name, slo_ms=model.enough_slo_ms / model.slo_ms))
    if found.growth is not None:
        assert before <= in_full(changed(plan, None, rate_rps=found.growth))
        assert set() < set(found.breaks) <= before


@settings(max_examples=settings.default.max_examples // 3)
@given(models, st.sampled_from(("symphony", "gpulet")))
def test_what_models_cost_is_what_the_plan_costs(entries: list[dict[str, Any]], policy: str) -> None:
    plan = planned(entries, policy)
    costs = [model.cost_per_hour or 0.0 for model in explained(plan).models]
    assert sum(costs) == pytest.approx(plan.expected.cost_per_hour)


@pytest.mark.parametrize("policy", ["symphony", "gpulet"])
def test_what_a_replica_and_one_gpu_more_are_for_is_what_the_plan_promises_without_and_with_it(policy: str) -> None:
    entries = [
        {"rate_rps": 900.0, "slo_ms": 40.0, "latency": FAST},
        {"rate_rps": 60.0, "slo_ms": 120.0, "latency": SLOW},
    ]
    plan = planned(entries, policy)
    found = explained(plan)
    for model in found.models:
        for replica in model.replicas:
            gpulets = []
            for gpulet in plan.gpulets:
                kept = tuple(r for r in gpulet.models if (gpulet.id, r.name) != (replica.gpulet, model.name))
                gpulets += [gpulet.model_copy(update={"models": kept})] if kept else []
            without = expected_of(plan.model_copy(update={"gpulets": tuple(gpulets)})).models
            promised = without[model.name].goodput_rps if model.name in without else 0.0
            assert replica.without_rps == pytest.approx(promised, abs=1e-5)
    (more,) = found.one_more
    assert more.goodput_rps == planned(entries, policy, "v100:3").expected.goodput_rps


def test_stages_take_the_gpu_time_and_the_price_of_their_requests() -> None:
    stages = [{"model": "detect", "latency": SLOW}, {"model": "read", "after": ["detect"], "map": "a:b", "count": 2.0}]
    shared = {"name": "read", "latency": FAST, "rate_rps": 20.0, "slo_ms": 120.0}
    application = {"name": "app", "rate_rps": 40.0, "slo_ms": 150.0, "stages": stages}
    workload = Workload.model_validate({"models": [shared], "applications": [application]})
    plan = solve(load_policy("gpulet"), workload, CLUSTER, Profiles([]))
    detect, read = explained(plan).stages
    by_model = {model.name: model for model in explained(plan).models}

    def gpus(name: str) -> float:
        return sum(r.busy * (r.share_pct or 100.0) / 100.0 for r in by_model[name].replicas)

    assert (detect.model, read.model) == ("app.detect", "read")
    assert detect.gpus == pytest.approx(gpus("app.detect"))
    assert read.gpus == pytest.approx(0.8 * gpus("read"))  # 80 of 100 requests
    assert read.cost_per_hour == pytest.approx(0.8 * (by_model["read"].cost_per_hour or 0.0))
    assert detect.budget_ms + read.budget_ms == pytest.approx(150.0)
    assert detect.saves is not None
    assert read.saves is not None
    assert detect.saves > read.saves > 0.0


def test_an_offline_model_is_promised_nothing_and_gets_at_most_what_is_idle() -> None:
    entries = [{"rate_rps": 100.0, "slo_ms": 120.0, "latency": FAST}, {"offline": True, "latency": SLOW}]
    plan = planned(entries, "symphony", "v100:1")
    busy, night = explained(plan).models
    assert (busy.is_offline, busy.idle_rps) == (False, None)
    assert (night.is_offline, night.promised_rps, night.most_rps, night.least_slo_ms) == (True, 0.0, None, None)
    assert night.replicas
    run = Simulation.of_plan(plan, duration_s=30.0, seed=1, offline={"m1": math.inf}).run().summary()
    assert night.idle_rps is not None
    assert 0.8 * night.idle_rps < run["offline"]["requests"]["m1"] / 30.0 <= night.idle_rps
