"""Models change their sub-cluster with a plan: dispatchers take on before gateways ask them, and let go afterwards."""

from __future__ import annotations

import itertools

import pytest

from tenuto.deployments.control.controller import Controller
from tenuto.deployments.control.live import Live, LiveSystem
from tenuto.deployments.control.planner import NoPlanner
from tenuto.deployments.control.remembered import Memory
from tenuto.deployments.control.settings import ControlSettings
from tenuto.deployments.serve.config import ServeConfig
from tenuto.deployments.serve.deployment import Deployment
from tenuto.deployments.serve.history import History
from tenuto.placement.planner.gpu_matching import gpus_of
from tests.deployments.control.fake_serve import FakeServe
from tests.instruments.plans import make_plan
from tests.instruments.stores import DictStore

PLAN = make_plan({f"n0/{n}/a": (100.0, [name]) for n, name in enumerate("abcd")})
UNEVEN = {"a": 0, "b": 0, "c": 0, "d": 1}
QUIET = {"mode": "act", "when": {"underused": None, "rate": None, "slo": False, "overload": False}}


def serving() -> tuple[Live, FakeServe]:
    deployment = Deployment(plan=PLAN, executor="emulated", gateways=2, partition=UNEVEN)
    serve = FakeServe(deployment)
    controller = Controller(ControlSettings.model_validate(QUIET), Memory(PLAN, PLAN.workload))
    system = LiveSystem(deployment, serve, serve.status, gpus_of(PLAN))
    return Live(controller, system, NoPlanner(), History(DictStore()), by="the controller"), serve


def held(config: ServeConfig) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """Return whom gateways ask for what, and what each dispatcher holds."""
    holds = {each.name.removeprefix("dispatcher-"): each.user_config.plan.models for each in config.dispatchers}
    asked = {name: list(models) for name, models in config.entry.user_config.sub_clusters.items()}
    return asked, {name: [model.name for model in holds[name]] for name in asked}


def run(live: Live, serve: FakeServe, seconds: int) -> None:
    for _ in range(seconds):
        serve.sleep(1.0)
        live.step(serve.now_s)


@pytest.mark.parametrize("together", [["c", "d"], ["a", "b", "c", "d"]])
def test_a_plan_that_moves_models_between_sub_clusters_takes_no_request_its_dispatcher(together: list[str]) -> None:
    live, serve = serving()
    run(live, serve, 5)
    places = {f"n0/{n}/a": (100.0, [name]) for n, name in enumerate("abcd") if name not in together}
    target = make_plan({**places, "n0/4/a": (100.0, together)})
    live.deploy(serve.now_s, live.system.deployment.with_plan(target), "a test", "a test")
    run(live, serve, 60)
    ways = [held(config) for config in serve.configs]
    for (asked, holds), (asked_next, holds_next) in itertools.pairwise(ways):
        for model in "abcd":
            (now,) = (name for name, models in asked.items() if model in models)
            (later,) = (name for name, models in asked_next.items() if model in models)
            assert model in holds_next[now]  # what waits there
            assert later == now or model in holds[later]  # it has been told
    assert not serve.unserved
    asked, holds = ways[-1]
    assert [sorted(models) for models in asked.values()] == [sorted(models) for models in holds.values()]
    assert any(set(together) <= set(models) for models in asked.values())
    assert live.system.is_settled
