"""A running deployment is changed without a model unserved, and back where that fails."""

from __future__ import annotations

import random

import pytest

from tenuto.deployments.control.controller import Controller
from tenuto.deployments.control.live import Live, LiveSystem
from tenuto.deployments.control.planner import NoPlanner
from tenuto.deployments.control.rates import RatesMemory
from tenuto.deployments.control.remembered import Memory
from tenuto.deployments.control.settings import ControlSettings
from tenuto.deployments.serve.config import ENTRY_APPLICATION
from tenuto.deployments.serve.deployment import UNCHANGEABLE, Deployment
from tenuto.deployments.serve.history import History
from tenuto.deployments.serve.states import ApplicationState
from tenuto.deployments.wire.status import DispatchingStatus
from tenuto.errors import EnvironmentFaultError, InvalidInputError
from tenuto.placement import Plan
from tenuto.placement.planner.gpu_matching import gpus_of
from tests.deployments.control.carried_out import change_deployment
from tests.deployments.control.fake_serve import FakeServe
from tests.instruments.plans import make_plan, replica
from tests.instruments.stores import DictStore


def of(plan: Plan, **how: object) -> Deployment:
    return Deployment.model_validate({"plan": plan.to_data(), "executor": "emulated", **how})


class Cluster:
    """A fake cluster that runs a plan, and what a change did to it."""

    def __init__(self, plan: Plan) -> None:
        self.deployment = of(plan)
        self.serve = FakeServe(self.deployment if plan.gpulets else None)
        self.history = History(DictStore())
        self.told: list[str] = []

    def change(self, plan: Plan, *, looks: int = 1, **how: object) -> bool:
        return change_deployment(
            self.deployment,
            of(plan, **how),
            self.serve,
            self.serve.status,
            self.history,
            by="deploy",
            why="a test",
            ready_timeout_s=30.0,
            tell=self.told.append,
            clock=self.serve.clock,
            sleep=lambda seconds: self.serve.sleep(max(1.0, seconds)),  # four looks a second cost four times as much
            looks=looks,
        )

    def served(self) -> set[str]:
        return {gpulet.id for gpulet in self.serve.status().gpulets}

    def recorded(self) -> set[str]:
        """Return the gpu-lets of the last version in the history."""
        version = self.history.latest()
        assert version is not None
        return {gpulet.id for gpulet in version.deployment.plan.gpulets}


HALVES = make_plan({"n0/0/a": (50.0, ["a"]), "n0/1/a": (50.0, ["b"])})
LARGER = make_plan({"n0/0/a": (40.0, ["a"]), "n0/1/a": (40.0, ["b"])})


@pytest.mark.parametrize("unhealthy_s", [0.0, 60.0, 1e9])
def test_a_first_start_waits_for_a_process_that_missed_a_health_check(unhealthy_s: float) -> None:
    cluster = Cluster(HALVES.model_copy(update={"gpulets": ()}))
    serve, states = cluster.serve, cluster.serve.states

    def some_unhealthy() -> dict[str, ApplicationState]:
        unhealthy = ApplicationState("UNHEALTHY", "A replica's health check failed.")
        return states() | ({ENTRY_APPLICATION: unhealthy} if 2.0 < serve.now_s < 2.0 + unhealthy_s else {})

    serve.states = some_unhealthy  # type: ignore[method-assign]
    if unhealthy_s < 1e9:
        assert cluster.change(HALVES)
        assert serve.now_s > unhealthy_s
    else:
        with pytest.raises(EnvironmentFaultError, match="health check failed"):
            cluster.change(HALVES)


def test_new_gpulets_start_beside_the_old_where_there_is_room() -> None:
    cluster = Cluster(HALVES)
    assert cluster.change(LARGER)
    assert cluster.serve.unserved == []
    assert cluster.served() == {"n0/0/b", "n0/1/b"}  # other processes, so other ids
    assert {name for _, name in cluster.serve.ended} == {"gpulet-n0-0-a", "gpulet-n0-1-a"}
    assert cluster.recorded() == {"n0/0/b", "n0/1/b"}


def test_gpulets_on_a_gpu_that_is_new_start_before_the_old_end() -> None:
    cluster = Cluster(HALVES)
    assert cluster.change(make_plan({"n0/2/a": (100.0, ["a", "b"])}))
    assert cluster.serve.unserved == []


def test_what_leaves_ends_only_after_the_gateways_let_go_of_it() -> None:
    cluster = Cluster(HALVES)
    cluster.change(LARGER)
    without = next(
        index
        for index, config in enumerate(cluster.serve.configs)
        if all(gpulet.id not in ("n0/0/a", "n0/1/a") for gpulet in config.entry.user_config.plan.gpulets)
    )
    kept = {application.name for application in cluster.serve.configs[without].applications}
    assert {"gpulet-n0-0-a", "gpulet-n0-1-a"} <= kept
    assert without < len(cluster.serve.configs) - 1


@pytest.mark.parametrize(("memory_mib", "waits"), [(9000.0, True), (5000.0, False)])
def test_a_gpulet_starts_once_its_gpu_has_the_memory_for_it(memory_mib: float, waits: bool) -> None:
    def on(share_pct: float) -> Plan:
        plan = make_plan({"n0/0/a": (share_pct, ["a"])})
        gpulets = [gpulet.model_copy(update={"memory_mib": memory_mib}) for gpulet in plan.gpulets]
        return plan.model_copy(update={"gpulets": tuple(gpulets)})

    cluster = Cluster(on(100.0))
    cluster.serve.end_s = 15.0  # it still writes
    assert cluster.change(on(90.0))
    ((ended_s, _),) = cluster.serve.ended
    assert (cluster.serve.since["gpulet-n0-0-b"] >= ended_s + 15.0) == waits


def test_without_room_every_model_that_has_two_gpulets_keeps_one() -> None:
    full = make_plan({"n0/0/a": (100.0, ["a", "b"]), "n0/1/a": (100.0, ["a", "b"])})
    smaller = make_plan({"n0/0/a": (90.0, ["a", "b"]), "n0/1/a": (90.0, ["a", "b"])})
    cluster = Cluster(full)
    assert cluster.change(smaller)
    assert cluster.serve.unserved == []


def test_gpulets_that_cannot_start_bring_the_plan_before_back() -> None:
    cluster = Cluster(HALVES)
    cluster.serve.broken = {"gpulet-n0-1-b": "RuntimeError: the weights are missing"}
    assert not cluster.change(LARGER)
    assert cluster.serve.unserved == []
    assert cluster.served() == {"n0/0/a", "n0/1/a"}
    assert "the weights are missing" in " ".join(cluster.told)
    assert cluster.recorded() == {"n0/0/a", "n0/1/a"}


def test_a_plan_that_somebody_else_deploys_meanwhile_is_left_alone() -> None:
    cluster, theirs = Cluster(HALVES), of(make_plan({"n0/0/z": (30.0, ["a"])}))
    sleep = cluster.serve.sleep

    def sleep_and_deploy(seconds: float) -> None:
        sleep(seconds)
        if len(cluster.serve.configs) == 2:
            cluster.serve.apply(theirs.config())

    cluster.serve.sleep = sleep_and_deploy  # type: ignore[method-assign]
    with pytest.raises(EnvironmentFaultError, match="somebody else deployed another plan meanwhile"):
        cluster.change(LARGER)
    assert cluster.serve.configs[-1] == theirs.config()
    assert cluster.history.all() == []


EMPTY = Plan(policy=HALVES.policy)


def test_a_plan_that_came_back_is_known_for_as_long_as_gateways_may_follow_it() -> None:
    """Gateways are a plan behind, and one that ran before comes back in between."""
    cluster = Cluster(HALVES)
    behind = [cluster.serve.status()]

    def status() -> DispatchingStatus:
        behind.append(cluster.serve.status())
        return behind[-2]

    system = LiveSystem(cluster.deployment, cluster.serve, status, gpus_of(HALVES))
    draw, plans = (
        random.Random(3),
        [make_plan({"n0/0/a": (50.0, ["a"]), "n0/1/a": (50.0, ["b"])}, rate_rps=float(rate)) for rate in range(1, 9)],
    )
    assert system.look(0.0) is not None
    for now_s in range(60):
        system.apply(draw.choice(plans), float(now_s))
        for _ in range(2):
            assert system.look(float(now_s)) is not None
            assert not system.is_settled or behind[-2].plan == system.deployment.plan.to_data()
        assert system.is_settled


def test_bringing_up_is_a_change_from_the_empty_plan() -> None:
    cluster = Cluster(EMPTY)
    assert cluster.change(HALVES)
    assert cluster.served() == {"n0/0/a", "n0/1/a"}
    assert len(cluster.serve.configs) == 1  # everything starts at once
    assert [(version.by, version.deployment.plan) for version in cluster.history.all()] == [("deploy", HALVES)]
    assert cluster.told[-1] == "4/4 applications run, gpu-lets connected"


def test_what_cannot_be_brought_up_says_why() -> None:
    cluster = Cluster(EMPTY)
    cluster.serve.broken = {"gpulet-n0-1-a": "RuntimeError: the weights are missing"}
    with pytest.raises(
        EnvironmentFaultError, match=r"gpulet-n0-1-a did not start:\nTraceback\nRuntimeError: the weights"
    ):
        cluster.change(HALVES)
    cluster = Cluster(EMPTY)
    cluster.serve.start_s = 1e9
    with pytest.raises(EnvironmentFaultError, match=r"n0/0/a, n0/1/a is not ready after 30\d s"):
        cluster.change(HALVES)
    cluster = Cluster(EMPTY)
    cluster.serve.is_silent = True
    with pytest.raises(EnvironmentFaultError, match="have not answered for 360 s"):
        cluster.change(HALVES)
    assert cluster.history.all() == []


def test_gpulets_that_never_come_bring_the_plan_before_back() -> None:
    cluster = Cluster(HALVES)
    cluster.serve.start_s = 1e9
    cluster.serve.since = dict.fromkeys(cluster.serve.since, -2e9)
    assert not cluster.change(LARGER)
    assert cluster.served() == {"n0/0/a", "n0/1/a"}


@pytest.mark.parametrize("looks", range(1, 6))
@pytest.mark.parametrize("target", [HALVES, LARGER, make_plan({"n0/0/a": (50.0, ["a"]), "n0/1/a": (50.0, ["a", "b"])})])
def test_a_change_is_over_when_its_plan_is_what_runs_however_fast_the_controller_looks(
    target: Plan, looks: int
) -> None:
    """The controller looks between a command's two questions, for the state and for the log."""
    cluster = Cluster(make_plan({"n0/0/a": (50.0, ["a", "b"])}))
    assert cluster.change(target, looks=looks)
    version = cluster.history.latest()
    assert version is not None
    assert cluster.serve.configs[-1].entry.user_config.plan == version.deployment.plan
    assert len(cluster.serve.configs[-1].gpulets) == len(version.deployment.plan.gpulets)
    assert {replica.name for gpulet in version.deployment.plan.gpulets for replica in gpulet.models} == {"a", "b"}


def test_what_stays_the_same_keeps_its_process() -> None:
    cluster = Cluster(HALVES)
    assert cluster.change(make_plan({"n0/0/a": (50.0, ["a"]), "n0/1/a": (40.0, ["b"])}))
    assert [name for _, name in cluster.serve.ended] == ["gpulet-n0-1-a"]


def test_models_are_loaded_before_they_are_routed_to_and_unloaded_after() -> None:
    cluster = Cluster(make_plan({"n0/0/a": (50.0, ["a", "b"])}))
    assert cluster.change(make_plan({"n0/0/a": (50.0, ["b", "c"])}))
    assert cluster.serve.unserved == []  # nobody is told of it before it is there
    held = [
        [program.name for program in application.user_config.programs]
        for config in cluster.serve.configs
        for application in config.gpulets
        if application.name == "gpulet-n0-0-a"
    ]
    assert [sorted(names) for names in held][-1] == ["b", "c"]
    assert ["a", "b", "c"] in [sorted(names) for names in held]
    assert cluster.serve.ended == []


def test_a_larger_batch_is_warmed_up_before_it_is_used() -> None:
    small = make_plan({"n0/0/a": (50.0, ["a"])})
    (gpulet,) = small.gpulets
    larger = small.model_copy(
        update={"gpulets": (gpulet.model_copy(update={"models": (replica("a", 50.0, batch_size=32),)}),)}
    )
    cluster = Cluster(small)
    assert cluster.change(larger)
    assert cluster.serve.unserved == []
    cluster.deployment = of(larger)
    assert cluster.change(small)
    assert cluster.serve.unserved == []


def test_settings_change_without_a_new_process() -> None:
    cluster = Cluster(HALVES)
    assert cluster.change(HALVES, scheduler="eager")
    assert cluster.serve.ended == []
    assert cluster.serve.configs[-1].entry.user_config.scheduler.name == "eager"


def test_what_cannot_be_served_so_changes_nothing() -> None:
    cluster = Cluster(HALVES)
    before = len(cluster.serve.configs)
    with pytest.raises(InvalidInputError, match="executor"):
        change_deployment(
            cluster.deployment,
            Deployment(plan=LARGER.to_data(), executor="torch"),
            cluster.serve,
            cluster.serve.status,
            cluster.history,
            by="deploy",
            why="",
            clock=cluster.serve.clock,
            sleep=cluster.serve.sleep,
        )
    with pytest.raises(InvalidInputError, match="partition"):
        cluster.change(LARGER, gateways=2, partition={"zebra": 0})
    assert len(cluster.serve.configs) == before


def test_gateways_that_are_silent_are_said() -> None:
    cluster = Cluster(HALVES)
    cluster.serve.is_silent = True
    with pytest.raises(EnvironmentFaultError, match="has said nothing of the change for 360 s"):
        cluster.change(LARGER)


def test_a_new_life_does_not_take_its_first_look_for_requests_that_have_stopped() -> None:
    deployment = of(HALVES)
    serve = FakeServe(deployment)
    for _ in range(5):
        serve.sleep(1.0)
    rates = {"a": 50.0, "b": 50.0}
    memory = Memory(HALVES, HALVES.workload, RatesMemory(rates, dict.fromkeys(rates, 20.0)))
    system = LiveSystem(deployment, serve, serve.status, gpus_of(HALVES))
    live = Live(Controller(ControlSettings(), memory), system, NoPlanner(), History(DictStore()), by="a test")
    live.step(serve.now_s)
    assert live.controller.rates.mean_rps == rates
    serve.sleep(1.0)
    live.step(serve.now_s)
    assert max(live.controller.rates.mean_rps.values()) < 50.0


def test_a_look_that_is_answered_late_is_no_jump_of_a_rate() -> None:
    deployment = of(HALVES)
    serve = FakeServe(deployment)
    rates = {"a": 50.0, "b": 50.0}
    memory = Memory(HALVES, HALVES.workload, RatesMemory(rates, dict.fromkeys(rates, 20.0)))

    def pass_time(seconds: float) -> None:
        for _ in range(round(50.0 * seconds)):
            serve.sleep(0.02)

    busy_s = 0.0

    def status() -> dict[str, object]:
        pass_time(busy_s)
        return serve.status()

    system = LiveSystem(deployment, serve, status, gpus_of(HALVES))
    live = Live(Controller(ControlSettings(), memory), system, NoPlanner(), History(DictStore()), by="a test")
    for look in range(10):
        pass_time(1.0)
        busy_s = 2.0 if look == 5 else 0.0
        live.step(serve.now_s)
        assert max(live.controller.rates.mean_rps.values()) == pytest.approx(50.0, rel=0.02)


def test_a_node_that_is_lost_is_known_before_any_gateway_answers() -> None:
    plan = make_plan({"n0/0/a": (50.0, ["a"]), "n1/0/a": (50.0, ["b"])})
    places = {"n0/0": "10.0.0.1", "n1/0": "10.0.0.2"}
    gpus = tuple(gpu.model_copy(update={"address": places[gpu.id]}) for gpu in plan.gpus)
    plan = plan.model_copy(update={"gpus": gpus})
    serve = FakeServe(of(plan))
    system = LiveSystem(of(plan), serve, serve.status, gpus_of(plan))
    before = system.look(serve.now_s)
    assert before is not None
    assert before.ready == {"n0/0/a", "n1/0/a"}
    serve.dead_nodes.add("10.0.0.2")
    serve.is_silent = True  # it is asked of a gateway that went with the node
    seen = system.look(serve.now_s)
    assert seen is not None
    assert [gpu.id for gpu in seen.gpus] == ["n0/0"]
    assert seen.ready == {"n0/0/a"}
    assert system.look(serve.now_s) is None


WAYS = [
    {"gateways": 1},
    {"gateways": 2},
    {"gateways": 3, "dispatchers": 3, "nodes": 2, "name": "shop"},
    {"gateways": 1, "partition": {"a": 0, "b": 1}},
    {"gateways": 1, "executor": "auto", "host": "127.0.0.2", "port": 65535, "proxy_port": 7, "operator_port": 0},
]
OTHERWISE = {"executor": "torch", "host": "127.0.0.3", "port": 9, "proxy_port": 9, "operator_port": 9}


@pytest.mark.parametrize("how", WAYS)
def test_what_is_left_open_is_as_it_runs_and_what_is_said_otherwise_is_refused(how: dict[str, object]) -> None:
    cluster = Cluster(HALVES)
    running = cluster.deployment = of(HALVES, **how)

    def reached(**said: object) -> bool:
        wanted = Deployment.model_validate({"plan": HALVES.to_data(), **said}).left_open_as(running)
        serve = FakeServe(running)
        return change_deployment(
            running,
            wanted,
            serve,
            serve.status,
            cluster.history,
            by="reload",
            why="a test",
            clock=serve.clock,
            sleep=serve.sleep,
        )

    assert reached()
    assert reached(**{name: running.setting(name) for name in UNCHANGEABLE})
    assert reached(gateways=0, proxy_port=None, scheduler="eager")
    for name, value in OTHERWISE.items():
        with pytest.raises(InvalidInputError, match=f"{name}: {value!r}: "):
            reached(**{name: value})
    if running.partition is None:
        with pytest.raises(InvalidInputError, match="gateways: "):
            reached(gateways=1 if running.feeds_dispatchers else 2)
