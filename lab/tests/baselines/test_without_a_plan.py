"""Guided self-tuning shares in space only, from the best partition; MPS as it comes spreads models without shares."""

from __future__ import annotations

from itertools import product

from tenuto.placement import Cluster, solve
from tenuto.placement.policies.gpulet.gpulet import GpuletPolicy
from tenuto_lab.baselines.ideal import Ideal
from tenuto_lab.baselines.without_a_plan import MpsDefault, SelfTuning
from tests.placement.policies.gpulet.turns import FIVE, IGNITER, assert_turns_are_kept, carried, five_models
from tests.placement.published import decided

SCENARIOS = list(product((0, 200, 400, 600), repeat=len(FIVE)))[1::93]


def test_self_tuning_accepts_what_space_alone_carries_and_ideal_more() -> None:
    cluster = Cluster.parse("v100:2")
    space, both = 0, 0
    for rates in SCENARIOS:
        workload = five_models(**{name.replace("-", "_"): rate for name, rate in zip(FIVE, rates, strict=True)})
        plan = SelfTuning(max_steps=2000).place(workload, cluster, IGNITER)
        ideal = Ideal(max_steps=2000).place(workload, cluster, IGNITER)
        assert_turns_are_kept(plan, workload)
        assert all(len(gpulet.models) == 1 for gpulet in plan.gpulets)
        if carried(plan, workload):
            space += 1
            assert carried(ideal, workload)
        both += carried(ideal, workload)
        in_space = GpuletPolicy(turns=False).place(workload, cluster, IGNITER)
        assert not carried(in_space, workload) or carried(plan, workload)  # the best partition, not a good one
    assert 0 < space < both


def test_self_tuning_on_more_gpus_than_can_be_searched_says_so() -> None:
    workload = five_models(resnet50=600, ssd=200, vgg19=200)
    plan = SelfTuning(max_gpus=2).place(workload, Cluster.parse("v100:3"), IGNITER)
    assert carried(plan, workload)
    assert any("not the best partition" in note for note in plan.notes)


def test_mps_as_it_comes_has_no_shares_and_spreads_by_load() -> None:
    workload = five_models(alexnet=400, resnet50=1500, ssd=200, vgg19=200)
    plan = decided(MpsDefault(), workload, Cluster.parse("v100:3"), IGNITER)
    assert {gpulet.share_pct for gpulet in plan.gpulets} == {None}
    assert all(len(gpulet.models) == 1 for gpulet in plan.gpulets)
    assert all(plan.by_gpu().values())  # none idle while others are shared
    assert sum(gpulet.models[0].name == "resnet50" for gpulet in plan.gpulets) == 2  # more than one GPU's load
    assert carried(plan, workload)  # what it believes; beside neighbours it is less
    crowded = solve(MpsDefault(), workload, Cluster.parse("v100:2"), IGNITER)
    assert crowded.believed is not None
    assert crowded.expected.goodput_rps < 0.95 * crowded.believed.goodput_rps
    assert crowded.overcommits


def test_mps_as_it_comes_buys_a_gpu_where_none_has_time_left() -> None:
    workload = five_models(resnet50=1500, vgg19=400)
    plan = decided(MpsDefault(), workload, Cluster.parse("v100:1", elastic=True), IGNITER)
    assert carried(plan, workload)
    assert plan.expected.gpus_used == 3
