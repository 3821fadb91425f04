"""A deployment that is changed while requests come: on a real local Ray, by a command and by the controller."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from tenuto.cli.drain import go_without
from tenuto.deployments.control.operations import Operations
from tenuto.deployments.serve.deployment import Deployment
from tenuto.deployments.serve.launcher import Launcher, unused_port
from tenuto.placement import Plan
from tests.instruments import plans
from tests.instruments.live import asking, pids, until, until_pids

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::DeprecationWarning")]


PORT = unused_port()


make_plan = partial(plans.make_plan, slo_ms=1000.0, rate_rps=20.0)


def of(plan: Plan, **how: Any) -> Deployment:
    return Deployment.model_validate(
        {"plan": plan.to_data(), "executor": "emulated", "scheduler": "eager", "port": PORT, **how}
    )


@pytest.fixture(scope="module")
def operator(launcher: Launcher) -> Iterator[Operations]:
    with Operations(None, lambda _text: None) as running:
        running.delete()
        yield running
        running.delete()


@pytest.fixture(scope="module")
def first(operator: Operations) -> int:
    """The number of the first version that these tests make; others may have run before on this Ray."""
    return operator.history.latest_number() + 1


BEFORE = make_plan({"n0/0/a": (50.0, ["one"]), "n0/1/a": (50.0, ["two"])})
AFTER = make_plan({"n0/0/a": (40.0, ["one"]), "n0/1/a": (50.0, ["two"])})


def test_a_new_plan_is_reached_without_losing_a_request(operator: Operations, first: int) -> None:
    assert operator.deploy(of(BEFORE), "the first")
    url = operator.base_url
    before = pids(url)
    with asking(url, ["one", "one", "two", "two"]) as answers:
        assert operator.deploy(of(AFTER), "less for one")
        until(lambda: len(answers) > 50)
    assert {"ok" if status == 200 else f"{status}: {answer.get('error')}" for status, answer in answers} == {"ok"}
    until(lambda: set(pids(url)) == {"n0/0/b", "n0/1/a"})  # the old process may still be ending
    assert pids(url)["n0/1/a"] == before["n0/1/a"]
    made = [(version.number, version.by) for version in operator.history.all() if version.number >= first]
    assert made == [(first, "deploy"), (first + 1, "deploy")]
    until(lambda: "gpulet-n0-0-a" not in operator.states())


def test_a_place_is_emptied_without_losing_a_request_and_what_is_elsewhere_stays(operator: Operations) -> None:
    assert operator.deploy(of(BEFORE), "as at first")
    url, running = operator.base_url, operator.await_settled()
    before = pids(url)

    def go(places: tuple[str, ...], why: str) -> bool:
        return go_without(operator, operator.await_settled(), places, (), "ffd", why, yes=False)

    with asking(url, ["one", "one", "two", "two"]) as answers:
        assert go(("n0/1",), "drain n0/1")
        assert operator.await_empty(running.plan, ["n0/1"]) == []
        assert not [name for name in operator.states() if name.startswith("gpulet-n0-1")]
        until(lambda: len(answers) > 50)
    assert {status for status, _ in answers} == {200}
    assert pids(url)["n0/0/a"] == before["n0/0/a"]
    assert operator.running().plan.drained == ("n0/1",)
    after = pids(url)
    assert go((), "undrain n0/1")
    until_pids(url, after)
    assert [version.by for version in operator.history.all()][-2:] == ["drain", "undrain"]


def test_rollback_goes_to_the_plan_before(operator: Operations, first: int) -> None:
    version, reached = operator.rollback(first)
    assert (version.number, reached) == (first, True)
    assert operator.running().plan == version.deployment.plan == BEFORE


OTHER = make_plan({"n0/0/z": (60.0, ["one"]), "n0/1/z": (50.0, ["two"])})


def test_what_serve_deploy_brought_is_what_runs_and_what_it_left_is_ended(operator: Operations) -> None:
    from ray.serve.context import _get_global_client
    from ray.serve.schema import ServeDeploySchema

    before = operator.running()
    left = sorted(application.name for application in before.config().gpulets)
    theirs = of(OTHER, gateways=max(1, before.gateways), nodes=before.nodes)
    _get_global_client().deploy_apps(ServeDeploySchema.model_validate(theirs.config().to_data()))
    until(lambda: set(pids(operator.base_url)) == {"n0/0/z", "n0/1/z"})
    assert operator.running() == theirs
    version = operator.history.latest()
    assert version is not None
    assert version.by == "serve deploy"
    assert version.deployment == theirs
    assert operator.deploy(of(OTHER, port=PORT + 10), "the same", unchanged=["port"])
    assert operator.running().port == PORT
    until(lambda: not set(left) & set(operator.states()))  # Serve left them, and the controller has ended them
    went_back, reached = operator.rollback(None)
    assert reached
    assert went_back.deployment.plan == before.plan
    assert "serve deploy" in [each.by for each in operator.history.all()]


def test_what_was_deleted_is_in_the_history_and_can_be_brought_back(operator: Operations) -> None:
    versions = operator.history.all()
    running = operator.running().plan
    operator.delete()
    assert operator.history.all() == versions
    went_back, reached = operator.rollback(None)
    assert reached
    assert operator.running().plan == went_back.deployment.plan == running


def test_serves_own_way_of_deploying_after_ours_restarts_nothing(operator: Operations) -> None:
    from ray.serve.context import _get_global_client
    from ray.serve.schema import ServeDeploySchema

    before = pids(operator.base_url)
    running = operator.running()
    details = _get_global_client().get_serve_details()
    gateway = details["applications"]["tenuto"]["deployments"]["gateway"]["deployment_config"]
    assert gateway["rolling_update_percentage"] == 1.0  # as asked; else one that waits for a node would hold up all
    _get_global_client().deploy_apps(ServeDeploySchema.model_validate(running.config().to_data()))
    until(lambda: all(state.is_running for state in operator.states().values()))
    until_pids(operator.base_url, before)
