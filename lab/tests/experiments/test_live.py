"""Experiments on Ray Serve with emulated GPUs: what a time stretch changes, and one point for real."""

from __future__ import annotations

import pytest

from tenuto_lab.experiments.case import DEFERRED, ROUTER, Case, describe_case, mean_slowdowns, run_case
from tenuto_lab.experiments.live import run_live, stretched_plan
from tests.instruments.local_ray import LocalRay


def case(policy: str, gpus: int, duration_s: float = 1.0) -> Case:
    models = ("alexnet", "densenet121", "efficientnet_b7", "resnet50", "vgg19")
    return Case(policy, models, (500.0,) * 5, 200.0, gpus, gpus, 0.86668, duration_s, 0)


@pytest.mark.unit
def test_a_stretch_multiplies_times_and_divides_rates() -> None:
    _, plan = describe_case(case("wao-usher", 3))
    assert plan is not None
    live = stretched_plan(plan, 20.0)
    for before, after in zip(plan.gpulets, live.gpulets, strict=True):
        assert (before.id, before.gpu, before.share_pct) == (after.id, after.gpu, after.share_pct)
        for old, new in zip(before.models, after.models, strict=True):
            assert old.latency is not None
            assert new.latency is not None
            assert new.batch_size == old.batch_size
            assert new.latency.at(new.batch_size) == pytest.approx(20.0 * old.latency.at(old.batch_size))
    assert {spec.slo_ms for spec in live.models} == {4000.0}
    assert {spec.rate_rps for spec in live.models} == {25.0}


@pytest.mark.unit
def test_the_mean_slowdown_counts_how_long_neighbours_run() -> None:
    """alexnet at 500 r/s runs 18 % of the time, so resnet50's 6.8 ms become 8.0, as the thesis observed."""
    _, plan = describe_case(case("wsm-milp", 5))
    assert plan is not None
    means = mean_slowdowns(plan)
    (resnet50,) = (value for (_, model), value in means.items() if model == "resnet50")
    assert 6.8 * resnet50 == pytest.approx(8.0, rel=0.01)
    assert {value for (_, model), value in means.items() if model == "vgg19"} == {1.0}


@pytest.mark.ray
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::DeprecationWarning")
def test_a_live_point_has_the_load_and_the_form_of_its_simulation(local_ray: LocalRay) -> None:
    """At a tenth of the speed. How near its goodput comes is what `tenuto experiment --live` prints."""
    local_ray.connect()
    one = case("ao-milp", 4, duration_s=0.25)
    finished = run_live([one], [ROUTER, DEFERRED], stretch=10.0, report=lambda *_: None, say=lambda _: None)
    assert finished.is_whole
    (row,) = finished.rows
    simulated = run_case(one)
    for scheduler in (ROUTER, DEFERRED):
        measured, expected = row["runs"][scheduler], simulated["runs"][scheduler]
        assert expected.keys() <= measured.keys()
        assert measured["models"].keys() == expected["models"].keys()
        assert measured["offered_rps"] == pytest.approx(expected["offered_rps"], rel=0.05)  # of the unserved: the mean
        assert 0.0 < measured["goodput_rps"] <= measured["offered_rps"]
        assert measured["models"]["efficientnet_b7"]["goodput_rps"] == 0.0  # unserved on four GPUs
