"""A change goes on when the command or the controller is killed, and of two desired deployments the last one counts."""

from __future__ import annotations

import pytest

from tenuto.deployments.control.change_progress import ChangeProgress
from tenuto.deployments.control.controller import Controller
from tenuto.deployments.control.controller_process import begun_from
from tenuto.deployments.control.live import OvertakenError
from tenuto.deployments.control.remembered import ControlMemory, DesiredDeployment
from tenuto.deployments.control.version_edits import Edits
from tenuto.deployments.serve.config import CONTROL_APPLICATION, ENTRY_APPLICATION
from tenuto.deployments.serve.deployment import Deployment
from tenuto.deployments.serve.history import History
from tenuto.deployments.serve.states import ApplicationState
from tenuto.errors import EnvironmentFaultError
from tests.deployments.control.carried_out import OwnController
from tests.deployments.control.fake_serve import FakeServe
from tests.instruments.plans import make_plan
from tests.instruments.stores import DictStore

FIRST, SECOND, THIRD = (
    Deployment(plan=make_plan({"n0/0/a": (share, ["a"])}), executor="emulated") for share in (50.0, 40.0, 30.0)
)


class Cluster:
    """A fake cluster with one deployment, whose controller can be killed."""

    def __init__(self, running: Deployment = FIRST) -> None:
        self.store = DictStore()
        self.serve, self.history = FakeServe(running if running.plan.gpulets else None), History(self.store)
        if running.plan.gpulets:
            self.history.add(running, "deploy", "the first")
            begun_from(self.history, self.stored, running)  # takes it over
        self.start_controller()

    @property
    def stored(self) -> ControlMemory:
        return ControlMemory(self.store)

    def start_controller(self) -> None:
        """Begin as a new process of the controller does."""
        running = None
        if self.serve.configs:
            running = Deployment.from_data(self.serve.configs[-1].to_data()).model_copy(update={"executor": "emulated"})
        begun = begun_from(self.history, self.stored, running)
        assert begun is not None
        serve = self.serve
        self.controller = OwnController(
            begun[0], serve, serve.status, self.history, clock=serve.clock, stored=self.stored, memory=begun[1]
        )

    def pass_time(self, seconds: float) -> None:
        for _ in range(round(seconds / 0.5)):
            self.serve.sleep(0.5)
            self.controller.state()

    def versions(self) -> list[tuple[str, float]]:
        return [(each.by, each.deployment.plan.gpulets[0].share_pct or 0.0) for each in self.history.all()]


@pytest.mark.parametrize("seconds", [0.0, 1.0, 4.0, 6.0, 7.0])
def test_a_controller_that_is_killed_goes_on_where_it_was(seconds: float) -> None:
    cluster = Cluster()
    cluster.pass_time(1.0)
    assert cluster.controller.live.deploy(cluster.serve.clock(), SECOND, "rollback", "a test") == 2
    cluster.pass_time(seconds)
    cluster.start_controller()
    cluster.pass_time(20.0)
    assert cluster.controller.state().is_settled
    assert cluster.versions() == [("deploy", 50.0), ("rollback", 40.0)]
    assert cluster.serve.unserved == []


@pytest.mark.parametrize("seconds", [0.0, 1.0, 4.0, 6.0])
def test_of_two_controllers_one_begins_again_over_what_the_other_did(seconds: float) -> None:
    """One that was stopped goes on beside the one that Serve started in its place."""
    cluster = Cluster()
    cluster.pass_time(1.0)
    old = cluster.controller
    old.live.deploy(cluster.serve.clock(), SECOND, "deploy", "the old one")
    cluster.pass_time(seconds)
    cluster.start_controller()
    cluster.controller.live.deploy(cluster.serve.clock(), THIRD, "rollback", "the new one")
    overtaken = 0
    for _ in range(80):
        cluster.pass_time(0.5)
        try:
            old.state()
        except OvertakenError:  # its process then begins anew, over what runs
            overtaken, new = overtaken + 1, cluster.controller
            cluster.start_controller()
            cluster.controller, old = new, cluster.controller
    assert overtaken <= 2
    assert cluster.versions()[-1][1] == 30.0
    assert cluster.serve.unserved == []
    assert old.state().is_settled
    assert cluster.controller.state().is_settled


def test_what_was_wanted_and_not_begun_is_begun_by_the_next_process_with_its_settings() -> None:
    cluster = Cluster()
    wanted = SECOND.model_copy(update={"scheduler": "eager"})
    cluster.controller.live.deploy(0.0, wanted, "deploy", "a test")  # before the first look
    cluster.start_controller()
    cluster.pass_time(20.0)
    assert cluster.serve.configs[-1].entry.user_config.scheduler.name == "eager"
    assert cluster.versions()[-1] == ("deploy", 40.0)


@pytest.mark.parametrize("seconds", [0.0, 1.0, 4.0])
@pytest.mark.parametrize("ran_before", [True, False])
def test_a_first_start_goes_on_without_its_command_and_after_the_controller_was_killed(
    seconds: float, ran_before: bool
) -> None:
    cluster = Cluster.__new__(Cluster)
    cluster.store = DictStore()
    cluster.serve, cluster.history = FakeServe(None), History(cluster.store)
    if ran_before:  # and was deleted
        cluster.history.add(THIRD, "serve", "before")
    wanted = DesiredDeployment(1, FIRST, "serve", "a test", cluster.history.latest_number(), is_first=True)
    cluster.stored.write_desired(wanted)
    cluster.start_controller()
    cluster.pass_time(seconds)
    cluster.start_controller()
    cluster.pass_time(20.0)
    assert cluster.versions()[int(ran_before) :] == [("serve", 50.0)]
    assert len([config for config in cluster.serve.configs if not config.gpulets]) == 0


def test_a_first_start_that_another_command_deletes_says_so() -> None:
    cluster = Cluster()
    states = iter(({CONTROL_APPLICATION: ApplicationState("DEPLOYING")}, dict[str, ApplicationState]()))
    progress = ChangeProgress(cluster.controller, lambda _text: None, cluster.serve.sleep, cluster.serve.clock)
    with pytest.raises(EnvironmentFaultError, match="another command deleted"):
        progress.await_start(2, lambda: next(states))


def test_the_deployment_that_was_wanted_last_counts_and_the_first_command_is_told() -> None:
    cluster, told = Cluster(), list[str]()
    cluster.pass_time(1.0)
    first = cluster.controller.live.deploy(cluster.serve.clock(), SECOND, "deploy", "one")
    cluster.pass_time(1.0)
    second = cluster.controller.live.deploy(cluster.serve.clock(), THIRD, "deploy", "two")
    progress = ChangeProgress(cluster.controller, told.append, cluster.serve.sleep, cluster.serve.clock)
    with pytest.raises(EnvironmentFaultError, match="somebody else deployed another plan meanwhile"):
        progress.await_change(first)
    assert progress.await_change(second)
    assert cluster.versions()[-1] == ("deploy", 30.0)


@pytest.mark.parametrize("is_killed", [False, True])
def test_edits_have_the_next_number_and_a_change_under_way_keeps_its_own(is_killed: bool) -> None:
    cluster = Cluster()
    cluster.pass_time(1.0)
    first = cluster.controller.live.deploy(cluster.serve.clock(), SECOND, "deploy", "one")
    cluster.pass_time(1.0)
    edits = {"a": SECOND.plan.models[0].model_copy(update={"slo_ms": 70.0})}

    def make(controller: Controller) -> Edits:
        controller.edit(edits)
        return edits

    assert cluster.controller.live.edit(make) == (first + 1, edits)
    cluster.controller.live.carry_out(cluster.serve.clock())
    if is_killed:
        cluster.start_controller()
    progress = ChangeProgress(cluster.controller, lambda _text: None, cluster.serve.sleep, cluster.serve.clock)
    assert progress.await_change(first)
    state, lines = progress.await_edit(first + 1)
    assert (state.number, lines) == (first + 1, [])
    assert cluster.versions()[-1] == ("deploy", 40.0)
    assert cluster.controller.live.controller.workload["a"].slo_ms == 70.0
    assert cluster.controller.live.deploy(cluster.serve.clock(), THIRD, "deploy", "two") == first + 2


def test_a_first_start_that_fails_says_so_keeps_no_version_and_can_be_followed_by_another() -> None:
    cluster = Cluster.__new__(Cluster)
    cluster.store = DictStore()
    cluster.serve, cluster.history = FakeServe(None), History(cluster.store)
    cluster.stored.write_desired(DesiredDeployment(1, FIRST, "serve", "a test", is_first=True))
    cluster.start_controller()
    cluster.serve.broken = {"gpulet-n0-0-a": "RuntimeError: the weights are missing"}
    cluster.pass_time(10.0)
    (end,) = (line for line in cluster.stored.log() if line.reached is not None)
    assert (end.number, end.reached) == (1, False)
    assert "the weights are missing" in end.text
    assert cluster.history.all() == []
    cluster.serve.broken = {}
    cluster.controller.live.deploy(cluster.serve.clock(), SECOND, "deploy", "again")
    cluster.pass_time(20.0)
    assert cluster.versions() == [("deploy", 40.0)]


def test_in_mode_off_a_plan_that_loses_requests_stays_and_looks_are_rare_once_it_runs() -> None:
    cluster = Cluster()
    cluster.pass_time(1.0)
    assert cluster.controller.live.is_idle
    cluster.controller.live.deploy(cluster.serve.clock(), SECOND, "deploy", "a test")
    assert not cluster.controller.live.is_idle
    cluster.pass_time(9.0)
    assert cluster.controller.live.is_idle
    for _ in range(30):
        cluster.serve.counts["a"]["samples"] += 100
        cluster.serve.counts["a"]["expired"] += 100
        cluster.pass_time(0.5)
    assert cluster.controller.state().change is None
    assert cluster.versions()[-1] == ("deploy", 40.0)


def test_what_another_deployment_left_ends_before_anything_starts_unless_serve_is_bringing_it() -> None:
    cluster = Cluster()
    cluster.serve.since["gpulet-n0-0-z"] = 0.0
    states = cluster.serve.states

    def deploying() -> dict[str, ApplicationState]:
        return {**states(), ENTRY_APPLICATION: ApplicationState("DEPLOYING")}

    cluster.serve.states = deploying  # type: ignore[method-assign]
    cluster.pass_time(5.0)
    assert cluster.serve.ended == []
    cluster.serve.states = states  # type: ignore[method-assign]
    cluster.serve.end_s = 10.0
    cluster.controller.live.deploy(cluster.serve.clock(), SECOND, "deploy", "a test")
    cluster.pass_time(40.0)
    ended_s = {name: at_s for at_s, name in cluster.serve.ended}
    assert cluster.serve.since["gpulet-n0-0-b"] >= ended_s["gpulet-n0-0-z"] + 10.0
    assert cluster.serve.unserved == []


def test_nothing_is_begun_where_nothing_is_deployed_or_wanted() -> None:
    store = DictStore()
    history, stored = History(store), ControlMemory(store)
    assert begun_from(history, stored, None) is None
    history.add(FIRST, "deploy", "it was deleted since")
    assert begun_from(history, stored, None) is None


@pytest.mark.parametrize("is_found", [True, False])
def test_what_somebody_else_deployed_is_taken_over_with_the_next_number(is_found: bool) -> None:
    cluster = Cluster()
    cluster.pass_time(1.0)
    if is_found:
        cluster.history.add(THIRD, "serve deploy", "found running")
    begun = begun_from(cluster.history, cluster.stored, THIRD, is_found=is_found)
    assert begun is not None
    assert (begun[0], begun[1].plan, begun[1].number) == (THIRD, THIRD.plan, 2)


def test_what_runs_without_a_controller_is_taken_over_whatever_ran_before() -> None:
    store = DictStore()
    history, stored = History(store), ControlMemory(store)
    history.add(FIRST, "deploy", "it was deleted since")
    begun = begun_from(history, stored, SECOND)
    assert begun is not None
    assert (begun[0], begun[1].plan, begun[1].number) == (SECOND, SECOND.plan, 1)
    assert begun_from(history, stored, SECOND) == begun
