"""How a deployment with a store of batches is described, and what operators read of it."""

from typing import Any

import pytest

from tenuto.deployments.operator.exposition import render_metrics
from tenuto.deployments.serve.config import OFFLINE_APPLICATION
from tenuto.deployments.serve.deployment import Deployment
from tenuto.deployments.serve.user_config import read_gateway_config
from tenuto.deployments.wire.status import OfflineStatus, SystemStatus
from tenuto.errors import InvalidInputError
from tests.instruments.fake_gpulet import make_plan

PLAN = make_plan(("a", ("m",)))


def deployed(**offline: Any) -> Deployment:
    return Deployment.model_validate({"plan": PLAN.to_data(), "offline": offline or None})


def test_the_store_is_an_application_of_its_own_only_where_it_has_a_folder() -> None:
    with_store, without = (each.config().to_data()["applications"] for each in (deployed(path="/d"), deployed()))
    assert {each["name"] for each in with_store} - {each["name"] for each in without} == {OFFLINE_APPLICATION}
    [store] = [each for each in with_store if each["name"] == OFFLINE_APPLICATION]
    [deployment] = store["deployments"]
    config = read_gateway_config(deployment["user_config"])
    assert (config.listen, config.operators, config.plan) == (None, None, PLAN)
    assert config.offline is not None
    assert config.offline.path == "/d"


def test_a_plan_file_says_where_the_store_is_and_what_it_takes() -> None:
    deployment = deployed(path="/d", max_lines=7)
    again = Deployment.from_data(deployment.config().to_data())
    assert (again.offline, again.config().to_data()) == (deployment.offline, deployment.config().to_data())
    assert Deployment.from_data(deployed().config().to_data()).offline is None


@pytest.mark.parametrize("wrong", [{"path": ""}, {"path": "/d", "max_lines": 0}, {"path": "/d", "lines": 3}])
def test_wrong_limits_are_refused(wrong: dict[str, Any]) -> None:
    user_config = deployed(path="/d").config().entry.user_config.to_data()
    with pytest.raises(InvalidInputError, match="offline"):
        read_gateway_config({**user_config, "offline": wrong})


def test_an_offline_key_needs_a_scheduler_that_runs_offline_work() -> None:
    user_config = deployed().config().entry.user_config.to_data()
    user_config["keys"] = [{"name": "night", "sha256": "0" * 64, "offline": True}]
    assert read_gateway_config({**user_config, "scheduler": {"name": "deferred"}}).keys[0].offline
    with pytest.raises(InvalidInputError, match="runs no offline work, and the key night waits"):
        read_gateway_config({**user_config, "scheduler": {"name": "eager"}})


def test_metrics_show_the_store_only_where_there_is_one() -> None:
    status = SystemStatus(models={}, offline=OfflineStatus(5, 1, 20, 7, 3, problem="the disk is full"))
    lines = set(render_metrics(status).splitlines())
    assert lines >= {
        'tenuto_offline_lines_total{outcome="completed"} 7',
        'tenuto_offline_lines_total{outcome="failed"} 3',
        "tenuto_offline_lines_waiting 20",
        "tenuto_offline_batches_open 1",
        "tenuto_offline_paused 1",
    }
    assert "offline" not in render_metrics(SystemStatus(models={}))
