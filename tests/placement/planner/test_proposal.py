"""Proposals of the planner: what a plan says it is made for, and what is proposed where no process need change."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from tenuto.deployments.serve.diff import layout_changes
from tenuto.placement import Cluster, ModelSpec, Plan, Workload, load_policy, solve
from tenuto.placement.expectation.outlook import Outlooks, Traffic
from tenuto.placement.generation_capacity import carried, options_of
from tenuto.placement.plan import PolicyUsed
from tenuto.placement.plan_edits import for_workload, on_gpus
from tenuto.placement.planner import PlanRequest, PlanTask, RunningPlan, propose
from tenuto.placement.planner.candidates import Candidates
from tenuto.placement.planner.change_stages import CUTTING_S, not_ready
from tenuto.profiles import Profile, Profiles
from tenuto.profiles.shipped import load_shipped
from tests.instruments.generating import PROFILES, ByForm, cluster, writes
from tests.instruments.near_plans import changed_scene
from tests.instruments.plans import gpu, make_plan, request
from tests.instruments.plans import running as running_plan

PLAN = make_plan({"n0/0/a": (100.0, ["a"])})  # made for 50 r/s, carries 600


def asked(rate_rps: float, plan: Plan = PLAN, workload: Workload | None = None, **more: Any) -> PlanRequest:
    return request(plan, (gpu("n0/0"), gpu("n0/1")), {"a": rate_rps}, workload, **more)


def test_a_plan_says_the_rates_it_is_made_for_and_what_it_promises_of_them() -> None:
    """The scheduler holds models to the rates of the plan where requests are lost; those of the first plan are old."""
    found = propose(asked(900.0), Profiles([])).plan
    assert found is not None
    assert found.model("a").rate_rps == 900.0
    assert found.expected.models["a"].goodput_rps == pytest.approx(900.0, rel=0.05)
    assert found.expected.gpus_used == 2


def test_what_runs_is_told_a_rate_that_it_carries_though_it_was_made_for_less() -> None:
    found = propose(asked(200.0), Profiles([]))
    assert (found.how, found.worth.pays) == ("kept", True)
    assert found.plan is not None
    assert found.plan.processes() == PLAN.processes()
    assert not not_ready(PLAN, found.plan)
    assert found.plan.model("a").rate_rps == 200.0
    again = propose(asked(205.0, found.plan), Profiles([]))
    assert not again.worth.pays


def slowed(request: PlanRequest, slowdowns: dict[str, float]) -> PlanRequest:
    return replace(request, running=replace(request.running, slowdowns=slowdowns))


def test_a_slower_model_gets_room_for_random_arrivals_though_there_is_time_enough() -> None:
    """At an SLO of 42 ms larger batches are not enough, from 46 ms on they are."""
    tight = make_plan({"n0/0/a": (100.0, ["a"])}, slo_ms=42.0)
    slowdowns = {"a": 1.2}
    outlooks, traffic = Outlooks(slowdowns), Traffic({"a": 500.0})
    assert outlooks.of(tight, traffic).load < 1.0
    promised = outlooks.promised(tight, traffic)[0]["a"]
    assert 0.98 < promised < 0.99
    found = propose(slowed(asked(500.0, tight), slowdowns), Profiles([]))
    assert (found.how, found.worth.pays) == ("extended", True)
    assert found.worth.why == f"the new plan carries 500 of 500 r/s, the running one {500 * promised / 0.99:.0f}"
    patient = make_plan({"n0/0/a": (100.0, ["a"])}, slo_ms=48.0)
    found = propose(slowed(asked(500.0, patient), slowdowns), Profiles([]))
    assert (found.how, found.worth.pays) == ("kept", True)


def test_models_that_generate_are_added_to_the_gpu_of_the_one_before() -> None:
    plan = solve(ByForm(), Workload(models=(writes("a"),)), cluster(1, 1), PROFILES)
    for name in ("b", "c"):
        workload = Workload(models=(*plan.models, writes(name, 0.1)))
        rates = {spec.name: spec.rate_rps for spec in workload.models}
        runs = RunningPlan(plan, Traffic(rates))
        candidates = Candidates(PlanTask(ByForm(), workload, cluster(1, 2), PROFILES, running=runs))
        plan = dict(candidates.incremental(plan.model_copy(update={"models": workload.models})))["extended"]
    assert {gpulet.models[0].name: gpulet.gpu for gpulet in plan.gpulets} == {"a": "n0/0", "b": "n0/1", "c": "n0/1"}
    (one,), (another,) = plan.hosts_of("b"), plan.hosts_of("c")
    for gpulet in (one, another):
        assert gpulet.effective_share_pct == 30.0
        assert gpulet.memory_mib == pytest.approx(0.3 * 81_920.0)
        whole = options_of(writes("b"), cluster(1, 2).gpus[0], PROFILES, carried, shares=(30,))
        assert gpulet.models[0].kv_tokens == pytest.approx(whole[0].kv_tokens, abs=1)


def test_what_an_operator_takes_out_or_changes_is_done_though_it_gains_nothing() -> None:
    both = make_plan({"n0/0/a": (100.0, ["a", "b"])})
    found = propose(asked(50.0, both, PLAN.workload), Profiles([]))
    assert (found.worth.pays, found.worth.why) == (True, "b left the workload")
    assert found.plan is not None
    assert [replica.name for gpulet in found.plan.gpulets for replica in gpulet.models] == ["a"]
    assert [spec.name for spec in found.plan.models] == ["a"]
    assert not propose(asked(50.0, found.plan, PLAN.workload), Profiles([])).worth.pays
    slower = PLAN.workload.model_copy(
        update={"models": (PLAN.model("a").model_copy(update={"slo_ms": 2 * PLAN.model("a").slo_ms}),)}
    )
    found = propose(asked(50.0, workload=slower), Profiles([]))
    assert found.worth.why == "the entry of a has changed"
    assert found.plan is not None
    assert found.plan.model("a").slo_ms == 2 * PLAN.model("a").slo_ms


def test_who_asks_for_standby_processes_alone_is_told_those_of_what_runs() -> None:
    """A better plan is no answer to that: what runs had nothing on standby as long as there was one."""
    assert propose(asked(900.0), Profiles([])).worth.pays
    found = propose(asked(900.0, only_standby=True, standby_pct=10.0), Profiles([]))
    assert (found.plan, found.worth.pays) == (None, False)


def test_without_the_policy_there_are_standby_processes_all_the_same() -> None:
    found = propose(replace(asked(900.0, standby_gpus=1), policy=PolicyUsed(name="gone")), Profiles([]))
    assert (found.plan, found.worth.pays) == (None, False)
    assert "unknown policy" in found.worth.why
    assert [standby.gpulet.gpu for standby in found.standby] == ["n0/1"]


@pytest.mark.parametrize("policy", ["symphony", "gpulet"])
def test_a_model_that_comes_is_added_to_what_runs_where_there_is_room(
    policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of random plans, each model in turn left and comes back. Where there is room, nothing is planned anew, no gpu-let
    ends, and no other model is carried less."""
    ways = Counter[bool]()
    for seed in range(4):
        workload, _, cluster, _, profiles = changed_scene(seed, policy)
        whole = solve(load_policy(policy), workload, cluster, profiles)
        for spec in workload.models:
            left = workload.model_copy(update={"models": tuple(other for other in workload.models if other != spec)})
            runs = running_plan(for_workload(whole, left), Traffic.declared(workload.models))
            candidates = Candidates(PlanTask(load_policy(policy), workload, cluster, profiles, running=runs))
            with monkeypatch.context() as patch:
                patch.setattr(Candidates, "planned_anew", asked_for_everything)
                plans = candidates.additions()
            ways[bool(plans)] += 1
            if not plans:
                continue
            assert {how for how, _ in plans} <= {"arranged", "extended"}
            for _, plan in plans:
                assert {g.id: g.gpu for g in runs.plan.gpulets}.items() <= {g.id: g.gpu for g in plan.gpulets}.items()
                lacks, before = candidates.missing(plan), candidates.missing(runs.plan)
                assert spec.name not in lacks
                assert all(part <= before.get(name, 0.0) + 2e-3 for name, part in lacks.items())
            found = propose(PlanRequest(workload, cluster.gpus, whole.policy, runs), profiles)
            assert found.worth.pays
            assert found.plan is not None
            assert found.needed_gpus
    assert ways[True] > ways[False]


@pytest.mark.parametrize("policy", ["ffd", "gpulet"])
@pytest.mark.parametrize("seed", range(3))
def test_where_gpus_lack_models_share_what_is_left_as_long_as_that_serves_more(policy: str, seed: int) -> None:
    rng = random.Random(seed)
    rates = {f"m{i}": rng.uniform(600.0, 900.0) for i in range(6)}
    plan = make_plan({f"n{i}/0/a": (100.0, [f"m{i}"]) for i in range(6)})
    plan = plan.model_copy(
        update={"models": tuple(spec.model_copy(update={"rate_rps": rates[spec.name]}) for spec in plan.models)}
    )
    left = tuple(gpu(f"n{i}/0") for i in range(6 - rng.randint(1, 3)))
    run = running_plan(on_gpus(plan, left), Traffic(rates))
    answer = propose(PlanRequest(plan.workload, left, PolicyUsed(name=policy), run), Profiles([]))
    assert answer.plan is not None
    assert answer.worth.pays
    assert not answer.plan.unserved
    stays = sum(rates[f"m{i}"] for i in range(len(left)))
    parts = Outlooks().of(answer.plan, Traffic(rates)).parts
    assert sum(parts[name] * rate for name, rate in rates.items()) > 1.05 * stays


def asked_for_everything(self: Candidates, cluster: Cluster) -> Plan:
    raise LookupError("the policy is asked for everything")


# --- GPUs that plans may cut into MIG instances -------------------------------------------------------------------

MEASURED = Profiles([load_shipped("parvagpu-a100")])
WHOLE = [{"profile": "7g.80gb", "start": 0}]
QUICK = {"starts": "symphony", "requests": "300"}


def a100s(*layouts: list[dict[str, object]] | None, mig: str = "managed") -> Cluster:
    groups = [{"type": "a100-80gb", "mig": mig, **({"instances": cut} if cut else {})} for cut in layouts]
    return Cluster.model_validate({"nodes": [{"name": "n0", "gpus": groups}]})


def served_on(cluster: Cluster, places: int, times: float) -> PlanRequest:
    """Return what is asked while two models, so many times 500 requests a second, run on the first instances."""
    models = tuple(ModelSpec(name=name, rate_rps=times * 500.0, slo_ms=130) for name in ("resnet50", "densenet121"))
    workload, rates = Workload(models=models), {spec.name: spec.rate_rps for spec in models}
    there = Cluster.of(gpu for gpu in cluster.gpus[:places]).as_cut
    running = solve(load_policy("tenuto", QUICK), workload, there, MEASURED)
    mig_of = {gpu.id: gpu.mig for gpu in cluster.gpus}
    gpus = tuple(gpu.model_copy(update={"mig": mig_of[gpu.id]}) for gpu in running.gpus)
    running = running.model_copy(update={"gpus": gpus})
    runs = running_plan(running, Traffic(rates), horizon_s=600.0)
    return PlanRequest(workload, cluster.gpus, PolicyUsed(name="tenuto", options=dict(QUICK)), runs)


def test_gpus_are_cut_anew_where_that_serves_more_than_the_way_to_it_costs() -> None:
    request = served_on(a100s(WHOLE), 1, 2.6)
    found = propose(request, MEASURED)
    assert (found.how, found.worth.pays) == ("cut anew", True)
    assert re.search(r"cutting GPU n0/0 takes \d+ s and loses \d+ requests", found.worth.why)
    assert found.worth.seconds >= CUTTING_S
    assert found.worth.lost_requests > 0.0
    assert found.plan is not None
    assert [change.gpu for change in layout_changes(request.running.plan, found.plan)] == ["n0/0"]
    assert found.plan.expected.gpus_used == 1
    assert request.running.terms is not None
    terms = replace(request.running.terms, horizon_s=found.worth.seconds + 1.0)
    soon = propose(replace(request, running=replace(request.running, terms=terms)), MEASURED)
    assert soon.how != "cut anew" or not soon.worth.pays


@pytest.mark.parametrize("times", [0.8, 2.4, 2.6])
def test_a_plan_is_called_cut_anew_where_it_cuts(times: float) -> None:
    """With 2.4 the best plan on a GPU that may be cut keeps its layout, and runs two processes there."""
    request = served_on(a100s(WHOLE), 1, times)
    found = propose(request, MEASURED)
    assert found.plan is not None
    assert (found.how == "cut anew") == bool(layout_changes(request.running.plan, found.plan))


def test_gpus_that_are_cut_by_somebody_else_are_never_cut_anew() -> None:
    found = propose(served_on(a100s(WHOLE, mig="fixed"), 1, 2.4), MEASURED)
    assert found.how != "cut anew"


def test_an_idle_gpu_is_cut_where_others_are_saved_and_nothing_is_lost_on_the_way() -> None:
    halves = [{"profile": "3g.40gb", "start": 0}]
    found = propose(served_on(a100s(WHOLE, halves, None), 2, 0.8), MEASURED)
    assert (found.how, found.worth.pays) == ("cut anew", True)
    assert found.worth.lost_requests == 0.0
    assert found.plan is not None
    assert found.plan.expected.gpus_used == 1


# --- GPUs that are not there yet ------------------------------------------------------------------------------------

FAST = load_shipped("symphony-1080ti")
SLOWER = {name: model.scaled(1.5) for name, model in FAST.models.items()}
TYPES = Profiles([load_shipped("symphony-a100"), Profile(name="slower", gpu_type="t4", source="-", models=SLOWER)])
PRICES = {"a100": 3.67, "t4": 0.35}


def beside_an_a100(seed: int) -> Plan:
    """Return a plan of six models, some of which lie on an A100 alone and the others on T4s."""
    rng = random.Random(seed)
    lines = {name: model.line for name, model in FAST.models.items() if model.line is not None}
    rows = sorted(lines, key=lambda name: -lines[name].alpha_ms)[:20]
    models = tuple(
        ModelSpec(name=name, rate_rps=rng.uniform(5.0, 30.0), slo_ms=FAST.models[name].coefficients["slo_ms"])
        for name in rng.sample(rows, 6)
    )
    first = rng.randint(1, 3)
    clusters = (Cluster.parse("a100:1"), Cluster.parse("t4:12"))
    parts = [
        solve(load_policy("gpulet"), Workload(models=some), cluster, TYPES)
        for some, cluster in zip((models[:first], models[first:]), clusters, strict=True)
    ]
    gpus, gpulets = [], []
    for plan in parts:
        for place in (place for place in plan.gpus if plan.on_gpu(place.id)):
            name = f"{place.type}-{place.id}"
            gpus.append(place.model_copy(update={"id": name}))
            gpulets += [g.model_copy(update={"id": f"{place.type}-{g.id}", "gpu": name}) for g in plan.on_gpu(place.id)]
    update = {"gpus": tuple(gpus), "gpulets": tuple(gpulets), "models": models, "unserved": (), "unserved_reasons": {}}
    return parts[1].model_copy(update=update)


def settled(plan: Plan, come_s: float = 120.0, **more: Any) -> tuple[Mapping[str, int], Plan]:
    """Return what a plan is on, and the plan, once GPUs that are needed have come as often as any were, and those that
    were neither used nor needed have gone."""
    there = [gpu(place.id, kind=place.type) for place in plan.gpus]
    workload, traffic = plan.workload, Traffic({spec.name: spec.rate_rps for spec in plan.models})
    terms: dict[str, Any] = {"growth": ("t4", "a100"), "prices": PRICES} | more
    for bought in range(6):
        priced = tuple(g.model_copy(update={"price_per_hour": PRICES[g.type]}) for g in there)
        runs = running_plan(plan, traffic, **terms)
        assert runs.terms is not None
        runs = replace(runs, terms=replace(runs.terms, come_s=come_s))
        found = propose(PlanRequest(workload, priced, plan.policy, runs), TYPES)
        assert found.needed_gpus is not None
        if found.plan is not None and found.worth.pays:
            assert {*found.plan.used_gpus} <= {g.id for g in there}
            plan = found.plan
        present = Counter(g.type for g in there)
        used, needed = {*plan.used_gpus}, found.needed_gpus
        for kind in PRICES:
            missing = needed.get(kind, 0) - present[kind]
            new = [gpu(f"{kind}-new{bought}/{place}", kind=kind) for place in range(missing)]
            idle = [g for g in there if g.type == kind and g.id not in used]
            gone = idle[: max(0, -missing)]
            there = [*(g for g in there if g not in gone), *new]
    return Counter(place.type for place in plan.gpus if plan.on_gpu(place.id)), plan


@pytest.mark.parametrize("seed", [10, *(pytest.param(seed, marks=pytest.mark.night) for seed in (1, 6))])
def test_a_dear_gpu_gives_way_to_cheaper_ones_that_have_to_come_first(seed: int) -> None:
    """A plan anew would lose requests on its way, so that only what lies on the dear GPU can move."""
    plan = beside_an_a100(seed)
    used, after = settled(plan)
    assert used["a100"] == 0
    assert used["t4"] * PRICES["t4"] < PRICES["a100"] + PRICES["t4"] * (len(plan.used_gpus) - 1)
    rates = Traffic({spec.name: spec.rate_rps for spec in plan.models})
    before, now = (Outlooks().promised(each, rates)[0] for each in (plan, after))
    assert all(now[name] > min(0.99, before.get(name, 0.0)) - 0.01 for name in now)


@pytest.mark.parametrize("more", [{"come_s": 3600.0}, {"by_node": frozenset({"t4"})}, {"limits": {"t4": 6, "a100": 1}}])
def test_a_dear_gpu_stays_where_others_come_too_late_whole_nodes_or_none(more: dict[str, Any]) -> None:
    assert settled(beside_an_a100(1), **more)[0]["a100"] == 1
