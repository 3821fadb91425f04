"""What an operator does to the deployment of a cluster: deploy, roll back, delete, speak to the controller.

Every change is made by the controller, which runs beside every deployment. A command says what it wants, and follows
the change until it is over (`tenuto.deployments.control.change_progress`).
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager

from tenuto.deployments.control.change_preview import ChangePreview, preview_change
from tenuto.deployments.control.change_progress import ChangeProgress
from tenuto.deployments.control.controller_client import ControllerClient
from tenuto.deployments.control.controller_process import keep_ground, read_declared_nodes, read_ground
from tenuto.deployments.control.journal import listed
from tenuto.deployments.control.remembered import ControlMemory, DesiredDeployment
from tenuto.deployments.control.settings import check_policy
from tenuto.deployments.control.version_edits import Edited
from tenuto.deployments.machines.node_layouts import check_layouts
from tenuto.deployments.process.ray_address import KnownDeployment, announce, cluster_address, running_address
from tenuto.deployments.serve.applications import Applications, check_cluster, check_nodes, refuse_foreign
from tenuto.deployments.serve.config import CONTROL_APPLICATION, ENTRY_APPLICATION, application_name, is_ours
from tenuto.deployments.serve.deployment import UNCHANGEABLE, Deployment, fitting_gateways
from tenuto.deployments.serve.history import ClusterStore, History, Store, Version
from tenuto.deployments.serve.launcher import Launcher, is_serving
from tenuto.deployments.serve.states import ApplicationState
from tenuto.deployments.wire.arena import machine_id
from tenuto.errors import EnvironmentFaultError, TenutoError
from tenuto.mps.processes import Processes
from tenuto.placement import Plan
from tenuto.placement.cluster import Gpu, Placed
from tenuto.placement.placement_constraints import is_at
from tenuto.placement.planner.gpu_matching import gpus_of
from tenuto.placement.workload import lacking
from tenuto.profiles import Profiles

Ground = tuple[Profiles, tuple[Gpu, ...]]
_EMPTIED_S = 130.0  # limit: gateways may use a gpu-let for one more minute; ending takes `UserConfig.ends_s`
_STARTS_S = 120.0  # limit: for a controller that joins a deployment which has none
_AWAITED_S = 300.0  # limit: for the change of another command or of the controller
_GOES_ON = "the controller goes on with the change; `tenuto control log` says how it ends"
_LAUNCHER = "serve/launcher"  # the process that the deployment ends with


class Operations:
    """One connection to a Ray cluster. Use as a context manager; leaving it leaves the deployment running."""

    def __init__(
        self, address: str | None, progress: Callable[[str], None], *, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        """Connect.

        Args:
            address: of the cluster; default: RAY_ADDRESS, else this machine's.
            progress: receives what happens, in words.
            sleep: waits for seconds; when it raises, the wait ends.

        Raises:
            EnvironmentFaultError: no cluster answers.
        """
        import ray.serve  # noqa: F401  # sets the level of its logger

        logging.getLogger("ray.serve").setLevel(logging.ERROR)  # `progress` reports instead
        self._progress, self._sleep = progress, sleep
        self._launcher = Launcher(progress=progress)
        self._launcher.connect(num_gpus=0, address=running_address(address) or "auto")
        self._applications = Applications()
        self._store = ClusterStore()
        self._history = History(self._store)

    def __enter__(self) -> Operations:
        return self

    def __exit__(self, *_error: object) -> None:
        self._launcher.leave()

    # --- what runs ----------------------------------------------------------------------------------------------------

    def states(self) -> dict[str, ApplicationState]:
        """Return every Serve application of the cluster."""
        return self._applications.states() if is_serving() else {}

    def running(self) -> Deployment:
        """Return what is deployed, whoever did it, with the present plan.

        Raises:
            EnvironmentFaultError: nothing is deployed.
        """
        if (deployed := self._applications.deployed() if is_serving() else None) is None:
            raise EnvironmentFaultError("nothing is deployed on this cluster. Use `tenuto deploy PLAN`.")
        return self._history.running(deployed)

    def await_settled(self) -> Deployment:
        """Return what is deployed, once the controller's change under way is over.

        Raises:
            EnvironmentFaultError: nothing is deployed, or the change does not end.
        """
        self._await_change()
        return self.running()

    def _await_change(self) -> None:
        """Return once the controller's change under way is over, if a controller runs; raise `EnvironmentFaultError`
        when it does not end."""
        since_s, reported = time.monotonic(), ""
        while CONTROL_APPLICATION in self.states() and (why := ControllerClient().state().awaits):
            if time.monotonic() - since_s > _AWAITED_S:
                raise EnvironmentFaultError(f"a change is still under way ({why}). See `tenuto control log`.")
            if why != reported:
                self._progress(f"waiting for the change under way: {why}")
                reported = why
            self._sleep(0.5)

    def lost_gpus(self, gpus: Sequence[Placed]) -> tuple[str, ...]:
        """Return the ids of the GPUs whose nodes are not alive."""
        alive = self._applications.node_names() | {""}
        return tuple(dict.fromkeys(gpu.id for gpu in gpus if gpu.node_key not in alive))

    def await_empty(self, before: Plan, places: Collection[str]) -> list[str]:
        """Wait until no gpu-let, of the previous plan or any other, is left on these nodes, racks or GPUs. Return what
        else is on the wholly emptied nodes, in words.

        Raises:
            EnvironmentFaultError: a gpu-let does not end.
        """
        every = {gpu.id: gpu for gpu in (*self.planner_inputs()[1], *gpus_of(before))}.values()
        on = {application_name(gpu.id) for gpu in every if is_at(gpu, places)}
        planned = {application_name(g.id) for g in before.gpulets if on & {application_name(gpu) for gpu in g.gpus}}

        def left() -> list[str]:
            return [name for name in self.states() if name in planned or name.rpartition("-")[0] in on]

        _await_none(left, "end", _EMPTIED_S, self._sleep)
        used = {gpu.node_key for gpu in every if not is_at(gpu, places)}
        whole = {gpu.node_key for gpu in every if is_at(gpu, places)} - used
        return self._applications.others_at(whole)

    def describe(self) -> str:
        """Return what is deployed and where, in words; empty when nothing is.

        Raises:
            InvalidInputError: it was deployed by another version.
        """
        ours = [name for name in self.states() if is_ours(name)]
        if not ours:
            return ""
        what = f"{len(ours)} applications"
        if ENTRY_APPLICATION in ours:
            running = self.running()
            names = ", ".join(dict.fromkeys(r.name for gpulet in running.plan.gpulets for r in gpulet.models))
            what = f"{running.name or 'the deployment'} at {running.url} ({names or 'no models'})"
        return f"{what} on the Ray at {cluster_address()}"

    @property
    def history(self) -> History:
        """The versions, those of `serve deploy` included."""
        if ENTRY_APPLICATION in self.states():
            self.running()
        return self._history

    def planner_inputs(self) -> Ground:
        """Return what the controller plans with; empty when no controller was deployed."""
        return read_ground(self._store)

    def preview(self, deployment: Deployment, unchanged: Collection[str] = ()) -> ChangePreview:
        """Return what going over to another deployment would do; settings in `unchanged` stay as they run."""
        return preview_change(self.running(), deployment, unchanged)

    @property
    def base_url(self) -> str:
        """Where the gateways answer."""
        return self._launcher.base_url or self.running().url

    # --- changing it --------------------------------------------------------------------------------------------------

    def deploy(
        self,
        deployment: Deployment,
        why: str,
        *,
        by: str = "deploy",
        ground: Ground | None = None,
        replace: bool = False,
        unchanged: Collection[str] = (),
        agrees: Callable[[ChangePreview], None] = lambda _preview: None,
    ) -> bool:
        """Make this deployment the running one. Return True when it was reached; otherwise the previous one runs again.

        Args:
            deployment: the deployment to reach; without controller settings it keeps the present ones.
            why: for the history.
            by: the command, for the history.
            ground: what the controller plans with; needed with controller settings.
            replace: foreign applications may be removed, and our running ones end first.
            unchanged: fields of `deployment` that stay as they are when something runs.
            agrees: receives what the change would do, before it begins; when it raises, nothing is done.

        Raises:
            InvalidInputError: it cannot be served; nothing was changed.
            EnvironmentFaultError: foreign applications run, or the cluster lacks what it needs.
        """
        states = self.states()
        is_running = ENTRY_APPLICATION in states
        if not replace:
            refuse_foreign(states)
        if is_running:
            agrees(self.preview(deployment, () if replace else unchanged))
        if replace:
            end_all()
        elif is_running:
            if ground is not None:
                nodes = read_declared_nodes(self._store) or self._applications.node_ids()
                keep_ground(self._store, *ground, nodes)
            return self._change(deployment, why, by, unchanged)
        else:
            refuse_second_start(states, self._store)
            if any(is_ours(name) for name in states):
                self.delete()
        check_cluster()
        try:
            with self._going_on():
                begin(self._launcher, deployment, why, by, ground, progress=self._progress, sleep=self._sleep)
        except TenutoError:
            self.delete()
            raise
        return True

    def _change(self, deployment: Deployment, why: str, by: str, unchanged: Collection[str]) -> bool:
        deployment = deployment.left_open_as(self.running(), unchanged)
        check_policy(deployment.control, deployment.plan)
        check_nodes(deployment.config())
        if deployment.executor != "emulated":
            check_layouts(deployment.plan)
        controller = self.controller()
        with self._going_on():
            number = controller.deploy(deployment, by, why)
            reached = ChangeProgress(controller, self._progress, self._sleep).await_change(number)
        if reached:
            announce(KnownDeployment(cluster_address(), deployment.name, deployment.url, deployment.operator_url))
        return reached

    @contextmanager
    def _going_on(self) -> Iterator[None]:
        """Say that the change goes on, if the controller has begun it, when the user interrupts the block."""
        try:
            yield
        except KeyboardInterrupt:
            if CONTROL_APPLICATION in self.states():
                self._progress(_GOES_ON)
            raise

    def edit(self, make: Callable[[ControllerClient], Edited], *, waits: bool = True) -> str:
        """Have the controller change entries of the workload. Return once that is carried out, or will not be; then
        return why not, in words.

        Args:
            make: asks the controller to change them.
            waits: False: return at once.

        Raises:
            InvalidInputError: they cannot be changed so.
            EnvironmentFaultError: no controller runs, or it does not answer.
        """
        controller = self.controller()
        number, edits = make(controller)
        if not waits:
            return ""
        with self._going_on():
            state, lines = ChangeProgress(controller, self._progress, self._sleep).await_edit(number)
        plan = self.running().plan
        undone = lacking((spec for spec in plan.models if spec.name not in plan.unserved), edits)
        if not undone:
            return ""
        why = state.obstacle or next((line.text for line in reversed(lines)), "the controller gave no reason")
        if state.mode == "advise":
            why = f"{why}; the controller only advises: `tenuto control apply` carries it out"
        if state.missing_gpus:
            return f"{', '.join(undone)}: not yet: more GPUs are on their way ({listed(state.missing_gpus)})"
        return f"{', '.join(undone)}: not carried out: {why}"

    def rollback(
        self, number: int | None, *, agrees: Callable[[ChangePreview], None] = lambda _preview: None
    ) -> tuple[Version, bool]:
        """Go back to a version, by default to the last one with another plan; return it and whether it was reached.
        Settings that need --replace stay as they are.

        Without a number it first waits for a change that is under way: that is what is taken back.

        Raises:
            InvalidInputError: there is no such version.
            EnvironmentFaultError: nothing was deployed before.
        """
        if number is None:
            self._await_change()
        history = self.history
        is_down = number is None and ENTRY_APPLICATION not in self.states()
        version = history.get(number) if number is not None else history.latest() if is_down else history.before()
        if version is None:
            raise EnvironmentFaultError("nothing was deployed on this cluster yet. Use `tenuto deploy PLAN`.")
        why = f"rollback to version {version.number}"
        # A copy counts these as given, so that the running deployment's do not take the place of those left open.
        given = {name: getattr(version.deployment, name) for name in UNCHANGEABLE}
        deployment = version.deployment.model_copy(update=given)
        return version, self.deploy(deployment, why, by="rollback", unchanged=UNCHANGEABLE, agrees=agrees)

    def delete(self) -> list[str]:
        """Drain and remove the deployment; return the names of its applications. Foreign ones stay.

        Raises:
            EnvironmentFaultError: an application does not end.
        """
        return _remove(self._applications, self._store)

    # --- the controller -----------------------------------------------------------------------------------------------

    def controller(self) -> ControllerClient:
        """Return the client of the controller. One is started where none runs, as after `serve deploy` of an old file.

        Raises:
            EnvironmentFaultError: nothing is deployed, or the controller does not start.
        """
        if CONTROL_APPLICATION not in self.states():
            self._applications.start_controller(self.running().config())
            self._progress("starting a controller, which takes over what runs")

            def starting() -> list[str]:
                return [] if self.states()[CONTROL_APPLICATION].is_running else ["the controller"]

            _await_none(starting, "start", _STARTS_S, self._sleep)
        return ControllerClient()


def refuse_running(progress: Callable[[str], None] = lambda _text: None) -> None:
    """Raise `EnvironmentFaultError` when a plan runs on the connected cluster. What a killed `tenuto serve` of this
    machine left is ended instead."""
    if not is_serving():
        return
    applications, store = Applications(), ClusterStore()
    states = applications.states()
    if ENTRY_APPLICATION in states and is_orphaned(store):
        progress("the `tenuto serve` that ran a plan here was killed; ending what it left")
    elif ENTRY_APPLICATION in states:
        raise EnvironmentFaultError(
            "a plan runs on this cluster already. Change it with `tenuto deploy PLAN`, end it with `tenuto delete`, or "
            "pass --replace; another cluster is named with --address, a local one of its own with --address local."
        )
    else:
        refuse_second_start(states, store)
    refuse_foreign(states)
    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    _remove(applications, store)


def refuse_second_start(states: Mapping[str, ApplicationState], store: Store) -> None:
    """Raise `EnvironmentFaultError` while another command brings a deployment up: its controller has begun, and its
    gateways have not."""
    controller = states.get(CONTROL_APPLICATION)
    is_alone = controller is not None and not controller.is_broken and ENTRY_APPLICATION not in states
    if is_alone and ControlMemory(store).desired() is not None:
        raise EnvironmentFaultError(
            "another command brings a deployment up here. Wait until `tenuto status` shows it, or pass --replace."
        )


def end_all() -> None:
    """Drain and remove every Serve application of the connected cluster, foreign ones too.

    Raises:
        EnvironmentFaultError: an application does not end.
    """
    if is_serving():
        applications = Applications()
        _remove(applications, ClusterStore())
        applications.delete(list(applications.states()))


def is_deployed() -> bool:
    """Whether a plan runs on the connected cluster."""
    return is_serving() and ENTRY_APPLICATION in Applications().states()


def begin(
    launcher: Launcher,
    deployment: Deployment,
    why: str,
    by: str,
    ground: Ground | None = None,
    *,
    ends_with_caller: bool = False,
    progress: Callable[[str], None] = lambda _text: None,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Bring a deployment up on the connected cluster.

    `ends_with_caller`: this process ends the deployment. When it is killed first, the next `tenuto serve` of this
    machine does.

    Raises:
        EnvironmentFaultError: it does not start.
    """
    store, applications, gpulets = ClusterStore(), Applications(), len(deployment.plan.gpulets)
    _forget_life(store)
    gateways = deployment.gateways or fitting_gateways(applications.count_cores(), gpulets)
    deployment = deployment.model_copy(update={"nodes": applications.count_nodes(), "gateways": gateways})
    if deployment.executor != "emulated":
        check_layouts(deployment.plan)
    if ends_with_caller:
        sign_launcher(store)
    if ground is not None:
        keep_ground(store, *ground, applications.node_ids())
    launcher.start_serve(deployment.config())
    desired = DesiredDeployment(1, deployment, by, why, History(store).latest_number(), is_first=True)
    ControlMemory(store).write_desired(desired)
    applications.start_controller(deployment.config())
    ChangeProgress(ControllerClient(), progress, sleep).await_start(1, applications.states)
    announce(KnownDeployment(cluster_address(), deployment.name, deployment.url, deployment.operator_url))
    elsewhere = applications.gateways_elsewhere()
    if elsewhere:
        progress(
            f"no gateway is on this machine: the deployment answers on {', '.join(elsewhere)}. Ask there, or bring it "
            f"up with --gateways {deployment.nodes}, one for each node"
        )


def sign_launcher(store: Store) -> None:
    """Record that the deployment ends with this process."""
    mine = {"machine": machine_id(), "pid": os.getpid(), "started": str(Processes().started_at(os.getpid()))}
    store.put(_LAUNCHER, json.dumps(mine).encode())


def is_orphaned(store: Store) -> bool:
    """Whether the deployment was to end with a process of this machine that is gone."""
    if (raw := store.get(_LAUNCHER)) is None:
        return False
    signed = json.loads(raw)
    return bool(signed["machine"] == machine_id() and signed["started"] != str(Processes().started_at(signed["pid"])))


def _await_none(left: Callable[[], list[str]], verb: str, limit_s: float, sleep: Callable[[float], None]) -> None:
    """Wait until no application is left that should `verb`; raise `EnvironmentFaultError` after the limit."""
    until_s = time.monotonic() + limit_s
    while names := left():
        if time.monotonic() > until_s:
            raise EnvironmentFaultError(f"{', '.join(names)} did not {verb} within {limit_s:g} s. See `tenuto logs`.")
        sleep(0.2)


def _remove(applications: Applications, store: Store) -> list[str]:
    """Drain and remove every application of ours, and forget its life; return their names."""
    ours = sorted(name for name in applications.states() if is_ours(name)) if is_serving() else []
    if ours:
        from ray.exceptions import ActorDiedError

        try:
            applications.delete_ours()
        except ActorDiedError:  # `tenuto serve` saw its deployment removed, and ended its own Ray
            return ours
    _forget_life(store)
    return ours


def _forget_life(store: Store) -> None:
    """Forget what concerns only the running processes; the history stays."""
    ControlMemory(store).clear()
    store.delete(_LAUNCHER)
