"""Policy `tenuto` on GPUs that it may cut into MIG instances: layouts, what fits, fewest GPUs, too few GPUs."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tenuto.batching.core.build import from_plan
from tenuto.batching.planning import trial
from tenuto.batching.planning.cutting import layouts_of
from tenuto.batching.registry import make_scheduler
from tenuto.batching.virtual.simulator import simulate
from tenuto.documents import load_document
from tenuto.placement import Cluster, ModelSpec, Plan, Workload, load_policy, solve
from tenuto.placement.costs import ModelOnGpu
from tenuto.profiles import Profiles
from tenuto.profiles.mig_instances import ALL_GPCS, instance_profiles, mig_types
from tenuto.profiles.shipped import load_shipped

NIGHT = pytest.mark.night
PROFILES = Profiles([load_shipped("parvagpu-a100")])
PUBLISHED: dict[str, Any] = load_document(Path(__file__).parents[2] / "data" / "parvagpu.yaml")
ELASTIC = Cluster.parse("a100-80gb:1:mig", elastic=True)


@pytest.fixture(scope="module", autouse=True)
def short_trials() -> Iterator[None]:
    """The long SLO of one model does not lengthen trials to ten times as many arrivals."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trial, "MOST", 20_000)
        yield


def workload_of(scenario: str, times: float = 1.0, **options: Any) -> Workload:
    models = PUBLISHED[scenario]["models"].items()
    specs = (ModelSpec(name=name, rate_rps=times * rate, slo_ms=slo) for name, (rate, slo) in models)
    return Workload(models=tuple(specs), **options)


def planned(workload: Workload, cluster: Cluster = ELASTIC, requests: int = 1_000) -> Plan:
    return solve(load_policy("tenuto", {"requests": f"{requests}"}), workload, cluster, PROFILES)


@cache
def plan_of(scenario: str) -> Plan:
    """Return what is bought for a scenario, planned once."""
    return planned(workload_of(scenario))


def cut_as(plan: Plan) -> list[dict[str, Any]]:
    """Return GPUs that are cut as those of a plan, and may be cut anew."""
    cuts: dict[str, list[dict[str, Any]]] = {gpu.device: [] for gpu in plan.gpus}
    for gpu in plan.gpus:
        if gpu.instance is not None:
            cuts[gpu.device].append({"profile": gpu.type.split("-", 2)[2], "start": gpu.instance.start})
    return [{"type": "a100-80gb", "mig": "managed", "instances": cut} for cut in cuts.values()]


@pytest.mark.parametrize("kind", mig_types())
def test_layouts_are_full_and_their_instances_do_not_overlap(kind: str) -> None:
    profiles = instance_profiles(kind)
    found = layouts_of(profiles)
    assert len({tuple(sorted(name for name, _ in layout)) for layout in found}) == len(found)
    for layout in found:
        slices = [s for name, start in layout for s in range(start, start + profiles[name].slices)]
        assert len(slices) == len(set(slices)) <= 8
        assert sum(profiles[name].gpcs for name, _ in layout) <= ALL_GPCS
        for name, size in profiles.items():
            assert not any(set(range(s, s + size.slices)).isdisjoint(slices) for s in size.starts), (layout, name)


@pytest.mark.parametrize("scenario", ["s1", "s2", *(pytest.param(each, marks=NIGHT) for each in ("s4", "s6"))])
def test_it_takes_fewer_gpus_than_were_published_and_expects_every_model_in_time(scenario: str) -> None:
    plan = plan_of(scenario)
    promised = {name: model.goodput_rps for name, model in plan.expected.models.items()}
    assert all(promised[m.name] >= 0.98 * m.rate_rps for m in plan.models)  # by formulas a percent less near the limit
    assert plan.expected.gpus_used < PUBLISHED[scenario]["gpus"]


def test_the_plan_of_a_fixed_cluster_lies_on_its_gpus_and_lists_all_of_them() -> None:
    plan = planned(workload_of("s1"), Cluster.parse("a100-80gb:3:mig"))
    assert {gpu.device for gpu in plan.gpus} == {"n0/0", "n0/1", "n0/2"}
    assert Plan.from_data(plan.to_data()) == plan


def test_gpus_that_are_cut_already_as_is_best_stay_so() -> None:
    groups = cut_as(plan_of("s2"))[::-1]
    assert len(groups) > 1
    there = Cluster.model_validate({"nodes": [{"name": "n0", "gpus": groups}]})
    again = planned(workload_of("s2"), there)
    assert {(gpu.id, gpu.type) for gpu in again.gpus} <= {(gpu.id, gpu.type) for gpu in there.gpus}


def test_on_too_few_gpus_all_models_get_equal_parts() -> None:
    workload = workload_of("s4", objective="each")
    workload = workload.model_copy(update={"models": tuple(m for m in workload.models if m.name != "bert")})  # 4 s
    plan = planned(workload, Cluster.parse("a100-80gb:4:mig"), requests=4_000)
    promised = np.array([plan.expected.models[m.name].goodput_rps / m.rate_rps for m in plan.models])
    assert promised.min() > 0.6
    assert not plan.unserved
    rng, lasts_s = np.random.default_rng(7), 4.0
    times = [np.sort(rng.random(rng.poisson(m.rate_rps * lasts_s))) * 1000.0 * lasts_s for m in plan.models]
    models = np.repeat(np.arange(len(times), dtype=np.int32), [len(each) for each in times])
    order = np.argsort(np.concatenate(times), kind="stable")
    scheduler = make_scheduler("deferred", from_plan(plan), {"rehearse": False})
    served = simulate(scheduler, np.concatenate(times)[order], models[order], warmup_s=1.5).attainments()
    assert np.abs(served - served.mean()).max() < 0.02
    assert np.abs(served - promised).max() < 0.04


@pytest.mark.parametrize("scenario", ["s1", *(pytest.param(each, marks=NIGHT) for each in ("s4", "s6"))])
def test_instances_have_time_for_what_they_are_planned_with_as_slow_as_the_plan_says_they_are(scenario: str) -> None:
    for gpulet in plan_of(scenario).gpulets:
        works = sum((r.rate_rps or 0.0) * (r.latency_ms or 0.0) / (1000.0 * r.batch_size) for r in gpulet.models)
        assert works < 0.995, gpulet.id


def test_models_that_take_turns_share_processes_and_their_memory_fits() -> None:
    plan = plan_of("s1")
    assert any(len(gpulet.models) > 1 for gpulet in plan.gpulets)
    for gpu in plan.gpus:
        held = {tuple(sorted(r.name for r in gpulet.models)) for gpulet in plan.on_gpu(gpu.id)}
        assert len(held) <= 1  # all processes of an instance have the same models


def test_where_nothing_was_measured_in_instances_gpus_stay_whole() -> None:
    inline = ModelSpec.model_validate(
        {"name": "a", "rate_rps": 50, "slo_ms": 100, "latency": {"alpha_ms": 1, "beta_ms": 4}}
    )
    plan = planned(Workload(models=(inline,)), Cluster.parse("a100-80gb:2:mig"))
    assert not plan.unserved
    assert all(gpu.instance is None for gpu in plan.gpus)


@pytest.mark.parametrize(
    ("scenario", "times"), [("s1", 0.9), *(pytest.param(*each, marks=NIGHT) for each in (("s1", 1.1), ("s4", 0.9)))]
)
def test_when_rates_change_by_a_tenth_what_is_cut_stays_so(scenario: str, times: float) -> None:
    before = plan_of(scenario)
    there = Cluster.model_validate({"nodes": [{"name": "n0", "gpus": cut_as(before)}], "elastic": True})
    after = planned(workload_of(scenario, times), there)
    assert not after.unserved
    new = {(gpu.id, gpu.type) for gpu in after.gpus} - {(gpu.id, gpu.type) for gpu in before.gpus}
    bought = after.expected.gpus_used - before.expected.gpus_used
    assert len({place.partition(".")[0] for place, _ in new}) <= max(0, bought)


@pytest.mark.parametrize("policy", ["tenuto", "parvagpu"])
@pytest.mark.parametrize("name", ["vgg19", "resnet152", "inception_v3"])
def test_batches_and_processes_fit_into_the_memory_of_an_instance(policy: str, name: str) -> None:
    options = {"requests": "200"} if policy == "tenuto" else {}
    large = Workload(models=(ModelSpec(name=name, rate_rps=2_000, slo_ms=300),))
    plan = solve(load_policy(policy, options), large, Cluster.parse("a100:1:mig"), PROFILES)  # half of an 80 GB one
    assert plan.gpulets
    assert any(gpu.instance is not None for gpu in plan.gpus)


@pytest.mark.parametrize(
    ("policy", "elastic"),
    [("tenuto", False), pytest.param("tenuto", True, marks=NIGHT), ("parvagpu", False), ("parvagpu", True)],
)
def test_a_gpu_that_plans_may_not_cut_stays_whole_beside_those_of_its_type_that_they_may(
    policy: str, elastic: bool
) -> None:
    options = {"requests": "200"} if policy == "tenuto" else {}
    cluster = Cluster.parse("a100-80gb:1,a100-80gb:1:mig", elastic=elastic)
    plan = solve(load_policy(policy, options), workload_of("s1"), cluster, PROFILES)
    cut = {gpu.device for gpu in plan.gpus if gpu.instance is not None}
    assert cut
    assert "n0/0" not in cut


def test_a_layout_that_breaks_a_rule_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ModelOnGpu, "has_room_for", lambda *_: True)
    plan = planned(Workload(models=(ModelSpec(name="vgg19", rate_rps=50, slo_ms=300),)), Cluster.parse("a100:1:mig"))
    assert not plan.unserved


def test_models_that_only_whole_gpus_run_are_served_beside_those_measured_in_instances() -> None:
    inline = ModelSpec.model_validate(
        {"name": "a", "rate_rps": 50, "slo_ms": 100, "latency": {"alpha_ms": 1, "beta_ms": 4}}
    )
    for models in ((inline,), (inline, ModelSpec(name="vgg19", rate_rps=20, slo_ms=300))):
        assert not planned(Workload(models=models), requests=200).unserved
