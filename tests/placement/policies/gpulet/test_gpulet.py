"""gpulet: knees, splits, merging in time, interference, and what every plan keeps."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tenuto.errors import InvalidInputError
from tenuto.placement import Cluster, Policy
from tenuto.placement.policies.gpulet.duty_cycle import Asked, find_cycle
from tenuto.placement.policies.gpulet.gpulet import GpuletPolicy
from tenuto.placement.policies.gpulet.knee import knee_by_chord, knee_by_curvature
from tenuto_lab.baselines.sbp import SquishyBinPacking
from tests.placement.policies.gpulet.turns import (
    FIVE,
    IGNITER,
    assert_turns_are_kept,
    carried,
    five_models,
    slowed_down,
)
from tests.placement.published import decided

POLICIES: dict[str, Policy] = {
    "gpulet": GpuletPolicy(),
    "gpulet+int": GpuletPolicy(interference=True),
    "gpulet, 3 parts": GpuletPolicy(max_partitions=3),
    "gpulet, merging": GpuletPolicy(merge_without_free=True),
    "sbp": SquishyBinPacking(),
    "sbp, halves": SquishyBinPacking(halves=True),
}

MERGING = GpuletPolicy(max_partitions=1, merge_without_free=True)


def test_the_knee_is_where_more_compute_pays_less() -> None:
    curve = [(20.0, 100.0), (40.0, 200.0), (60.0, 210.0), (80.0, 220.0), (100.0, 230.0)]
    assert knee_by_curvature(curve) == 40
    assert knee_by_chord(curve) == 40
    straight = [(20.0, 20.0), (50.0, 50.0), (100.0, 100.0)]
    assert knee_by_curvature(straight) == 100
    assert knee_by_chord(straight) == 100


def test_a_duty_cycle_is_found_whenever_there_is_one() -> None:
    table = [0.0, *(5.0 + b for b in range(1, 6))]
    alone = find_cycle([Asked(500, 20, table)])
    assert alone is not None
    assert (alone.duty_ms, alone.batch_sizes) == (10, (5,))
    assert find_cycle([Asked(501, 20, table)]) is None
    both = find_cycle([Asked(100, 30, table), Asked(100, 30, table)])
    assert both is not None
    assert both.busy_ms <= both.duty_ms <= 30 - table[max(both.batch_sizes)]


def test_small_models_take_turns_and_large_ones_split_a_gpu() -> None:
    workload = five_models(alexnet=600, resnet50=500, vgg19=200)
    plan = decided(GpuletPolicy(), workload, Cluster.parse("v100:4"), IGNITER)
    assert carried(plan, workload)
    assert_turns_are_kept(plan, workload)
    assert plan.expected.gpus_used < 3
    assert any(len(gpulet.models) > 1 for gpulet in plan.gpulets)
    assert any(gpulet.effective_share_pct < 100 for gpulet in plan.gpulets)
    assert all(len(plan.on_gpu(gpu.id)) <= 2 for gpu in plan.gpus)


def test_models_take_turns_on_a_full_cluster_only_where_asked() -> None:
    workload, cluster = five_models(vgg19=260, resnet50=100), Cluster.parse("v100:1")
    hosts = [
        decided(policy, workload, cluster, IGNITER).gpulets for policy in (GpuletPolicy(max_partitions=1), MERGING)
    ]
    assert [[len(gpulet.models) for gpulet in gpulets] for gpulets in hosts] == [[1], [2]]


def test_interference_slows_neighbours_down_and_keeps_their_slo() -> None:
    workload = five_models(resnet50=500, vgg19=150)
    plan = decided(GpuletPolicy(interference=True), workload, Cluster.parse("v100:2"), IGNITER)
    assert_turns_are_kept(plan, workload)
    assert any(len(gpulets) > 1 for gpulets in plan.by_gpu().values())
    assert slowed_down(plan) == {g.id for gpulets in plan.by_gpu().values() if len(gpulets) > 1 for g in gpulets}


def test_without_mps_gpus_stay_whole() -> None:
    workload = five_models(resnet50=300, vgg19=150).model_copy(update={"mps": "off"})
    plan = decided(GpuletPolicy(), workload, Cluster.parse("v100:2"), IGNITER)
    assert {gpulet.share_pct for gpulet in plan.gpulets} == {None}


def test_an_elastic_cluster_grows() -> None:
    workload = five_models(ssd=2000)
    plan = decided(GpuletPolicy(), workload, Cluster.parse("v100:1", elastic=True), IGNITER)
    assert carried(plan, workload)
    assert plan.expected.gpus_used >= 6


@pytest.mark.parametrize("options", [{"max_partitions": 0}, {"shares": (100.0,)}, {"knee": "sharp"}, {"max_batch": 0}])
def test_options_out_of_range_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(InvalidInputError, match=next(iter(options))):
        GpuletPolicy(**options)  # type: ignore[arg-type]


rates = st.lists(st.sampled_from([0, 1, 30, 200, 600, 2000]), min_size=5, max_size=5)


@pytest.mark.parametrize("name", POLICIES)
@given(rates=rates, gpus=st.integers(1, 3), elastic=st.booleans())
@settings(max_examples=settings.default.max_examples // 3, suppress_health_check=[HealthCheck.differing_executors])
def test_turns_are_kept_and_an_elastic_cluster_carries_every_rate(
    name: str, rates: list[int], gpus: int, elastic: bool
) -> None:
    workload = five_models(**{model.replace("-", "_"): rate for model, rate in zip(FIVE, rates, strict=True)})
    plan = decided(POLICIES[name], workload, Cluster.parse(f"v100:{gpus}", elastic=elastic), IGNITER)
    assert_turns_are_kept(plan, workload)
    if elastic:
        assert carried(plan, workload)
