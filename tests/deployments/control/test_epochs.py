"""Sub-clusters are evened out once an epoch: dispatchers take on before gateways ask them, and let go afterwards."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping

import pytest

from tenuto.deployments.control.controller import Controller
from tenuto.deployments.control.gpu_matching import gpus_of
from tenuto.deployments.control.live import Live, LiveSystem
from tenuto.deployments.control.planner import NoPlanner
from tenuto.deployments.control.remembered import Memory
from tenuto.deployments.control.settings import ControlSettings
from tenuto.deployments.serve.config import ServeConfig
from tenuto.deployments.serve.deployment import Deployment
from tenuto.deployments.serve.history import History
from tenuto.deployments.serve.sub_clusters import evened, imbalance, parted
from tenuto.deployments.wire.status import LogLine
from tests.deployments.control.fake_serve import FakeServe
from tests.instruments.plans import make_plan
from tests.instruments.stores import DictStore

PLAN = make_plan({f"n0/{n}/a": (100.0, [name]) for n, name in enumerate("abcd")})
UNEVEN = {"a": 0, "b": 0, "c": 0, "d": 1}
QUIET = {"mode": "act", "when": {"underused": None, "rate": None, "slo": False, "overload": False}}


def serving(
    epoch: Mapping[str, float] | None = None, tell: Callable[[LogLine], None] = lambda _entry: None
) -> tuple[Live, FakeServe, History]:
    deployment = Deployment(plan=PLAN, executor="emulated", gateways=2, partition=UNEVEN)
    serve, history = FakeServe(deployment), History(DictStore())
    settings = ControlSettings.model_validate({**QUIET, "epoch": {"every_s": 60, "moved": 0.5, **(epoch or {})}})
    system = LiveSystem(deployment, serve, serve.status, gpus_of(PLAN))
    live = Live(
        Controller(settings, Memory(PLAN, PLAN.workload)),
        system,
        NoPlanner(),
        history,
        by="the controller",
        epoch=settings.epoch,
        tell=tell,
    )
    return live, serve, history


def held(config: ServeConfig) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """Return whom gateways ask for what, and what each dispatcher holds."""
    holds = {each.name.removeprefix("dispatcher-"): each.user_config.plan.models for each in config.dispatchers}
    asked = {name: list(models) for name, models in config.entry.user_config.sub_clusters.items()}
    return asked, {name: [model.name for model in holds[name]] for name in asked}


def run(live: Live, serve: FakeServe, seconds: int) -> None:
    for _ in range(seconds):
        serve.sleep(1.0)
        live.step(serve.now_s)


def test_models_change_their_sub_cluster_without_losing_their_dispatcher() -> None:
    said: list[LogLine] = []
    live, serve, history = serving(tell=said.append)
    run(live, serve, 50)
    assert len(serve.configs) == 1
    run(live, serve, 30)
    ways = [held(config) for config in serve.configs[1:]]
    assert len(ways) == 3
    (before, both), (after, both_still), (_, only) = ways
    assert before == {"0": ["a", "b", "c"], "1": ["d"]}
    (moved,) = set(before["0"]) - set(after["0"])
    assert sorted(after["1"]) == sorted([moved, "d"])
    for name in ("0", "1"):
        assert set(both[name]) == set(both_still[name]) == set(before[name]) | set(after[name])
    assert only == after
    assert not serve.unserved
    assert [entry.kind for entry in said] == ["change", "changed"]
    latest = history.latest()
    assert latest is not None
    assert latest.deployment.partition is not None
    assert latest.deployment.partition[moved] == 1
    assert "sub-clusters are 100% uneven, and 0% after moving" in latest.why
    run(live, serve, 300)  # it is even now
    assert len(serve.configs) == 4


def test_the_bound_on_change_holds_and_nothing_is_moved_for_little() -> None:
    live, serve, _ = serving({"moved": 0.1})
    run(live, serve, 200)
    assert len(serve.configs) == 1  # one model of four is more than a tenth
    rates = {"a": 50.0, "b": 50.0, "c": 1.0, "d": 99.0}
    assert evened(PLAN, {"a": 0, "b": 0, "c": 0, "d": 1}, rates, most_moved=1.0) is None
    assert imbalance(UNEVEN, rates) == pytest.approx(0.02)
    after = parted(PLAN, UNEVEN, rates_rps=dict.fromkeys("abcd", 5.0), most_moved=0.25)
    assert imbalance(after, dict.fromkeys("abcd", 5.0)) == 0.0
    assert sum(after[name] != UNEVEN[name] for name in after) == 1


@pytest.mark.parametrize("together", [["c", "d"], ["a", "b", "c", "d"]])
def test_a_plan_that_moves_models_between_sub_clusters_takes_no_request_its_dispatcher(together: list[str]) -> None:
    live, serve, _ = serving({"every_s": 1e6})
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
