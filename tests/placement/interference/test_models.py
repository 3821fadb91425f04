"""What every interference model promises, how it is chosen by name, and what gpulet plans with it."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tenuto.errors import InvalidInputError, MissingProfileError
from tenuto.placement import Cluster
from tenuto.placement.interference import InterferenceModel, Resident
from tenuto.placement.interference.contention import Constants, Contention, shipped_constants
from tenuto.placement.interference.gpulet_linear import CONSTANTS, V100, GpuletLinear
from tenuto.placement.interference.named import NAMES, canonical_name, interference_models
from tenuto.placement.interference.utilisation import utilisation
from tenuto.placement.policies.gpulet.disturbance import Disturbance
from tenuto.placement.policies.gpulet.gpulet import GpuletPolicy
from tenuto.profiles import ModelProfile, Profile, Profiles
from tests.placement.policies.gpulet.turns import IGNITER, assert_turns_are_kept, carried, five_models, slowed_down
from tests.placement.published import decided, thesis

MODELS = IGNITER.for_type("v100")
ALL: dict[str, InterferenceModel] = {name: interference_models(name, ["v100"], IGNITER)["v100"] for name in NAMES}

residents = st.builds(
    Resident,
    st.sampled_from(list(MODELS.values())),
    st.integers(1, 32),
    st.sampled_from([20.0, 40.0, 50.0, 60.0, 80.0]),
)


@pytest.mark.parametrize("name", NAMES)
@given(own=residents, neighbours=st.lists(residents, max_size=4))
def test_neighbours_never_speed_up_and_one_more_never_helps(
    name: str, own: Resident, neighbours: list[Resident]
) -> None:
    factors = [ALL[name].slowdown(own, neighbours[:count]) for count in range(len(neighbours) + 1)]
    assert factors[0] == 1.0
    assert factors == sorted(factors)
    assert factors[-1] < 6


def test_several_neighbours_by_each_models_rule() -> None:
    own, near, far = (Resident(MODELS[name], 8, 20.0) for name in ("resnet50", "vgg19", "alexnet"))
    one, two = ([model.slowdown(own, [other]) for other in (near, far)] for model in (V100, Contention()))
    assert V100.slowdown(own, [near, far]) == max(one)
    assert Contention().slowdown(own, [near, far]) == pytest.approx(1 + (two[0] - 1) + (two[1] - 1))


def test_the_linear_model_is_the_papers_formula() -> None:
    model = GpuletLinear(0.1, 0.7, 0.3, 0.09, 0.9)
    own, other = Resident(MODELS["vgg19"], 8, 40.0), Resident(MODELS["ssd"], 4, 60.0)
    mine, others = MODELS["vgg19"].point(8, 40.0).metrics, MODELS["ssd"].point(4, 60.0).metrics
    l2, dram = mine["l2_util_pct"], mine["dram_util_pct"]
    l2_other, dram_other = others["l2_util_pct"], others["dram_util_pct"]
    expected = (0.1 * l2 + 0.7 * l2_other + 0.3 * dram + 0.09 * dram_other) / 100 + 0.9
    assert model.slowdown(own, [other]) == pytest.approx(expected)


def test_constants_for_whole_gpu_utilisations_scale_with_the_share() -> None:
    points = [{"batch_size": 4, "latency_ms": 10, "metrics": {"l2_util_pct": 20, "dram_util_pct": 40}}]
    model = ModelProfile.model_validate({"points": points})
    own, other = Resident(model, 4, 25.0), Resident(model, 4, 75.0)
    expected = 0.11290839 * 0.05 + 0.71595987 * 0.15 + 0.35486592 * 0.10 + 0.088203826 * 0.30 + 0.89536939
    assert CONSTANTS["2080ti"].slowdown(own, [other]) == pytest.approx(expected)


def test_utilisations_are_interpolated_and_never_invented() -> None:
    points = [
        {"batch_size": size, "share_pct": share, "latency_ms": 1, "metrics": {"l2_util_pct": size * share / 10}}
        for size in (2, 4)
        for share in (20, 40)
    ]
    model = ModelProfile.model_validate({"points": points})
    assert utilisation(Resident(model, 3, 30.0), "l2_util_pct") == pytest.approx(0.09)
    for size, share, metric in ((1, 20.0, "l2_util_pct"), (2, 50.0, "l2_util_pct"), (2, 20.0, "dram_util_pct")):
        with pytest.raises(MissingProfileError, match=metric):
            utilisation(Resident(model, size, share), metric)


def test_a_network_unlike_the_measured_ones_gets_the_trend_alone() -> None:
    trend_only = Contention(Constants(name="t", source="", trend=shipped_constants().trend))
    points = [
        {"batch_size": size, "share_pct": share, "latency_ms": 9.0 * size * 100 / share}
        for size in (1, 32)
        for share in (20, 50, 80)
    ]
    other = ModelProfile.model_validate({"points": points})
    assert other.gpu_ms == pytest.approx(9.0)
    own, unlike, like = (Resident(model, 8, 50.0) for model in (MODELS["vgg19"], other, MODELS["ssd"]))
    assert Contention().slowdown(own, [unlike]) == pytest.approx(trend_only.slowdown(own, [unlike]), abs=1e-6)
    assert abs(Contention().slowdown(own, [like]) - trend_only.slowdown(own, [like])) > 0.01


def test_names() -> None:
    assert [canonical_name(choice) for choice in (True, False, "true", "off", "Contention")] == [
        "gpulet",
        "none",
        "gpulet",
        "none",
        "contention",
    ]
    with pytest.raises(InvalidInputError, match="none, gpulet, igniter, contention"):
        GpuletPolicy(interference="physics")
    with pytest.raises(InvalidInputError, match=r"profiles\.v100\.coefficients"):
        decided(GpuletPolicy(interference="igniter"), five_models(vgg19=1), Cluster.parse("v100:1"), thesis())


def test_constants_of_ones_own_come_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    trend = shipped_constants().trend.model_copy(update={"constant": 1.5})
    mine = shipped_constants().model_copy(update={"name": "mine", "trend": trend})
    file.write_text(mine.dump())
    assert Constants.load(file) == mine
    name = canonical_name(f"contention:{file}")
    own, other = (Resident(MODELS[row], 8, 50.0) for row in ("vgg19", "ssd"))
    factor = interference_models(name, ["v100"], IGNITER)["v100"].slowdown(own, [other])
    assert factor == pytest.approx(Contention().slowdown(own, [other]) + 1.5 - shipped_constants().trend.constant)
    file.write_text(mine.dump().replace("latency_ratio", "latency_ration", 1))
    with pytest.raises(InvalidInputError, match="latency_ration"):
        interference_models(name, ["v100"], IGNITER)
    with pytest.raises(InvalidInputError, match="no such file"):
        GpuletPolicy(interference="contention:nowhere.yaml")


@pytest.mark.parametrize("name", NAMES[1:])
def test_gpulet_plans_with_every_interference_model(name: str) -> None:
    workload = five_models(alexnet=400, resnet50=400, ssd=200, vgg19=200)
    plan = decided(GpuletPolicy(interference=name), workload, Cluster.parse("v100:3"), IGNITER)
    assert carried(plan, workload)
    assert_turns_are_kept(plan, workload)
    assert slowed_down(plan)


@pytest.mark.parametrize("name", NAMES[1:])
def test_three_gpulets_on_a_gpu_keep_their_slos_beside_each_other(name: str) -> None:
    workload = five_models(alexnet=600, resnet50=200, ssd=60, vgg19=60)
    shares = (20.0, 40.0, 60.0, 80.0)
    policy = GpuletPolicy(interference=name, max_partitions=3, shares=shares)
    plan = decided(policy, workload, Cluster.parse("v100:2"), IGNITER)
    assert carried(plan, workload)
    assert_turns_are_kept(plan, workload)


def test_constants_of_another_gpu_type_are_named_in_the_notes() -> None:
    metrics = {"l2_util_pct": 5, "dram_util_pct": 5}
    points = [
        {"batch_size": 1, "share_pct": share, "latency_ms": 500.0 / share, "metrics": metrics}
        for share in (20, 40, 60, 80)
    ]
    row = {"name": "a", "gpu_type": "a100", "source": "test", "models": {"vgg19": {"points": points}}}
    for name, noted in (("gpulet", True), ("contention", True), ("none", False)):
        plan = decided(
            GpuletPolicy(interference=name),
            five_models(vgg19=2),
            Cluster.parse("a100:1"),
            Profiles([Profile.model_validate(row)]),
        )
        assert any("fitted on a V100" in note for note in plan.notes) is noted


@pytest.mark.parametrize("rates", [(0, 200, 600, 600, 600), (400, 600, 600, 600, 0), (200, 600, 0, 600, 600)])
def test_gpulets_beside_free_ones_are_not_filled_to_the_brim(rates: tuple[int, ...]) -> None:
    """Without that room the rest of their GPUs stays empty, and 188 of the 1,023 scenarios are refused."""
    names = ("alexnet", "resnet50", "resnet50_b", "ssd", "vgg19")
    workload = five_models(**dict(zip(names, rates, strict=True)))
    plan = decided(GpuletPolicy(interference=True), workload, Cluster.parse("v100:4"), IGNITER)
    assert_turns_are_kept(plan, workload)
    assert carried(plan, workload)


def test_of_models_that_take_turns_one_disturbs_at_a_time() -> None:
    own, near, far = (Resident(MODELS[name], 8, 40.0) for name in ("resnet50", "vgg19", "alexnet"))
    model = Contention()
    together = Disturbance(model).factor(own, [[near, far]])
    assert together == max(model.slowdown(own, [near]), model.slowdown(own, [far]))
    assert Disturbance(model).factor(own, [[near], [far]]) > together
    assert Disturbance(model).factor(own, [[], []]) == 1.0
