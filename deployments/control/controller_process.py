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
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar

from msgspec.structs import asdict

from tenuto.deployments.control.controller import Controller
from tenuto.deployments.control.fit import gpus_of
from tenuto.deployments.control.interface import AdvisedPlan
from tenuto.deployments.control.live import ControlMemory, Live, LiveSystem, OvertakenError, Planner
from tenuto.deployments.control.planner import PlannerProcess
from tenuto.deployments.control.remembered import Memory
from tenuto.deployments.control.settings import ControlSettings
from tenuto.deployments.control.version_edits import checked, promoted, to_take_back, with_version
from tenuto.deployments.machines.node_layouts import NodeLayouts
from tenuto.deployments.serve.applications import Applications
from tenuto.deployments.serve.building import import_applications
from tenuto.deployments.serve.deployment import Deployment
from tenuto.deployments.serve.discovery import gateway_status
from tenuto.deployments.serve.history import ClusterStore, History, Store
from tenuto.deployments.wire.status import ControllerState, ControllerStatus, Event, LogLine
from tenuto.documents import parse_document
from tenuto.errors import EnvironmentFaultError, InvalidInputError, refused
from tenuto.placement.cluster import Gpu
from tenuto.placement.versions import by_model, split_name
from tenuto.placement.workload import ModelSpec, profile_of
from tenuto.profiles import Profile, Profiles

logger = logging.getLogger("ray.serve")

T = TypeVar("T")
_GROUND = "control/ground"
_SILENT_S = 60.0  # limit: without a look the thread is taken for dead
_RETIRES_S = 20.0  # limit: for the look that is under way


def keep_ground(store: Store, profiles: Profiles, gpus: tuple[Gpu, ...]) -> None:
    """Keep what the controller plans with: profiles, and the GPUs that the cluster has or may have."""
    ground = {
        "profiles": [profile.model_dump(mode="json", exclude_defaults=True) for profile in profiles],
        "gpus": [gpu.model_dump(mode="json", exclude_none=True) for gpu in gpus],
    }
    store.put(_GROUND, json.dumps(ground).encode())


def read_ground(store: Store) -> tuple[Profiles, tuple[Gpu, ...]]:
    """Return what `keep_ground` kept; empty where it kept nothing."""
    raw = store.get(_GROUND)
    if raw is None:
        return Profiles([]), ()
    ground = json.loads(raw)
    profiles = Profiles([parse_document(Profile, data, origin="profiles") for data in ground["profiles"]])
    return profiles, tuple(parse_document(Gpu, data, origin="gpus") for data in ground["gpus"])


class ClosablePlanner(Planner, Protocol):
    """A planner that ends with the controller."""

    def close(self) -> None:
        """End it."""


Begun = tuple[Live, ClosablePlanner]
Begin = Callable[[ControlSettings, Callable[[LogLine], None], Callable[[], None]], Begun]


class ControllerReplica:
    """The Serve deployment. `reconfigure` gives it its settings, and begins."""

    def __init__(self, store: Store | None = None, begin: Begin | None = None) -> None:
        """Wait for settings.

        Args:
            store: where it remembers; default: the cluster's.
            begin: returns the controller over what is deployed, which tells its decisions, and its planner, which says
                when it has an answer; default: on the cluster.
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
        """Take new settings; the controller begins anew with what it remembers.

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
        """Raise when no looks are taken any more; Serve then replaces this process."""
        if self._failure is not None:
            raise EnvironmentFaultError(self._failure)
        if time.monotonic() - self._looked_s > _SILENT_S:
            raise EnvironmentFaultError(f"the controller has not looked for {_SILENT_S:g} s")

    def __del__(self) -> None:
        """End the thread, at Serve's call; a change under way goes on in the next life."""
        self._is_over = True
        self._wake.set()

    async def retire(self) -> None:
        """Look no more. Called before the applications are removed: a controller in the middle of a change would bring
        them back, itself among them. If it is not removed after all, Serve finds it silent and begins a new one."""
        self._is_over = True
        self._wake.set()
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join, _RETIRES_S)

    # --- the operator's side ------------------------------------------------------------------------------------------

    async def pause(self, paused: bool) -> ControllerState:
        """Change nothing from now on, or change again; return the state."""

        def change(live: Live) -> ControllerState:
            live.controller.pause(paused=paused)
            return live.state()

        return await self._do(change)

    async def state(self) -> ControllerState:
        """Return mode, what is under way, measured and planned rates."""
        return await self._do(lambda live: live.state())

    async def log(self, limit: int) -> list[LogLine]:
        """Return the newest entries of the log, oldest first."""
        return await self._do(lambda _live: ControlMemory(self._store).log()[-limit:])

    async def shown(self, limit: int = 30) -> ControllerStatus:
        """Return what operators are shown: the state, how often what was decided in this life, and the newest entries
        of the log, newest first, in the form of the status' events."""

        def look(live: Live) -> ControllerStatus:
            newest = reversed(ControlMemory(self._store).log()[-limit:])
            log = [Event(line.at_s, line.kind, line.text) for line in newest]
            return ControllerStatus(**asdict(live.state()), decisions=dict(self._decisions), log=log)

        return await self._do(look)

    async def advice(self) -> AdvisedPlan | None:
        """Return the plan that it advises; None where what runs does."""
        return await self._do(lambda live: live.controller.advice)

    async def deploy(self, deployment: Mapping[str, Any], by: str, why: str) -> None:
        """Go over to another deployment, make before break; the log says how it goes."""
        wanted = parse_document(Deployment, dict(deployment), origin="deployment")
        await self._do(lambda live: live.deploy(time.time(), wanted, by, why))

    async def set_model(self, entry: Mapping[str, Any], *, add: bool) -> None:
        """Add a model to the workload, or replace its entry.

        Raises:
            InvalidInputError: it is there already, or not at all, or the entry is none, or nothing says what it costs.
        """
        spec = parse_document(ModelSpec, dict(entry), origin="model")
        _check_profiled(spec, *read_ground(self._store))

        def change(live: Live) -> None:
            if (spec.name in {model.name for model in live.controller.workload.models}) == add:
                rule = "is in the workload already" if add else "is not in the workload"
                cure = "Use `tenuto model update`." if add else "Use `tenuto model add`."
                raise refused("model", spec.name, rule, cure)
            others = [other for other in live.controller.workload.models if other.name != spec.name]
            live.controller.edit({spec.name: checked([*others, spec])[spec.name]})

        await self._do(change)

    async def remove_model(self, name: str) -> None:
        """Take a model out of the workload; raises `InvalidInputError` where it is not in it, or is the last."""

        def change(live: Live) -> None:
            models = {model.name for model in live.controller.workload.models}
            if name not in models or len(models) == 1:
                rule = "is the last model" if name in models else "is not in the workload"
                raise refused("model", name, rule, "See `tenuto status`; `tenuto delete` ends all.")
            versions = by_model(live.controller.workload.models).get(split_name(name)[0], ())
            if len(versions) > 1:
                to_take_back(live.controller.workload, *split_name(name))
                live.controller.withdraw(name, f"{name} is removed")
            else:
                live.controller.edit({name: None})

        await self._do(change)

    async def set_version(
        self, model: str, version: str, terms: Mapping[str, Any], entry: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Bring a version of a model, or change its part of the requests; return its entry.

        Raises:
            InvalidInputError: see `with_version`; or nothing says what it costs.
        """
        ground = read_ground(self._store)

        def change(live: Live) -> dict[str, Any]:
            controller = live.controller
            edits = with_version(controller.workload, controller.rates.mean_rps, model, version, terms, entry)
            ((_, spec),) = edits.items()
            assert spec is not None
            _check_profiled(spec, *ground)
            controller.edit(edits)
            return spec.model_dump(mode="json", exclude_defaults=True)

        return await self._do(change)

    async def promote(self, model: str, version: str) -> None:
        """Let a version take the rest, in place of the one that does; raises `InvalidInputError` where it cannot."""

        def change(live: Live) -> None:
            controller = live.controller
            controller.edit(promoted(controller.workload, controller.rates.mean_rps, model, version))

        await self._do(change)

    async def take_back(self, model: str, version: str) -> None:
        """Send a version nothing from now on, and end it; raises `InvalidInputError` where it cannot go."""

        def change(live: Live) -> None:
            name = to_take_back(live.controller.workload, model, version)
            live.controller.withdraw(name, f"{name} is taken back by an operator")

        await self._do(change)

    async def models(self) -> list[dict[str, Any]]:
        """Return the entries of the workload."""
        return await self._do(
            lambda live: [
                spec.model_dump(mode="json", exclude_defaults=True) for spec in live.controller.workload.models
            ]
        )

    async def _do(self, what: Callable[[Live], T]) -> T:
        future: Future[T] = Future()
        with self._lock:
            if self._failure is not None:
                raise EnvironmentFaultError(self._failure)
            if self._is_over:
                raise EnvironmentFaultError("the controller is being removed")
            self._work.append((what, future))
        self._wake.set()
        async with asyncio.timeout(30.0):
            return await asyncio.wrap_future(future)

    def _count(self, entry: LogLine) -> None:
        self._decisions[entry.kind] += 1

    # --- the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        live: Live | None = None
        planner: ClosablePlanner | None = None
        try:
            while not self._is_over:
                if live is None or self._new_settings:
                    self._new_settings = False
                    if planner is not None:
                        planner.close()
                    live, planner = self._begin(self._settings, self._count, self._wake.set)
                self._looked_s = time.monotonic()
                try:
                    live.step(time.time())
                except OvertakenError:
                    self._new_settings = True  # begin anew, over what runs
                    continue
                self._perform(live)
                self._wake.wait(self._settings.look_s)
                self._wake.clear()
        except Exception as error:
            logger.exception("the controller has failed")
            failure = f"the controller has failed: {type(error).__name__}: {error}"
            with self._lock:
                self._failure = failure
                work, self._work = self._work, []
            for _, future in work:
                future.set_exception(EnvironmentFaultError(failure))
        finally:
            if planner is not None:
                planner.close()

    def _perform(self, live: Live) -> None:
        with self._lock:
            work, self._work = self._work, []
        for what, future in work:
            try:
                result = what(live)
                live.carry_out(time.time())  # an answer means that it is remembered
                future.set_result(result)
            except Exception as error:
                future.set_exception(error)


def begin_on_cluster(settings: ControlSettings, tell: Callable[[LogLine], None], wake: Callable[[], None]) -> Begun:
    """Return the controller over what is deployed, with what was remembered of it; `tell` is told its decisions, `wake`
    called when there is a plan to look at."""
    store = ClusterStore()
    history, kept = History(store), ControlMemory(store)
    before, found = history.latest(), Applications().deployed()
    if found is not None:
        history.running(found)
    version = history.latest()
    if version is None:
        raise EnvironmentFaultError("nothing is deployed. Use `tenuto deploy PLAN`.")
    profiles, gpus = read_ground(store)
    plan, is_overtaken = version.deployment.plan, version != before
    memory = kept.read()
    if memory is None or is_overtaken or (memory.change is None and memory.plan.gpulets != plan.gpulets):
        memory = Memory(plan, version.deployment.workload or plan.workload)
    deployment = version.deployment.with_plan(memory.plan)
    import_applications(deployment.config())
    known = {(gpu.id, gpu.type): gpu for gpu in (*gpus_of(plan, memory.plan), *gpus)}
    system = LiveSystem(deployment, Applications(), gateway_status, tuple(known.values()), NodeLayouts())
    planner = PlannerProcess(profiles, settings.change.plan_timeout_s, on_answer=wake)
    controller = Controller(settings, memory)
    live = Live(
        controller,
        system,
        planner,
        history,
        by="the controller",
        memory=kept,
        epoch=settings.epoch,
        want_gpus=want_gpus,
        tell=tell,
    )
    return live, planner


def _check_profiled(spec: ModelSpec, profiles: Profiles, gpus: tuple[Gpu, ...]) -> None:
    """Raise `InvalidInputError` where no GPU there is has a profile of a model with which a request alone is in time:
    no plan could have it, and so none the others either."""
    faults = []
    for gpu_type in sorted({gpu.type for gpu in gpus}):
        try:
            alone_ms = profile_of(spec, gpu_type, profiles).latency_ms(1)
        except InvalidInputError as error:
            faults.append(error)
            continue
        if alone_ms <= spec.slo_ms:
            return
        rule = f"a request alone takes {alone_ms:.1f} ms on a whole {gpu_type}"
        faults.append(refused("model: slo_ms", spec.slo_ms, rule, "Allow more time."))
    if faults:
        raise faults[0]


def want_gpus(by_type: Mapping[str, int]) -> None:
    """Ask Ray's autoscaler for so many GPUs; on a cluster without one that changes nothing."""
    from ray.autoscaler.sdk import request_resources

    request_resources(bundles=[{"GPU": 1} for _ in range(sum(by_type.values()))])


def build(args: dict[str, Any]) -> Any:
    """Return the Serve application of the controller; named as `import_path` in the generated Serve config."""
    from ray import serve

    del args
    return serve.deployment(name="control")(ControllerReplica).bind()
