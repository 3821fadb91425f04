"""The applications of examples/applications on a real local Ray with emulated GPUs, asked by the load
generator all at once, by the very schedule that virtual time runs. How near the figures come is
`lab/benchmarks/bench_applications.py`."""

from __future__ import annotations

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


def planned() -> Plan:
    """The plan of all examples at once, whose functions are found from the root of the repository."""
    files = [
        parse_yaml(
            (FOLDER / f"{name}.yaml").read_text("utf-8").replace('"graphs:', '"examples.applications.graphs:'), name
        )
        for name in NAMES
    ]
    parts = {key: [each for file in files for each in file.get(key, [])] for key in ("models", "applications")}
    work = parse_document(Workload, parts, origin="examples")
    return solve(load_policy("symphony"), work, Cluster.parse("v100:4"), Profiles(()))


def test_each_request_is_answered_and_says_what_its_stages_took(launcher: Launcher) -> None:
    plan = planned()
    bring_up(launcher, Deployment(plan=plan, port=unused_port(), executor="emulated").config())
    url = launcher.base_url
    models, applications, notes = asked_of(Plan.from_data(served_plan(url), origin=url))
    assert (applications, notes) == (plan.applications, ())
    simulated = Simulation.of_plan(plan, duration_s=SECONDS, warmup_s=0.0, seed=SEED).run()
    # Long deadlines, so that a busy machine loses nothing.
    options = BenchOptions(url, SECONDS, SEED, slo_scale=100.0, warmup_s=0.0, clients=1, grace_s=120.0)
    result = run_bench(models, options, applications=applications)
    assert result.schedule.hash == simulated.schedule.hash
    assert result.errors == []
    for name, expected in simulated.summary()["applications"].items():
        row = result.summary["applications"][name]
        assert row["offered"] == expected["offered"] > 0
        assert row["ok"] + row["late"] == row["offered"] == sum(row[word] for word in OUTCOMES)
        assert row["stages"].keys() == expected["stages"].keys()
        assert all(stage["p50_ms"] > 0.0 for stage in row["stages"].values())
    assert result.verdict.conditions["sent"] == result.verdict.conditions["scheduled"]
