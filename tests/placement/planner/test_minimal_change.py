"""Plans near one that runs, on random scenes and by every policy: what need not move stays, changes are counted, and
drained nodes hold nothing."""

from __future__ import annotations

from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tenuto.errors import InvalidInputError
from tenuto.placement import Cluster, Plan, Workload, load_policy, solve
from tenuto.placement.cluster import InstancePlace, node_of
from tenuto.placement.expectation.outlook import Traffic
from tenuto.placement.placement_constraints import without
from tenuto.placement.plan_edits import drained
from tenuto.placement.planner import PlanTask, RunningPlan, make_plan, plan_on_fewest, plan_without_places
from tenuto.placement.planner.fault_tolerance import with_losses
from tenuto.placement.planner.gpu_matching import match_to_running
from tenuto.placement.planner.minimal_change import changes_of, plan_from_what_runs, plan_with_fewest_changes
from tenuto.profiles import Profiles
from tests.instruments.near_plans import IGNITER, POLICIES, judged

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
    anew, running = planned(policy, asked, on), RunningPlan(old, Traffic.declared(asked.models), most_changes=at_most)
    task = PlanTask(load_policy(policy, OPTIONS[policy]), asked, on, NOTHING, running=running)
    return anew, plan_with_fewest_changes(task, anew)


def served(plan: Plan) -> dict[str, float]:
    return {name: model.goodput_rps for name, model in plan.expected.models.items()}


entries = st.dictionaries(
    st.sampled_from("abcd"),
    st.tuples(st.sampled_from([20.0, 200.0, 700.0, 1500.0]), st.sampled_from([30.0, 80.0])),
    min_size=1,
)
policies = st.sampled_from(sorted(OPTIONS))


changed = st.one_of(st.none(), entries)  # None: the workload stays as it is
limits = st.sampled_from([None, None, 0, 1, 3])
wishes = st.sampled_from([{}, {}, {"survive": 0.5, "spread": "node"}, {"survive": 0.5, "spread": "gpu"}])


@settings(max_examples=2 * settings.default.max_examples)
@given(entries, changed, policies, st.booleans(), limits, st.sampled_from([None, "n0", "n1/0"]), wishes)
def test_a_plan_near_one_that_runs(
    before: dict[str, tuple[float, float]],
    changed: dict[str, tuple[float, float]] | None,
    policy: str,
    elastic: bool,
    at_most: int | None,
    place: str | None,
    wishes: dict[str, Any],
) -> None:
    """It changes no more than it may, serves as well as a plan made anew, says what that costs, leaves a drained place
    empty, and what it says of losses is of the GPUs it lies on. What serves all as it is stays."""
    whole = cluster(1 if elastic else 3, elastic=elastic)
    place = None if elastic else place
    after = before if changed is None else changed
    models = tuple(spec.model_copy(update=wishes) for spec in workload(after).models)
    asked, on = Workload(models=models), whole if place is None else without(whole, [place])
    if elastic and wishes.get("spread") == "node":
        return
    old = planned(policy, workload(before), whole)
    try:
        anew, plan = near(policy, old, asked, on, at_most)
    except InvalidInputError:  # keeping what runs already takes more
        assert at_most is not None
        return
    changes, note = changes_of(old, plan), plan.notes[-1].split("; made anew: ")
    anew_changes = int(note[1].rpartition(": ")[2])
    assert int(note[0].rpartition(": ")[2]) == changes
    assert changes <= (anew_changes if at_most is None else at_most)
    if at_most is None or anew_changes <= at_most:
        for name, rate in served(anew).items():
            assert served(plan).get(name, 0.0) >= min(rate, 0.99 * after[name][0]) - 1e-3 * after[name][0]
    is_emptied = place is not None and any(place in (g.gpu, node_of(g.gpu)) for g in old.gpulets)
    if changed is None and not is_emptied and not wishes:
        assert changes == 0
        assert plan.expected.gpus_used <= old.expected.gpus_used
    assert plan.expected.losses == with_losses(plan).expected.losses
    if place is not None:
        plan = drained(plan, whole, [place])
        assert {gpu.id for gpu in plan.gpus} == {gpu.id for gpu in whole.gpus}
        assert not [g for g in plan.gpulets if place in (g.gpu, node_of(g.gpu))]
    assert Plan.from_data(plan.to_data()) == plan


def test_the_task_says_all_that_a_plan_near_one_that_runs_is_made_from() -> None:
    before, after = ({name: (rate, 80.0) for name, rate in rates} for rates in ((("a", 200.0),), (("a", 2500.0),)))
    old, asked, gpulet = planned("gpulet", workload(before), cluster()), workload(after), load_policy("gpulet")
    carried = []
    for most in (0, 1, None):
        running = RunningPlan(old, Traffic.declared(asked.models), most_changes=most)
        plan = make_plan(PlanTask(gpulet, asked, cluster(), NOTHING, running=running))
        assert most is None or changes_of(old, plan) <= most
        carried.append(served(plan)["a"])
    assert carried[0] < carried[1] <= carried[2]
    running = RunningPlan(plan, Traffic.declared(old.models), promises="running")
    less = make_plan(PlanTask(gpulet, old.workload, cluster(), NOTHING, running=running))
    assert changes_of(plan, less) == 0
    assert len(less.gpulets) == len(plan.gpulets)


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


@pytest.mark.parametrize("policy", POLICIES)
def test_by_every_policy_nothing_changes_for_nothing(policy: str) -> None:
    found = judged(4, policy, **({"requests": "500"} if policy == "tenuto" else {}))
    assert found.faults == []
    assert found.sums["plans"] + found.sums["refused"] == 5


@pytest.mark.parametrize(
    ("seed", "policy", "options"),
    [
        pytest.param(9378, "tenuto", {"requests": "500"}, id="tried plans promise what trials serve"),
        pytest.param(9109, IGNITER, {}, id="what was added and is not needed in the end is left away"),
    ],
)
def test_what_was_wrong_once_stays_right(seed: int, policy: str, options: dict[str, str]) -> None:
    assert judged(seed, policy, **options).faults == []


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


@settings(max_examples=settings.default.max_examples // 2)
@given(entries, changed, policies, st.sampled_from(["running", "larger"]))
def test_the_policy_is_asked_only_where_what_runs_cannot_be_made_to_promise_all(
    before: dict[str, tuple[float, float]],
    changed: dict[str, tuple[float, float]] | None,
    policy: str,
    promises: Literal["running", "larger"],
) -> None:
    """What runs is extended first. Where that is enough, the plan promises all of every rate, or what runs promises,
    in no more changes than the plan for which the policy was asked."""
    asked, whole = workload(before if changed is None else changed), cluster()
    old = planned(policy, workload(before), whole)
    running = RunningPlan(old, Traffic.declared(asked.models), promises=promises)
    task = PlanTask(load_policy(policy, OPTIONS[policy]), asked, whole, NOTHING, running=running)
    (plan, _), anew = plan_from_what_runs(task), planned(policy, asked, whole)
    made, whole_way = make_plan(task), plan_with_fewest_changes(task, anew)
    if plan is None:
        assert promises == "running" or changed is not None or old.unserved_reasons
    else:
        assert plan == made
        assert plan.notes[-1].endswith("; made anew: not needed")
        if all(rate <= served(anew).get(name, 0.0) for name, rate in served(plan).items()):
            assert changes_of(old, plan) <= changes_of(old, match_to_running(anew, old, whole.gpus, keep_idle=True))
    least = served(old) if promises == "running" else {spec.name: spec.rate_rps for spec in asked.models}
    for spec in asked.models:
        rate = min(least.get(spec.name, 0.0), 0.99 * spec.rate_rps, served(whole_way).get(spec.name, 0.0))
        assert served(made).get(spec.name, 0.0) >= rate - 1e-3 * spec.rate_rps


@pytest.mark.parametrize("times", [1.2, 4.0, 8.0])
def test_many_missing_replicas_come_from_the_plan_of_the_policy_and_a_few_do_not(times: float) -> None:
    """Its plan is taken without what need not change."""
    before, after = (dict.fromkeys("ab", (rate, 80.0)) for rate in (1500.0, 1500.0 * times))
    symphony, asked, whole = load_policy("symphony", OPTIONS["symphony"]), workload(after), cluster(12)
    old = plan_on_fewest(PlanTask(symphony, workload(before), whole, NOTHING))
    running = RunningPlan(old, Traffic.declared(asked.models), most_changes=48, promises="larger")
    plan = make_plan(PlanTask(symphony, asked, whole, NOTHING, running=running))
    assert ("made anew: not needed" in plan.notes[-1]) == (changes_of(old, plan) <= 1)
    assert not plan.unserved_reasons
    anew = match_to_running(planned("symphony", asked, whole), old, whole.gpus, keep_idle=True)
    assert changes_of(old, plan) < changes_of(old, anew)
    assert plan.expected.gpus_used < anew.expected.gpus_used


@given(entries, policies, st.sampled_from(["n0", "n1/0"]))
def test_what_was_drained_comes_back_where_it_is_used_again(
    asked: dict[str, tuple[float, float]], policy: str, place: str
) -> None:
    old = planned(policy, workload(asked), cluster())
    without_it = plan_without_places(old, [place], NOTHING)
    again = plan_without_places(without_it, [], NOTHING)
    for name, rate in served(old).items():
        assert served(again).get(name, 0.0) >= 0.99 * rate - 1e-3 * asked[name][0]
