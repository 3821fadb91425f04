"""AO-MILP and WSM-MILP against the thesis, patterns against brute force, and what the solver promises."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tenuto.errors import InvalidInputError
from tenuto.placement import Cluster, Plan, Policy, Workload, solve
from tenuto.profiles import Profiles
from tenuto_lab.baselines.milp.milp import AoMilp, WsmMilp
from tenuto_lab.baselines.milp.patterns import enumerate_patterns, items_of, patterns_worth
from tenuto_lab.baselines.requirements import requirements_of
from tests.placement.policies.test_properties import Case, workloads
from tests.placement.published import (
    LANGUAGE_MIX,
    VISION,
    equal_rates,
    facts,
    placed,
    planned,
    requirement_profile,
    thesis,
    together,
    v100s,
)

EXAMPLES = {example["id"]: example for example in facts("thesis_worked_examples")["examples"]}
EXPERIMENTS = {e["id"]: e for e in facts("thesis_experiments")["experiments"]}


def ao_plan(name: str) -> Plan:
    example = EXAMPLES[name]
    workload = equal_rates(example["models"], example["rate_rps"], example["slo_ms"])
    return planned(AoMilp(), workload, v100s(example["gpus"]))


@pytest.mark.parametrize("name", ["order_within_group", "order_across_groups"])
def test_ao_milp_reaches_the_published_goodput(name: str) -> None:
    plan = ao_plan(name)
    assert plan.expected.goodput_rps == pytest.approx(EXAMPLES[name]["milp_goodput"], abs=1e-6)
    assert plan.notes[0] == "optimal"


def test_ao_milp_places_t5_twice_with_batch_16() -> None:
    published = EXAMPLES["order_within_group"]["milp_placement"]
    assert {name: len(sizes) for name, sizes in placed(ao_plan("order_within_group")).items()} == {
        name: entry["replicas"] for name, entry in published.items()
    }
    assert placed(ao_plan("order_within_group"))["t5"] == [published["t5"]["batch"]] * 2


def test_ao_milp_uses_the_gpu_that_usher_leaves_idle() -> None:
    plan = ao_plan("replication_multiplier")
    assert plan.expected.gpus_used == 4
    assert placed(plan)["bert"] == [16]


def test_wsm_milp_puts_resnet50_beside_alexnet_at_five() -> None:
    plan = planned(WsmMilp(), equal_rates(VISION, 500, 200), v100s(5))
    assert {"resnet50", "alexnet"} in together(plan)
    assert placed(plan)["resnet50"] == [4]
    assert placed(plan)["alexnet"] == [4]
    assert plan.expected.goodput_rps == pytest.approx(2500)


def test_wsm_milp_on_the_language_mix() -> None:
    observed = EXPERIMENTS["6.2.2"]["observations"]["wsm_milp"]
    workload = equal_rates(LANGUAGE_MIX, 300, 300)
    five = planned(WsmMilp(), workload, v100s(5))
    assert len(placed(five)["bert"]) == observed["gpus5"]["bert_replicas"]
    assert len(placed(five)["gpt2"]) == observed["gpus5"]["gpt2_replicas"]
    assert {"resnet50", "mobilenet_v2"} in together(five)
    assert five.expected.models["bert"].goodput_rps == pytest.approx(observed["gpus5"]["bert_expected_rps"])
    six = planned(WsmMilp(), workload, v100s(6))
    assert (len(placed(six)["bert"]), len(placed(six)["gpt2"])) == (2, 3)
    seven = planned(WsmMilp(), workload, v100s(7))
    assert (len(placed(seven)["bert"]), len(placed(seven)["gpt2"])) == (3, 3)
    assert seven.expected.goodput_rps == pytest.approx(1200)


@pytest.mark.parametrize("total_rps", [3000, 4000, 5000])
def test_wsm_milp_on_the_rate_sweep(total_rps: int) -> None:
    observed = EXPERIMENTS["6.3"]["observations"]["wsm_milp_slo250"]
    plan = planned(WsmMilp(), equal_rates(VISION, total_rps / len(VISION), 250), v100s(4))
    found = placed(plan)
    if total_rps == 5000:
        assert len(found["resnet50"]) == observed["5000"]["resnet50_replicas"]
        assert found["densenet121"] == [8, 8, 8]
        return
    assert found["vgg19"] == [observed[str(total_rps)]["vgg19_batch"]]
    assert found["resnet50"] == [4]
    assert found["densenet121"] == [16]
    assert len(found["efficientnet_b7"]) == observed["3000"]["efficientnet_b7_replicas"]
    assert any({"densenet121", "efficientnet_b7"} <= models for models in together(plan))


def test_own_batch_sizes_per_replica_never_carry_less() -> None:
    for rate in (600, 800):
        workload = equal_rates(VISION, rate, 250)
        one = planned(WsmMilp(), workload, v100s(4)).expected.goodput_rps
        own = planned(WsmMilp(one_batch_size=False), workload, v100s(4)).expected.goodput_rps
        assert own >= one - 1e-6


def test_an_elastic_cluster_carries_every_rate_at_the_least_price() -> None:
    fast, slow = {"m": {4: (60.0, 10.0, 100.0)}}, {"m": {4: (60.0, 10.0, 50.0)}}
    profiles = Profiles([requirement_profile(fast), requirement_profile(slow, "t4")])
    plan = planned(AoMilp(), equal_rates(["m"], 230, 500), Cluster.parse("v100:1,t4:1", elastic=True), profiles)
    assert {gpu.type for gpu in plan.gpus} == {"t4"}
    assert plan.expected.gpus_used == 5
    assert plan.expected.goodput_rps == pytest.approx(230)


def test_one_batch_size_for_all_types_is_chosen_with_all_types_in_view() -> None:
    # On either type a batch of 8 or of 4 carries most; 8 on both is what carries most together.
    v100 = {"m": {4: (50.0, 10.0, 200.0), 8: (60.0, 10.0, 200.0)}}
    a100 = {"m": {4: (80.0, 10.0, 100.0), 8: (70.0, 10.0, 200.0)}}
    profiles = Profiles([requirement_profile(v100), requirement_profile(a100, "a100")])
    plan = planned(
        WsmMilp(compute_metric="achieved_occupancy_pct"),
        equal_rates(["m"], 500, 500),
        Cluster.parse("v100:1,a100:1"),
        profiles,
    )
    assert plan.expected.goodput_rps == 400
    assert plan.notes[0].startswith("optimal")


def test_a_mixed_fixed_cluster_uses_both_types() -> None:
    fast, slow = {"m": {4: (60.0, 10.0, 100.0)}}, {"m": {4: (60.0, 10.0, 50.0)}}
    profiles = Profiles([requirement_profile(fast), requirement_profile(slow, "t4")])
    plan = planned(AoMilp(), equal_rates(["m"], 500, 500), Cluster.parse("v100:2,t4:2"), profiles)
    assert plan.expected.goodput_rps == pytest.approx(300)


def test_any_metric_pair_may_bound_a_gpu() -> None:
    workload = equal_rates(LANGUAGE_MIX, 300, 300)
    dense = planned(WsmMilp(compute_metric="wavg_ach_occ_pct", memory_metric="mem_cap_pct"), workload, v100s(3))
    assert dense.expected.goodput_rps == pytest.approx(1200)
    assert planned(WsmMilp(), workload, v100s(3)).expected.goodput_rps < 1200


def test_weights_decide_who_is_served() -> None:
    data = [{"name": "bert", "rate_rps": 100, "slo_ms": 300}, {"name": "resnet50", "rate_rps": 500, "slo_ms": 300}]
    assert planned(AoMilp(), Workload.model_validate({"models": data}), v100s(1)).unserved == ("bert",)
    data[0]["weight"] = 10.0
    plan = planned(AoMilp(), Workload.model_validate({"models": data}), v100s(1))
    assert plan.unserved == ("resnet50",)
    assert "the others carry more" in plan.unserved_reasons["resnet50"]


def test_max_replicas_holds() -> None:
    plan = planned(AoMilp(max_replicas=1), equal_rates(["bert", "t5"], 400, 300), v100s(4))
    assert {name: len(sizes) for name, sizes in placed(plan).items()} == {"bert": 1, "t5": 1}


def test_generated_columns_reach_the_optimum_of_the_full_list() -> None:
    for gpus, rate in ((8, 700),):
        workload = equal_rates((*VISION, *LANGUAGE_MIX[1:]), rate, 300)
        full = planned(WsmMilp(one_batch_size=False), workload, v100s(gpus))
        generated = planned(WsmMilp(one_batch_size=False, pattern_limit=20), workload, v100s(gpus))
        bought = planned(WsmMilp(one_batch_size=False, pattern_limit=20), workload, v100s(1, elastic=True))
        priced = planned(WsmMilp(one_batch_size=False), workload, v100s(1, elastic=True))
        assert generated.expected.goodput_rps <= full.expected.goodput_rps + 1e-6
        assert generated.expected.goodput_rps >= 0.98 * full.expected.goodput_rps
        assert bought.expected.gpus_used <= priced.expected.gpus_used + 1


def test_running_out_of_time_is_reported_with_the_gap() -> None:
    workload = equal_rates((*VISION, "bert"), 400, 200)
    for policy in (AoMilp(time_limit_s=1e-6), WsmMilp(time_limit_s=1e-6), WsmMilp(time_limit_s=1e-6, pattern_limit=1)):
        plan = planned(policy, workload, v100s(4))
        assert "not fully optimised" in plan.notes[0] or "not known" in plan.notes[0]
        assert set(placed(plan)) | set(plan.unserved) == {*VISION, "bert"}
        whole = planned(type(policy)(), workload, v100s(4)).expected.goodput_rps
        assert 0.7 * whole < plan.expected.goodput_rps <= whole + 1e-6


@pytest.mark.parametrize(("option", "value"), [("max_replicas", 0), ("time_limit_s", 0), ("pattern_limit", 0)])
def test_options_out_of_range_are_refused(option: str, value: int) -> None:
    with pytest.raises(InvalidInputError, match=option):
        AoMilp(**{option: value})


needs = st.dictionaries(
    st.sampled_from(["a", "b", "c", "d"]),
    st.dictionaries(
        st.sampled_from([4, 8]), st.tuples(st.floats(5, 100), st.floats(1, 100), st.floats(10, 500)), min_size=1
    ),
    min_size=1,
)


@given(needs, st.floats(5, 600))
def test_patterns_are_all_that_fit(by_model, rate: float) -> None:  # type: ignore[no-untyped-def]
    workload = equal_rates(by_model, rate, 10_000)
    profiles = Profiles([requirement_profile(by_model)])
    usable = requirements_of(workload, v100s(1), profiles, "achieved_occupancy_pct", "memory")
    within = {"v100": {name: req["v100"].within_slo for name, req in usable.items()}}
    items = items_of(workload.models, within, {"v100": 0.0}, one_batch_size=False)["v100"]
    patterns = enumerate_patterns("v100", items, 10_000)
    expected = 0
    for choice in itertools.product(*[[None, *group] for group in items]):
        chosen = [item for item in choice if item is not None]
        fits = (
            sum(i.need.compute_pct for i in chosen) <= 100 + 1e-9
            and sum(i.need.memory_pct for i in chosen) <= 100 + 1e-9
        )
        expected += bool(chosen) and fits
    assert len(patterns) == expected
    worth_all, complete = patterns_worth("v100", items, lambda item: item.carries_rps, 0.0, 10_000)
    assert complete
    assert len(worth_all) == expected
    best, _ = patterns_worth("v100", items, lambda item: item.carries_rps, rate, 10_000)
    assert len(best) == sum(sum(i.carries_rps for i in p.items) > rate for p in patterns)


def test_missing_metrics_are_refused() -> None:
    with pytest.raises(InvalidInputError, match="both"):
        planned(AoMilp(memory_metric="nothing"), equal_rates(["bert"], 1, 300), v100s(1))
    assert thesis().get("bert", "v100").points


@given(workload=workloads(Case(AoMilp, 1.0, thesis())), count=st.integers(1, 5))
@settings(max_examples=settings.default.max_examples // 4)
@pytest.mark.parametrize("policy", [AoMilp, WsmMilp])
def test_one_more_gpu_never_lowers_the_goodput(policy: Callable[[], Policy], workload: Workload, count: int) -> None:
    try:
        fewer = solve(policy(), workload, Cluster.parse(f"v100:{count}"), thesis())
        more = solve(policy(), workload, Cluster.parse(f"v100:{count + 1}"), thesis())
    except InvalidInputError:
        return
    if all(plan.notes and plan.notes[0].startswith("optimal") for plan in (fewer, more)):
        # What the program optimises; what is expected counts random arrivals as well.
        few, many = (plan.believed.goodput_rps if plan.believed else 0.0 for plan in (fewer, more))
        assert many >= few - 1e-3
