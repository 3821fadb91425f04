"""Models that generate in plans: what a share carries, how gpu-lets are packed, and what the plan says."""

from __future__ import annotations

from pathlib import Path

import pytest

from tenuto.batching.planning.tenuto_policy import TenutoPolicy
from tenuto.batching.planning.token_trials import carried_in_trial, in_time, served_in_trial
from tenuto.errors import InvalidInputError
from tenuto.loadgen.simulated import Simulation
from tenuto.placement import Cluster, Plan, Workload, solve
from tenuto.placement.explaining import explain
from tenuto.placement.generation_capacity import GeneratingHost, carried, with_planned_rates
from tenuto.placement.planner.generation_packing import Means, place_generating
from tenuto.placement.policies.symphony.symphony_policy import Symphony
from tenuto.placement.workload import ModelSpec
from tenuto.profiles import Generation, ModelProfile, Profile, Profiles, StepCost, StepsAt
from tests.instruments.generating import FAST, PROFILES, WRITES, fixed, writes

CARRIES = TenutoPolicy().carries
NIGHT = pytest.mark.night


@pytest.fixture(autouse=True)
def tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a share carries is tried once for all tests: it depends on neither plans nor rates."""
    monkeypatch.setattr(TenutoPolicy, "carries", lambda policy, *asked: CARRIES(*asked))


@pytest.fixture
def by_formula(monkeypatch: pytest.MonkeyPatch, tried_once: None) -> None:
    """No trial says what a share carries, where a test is about something else."""
    monkeypatch.setattr(TenutoPolicy, "carries", lambda _policy, *asked: carried(*asked))


def planned(models: tuple[ModelSpec, ...], gpus: int) -> Plan:
    cluster = Cluster.parse(f"a100-80gb:{gpus}")
    return solve(TenutoPolicy(starts=("symphony",), requests=200), Workload(models=models), cluster, PROFILES)


def test_a_tighter_slo_less_memory_and_a_smaller_share_carry_less() -> None:
    generation = WRITES.generation
    assert generation is not None
    whole, part = generation.cost(100), generation.cost(40)
    rate, sequences = carried(writes(), whole, 100_000)
    assert rate > carried(writes(), part, 100_000)[0] > 0
    assert rate > carried(writes(), whole, 4_000)[0] > 0
    assert rate > carried(writes(slo={"ttft_ms": 1000, "tpot_ms": 16}), whole, 100_000)[0] > 0
    assert sequences > 1
    assert carried(writes(slo={"ttft_ms": 1000, "tpot_ms": 10}), whole, 100_000) == (0.0, 0)
    assert carried(writes(slo={"ttft_ms": 20, "tpot_ms": 50}), whole, 100_000) == (0.0, 0)
    assert carried(writes(), whole, 100) == (0.0, 0)


@pytest.mark.parametrize("share_pct", [pytest.param(40, marks=NIGHT), 100])
def test_few_sequences_at_once_carry_less_and_keep_the_slo(share_pct: int) -> None:
    generation = WRITES.generation
    assert generation is not None
    cost, before = generation.cost(share_pct), 0.0
    for most in (*range(1, 9), 12, 16, 24, 32, 48, 64, 96, 128):
        lengths = {"prompt_tokens": 100, "output_tokens": {"lognormal": {"median": 100, "sigma": 0.5}}}
        spec = writes(generates=lengths | {"max_sequences": most})
        rate, sequences = carried(spec, cost, 50_000)
        assert rate > 0.9 * before
        assert 1 <= sequences <= most
        assert in_time(spec, [GeneratingHost(cost, 50_000, rate)], rate, (most,)) >= 0.93
        before = rate


@pytest.mark.usefixtures("by_formula")
def test_a_processor_keeps_no_more_tokens_than_the_longest_requests_have() -> None:
    small = WRITES.model_copy(update={"weights_mib": 1000.0})
    cpu = Profile(name="p", source="made up", gpu_type="cpu", models={"writes": small})
    spec = writes(generates={"prompt_tokens": 100, "output_tokens": 60, "max_sequences": 20})
    plan = solve(TenutoPolicy(requests=200), Workload(models=(spec,)), Cluster.parse("cpu:1"), Profiles((cpu,)))
    assert plan.gpulets[0].models[0].kv_tokens == 20 * 160


def test_what_a_trial_finds_holds_for_other_arrivals_and_not_for_twice_the_rate() -> None:
    generation = WRITES.generation
    assert generation is not None
    spec = writes(generates={"prompt_tokens": 100, "output_tokens": {"lognormal": {"median": 100, "sigma": 0.5}}})
    rate, _ = carried_in_trial(spec, generation.cost(60), 50_000, attainment=0.99, seed=0)
    hosts = [GeneratingHost(generation.cost(60), 50_000, rate)]
    assert in_time(spec, hosts, rate, (7,)) >= 0.99
    assert in_time(spec, hosts, 2 * rate, (7,)) < 0.9
    together = spec.model_copy(update={"rate_rps": 2.05 * rate})
    assert served_in_trial(together, 2 * hosts, attainment=0.99, seed=0) == 1.0
    assert 0.4 < served_in_trial(together, hosts, attainment=0.99, seed=0) < 0.9


@pytest.mark.parametrize(
    "shares", [(30, 30, 90), *(pytest.param(each, marks=NIGHT) for each in ((30, 100), (40, 60, 80), (50, 60)))]
)
def test_unequal_gpulets_carry_together_what_each_carries_alone(shares: tuple[int, ...]) -> None:
    generation = WRITES.generation
    assert generation is not None
    spec = writes(generates={"prompt_tokens": 100, "output_tokens": {"lognormal": {"median": 100, "sigma": 0.5}}})
    hosts = []
    for share in shares:
        cost, kv_tokens = generation.cost(share), 600 * share
        hosts.append(GeneratingHost(cost, kv_tokens, CARRIES(spec, cost, kv_tokens)[0]))
    rate = sum(host.rate_rps for host in hosts)
    assert in_time(spec, hosts, rate, (7,)) >= 0.99


def test_small_loads_share_a_gpu_and_large_ones_get_replicas() -> None:
    small = planned((writes("a", 1.0), writes("b", 1.0)), 1)
    assert [gpulet.gpu for gpulet in small.gpulets] == ["n0/0", "n0/0"]
    assert sum(gpulet.effective_share_pct for gpulet in small.gpulets) <= 100
    assert small.expected.models["a"].goodput_rps == 1.0
    large = planned((writes("a", 60.0),), 3)
    assert len({gpulet.gpu for gpulet in large.hosts_of("a")}) > 1
    full = planned((writes("a", 500.0),), 3)
    for plan, why in ((large, "no other model that generates takes a part of it"), (full, "its load fills a GPU")):
        assert any(f"a shares no GPU: {why}" in note for note in plan.notes)
    for gpulet in (*small.gpulets, *large.gpulets):
        (replica,) = gpulet.models
        assert replica.steps is not None
        assert replica.kv_tokens is not None
        assert replica.longest_context == 2048
        assert replica.memory_mib is not None
        assert gpulet.memory_mib is not None
        assert replica.memory_mib >= 13_000 + replica.kv_tokens / 2 - 1
        assert replica.memory_mib <= gpulet.memory_mib


def test_both_kinds_are_planned_on_gpus_of_their_own_and_the_plan_survives_its_file() -> None:
    plan = planned((writes(), fixed()), 2)
    assert [gpulet.gpu for gpulet in plan.hosts_of("llm")] == ["n0/0"]
    assert [gpulet.gpu for gpulet in plan.hosts_of("fixed")] == ["n0/1"]
    assert plan.expected.gpus_used == 2
    assert plan.expected.goodput_rps == pytest.approx(52.0)
    assert not plan.unserved_reasons
    assert plan.policy.name == "tenuto"
    assert Plan.model_validate(plan.model_dump(mode="json", by_alias=True)) == plan


@pytest.mark.parametrize("rate_rps", [pytest.param(60.0, marks=NIGHT), 120.0])
def test_too_much_load_is_served_in_part_and_the_plan_says_how_much(rate_rps: float) -> None:
    plan = planned((writes(rate_rps=rate_rps, slo={"ttft_ms": 500, "tpot_ms": 25}),), 1)
    served = (
        Simulation.of_plan(plan, duration_s=60.0, warmup_s=5.0, seed=5).run().summary()["models"]["llm"]["attainment"]
    )
    assert served < 0.9
    assert plan.expected.models["llm"].goodput_rps / rate_rps == pytest.approx(served, abs=0.02)
    assert f"of {rate_rps:g} rps expected in time" in plan.unserved_reasons["llm"]


def test_both_kinds_share_a_gpu_where_apart_some_are_not_served() -> None:
    plan = planned((writes(rate_rps=1.0), fixed(10.0)), 1)
    (own,), (other,) = plan.hosts_of("llm"), plan.hosts_of("fixed")
    assert own.gpu == other.gpu == "n0/0"
    assert own.effective_share_pct + other.effective_share_pct <= 100
    assert (own.memory_mib or 0) + (other.memory_mib or 0) <= 81_920
    assert plan.expected.models["fixed"].goodput_rps == pytest.approx(10.0)
    assert plan.expected.gpus_used == 1
    assert plan.expected.cost_per_hour == 5.07
    assert not plan.unserved_reasons
    assert [gpu.type for gpu in plan.gpus] == ["a100-80gb"]
    assert any("share GPUs with others, which gives" in note for note in plan.notes)
    crowded = planned((writes(rate_rps=500.0), fixed()), 1)
    parts = [model.goodput_rps / crowded.model(name).rate_rps for name, model in crowded.expected.models.items()]
    assert 0 < min(parts) < 0.2 < max(parts)
    alone = planned((writes(rate_rps=1.0), fixed(10.0)), 2)
    assert any("share no GPU with others, as all are in time on GPUs apart" in note for note in alone.notes)


def test_a_share_beside_decoding_is_used_where_no_number_of_whole_gpus_serves_both_kinds() -> None:
    full = planned((writes(rate_rps=500.0),), 2).hosts_of("llm")
    rates = (sum(gpulet.models[0].rate_rps or 0.0 for gpulet in full), 1000.0)
    plan = planned((writes(rate_rps=0.6 * rates[0]), fixed(0.6 * rates[1])), 2)
    assert not plan.unserved_reasons
    assert len(plan.hosts_of("fixed")) >= 1
    for gpulets in plan.by_gpu().values():
        assert sum(gpulet.effective_share_pct for gpulet in gpulets) <= 100
    by_share = {g.effective_share_pct: p.latency.at(1) for g in plan.hosts_of("fixed") for p in g.programs if p.latency}
    assert all(ms >= 6.0 for ms in by_share.values())
    off = Workload(models=plan.models, mps="off")
    apart = solve(TenutoPolicy(starts=("symphony",), requests=200), off, Cluster.parse("a100-80gb:2"), PROFILES)
    assert any("shares need CUDA MPS" in note for note in apart.notes)


def test_where_not_all_have_room_those_of_least_priority_are_left_out() -> None:
    many = tuple(writes(f"m{i}", 0.1, priority=i) for i in range(5))
    plan = planned(many, 1)
    assert plan.hosts_of("m4")
    assert not plan.hosts_of("m0")
    assert plan.unserved_reasons["m0"] == "the GPUs have no room for it beside the other models that generate"


def test_a_model_too_large_for_a_gpu_is_unserved_with_the_reason() -> None:
    plan = planned((writes(slo={"ttft_ms": 1000, "tpot_ms": 5}), fixed()), 2)
    assert plan.unserved == ("llm",)
    assert "takes longer than its SLO" in plan.unserved_reasons["llm"]
    assert plan.expected.models["fixed"].goodput_rps == pytest.approx(50.0)


@pytest.mark.parametrize(
    ("models", "message"),
    [
        ((writes(keep_off=["n0"]),), "leaves the model no GPU"),
        ((writes(survive=1.0),), "may use one gpu only, and nothing survives its loss"),
        ((writes(profile="fixed"),), "its profile has no `generation`"),
        ((ModelSpec(name="m", profile="writes", rate_rps=1, slo_ms=9),), "has only steps of a model"),
    ],
)
def test_what_cannot_be_planned_is_refused_with_the_cure(models: tuple[ModelSpec, ...], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        solve(TenutoPolicy(starts=("symphony",)), Workload(models=models), Cluster.parse("a100-80gb:1"), PROFILES)


def test_other_policies_refuse_models_that_generate() -> None:
    with pytest.raises(InvalidInputError, match="does not plan models that generate"):
        solve(Symphony(), Workload(models=(writes(),)), Cluster.parse("a100-80gb:1"), PROFILES)


def test_the_type_that_carries_most_is_taken() -> None:
    plan = place_generating((writes(),), Cluster.parse("v100:2,a100-80gb:1"), Means(PROFILES), most_gpus=3, fewest=True)
    assert plan.gpus == ("n0/2",)
    assert plan.goodput_rps["llm"] == 2.0


@pytest.mark.parametrize("kv_tokens", [None, 6400])
def test_a_profile_from_a_log_gives_whole_gpus_and_a_trace_gives_lengths(tmp_path: Path, kv_tokens: int | None) -> None:
    (tmp_path / "trace.csv").write_text("time_ms,prompt_tokens,output_tokens\n0,90,110\n500,110,90\n")
    generation = Generation(kv_tokens=kv_tokens, steps=(StepsAt.model_validate(FAST),))
    told = Profile(name="log", gpu_type="l4", source="a log", models={"writes": ModelProfile(generation=generation)})
    trace = {"process": "trace", "path": str(tmp_path / "trace.csv")}
    spec = writes(arrival=trace, generates={"max_sequences": 64})
    plan = solve(TenutoPolicy(), Workload(models=(spec,)), Cluster.parse("l4:1"), Profiles([told]))
    (gpulet,) = plan.gpulets
    assert (gpulet.share_pct, gpulet.memory_mib, plan.expected.goodput_rps) == (None, None, 2.0)
    assert gpulet.models[0].kv_tokens == (kv_tokens or 64 * 224)  # the longest of both, in whole blocks of 16


def test_what_tells_neither_memory_nor_the_longest_request_is_refused() -> None:
    generation = Generation(steps=(StepsAt.model_validate(FAST),))
    told = Profile(name="log", gpu_type="l4", source="a log", models={"writes": ModelProfile(generation=generation)})
    endless = writes(generates={"prompt_tokens": {"lognormal": {"median": 100, "sigma": 1}}, "output_tokens": 100})
    with pytest.raises(InvalidInputError, match=r"does not tell its memory.*kv_tokens"):
        solve(TenutoPolicy(), Workload(models=(endless,)), Cluster.parse("l4:1"), Profiles([told]))


@pytest.mark.usefixtures("by_formula")
def test_no_memory_is_planned_that_no_sequence_could_use() -> None:
    spec = writes(rate_rps=0.1, generates={"prompt_tokens": 100, "output_tokens": 100, "max_sequences": 8})
    (gpulet,) = planned((spec,), 1).gpulets
    (replica,) = gpulet.models
    assert replica.kv_tokens == 8 * 2048
    assert replica.memory_mib == pytest.approx(13_000 + 8 * 2048 * 0.5)


@pytest.mark.usefixtures("by_formula")
def test_a_model_that_generates_is_explained_by_what_its_steps_carry() -> None:
    plan = planned((writes(), fixed()), 2)
    found = explain(plan, Cluster.parse("a100-80gb:2").gpus, PROFILES)
    one, other = found.models
    (replica,) = one.replicas
    assert one.promised_rps == pytest.approx(2.0)
    assert other.promised_rps == pytest.approx(50.0)
    assert one.most_rps is not None
    assert one.most_rps > 4.0
    assert one.least_slo_ms is not None
    assert 0.1 * one.slo_ms < one.least_slo_ms < one.slo_ms
    assert 11.0 < (replica.takes_ms or 0.0) < 60.0
    assert 0 < replica.busy < 0.5
    assert (replica.carried_rps, replica.without_rps, replica.waits_ms) == (2.0, 0.0, None)
    assert found.growth is not None
    assert found.growth > 1.5


def test_a_trial_lasts_longer_than_a_queue_takes_to_be_late() -> None:
    """Of short requests thousands come within an SLO: all are in time although the queue only grows."""
    lengths = {"prompt_tokens": {"tokens": 40}, "output_tokens": {"tokens": 2}}
    generates = {**lengths, "max_sequences": 256, "max_batch_tokens": 512}
    spec = ModelSpec.model_validate(
        {"name": "m", "rate_rps": 500.0, "slo": {"ttft_ms": 2000, "tpot_ms": 200}, "generates": generates}
    )
    cost = StepCost.line(9.0, 0.02, 0.02, 0.0, 0.0)
    rate_rps, _ = carried_in_trial(spec, cost, 100_000, attainment=0.99, seed=0)
    host, minute = GeneratingHost(cost, 100_000, 1.0), round(60.0 * rate_rps)
    served = in_time(spec, [host], rate_rps, (7, 7), minute, refuses=True)
    assert served > 0.92  # to a tenth, as in `STEADY_SLOS`


def test_gpulets_have_as_much_of_the_rate_as_they_carry() -> None:
    """One that was added for little of the rate, or none, is sent as much as others that carry as much."""
    plan = planned((writes(rate_rps=30.0), fixed()), 4)
    writing = [g for g in plan.gpulets if g.models[0].steps is not None]
    assert len(writing) > 1
    first = writing[0].models[0]
    unlike = first.model_copy(update={"rate_rps": 0.0}), first.model_copy(update={"rate_rps": None, "tried": 0.5})
    gpulets = [g.model_copy(update={"models": (r,)}) for g, r in zip(writing, (*unlike, *[first] * 9), strict=False)]
    others = [g for g in plan.gpulets if g not in writing]
    shared = with_planned_rates([*gpulets, *others], plan.models)
    rates = [g.models[0].rate_rps or 0.0 for g in shared[: len(gpulets)]]
    assert shared[len(gpulets) :] == tuple(others)
    assert rates[1] == pytest.approx(0.5 / first.tried * rates[0])
    assert sum(rates) <= 30.0 + 1e-3
    assert min(rates) > 0.0


@pytest.mark.usefixtures("by_formula")
@pytest.mark.parametrize("survive", [None, 0.5, 1.0])
@pytest.mark.parametrize("rate_rps", [5.0, 60.0, 500.0])
def test_plans_share_a_rate_by_one_rule_whatever_placed_the_gpulets(rate_rps: float, survive: float | None) -> None:
    """Those on GPUs apart, beside other models, added for a loss, or too few for all."""
    plan = planned((writes(rate_rps=rate_rps, survive=survive), writes("beside", rate_rps=3.0), fixed()), 4)
    assert with_planned_rates(plan.gpulets, plan.models) == plan.gpulets
    for spec in plan.models[:2]:
        rates = [r.rate_rps or 0.0 for g in plan.gpulets for r in g.models if r.name == spec.name]
        assert rates
        assert sum(rates) <= spec.rate_rps + 1e-3
