"""What is left after a loss, tried in virtual time: where the formulas believe too much, no plan does."""

from __future__ import annotations

from typing import Any

import pytest

from tenuto.batching.planning.losses import LossTrials
from tenuto.batching.planning.plan_search import LARGE
from tenuto.batching.planning.trial import Trials
from tenuto.loadgen.simulated import Simulation
from tenuto.placement import Cluster, Plan, Workload, load_policy, solve
from tenuto.profiles import Profiles
from tenuto.profiles.shipped import load_shipped

THESIS = Profiles([load_shipped("thesis-v100")])
# Long batches before two GPUs that are busy for four fifths of their time; by the formulas all of them are in time.
CROWDED = (
    ("vgg19", 92.8, 50),
    ("inception_v3", 170.8, 150),
    ("inception_v3", 71.8, 50),
    ("t5", 5.4, 100),
    ("efficientnet_b7", 36.0, 200),
    ("inception_v3", 262.3, 100),
    ("gpt2", 18.6, 300),
    ("resnext50_32x4d", 150.4, 200),
)


def workload(*models: tuple[str, float, float], **asked: Any) -> Workload:
    entries = [
        {"name": f"{row}-{index}", "profile": row, "rate_rps": rate, "slo_ms": slo, **asked}
        for index, (row, rate, slo) in enumerate(models)
    ]
    return Workload.model_validate({"models": entries})


def planned(workload: Workload, trial: LossTrials | None) -> Plan:
    return solve(load_policy("symphony", {"time_limit_s": "0"}), workload, Cluster.parse("v100:3"), THESIS, trial=trial)


def test_what_is_said_to_survive_is_in_time_after_the_loss() -> None:
    believed, tried = (planned(workload(*CROWDED, survive=1.0), trial) for trial in (None, LossTrials()))
    lost = frozenset({"n0/0"})
    run = Simulation.of_plan(tried, duration_s=12.0, warmup_s=2.0, seed=7, losses=((2.0, lost),)).run().summary()
    late = {name for name, figures in run["models"].items() if figures["attainment"] < 0.98}
    assert late - believed.unserved_reasons.keys()
    assert not late - tried.unserved_reasons.keys()


def test_losses_that_leave_the_same_are_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[Plan] = []
    run = Trials.run
    monkeypatch.setattr(Trials, "run", lambda self, plan, **more: ran.append(plan) or run(self, plan, **more))
    plan = planned(workload(("vgg19", 50.0, 100), survive=0.5), LossTrials())
    assert len(plan.expected.losses) == 3
    assert len(ran) == 1


def test_a_plan_that_is_too_large_is_not_tried() -> None:
    many = workload(*[("alexnet", 1.0, 100)] * (LARGE + 1), survive=0.5)
    plan = planned(many, LossTrials())
    assert LossTrials()(plan) is None
    assert "was not tried" in plan.expected.assumptions[-1]
