"""Where replicas lie, and what is left when a GPU, a node or a rack is lost: under every policy, on random scenes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from itertools import permutations
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tenuto.errors import InvalidInputError
from tenuto.loadgen.simulated import Simulation
from tenuto.placement import Cluster, Plan, Workload, load_policy, solve
from tenuto.placement.cluster import node_of
from tenuto.placement.placement_constraints import domain_of, prefers, without
from tenuto.placement.planner.fault_tolerance import preferences_missed, with_losses
from tenuto.profiles import Profiles
from tests.instruments.obeyed import assert_obeys

FAST, SLOW = {"alpha_ms": 0.5, "beta_ms": 3.0}, {"alpha_ms": 2.0, "beta_ms": 10.0}
POLICIES = ("symphony", "gpulet")


def cluster(nodes: int = 3, each: int = 2, *, elastic: bool = False) -> Cluster:
    given = [{"name": f"n{i}", "rack": f"r{i % 2}", "gpus": [{"type": "v100", "count": each}]} for i in range(nodes)]
    return Cluster.model_validate({"nodes": given, "elastic": elastic})


def workload(*models: dict[str, Any], **more: Any) -> Workload:
    entries = [{"name": f"m{index}", "latency": FAST, **entry} for index, entry in enumerate(models)]
    return Workload.model_validate({"models": entries, **more})


def planned(asked: Workload, on: Cluster, policy: str = "symphony") -> Plan:
    options = {"time_limit_s": "0"} if policy == "symphony" else {}
    return solve(load_policy(policy, options), asked, on, Profiles([]))


models = st.fixed_dictionaries(
    {
        "rate_rps": st.sampled_from([20.0, 100.0, 300.0]),
        "slo_ms": st.sampled_from([40.0, 120.0]),
        "latency": st.sampled_from([FAST, SLOW]),
    },
    optional={
        "spread": st.sampled_from(["gpu", "node", "rack"]),
        "survive": st.sampled_from([0.5, 1.0]),
        "keep_off": st.sampled_from([["n0"], ["n2"], ["n2/0", "n1/0"]]),
        "prefer": st.sampled_from(["n1", "r1", "n1/1"]),
    },
)


@given(st.lists(models, min_size=1, max_size=4), st.sampled_from(POLICIES))
def test_every_plan_obeys_and_says_what_each_loss_leaves(entries: list[dict[str, Any]], policy: str) -> None:
    assert_obeys(planned(workload(*entries), cluster(), policy))


def _preferred(plan: Plan, lies_on: Mapping[str, str]) -> float:
    """Return the parts of models that lie where they prefer, if what GPUs hold lay on these others."""
    gpus, specs = {gpu.id: gpu for gpu in plan.gpus}, {spec.name: spec for spec in plan.models}
    rates = [(specs[r.name], r.rate_rps or 1.0, lies_on[g.gpu]) for g in plan.gpulets for r in g.models]
    whole = Counter[str]()
    for spec, rate, _ in rates:
        whole[spec.name] += rate
    return sum(rate / whole[spec.name] for spec, rate, at in rates if prefers(spec, gpus[at]))


@given(
    st.lists(st.sampled_from([None, "n0", "n1", "n2", "r1", "n2/1"]), min_size=1, max_size=5),
    st.lists(st.sampled_from([100.0, 300.0, 900.0]), min_size=5, max_size=5),
    st.sampled_from(POLICIES),
)
def test_a_preference_costs_nothing_and_is_met_as_far_as_any_exchange_can(
    liked: list[str | None], rates: list[float], policy: str
) -> None:
    entries = [{"rate_rps": rate, "slo_ms": 40} for rate, _ in zip(rates, liked, strict=False)]
    unasked = planned(workload(*entries), cluster(), policy)
    asked = workload(*({**entry, "prefer": place} for entry, place in zip(entries, liked, strict=True)))
    plan = planned(asked, cluster(), policy)
    assert plan.expected == unasked.expected
    assert plan.unserved_reasons == unasked.unserved_reasons
    ids = [gpu.id for gpu in plan.gpus]
    best = max(_preferred(plan, dict(zip(ids, other, strict=True))) for other in permutations(ids))
    assert _preferred(plan, {name: name for name in ids}) == pytest.approx(best)
    gpus = {gpu.id: gpu for gpu in plan.gpus}
    away = {
        spec.name
        for spec in asked.models
        if spec.prefer and any(not prefers(spec, gpus[gpulet.gpu]) for gpulet in plan.hosts_of(spec.name))
    }
    assert preferences_missed(plan).keys() == away


def test_a_preference_gives_way_to_what_others_ask_and_to_another_gpu_type() -> None:
    nodes = [{"name": "n0", "gpus": [{"type": "v100"}]}, {"name": "n1", "gpus": [{"type": "t4"}]}]
    two_types = Cluster.model_validate({"nodes": nodes})
    entry = {"rate_rps": 50, "slo_ms": 80}
    alone = planned(workload(entry), two_types)
    lies_on = alone.hosts_of("m0")[0].gpu
    other = "n1" if lies_on == "n0/0" else "n0"
    plan = planned(workload(entry | {"prefer": other}), two_types)
    assert plan.expected == alone.expected
    assert "there may hold" in preferences_missed(plan)["m0"]
    full = {"rate_rps": 1500, "slo_ms": 40}
    plan = planned(workload(full | {"prefer": "n1"}, full | {"only_on": ["n1"]}), cluster(2, 1))
    assert {gpulet.gpu for gpulet in plan.hosts_of("m1")} == {"n1/0"}
    assert "at no cost" in preferences_missed(plan)["m0"]


def test_a_preferred_node_may_be_left_out() -> None:
    on = without(cluster(), ["n1"])
    plan = planned(workload({"rate_rps": 50, "slo_ms": 80, "prefer": "n1"}), on)
    assert not plan.unserved_reasons
    assert "no v100 there" in preferences_missed(plan)["m0"]


def test_an_elastic_cluster_takes_a_preference_as_one_that_cannot_be_told() -> None:
    plan = planned(workload({"rate_rps": 50, "slo_ms": 80, "prefer": "n7"}), cluster(1, 1, elastic=True), "gpulet")
    assert preferences_missed(plan).keys() == {"m0"}


def test_what_is_said_of_a_loss_is_what_the_plan_without_it_promises() -> None:
    plan = planned(workload({"rate_rps": 900, "slo_ms": 60, "survive": 1, "spread": "node"}), cluster())
    for loss in plan.expected.losses:
        node = loss.domain.removeprefix("node ")
        left = plan.model_copy(update={"gpulets": tuple(g for g in plan.gpulets if node_of(g.gpu) != node)})
        assert (
            with_losses(left).expected.losses == () or loss.goodput_rps["m0"] <= plan.expected.models["m0"].goodput_rps
        )


def test_a_model_that_survives_loses_nothing_but_what_ran_when_its_node_is_lost() -> None:
    asked = workload({"rate_rps": 200, "slo_ms": 80, "survive": 1, "spread": "node"}, {"rate_rps": 100, "slo_ms": 100})
    plan = planned(asked, cluster(), "gpulet")
    assert not plan.unserved_reasons
    for node in ("n0", "n1", "n2"):
        gpus = frozenset(gpu.id for gpu in plan.gpus if node_of(gpu.id) == node)
        figures = Simulation.of_plan(plan, duration_s=6.0, warmup_s=0.0, losses=((2.0, gpus),)).run().summary()
        offered = figures["models"]["m0"]
        assert offered["attainment"] > 0.99
        assert sum(offered[word] for word in ("ok", "late", "expired", "rejected", "failed")) == offered["offered"]


def test_what_nobody_asks_for_leaves_the_plan_as_it_is() -> None:
    asked = workload({"rate_rps": 200, "slo_ms": 80}, {"rate_rps": 50, "slo_ms": 100})
    assert "losses" not in planned(asked, cluster(), "gpulet").dump()


def test_an_elastic_cluster_grows_for_what_must_survive() -> None:
    entry = {"rate_rps": 200, "slo_ms": 80}
    alone = planned(workload(entry), cluster(1, 1, elastic=True), "gpulet")
    safe = planned(workload(entry | {"survive": 1}), cluster(1, 1, elastic=True), "gpulet")
    assert alone.expected.gpus_used == 1
    assert safe.expected.gpus_used == 2
    assert not safe.unserved_reasons


@given(st.lists(models, min_size=1, max_size=3), st.sampled_from(POLICIES), st.sampled_from([0.0, 0.4, 0.97]))
def test_no_loss_is_said_to_leave_more_than_a_trial_of_it(
    entries: list[dict[str, Any]], policy: str, served: float
) -> None:
    def trial(plan: Plan) -> dict[str, float]:
        """Serve a model in full on two gpu-lets or more."""
        return {spec.name: 1.0 if len(plan.hosts_of(spec.name)) > 1 else served for spec in plan.models}

    plan = solve(load_policy(policy), workload(*entries), cluster(), Profiles([]), trial=trial)
    for loss in plan.expected.losses:
        kind, _, domain = loss.domain.partition(" ")
        gone = {gpu.id for gpu in plan.gpus if domain_of(gpu, kind) == domain}
        left = trial(plan.model_copy(update={"gpulets": tuple(g for g in plan.gpulets if g.gpu not in gone)}))
        for name, rate in loss.goodput_rps.items():
            spec = next(spec for spec in plan.models if spec.name == name)
            assert rate <= left[name] * spec.rate_rps + 1e-6
            if spec.survive is not None and left[name] < 0.98 * spec.survive:
                assert name in plan.unserved_reasons


def test_what_a_trial_finds_too_little_gets_more_replicas_where_there_is_room() -> None:
    asked = workload({"rate_rps": 100, "slo_ms": 80, "survive": 1, "spread": "node"})

    def trial(plan: Plan) -> dict[str, float]:
        return {"m0": 1.0 if len(plan.hosts_of("m0")) > 1 else 0.4}

    roomy, small = (solve(load_policy("gpulet"), asked, cluster(n, 1), Profiles([]), trial=trial) for n in (4, 2))
    assert len(planned(asked, cluster(4, 1), "gpulet").hosts_of("m0")) == 2
    assert len(roomy.hosts_of("m0")) == 3
    assert not roomy.unserved_reasons
    assert "leaves it 40 of 100 rps" in small.unserved_reasons["m0"]


def test_a_plan_says_where_what_losses_leave_was_not_tried() -> None:
    asked = workload({"rate_rps": 100, "slo_ms": 80, "survive": 1})
    trials = (lambda _plan: {"m0": 1.0}, lambda _plan: None, None)
    said = [
        "losses" in " ".join(solve(load_policy("gpulet"), asked, cluster(), Profiles([]), trial=t).expected.assumptions)
        for t in trials
    ]
    assert said == [False, True, True]


def test_a_workload_may_ask_for_all_its_models() -> None:
    asked = workload({"rate_rps": 50, "slo_ms": 80}, {"rate_rps": 50, "slo_ms": 80, "survive": 0.5}, survive=1)
    assert [spec.survive for spec in asked.models] == [1, 0.5]
    assert all(len(planned(asked, cluster(), "gpulet").hosts_of(name)) > 1 for name in ("m0", "m1"))


def test_a_fixed_cluster_that_is_too_small_says_which_loss_takes_what() -> None:
    entry = {"rate_rps": 1700, "slo_ms": 30, "survive": 1}
    plan = planned(workload(entry), cluster(2, 1))
    assert "the loss of gpu n" in plan.unserved_reasons["m0"]


@pytest.mark.parametrize(
    ("entry", "on", "words"),
    [
        ({"keep_off": ["n7"]}, cluster(), "no such place in the cluster"),
        ({"keep_off": ["r0", "r1"]}, cluster(), "leaves the model no GPU"),
        ({"prefer": "n7"}, cluster(), "no such place in the cluster"),
        ({"prefer": "n1", "only_on": ["n0"]}, cluster(), "must not lie, by its only_on"),
        ({"prefer": "n2", "keep_off": ["r0"]}, cluster(), "must not lie, by its only_on"),
        ({"only_on": ["n1"], "spread": "node", "survive": 1}, cluster(), "may use one node only"),
        ({"survive": 1, "spread": "rack"}, cluster(1), "may use one rack only"),
        ({"spread": "node"}, cluster(1, elastic=True), "elastic cluster does not say"),
        ({"only_on": ["n0"]}, cluster(1, elastic=True), "elastic cluster does not say"),
    ],
)
def test_what_no_plan_can_obey_is_refused(entry: dict[str, Any], on: Cluster, words: str) -> None:
    with pytest.raises(InvalidInputError, match=words):
        planned(workload({"rate_rps": 50, "slo_ms": 80} | entry), on)
