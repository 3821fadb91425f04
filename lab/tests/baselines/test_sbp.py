"""Squishy bin packing as a placement policy."""

from __future__ import annotations

import pytest

from tenuto.errors import InvalidInputError
from tenuto.placement import Cluster, Plan, Workload
from tenuto.profiles import Profiles
from tenuto.profiles.shipped import load_shipped
from tenuto_lab.baselines.sbp import SquishyBinPacking
from tests.placement.policies.gpulet.turns import IGNITER, assert_turns_are_kept, five_models
from tests.placement.published import decided


def line(name: str, rate: float, slo: float, alpha: float = 1.0, beta: float = 5.0) -> dict[str, object]:
    return {"name": name, "rate_rps": rate, "slo_ms": slo, "latency": {"alpha_ms": alpha, "beta_ms": beta}}


def placed(load: list[dict[str, object]], gpus: str = "v100:8", **options: object) -> Plan:
    workload = Workload.model_validate({"models": load})
    plan = decided(SquishyBinPacking(**options), workload, Cluster.parse(gpus), Profiles([]))  # type: ignore[arg-type]
    assert_turns_are_kept(plan, workload)
    return plan


def test_whole_gpus_take_full_batches_and_the_rest_a_longer_cycle() -> None:
    full = 1000 * 5 / 10  # 2 (5 + 5) <= 20 at a batch of 5
    plan = placed([line("a", 2.5 * full, 20)])
    assert [(g.share_pct, g.models[0].batch_size, g.duty_cycle_ms) for g in plan.gpulets[:2]] == [(None, 5, 10)] * 2
    rest = plan.gpulets[2]
    assert rest.models[0].rate_rps == pytest.approx(0.5 * full)
    assert rest.duty_cycle_ms is not None
    assert rest.duty_cycle_ms > 10
    assert len(plan.gpulets) == 3


def test_remainders_share_a_gpu_in_time() -> None:
    plan = placed([line("a", 60, 100), line("b", 50, 100), line("c", 40, 100)])
    assert [[r.name for r in g.models] for g in plan.gpulets] == [["a", "b", "c"]]
    assert plan.expected.goodput_rps == pytest.approx(150)
    assert not plan.notes


def test_what_finds_no_gpu_is_named() -> None:
    plan = placed([line("a", 5000, 20), line("b", 5000, 20)], "v100:3")
    assert plan.unserved == ("b",)
    assert plan.unserved_reasons["b"]
    assert plan.expected.models["a"].goodput_rps == pytest.approx(1500)


def test_a_slo_that_leaves_no_room_to_wait_is_unserved() -> None:
    plan = placed([line("a", 10, 11)])  # one request takes 6 ms, two 12
    assert plan.unserved == ("a",)
    assert "two single requests" in plan.unserved_reasons["a"]


def test_halves_need_a_profile_with_shares() -> None:
    assert placed([line("a", 10, 50)], halves=True).unserved == ("a",)
    workload = five_models(alexnet=400, vgg19=200)
    plan = decided(SquishyBinPacking(halves=True), workload, Cluster.parse("v100:4"), IGNITER)
    assert {g.share_pct for g in plan.gpulets} == {50}
    assert not plan.unserved
    assert_turns_are_kept(plan, workload)


def test_an_elastic_cluster_grows_and_takes_the_cheapest_type() -> None:
    workload = Workload.model_validate({"models": [line("a", 5000, 20), line("b", 30, 50)]})
    plan = decided(SquishyBinPacking(), workload, Cluster.parse("v100:1,t4:1", elastic=True), Profiles([]))
    assert {gpu.type for gpu in plan.gpus} == {"t4"}
    assert plan.expected.goodput_rps == pytest.approx(5030)


def test_memory_keeps_models_apart() -> None:
    thesis = Profiles([load_shipped("thesis-v100")])
    load = Workload.model_validate(
        {"models": [{"name": f"vgg{i}", "profile": "vgg19", "rate_rps": 20, "slo_ms": 900} for i in range(4)]}
    )
    roomy = decided(SquishyBinPacking(), load, Cluster.parse("v100:4"), thesis)
    small = {"type": "v100", "count": 4, "memory_mib": 2000}
    cluster = Cluster.model_validate({"nodes": [{"name": "n", "gpus": [small]}]})
    tight = decided(SquishyBinPacking(), load, cluster, thesis)
    assert tight.expected.gpus_used > roomy.expected.gpus_used
    assert not tight.unserved


def test_options_out_of_range_are_refused() -> None:
    with pytest.raises(InvalidInputError, match="max_batch"):
        SquishyBinPacking(max_batch=0)
