"""The applications of examples/applications on a real local Ray with emulated GPUs, asked by the load generator: one
request each, by the very schedule that virtual time runs. How near the figures come is
`lab/benchmarks/bench_applications.py`."""

from __future__ import annotations

from typing import Literal

import pytest

from tenuto.deployments.serve.deployment import Deployment
from tenuto.deployments.serve.endpoint import served_plan
from tenuto.deployments.serve.launcher import Launcher, unused_port
from tenuto.documents import parse_document
from tenuto.files import parse_yaml
from tenuto.loadgen.bench import BenchOptions, asked_of, run_bench
from tenuto.loadgen.simulated import Simulation
from tenuto.outcome import OUTCOMES
from tenuto.placement import Cluster, Plan, Workload, load_policy, solve
from tenuto.profiles import Profiles
from tests.instruments.live import bring_up
from tests.loadgen.test_example_applications import FOLDER, NAMES

pytestmark = [
    pytest.mark.ray,
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::DeprecationWarning", "ignore::FutureWarning"),
]

SECONDS, SEED = 1.5, 5


def planned(name: str) -> Plan:
    """The plan of an example whose functions are found from the root of the repository."""
    text = (FOLDER / f"{name}.yaml").read_text(encoding="utf-8").replace('"graphs:', '"examples.applications.graphs:')
    work = parse_document(Workload, parse_yaml(text, f"{name}.yaml"), origin=f"{name}.yaml")
    return solve(load_policy("symphony"), work, Cluster.parse("v100:1"), Profiles(()))


@pytest.mark.parametrize(("name", "via"), [*((name, "http") for name in NAMES), ("traffic", "handle")])
def test_each_request_is_answered_and_says_what_its_stages_took(
    name: str, via: Literal["http", "handle"], launcher: Launcher
) -> None:
    plan = planned(name)
    bring_up(launcher, Deployment(plan=plan, port=unused_port(), executor="emulated").config())
    url = launcher.base_url
    models, applications, notes = asked_of(Plan.from_data(served_plan(url), origin=url))
    assert (applications, notes) == (plan.applications, ())
    # Long deadlines, so that a busy machine loses nothing.
    options = BenchOptions(url, SECONDS, SEED, slo_scale=100.0, warmup_s=0.0, clients=1, grace_s=120.0, via=via)
    result = run_bench(models, options, applications=applications)

    simulated = Simulation.of_plan(plan, duration_s=SECONDS, warmup_s=0.0, seed=SEED).run()
    assert result.schedule.hash == simulated.schedule.hash
    assert result.errors == []
    for application, expected in simulated.summary()["applications"].items():
        row = result.summary["applications"][application]
        assert row["offered"] == expected["offered"] > 0
        assert row["ok"] + row["late"] == row["offered"] == sum(row[word] for word in OUTCOMES)
        assert row["stages"].keys() == expected["stages"].keys()
        if via == "http":  # over the handle answers do not say it
            assert row["stages"][plan.applications[0].stages[0].label]["p50_ms"] > 0.0
    assert result.verdict.conditions["sent"] == result.verdict.conditions["scheduled"]
