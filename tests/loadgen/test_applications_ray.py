"""Applications on a real local Ray with emulated GPUs, over HTTP and the handle: every stage is sent when it is due, by
the very schedule that virtual time runs. How near the figures come is `lab/benchmarks/bench_applications.py`."""

from __future__ import annotations

from typing import Literal

import pytest

from tenuto.deployments.serve.deployment import Deployment
from tenuto.deployments.serve.endpoint import served_plan
from tenuto.deployments.serve.launcher import Launcher, unused_port
from tenuto.loadgen.bench import BenchOptions, asked_of, run_bench
from tenuto.loadgen.simulated import Simulation
from tenuto.outcome import OUTCOMES
from tenuto.placement import Cluster, Plan, solve
from tenuto.placement.policies.symphony.symphony_policy import Symphony
from tenuto.profiles import Profiles
from tests.instruments.fan_out import published
from tests.instruments.live import bring_up

pytestmark = [
    pytest.mark.ray,
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::DeprecationWarning", "ignore::FutureWarning"),
]

SECONDS, SEED = 1.5, 5


@pytest.fixture(scope="module")
def plan() -> Plan:
    return solve(Symphony(), published(4.0), Cluster.parse("v100:2"), Profiles(()))


@pytest.fixture(scope="module")
def url(plan: Plan, launcher: Launcher) -> str:
    bring_up(launcher, Deployment(plan=plan, port=unused_port(), executor="emulated").config())
    return launcher.base_url


@pytest.mark.parametrize("via", ["http", "handle"])
def test_every_stage_is_sent_and_answered(plan: Plan, url: str, via: Literal["http", "handle"]) -> None:
    models, applications, notes = asked_of(Plan.from_data(served_plan(url), origin=url))
    assert (applications, notes) == (plan.applications, ())
    # Long deadlines, so that a busy machine loses no stage.
    options = BenchOptions(url, SECONDS, SEED, slo_scale=100.0, warmup_s=0.0, clients=1, grace_s=120.0, via=via)
    result = run_bench(models, options, applications=applications)

    simulated = Simulation.of_plan(plan, duration_s=SECONDS, warmup_s=0.0, seed=SEED).run()
    assert result.schedule.hash == simulated.load.schedule.hash
    for name, expected in simulated.summary()["applications"].items():
        row = result.summary["applications"][name]
        assert row["offered"] == expected["offered"] > 0
        assert sum(row[word] for word in OUTCOMES) == row["offered"]
        assert row["ok"] + row["late"] == row["offered"]
    conditions = result.verdict.conditions
    assert conditions["sent"] == conditions["scheduled"]
    assert all(
        stage["p50_ms"] > 0.0 for row in result.summary["applications"].values() for stage in row["stages"].values()
    )
