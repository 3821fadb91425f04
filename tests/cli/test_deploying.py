"""What a command line asks of a deployment that runs, and what it leaves as it is."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from tenuto.cli import deploy
from tenuto.cli.deploying import ServingArguments
from tenuto.deployments.serve.deployment import Deployment


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
