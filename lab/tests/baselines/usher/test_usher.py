"""USHER and WAO-USHER against the thesis' worked examples and experiments, and USHER's own small cases."""

from __future__ import annotations

import pytest

from tenuto.errors import InvalidInputError
from tenuto.placement import Cluster, Workload, load_policy, solve
from tenuto.profiles import Profiles
from tenuto_lab.baselines.usher.usher import Usher, WaoUsher
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


def example_plan(name: str):
    example = EXAMPLES[name]
    workload = equal_rates(example["models"], example["rate_rps"], example["slo_ms"])
    return example, planned(Usher(), workload, v100s(example["gpus"]))


def test_order_within_group_gives_the_published_plan() -> None:
    example, plan = example_plan("order_within_group")
    assert plan.expected.goodput_rps == example["usher_goodput"]
    expected = {name: [p["batch"]] * p["replicas"] for name, p in example["usher_placement"].items()}
    assert placed(plan) == expected


def test_order_across_groups_gives_the_published_groups_and_goodput() -> None:
    example, plan = example_plan("order_across_groups")
    assert plan.expected.goodput_rps == pytest.approx(example["usher_goodput"])
    assert placed(plan)["bert"] == [32, 32, 32]
    assert len(placed(plan)["resnet50"]) == 1
    groups = [set(group.split()) for group in plan.notes[0].removeprefix("groups: ").split(" | ")]
    assert groups == [set(group) for group in example["groups_in_order"]]


def test_a_replica_count_above_the_cluster_leaves_a_gpu_idle() -> None:
    example, plan = example_plan("replication_multiplier")
    result = example["usher_result"]
    assert sorted(placed(plan)) == sorted(result["served"])
    assert list(plan.unserved) == result["not_served"]
    assert len(plan.gpus) - plan.expected.gpus_used == result["idle_gpus"]
    assert "5 replicas" in plan.unserved_reasons["bert"]
    assert "124.88" in plan.unserved_reasons["bert"]


def test_five_vision_models_need_six_gpus() -> None:
    facts_ = EXPERIMENTS["6.2.1"]["observations"]["usher"]
    workload = equal_rates(VISION, 500, 200)
    elastic = planned(Usher(), workload, v100s(1, elastic=True))
    assert elastic.expected.gpus_used == facts_["gpus_to_serve_all"]
    assert elastic.expected.goodput_rps == pytest.approx(2500)
    six = planned(Usher(), workload, v100s(6))
    assert six.expected.goodput_rps == pytest.approx(2500)
    assert placed(six)["efficientnet_b7"] == [facts_["gpus6"]["efficientnet_b7_batch"]] * 2
    assert placed(six)["resnet50"] == [facts_["gpus6"]["resnet50_batch"]]
    assert planned(Usher(), workload, v100s(5)).expected.goodput_rps < 2500


@pytest.mark.parametrize(("gpus", "batches"), [(3, [16]), (4, [8, 8])])
def test_vision_models_on_three_and_four_gpus(gpus: int, batches: list[int]) -> None:
    plan = planned(Usher(), equal_rates(VISION, 500, 200), v100s(gpus))
    assert placed(plan)["efficientnet_b7"] == batches
    observed = EXPERIMENTS["6.2.1"]["observations"]["usher"]
    if gpus == 3:
        expected = observed["gpus3"]["efficientnet_b7"]["expected_rps"]
        assert plan.expected.models["efficientnet_b7"].goodput_rps == pytest.approx(expected)
    else:
        rates = [r.rate_rps for g in plan.gpulets for r in g.models if r.name == "efficientnet_b7"]
        assert rates == [observed["gpus4"]["efficientnet_b7"]["arrival_rps_each"]] * 2


@pytest.mark.parametrize("gpus", [3, 4, 5, 6, 7, 8])
def test_wao_usher_uses_three_gpus_on_the_language_mix(gpus: int) -> None:
    plan = planned(WaoUsher(), equal_rates(LANGUAGE_MIX, 300, 300), v100s(gpus))
    assert plan.expected.gpus_used == EXPERIMENTS["6.2.2"]["observations"]["wao_usher"]["gpus_used"]
    for models in together(plan):
        assert {"bert", "gpt2"} <= models
    assert placed(plan)["bert"] == [4, 4, 4]


@pytest.mark.parametrize("gpus", [3, 6])
def test_wao_usher_uses_three_gpus_on_the_vision_mix(gpus: int) -> None:
    plan = planned(WaoUsher(), equal_rates(VISION, 500, 200), v100s(gpus))
    assert plan.expected.gpus_used == EXPERIMENTS["6.2.1"]["observations"]["wao_usher"]["gpus_used"]
    assert placed(plan)["resnet50"] == [4]


def test_the_groups_of_section_6_come_from_one_reading_of_the_tie() -> None:
    reading = {"grouping_ties": "float", "memory_metric": "mem_cap_pct"}
    load, gpus = equal_rates(VISION, 500, 200), v100s(3)
    plan = planned(WaoUsher(**reading), load, gpus)
    gpu0 = set(EXPERIMENTS["6.2.1"]["observations"]["wao_usher"]["gpu0"])
    assert {replica.name for gpulet in plan.on_gpu("n0/0") for replica in gpulet.models} == gpu0
    assert gpu0 not in together(planned(WaoUsher(), load, gpus))  # by the other reading it is another group
    for gpus in (v100s(3), v100s(4), v100s(6)):
        assert placed(planned(Usher(**reading), load, gpus)) == placed(planned(Usher(), load, gpus))


def figure_7() -> tuple[Workload, Profiles]:
    example = facts("usher_paper_facts")["example_fig7"]
    needs = {m: {8: (example["creq_pct"][m], example["mreq_pct"][m], 100.0)} for m in example["creq_pct"]}
    return equal_rates(needs, 100, 500), Profiles([requirement_profile(needs)])


def test_mixing_kinds_packs_figure_7_on_two_gpus() -> None:
    example = facts("usher_paper_facts")["example_fig7"]
    workload, profiles = figure_7()
    for cluster in (v100s(1, elastic=True), v100s(4)):
        plan = planned(Usher(), workload, cluster, profiles)
        assert plan.expected.gpus_used == example["mixed"]["gpus"]
        assert not plan.unserved
        compute = sum(g.effective_share_pct for g in plan.gpulets) / plan.expected.gpus_used
        assert compute == pytest.approx(example["mixed"]["mean_cuti_pct"])


def test_grouping_the_same_kind_needs_figure_7s_third_gpu() -> None:
    workload, profiles = figure_7()
    policy = Usher(groups="M1+M2,M3+M4")
    plan = planned(policy, workload, v100s(1, elastic=True), profiles)
    assert plan.expected.gpus_used == facts("usher_paper_facts")["example_fig7"]["same_kind_together"]["gpus"]


def test_dividing_every_model_packs_figure_3_on_two_gpus() -> None:
    example = facts("usher_paper_facts")["example_fig3"]
    needs = {
        m: {4: (20.0, example["half_batch_mreq_pct"][m], 50.0), 8: (30.0, example["mreq_pct_at_batch8"][m], 100.0)}
        for m in example["mreq_pct_at_batch8"]
    }
    workload, profiles = equal_rates(needs, 100, 500), Profiles([requirement_profile(needs)])
    cluster = v100s(1, elastic=True)
    assert planned(Usher(), workload, cluster, profiles).expected.gpus_used == example["divide_all"]["gpus"]
    without = planned(Usher(replication=False), workload, cluster, profiles)
    assert without.expected.gpus_used == example["no_division"]["gpus"]


def test_an_elastic_cluster_of_two_types_buys_the_cheaper_one() -> None:
    needs = {"m": {4: (60.0, 10.0, 100.0)}}
    slow = {"m": {4: (60.0, 10.0, 50.0)}}
    profiles = Profiles([requirement_profile(needs), requirement_profile(slow, "t4")])
    workload = equal_rates(["m"], 200, 500)
    cluster = Cluster.parse("v100:1,t4:1", elastic=True)
    plan = planned(Usher(), workload, cluster, profiles)
    assert {gpu.type for gpu in plan.gpus} == {"t4"}  # four at 0.526 $ instead of two at 3.06 $
    assert plan.expected.cost_per_hour == pytest.approx(4 * 0.526)
    dear = Cluster.model_validate(
        {
            "nodes": [{"name": "n", "gpus": [{"type": kind, "price_per_hour": 1.0} for kind in ("v100", "t4")]}],
            "elastic": True,
        }
    )
    assert {gpu.type for gpu in planned(Usher(), workload, dear, profiles).gpus} == {"v100"}


def test_a_fixed_cluster_of_two_types_uses_both() -> None:
    profiles = Profiles(
        [
            requirement_profile({"m": {4: (60.0, 10.0, 100.0)}}),
            requirement_profile({"m": {4: (80.0, 20.0, 50.0)}}, "t4"),
        ]
    )
    plan = planned(Usher(), equal_rates(["m"], 250, 500), Cluster.parse("v100:2,t4:1"), profiles)
    assert plan.expected.goodput_rps == pytest.approx(250)
    assert sorted(g.share_pct for g in plan.gpulets if g.share_pct) == [60.0, 60.0, 80.0]


def test_ablations_never_carry_more_than_the_whole_on_the_published_cases() -> None:
    for models, rate, slo, gpus in ((VISION, 500, 200, 6), (LANGUAGE_MIX, 300, 300, 8)):
        whole = planned(Usher(), equal_rates(models, rate, slo), v100s(gpus)).expected.goodput_rps
        for option in ("grouping", "replication", "batch_choice", "classify", "sort"):
            part = planned(load_policy("usher", {option: "false"}), equal_rates(models, rate, slo), v100s(gpus))
            assert part.expected.goodput_rps <= whole + 1e-6


def test_without_shares_the_plan_says_that_gpulets_compete() -> None:
    plan = planned(WaoUsher(shares=False), equal_rates(LANGUAGE_MIX, 300, 300), v100s(3))
    assert {g.share_pct for g in plan.gpulets} == {None}
    assert plan.overcommits


def test_explicit_groups_must_name_every_model_once() -> None:
    with pytest.raises(InvalidInputError, match="exactly once"):
        planned(Usher(groups="alexnet+bert"), equal_rates(["alexnet", "resnet50"], 10, 200), v100s(1))


def test_a_profile_without_the_metric_is_refused_with_the_known_ones() -> None:
    with pytest.raises(InvalidInputError) as caught:
        planned(Usher(compute_metric="power_w"), equal_rates(["alexnet", "bert"], 10, 200), v100s(1))
    assert len(caught.value.problems) == 2
    assert "achieved_occupancy_pct" in caught.value.problems[0].cure


def test_a_slo_below_every_measured_batch_is_explained() -> None:
    workload = Workload.model_validate(
        {"models": [{"name": "m", "rate_rps": 1, "slo_ms": 45}, {"name": "bert", "rate_rps": 10, "slo_ms": 300}]}
    )
    own = requirement_profile({"m": {4: (50.0, 5.0, 100.0)}})
    own = own.model_copy(update={"models": {**own.models, "bert": thesis().get("bert", "v100")}})
    points = own.models["m"].points
    early = points[0].model_copy(update={"batch_size": 1, "metrics": {}, "latency_ms": 20.0, "throughput_rps": 50.0})
    late = points[0].model_copy(update={"latency_ms": 50.0, "throughput_rps": 80.0})
    own.models["m"] = own.models["m"].model_copy(update={"points": (early, late)})
    plan = planned(Usher(), workload, v100s(2), Profiles([own]))
    assert plan.unserved == ("m",)
    assert "SLO below its fastest measured batch" in plan.unserved_reasons["m"]


def test_the_reason_names_the_free_room_of_a_type_on_which_the_model_was_measured() -> None:
    needs = {"m": {4: (80.0, 10.0, 100.0)}, "n": {4: (70.0, 10.0, 50.0)}}
    profiles = Profiles([requirement_profile(needs), requirement_profile({"other": {4: (1.0, 1.0, 1.0)}}, "t4")])
    plan = planned(Usher(), equal_rates(["m", "n"], 50, 500), Cluster.parse("v100:1,t4:1"), profiles)
    assert len(plan.unserved) == 1
    assert "of a v100" in plan.unserved_reasons[plan.unserved[0]]


def test_a_model_in_parts_is_a_chain_of_stages_with_one_deadline_and_placed_like_models() -> None:
    """The paper serves Llama-2 in parts and does not say how they run; one after another is our reading."""
    load = Workload.model_validate(
        {
            "applications": [
                {
                    "name": "llama",
                    "rate_rps": 20,
                    "slo_ms": 400,
                    "stages": [
                        {"model": "gpt2", "name": "first"},
                        {"model": "gpt2", "name": "second", "after": ["first"]},
                        {"model": "bert", "name": "third", "after": ["second"], "part": 2.0},
                    ],
                }
            ]
        }
    )
    names = ["llama.first", "llama.second", "llama.third"]
    assert [(spec.name, spec.slo_ms) for spec in load.models] == list(zip(names, (100.0, 100.0, 200.0), strict=True))
    plan = solve(Usher(), load, Cluster.parse("v100:4"), thesis())
    assert plan.unserved == ()
    assert {replica.name for gpulet in plan.gpulets for replica in gpulet.models} == set(names)
    assert plan.applications == load.applications
