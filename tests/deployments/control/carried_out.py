"""A change as a command and the controller make it together, over a fake cluster whose clock a test turns."""

from __future__ import annotations

import time
from collections.abc import Callable

from tenuto.deployments.control.change_progress import ChangeProgress
from tenuto.deployments.control.controller import Controller
from tenuto.deployments.control.controller_process import nothing_of
from tenuto.deployments.control.live import Live, LiveSystem
from tenuto.deployments.control.mig_reconfiguration import LayoutSide
from tenuto.deployments.control.planner import NoPlanner
from tenuto.deployments.control.remembered import ControlMemory, Memory
from tenuto.deployments.control.settings import ControlSettings
from tenuto.deployments.serve.config import CONTROL_APPLICATION
from tenuto.deployments.serve.deployment import Deployment
from tenuto.deployments.serve.history import History
from tenuto.deployments.wire.status import ControllerState, DispatchingStatus, LogLine
from tenuto.placement.planner.gpu_matching import gpus_of
from tests.deployments.control.fake_serve import FakeServe
from tests.instruments.stores import DictStore

__all__ = ["OwnController", "change_deployment", "nothing_of"]


class OwnController:
    """A controller in mode off that looks whenever a command asks it something, `looks` times before it answers."""

    def __init__(
        self,
        running: Deployment,
        serve: FakeServe,
        read_status: Callable[[], DispatchingStatus],
        history: History,
        *,
        ready_timeout_s: float = 120.0,
        layouts: LayoutSide | None = None,
        clock: Callable[[], float],
        stored: ControlMemory | None = None,
        memory: Memory | None = None,
        looks: int = 1,
    ) -> None:
        self._looks = looks
        plan, self.stored, self._clock = running.plan, stored or ControlMemory(DictStore()), clock
        settings = ControlSettings.model_validate({"mode": "off", "change": {"ready_timeout_s": ready_timeout_s}})
        memory = memory or Memory(plan, plan.workload)
        system = LiveSystem(running.with_plan(memory.plan), serve, read_status, gpus_of(plan, memory.plan), layouts)
        controller = Controller(settings, memory)
        self.live = Live(
            controller, system, NoPlanner(), history, by="the controller", memory=self.stored, number=memory.number
        )

    def state(self) -> ControllerState:
        self._look()
        return self.live.state()

    def _look(self) -> None:
        for _ in range(self._looks):
            self.live.step(self._clock())

    def log(self, limit: int) -> list[LogLine]:
        self._look()
        return self.stored.log()[-limit:]

    def change(
        self,
        wanted: Deployment,
        serve: FakeServe,
        *,
        by: str,
        why: str,
        tell: Callable[[str], None] = lambda _text: None,
        sleep: Callable[[float], None],
    ) -> bool:
        """Want a deployment and wait for it, as a command does; return whether it was reached."""
        is_first = not self.live.controller.plan.gpulets
        number = self.live.deploy(self._clock(), wanted, by, why)
        progress = ChangeProgress(self, tell, sleep, self._clock)
        if not is_first:
            return progress.await_change(number)
        serve.since[CONTROL_APPLICATION] = self._clock()
        progress.await_start(number, serve.states)
        return True


def change_deployment(
    running: Deployment,
    wanted: Deployment,
    serve: FakeServe,
    read_status: Callable[[], DispatchingStatus],
    history: History,
    *,
    by: str,
    why: str,
    ready_timeout_s: float = 120.0,
    layouts: LayoutSide | None = None,
    tell: Callable[[str], None] = lambda _text: None,
    clock: Callable[[], float] = time.time,
    sleep: Callable[[float], None] = time.sleep,
    looks: int = 1,
) -> bool:
    """Go from one deployment to another, from `nothing_of` one to bring it up; return whether it was reached."""
    controller = OwnController(
        running, serve, read_status, history, ready_timeout_s=ready_timeout_s, layouts=layouts, clock=clock, looks=looks
    )
    return controller.change(wanted, serve, by=by, why=why, tell=tell, sleep=sleep)
