"""Connects the controller to a running deployment. It reads the gateways and Serve, turns decisions into Serve's
configuration, and remembers both.

The controller's own Serve deployment decides when to look (`controller_process`).
"""

from __future__ import annotations

import logging
import math
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from msgspec import structs

from tenuto.deployments.control.controller import Controller
from tenuto.deployments.control.interface import Apply, Decision, MakePlan, ModelSeen, Observation, WantGpus
from tenuto.deployments.control.journal import unused_node
from tenuto.deployments.control.mig_reconfiguration import LayoutSide, MigReconfiguration
from tenuto.deployments.control.remembered import ControlMemory, DesiredDeployment
from tenuto.deployments.control.version_edits import Edited, Edits
from tenuto.deployments.serve.config import (
    DISPATCHER_PREFIX,
    ENTRY_APPLICATION,
    GPULET_PREFIX,
    ServeApplication,
    ServeConfig,
    application_name,
)
from tenuto.deployments.serve.deployment import UNCHANGEABLE, Deployment
from tenuto.deployments.serve.history import History
from tenuto.deployments.serve.states import ApplicationState, gpulets_of
from tenuto.deployments.serve.user_config import GpuletConfig
from tenuto.deployments.wire.status import ControllerState, DispatchingStatus, LogLine, ModelStatus
from tenuto.errors import EnvironmentFaultError, InvalidInputError, Problem, raise_if_any
from tenuto.placement import Gpulet, Plan
from tenuto.placement.cluster import Gpu, Placed
from tenuto.placement.planner import PlanRequest, Proposal
from tenuto.placement.planner.gpu_matching import gpus_of, renamed

logger = logging.getLogger("ray.serve")

_DRAIN_S = 2.0  # limit: from a gpu-let's last use by gateways to its end; the longest batches are shorter
_LONGEST_DRAIN_S = 60.0  # limit: when gateways never say that
_MIB = 1e-6  # derived: sums of floats differ by rounding
_PLANS_UNDER_WAY = 4  # limit: plans that some gateway may still follow, as Serve tells each by itself


class ServeSide(Protocol):
    """What is asked of Serve; `Applications` on a real cluster."""

    def apply(self, config: ServeConfig) -> None:
        """Run exactly these applications."""

    def states(self) -> dict[str, ApplicationState]:
        """Return every application by name."""

    def node_names(self) -> frozenset[str]:
        """Return the names of the living nodes: addresses, and labels as `key=value`."""

    def leaving_nodes(self) -> dict[str, float]:
        """Return the names of living nodes that end soon, with the time, 0 when it is not known."""


class JoiningSide(Protocol):
    """Finds the GPUs of nodes that join; `JoiningNodes` on a real cluster. No call waits."""

    unused: dict[str, str]

    def find_gpus(self, present: Iterable[Gpu]) -> tuple[Gpu, ...]:
        """Return the GPUs of nodes that joined, beside those that are present anyway."""


class Planner(Protocol):
    """Makes plans aside."""

    def ask(self, number: int, request: PlanRequest) -> None:
        """Begin to answer; drop the previous question."""

    def answers(self) -> list[tuple[int, Proposal | str]]:
        """Return the answers since the last call, with the numbers of their questions."""

    def close(self) -> None:
        """End with the controller."""


_GpuletApplication = ServeApplication[GpuletConfig]


class OvertakenError(EnvironmentFaultError):
    """Somebody else deployed another plan, which counts."""


@dataclass
class _Draining:
    """What a gpu-let's application holds beyond the plan: everything when it left, or programs that it should unload.

    `free_since_s`: when the gateways last stopped using it.
    """

    application: _GpuletApplication
    since_s: float
    free_since_s: float | None = None


@dataclass
class _Migration:
    """Models that change their sub-cluster. Their dispatchers before and after both hold them; `is_routed`: gateways
    ask the new ones."""

    before: dict[str, int]
    after: dict[str, int]
    since_s: float
    is_routed: bool = False


class LiveSystem:
    """A deployment as Serve and its gateways have it.

    A plan is applied in up to three steps, so that a successor is ready before anything that serves is taken away.
    First, running gpu-lets load what they shall hold in addition. Then the gateways follow the plan. Last, gpu-lets
    unload what the plan lacks, and those that left end. Gpu-lets in MIG instances that do not exist yet start after
    that: once the gpu-lets in the way have ended, the GPU is cut.
    """

    def __init__(
        self,
        deployment: Deployment,
        serve: ServeSide,
        read_status: Callable[[], DispatchingStatus],
        gpus: tuple[Gpu, ...],
        layouts: LayoutSide | None = None,
        joining: JoiningSide | None = None,
    ) -> None:
        """Take over what runs.

        Args:
            deployment: the one applied last.
            serve: the cluster.
            read_status: returns the gateways' status; raises `EnvironmentFaultError` when none answers.
            gpus: all GPUs that the cluster should have.
            layouts: cuts GPUs; None: no GPU is bound to hardware.
            joining: finds GPUs of other nodes; None: there are none.
        """
        self.deployment = deployment
        self._joining = joining
        self._serve = serve
        self._read_status = read_status
        self._gpus = gpus
        self._gpulets = _gpulets_of(deployment.config())  # the plan's applications, by name
        # Of every gpu-let so far.
        self._places = {name: app.spec.gpu for name, app in self._gpulets.items() if app.spec}
        self._plan = deployment.plan
        self._known = {application_name(gpulet.id): gpulet for gpulet in self._plan.gpulets}  # every gpu-let so far
        self._short: frozenset[str] = frozenset()  # applications that wait until there is memory for them
        self._routed = self._plan  # the plan that gateways follow
        self._draining: dict[str, _Draining] = {}
        self._standby: dict[str, _GpuletApplication] = {}  # applications of idle processes, by gpu-let
        self._waiting: tuple[Gpulet, ...] = ()  # idle gpu-lets
        self._there: tuple[Gpu, ...] = ()  # GPUs present at the last look
        self._ready: frozenset[str] = frozenset()  # gpu-lets ready at the last look
        self._counted: dict[str, tuple[float, tuple[int, ...]]] = {}  # time, counts
        self._migration: _Migration | None = None
        self.strays: frozenset[str] = frozenset()  # applications of gpu-lets in no plan, at the last look
        states = serve.states()
        self._runs = ENTRY_APPLICATION in states
        self._told: deque[dict[str, Any]] = deque(maxlen=_PLANS_UNDER_WAY)  # plans that gateways may follow
        self._sent: dict[str, Any] | None = None  # the last of them; None: of an earlier process
        self._followed: dict[str, Any] | None = None  # what the gateways followed at the last look
        running = [gpulet for gpulet in self._plan.gpulets if application_name(gpulet.id) in states]
        held = {gpu for gpulet in running for gpu in gpulet.gpus}
        self._cut = MigReconfiguration(layouts, [gpu for gpu in self._plan.gpus if gpu.id in held])
        self._cut.need(self._plan, emulated=deployment.executor == "emulated")  # a change may be under way

    def apply(
        self, plan: Plan, now_s: float, standby: Sequence[Gpulet] = (), *, desired: Deployment | None = None
    ) -> None:
        """Serve this plan, with idle processes beside it, and with the settings of `desired` when given.

        Raises:
            InvalidInputError: the plan cannot be served; nothing was changed.
        """
        base = desired or self.deployment
        if desired is None and self._migration is not None:
            base = base.model_copy(update={"partition": self._migration.after})
        deployment = base.with_plan(plan)
        gpulets = _gpulets_of(deployment.config())
        idle = _idle(deployment, plan, standby)
        if (migration := self._moved(deployment.partition, now_s)) is not None:
            deployment = deployment.model_copy(update={"partition": migration.before})
        waited = {application_name(name): app for name, app in self._standby.items() if name not in idle}
        self._standby, self._waiting = idle, tuple(standby)
        before = waited | self._started() | {name: leaving.application for name, leaving in self._draining.items()}
        draining, grows = {}, False
        for name, present in before.items():
            if name not in gpulets:
                draining[name] = self._draining.get(name) or _Draining(present, now_s)
                continue
            more = _with_programs_of(gpulets[name], present)
            grows = grows or _grows(more, present)
            if more != gpulets[name]:
                draining[name] = _Draining(more, now_s)
        self.deployment, self._gpulets, self._draining, self._plan = deployment, gpulets, draining, plan
        self._migration = migration
        if any(gpu.mig == "managed" for gpu in plan.gpus):
            self._know(plan)
        if not grows:
            self._routed = plan
        self._cut.need(plan, emulated=deployment.executor == "emulated")
        states = self._serve.states()
        self._cut.go_on(self._leaving(states))
        self._known |= {application_name(gpulet.id): gpulet for gpulet in (*plan.gpulets, *standby)}
        self._short = self._short_of_memory(states)
        self._send()

    def _started(self) -> dict[str, _GpuletApplication]:
        """Return the plan's applications, without those that wait for their GPU to be cut, or for memory."""
        waiting = self._cut.waiting
        return {
            name: application
            for name, application in self._gpulets.items()
            if name not in self._short and (application.spec is None or application.spec.gpu.id not in waiting)
        }

    def _short_of_memory(self, states: Mapping[str, ApplicationState]) -> frozenset[str]:
        """Return the applications whose GPU does not hold them beside the gpu-lets that leave it. Those may still write
        for as long as `UserConfig.ends_s`. Nobody knows where gpu-lets are that somebody else left behind, so all new
        ones wait until those have ended."""
        if any(name.startswith(GPULET_PREFIX) and name not in self._known for name in states):
            return frozenset(self._gpulets.keys() - states.keys())
        sizes_mib = {gpu.id: gpu.memory_mib for gpu in self._gpus}
        held_mib: defaultdict[str, float] = defaultdict(float)
        for name in states.keys() | self._gpulets.keys():
            if name in self._known:
                held_mib[self._known[name].gpu] += self._known[name].needs_mib
        leaving = {self._known[name].gpu for name in states.keys() - self._gpulets.keys() if name in self._known}
        crowded = {gpu for gpu in leaving if held_mib[gpu] > sizes_mib.get(gpu, math.inf) + _MIB}
        return frozenset(name for name in self._gpulets.keys() - states.keys() if self._known[name].gpu in crowded)

    def _leaving(self, states: Mapping[str, ApplicationState]) -> list[Placed]:
        """Return where gpu-lets still are that are not in the plan."""
        started = self._started()
        return [gpu for name, gpu in self._places.items() if name in states and name not in started]

    def _moved(self, after: Mapping[str, int] | None, now_s: float) -> _Migration | None:
        """Return the migration to another partition; None when all models stay. New models start where they belong."""
        before = self.deployment.partition
        if before is None or after is None or all(before.get(name, place) == place for name, place in after.items()):
            return None
        return _Migration({**after, **before}, dict(after), now_s)

    def check(self, deployment: Deployment, plan: Plan) -> None:
        """Raise `InvalidInputError` when a plan cannot be served with the settings of another deployment, or these
        change what only a new start can change."""
        deployment.config(plan)
        raise_if_any(_unchangeable(self.deployment, deployment))

    def settle(self, desired: Deployment, plan: Plan, now_s: float) -> None:
        """Serve the present plan with the settings of another deployment, on the way to its plan."""
        self._know(plan)
        if desired.with_plan(self._plan) != self.deployment:
            self.apply(self._plan, now_s, self._waiting, desired=desired)

    def _know(self, plan: Plan) -> None:
        """Add a plan's GPUs to the cluster's: the MIG instances that it makes are new."""
        self._gpus = tuple({(gpu.id, gpu.type): gpu for gpu in (*gpus_of(plan), *self._gpus)}.values())

    @property
    def cutting(self) -> list[str]:
        """Planned MIG instances and whole GPUs that are not cut yet."""
        return sorted(self._cut.waiting)

    def _send(self) -> None:
        """Tell Serve what shall run now."""
        migration = self._migration if self._routed is self._plan else None
        also = None if migration is None else migration.before if migration.is_routed else migration.after
        config = self.deployment.config(self._routed, also=also, standby=self._waiting)
        idle = {application_name(name): application for name, application in self._standby.items()}
        gpulets = idle | self._started() | {name: leaving.application for name, leaving in self._draining.items()}
        self._places |= {name: application.spec.gpu for name, application in gpulets.items() if application.spec}
        self._serve.apply(replace(config, gpulets=tuple(gpulets.values())))
        self._runs = True
        self._sent = self._routed.to_data()
        if self._sent in self._told:
            self._told.remove(self._sent)  # told again: it stays the longest
        self._told.append(self._sent)

    def look(self, now_s: float) -> Observation | None:
        """Return what happened since the last look; None while the gateways do not answer.

        Lost GPUs are reported at once even then: the gateway that is asked may be lost with them.

        Raises:
            OvertakenError: gateways follow a plan that was not made here.
        """
        before, self._there = self._there, self.gpus()
        if len(self._there) < len(before):
            present = {gpu.id for gpu in self._there}
            left = frozenset(g.id for g in (*self._plan.gpulets, *self._waiting) if present.issuperset(g.gpus))
            return Observation(models={}, ready=self._ready & left, gpus=self._there, leaving=self._leaving_gpus())
        if not self._runs:  # not yet: it is being brought up
            return Observation(models={}, ready=frozenset(), gpus=self._there)
        try:
            status = self._read_status()
        except EnvironmentFaultError:
            return None
        if status.plan is None:
            return None
        self._followed = status.plan
        if not self._told:
            self._told.append(status.plan)  # of an earlier process
        elif status.plan not in self._told:
            raise OvertakenError("somebody else deployed another plan meanwhile, which runs now. See `tenuto history`.")
        states = self._serve.states()
        ready = _ready(self._plan, status)
        self._go_on(now_s, status, ready, states)
        short, self._short = self._short, self._short_of_memory(states)
        if self._cut.go_on(self._leaving(states)) or short != self._short:
            self._send()
        self._ready = ready | {name for name in self._standby if _is_running(states, name)}
        is_first = not self._counted
        models, seconds = self._ended(status.models)
        return Observation(
            models={} if is_first else models,  # counts before the first look are not this look's
            ready=self._ready,
            gpus=self._there,
            broken=self._broken(states),
            slowdowns={gpulet.id: gpulet.slowdown for gpulet in status.gpulets if gpulet.slowdown},
            seconds=seconds,
            leaving=self._leaving_gpus(),
        )

    def _leaving_gpus(self) -> dict[str, float]:
        """Return the present GPUs whose nodes end soon, with the time."""
        ends_s = self._serve.leaving_nodes()
        names = {gpu.id: gpu.node_key for gpu in self._there} if ends_s else {}
        return {gpu: ends_s[name] for gpu, name in names.items() if name in ends_s}

    def gpus(self) -> tuple[Gpu, ...]:
        """Return the GPUs on living nodes. Of MIG instances that exclude each other, return the plan's; none that was
        cut away."""
        alive = self._serve.node_names() | {""}
        present = [gpu for gpu in self._gpus if gpu.node_key in alive]
        if self._joining is not None:
            joined = [gpu for gpu in self._joining.find_gpus(present) if gpu.label in alive]
            self._gpus = tuple({(gpu.id, gpu.type): gpu for gpu in (*self._gpus, *joined)}.values())
            present = [gpu for gpu in self._gpus if gpu in present or gpu in joined]
        return self._cut.remaining(present, self._plan)

    @property
    def unused_nodes(self) -> dict[str, str]:
        """Why the GPUs of nodes that joined are not used, by node, as of the last look."""
        return {} if self._joining is None else self._joining.unused

    @property
    def is_settled(self) -> bool:
        """Whether the gateways follow the plan, and nothing runs beyond it."""
        is_followed = self._routed is self._plan and self._sent in (None, self._followed)
        return is_followed and not self._draining and self._migration is None and not self._cut.waiting

    def _go_on(
        self, now_s: float, status: DispatchingStatus, ready: frozenset[str], states: Mapping[str, ApplicationState]
    ) -> None:
        """Take the next step of applying the plan, when the step before is complete."""
        if self._routed is not self._plan:
            both = {gpulet.id for gpulet in self._routed.gpulets} & {gpulet.id for gpulet in self._plan.gpulets}
            if not both <= ready:
                return
            self._routed = self._plan
            if self._migration is not None:
                self._migration.since_s = now_s
            self._send()
            return
        self._go_on_migration(now_s, states)
        used = {application_name(gpulet.id) for gpulet in status.gpulets} - self._gpulets.keys()
        gone = []
        for name, leaving in self._draining.items():
            if name in used:
                leaving.free_since_s = None
            elif leaving.free_since_s is None:
                leaving.free_since_s = now_s
            free_s = 0.0 if leaving.free_since_s is None else now_s - leaving.free_since_s
            if free_s >= _DRAIN_S or now_s - leaving.since_s >= _LONGEST_DRAIN_S:
                gone.append(name)
        for name in gone:
            del self._draining[name]
        strays_before, self.strays = self.strays, self._find_strays(states)
        if gone or self.strays & strays_before:
            self._send()

    def _find_strays(self, states: Mapping[str, ApplicationState]) -> frozenset[str]:
        """Return the applications of gpu-lets that an earlier process or another deployment left. While the gateways'
        application is not running, `serve deploy` may be bringing them: then they are none, and the next look finds
        the gateways follow another plan."""
        entry = states.get(ENTRY_APPLICATION)
        if entry is None or not entry.is_running:
            return frozenset()
        idle = {application_name(name) for name in self._standby}
        return gpulets_of(states) - (self._gpulets.keys() | self._draining.keys() | idle)

    def _go_on_migration(self, now_s: float, states: Mapping[str, ApplicationState]) -> None:
        migration = self._migration
        if migration is None or now_s - migration.since_s < _DRAIN_S:
            return
        asking = [
            state for name, state in states.items() if name == ENTRY_APPLICATION or name.startswith(DISPATCHER_PREFIX)
        ]
        is_updated = all(state.is_running for state in asking)
        if not is_updated and now_s - migration.since_s < _LONGEST_DRAIN_S:  # or one waits for a node that is lost
            return
        if migration.is_routed:
            self._migration = None
        else:
            migration.is_routed, migration.since_s = True, now_s
            self.deployment = self.deployment.model_copy(update={"partition": migration.after})
        self._send()

    def _ended(self, models: Mapping[str, ModelStatus]) -> tuple[dict[str, ModelSeen], float | None]:
        """Return how the counts have grown, and in what time by the dispatchers' clocks. Both are unknown of a
        dispatcher that restarted: it counts from 0, perhaps on another machine."""
        models_seen, lengths_s = {}, []
        for name, counts in models.items():
            answered = counts.ok + counts.late
            offline, tokens = counts.offline, (counts.prompt_tokens, counts.generated_tokens)
            came, waiting = (0, 0) if offline is None else (offline.submitted, offline.under_way)
            now = counts.samples, counts.ok, counts.bad, answered, *tokens, came
            at_s, before = self._counted.get(name, (counts.counted_at_s, now))
            if any(new < old for new, old in zip(now, before, strict=True)):
                before = (0,) * len(now)
            elif counts.counted_at_s > at_s:
                lengths_s.append(counts.counted_at_s - at_s)
            self._counted[name] = counts.counted_at_s, now
            grown = ModelSeen(*(new - old for new, old in zip(now, before, strict=True)))
            models_seen[name] = replace(grown, offline=grown.offline + waiting) if waiting else grown
        return models_seen, max(lengths_s, default=None)

    def _broken(self, states: Mapping[str, ApplicationState]) -> dict[str, str]:
        refused = self._cut.refused
        reasons = {g.id: refused[gpu] for g in self._plan.gpulets for gpu in g.gpus if gpu in refused}
        for gpulet in self._plan.gpulets:
            state = states.get(application_name(gpulet.id))
            if state is not None and state.is_broken:
                reasons[gpulet.id] = state.essence.rpartition("\n")[2].strip()
        return reasons


def _unchangeable(running: Deployment, desired: Deployment) -> list[Problem]:
    """Return which settings differ that cannot change while the deployment serves."""
    rules = {
        **{name: f"is {running.setting(name)} now" for name in UNCHANGEABLE},
        "executor": f"would restart every gpu-let, which run with {running.executor}",
        "gateways": f"{max(1, running.gateways)} run: one schedules by itself, several feed dispatchers",
    }
    changed = [name for name in UNCHANGEABLE if desired.setting(name) != running.setting(name) and name != "gateways"]
    changed += ["gateways"] if desired.feeds_dispatchers != running.feeds_dispatchers else []
    cure = "Leave it as it is, or pass --replace, which interrupts serving."
    return [Problem(name, getattr(desired, name), rules[name], cure) for name in changed]


def _gpulets_of(config: ServeConfig) -> dict[str, _GpuletApplication]:
    return {application.name: application for application in config.gpulets}


def _idle(deployment: Deployment, plan: Plan, standby: Sequence[Gpulet]) -> dict[str, _GpuletApplication]:
    """Return the applications of standby gpu-lets, by id."""
    if not standby:
        return {}
    both = plan.model_copy(update={"gpulets": (*plan.gpulets, *standby), "overcommits": True})
    applications = _gpulets_of(deployment.config(both))
    return {gpulet.id: applications[application_name(gpulet.id)] for gpulet in standby}


def _is_running(states: Mapping[str, ApplicationState], gpulet_id: str) -> bool:
    state = states.get(application_name(gpulet_id))
    return state is not None and state.is_running


def _with_programs_of(application: _GpuletApplication, present: _GpuletApplication) -> _GpuletApplication:
    """Return a gpu-let's application with what it holds at present added: programs to unload, and larger batches of
    those it keeps. An application that needs another process, or has limited memory, stays unchanged."""
    if not application.same_processes(present) or application.spec is None or application.spec.memory_mib is not None:
        return application
    config = application.user_config
    programs = {program.name: program for program in config.programs}
    for program in present.user_config.programs:
        held = programs.setdefault(program.name, program)
        if held.members == program.members and program.batch_size > held.batch_size:
            larger = {"batch_size": program.batch_size, "latency": program.latency or held.latency}
            programs[program.name] = held.model_copy(update=larger)
    return replace(application, user_config=config.model_copy(update={"programs": tuple(programs.values())}))


def _ready(plan: Plan, status: DispatchingStatus) -> frozenset[str]:
    """Return the gpu-lets of a plan that are connected and hold what the plan says."""
    up = {gpulet.id: gpulet.models for gpulet in status.gpulets if gpulet.up}
    return frozenset(
        gpulet.id
        for gpulet in plan.gpulets
        if gpulet.id in up and all(up[gpulet.id].get(p.name, 0) >= p.batch_size for p in gpulet.programs)
    )


def _grows(after: _GpuletApplication, before: _GpuletApplication) -> bool:
    """Whether a gpu-let has to load something to become another."""
    held = {program.name: program.batch_size for program in before.user_config.programs}
    return any(program.batch_size > held.get(program.name, 0) for program in after.user_config.programs)


class Live:
    """One controller over one live system."""

    def __init__(
        self,
        controller: Controller,
        system: LiveSystem,
        planner: Planner,
        history: History,
        *,
        by: str,
        memory: ControlMemory | None = None,
        number: int = 0,
        want_gpus: Callable[[Mapping[str, int]], None] = lambda _more: None,
        tell: Callable[[LogLine], None] = lambda _entry: None,
    ) -> None:
        """Connect them.

        Args:
            controller: over the deployed plan.
            system: the deployment.
            planner: makes plans.
            history: records every plan that was reached.
            by: who makes the changes, for the history.
            memory: stores the controller's memory; None: nobody does. When a deployment is desired there with another
                number, the first look begins to go over to it.
            number: of the desired deployment, or of the edits, that were taken up last.
            want_gpus: asks the cluster for so many GPUs more, or fewer, of each type.
            tell: receives every entry of the log.
        """
        self.controller = controller
        self.system = system
        self._planner = planner
        self._history = history
        self._by = by
        self._memory = memory
        self._want_gpus = want_gpus
        self._tell = tell
        self._written_s, self._written = 0.0, controller.workload  # the last memory: when, and its workload
        self._number = self._change_number = number  # newest; of the change under way, of which log and state speak
        desired = None if memory is None else memory.desired()
        self._desired = desired if desired is not None and desired.number > number else None  # not begun yet
        self._has_looked = False
        self._unused_nodes: dict[str, str] = {}  # those of which the log has told
        self._next_by: str | None = None  # who asked for the change under way
        if desired is not None and controller.change is not None and controller.change.why == desired.why:
            self._next_by, self._change_number = desired.by, min(desired.number, number)

    def state(self) -> ControllerState:
        """Return the controller's state, and what its change waits for."""
        system = self.system
        return structs.replace(
            self.controller.state(),
            cutting=system.cutting,
            is_settled=system.is_settled,
            number=self._change_number,
            unused_nodes=dict(system.unused_nodes),
        )

    @property
    def is_idle(self) -> bool:
        """Whether nothing happens before somebody asks for it."""
        is_quiet = self._has_looked and self.system.is_settled and not self.system.strays
        return self.controller.mode == "off" and self.controller.change is None and is_quiet

    def step(self, now_s: float) -> bool:
        """Take one look and carry out the decisions; return whether the gateways answered."""
        seen = self.system.look(now_s)
        self._has_looked = seen is not None
        if seen is not None:
            self.controller.observe(now_s, seen)
            self._go_over(now_s)
        unused = self.system.unused_nodes
        for node, why in unused.items() - self._unused_nodes.items():
            self.controller.note(unused_node(now_s, node, why))
        self._unused_nodes = dict(unused)
        for number, result in self._planner.answers():
            self.controller.planned(now_s, number, result)
        self.carry_out(now_s)
        return seen is not None

    def deploy(self, now_s: float, deployment: Deployment, by: str, why: str) -> int:
        """Want another deployment; go over to it from the next look on that is answered, make before break. Return its
        number. When the deployment has no workload, its plan's is declared.

        Raises:
            InvalidInputError: it cannot be served, or changes the executor; nothing was changed.
        """
        self.system.check(deployment, renamed(deployment.plan, self.controller.plan))
        number = (self._number if self._desired is None else self._desired.number) + 1
        self._desired = DesiredDeployment(number, deployment, by, why, self._history.latest_number())
        if self._memory is not None:
            self._memory.write_desired(self._desired)
        if self._has_looked:
            self._go_over(now_s)
        return number

    def edit(self, make: Callable[[Controller], Edits]) -> Edited:
        """Have `make` change entries of the workload; return them, and the number of the desired deployment with them.
        A change under way goes on first. Raises what `make` raises."""
        entries, number = make(self.controller), self._number + 1
        if self._desired is None:  # else it goes over to that first, which has this number
            self._number = number
        return number, entries

    def _go_over(self, now_s: float) -> None:
        """Begin to change to the desired deployment, if it is a new one."""
        desired, self._desired = self._desired, None
        if desired is None:
            return
        self._number = self._change_number = desired.number
        self._next_by = desired.by
        plan = renamed(desired.deployment.plan, self.controller.plan)
        self.system.settle(desired.deployment, plan, now_s)
        self.controller.deploy(now_s, plan, desired.why, self.system.gpus(), desired.deployment.workload)
        self.carry_out(now_s)

    def carry_out(self, now_s: float) -> None:
        """Carry out the controller's decisions and store its memory."""
        decisions = self.controller.take_decisions()
        for decision in decisions:
            self._do(decision, now_s)
        if self.controller.change is None:
            self._change_number = self._number
        workload = self.controller.workload
        # Pace: rates and lengths that were learned are stored every 10 s.
        if self._memory is not None and (decisions or workload is not self._written or now_s - self._written_s > 10.0):
            self._written_s, self._written = now_s, workload
            self._memory.write(replace(self.controller.memory(), number=self._number))

    def _do(self, decision: Decision, now_s: float) -> None:
        if isinstance(decision, LogLine):
            decision = structs.replace(decision, number=self._change_number)
            logger.info("control: %s: %s", decision.kind, decision.text)
            if self._memory is not None:
                self._memory.add(decision)
            if decision.version is not None and self.controller.plan.models:
                by, self._next_by = self._next_by or self._by, None
                reached = self.system.deployment.model_copy(update={"workload": self.controller.workload})
                self._history.add(reached, by, decision.version)
            self._tell(decision)
        elif isinstance(decision, Apply):
            try:
                self.system.apply(decision.plan, now_s, decision.standby)
            except InvalidInputError as error:
                self.controller.refused(now_s, str(error))
                self.carry_out(now_s)
        elif isinstance(decision, MakePlan):
            self._planner.ask(decision.number, decision.request)
        elif isinstance(decision, WantGpus):
            self._want_gpus(decision.more)
