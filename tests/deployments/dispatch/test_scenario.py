"""One scenario, two drivers of the scheduler core: virtual time and the dispatcher must run the same batches."""

import random
from pathlib import Path
from typing import Any

import pytest

from tenuto.deployments.dispatch.fleet import gpulet_connection
from tenuto.deployments.gpulet.replica import LocalReplica
from tenuto.deployments.serve.deployment import Deployment
from tenuto.errors import InvalidInputError
from tenuto.outcome import Outcome
from tenuto.placement import Plan
from tests.instruments.replay import run_scenario, run_virtual_clock
from tests.instruments.scenario import RanBatch, Scenario, run_virtual
from tests.instruments.seeds import seeds

FILE = Path(__file__).parents[2] / "data" / "scenarios" / "two_gpulets.yaml"
# A jumping clock is exact but for rounding: one nanosecond.
VIRTUAL_BOUND_MS = 1e-6 + 1e-9


def furthest_ms(simulated: list[RanBatch], served: list[RanBatch]) -> float:
    """Check that both ran the same batches in the same places; return the largest difference of dispatch times."""
    assert [batch[1:] for batch in sorted(served)] == [batch[1:] for batch in simulated]
    return max(abs(a.dispatched_ms - b.dispatched_ms) for a, b in zip(simulated, sorted(served), strict=True))


def test_the_documented_scenario_runs_the_same_batches_on_both_drivers() -> None:
    scenario = Scenario.load(FILE)
    simulated = run_virtual(scenario)
    served, answers = run_virtual_clock(scenario)
    assert furthest_ms(simulated, served) <= VIRTUAL_BOUND_MS
    executed = {request for batch in simulated for request in batch.requests}
    assert {n for n, answer in enumerate(answers) if answer.outcome is Outcome.OK} == executed
    assert {answer.outcome for answer in answers} == {Outcome.OK, Outcome.EXPIRED}


def test_a_full_batch_leaves_at_once_and_a_short_one_waits_for_its_deadline() -> None:
    scenario = Scenario.from_data(
        {
            "models": [{"name": "m", "slo_ms": 120, "latency": {"alpha_ms": 1, "beta_ms": 1}, "rate_rps": 5}],
            "gpulets": [{"id": "g", "models": {"m": 2}}],
            "arrivals": [{"model": "m", "at_ms": 10, "count": 2}, {"model": "m", "at_ms": 500}],
            "scheduler": {"options": {"save_above": 0.0}},
        }
    )
    (full, short), answers = run_virtual_clock(scenario)
    assert full == (10.0, "g", "m", (0, 1))
    assert 560 < short.dispatched_ms <= 500 + 120 - 3 - 1 - 2  # less the way back, the way there, and l(1)
    assert [answer.outcome for answer in answers] == [Outcome.OK] * 3


def drawn(seed: int, scheduler: str) -> Scenario:
    """A random scenario: 2 to 4 models on 1 to 4 gpu-lets, 150 requests at irregular times, up to overload."""
    draw = random.Random(seed)
    models = [
        {
            "name": f"m{n}",
            "slo_ms": draw.uniform(60, 250),
            "latency": {"alpha_ms": draw.uniform(0.5, 4), "beta_ms": draw.uniform(2, 20)},
        }
        for n in range(draw.randint(2, 4))
    ]
    gpulets = [
        {"id": f"g{n}", "models": {m["name"]: draw.randint(2, 12) for m in models}} for n in range(draw.randint(1, 4))
    ]
    arrivals = [
        {"model": draw.choice(models)["name"], "at_ms": draw.uniform(0, draw.choice([300, 1500]))} for _ in range(150)
    ]
    return Scenario.from_data(
        {"scheduler": {"name": scheduler}, "models": models, "gpulets": gpulets, "arrivals": arrivals}
    )


@pytest.mark.parametrize("scheduler", ["deferred", "symphony", "eager"])
@pytest.mark.parametrize("seed", range(6))
def test_drawn_scenarios_run_the_same_batches_on_both_drivers(seed: int, scheduler: str) -> None:
    scenario = drawn(seed, scheduler)
    assert furthest_ms(run_virtual(scenario), run_virtual_clock(scenario)[0]) <= VIRTUAL_BOUND_MS


@pytest.mark.parametrize("scheduler", ["deferred", "symphony", "eager"])
@pytest.mark.parametrize("seed", seeds(3, 4))
def test_merged_models_run_the_same_joint_batches_on_both_drivers(seed: int, scheduler: str) -> None:
    plain = drawn(seed, scheduler)
    names = [model.name for model in plain.models][:2]
    gpulets = tuple(gpulet.model_copy(update={"merge": (tuple(names),)}) for gpulet in plain.gpulets)
    scenario = plain.model_copy(update={"gpulets": gpulets})
    simulated = run_virtual(scenario)
    assert furthest_ms(simulated, run_virtual_clock(scenario)[0]) <= VIRTUAL_BOUND_MS
    models = [name for _, name in scenario.schedule()]
    joint = [{models[request] for request in batch.requests} for batch in simulated if "+" in batch.model]
    assert {frozenset(names)} <= {frozenset(both) for both in joint}


async def _started(plan: Plan) -> dict[str, LocalReplica]:
    config = Deployment(plan=plan, executor="emulated").config()
    return {
        each.spec.gpulet: await LocalReplica.start(each.spec, each.user_config)
        for each in config.gpulets
        if each.spec is not None
    }


async def test_real_gpulets_on_a_real_clock_keep_the_rules_of_the_same_scenario() -> None:
    """Which requests share a batch is up to the machine's timers here; the rules of batches are not."""
    scenario = Scenario.load(FILE)
    models = [name for _, name in scenario.schedule()]
    largest = {(gpulet.id, model): size for gpulet in scenario.gpulets for model, size in gpulet.models.items()}
    gpulets = await _started(scenario.plan())
    try:
        served, answers = await run_scenario(
            scenario, gpulet_connection, find_gpulet=lambda name: gpulets[name].endpoint
        )
    finally:
        for gpulet in gpulets.values():
            await gpulet.close()
    executed = [request for batch in sorted(served) for request in batch.requests]
    assert len(executed) == len(set(executed))
    for batch in served:
        assert {models[request] for request in batch.requests} == {batch.model}
        assert 0 < len(batch.requests) <= largest[batch.gpulet, batch.model]
    for name in set(models):  # first come, first served
        assert [n for n in executed if models[n] == name] == sorted(n for n in executed if models[n] == name)
    answered = {n for n, answer in enumerate(answers) if answer.outcome is Outcome.OK}
    assert answered <= set(executed)  # a machine that stands still for a moment brings some answers too late
    assert {answer.outcome for answer in answers} <= {Outcome.OK, Outcome.EXPIRED}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"arrivals": [{"model": "x", "at_ms": 0}]}, "no such model"),
        ({"arrivals": [{"model": "m", "at_ms": -1}]}, "at_ms"),
        ({"arrivals": []}, "arrivals"),
        ({"gpulets": [{"id": "g", "models": {"n": 1}}]}, "no such model"),
        ({"gpulets": [{"id": "g", "models": {"m": 0}}]}, "models"),
        ({"models": [{"name": "m", "slo_ms": 0, "latency": {"alpha_ms": 1, "beta_ms": 1}}]}, "slo_ms"),
        ({"nonsense": 1}, "nonsense"),
    ],
)
def test_faults_are_named(change: dict[str, Any], said: str) -> None:
    sound = {
        "models": [{"name": "m", "slo_ms": 100, "latency": {"alpha_ms": 1, "beta_ms": 1}}],
        "gpulets": [{"id": "g", "models": {"m": 4}}],
        "arrivals": [{"model": "m", "at_ms": 0}],
    }
    Scenario.from_data(sound)
    with pytest.raises(InvalidInputError, match=said):
        Scenario.from_data({**sound, **change})
