"""Where models that generate lie beside others: what each loss leaves, what is bought, MIG instances, and several GPUs
together."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tenuto.batching.planning.losses import LossTrials
from tenuto.errors import InvalidInputError
from tenuto.loadgen.simulated import Simulation
from tenuto.placement import Cluster, Plan, Workload, solve
from tenuto.placement.cluster import node_of
from tenuto.placement.explaining import explain
from tenuto.placement.placement_constraints import domain_of, prefers
from tenuto.placement.planner.completion import check_plan
from tenuto.placement.planner.fault_tolerance import Trial
from tenuto.placement.shown.table import rows_of
from tenuto.placement.workload import ModelSpec
from tenuto.profiles import Profile, Profiles
from tests.instruments.generating import (
    FIXED,
    KIND,
    PROFILES,
    WRITES,
    ByForm,
    cluster,
    fixed,
    only_together,
    together,
    writes,
)
from tests.instruments.obeyed import assert_obeys


def planned(
    models: tuple[ModelSpec, ...], on: Cluster, profiles: Profiles = PROFILES, trial: Trial | None = None
) -> Plan:
    return solve(ByForm(), Workload(models=models), on, profiles, trial=trial)


def with_several(count: int = 4, faster: float = 6.0) -> Profiles:
    """Return the profiles with steps on several GPUs together too, with which fewer carry less for each GPU."""
    assert WRITES.generation is not None
    more = WRITES.generation.model_copy(update={"steps": (*WRITES.generation.steps, *together(count, faster))})
    rows = {"writes": WRITES.model_copy(update={"generation": more}), "fixed": FIXED}
    return Profiles([Profile(name="p", gpu_type=KIND, source="made up", models=rows)])


# --- places and losses ----------------------------------------------------------------------------------------------

wishes = st.fixed_dictionaries(
    {"rate_rps": st.sampled_from([1.0, 5.0, 25.0])},
    optional={
        "spread": st.sampled_from(["gpu", "node", "rack"]),
        "survive": st.sampled_from([0.5, 1.0]),
        "keep_off": st.sampled_from([["n0"], ["n2"], ["n2/0", "n1/0"]]),
        "prefer": st.sampled_from(["n1", "r1", "n1/1"]),
    },
)


@given(st.lists(wishes, min_size=1, max_size=3), st.lists(wishes, max_size=2))
def test_every_plan_obeys_and_says_what_each_loss_leaves(
    generating: list[dict[str, Any]], others: list[dict[str, Any]]
) -> None:
    models = [writes(f"llm{i}", **entry) for i, entry in enumerate(generating)]
    for i, entry in enumerate(others):
        given = {"name": f"net{i}", "profile": "fixed", "slo_ms": 100, **entry, "rate_rps": 10 * entry["rate_rps"]}
        models.append(ModelSpec.model_validate(given))
    plan = planned(tuple(models), cluster(3, 2))
    assert_obeys(plan)
    assert all(len(gpulet.models) == 1 for gpulet in plan.gpulets if gpulet.models[0].steps is not None)


def test_at_least_what_a_plan_says_of_a_loss_runs_after_it() -> None:
    """It says what the formulas plan for; beyond capacity more is kept, as what cannot be is refused."""
    models = (writes(rate_rps=8.0, survive=1.0, spread="node"), writes("half", 30.0, survive=0.5), fixed())
    plan = planned(models, cluster(2, 3), trial=LossTrials())
    assert "was not tried" not in " ".join(plan.expected.assumptions)
    assert plan.expected.losses
    for loss in plan.expected.losses:
        kind, name = loss.domain.split()
        lost = frozenset(gpu.id for gpu in plan.gpus if domain_of(gpu, kind) == name)
        how = {"duration_s": 50.0, "warmup_s": 10.0, "seed": 5, "losses": ((10.0, lost),)}
        ran = Simulation.of_plan(plan, **how).run().summary()["models"]
        for model, rate in loss.goodput_rps.items():
            part = rate / plan.model(model).rate_rps
            assert ran[model]["attainment"] >= part - 0.03


def test_what_is_left_beyond_its_capacity_keeps_what_the_formulas_say() -> None:
    models = writes(rate_rps=60.0, survive=1.0), fixed(10.0)
    by_form, tried = planned(models, cluster(1, 4)), planned(models, cluster(1, 4), trial=LossTrials())
    assert "and 100 % of it are to survive" in tried.unserved_reasons["llm"]
    assert [loss.goodput_rps for loss in tried.expected.losses] == [
        loss.goodput_rps for loss in by_form.expected.losses
    ]
    assert all(loss.goodput_rps["llm"] < 50.0 for loss in tried.expected.losses)


def test_models_that_generate_go_where_they_prefer_when_that_costs_nothing() -> None:
    plan = planned((writes(prefer="n1"), fixed().model_copy(update={"prefer": "n0"})), cluster(2, 1))
    assert [gpulet.gpu for gpulet in plan.hosts_of("llm")] == ["n1/0"]
    assert [gpulet.gpu for gpulet in plan.hosts_of("fixed")] == ["n0/0"]


def test_a_model_that_may_lie_only_beside_others_of_its_node_shares_the_memory_there() -> None:
    plan = planned((writes("a", only_on=["n0"]), writes("b", only_on=["n0"])), cluster(2, 1))
    assert {gpulet.gpu for gpulet in plan.gpulets} == {"n0/0"}
    assert sum(gpulet.memory_mib or 0.0 for gpulet in plan.gpulets) <= 81_920
    assert not plan.unserved_reasons


# --- elastic clusters -----------------------------------------------------------------------------------------------


def test_the_cheapest_gpus_that_carry_the_load_are_bought() -> None:
    slow = WRITES.model_copy(update={"generation": WRITES.generation and WRITES.generation.scaled(1.5)})
    other = Profile(name="l40s", gpu_type="l40s", source="made up", models={"writes": slow})
    profiles = Profiles([*PROFILES, other])
    groups = [{"type": KIND, "price_per_hour": 5.0}, {"type": "l40s", "price_per_hour": 1.0, "memory_mib": 46_000}]
    market = Cluster.model_validate({"nodes": [{"name": "n0", "gpus": groups}], "elastic": True})
    cheap = planned((writes(rate_rps=4.0),), market, profiles)
    assert {gpu.type for gpu in cheap.gpus} == {"l40s"}
    assert not cheap.unserved_reasons
    tight = planned((writes(rate_rps=4.0, slo={"ttft_ms": 1000, "tpot_ms": 16}),), market, profiles)
    assert {gpu.type for gpu in tight.gpus} == {KIND}
    both = planned((writes(rate_rps=4.0), writes("tight", 4.0, slo={"ttft_ms": 1000, "tpot_ms": 16})), market, profiles)
    assert both.expected.cost_per_hour is not None
    assert both.expected.cost_per_hour <= 6.0


@pytest.mark.parametrize("rate_rps", [1.0, 30.0, 200.0])
def test_as_many_are_bought_as_the_load_takes_and_no_more(rate_rps: float) -> None:
    plan = planned((writes(rate_rps=rate_rps),), cluster(1, 1, elastic=True))
    assert plan.expected.models["llm"].goodput_rps == pytest.approx(rate_rps)
    assert plan.expected.gpus_used == len(plan.gpus) == len(plan.used_gpus)
    if len(plan.gpus) > 1:
        fewer = planned((writes(rate_rps=rate_rps),), cluster(1, len(plan.gpus) - 1))
        assert "llm" in fewer.unserved_reasons


def test_both_kinds_are_bought_together_where_that_is_cheaper() -> None:
    models = (writes(rate_rps=2.0), fixed(20.0))
    plan = planned(models, cluster(1, 1, elastic=True))
    assert plan.expected.gpus_used == 1
    assert not plan.unserved_reasons
    assert any("both kinds together cost less than apart" in note for note in plan.notes)
    apart = solve(ByForm(), Workload(models=models, mps="off"), cluster(1, 1, elastic=True), PROFILES)
    assert apart.expected.gpus_used == 2


def test_what_no_trial_carries_is_neither_bought_nor_promised() -> None:
    class Carriesless(ByForm):
        """A policy whose trials fail for one model."""

        def carries(self, spec: ModelSpec, cost: Any, kv_tokens: int) -> tuple[float, int]:
            is_bad = spec.slo is not None and spec.slo.ttft_ms == 999
            return (0.0, 0) if is_bad else super().carries(spec, cost, kv_tokens)

    workload = Workload(models=(writes("bad", slo={"ttft_ms": 999, "tpot_ms": 50}), writes("good"), fixed()))
    for on in (cluster(1, 1, elastic=True), cluster(1, 3)):
        plan = solve(Carriesless(), workload, on, PROFILES)
        assert not plan.hosts_of("bad")
        assert "bad" not in plan.expected.models
        assert "no share of a a100-80gb carries it" in plan.unserved_reasons["bad"]
        assert plan.expected.models["good"].goodput_rps == 2.0


def test_spare_gpus_are_bought_for_what_must_survive() -> None:
    plan = planned((writes(rate_rps=60.0, survive=1.0),), cluster(1, 1, elastic=True))
    less = planned((writes(rate_rps=60.0),), cluster(1, 1, elastic=True))
    assert plan.expected.gpus_used == less.expected.gpus_used + 1
    assert {loss.goodput_rps["llm"] for loss in plan.expected.losses} == {60.0}


# --- MIG instances --------------------------------------------------------------------------------------------------

HALVES = {"mig": "fixed", "instances": [{"profile": "3g.40gb", "start": 0}, {"profile": "3g.40gb", "start": 4}]}


def test_a_model_lies_in_an_instance_and_the_plan_says_what_it_assumes() -> None:
    on = cluster(1, 1, **HALVES)
    plan = planned((writes("a", 1.0), writes("b", 1.0)), on)
    assert not plan.unserved_reasons
    assert {gpu.type for gpu in plan.gpus} == {"a100-80gb-3g.40gb"}
    for gpulet in plan.gpulets:
        (replica,) = gpulet.models
        assert (replica.memory_mib or 0.0) < 40_960
        assert replica.steps is not None
        # 3 of 7 GPCs and 4 of 8 memory slices: everything takes at most 7/3 times as long
        assert replica.steps.ms(sequences=1) == pytest.approx(11.0 * 7 / 3)
    (line,) = (line for line in plan.expected.assumptions if "were not measured" in line)
    assert "count as 2.33 times as slow as on a whole GPU" in line


def test_what_was_measured_in_an_instance_counts_and_nothing_is_assumed() -> None:
    own = Profile(name="i", gpu_type="a100-80gb-3g.40gb", source="made up", models={"writes": WRITES})
    plan = planned((writes("a", 1.0),), cluster(1, 1, **HALVES), Profiles([own, *PROFILES]))
    (replica,) = plan.gpulets[0].models
    assert replica.steps is not None
    assert replica.steps.ms(sequences=1) <= 16.0
    assert not plan.expected.assumptions


def test_an_instance_that_generates_keeps_its_gpu_cut_for_the_others() -> None:
    inside = Profile(name="i", gpu_type="a100-80gb-3g.40gb", source="made up", models={"fixed": FIXED})
    halves = {**HALVES, "mig": "managed"}
    plan = planned((writes("a", 1.0), fixed()), cluster(1, 1, **halves), Profiles([inside, *PROFILES]))
    assert not plan.unserved_reasons
    assert sorted(gpulet.gpu for gpulet in plan.gpulets) == ["n0/0.0", "n0/0.4"]
    assert plan.expected.gpus_used == 1


# --- several GPUs together ------------------------------------------------------------------------------------------


def test_what_one_gpu_cannot_hold_lies_on_several_of_one_node() -> None:
    plan = planned((writes("big", 2.0, profile="large"), writes(rate_rps=1.0)), cluster(2, 2), only_together())
    assert not plan.unserved_reasons
    for gpulet in plan.hosts_of("big"):
        assert len(gpulet.gpus) == 2
        assert len({node_of(gpu) for gpu in gpulet.gpus}) == 1
        (replica,) = gpulet.models
        assert replica.weights_mib == pytest.approx(45_000.0)  # on each GPU
        assert (replica.memory_mib or 0.0) == pytest.approx(45_000.0 + (replica.kv_tokens or 0) * 0.25, abs=1.0)
        assert (replica.memory_mib or 0.0) <= (gpulet.memory_mib or 0.0) <= 81_920
    for there in plan.by_gpu().values():
        assert sum(gpulet.effective_share_pct for gpulet in there) <= 100
        assert sum(gpulet.memory_mib or 0.0 for gpulet in there) <= 81_920 + 1
    assert Plan.model_validate(plan.model_dump(mode="json", by_alias=True)) == plan
    assert any("big runs on 2 GPUs together" in note for note in plan.notes)
    ran = Simulation.of_plan(plan, duration_s=60.0, seed=1).run().summary()
    assert ran["models"]["big"]["attainment"] > 0.98


def test_nodes_that_are_too_small_are_named_as_the_reason() -> None:
    plan = planned((writes("big", 2.0, profile="large"), writes(rate_rps=1.0)), cluster(4, 1), only_together())
    assert plan.unserved == ("big",)
    assert "as many GPUs of one node" in plan.unserved_reasons["big"]


def test_more_gpus_together_are_taken_only_where_each_carries_more() -> None:
    models = (writes(rate_rps=500.0),)
    faster = planned(models, cluster(1, 4), with_several(4, 6.0))
    assert {len(gpulet.gpus) for gpulet in faster.gpulets} == {4}
    slower = planned(models, cluster(1, 4), with_several(4, 2.0))
    assert {len(gpulet.gpus) for gpulet in slower.gpulets} == {1}


def test_the_loss_of_any_of_its_gpus_ends_it() -> None:
    models = (writes("big", 2.0, profile="large", survive=1.0), writes(rate_rps=1.0))
    plan = planned(models, cluster(2, 2), only_together(), LossTrials())
    assert not plan.unserved_reasons
    assert {loss.domain for loss in plan.expected.losses} >= {"gpu n0/0", "gpu n0/1", "gpu n1/0", "gpu n1/1"}
    one = planned((writes("big", 2.0, profile="large"),), cluster(1, 2), only_together())
    run = Simulation.of_plan(one, duration_s=20.0, warmup_s=2.0, losses=((2.0, frozenset(("n0/1",))),)).run()
    assert run.summary()["models"]["big"]["ok"] == 0


def test_every_count_of_what_lies_on_a_gpu_has_it_on_each() -> None:
    plan = planned((writes("big", 2.0, profile="large"),), cluster(1, 2), only_together())
    (gpulet,) = plan.gpulets
    assert plan.on_gpu("n0/0") == plan.on_gpu("n0/1") == (gpulet,)
    assert plan.by_gpu() == {"n0/0": [gpulet], "n0/1": [gpulet]}
    assert plan.used_gpus == ("n0/0", "n0/1")
    assert plan.expected.gpus_used == 2
    assert plan.expected.cost_per_hour == 2 * 5.07
    assert plan.processes()[gpulet.id].also_on == ("n0/1",)
    assert [(row.gpu, row.rate_rps) for row in rows_of(plan)] == [("n0/0", 2.0), ("n0/1", None)]
    found = explain(plan, cluster(1, 2).gpus, only_together())
    assert found.models[0].cost_per_hour == pytest.approx(2 * 5.07)
    assert found.models[0].replicas[0].gpu == "n0/0 + n0/1"
    ran = Simulation.of_plan(plan, duration_s=20.0, seed=1).run().result
    assert set(ran.gpu_busy_ms()) == {"n0/0", "n0/1"}


def test_both_kinds_share_what_models_on_several_gpus_leave() -> None:
    models = (writes("big", 1.0, profile="large"), writes(rate_rps=1.0), fixed(10.0))
    plan = planned(models, cluster(1, 3), only_together())
    assert not plan.unserved_reasons
    assert len(plan.used_gpus) == 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"also_on": ("n1/0",)}, "GPUs of several nodes"),
        ({"also_on": ("n0/7",)}, "no such GPU"),
        ({"also_on": ("n0/0",)}, "names a GPU twice"),
        ({"also_on": ("n0/2",)}, "GPUs of several types"),
    ],
)
def test_a_plan_that_cannot_be_is_refused_with_the_cure(change: dict[str, Any], message: str) -> None:
    groups = [{"type": KIND, "count": 2}, {"type": "v100"}]
    nodes = [{"name": "n0", "gpus": groups}, {"name": "n1", "gpus": [{"type": KIND}]}]
    on = Cluster.model_validate({"nodes": nodes})
    plan = planned((writes("big", 2.0, profile="large"),), on, only_together())
    (gpulet,) = plan.gpulets
    with pytest.raises(InvalidInputError, match=message):
        check_plan(plan.model_copy(update={"gpulets": (gpulet.model_copy(update=change),)}), on)


def test_a_model_of_fixed_cost_is_not_laid_on_several_gpus() -> None:
    plan = planned((fixed(),), cluster(1, 2))
    changed = plan.gpulets[0].model_copy(update={"also_on": ("n0/1",)})
    with pytest.raises(InvalidInputError, match="only a model that generates"):
        check_plan(plan.model_copy(update={"gpulets": (changed,)}), cluster(1, 2))


def test_shares_on_the_other_gpus_count() -> None:
    plan = planned((writes("big", 2.0, profile="large"), fixed()), cluster(1, 3), only_together())
    (big,) = plan.hosts_of("big")
    whole = big.model_copy(update={"share_pct": None})
    (other,) = (gpulet for gpulet in plan.hosts_of("fixed"))
    beside = other.model_copy(update={"gpu": big.also_on[0], "share_pct": 10.0})
    with pytest.raises(InvalidInputError, match="shares sum to more than 100 %"):
        check_plan(plan.model_copy(update={"gpulets": (whole, beside)}), cluster(1, 3))


def test_a_model_on_several_gpus_obeys_places() -> None:
    models = (writes("big", 2.0, profile="large", only_on=["n1"]), writes(rate_rps=1.0, prefer="n0"))
    plan = planned(models, cluster(2, 2), only_together())
    assert {node_of(gpu) for gpulet in plan.hosts_of("big") for gpu in gpulet.gpus} == {"n1"}
    gpus = {gpu.id: gpu for gpu in plan.gpus}
    assert all(prefers(plan.model("llm"), gpus[gpulet.gpu]) for gpulet in plan.hosts_of("llm"))


def test_a_plan_says_which_part_of_requests_is_too_long() -> None:
    lengths = {"prompt_tokens": 1000, "output_tokens": {"quantiles": {0: 1, 100: 2001}}}
    long = writes("long", generates=lengths)  # 2,048 tokens are taken: 47.6 % have more
    plan = planned((long, writes("short")), cluster(1, 2))
    (note,) = [note for note in plan.notes if "tokens: refused" in note]
    assert note.startswith("long: 4")
    assert note.endswith(" % of its requests have more than 2048 tokens: refused")


def test_where_models_that_generate_leave_no_room_the_others_go_unserved() -> None:
    hurried = ModelSpec(name="fixed", rate_rps=500.0, slo_ms=7.0)  # no share of a GPU is in time
    plan = planned((writes(), hurried), cluster(1, 1))
    assert plan.unserved == ("fixed",)
    assert plan.hosts_of("llm")


def test_others_that_only_a_taken_type_runs_go_unserved() -> None:
    slow = Profile(name="q", gpu_type="v100", source="made up", models={"slow": FIXED})
    on = Cluster.parse(f"{KIND}:1,v100:1")
    only_here = fixed(5_000.0)
    other = ModelSpec(name="slow", rate_rps=10.0, slo_ms=100.0)
    plan = planned((writes(rate_rps=20.0), only_here, other), on, Profiles([*PROFILES, slow]))
    assert plan.hosts_of("slow")
    assert "fixed" in plan.unserved_reasons
