"""Tenuto's own policy: what its trials say, that it is no worse than its starts, and what it does at the edges."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tenuto.batching.core.system import NetworkDelay
from tenuto.batching.planning.judging import Forecast, Worth
from tenuto.batching.planning.layout import Builder, Slot, layout_of
from tenuto.batching.planning.moves import common_layouts, moves
from tenuto.batching.planning.policy import TenutoPolicy
from tenuto.batching.planning.trial import Trials
from tenuto.errors import InvalidInputError
from tenuto.placement import Cluster, Plan, Workload, load_policy, solve
from tenuto.placement.interference import NoInterference
from tenuto.placement.interference.named import interference_models
from tenuto.profiles import Profiles
from tenuto.profiles.shipped import load_shipped
from tests.placement.policies.gpulet.turns import five_models

THESIS = Profiles([load_shipped("thesis-v100")])
IGNITER = Profiles([load_shipped("igniter-v100")])
VISION = ("alexnet", "densenet121", "efficientnet_b7", "resnet50", "vgg19")
QUICK: dict[str, Any] = {"requests": 4_000, "tries": 12}


def workload(*names: str, rate: float = 500.0, slo: float = 200.0, **more: Any) -> Workload:
    return Workload.model_validate(
        {"models": [{"name": name, "rate_rps": rate, "slo_ms": slo, **more} for name in names]}
    )


def v100s(count: int, *, elastic: bool = False) -> Cluster:
    return Cluster.parse(f"v100:{count}", elastic=elastic)


def planned(load: Workload, cluster: Cluster, profiles: Profiles = THESIS, **options: Any) -> Plan:
    return solve(TenutoPolicy(**{**QUICK, **options}), load, cluster, profiles)


def trials(load: Workload, requests: int = 4_000, seed: int = 0) -> Trials:
    return Trials(load.models, requests=requests, seed=seed, scheduler="deferred", network=NetworkDelay())


def test_serves_on_four_gpus_what_usher_needs_six_for() -> None:
    load = workload(*VISION)
    plan = planned(load, v100s(4))
    assert plan.unserved == ()
    assert plan.expected.goodput_rps == pytest.approx(2500, rel=0.01)
    assert trials(load, 20_000, seed=7).run(plan).keeps(0.99)


def test_no_worse_than_its_starts_on_the_trials_arrivals() -> None:
    load, cluster = workload(*VISION), v100s(2)
    own = planned(load, cluster)
    builder = Builder(load, THESIS, interference_models("contention", ("v100",), THESIS), max_batch=128)
    run = trials(load).run
    mine = run(own).ok_rps.sum()
    for name in ("symphony", "usher", "sbp", "gpulet", "ffd"):
        layout, caps = layout_of(solve(load_policy(name), load, cluster, THESIS), cluster.gpus, builder)
        other = builder.plan(layout, cluster.gpus, cluster, caps)
        assert other is not None
        assert mine >= 0.995 * run(other).ok_rps.sum(), name


def test_no_layout_takes_the_place_of_a_start_that_serves_more_on_other_arrivals() -> None:
    # Thesis section 6.2.2 on one GPU: the model of queueing prefers layouts that serve 3 % less than symphony's plan.
    load, cluster = workload("resnet50", "mobilenet_v2", "bert", "gpt2", rate=300.0, slo=300.0), v100s(1)
    start = solve(load_policy("symphony"), load, cluster, THESIS)
    run = trials(load, 20_000, seed=7).run
    assert run(planned(load, cluster)).value >= 0.999 * run(start).value


def test_where_a_trial_disappoints_what_the_model_found_to_be_enough_is_improved() -> None:
    load = five_models(alexnet=200, ssd=200, vgg19=600)
    plan = planned(load, v100s(2), IGNITER, starts=("igniter",), tries=40)
    assert trials(load, 20_000, seed=7).run(plan).keeps(0.99)  # without, 98.1 % of vgg19


def test_starts_keep_the_batches_that_fit_because_working_memory_counts_once() -> None:
    cluster = v100s(1)
    load = workload(*VISION, "mobilenet_v2", "inception_v3", "resnext50_32x4d", rate=50.0, slo=2_000.0)
    start = solve(load_policy("symphony"), load, cluster, THESIS)
    builder = Builder(load, THESIS, interference_models("contention", ("v100",), THESIS), max_batch=128)
    layout, caps = layout_of(start, cluster.gpus, builder)
    kept = builder.plan(layout, cluster.gpus, cluster, caps)
    assert kept is not None
    assert sum(replica.memory_mib or 0.0 for replica in start.gpulets[0].models) > cluster.gpus[0].memory_mib
    assert kept.gpulets[0].held_mib == pytest.approx(start.gpulets[0].held_mib)
    assert {r.name: r.batch_size for r in kept.gpulets[0].models} == {
        r.name: r.batch_size for r in start.gpulets[0].models
    }


def test_a_start_loses_only_the_models_that_cannot_be_in_time_there() -> None:
    load, cluster = workload("alexnet", "resnet50", "vgg19", slo=30.0), v100s(1)
    builder = Builder(load, THESIS, interference_models("contention", ("v100",), THESIS), max_batch=128)
    gpulets = [{"id": f"n0/0/{at}", "gpu": "n0/0", "share_pct": share, "models": [{"name": name, "batch_size": 2}]}
               for at, share, name in (("a", 5, "vgg19"), ("b", 60, "alexnet"), ("c", 35, "resnet50"))]  # fmt: skip
    plan = Plan.model_validate({
        "schema": 1, "policy": {"name": "other"}, "gpus": [{"id": "n0/0", "type": "v100"}], "gpulets": gpulets,
    })  # fmt: skip
    layout, caps = layout_of(plan, cluster.gpus, builder)
    assert layout == ((Slot(60.0, ("alexnet",)), Slot(35.0, ("resnet50",))),)
    assert caps == {("n0/0/a", "alexnet"): 2, ("n0/0/b", "resnet50"): 2}


def test_an_elastic_cluster_gets_the_fewest_gpus_found() -> None:
    load = workload(*VISION)
    plan = planned(load, v100s(1, elastic=True))
    assert plan.expected.gpus_used == len(plan.gpus) == 4
    assert solve(load_policy("usher"), load, v100s(1, elastic=True), THESIS).expected.gpus_used == 6
    assert all(model.goodput_rps >= 0.99 * 500 for model in plan.expected.models.values())


def test_where_there_is_room_no_more_processes_run_than_it_takes() -> None:
    plan = planned(workload("resnet50", rate=20.0), v100s(4))
    assert [gpulet.gpu for gpulet in plan.gpulets] == ["n0/0"]
    assert plan.expected.goodput_rps == pytest.approx(20.0)


def test_cheaper_types_are_bought_where_they_do() -> None:
    load = Workload.model_validate(
        {"models": [{"name": "m", "rate_rps": 50, "slo_ms": 100, "latency": {"alpha_ms": 1, "beta_ms": 5}}]}
    )
    plan = planned(load, Cluster.parse("v100:1,t4:1", elastic=True))
    assert [gpu.type for gpu in plan.gpus] == ["t4"]


def test_same_plan_every_time_and_through_yaml() -> None:
    load = workload("alexnet", "vgg19", rate=900)
    before = load.model_copy(deep=True)
    plan = planned(load, v100s(1))
    assert plan == planned(load, v100s(1)) == Plan.from_data(plan.to_data())
    assert load == before


def test_shares_are_used_where_they_were_measured() -> None:
    rows = [("a", "alexnet", 15, 400), ("r", "resnet50", 40, 300), ("v", "vgg19", 60, 150)]
    load = Workload.model_validate(
        {"models": [{"name": n, "profile": p, "slo_ms": slo, "rate_rps": rate} for n, p, slo, rate in rows]}
    )
    plan = planned(load, v100s(1), IGNITER, starts=("igniter",), requests=8_000)
    assert not plan.unserved
    assert sum(gpulet.effective_share_pct for gpulet in plan.gpulets) <= 100 + 1e-6


def test_what_serves_nothing_says_why() -> None:
    plan = TenutoPolicy(**QUICK).place(workload("vgg19", slo=1.0), v100s(1), THESIS)
    assert plan.unserved == ("vgg19",)
    assert "within its SLO" in plan.unserved_reasons["vgg19"]
    assert planned(Workload(), v100s(1)).gpulets == ()


def test_memory_limits_batches_and_neighbours() -> None:
    cluster = Cluster.model_validate(
        {"nodes": [{"name": "n0", "gpus": [{"type": "v100", "count": 2, "memory_mib": 3000}]}]}
    )
    plan = planned(workload(*VISION, rate=100), cluster)
    for gpu in plan.gpus:
        assert sum(gpulet.held_mib or 0.0 for gpulet in plan.on_gpu(gpu.id)) <= 3000
    assert "vgg19" not in plan.unserved


def test_no_shares_without_mps() -> None:
    load = workload("alexnet", "resnet50", rate=3000).model_copy(update={"mps": "off"})
    plan = planned(load, v100s(1), IGNITER, starts=("sbp",))
    assert all(gpulet.share_pct is None for gpulet in plan.gpulets)


def test_wrong_options_are_all_named() -> None:
    with pytest.raises(InvalidInputError) as caught:
        TenutoPolicy(tries=0, attainment=1.5, seed=-1, network_ms=(1.0, float("inf")), starts=("tenuto",))
    paths = {problem.path.removeprefix("--option ") for problem in caught.value.problems}
    assert paths == {"tries", "attainment", "seed", "network_ms", "starts"}
    with pytest.raises(InvalidInputError, match="unknown scheduler"):
        TenutoPolicy(scheduler="lazy")
    with pytest.raises(InvalidInputError, match="no such interference model"):
        TenutoPolicy(interference="magic")


def test_policies_that_cannot_plan_are_left_out_and_unknown_ones_refused() -> None:
    assert planned(workload("alexnet"), v100s(1), starts=("igniter", "none")).unserved == ()
    with pytest.raises(InvalidInputError, match="unknown policy"):
        planned(workload("alexnet"), v100s(1), starts=("nobody",))


def test_a_trial_that_cannot_reach_its_floor_ends_early() -> None:
    load, cluster = workload(*VISION, rate=2_000), v100s(1)
    plan = solve(load_policy("symphony"), load, cluster, THESIS)
    run = trials(load, 20_000)
    whole = run.run(plan)
    assert whole.value > 0
    assert run.run(plan, floor=0.9 * whole.value).value == pytest.approx(whole.value)
    assert run.run(plan, floor=0.99 * run.offered_value).value == -1.0


def test_forecasts_and_trials_agree_in_themselves_and_nearly_with_each_other() -> None:
    load = workload(*VISION)
    plan = planned(load, v100s(2))
    forecast = Forecast(load.models, Worth(load.models, load.objective)).of(plan)
    trial = trials(load).run(plan)
    for judged in (forecast, trial):
        assert judged.carried_rps.sum(axis=0) == pytest.approx(judged.ok_rps)
        assert ((judged.busy >= 0) & (judged.busy <= 1 + 1e-9)).all()
        assert (judged.largest.max(axis=0) > 0).all()
        assert judged.keeps(0.0)
    assert forecast.value / load.rate_rps == pytest.approx(trial.value / trial.offered_rps.sum(), abs=0.05)


def test_few_layouts_are_tried_and_many_judged() -> None:
    search_notes = planned(workload(*VISION, rate=700), v100s(2)).notes[0]
    judged, tried = (int(part.split()[0]) for part in search_notes.split("; ")[1].split(", "))
    assert judged > 20
    assert 1 <= tried <= 4


def test_trial_arrivals_have_each_models_rate_and_variation() -> None:
    load = Workload.model_validate(
        {
            "models": [
                {"name": "alexnet", "rate_rps": 400, "slo_ms": 200},
                {"name": "vgg19", "rate_rps": 100, "slo_ms": 200, "arrival": {"process": "uniform"}},
            ]
        }
    )
    run = trials(load, 40_000)
    gaps = [np.diff(run.times_ms[run.index == model]) for model in (0, 1)]
    assert [1000 / gap.mean() for gap in gaps] == pytest.approx([400, 100], rel=0.03)
    assert gaps[0].std() / gaps[0].mean() == pytest.approx(1.0, abs=0.05)
    assert gaps[1].std() / gaps[1].mean() < 0.05


def test_moves_are_layouts_that_differ_on_one_gpu() -> None:
    load, cluster = workload(*VISION), v100s(3)
    builder = Builder(load, THESIS, {"v100": NoInterference()}, max_batch=64)
    (layout, *_) = common_layouts(cluster.gpus, VISION, builder)
    plan = builder.plan(layout, cluster.gpus, cluster)
    assert plan is not None
    found = list(moves(layout, trials(load).run(plan), cluster.gpus, builder))
    assert found == list(moves(layout, trials(load).run(plan), cluster.gpus, builder))
    assert len(found) > 5
    for changed in found:
        assert sum(before != after for before, after in zip(layout, changed, strict=True)) == 1
        assert all(sum(slot.share_pct for slot in slots) <= 100 + 1e-6 for slots in changed)
        assert all(slot == Slot(slot.share_pct, builder.ordered(slot.models)) for slots in changed for slot in slots)
