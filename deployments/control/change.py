"""One change of a running deployment from outside, by a command: the controller's own way, make before break and back
where that fails, until it is over."""

from __future__ import annotations

import time
from collections.abc import Callable

from tenuto.deployments.control.controller import Controller
from tenuto.deployments.control.fit import gpus_of
from tenuto.deployments.control.live import Live, LiveSystem, ServeSide
from tenuto.deployments.control.planner import NoPlanner
from tenuto.deployments.control.remembered import Memory
from tenuto.deployments.control.settings import ControlSettings
from tenuto.deployments.serve.deployment import Deployment
from tenuto.deployments.serve.history import History
from tenuto.deployments.wire.status import DispatchingStatus, LogLine
from tenuto.errors import EnvironmentFaultError

_LOOK_S = 0.25  # limit: between two looks of a command that waits
_ANSWER_S = 60.0  # limit: for the gateways, which may be starting


def change_deployment(
    running: Deployment,
    wanted: Deployment,
    serve: ServeSide,
    read_status: Callable[[], DispatchingStatus],
    history: History,
    *,
    by: str,
    why: str,
    ready_timeout_s: float = 120.0,
    tell: Callable[[LogLine], None] = lambda _entry: None,
    clock: Callable[[], float] = time.time,
    sleep: Callable[[float], None] = time.sleep,
) -> bool:
    """Go from one deployment to another and return whether it was reached; if not, the one before runs again.

    Args:
        running: what is deployed, with the plan that is served.
        wanted: what is to be.
        serve: the cluster.
        read_status: returns the gateways' status.
        history: gets what was reached.
        by: who does it, for the history.
        why: what for.
        ready_timeout_s: how long new gpu-lets may take.
        tell: is told what happens.
        clock: seconds.
        sleep: waits for seconds.

    Raises:
        InvalidInputError: it cannot be served so; nothing was changed.
        EnvironmentFaultError: the gateways do not answer.
    """
    plan = running.plan
    settings = ControlSettings.model_validate({"mode": "off", "change": {"ready_timeout_s": ready_timeout_s}})
    system = LiveSystem(running, serve, read_status, gpus_of(plan))
    heard: list[LogLine] = []

    def hear(entry: LogLine) -> None:
        heard.append(entry)
        tell(entry)

    live = Live(Controller(settings, Memory(plan, plan.workload)), system, NoPlanner(), history, by=by, tell=hear)
    until_s = clock() + _ANSWER_S
    while not live.step(clock()):
        if clock() > until_s:
            raise EnvironmentFaultError(f"the gateways have not answered for {_ANSWER_S:g} s. Run `tenuto status`.")
        sleep(_LOOK_S)
    live.deploy(clock(), wanted, by, why)
    while live.controller.change is not None or not system.is_settled:
        sleep(_LOOK_S)
        live.step(clock())
    return bool(heard) and heard[-1].reached is True
