"""Carries out one change of a deployment for a command, and waits until it is over.

The change goes the controller's own way: new gpu-lets start before old ones end. When that fails, the previous plan
runs again. Bringing a deployment up is a change from the empty plan.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from tenuto.deployments.control.controller import Controller
from tenuto.deployments.control.live import Live, LiveSystem, ServeSide
from tenuto.deployments.control.mig_reconfiguration import LayoutSide
from tenuto.deployments.control.planner import NoPlanner
from tenuto.deployments.control.remembered import Memory
from tenuto.deployments.control.settings import ControlSettings
from tenuto.deployments.serve.config import is_ours
from tenuto.deployments.serve.deployment import Deployment
from tenuto.deployments.serve.history import History
from tenuto.deployments.wire.status import DispatchingStatus, LogLine
from tenuto.errors import EnvironmentFaultError
from tenuto.placement import Plan
from tenuto.placement.planner.gpu_matching import gpus_of

_LOOK_S = 0.25  # pace: between looks
# limit: until new gpu-lets are ready; at first start, a busy machine also starts gateways meanwhile
_READY_S, _FIRST_READY_S = 120.0, 300.0


def nothing_of(wanted: Deployment) -> Deployment:
    """Return the deployment with an empty plan: what runs before it is brought up."""
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
    """Go from one deployment to another. Return True when it was reached; otherwise the previous one runs again.

    Args:
        running: what is deployed now; before the first start see `nothing_of`.
        wanted: the deployment to reach.
        serve: the cluster.
        read_status: returns the gateways' status.
        history: records what was reached.
        by: who makes the change, for the history.
        why: its reason, for the history.
        ready_timeout_s: limit for new gpu-lets to become ready and gateways to answer.
        layouts: cuts GPUs into MIG instances.
        tell: receives progress in words.
        clock: seconds.
        sleep: waits for seconds.

    Raises:
        InvalidInputError: the wanted deployment cannot be served; nothing was changed.
        EnvironmentFaultError: the gateways do not answer, or nothing ran before and the deployment did not start.
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
    """Wait until all applications run; raise `EnvironmentFaultError` when one cannot."""
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
