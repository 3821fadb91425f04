"""Models that generate in plans: what a share carries, how gpu-lets are packed, and what the plan says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tenuto.batching.planning.tenuto_policy import TenutoPolicy
from tenuto.batching.planning.token_trials import carried_in_trial, in_time
from tenuto.errors import InvalidInputError
from tenuto.placement import Cluster, Plan, Workload
from tenuto.placement.carrying import carried, place_generating
from tenuto.placement.policies.symphony.symphony_policy import Symphony
from tenuto.placement.solve import solve
from tenuto.placement.workload import ModelSpec
from tenuto.profiles import Generation, ModelProfile, Profile, ProfilePoint, Profiles, StepsAt

FAST = {"prefill_ms": ((32, 12.0), (1032, 162.0)), "decode_ms": ((1, 11.0), (64, 13.0), (264, 33.0))}
SLOW = {"prefill_ms": ((32, 16.0), (1032, 416.0)), "decode_ms": ((1, 16.0), (64, 20.0), (264, 80.0))}
WRITES = ModelProfile(
    weights_mib=13_000.0,
    generation=Generation(
        kv_bytes_per_token=524_288.0,
        longest_context=2048,
        steps=(
            StepsAt.model_validate({**FAST, "context_token_ms": 0.0004}),
            StepsAt.model_validate({**SLOW, "context_token_ms": 0.0006, "share_pct": 30}),
        ),
    ),
)
FIXED = ModelProfile(
    points=tuple(ProfilePoint(batch_size=b, latency_ms=5.0 + b, memory_mib=3000.0) for b in (1, 2, 4, 8, 16)),
    weights_mib=500.0,
)
PROFILES = Profiles(
    [Profile(name="p", gpu_type="a100-80gb", source="made up", models={"writes": WRITES, "fixed": FIXED})]
)


def writes(name: str = "llm", rate_rps: float = 2.0, **more: Any) -> ModelSpec:
    given = {
        "name": name,
        "profile": "writes",
        "rate_rps": rate_rps,
        "slo": {"ttft_ms": 1000, "tpot_ms": 50},
        "generates": {"prompt_tokens": 100, "output_tokens": 100},
    }
    return ModelSpec.model_validate(given | more)


def fixed(rate_rps: float = 50.0) -> ModelSpec:
    return ModelSpec(name="fixed", rate_rps=rate_rps, slo_ms=100.0)


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


def test_what_a_trial_finds_holds_for_other_arrivals_and_not_for_twice_the_rate() -> None:
    generation = WRITES.generation
    assert generation is not None
    spec = writes(generates={"prompt_tokens": 100, "output_tokens": {"lognormal": {"median": 100, "sigma": 0.5}}})
    rate, _ = carried_in_trial(spec, generation.cost(60), 50_000, attainment=0.99, seed=0)
    assert in_time(spec, generation.cost(60), 50_000, rate, seed=7) >= 0.985
    assert in_time(spec, generation.cost(60), 50_000, 2 * rate, seed=7) < 0.9


def test_small_loads_share_a_gpu_and_large_ones_get_replicas() -> None:
    small = planned((writes("a", 1.0), writes("b", 1.0)), 1)
    assert [gpulet.gpu for gpulet in small.gpulets] == ["n0/0", "n0/0"]
    assert sum(gpulet.effective_share_pct for gpulet in small.gpulets) <= 100
    assert small.expected.models["a"].goodput_rps == 1.0
    large = planned((writes("a", 60.0),), 3)
    assert len({gpulet.gpu for gpulet in large.hosts_of("a")}) > 1
    assert any("a shares no GPU: its load fills a GPU" in note for note in large.notes)
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


def test_too_much_load_is_carried_in_part_and_the_plan_says_how_much() -> None:
    plan = planned((writes(rate_rps=500.0),), 1)
    carried_rps = plan.expected.models["llm"].goodput_rps
    assert 5 < carried_rps < 100
    assert "of 500 rps expected in time" in plan.unserved_reasons["llm"]
    crowded = planned((writes(rate_rps=500.0), fixed()), 1)
    assert crowded.unserved_reasons["fixed"] == "the models that generate take all GPUs"


def test_others_take_the_share_that_a_model_that_generates_leaves() -> None:
    plan = planned((writes(rate_rps=1.0), fixed(10.0)), 1)
    (own,), (other,) = plan.hosts_of("llm"), plan.hosts_of("fixed")
    assert own.gpu == other.gpu == "n0/0"
    assert own.effective_share_pct + other.effective_share_pct <= 100
    assert (own.memory_mib or 0) + (other.memory_mib or 0) <= 81_920
    assert plan.expected.models["fixed"].goodput_rps == pytest.approx(10.0)
    assert plan.expected.gpus_used == 1
    assert not plan.unserved_reasons
    assert any("fixed: also on shares that models that generate leave on n0/0" in note for note in plan.notes)
    crowded = planned((writes(rate_rps=1.0), fixed(5000.0)), 1)
    assert 0 < crowded.expected.models["fixed"].goodput_rps < 1000
    assert "of 5000 rps expected in time" in crowded.unserved_reasons["fixed"]


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
    ("models", "cluster", "message"),
    [
        ((writes(),), "a100-80gb:elastic", "not planned on an elastic cluster"),
        ((writes(spread="gpu"),), "a100-80gb:1", "`spread` is not planned for models that generate"),
        ((writes(profile="fixed"),), "a100-80gb:1", "its profile has no `generation`"),
        ((ModelSpec(name="m", profile="writes", rate_rps=1, slo_ms=9),), "a100-80gb:1", "has only steps of a model"),
    ],
)
def test_what_cannot_be_planned_is_refused_with_the_cure(
    models: tuple[ModelSpec, ...], cluster: str, message: str
) -> None:
    kind, _, much = cluster.partition(":")
    gpus = Cluster.parse(f"{kind}:1")
    gpus = gpus.model_copy(update={"elastic": True}) if much == "elastic" else gpus
    with pytest.raises(InvalidInputError, match=message):
        solve(TenutoPolicy(starts=("symphony",)), Workload(models=models), gpus, PROFILES)


def test_other_policies_refuse_models_that_generate() -> None:
    with pytest.raises(InvalidInputError, match="does not plan models that generate"):
        solve(Symphony(), Workload(models=(writes(),)), Cluster.parse("a100-80gb:1"), PROFILES)


def test_the_type_that_carries_most_is_taken() -> None:
    plan = place_generating((writes(),), Cluster.parse("v100:2,a100-80gb:1"), PROFILES, most_gpus=3, fewest=True)
    assert plan.gpus == ("n0/2",)
    assert (plan.goodput_rps or {})["llm"] == 2.0


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


def test_no_memory_is_planned_that_no_sequence_could_use() -> None:
    spec = writes(rate_rps=0.1, generates={"prompt_tokens": 100, "output_tokens": 100, "max_sequences": 8})
    (gpulet,) = planned((spec,), 1).gpulets
    (replica,) = gpulet.models
    assert replica.kv_tokens == 8 * 2048
    assert replica.memory_mib == pytest.approx(13_000 + 8 * 2048 * 0.5)
