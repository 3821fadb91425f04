"""The controller as a Serve deployment of its own: it may die at any time, serving goes on, and its next life begins
with what this one remembered.

Everything blocks here, and runs on one thread of its own; Serve's event loop only hands requests to it.
"""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from typing import Any, TypeVar

from msgspec.structs import asdict

from tenuto.deployments.control.autoscaler import GpuAutoscaler
from tenuto.deployments.control.controller import Controller
from tenuto.deployments.control.interface import AdvisedPlan
from tenuto.deployments.control.live import Live, LiveSystem, OvertakenError, Planner
from tenuto.deployments.control.planner import NoPlanner, PlannerProcess
from tenuto.deployments.control.remembered import ControlMemory, DesiredDeployment, Memory
from tenuto.deployments.control.settings import ControlSettings
from tenuto.deployments.control.version_edits import Edited, Edits, checked, promoted, to_take_back, with_version
from tenuto.deployments.machines.joining_nodes import JoiningNodes
from tenuto.deployments.machines.node_layouts import NodeLayouts
from tenuto.deployments.serve.applications import Applications
from tenuto.deployments.serve.building import import_applications
from tenuto.deployments.serve.deployment import Deployment
from tenuto.deployments.serve.discovery import gateway_status
from tenuto.deployments.serve.history import ClusterStore, History, Store
from tenuto.deployments.wire.status import ControllerState, ControllerStatus, Event, LogLine
from tenuto.documents import parse_document
from tenuto.errors import EnvironmentFaultError, InvalidInputError, refused
from tenuto.placement import Cluster, Plan, Workload
from tenuto.placement.cluster import Gpu, node_of
from tenuto.placement.generation_capacity import carries_alone, generating_problems, options_of, with_lengths
from tenuto.placement.planner.gpu_matching import gpus_of
from tenuto.placement.versions import by_model, split_name
from tenuto.placement.workload import ModelSpec, profile_of
from tenuto.profiles import Profile, Profiles

logger = logging.getLogger("ray.serve")

T = TypeVar("T")
_GROUND, _DECLARED = "control/ground", "control/declared-nodes"
_NOTHING = "nothing is deployed on this cluster. Use `tenuto deploy PLAN`."
_SILENT_S = 60.0  # limit: a thread without a look for so long counts as dead
_RETIRES_S = 20.0  # limit: for the look that is under way
_IDLE_LOOK_S = 10.0  # pace: of looks in mode off while nothing changes


def keep_ground(store: Store, profiles: Profiles, gpus: tuple[Gpu, ...], nodes: Collection[str] = ()) -> None:
    """Store what the controller plans with: profiles, the GPUs that the cluster has or may have, and the ids of the
    nodes whose GPUs these are, or that were left out."""
    ground = {
        "profiles": [profile.model_dump(mode="json", exclude_defaults=True) for profile in profiles],
        "gpus": [gpu.model_dump(mode="json", exclude_none=True) for gpu in gpus],
    }
    store.put(_GROUND, json.dumps(ground).encode())
    store.put(_DECLARED, json.dumps(sorted(nodes)).encode())


def read_ground(store: Store) -> tuple[Profiles, tuple[Gpu, ...]]:
    """Return what `keep_ground` stored; empty when it stored nothing."""
    if (raw := store.get(_GROUND)) is None:
        return Profiles([]), ()
    ground = json.loads(raw)
    profiles = Profiles([parse_document(Profile, data, origin="profiles") for data in ground["profiles"]])
    return profiles, tuple(parse_document(Gpu, data, origin="gpus") for data in ground["gpus"])


def read_declared_nodes(store: Store) -> list[str]:
    """Return the nodes that `keep_ground` stored; none when it stored nothing."""
    raw = store.get(_DECLARED)
    return [] if raw is None else [str(node) for node in json.loads(raw)]


Begun = tuple[Live, Planner]
Begin = Callable[[ControlSettings, Callable[[LogLine], None], Callable[[], None]], Begun | None]


class ControllerReplica:
    """The Serve deployment. `reconfigure` gives it its settings and starts it."""

    def __init__(self, store: Store | None = None, begin: Begin | None = None) -> None:
        """Wait for settings.

        Args:
            store: the controller's memory; default: the cluster's.
            begin: makes the controller over the deployment, which reports its decisions, and its planner, which reports
                answers; None while nothing is deployed or wanted. Default: on the cluster.
        """
        self._store = store or ClusterStore()
        self._begin = begin or begin_on_cluster
        self._settings = ControlSettings()
        self._work: list[tuple[Callable[[Live], Any], Future[Any]]] = []
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._is_over = False
        self._looked_s = time.monotonic()
        self._failure: str | None = None
        self._new_settings = False
        self._thread: threading.Thread | None = None
        self._decisions: Counter[str] = Counter()  # by kind

    # --- Serve's side -------------------------------------------------------------------------------------------------

    async def reconfigure(self, user_config: Mapping[str, Any]) -> None:
        """Take new settings. The controller starts again from memory.

        Raises:
            InvalidInputError: unknown keys or unusable values; nothing was changed.
        """
        self._settings = parse_document(ControlSettings, dict(user_config.get("settings", {})), origin="control")
        self._new_settings = True
        self._wake.set()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="controller", daemon=True)
            self._thread.start()

    async def check_health(self) -> None:
        """Raise when the controller no longer looks; Serve then replaces this process."""
        if self._failure is not None:
            raise EnvironmentFaultError(self._failure)
        if time.monotonic() - self._looked_s > _SILENT_S:
            raise EnvironmentFaultError(f"the controller has not looked for {_SILENT_S:g} s")

    def __del__(self) -> None:
        """End the thread when Serve calls; the next process goes on with a change under way."""
        self._is_over = True
        self._wake.set()

    async def retire(self) -> None:
        """Stop looking. Called before the applications are removed: in the middle of a change the controller would
        bring them back, itself among them. When it is not removed after all, Serve finds it silent and starts it again.
        """
        self._is_over = True
        self._wake.set()
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join, _RETIRES_S)

    # --- the operator's side ------------------------------------------------------------------------------------------

    async def pause(self, paused: bool) -> ControllerState:
        """Change nothing from now on (True), or change again (False); return the state."""

        def change(live: Live) -> ControllerState:
            live.controller.pause(paused=paused)
            return live.state()

        return await self._do(change)

    async def state(self) -> ControllerState:
        """Return mode, change under way, measured and planned rates."""
        return await self._do(lambda live: live.state())

    async def log(self, limit: int) -> list[LogLine]:
        """Return the newest entries of the log, oldest first."""
        return await self._do(lambda _live: ControlMemory(self._store).log()[-limit:])

    async def shown(self, limit: int = 30) -> ControllerStatus:  # default: lines of the log
        """Return what operators are shown: the state, the number of decisions of this process by kind, and the newest
        entries of the log, newest first, as events of the status."""

        def look(live: Live) -> ControllerStatus:
            newest = reversed(ControlMemory(self._store).log()[-limit:])
            log = [Event(line.at_s, line.kind, line.text) for line in newest]
            return ControllerStatus(**asdict(live.state()), decisions=dict(self._decisions), log=log)

        return await self._do(look)

    async def advice(self) -> AdvisedPlan:
        """Return the advised plan; raise `EnvironmentFaultError` when there is none."""
        if (advice := await self._do(lambda live: live.controller.advice)) is None:
            raise EnvironmentFaultError("the controller advises no other plan now. See `tenuto control log`.")
        return advice

    async def deploy(self, deployment: Mapping[str, Any], by: str, why: str) -> int:
        """Want another deployment, and go over to it, make before break. Return its number: the lines of the log, and
        the state, say of which number they speak.

        Raises:
            InvalidInputError: it cannot be served, or changes what only a new start can change; nothing was changed.
        """
        wanted = parse_document(Deployment, dict(deployment), origin="deployment")
        return await self._do(lambda live: live.deploy(time.time(), wanted, by, why))

    # Each of the following returns the entries that it changes, by name (None: it is removed), and their number.

    async def set_model(self, entry: Mapping[str, Any], *, add: bool) -> Edited:
        """Add a model to the workload, or replace its entry.

        Raises:
            InvalidInputError: the model exists already (add) or does not (replace), the entry is invalid, or no profile
                says what it costs.
        """
        spec, ground = parse_document(ModelSpec, dict(entry), origin="model"), read_ground(self._store)

        def entries(controller: Controller) -> Edits:
            others = [other for other in controller.workload.models if other.name != spec.name]
            if (len(others) < len(controller.workload.models)) == add:
                rule = "is in the workload already" if add else "is not in the workload"
                cure = "Use `tenuto model update`." if add else "Use `tenuto model add`."
                raise refused("model", spec.name, rule, cure)
            _check_profiled(spec, *ground)
            return {spec.name: checked([*others, spec], controller.workload.applications)[spec.name]}

        return await self._edit(entries)

    async def remove_model(self, name: str) -> Edited:
        """Take a model out of the workload; raise `InvalidInputError` when it is not in it, or is the last one."""

        def change(controller: Controller) -> Edits:
            _check_plans(controller)
            models = {model.name for model in controller.workload.models}
            if name not in models or len(models) == 1:
                rule = "is the last model" if name in models else "is not in the workload"
                raise refused("model", name, rule, "See `tenuto status`; `tenuto delete` ends all.")
            for app in controller.workload.applications:
                if any(app.model_name(stage) == name for stage in app.stages):
                    cure = "Deploy a plan without the application first."
                    raise refused("model", name, f"is asked by the application '{app.name}'", cure)
            versions = by_model(controller.workload.models).get(split_name(name)[0], ())
            if len(versions) > 1:
                to_take_back(controller.workload, *split_name(name))
                controller.withdraw(name, f"{name} is removed")
            else:
                controller.edit({name: None})
            return {name: None}

        return await self._do(lambda live: live.edit(change))

    async def set_version(self, model: str, version: str, terms: Mapping[str, Any], entry: Mapping[str, Any]) -> Edited:
        """Add a version of a model, or change its share of the requests.

        Raises:
            InvalidInputError: see `with_version`; or no profile says what the version costs.
        """
        ground = read_ground(self._store)

        def entries(controller: Controller) -> Edits:
            edits = with_version(controller.workload, model, version, terms, entry)
            for spec in filter(None, edits.values()):
                _check_profiled(spec, *ground)
            return edits

        return await self._edit(entries)

    async def promote(self, model: str, version: str) -> Edited:
        """Let a version take the rest of the requests in place of the present one; raise `InvalidInputError` when it
        cannot."""
        return await self._edit(lambda control: promoted(control.workload, model, version))

    async def take_back(self, model: str, version: str) -> Edited:
        """Send a version no more requests and end it; raise `InvalidInputError` when it must stay."""

        def change(controller: Controller) -> Edits:
            name = to_take_back(controller.workload, model, version)
            controller.withdraw(name, f"{name} is taken back by an operator")
            return {name: None}

        return await self._do(lambda live: live.edit(change))

    async def workload(self) -> Workload:
        """Return the declared workload."""
        return await self._do(lambda live: live.controller.workload)

    async def _edit(self, make: Callable[[Controller], Edits]) -> Edited:
        """Change entries of the workload; return them and their number."""

        def change(controller: Controller) -> Edits:
            _check_plans(controller)
            edits = make(controller)
            controller.edit(edits)
            return edits

        return await self._do(lambda live: live.edit(change))

    async def _do(self, what: Callable[[Live], T]) -> T:
        future: Future[T] = Future()
        with self._lock:
            if self._failure is not None:
                raise EnvironmentFaultError(self._failure)
            if self._is_over:
                raise EnvironmentFaultError("the controller is being removed")
            self._work.append((what, future))
        self._wake.set()
        async with asyncio.timeout(30.0):  # limit: for a command to be carried out
            return await asyncio.wrap_future(future)

    def _count(self, entry: LogLine) -> None:
        self._decisions[entry.kind] += 1

    # --- the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        live: Live | None = None
        planner: Planner | None = None
        try:
            while not self._is_over:
                if live is None or self._new_settings:
                    self._new_settings = False
                    if planner is not None:
                        planner.close()
                        planner = None
                    self._looked_s = time.monotonic()
                    if (begun := self._begin(self._settings, self._count, self._wake.set)) is None:
                        self._perform(None)
                        self._wait(self._settings.look_s)
                        continue
                    live, planner = begun
                self._looked_s = time.monotonic()
                try:
                    live.step(time.time())
                except OvertakenError as error:
                    logger.warning("the controller begins again: %s", error)
                    self._new_settings = True  # start again, over what runs
                    continue
                self._perform(live)
                self._wait(_IDLE_LOOK_S if live.is_idle else self._settings.look_s)
        except Exception as error:
            logger.exception("the controller has failed")
            failure = f"the controller has failed: {type(error).__name__}: {error}"
            with self._lock:
                self._failure = failure
                work, self._work = self._work, []
            for future in (future for _, future in work if future.set_running_or_notify_cancel()):
                future.set_exception(EnvironmentFaultError(failure))
        finally:
            if planner is not None:
                planner.close()

    def _wait(self, seconds: float) -> None:
        """Wait for the next look, or until somebody asks."""
        self._wake.wait(seconds)
        self._wake.clear()

    def _perform(self, live: Live | None) -> None:
        with self._lock:
            if self._new_settings:
                return  # whoever asked after them is answered by the controller that has them
            work, self._work = self._work, []
        for what, future in work:
            if not future.set_running_or_notify_cancel():
                continue  # whoever asked has given up, and was told that nothing is done
            try:
                if live is None:
                    raise EnvironmentFaultError(_NOTHING)
                result = what(live)
                live.carry_out(time.time())  # answer only after storing it
                future.set_result(result)
            except Exception as error:
                future.set_exception(error)


def begin_on_cluster(
    settings: ControlSettings, tell: Callable[[LogLine], None], wake: Callable[[], None]
) -> Begun | None:
    """Return the controller over what is deployed and wanted, with its memory; None while nothing is. `tell` receives
    its decisions; `wake` is called when a plan has come."""
    store = ClusterStore()
    history, stored = History(store), ControlMemory(store)
    before, deployed = history.latest(), Applications().deployed()
    running = None if deployed is None else history.running(deployed)
    if (begun := begun_from(history, stored, running, is_found=history.latest() != before)) is None:
        return None
    deployment, memory = begun
    import_applications(deployment.config())
    profiles, gpus = read_ground(store)
    known = {(gpu.id, gpu.type): gpu for gpu in (*gpus_of(deployment.plan, memory.plan), *gpus)}
    joining = JoiningNodes(
        {} if settings.mode == "off" else {kind: bound.labels for kind, bound in settings.gpus.items()},
        read_declared_nodes(store),
        cut=[kind for kind, bound in settings.gpus.items() if bound.mig == "managed"],
        emulated=deployment.executor == "emulated",
        needs_mps=memory.plan.mps == "required",
    )
    system = LiveSystem(
        deployment.with_plan(memory.plan), Applications(), gateway_status, tuple(known.values()), NodeLayouts(), joining
    )
    planner: Planner = NoPlanner()
    if settings.mode != "off":
        planner = PlannerProcess(profiles, settings.change.plan_timeout_s, on_answer=wake)
    live = Live(
        Controller(settings, memory),
        system,
        planner,
        history,
        by="the controller",
        memory=stored,
        number=memory.number,
        want_gpus=GpuAutoscaler(settings.gpus).ask_for,
        tell=tell,
    )
    return live, planner


def begun_from(
    history: History, stored: ControlMemory, running: Deployment | None, *, is_found: bool = False
) -> tuple[Deployment, Memory] | None:
    """Return what the controller begins from: the deployment whose settings are in force, and its memory. None when
    nothing is deployed or desired.

    Args:
        history: of the deployment.
        stored: what an earlier process left.
        running: what is deployed; None: nothing.
        is_found: whether `serve deploy` brought it, and nobody knew.
    """
    version, desired, memory = history.latest(), stored.desired(), stored.read()
    is_first = desired is not None and desired.is_first and memory is None
    is_known = memory is not None and (
        memory.change is not None or running is None or memory.plan.gpulets == running.plan.gpulets
    )
    if running is not None and not is_first and (is_found or not is_known):
        # Deployed without this controller, whose memory speaks of another plan.
        number = 1 if desired is None else desired.number + 1
        memory = Memory(running.plan, running.workload or running.plan.workload, number=number)
        stored.write(memory)
        stored.write_desired(
            DesiredDeployment(number, running, "serve deploy", "found running", history.latest_number())
        )
        return running, memory
    if desired is None:
        return None if running is None or memory is None else (running, memory)
    if version is not None and version.number > desired.after:
        deployment = version.deployment  # it has been reached
    elif memory is not None and memory.number >= desired.number:
        deployment = desired.deployment  # the change to it is under way
    elif desired.is_first or version is None:
        deployment = nothing_of(desired.deployment)
    else:
        deployment = version.deployment  # it has not begun
    return deployment, memory or Memory(deployment.plan, deployment.workload or deployment.plan.workload)


def nothing_of(deployment: Deployment) -> Deployment:
    """Return the deployment with an empty plan: what runs before it is brought up."""
    return deployment.model_copy(update={"plan": Plan(policy=deployment.plan.policy)})


def _check_plans(controller: Controller) -> None:
    """Raise `EnvironmentFaultError` when the controller makes no plans, so that no model would find a place."""
    if controller.mode == "off":
        raise EnvironmentFaultError("the controller makes no plans (mode off). Deploy with --control control.yaml.")


def _check_profiled(spec: ModelSpec, profiles: Profiles, gpus: tuple[Gpu, ...]) -> None:
    """Raise `InvalidInputError` when no present GPU has a profile under which a lone request is in time. No plan could
    then hold this model, nor be made for the others."""
    spec, faults = with_lengths(spec), []
    for gpu in {gpu.type: gpu for gpu in gpus}.values():
        try:
            rule = _why_late(spec, gpu, profiles, sum(node_of(other.id) == node_of(gpu.id) for other in gpus))
        except InvalidInputError as error:
            faults.append(error)
            continue
        if rule is None:
            return
        path, given = ("slo_ms", spec.slo_ms) if spec.slo is None else ("slo", spec.slo.model_dump())
        faults.append(refused(f"model: {path}", given, rule, "Allow more time."))
    if faults:
        raise faults[0]


def _why_late(spec: ModelSpec, gpu: Gpu, profiles: Profiles, together: int) -> str | None:
    """Return why a lone request is late on a GPU, or on up to so many; None when it is not.

    Raises:
        InvalidInputError: there is no profile, or it does not say what the model takes.
    """
    profile = profile_of(spec, gpu.type, profiles)
    if spec.generates is None:
        alone_ms = profile.latency_ms(1)
        return None if alone_ms <= spec.slo_ms else f"a request alone takes {alone_ms:.1f} ms on a whole {gpu.type}"
    problems = generating_problems([spec], Cluster.of([gpu]), profiles)
    if problems:
        raise InvalidInputError(problems)
    fits = options_of(spec, gpu, profiles, carries_alone, together)
    return None if fits else f"a request alone is late, or has no memory, on a whole {gpu.type}"


def build(args: dict[str, Any]) -> Any:
    """Return the Serve application of the controller (`import_path` in the Serve config)."""
    from ray import serve

    del args
    return serve.deployment(name="control")(ControllerReplica).bind()
