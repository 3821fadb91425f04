"""One change of a deployment by a command, until it is over.

The change goes the controller's own way: new gpu-lets start before old ones end, and when that fails, the plan before
runs again. Bringing up is a change from the empty plan.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from tenuto.deployments.control.controller import Controller
from tenuto.deployments.control.cuts import LayoutSide
from tenuto.deployments.control.fit import gpus_of
from tenuto.deployments.control.live import Live, LiveSystem, ServeSide
from tenuto.deployments.control.planner import NoPlanner
from tenuto.deployments.control.remembered import Memory
from tenuto.deployments.control.settings import ControlSettings
from tenuto.deployments.serve.config import is_ours
from tenuto.deployments.serve.deployment import Deployment
from tenuto.deployments.serve.history import History
from tenuto.deployments.wire.status import DispatchingStatus, LogLine
from tenuto.errors import EnvironmentFaultError
from tenuto.placement import Plan

_LOOK_S = 0.25  # limit: between looks
# limit: until new gpu-lets are ready; where nothing runs yet, a busy machine also starts gateways in that time
_READY_S, _FIRST_READY_S = 120.0, 300.0


def nothing_of(wanted: Deployment) -> Deployment:
    """Return what runs before a deployment is brought up: the same, of the empty plan."""
    return wanted.model_copy(update={"plan": Plan(policy=wanted.plan.policy)})


def change_deployment(
    running: Deployment,
    wanted: Deployment,
    serve: ServeSide,
    read_status: Callable[[], DispatchingStatus],
    history: History,
    *,
    by: str,
    why: str,
    ready_timeout_s: float | None = None,
    layouts: LayoutSide | None = None,
    tell: Callable[[str], None] = lambda _text: None,
    clock: Callable[[], float] = time.time,
    sleep: Callable[[float], None] = time.sleep,
) -> bool:
    """Go from one deployment to another and return whether it was reached; if not, the one before runs again.

    Args:
        running: what is deployed, with the plan that is served; see `nothing_of`.
        wanted: what is to be.
        serve: the cluster.
        read_status: returns the gateways' status.
        history: gets what was reached.
        by: who does it, for the history.
        why: what for.
        ready_timeout_s: how long new gpu-lets may take, and gateways to answer.
        layouts: cuts GPUs into MIG instances.
        tell: is told what happens.
        clock: seconds.
        sleep: waits for seconds.

    Raises:
        InvalidInputError: it cannot be served so; nothing was changed.
        EnvironmentFaultError: the gateways do not answer, or nothing ran before and it did not start.
    """
    plan, is_first = running.plan, not running.plan.gpulets
    patience_s = ready_timeout_s or (_FIRST_READY_S if is_first else _READY_S)
    settings = ControlSettings.model_validate({"mode": "off", "change": {"ready_timeout_s": patience_s}})
    system = LiveSystem(running, serve, read_status, gpus_of(plan), layouts)
    ends: list[bool] = []

    def hear(entry: LogLine) -> None:
        if entry.reached is not None:
            ends.append(entry.reached)
        if not is_first:
            tell(f"{entry.kind}: {entry.text}")

    live = Live(Controller(settings, Memory(plan, plan.workload)), system, NoPlanner(), history, by=by, tell=hear)
    heard_s = clock()

    def look() -> bool:
        nonlocal heard_s
        if live.step(clock()):
            heard_s = clock()
            return True
        if clock() - heard_s > patience_s:
            raise EnvironmentFaultError(f"the gateways have not answered for {patience_s:g} s. Run `tenuto status`.")
        return False

    while not look():
        sleep(_LOOK_S)
    live.deploy(clock(), wanted, by, why)
    if is_first:
        _await_all(live, serve, look, tell, sleep)
    while live.controller.change is not None or not system.is_settled:
        sleep(_LOOK_S)
        look()
    return bool(ends) and ends[-1]


def _await_all(
    live: Live, serve: ServeSide, look: Callable[[], bool], tell: Callable[[str], None], sleep: Callable[[float], None]
) -> None:
    """Wait until all that was applied runs; raise `EnvironmentFaultError` where something cannot."""
    shown = ""
    while True:
        states = {name: state for name, state in serve.states().items() if is_ours(name)}
        broken = [(name, state.essence) for name, state in states.items() if state.is_broken]
        if broken:
            raise EnvironmentFaultError("application {} did not start:\n{}".format(*broken[0]))
        change = live.controller.change
        if change is not None and change.is_rollback:
            raise EnvironmentFaultError(f"{change.why}. See `ray status`.")
        running = sum(state.is_running for state in states.values())
        ready = change is None and running == len(states) > 0
        text = f"{running}/{len(states)} applications run{', gpu-lets connected' if ready else ''}"
        if text != shown:
            tell(text)
            shown = text
        if ready:
            return
        sleep(_LOOK_S)
        look()
