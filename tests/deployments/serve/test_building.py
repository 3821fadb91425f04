"""How a config reaches Serve where Serve is not made as it was tried."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from tenuto.deployments.serve import building
from tenuto.deployments.serve.deployment import Deployment
from tests.instruments.plans import make_plan

CONFIG = Deployment(plan=make_plan({"n0/0/a": (50.0, ["a"])})).config()


@pytest.mark.filterwarnings("ignore")  # of what Ray Serve imports
@pytest.mark.parametrize("absent", ["ray.serve._private.build_app", "deploy_applications"])
def test_a_serve_of_another_make_builds_by_itself(monkeypatch: pytest.MonkeyPatch, absent: str) -> None:
    given: list[Any] = []
    client = SimpleNamespace(list_serve_statuses=list, deploy_apps=given.append, _controller=SimpleNamespace())
    monkeypatch.setattr("ray.serve.context._get_global_client", lambda **_options: client)
    if "." in absent:
        monkeypatch.setitem(sys.modules, absent, None)
    building.deploy_applications(CONFIG)
    (schema,) = given
    assert [app.name for app in schema.applications] == [app.name for app in CONFIG.applications]
    # A replica that waits for a node must not keep a new plan from those that serve.
    sent = [deployment.model_dump(exclude_unset=True) for app in schema.applications for deployment in app.deployments]
    assert {deployment["rolling_update_percentage"] for deployment in sent} == {1.0}
