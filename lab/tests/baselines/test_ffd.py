"""First-fit decreasing on every kind of profile it may meet."""

from __future__ import annotations

import pytest

from tenuto.errors import InvalidInputError
from tenuto.placement import Cluster, Plan, Workload, solve
from tenuto.profiles import Profile, Profiles
from tenuto.profiles.shipped import load_shipped
from tenuto_lab.baselines.ffd import FirstFitDecreasing
from tests.placement.published import VISION, decided, equal_rates, placed, planned, v100s

LINE = {"alpha_ms": 4.212, "beta_ms": 20.288}


def workload(*models: dict[str, object]) -> Workload:
    return Workload.model_validate({"models": models})


def assert_time_shares_hold(plan: Plan, fill: float = 0.8) -> None:
    """Every unrestricted gpu-let: busy at most `fill`, and one foreign batch plus the own one within each SLO."""
    for gpulet in plan.gpulets:
        busy = 0.0
        for replica in gpulet.models:
            assert replica.rate_rps is not None
            assert replica.latency_ms is not None
            busy += replica.rate_rps * replica.latency_ms / replica.batch_size / 1000
            others = max((r.latency_ms or 0.0 for r in gpulet.models if r is not replica), default=0.0)
            assert replica.latency_ms <= plan.model(replica.name).slo_ms / 2 + 1e-6
            assert replica.latency_ms + others <= plan.model(replica.name).slo_ms + 1e-6
        assert busy <= fill + 1e-6


def cpu_profile() -> Profile:
    models = {
        "mobilenet_v2": {1: 22.0, 2: 35.0, 4: 61.0, 8: 110.0},
        "resnet50": {1: 55.0, 2: 92.0, 4: 160.0, 8: 300.0},
        "bert": {1: 48.0, 2: 80.0, 4: 150.0, 8: 290.0},
    }
    return Profile.model_validate(
        {
            "name": "here",
            "gpu_type": "cpu",
            "source": "test",
            "models": {
                name: {
                    "points": [{"batch_size": b, "latency_ms": ms, "memory_mib": 300.0} for b, ms in by_size.items()]
                }
                for name, by_size in models.items()
            },
        }
    )


@pytest.mark.parametrize("cluster", ["cpu:1", "cpu:2"])
def test_three_measured_models_share_a_processor_in_time(cluster: str) -> None:
    load = workload(
        {"name": "mobilenet_v2", "rate_rps": 10, "slo_ms": 400},
        {"name": "resnet50", "rate_rps": 4, "slo_ms": 800},
        {"name": "bert", "rate_rps": 3, "slo_ms": 800},
    )
    plan = decided(FirstFitDecreasing(), load, Cluster.parse(cluster), Profiles([cpu_profile()]))
    assert not plan.unserved
    assert plan.expected.goodput_rps == pytest.approx(17)
    assert len(plan.gpulets) == 1
    assert plan.gpulets[0].share_pct is None
    done = solve(FirstFitDecreasing(), load, Cluster.parse(cluster), Profiles([cpu_profile()]))
    assert done.gpulets[0].held_mib == 900
    assert_time_shares_hold(plan)


def test_batches_grow_only_as_far_as_the_gpu_needs() -> None:
    light = workload({"name": "a", "rate_rps": 1, "slo_ms": 100, "latency": LINE})
    plan = decided(FirstFitDecreasing(), light, v100s(1), Profiles([]))
    assert placed(plan) == {"a": [1]}
    heavy = workload({"name": "a", "rate_rps": 100, "slo_ms": 100, "latency": LINE})
    plan = decided(FirstFitDecreasing(), heavy, v100s(1), Profiles([]))
    (size,) = placed(plan)["a"]
    assert 100 * (LINE["alpha_ms"] * size + LINE["beta_ms"]) / size <= 800
    assert 100 * (LINE["alpha_ms"] * (size - 1) + LINE["beta_ms"]) / (size - 1) > 800


def test_a_model_above_one_gpu_is_split_into_whole_gpus_and_a_rest() -> None:
    load = workload({"name": "a", "rate_rps": 300, "slo_ms": 100, "latency": LINE})
    plan = decided(FirstFitDecreasing(), load, v100s(4), Profiles([]))
    rates = [r.rate_rps for g in plan.gpulets for r in g.models]
    assert sum(rate or 0 for rate in rates) == pytest.approx(300)
    assert len(rates) == 3
    assert rates[0] == rates[1] == max(rates)
    assert_time_shares_hold(plan)


def test_what_finds_no_room_is_told_with_numbers() -> None:
    load = workload(
        {"name": "a", "rate_rps": 700, "slo_ms": 100, "latency": LINE},
        {"name": "b", "rate_rps": 10, "slo_ms": 100, "latency": LINE},
    )
    plan = decided(FirstFitDecreasing(), load, v100s(4), Profiles([]))
    assert plan.unserved == ("b",)
    assert "% of a v100" in plan.unserved_reasons["b"]
    assert plan.expected.models["a"].goodput_rps == pytest.approx(450.7, abs=1)
    assert plan.unserved_reasons["a"].startswith("no GPU time left")


def test_half_the_slo_is_the_limit() -> None:
    load = workload({"name": "a", "rate_rps": 1, "slo_ms": 40, "latency": LINE})
    plan = decided(FirstFitDecreasing(), load, v100s(1), Profiles([]))
    assert "SLO below batch 1" in plan.unserved_reasons["a"]


def test_measured_shares_give_space_sharing() -> None:
    profile = load_shipped("igniter-v100")
    names = sorted(profile.models)[:3]
    plan = planned(FirstFitDecreasing(), equal_rates(names, 100, 60), v100s(4), Profiles([profile]))
    assert not plan.unserved
    for gpu in plan.gpus:
        assert sum(g.effective_share_pct for g in plan.on_gpu(gpu.id)) <= 100
    for gpulet in plan.gpulets:
        (replica,) = gpulet.models
        assert gpulet.share_pct in profile.models[replica.name].shares()
        assert (replica.latency_ms or 0) <= 30
        smaller = [s for s in profile.models[replica.name].shares() if s < (gpulet.share_pct or 0)]
        for share in smaller:  # none of the smaller shares would have carried the rate within half of the SLO
            latency = profile.models[replica.name].latency(share)
            assert all(100 * latency.at(b) / b > 800 or latency.at(b) > 30 for b in range(1, 33) if _known(latency, b))


def _known(latency: object, batch: int) -> bool:
    return batch <= getattr(latency, "largest", batch)


def test_mps_off_refuses_space_where_only_shares_were_measured() -> None:
    profile = load_shipped("igniter-v100")
    name = min(profile.models)
    load = equal_rates([name], 10, 500).model_copy(update={"mps": "off"})
    plan = planned(FirstFitDecreasing(), load, v100s(1), Profiles([profile]))
    if 100.0 not in profile.models[name].shares():
        assert "taking turns needs the whole GPU" in plan.unserved_reasons[name]
    else:
        assert plan.gpulets[0].share_pct is None


def test_space_on_a_whole_gpu_profile_is_an_assumption_and_says_so() -> None:
    load = workload(
        {"name": "a", "rate_rps": 5, "slo_ms": 500, "latency": LINE},
        {"name": "b", "rate_rps": 5, "slo_ms": 500, "latency": LINE},
    )
    plan = decided(FirstFitDecreasing(sharing="space"), load, v100s(1), Profiles([]))
    assert any("l(b)/(s/100)" in note for note in plan.notes)
    assert len(plan.gpulets) == 2
    for gpulet in plan.gpulets:
        whole = LINE["alpha_ms"] * gpulet.models[0].batch_size + LINE["beta_ms"]
        assert gpulet.models[0].latency_ms == pytest.approx(whole * 100 / (gpulet.share_pct or 100))


def test_the_thesis_profile_on_four_v100() -> None:
    plan = planned(FirstFitDecreasing(), equal_rates((*VISION, "bert", "mobilenet_v2"), 60, 250), v100s(4))
    assert not plan.unserved
    assert_time_shares_hold(plan)


def test_memory_keeps_models_apart() -> None:
    plan = planned(
        FirstFitDecreasing(),
        equal_rates(["vgg19", "gpt2"], 10, 600),
        Cluster.model_validate({"nodes": [{"name": "n", "gpus": [{"type": "v100", "count": 2, "memory_mib": 1600}]}]}),
    )
    assert plan.expected.gpus_used == 2
    assert not plan.unserved


def test_an_elastic_cluster_takes_the_cheapest_type_that_carries_it() -> None:
    load = workload({"name": "a", "rate_rps": 500, "slo_ms": 100, "latency": LINE})
    plan = decided(FirstFitDecreasing(), load, Cluster.parse("v100:1,t4:1", elastic=True), Profiles([]))
    assert {gpu.type for gpu in plan.gpus} == {"t4"}
    assert plan.expected.goodput_rps == pytest.approx(500)


@pytest.mark.parametrize(("option", "value"), [("fill_pct", 0), ("sharing", "maybe"), ("max_batch", 0)])
def test_options_out_of_range_are_refused(option: str, value: object) -> None:
    with pytest.raises(InvalidInputError, match=option):
        FirstFitDecreasing(**{option: value})
