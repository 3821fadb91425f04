"""The controller's deployment as its callers meet it: what it answers, what it refuses, what it remembers."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable

import pytest

from tenuto.deployments.control.controller import Controller
from tenuto.deployments.control.controller_process import ControllerReplica, keep_ground
from tenuto.deployments.control.live import ControlMemory, Live, LiveSystem
from tenuto.deployments.control.planner import NoPlanner
from tenuto.deployments.control.remembered import Memory
from tenuto.deployments.control.settings import ControlSettings
from tenuto.deployments.serve.deployment import Deployment
from tenuto.deployments.serve.history import History
from tenuto.deployments.wire.status import ControllerState, DispatchingStatus, LogLine
from tenuto.errors import EnvironmentFaultError, InvalidInputError
from tenuto.placement.planner import Proposal
from tenuto.placement.planner.gpu_matching import gpus_of
from tenuto.profiles import Profiles
from tests.deployments.control.fake_serve import FakeServe
from tests.instruments.asking import until
from tests.instruments.generating import PROFILES, writes
from tests.instruments.live import PATIENCE_S
from tests.instruments.plans import gpu, make_plan
from tests.instruments.stores import DictStore

PLAN = make_plan({"n0/0/a": (50.0, ["a"]), "n0/1/a": (50.0, ["b"])})


class Planner(NoPlanner):
    """Never answers; says when it was ended, and lets a test say that it has an answer."""

    is_closed = False

    def __init__(self, wake: Callable[[], None]) -> None:
        self.wake = wake
        self.asked_for_answers = threading.Semaphore(0)

    def answers(self) -> list[tuple[int, Proposal | str]]:
        self.asked_for_answers.release()
        return []

    def close(self) -> None:
        self.is_closed = True


class Served:
    """A controller's deployment over a fake cluster, whose clock goes by itself."""

    def __init__(self) -> None:
        self.deployment = Deployment(plan=PLAN, executor="emulated")
        self.serve = FakeServe(self.deployment)
        self.store = DictStore()
        self.history = History(self.store)
        self.history.add(self.deployment, "deploy", "a test")
        self.begun: list[tuple[ControlSettings, Planner]] = []
        self.is_broken = False
        self.control = ControllerReplica(self.store, self._begin)

    def _status(self) -> DispatchingStatus:
        if self.is_broken:
            raise ValueError("a fault of its own")
        self.serve.sleep(1.0)
        return self.serve.status()

    def _begin(
        self, settings: ControlSettings, tell: Callable[[LogLine], None], wake: Callable[[], None]
    ) -> tuple[Live, Planner]:
        kept, planner = ControlMemory(self.store), Planner(wake)
        self.begun.append((settings, planner))
        system = LiveSystem(self.deployment, self.serve, self._status, gpus_of(PLAN))
        controller = Controller(settings, kept.read() or Memory(PLAN, PLAN.workload))
        live = Live(controller, system, planner, self.history, by="the controller", memory=kept, tell=tell)
        return live, planner


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    served = Served()
    await served.control.reconfigure({"settings": {"mode": "act", "look_s": 0.01}})
    yield served
    served.control.__del__()
    await asyncio.to_thread(lambda: [t.join() for t in threading.enumerate() if t.name == "controller"])
    assert all(planner.is_closed for _, planner in served.begun)


async def test_it_says_how_it_stands_and_what_it_decided(served: Served) -> None:
    assert (await served.control.state()).mode == "act"
    assert (await served.control.pause(True)).paused
    assert [line.kind for line in await served.control.log(10)] == ["paused"]
    shown = await served.control.shown()
    assert (shown.paused, shown.decisions, shown.log[0].what) == (True, {"paused": 1}, "paused")
    assert not (await served.control.pause(False)).paused


async def test_a_command_that_is_given_up_is_not_carried_out_and_harms_nobody(served: Served) -> None:
    """A look may take longer than a command waits. Before, the command was carried out all the same, and its answer,
    which nobody awaited, ended the controller."""
    await served.control.state()
    looks, status = threading.Event(), served.serve.status
    blocked = threading.Event()

    def slow_status() -> DispatchingStatus:
        blocked.set()
        assert looks.wait(PATIENCE_S)
        return status()

    served.serve.status = slow_status  # type: ignore[method-assign]
    assert await asyncio.to_thread(blocked.wait, PATIENCE_S)
    asked = [asyncio.create_task(served.control.pause(True)), asyncio.create_task(served.control.remove_model("b"))]
    await asyncio.sleep(0.05)
    for each in asked:
        each.cancel()
    await asyncio.gather(*asked, return_exceptions=True)
    served.serve.status = status  # type: ignore[method-assign]
    looks.set()
    state = await served.control.state()
    assert not state.paused
    assert "b" in [spec.name for spec in (await served.control.workload()).models]


async def test_it_begins_anew_where_somebody_else_deployed_another_plan(served: Served) -> None:
    await until(lambda: len(served.serve.configs) > 0 and bool(served.serve.counts))
    served.serve.apply(Deployment(plan=make_plan({"n0/0/z": (60.0, ["a"])}), executor="emulated").config())
    await until(lambda: len(served.begun) > 1)
    assert (await served.control.state()).mode == "act"


async def test_models_come_change_and_go(served: Served) -> None:
    control = served.control
    with pytest.raises(InvalidInputError, match="in the workload already"):
        await control.set_model({"name": "a", "rate_rps": 1, "slo_ms": 50}, add=True)
    with pytest.raises(InvalidInputError, match="not in the workload"):
        await control.set_model({"name": "c", "rate_rps": 1, "slo_ms": 50}, add=False)
    with pytest.raises(InvalidInputError, match="rate_rps"):
        await control.set_model({"name": "c", "rate_rps": -1, "slo_ms": 50}, add=True)
    await control.set_model({"name": "c", "rate_rps": 1, "slo_ms": 50}, add=True)
    await control.set_model({"name": "a", "rate_rps": 7, "slo_ms": 70}, add=False)
    assert (await control.workload())["a"].slo_ms == 70
    keep_ground(served.store, Profiles([]), (gpu("n0/0"),))
    with pytest.raises(InvalidInputError, match="no profile"):  # nobody knows what it costs
        await control.set_model({"name": "d", "rate_rps": 1, "slo_ms": 50}, add=True)
    line = {"alpha_ms": 1, "beta_ms": 9}
    with pytest.raises(InvalidInputError, match="a request alone takes 10"):
        await control.set_model({"name": "d", "rate_rps": 1, "slo_ms": 5, "latency": line}, add=True)
    keep_ground(served.store, PROFILES, (gpu("n0/0", 81_920.0, "a100-80gb"),))
    chat = writes("chat").model_dump(mode="json", exclude_defaults=True)
    with pytest.raises(InvalidInputError, match="a request alone is late"):
        await control.set_model(chat | {"slo": {"ttft_ms": 1000, "tpot_ms": 5}}, add=True)
    with pytest.raises(InvalidInputError, match="no `generation`"):
        await control.set_model(chat | {"profile": "fixed"}, add=True)
    await control.set_model(chat, add=True)
    await control.remove_model("chat")
    await control.remove_model("b")
    await control.remove_model("c")
    with pytest.raises(InvalidInputError, match="is the last model"):
        await control.remove_model("a")
    with pytest.raises(InvalidInputError, match="not in the workload"):
        await control.remove_model("b")


async def test_versions_come_are_promoted_and_go(served: Served) -> None:
    control = served.control

    async def shares() -> dict[str, float | None]:
        return {spec.name: spec.share_pct for spec in (await control.workload()).models}

    with pytest.raises(InvalidInputError, match="Say what it has of its own"):
        await control.set_version("a", "2", {"share_pct": 5.0}, {})
    number, edits = await control.set_version("a", "2", {"share_pct": 5.0}, {"weights_path": "/two"})
    entry = edits["a:2"]
    assert entry is not None
    assert entry.share_pct == 5.0
    assert await shares() == {"a": None, "b": None, "a:2": 5.0}
    assert (await control.set_version("a", "2", {"share_pct": 20.0}, {}))[0] == number + 1
    with pytest.raises(InvalidInputError, match="Promote another one first"):
        await control.remove_model("a")
    with pytest.raises(InvalidInputError, match="take the rest, not one"):
        await control.set_model(entry.model_dump(mode="json", exclude={"share_pct"}, exclude_defaults=True), add=False)
    await control.promote("a", "2")
    assert await shares() == {"b": None, "a:2": None}
    await control.set_version("a", "3", {"shadow": True}, {"weights_path": "/three"})
    await control.take_back("a", "3")
    with pytest.raises(InvalidInputError, match="takes the rest"):
        await control.take_back("a", "2")
    assert await shares() == {"b": None, "a:2": None}


async def test_a_plan_that_comes_back_revives_no_removed_model_and_declares_no_rate(served: Served) -> None:
    control, before = served.control, served.deployment.model_copy(update={"workload": PLAN.workload})
    with pytest.raises(EnvironmentFaultError, match="advises no other plan"):
        await control.advice()
    await control.set_model({"name": "a", "rate_rps": 7, "slo_ms": 70}, add=False)
    await control.remove_model("b")
    measured = make_plan({"n0/0/a": (40.0, ["a"]), "n0/1/a": (50.0, ["b"])}, rate_rps=3.3)
    await control.deploy(before.with_plan(measured).model_dump(), "rollback", "a test")
    await until(lambda: len(served.history.all()) == 2)
    latest = served.history.latest()
    assert latest is not None
    assert latest.deployment.workload is not None
    assert [(spec.name, spec.rate_rps) for spec in latest.deployment.workload.models] == [("a", 7.0)]
    assert [spec.name for spec in latest.deployment.plan.models] == ["a"]
    assert [spec.name for spec in (await control.workload()).models] == ["a"]


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("executor", "torch", "would restart every gpu-let"),
        ("port", 1, "is 8000 now"),
        ("gateways", 2, "one schedules by itself"),
    ],
)
async def test_what_only_a_new_beginning_can_change_is_refused(
    served: Served, field: str, value: object, words: str
) -> None:
    other = served.deployment.model_copy(update={field: value})
    with pytest.raises(InvalidInputError, match=words):
        await served.control.deploy(other.model_dump(), "deploy", "a test")
    assert (await served.control.state()).change is None


async def test_new_settings_begin_anew_with_what_was_remembered(served: Served) -> None:
    await served.control.pause(True)
    await served.control.reconfigure({"settings": {"mode": "advise", "look_s": 0.01}})
    state = await served.control.state()
    assert (state.mode, state.paused) == ("advise", True)
    assert [settings.mode for settings, _ in served.begun] == ["act", "advise"]
    with pytest.raises(InvalidInputError, match="modus"):
        await served.control.reconfigure({"settings": {"modus": "act"}})


async def test_a_plan_does_not_wait_for_the_next_look(served: Served) -> None:
    await served.control.reconfigure({"settings": {"look_s": 1000.0}})
    while len(served.begun) < 2:
        await served.control.state()
    _, planner = served.begun[-1]
    for _ in range(10):  # more often than it has looked until now
        planner.wake()
        assert await asyncio.to_thread(planner.asked_for_answers.acquire, timeout=100.0)


async def test_one_that_has_failed_says_so_to_serve_and_to_who_asks(served: Served) -> None:
    async def asked_for_ever() -> None:
        while True:  # a look may be under way
            await served.control.state()

    served.is_broken = True
    with pytest.raises(EnvironmentFaultError, match="a fault of its own"):
        await asked_for_ever()
    with pytest.raises(EnvironmentFaultError, match="a fault of its own"):
        await served.control.check_health()


async def test_one_that_is_to_be_removed_applies_nothing_more(served: Served) -> None:
    await served.control.set_model({"name": "c", "rate_rps": 1, "slo_ms": 50}, add=True)
    await served.control.retire()
    seconds, configs = served.serve.now_s, len(served.serve.configs)
    await asyncio.sleep(0.1)
    assert (served.serve.now_s, len(served.serve.configs)) == (seconds, configs)
    with pytest.raises(EnvironmentFaultError, match="is being removed"):
        await served.control.state()


async def test_what_was_answered_is_remembered_and_done_by_the_next_process(served: Served) -> None:
    await served.control.set_model({"name": "a", "rate_rps": 7, "slo_ms": 70}, add=False)
    assert (await served.control.state()).awaits == "the workload changed (its entries)"
    memory = Memory.from_data(json.loads(served.store.values["control/memory"]))
    assert memory.workload["a"].slo_ms == 70
    assert Controller(ControlSettings(mode="act"), memory).state().awaits == "the workload changed (a)"
    assert Controller(ControlSettings(mode="off"), memory).state().awaits == ""
    assert Controller(ControlSettings(mode="act"), Memory(PLAN, PLAN.workload)).state().awaits == ""


def test_a_change_that_ended_is_awaited_until_the_gateways_follow_it_unless_a_gpu_cannot_be_cut() -> None:
    assert ControllerState(is_settled=True).awaits == ""
    assert "the gateways follow the plan" in ControllerState(is_settled=False).awaits
    assert ControllerState(is_settled=False, cutting=["n0/0"]).awaits == ""


async def test_what_is_remembered_is_plain_json(served: Served) -> None:
    await served.control.pause(True)
    assert Memory.from_data(json.loads(served.store.values["control/memory"])).paused
