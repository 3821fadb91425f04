"""The controller follows the lengths of prompts and answers, and plans for those that it measures."""

from itertools import product
from pathlib import Path

import numpy as np
import pytest

from tenuto.batching.registry import make_scheduler
from tenuto.batching.virtual.virtual_steps import RequestTokens
from tenuto.deployments.control.interface import ModelSeen
from tenuto.deployments.control.journal import Kind
from tenuto.deployments.control.lengths import MeasuredLengths, as_declared
from tenuto.deployments.control.settings import ControlSettings
from tenuto.deployments.control.virtual import ControlledCluster, ControlledLoad, ControlledRun, Incident
from tenuto.loadgen.schedule import make_load, make_schedule
from tenuto.outcome import OUTCOMES, Outcome
from tenuto.placement import Cluster, Workload, load_policy, solve
from tenuto.placement.expectation.outlook import Outlooks, Traffic
from tenuto.placement.expectation.queueing import rate_with_bursts
from tenuto.placement.generates import Lengths
from tenuto.placement.generation_capacity import carried
from tenuto.placement.workload import ModelSpec
from tenuto.profiles import Profile, Profiles, StepCost
from tenuto.profiles.generation import Generation, StepsAt
from tests.deployments.control.desk import Desk

RATE, SECONDS, STEP_S = 13.0, 120.0, 40.0
COST = StepCost.line(10.0, 0.05, 0.2, 0.0, 0.0)
OUTPUT = {"lognormal": {"median": 100, "sigma": 0.5, "most": 1500}}
MODEL = {
    "name": "m",
    "rate_rps": RATE,
    "slo": {"ttft_ms": 1000, "tpot_ms": 30},
    "generates": {"prompt_tokens": 200, "output_tokens": OUTPUT, "max_sequences": 64},
}


def profiles() -> Profiles:
    steps = StepsAt(**COST.model_dump())
    row = {"generation": Generation(kv_tokens=40_000, steps=(steps,)).model_dump(mode="json")}
    return Profiles(
        [Profile.model_validate({"name": "p", "gpu_type": "v100", "source": "made up", "models": {"m": row}})]
    )


def run(longer: float, *, first_gpus: int = 1, lost: str = "") -> ControlledRun:
    """Serve under a controller a load whose answers become so many times as long, without any change of its rate."""
    workload, known = Workload.model_validate({"models": [MODEL]}), profiles()
    plan = solve(load_policy("tenuto", {}), workload, Cluster.parse(f"v100:{first_gpus}"), known)
    assert len(plan.gpulets) == first_gpus
    draws = np.random.default_rng(1)
    times = np.cumsum(draws.exponential(1000.0 / RATE, round(1.2 * RATE * SECONDS)))
    times = times[times < 1000.0 * SECONDS]
    output = 100 * np.exp(0.5 * draws.standard_normal(len(times))) * np.where(times > 1000.0 * STEP_S, longer, 1.0)
    tokens = RequestTokens(np.full(len(times), 200), np.rint(output).astype(np.int64).clip(1, 1500))
    load = ControlledLoad(("m",), times, np.zeros(len(times), dtype=np.int32), SECONDS, tokens=tokens)
    # One GPU carries the rate: a controller that acts would give the other one back before it is lost.
    settings = ControlSettings.model_validate({"mode": "advise" if lost else "act", "policy": {"name": "tenuto"}})
    incidents = [Incident(STEP_S, lose=(lost,))] if lost else []
    found = ControlledCluster(
        load,
        workload,
        plan,
        Cluster.parse("v100:3").gpus,
        known,
        settings,
        lambda system: make_scheduler("deferred", system),
        incidents=incidents,
    ).run()
    assert found.ended().sum() == len(times)
    return found


@pytest.mark.parametrize("tokens", [0, 1, 100_000])
@pytest.mark.parametrize("looks", [1, 60])
def test_any_lengths_can_be_planned_with(tokens: int, looks: int) -> None:
    """Answers that were all empty ended the controller, again and again."""
    lengths = MeasuredLengths(20.0)
    spec = ModelSpec.model_validate({**MODEL, "generates": {"prompt_tokens": 100, "output_tokens": 100}})
    for look in range(looks):
        lengths.observe(1.0, {"m": ModelSeen(generated=3, prompt_tokens=tokens + look % 2, output_tokens=tokens)})
        lengths.have_moved([spec])
        (measured,) = lengths.measured([spec])
        assert measured.generates is not None
        assert measured.generates.output_tokens is not None
        assert measured.generates.output_tokens.mean > 0.0
        lengths.asked([spec])


def test_answers_twice_as_long_bring_another_plan_at_the_same_rate() -> None:
    same, longer = run(1.0), run(2.0)
    assert same.count(Kind.CHANGED) == 0
    changed = [entry for entry in longer.entries if entry.kind == Kind.CHANGED]
    assert changed
    assert STEP_S < changed[0].at_s < STEP_S + 60.0
    _, plan, _ = next(each for each in longer.plans if len(each[1].gpulets) > 1)
    assert plan.models[0].generates == ModelSpec.model_validate(MODEL).generates  # declared ones stay declared
    late = longer.windows[-1].ended[0]
    assert late[Outcome.OK] >= 0.99 * late.sum()


@pytest.mark.parametrize("every_s", [1, 10])
def test_the_status_says_the_rate_that_gpulets_are_planned_for(every_s: int) -> None:
    """Bursts count once: within the TTFT, and not also within a second, as those of models of fixed cost do."""
    workload, cluster = Workload.model_validate({"models": [MODEL]}), Cluster.parse("v100:3")
    desk = Desk(solve(load_policy("tenuto", {}), workload, cluster, profiles()), cluster.gpus, {"mode": "advise"})
    for second in range(600):  # all requests of so many seconds come at once
        desk.rates["m"] = 0.0 if second % every_s else every_s * RATE
        desk.look()
    expected_rps = rate_with_bursts(RATE, desk.controller.rates.dispersion["m"], 1.0, 0.01)
    assert desk.controller.state().planned_for_rps["m"] == pytest.approx(expected_rps, rel=0.05)
    asked_rps = [question.request.running.traffic.upper_rps["m"] for question in desk.questions]
    assert max(asked_rps[1:], default=0.0) < 1.05 * expected_rps  # the first burst may be a jump


def test_answers_that_go_on_for_minutes_after_the_end_are_counted() -> None:
    workload, known, cluster = Workload.model_validate({"models": [MODEL]}), profiles(), Cluster.parse("v100:1")
    plan = solve(load_policy("tenuto", {}), workload, cluster, known)
    tokens = RequestTokens(np.full(4, 200), np.full(4, 9_000))  # a step takes 10 ms
    load = ControlledLoad(("m",), np.full(4, 9_000.0), np.zeros(4, dtype=np.int32), 10.0, tokens=tokens)
    found = ControlledCluster(
        load, workload, plan, cluster.gpus, known, ControlSettings(), lambda system: make_scheduler("deferred", system)
    ).run()
    assert found.ended()[0][Outcome.OK] == 4


def test_sequences_of_a_gpu_that_is_lost_go_on_elsewhere() -> None:
    found = run(1.0, first_gpus=2, lost="n0/0")
    assert found.ended()[0][OUTCOMES.index("failed")] == 0
    assert found.attainments()["m"] > 0.97


def left_to_a_trace(tmp_path: Path, rate_rps: float = RATE) -> ModelSpec:
    """Return the model, which leaves its lengths to the trace of its arrivals."""
    draws = np.random.default_rng(3)
    output = np.rint(100 * np.exp(0.5 * draws.standard_normal(2000))).astype(int).clip(1, 1500)
    lines = [f"{1000 * place / rate_rps:.3f},m,200,{tokens}" for place, tokens in enumerate(output)]
    (tmp_path / "log.csv").write_text("\n".join(["time_ms,model,prompt_tokens,output_tokens", *lines]))
    arrival = {"process": "trace", "path": str(tmp_path / "log.csv")}
    return ModelSpec.model_validate(
        MODEL | {"rate_rps": rate_rps, "arrival": arrival, "generates": {"max_sequences": 64}}
    )


def test_a_model_whose_lengths_are_its_traces_keeps_the_gpus_that_it_needs(tmp_path: Path) -> None:
    spec, known = left_to_a_trace(tmp_path, 2 * RATE), profiles()
    workload, cluster = Workload(models=(spec,)), Cluster.parse("v100:2")
    load = make_load([spec], make_schedule([spec], SECONDS / 2, 0), 0)
    found = ControlledCluster(
        ControlledLoad(("m",), load.times_ms, load.model_index, SECONDS / 2, tokens=load.tokens),
        workload,
        solve(load_policy("tenuto", {}), workload, cluster, known),
        cluster.gpus,
        known,
        ControlSettings.model_validate({"mode": "act", "policy": {"name": "tenuto"}}),
        lambda system: make_scheduler("deferred", system),
    ).run()
    assert {len(plan.gpulets) for _, plan, _ in found.plans} == {2}
    assert found.attainments()["m"] > 0.99


def test_lengths_of_a_trace_are_followed_as_declared_ones_are(tmp_path: Path) -> None:
    declared, lengths = [left_to_a_trace(tmp_path)], MeasuredLengths(20.0)
    [spec] = lengths.measured(declared)
    assert spec.generates is not None
    assert spec.generates.output_tokens is not None
    mean = spec.generates.output_tokens.mean
    assert as_declared([spec], declared) == tuple(declared)
    for _ in range(24):
        lengths.observe(0.5, seen(2 * mean))
    [longer] = lengths.measured(declared)
    assert longer.generates is not None
    assert longer.generates.output_tokens is not None
    assert longer.generates.output_tokens.mean == pytest.approx(2 * mean, rel=0.1)
    (tmp_path / "log.csv").unlink()
    assert MeasuredLengths(20.0).measured(declared) == tuple(declared)  # as where the trace is on another machine


def test_a_plan_is_judged_by_the_trials_that_it_was_made_by() -> None:
    policy, workload = load_policy("tenuto", {}), Workload.model_validate({"models": [MODEL]})
    plan = solve(policy, workload, Cluster.parse("v100:1"), profiles())
    [replica] = plan.gpulets[0].models
    assert replica.steps is not None
    assert replica.kv_tokens is not None
    carries_rps, _ = policy.carries(workload["m"], replica.steps, replica.kv_tokens)
    for times, carries in product((0.9, 1.25, 2.0), (carried, policy.carries)):
        outlook = Outlooks(carries=carries).of(plan, Traffic({"m": times * carries_rps}))
        assert outlook.load == pytest.approx(times, rel=1e-3)
        assert outlook.parts["m"] == pytest.approx(min(1.0, 1.0 / times), rel=1e-3)


def test_lengths_that_hardly_differ_are_one_question_to_the_planner() -> None:
    declared, asked = [ModelSpec.model_validate(MODEL)], []
    for output in (198.0, 200.0, 203.0):
        lengths = MeasuredLengths(20.0)
        for _ in range(24):
            lengths.observe(0.5, seen(output))
        asked.append(lengths.measured(declared))
        lengths.asked(declared)
        assert not lengths.have_moved(declared)
    assert asked[0] == asked[1] == asked[2] != tuple(declared)


def seen(output: float, count: int = 20) -> dict[str, ModelSeen]:
    return {"m": ModelSeen(count, count, 0, count, 200 * count, round(output * count))}


def test_lengths_are_as_declared_until_they_differ_by_more_than_chance() -> None:
    declared, draws = [ModelSpec.model_validate(MODEL)], np.random.default_rng(2)
    lengths = MeasuredLengths(20.0)
    assert lengths.measured(declared) == tuple(declared)
    generates = declared[0].generates
    assert generates is not None
    assert generates.output_tokens is not None
    mean = generates.output_tokens.mean
    for _ in range(100):
        lengths.observe(0.5, seen(mean * (1 + 0.1 * draws.standard_normal())))
    assert not lengths.have_moved(declared)
    for _ in range(24):
        lengths.observe(0.5, seen(2 * mean * (1 + 0.1 * draws.standard_normal())))
    assert lengths.have_moved(declared)
    [spec] = lengths.measured(declared)
    assert spec.generates is not None
    assert spec.generates.output_tokens is not None
    assert spec.generates.output_tokens.mean == pytest.approx(2 * mean, rel=0.15)
    lengths.asked(declared)
    assert not lengths.have_moved(declared)
    assert as_declared([spec], declared) == tuple(declared)


@pytest.mark.parametrize("form", [40, OUTPUT, {"quantiles": {0: 10, 50: 30, 100: 90}}])
def test_scaled_lengths_have_the_scaled_mean(form: object) -> None:
    lengths = Lengths.model_validate(form)
    assert lengths.scaled(1.7).mean == pytest.approx(1.7 * lengths.mean, rel=0.01)
