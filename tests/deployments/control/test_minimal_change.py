"""Plans near one that is there, on random scenes: what need not move stays, changes are counted, drained nodes hold
nothing."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tenuto.errors import InvalidInputError
from tenuto.placement import Cluster, Plan, Workload, load_policy, solve
from tenuto.placement.cluster import InstancePlace, node_of
from tenuto.placement.placement_constraints import without
from tenuto.placement.plan_edits import drained
from tenuto.placement.planner.fault_tolerance import with_losses
from tenuto.placement.planner.minimal_change import changes_of, plan_with_fewest_changes
from tenuto.placement.planner.task import PlanTask
from tenuto.profiles import Profiles

NOTHING = Profiles([])
OPTIONS: dict[str, dict[str, Any]] = {"symphony": {"time_limit_s": "0"}, "gpulet": {}}


def cluster(nodes: int = 3, *, elastic: bool = False) -> Cluster:
    given = [{"name": f"n{i}", "gpus": [{"type": "v100", "count": 2}]} for i in range(nodes)]
    return Cluster.model_validate({"nodes": given, "elastic": elastic})


def workload(entries: dict[str, tuple[float, float]]) -> Workload:
    latency = {"alpha_ms": 0.5, "beta_ms": 3.0}
    named = [
        {"name": name, "rate_rps": rate, "slo_ms": slo, "latency": latency} for name, (rate, slo) in entries.items()
    ]
    return Workload.model_validate({"models": named})


def planned(policy: str, asked: Workload, on: Cluster) -> Plan:
    return solve(load_policy(policy, OPTIONS[policy]), asked, on, NOTHING)


def near(policy: str, old: Plan, asked: Workload, on: Cluster, at_most: int | None = None) -> tuple[Plan, Plan]:
    anew, task = planned(policy, asked, on), PlanTask(load_policy(policy, OPTIONS[policy]), asked, on, NOTHING)
    return anew, plan_with_fewest_changes(old, anew, task, at_most=at_most)


def served(plan: Plan) -> dict[str, float]:
    return {name: model.goodput_rps for name, model in plan.expected.models.items()}


entries = st.dictionaries(
    st.sampled_from("abcd"),
    st.tuples(st.sampled_from([20.0, 200.0, 700.0, 1500.0]), st.sampled_from([30.0, 80.0])),
    min_size=1,
)
policies = st.sampled_from(sorted(OPTIONS))


@given(entries, policies, st.booleans())
def test_what_serves_all_as_it_is_stays(asked: dict[str, tuple[float, float]], policy: str, elastic: bool) -> None:
    workload_, on = workload(asked), cluster(1 if elastic else 3, elastic=elastic)
    old = planned(policy, workload_, on)
    _, plan = near(policy, old, workload_, on)
    assert changes_of(old, plan) == 0
    assert plan.expected.gpus_used <= old.expected.gpus_used


@given(entries, entries, policies, st.booleans())
def test_every_model_is_served_as_well_as_anew_with_no_more_changes(
    before: dict[str, tuple[float, float]], after: dict[str, tuple[float, float]], policy: str, elastic: bool
) -> None:
    on = cluster(1 if elastic else 3, elastic=elastic)
    old = planned(policy, workload(before), on)
    anew, plan = near(policy, old, workload(after), on)
    for name, rate in served(anew).items():
        assert served(plan).get(name, 0.0) >= min(rate, 0.99 * after[name][0]) - 1e-3 * after[name][0]
    wholly_new = {name for name in after if name not in before}
    assert changes_of(old, plan) >= (1 if wholly_new and not plan.unserved else 0)
    near_, anew_ = plan.notes[-1].split("; made anew: ")
    assert int(near_.rpartition(": ")[2]) == changes_of(old, plan) <= int(anew_.rpartition(": ")[2])


@given(entries, entries, policies, st.integers(0, 4))
def test_never_more_changes_than_allowed_and_more_of_them_serve_no_less(
    before: dict[str, tuple[float, float]], after: dict[str, tuple[float, float]], policy: str, most: int
) -> None:
    old = planned(policy, workload(before), cluster())
    totals = []
    for at_most in (most, most + 1):
        _, plan = near(policy, old, workload(after), cluster(), at_most)
        assert changes_of(old, plan) <= at_most
        totals.append(sum(min(rate, 0.99 * after[name][0]) for name, rate in served(plan).items()))
    assert totals[1] >= totals[0] - 1e-2 * sum(rate for rate, _ in after.values())


@given(entries, policies, st.sampled_from(["n0", "n1", "n2", "n1/0"]))
def test_a_drained_place_holds_nothing_and_what_lay_elsewhere_stays(
    asked: dict[str, tuple[float, float]], policy: str, place: str
) -> None:
    whole = cluster()
    old = planned(policy, workload(asked), whole)
    _, plan = near(policy, old, workload(asked), without(whole, [place]))
    plan = drained(plan, whole, [place])
    assert {gpu.id for gpu in plan.gpus} == {gpu.id for gpu in whole.gpus}
    assert not [g for g in plan.gpulets if place in (g.gpu, node_of(g.gpu))]
    hit = [g for g in old.gpulets if place in (g.gpu, node_of(g.gpu))]
    if not hit:
        assert changes_of(old, plan) == 0
    assert Plan.from_data(plan.to_data()) == plan


@settings(max_examples=settings.default.max_examples // 4)
@given(entries, entries, policies, st.sampled_from(["node", "gpu"]))
def test_what_a_plan_says_of_losses_is_of_the_gpus_it_lies_on(
    before: dict[str, tuple[float, float]], after: dict[str, tuple[float, float]], policy: str, kind: str
) -> None:
    asked = workload(after)
    models = tuple(spec.model_copy(update={"survive": 0.5, "spread": kind}) for spec in asked.models)
    old = planned(policy, workload(before), cluster())
    _, plan = near(policy, old, asked.model_copy(update={"models": models}), cluster())
    assert plan.expected.losses == with_losses(plan).expected.losses


def test_a_place_that_is_not_there_or_the_last_is_no_place_to_be_without() -> None:
    for places, words in ((["n9"], "no such place"), (["n0", "n1", "n2"], "no GPU would be left")):
        with pytest.raises(InvalidInputError, match=words):
            without(cluster(), places)


def test_instances_of_an_elastic_cluster_stay_what_they_are() -> None:
    instances = [{"profile": "3g.40gb", "start": 4}, {"profile": "4g.40gb", "start": 0}]
    given = [{"name": "n0", "gpus": [{"type": "a100-80gb", "mig": "managed", "instances": instances}]}]
    on = Cluster.model_validate({"nodes": given, "elastic": True})
    old = planned("gpulet", workload({"a": (200.0, 80.0)}), on)
    _, plan = near("gpulet", old, workload({"a": (220.0, 80.0)}), on)
    assert all(isinstance(gpu.instance, InstancePlace) for gpu in plan.gpus)
    assert changes_of(old, plan) == 0
