"""Policies that plan by occupancies and SM utilisations: what their plans promise, and what they say of estimates."""

from __future__ import annotations

import pytest

from tenuto.batching.core.system import NetworkDelay
from tenuto.batching.planning.trial import Trials
from tenuto.placement import Policy, Workload, solve
from tenuto.profiles import Profile, Profiles
from tenuto_lab.baselines.ffd import FirstFitDecreasing
from tenuto_lab.baselines.milp.milp import AoMilp, WsmMilp
from tenuto_lab.baselines.usher.usher import Usher, WaoUsher
from tests.placement.published import VISION, equal_rates, thesis, v100s


@pytest.mark.parametrize("policy", [WaoUsher(), WsmMilp()])
def test_what_a_published_plan_promises_is_what_it_serves_and_not_what_the_policy_believed(policy: Policy) -> None:
    """The thesis' section 6.2.1: latencies of whole GPUs, and neighbours that cost nothing."""
    plan = solve(policy, equal_rates(VISION, 500, 200), v100s(4), thesis())
    trials = Trials(plan.models, requests=10_000, seed=3, scheduler="deferred", network=NetworkDelay())
    assert plan.believed is not None
    assert plan.believed.goodput_rps == pytest.approx(2_500.0)
    assert plan.expected.goodput_rps == pytest.approx(trials.run(plan).ok_rps.sum(), rel=0.04)
    assert plan.expected.goodput_rps < 0.9 * 2_500.0
    assert any("neighbours" in line or "time slices" in line for line in plan.expected.assumptions)


@pytest.mark.parametrize(
    ("policy", "estimated", "is_told"),
    [
        (Usher(), 1.0, True),
        (WaoUsher(), 1.0, True),
        (AoMilp(), 1.0, True),
        (Usher(), 0.0, False),  # by hardware counters
        (FirstFitDecreasing(), 1.0, False),  # reads no occupancy
    ],
)
def test_an_estimated_occupancy_is_not_taken_for_measured(policy: Policy, estimated: float, is_told: bool) -> None:
    metrics = {
        "achieved_occupancy_pct": 30.0,
        "wavg_ach_occ_pct": 20.0,
        "wavg_sm_util_pct": 40.0,
        "occupancy_estimated": estimated,
    }
    points = [{"batch_size": b, "latency_ms": 2.0 + b, "memory_mib": 900, "metrics": metrics} for b in (1, 4)]
    data = {"name": "p", "source": "test", "gpu_type": "v100", "models": {"m": {"points": points}}}
    workload = Workload.model_validate({"models": [{"name": "m", "rate_rps": 50, "slo_ms": 100}]})
    plan = solve(policy, workload, v100s(1), Profiles([Profile.model_validate(data)]))
    told = [note for note in plan.notes if note.startswith("estimated, not measured (v100):") and "occ" in note]
    assert bool(told) is is_told
