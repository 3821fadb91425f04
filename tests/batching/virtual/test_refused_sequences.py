"""In virtual time a plan refuses what it refuses when it serves; an engine alone, and a rival, refuse nothing."""

import numpy as np
import pytest

from tenuto.batching.core.build import everywhere, from_plan
from tenuto.batching.core.system import System
from tenuto.batching.registry import make_scheduler
from tenuto.batching.virtual.simulator import simulate
from tenuto.batching.virtual.virtual_steps import RequestTokens
from tenuto.outcome import Outcome
from tenuto.placement import Cluster, Plan, Workload
from tenuto.placement.generates import TokenSlo
from tenuto.profiles import Profile, Profiles, StepCost
from tenuto.profiles.generation import Generation, StepsAt

COST = StepCost.line(10.0, 0.1, 1.0, 0.0, 0.0)
SLO = TokenSlo(ttft_ms=60, tpot_ms=22)
MODEL = {
    "name": "m",
    "rate_rps": 10,
    "slo": SLO.model_dump(),
    "generates": {"prompt_tokens": 100, "output_tokens": 20, "max_sequences": 8, "max_batch_tokens": 200},
}


def planned(*costs: StepCost) -> System:
    gpulets = []
    for place, cost in enumerate(costs):
        replica = {"name": "m", "batch_size": 8, "kv_tokens": 4000, "steps": cost.model_dump(mode="json")}
        gpulets.append({"id": f"{place}", "gpu": "g", "share_pct": 50, "models": [replica]})
    plan = {"policy": {"name": "test"}, "gpus": [{"id": "g", "type": "v100"}], "gpulets": gpulets, "models": [MODEL]}
    return from_plan(Plan.from_data(plan), check_slos=False)


def alone() -> System:
    steps = StepsAt(**COST.model_dump())
    row = {"generation": Generation(kv_tokens=4000, steps=(steps,)).model_dump(mode="json")}
    profile = Profile.model_validate({"name": "p", "gpu_type": "v100", "source": "made up", "models": {"m": row}})
    workload = Workload.model_validate({"models": [MODEL]})
    return everywhere(workload, Cluster.parse("v100:1"), Profiles([profile]))


@pytest.mark.parametrize(
    ("system", "scheduler", "refuses"),
    [(planned(COST), "deferred", True), (planned(COST), "eager", False), (alone(), "deferred", False)],
)
def test_only_what_serves_refuses(system: System, scheduler: str, refuses: bool) -> None:
    draws = np.random.default_rng(3)
    times = np.cumsum(draws.exponential(25.0, 400))
    tokens = RequestTokens(np.full(400, 100), np.full(400, 20))
    made = make_scheduler(scheduler, system)
    models = np.zeros(400, dtype=np.int32)
    counts = simulate(made, times, models, tokens=tokens, slos={0: SLO}, warmup_s=0.0).counts()[0]
    given_up = counts[Outcome.REJECTED] + counts[Outcome.EXPIRED]
    assert counts.sum() == 400
    assert (given_up > 20) == refuses
    assert (counts[Outcome.OK] > 150) == refuses


def test_what_one_gpulet_refuses_another_one_takes_as_when_it_serves() -> None:
    too_slow = StepCost.line(1000.0, 0.1, 1.0, 0.0, 0.0)
    tokens, models = RequestTokens(np.full(5, 100), np.full(5, 20)), np.zeros(5, dtype=np.int32)
    made = make_scheduler("deferred", planned(too_slow, COST))
    run = simulate(made, 1000.0 * np.arange(5), models, tokens=tokens, slos={0: SLO}, warmup_s=0.0)
    assert run.counts()[0][Outcome.OK] == 5
