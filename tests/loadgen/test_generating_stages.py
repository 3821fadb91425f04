"""Stages that generate, in virtual time: when their texts end, which are given up, and what the planner makes of
them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tenuto.batching.core.step_scheduler import StepLimits
from tenuto.batching.core.system import INF
from tenuto.batching.virtual.application_load import Joins
from tenuto.batching.virtual.virtual_steps import VirtualSteps
from tenuto.errors import InvalidInputError
from tenuto.loadgen.schedule import make_client_schedule, make_load
from tenuto.loadgen.simulated import SimulatedRun, Simulation
from tenuto.outcome import Outcome
from tenuto.placement import Cluster, Plan, Workload
from tenuto.placement.deadline_split import split_deadlines
from tenuto.placement.generates import TokenSlo
from tenuto.placement.workload import client_targets
from tenuto.profiles import Profiles
from tenuto.profiles.generation import StepCost
from tenuto.profiles.shipped import shipped_for

STEP_MS, ONE_MS = 10.0, 5.0
STEPS = StepCost.line(STEP_MS, 0.0, 0.0, 0.0, 0.0)
FAST = {"alpha_ms": 1.0, "beta_ms": ONE_MS - 1.0}
GENERATES = {"prompt_tokens": 10, "output_tokens": 20}
SLO = {"ttft_ms": 100.0, "tpot_ms": 20.0}
WRITE = {"model": "llm", "name": "write"}


def plan(
    *stages: dict[str, Any], rate_rps: float = 1.0, slo_ms: float = 1000.0, streams: bool = False, **llm: Any
) -> Plan:
    """Models `one` (5 ms a request), and `llm` (10 ms a step), and an application of these stages."""
    own = {"name": "llm", "rate_rps": rate_rps, "slo": SLO, "generates": GENERATES, **llm}
    one = {"name": "one", "rate_rps": rate_rps, "slo_ms": 500.0, "latency": FAST}
    process = {"process": "uniform"}
    app = {"name": "app", "rate_rps": rate_rps, "slo_ms": slo_ms, "arrival": process, "streams": streams}
    replicas = (
        {"name": "llm", "batch_size": 8, "kv_tokens": 1024, "steps": STEPS.model_dump(mode="json")},
        {"name": "one", "batch_size": 1, "latency": FAST, "latency_ms": ONE_MS},
    )
    return Plan.from_data(
        {
            "policy": {"name": "test"},
            "gpus": [{"id": "v", "type": "v100"}, {"id": "w", "type": "v100"}],
            "gpulets": [
                {"id": gpu, "gpu": gpu, "models": [replica]} for gpu, replica in zip("vw", replicas, strict=True)
            ],
            "models": [{**own, "alone": {"rate_rps": 0.0}}, {**one, "alone": {"rate_rps": 0.0}}],
            "applications": [{**app, "stages": [{"shared": True, **stage} for stage in stages]}],
        }
    )


def run(planned: Plan, duration_s: float = 10.0) -> SimulatedRun:
    return Simulation.of_plan(planned, duration_s=duration_s, warmup_s=0.0).run()


def test_a_text_takes_its_steps_and_the_next_stage_follows_it() -> None:
    found = run(
        plan({"model": "one"}, {**WRITE, "after": ["one"]}, {"model": "one", "name": "last", "after": ["write"]})
    )
    assert found.joins.counts() == {"app": [len(found.load.calls), 0, 0, 0, 0]}
    assert np.allclose(found.joins.stage_ms, [ONE_MS, 20 * STEP_MS, ONE_MS])
    tokens = found.load.tokens
    assert tokens is not None
    writes = found.load.stage == 1
    assert set(tokens.prompt[writes]) == {10}
    assert (set(tokens.output[writes]), set(tokens.output[~writes])) == ({20}, {0})


def test_a_stage_may_ask_for_less_than_its_model_usually_writes() -> None:
    found = run(plan({**WRITE, "parameters": {"max_tokens": 5}}))
    assert np.allclose(found.joins.stage_ms, 5 * STEP_MS)


def test_a_text_that_cannot_end_in_time_is_given_up_when_the_rest_needs_its_time() -> None:
    """Twenty steps take 200 ms; the request has 150, of which the last stage needs 5."""
    stages = (WRITE, {"model": "one", "name": "last", "after": ["write"]})
    found = run(plan(*stages, slo_ms=150.0, slo={"ttft_ms": 100.0, "tpot_ms": 2.0}), 3.5)
    assert found.joins.counts()["app"][Outcome.OK] == 0
    refused = run(plan(*stages, slo_ms=150.0), 3.5)  # its planned pace says so before
    assert refused.joins.counts() == {"app": [0, 0, 0, len(refused.load.calls), 0]}
    assert refused.result.writing is not None
    assert refused.result.writing.replicas[0].steps == 0


def test_what_is_long_beyond_expectation_is_given_up_at_the_last_moment() -> None:
    """Of mean length texts end in time; the longest take 2 s, and the request has 0.5."""
    lengths = {"prompt_tokens": 10, "output_tokens": {"quantiles": {0: 10, 90: 10, 91: 200, 100: 200}}}
    stages = ({**WRITE, "part": 24}, {"model": "one", "name": "last", "after": ["write"]})
    found = run(plan(*stages, slo_ms=500.0, generates=lengths, rate_rps=2.0), 100.0)
    counts, tokens, writing = found.joins.counts()["app"], found.load.tokens, found.result.writing
    assert tokens is not None
    assert writing is not None
    long = int((tokens.output > 49).sum())
    assert 0 < long < 30
    assert (counts[Outcome.OK], counts[Outcome.EXPIRED]) == (len(found.load.calls) - long, long)
    steps = sum(int(each) for each in tokens.output if each <= 49)
    (replica,) = writing.replicas
    assert replica.worked == steps + long * 50  # until 495 ms, which is within the fiftieth step


def test_a_text_is_withdrawn_with_the_other_stages_of_its_request() -> None:
    """`one` cannot take 20 requests within 60 ms; the text, which could end in time, is not written to its end."""
    stages = ({"model": "one", "count": 20}, {**WRITE, "parameters": {"max_tokens": 5}})
    found = run(plan(*stages, slo_ms=60.0), 2.5)
    assert found.joins.counts()["app"][Outcome.OK] == 0
    assert found.result.writing is not None
    assert found.result.writing.replicas[0].last_ms == {}
    assert found.result.writing.replicas[0].scheduler.sequences == 0


def test_a_stream_is_in_time_by_its_first_token_and_the_pace_of_further_ones() -> None:
    """The first token is there after 15 ms, the text of 20 after 205."""
    stages = ({"model": "one"}, {**WRITE, "after": ["one"]})
    joins = run(plan(*stages, slo_ms=50.0, streams=True)).joins
    assert joins.counts() == {"app": [len(joins.outcome), 0, 0, 0, 0]}
    assert np.allclose(joins.stage_ms, [ONE_MS, STEP_MS])
    assert np.allclose(joins.answered_ms - joins.first_ms, 19 * STEP_MS)
    assert set(joins.tokens) == {20}
    whole = run(plan(*stages, slo_ms=50.0)).joins
    assert whole.counts()["app"][Outcome.OK] == 0


@pytest.mark.parametrize(
    ("first_ms", "last_ms", "outcome"),
    [(50.0, 430.0, Outcome.OK), (50.1, 60.0, Outcome.LATE), (50.0, 430.2, Outcome.LATE)],
)
def test_a_stream_has_a_time_for_its_first_token_and_one_for_each_further(
    first_ms: float, last_ms: float, outcome: Outcome
) -> None:
    planned = plan(WRITE, slo_ms=50.0, streams=True)
    targets = client_targets(planned.models, planned.applications)
    load = make_load(planned.models, make_client_schedule(targets, planned.applications, 1.5, 0), 0)
    joins, at_ms = Joins(load), float(load.times_ms[0])
    joins.arrived(0, at_ms)
    assert joins.whole_by_ms(0) == INF
    joins.answered([0], at_ms + last_ms, {0: at_ms + first_ms})
    assert joins.outcome[0] == outcome


def test_the_stages_before_a_stream_have_the_time_that_its_text_takes() -> None:
    """The text takes up to 480 ms, 380 of them behind its first token."""
    own = {"name": "llm", "rate_rps": 1, "slo": SLO, "generates": GENERATES, "profile": "llama-7b"}
    stages = [{"model": "one", "latency": FAST}, {**WRITE, "after": ["one"]}]
    app = {"name": "app", "rate_rps": 1, "slo_ms": 300.0, "stages": stages}
    cluster, profiles = Cluster.parse("a100-80gb:2"), Profiles(shipped_for(["a100-80gb"]))
    budgets = {}
    for streams in (False, True):
        workload = Workload.model_validate({"models": [own], "applications": [{**app, "streams": streams}]})
        (split,) = split_deadlines(workload, cluster, profiles).applications
        budgets[streams] = [split.budget_ms(stage) for stage in split.stages]
    assert sum(budgets[True]) == pytest.approx(300.0)
    assert budgets[False][0] < 50.0 < budgets[True][0]


@pytest.mark.parametrize(
    ("more", "rule"),
    [
        ({"outputs": "graphs:text"}, "does not end in one text"),
        ({"stages": [WRITE, {**WRITE, "name": "beside"}]}, "does not end in one text"),
        ({"stages": [{**WRITE, "count": 2}]}, "does not end in one text"),
        ({"stages": [{"model": "resnet50"}]}, "does not generate"),
    ],
)
def test_what_cannot_be_streamed_is_refused_when_it_is_read(more: dict[str, Any], rule: str) -> None:
    llm = {"name": "llm", "rate_rps": 5, "slo": SLO, "generates": GENERATES}
    app = {"name": "app", "rate_rps": 3, "slo_ms": 1000, "stages": [WRITE], "streams": True, **more}
    with pytest.raises(InvalidInputError, match=rule):
        Workload.of_document({"models": [llm], "applications": [app]}, "workload.yaml")


@pytest.mark.parametrize("at_ms", [0.0, 5.0, 10.0, 34.0, 95.0, 99.0])
@pytest.mark.parametrize("ahead", [False, True])
def test_a_cancelled_sequence_leaves_no_trace(at_ms: float, ahead: bool) -> None:
    steps = VirtualSteps(StepLimits(8, 64, 1024), STEPS, decided_ahead=ahead)
    for sequence in (1, 2):
        assert steps.add(0.0, sequence, 10, 10) is None
    steps.advance(at_ms)
    assert steps.cancel(at_ms, 1)
    assert not steps.cancel(at_ms, 1)
    while steps.due_ms < INF:
        steps.advance(steps.due_ms)
    assert (steps.ended, steps.last_ms) == ([2], {2: 120.0 if ahead else 110.0})  # it joined a step, or two, later
    assert (1 in steps.first_ms, steps.scheduler.sequences, steps.scheduler.kv_tokens) == (False, 0, 0)


@pytest.mark.parametrize("time_ms", [10.0, 480.0, 5000.0])
@pytest.mark.parametrize("tokens", [1.0, 20.0])
def test_bounds_within_a_time_are_kept_by_an_answer_that_takes_it(time_ms: float, tokens: float) -> None:
    slo = TokenSlo(**SLO)
    within = slo.within(time_ms, tokens)
    assert within.answer_ms(tokens) == pytest.approx(time_ms)
    assert within.tpot_ms <= slo.tpot_ms
    assert slo.within(slo.answer_ms(tokens), tokens) == slo


def test_a_stage_may_have_a_model_of_its_own_that_generates() -> None:
    stage = {"model": "llama", "source": "transformers/llama", "slo": SLO, "generates": GENERATES, "count": 2}
    app = {"name": "app", "rate_rps": 3, "slo_ms": 1000, "stages": [stage]}
    workload = Workload.model_validate({"applications": [app]})
    (spec,) = workload.models
    assert (spec.name, spec.rate_rps, spec.slo, spec.slo_ms) == ("app.llama", 6.0, TokenSlo(**SLO), 480.0)
    assert Workload.model_validate(workload.model_dump(exclude_defaults=True)) == workload


def test_the_rate_of_a_shared_model_that_generates_has_all_that_ask_it() -> None:
    llm = {"name": "llm", "rate_rps": 5, "slo": SLO, "generates": GENERATES}
    app = {"name": "app", "rate_rps": 3, "slo_ms": 1000, "stages": [WRITE]}
    (spec,) = Workload.model_validate({"models": [llm], "applications": [app]}).models
    assert (spec.rate_rps, spec.alone and spec.alone.rate_rps, spec.slo) == (8.0, 5.0, TokenSlo(**SLO))


@pytest.mark.parametrize(
    ("stage", "rule"),
    [
        ({"model": "resnet50", "parameters": {"max_tokens": 5}}, "does not generate"),
        ({"model": "llm", "parameters": {"max_tokens": 0}}, "greater than or equal to 1"),
        ({"model": "llm", "parameters": {"tokens": 5}}, "unknown key"),
        ({"model": "llm", "generates": GENERATES}, "repeats generates"),
        ({"model": "llama", "generates": GENERATES}, "has no `slo`"),
    ],
)
def test_a_stage_that_generates_is_checked_when_it_is_read(stage: dict[str, Any], rule: str) -> None:
    llm = {"name": "llm", "rate_rps": 5, "slo": SLO, "generates": GENERATES}
    app = {"name": "app", "rate_rps": 3, "slo_ms": 1000, "stages": [stage]}
    with pytest.raises(InvalidInputError, match=rule):
        Workload.of_document({"models": [llm], "applications": [app]}, "workload.yaml")
