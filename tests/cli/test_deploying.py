"""What a command line asks of a deployment that runs, and what it leaves as it is."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from tenuto.cli import deploy, history
from tenuto.cli.deploying import ServingArguments
from tenuto.deployments.serve.deployment import Deployment
from tenuto.deployments.serve.history import History
from tenuto.placement import Plan
from tests.instruments.plans import make_plan
from tests.instruments.stores import DictStore


@pytest.mark.parametrize(
    ("options", "changed"),
    [
        ([], set()),
        (["--gateways", "3"], {"gateways"}),
        (["--emulate", "--port", "8000"], {"executor", "port"}),
        (["--scheduler", "eager"], {"scheduler", "scheduler_options"}),
        (["--keys", "keys.yaml"], {"access"}),
    ],
)
def test_what_no_option_asks_for_stays_as_it_is(
    monkeypatch: pytest.MonkeyPatch, options: list[str], changed: set[str]
) -> None:
    left: list[str] = []

    def read(asked: ServingArguments) -> Deployment:
        left.extend(asked.left_open())
        raise SystemExit(0)

    monkeypatch.setattr(ServingArguments, "deployment", read)
    assert CliRunner().invoke(deploy.command, ["plan.yaml", *options]).exit_code == 0
    of_its_own = {"plan", "gateway_options", "nodes", "control"}  # kept, or taken from files, elsewhere
    assert set(left) == Deployment.model_fields.keys() - of_its_own - changed


def test_a_version_is_written_to_a_file_and_that_is_said_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    plan, kept = make_plan({"n0/0/a": (50.0, ["m"])}), History(DictStore())
    kept.add(Deployment(plan=plan.to_data()), "deploy", "the first")
    monkeypatch.setattr(history, "operations", lambda _address: nullcontext(SimpleNamespace(history=kept)))
    file = tmp_path / "plan.yaml"
    done = CliRunner().invoke(history.command, ["-o", str(file)])
    assert (done.exit_code, done.output) == (0, f"wrote {file}\n")
    assert Plan.load(file) == plan
