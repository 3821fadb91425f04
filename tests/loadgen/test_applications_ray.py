"""Applications on a real local Ray with emulated GPUs, loaded over HTTP and the handle, against virtual time.

gpulet's *game* (six digits and an object, 95 ms) and *traffic* (an SSD, then two classifiers, 136 ms), all times four
times as long, so that two busy cores can serve them. The live run sees the very arrivals of the simulated one.
"""

from __future__ import annotations

from typing import Any, Literal

import pytest

from tenuto.deployments.serve.config import serve_config
from tenuto.deployments.serve.endpoint import served_plan
from tenuto.deployments.serve.launcher import Launcher
from tenuto.loadgen.bench import BenchOptions, asked_of, run_bench
from tenuto.loadgen.simulated import Simulation
from tenuto.placement import Cluster, Plan, solve
from tenuto.placement.policies.ffd.ffd import FirstFitDecreasing
from tenuto.profiles import Profiles

from .fan_out import workload

pytestmark = [
    pytest.mark.ray,
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::DeprecationWarning", "ignore::FutureWarning"),
]

SECONDS, SEED = 10.0, 5
STRETCH = 4.0
# Live against virtual time: attainment within 5 points, the median latency within 20 % of the SLO (5 % measured).
ATTAINMENT_TOLERANCE, LATENCY_TOLERANCE = 0.05, 0.2


def stage(model: str, alpha_ms: float, beta_ms: float, **more: Any) -> dict[str, Any]:
    return {"model": model, "latency": {"alpha_ms": alpha_ms * STRETCH, "beta_ms": beta_ms * STRETCH}, **more}


APPLICATIONS = (
    {
        "name": "game", "rate_rps": 8, "slo_ms": 95 * STRETCH,
        "stages": [stage("lenet", 0.1, 1.0, count=6), stage("resnet50", 2.0, 10.0)],
    },
    {
        "name": "traffic", "rate_rps": 4, "slo_ms": 136 * STRETCH,
        "stages": [
            stage("ssd", 3.0, 8.0, part=2), stage("googlenet", 1.0, 4.0, after=["ssd"]),
            stage("vgg16", 2.0, 6.0, after=["ssd"]),
        ],
    },
)  # fmt: skip


@pytest.fixture(scope="module")
def plan() -> Plan:
    return solve(FirstFitDecreasing(), workload(*APPLICATIONS), Cluster.parse("v100:2"), Profiles(()))


@pytest.fixture(scope="module")
def url(plan: Plan, launcher: Launcher) -> str:
    launcher.apply(serve_config(plan, executor="emulated"), timeout_s=120)
    return launcher.base_url


@pytest.mark.parametrize("via", ["http", "handle"])
def test_applications_live_agree_with_virtual_time(plan: Plan, url: str, via: Literal["http", "handle"]) -> None:
    models, applications, notes = asked_of(Plan.from_data(served_plan(url), origin=url))
    assert (applications, notes) == (plan.applications, ())
    options = BenchOptions(url, SECONDS, SEED, clients=1, grace_s=2.0, via=via)
    result = run_bench(models, options, applications=applications)

    simulated = Simulation.of_plan(plan, duration_s=SECONDS, seed=SEED).run()
    assert result.schedule.hash == simulated.schedule.hash
    for name, expected in simulated.summary()["applications"].items():
        row = result.summary["applications"][name]
        assert row["offered"] == expected["offered"]
        assert row["attainment"] == pytest.approx(expected["attainment"], abs=ATTAINMENT_TOLERANCE)
        assert row["p50_ms"] == pytest.approx(expected["p50_ms"], abs=LATENCY_TOLERANCE * row["slo_ms"])
    conditions = result.verdict.conditions
    assert conditions["sent"] == conditions["scheduled"]
    of_traffic = result.summary["applications"]["traffic"]
    assert conditions["followed"] >= 2 * of_traffic["ok"]
