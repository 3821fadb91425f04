"""The controller in virtual time: the same core over a simulated running system, with incidents."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from heapq import heappop, heappush
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tenuto.batching.core.build import NO_DELAY
from tenuto.batching.core.scheduler import Scheduler
from tenuto.batching.core.system import NetworkDelay, System
from tenuto.batching.virtual.engine import Follows
from tenuto.batching.virtual.offline_backlog import OfflineBacklog
from tenuto.batching.virtual.running import Life, Look, RunningSystem
from tenuto.batching.virtual.virtual_steps import RequestTokens
from tenuto.deployments.control.controller import Controller
from tenuto.deployments.control.interface import Apply, MakePlan, ModelSeen, Observation, WantGpus
from tenuto.deployments.control.journal import Kind
from tenuto.deployments.control.remembered import Memory
from tenuto.deployments.control.settings import ControlSettings
from tenuto.deployments.wire.status import LogLine
from tenuto.errors import InvalidInputError
from tenuto.outcome import Outcome
from tenuto.placement import Plan, Workload
from tenuto.placement.cluster import Cluster, Gpu, node_of
from tenuto.placement.planner import Proposal, propose
from tenuto.placement.planner.change_stages import CUTTING_S, places_to_be
from tenuto.profiles import Profiles

_PLANNING_S = 0.5  # default: until a plan comes
_PROVISION_S = 60.0, 60.0  # default: until an asked GPU is present
_NOTICE_S = 0.5  # default: until a lost GPU is known; live, the next look knows when a node's raylet has died


@dataclass(frozen=True)
class ControlledLoad:
    """The requests of a run in order of arrival, each with its model's position in `names`. `deadlines_ms` and
    `follows` belong to applications (`tenuto.batching.virtual.engine`). `offline`: what waits beside them, until they
    end."""

    names: tuple[str, ...]
    times_ms: NDArray[np.float64]
    model_index: NDArray[np.int32]
    duration_s: float
    deadlines_ms: NDArray[np.float64] | None = None
    follows: Follows | None = None
    tokens: RequestTokens | None = None
    sizes: NDArray[np.int64] | None = None
    offline: OfflineBacklog | None = None


@dataclass(frozen=True)
class Incident:
    """Something that happens at a time. `lose`: GPUs, or nodes with all of theirs, of which the controller has notice
    `notice_s` before. `slow`: from then on, what batches of a model take over their profile."""

    at_s: float
    lose: tuple[str, ...] = ()
    notice_s: float = 0.0
    slow: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Window:
    """Figures of one stretch of the run, by model in the order of `names`."""

    end_s: float
    arrived: NDArray[np.int64]
    ended: NDArray[np.int64]  # columns in the order of OUTCOMES
    share_s: float
    gpu_s: float


@dataclass
class ControlledRun:
    """The results of a run: figures by window, the log, and every applied plan with its time and reason.

    `present_s` says by type for how many seconds GPUs were there, with or without a gpu-let. `applications` counts the
    requests of applications by outcome, end to end, when the caller counts them. `offline` has the figures of offline
    requests, if there were some.
    """

    names: tuple[str, ...]
    windows: list[Window] = field(default_factory=list)
    entries: list[LogLine] = field(default_factory=list)
    plans: list[tuple[float, Plan, str]] = field(default_factory=list)
    present_s: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    applications: Mapping[str, Sequence[int]] = field(default_factory=dict)
    offline: Mapping[str, Any] = field(default_factory=dict)

    def ended(self) -> NDArray[np.int64]:
        """Return requests by model and outcome over the whole run."""
        total: NDArray[np.int64] = np.sum([window.ended for window in self.windows], axis=0)
        return total

    def attainments(self) -> dict[str, float]:
        """Return the part of each model's requests answered in time, for models with any."""
        ended = self.ended()
        return {
            name: float(row[Outcome.OK] / row.sum()) for name, row in zip(self.names, ended, strict=True) if row.sum()
        }

    @property
    def share_s(self) -> float:
        """GPU-seconds by share: what the gpu-lets of all plans held."""
        return sum(window.share_s for window in self.windows)

    @property
    def gpu_s(self) -> float:
        """Seconds during which GPUs held a gpu-let, in total."""
        return sum(window.gpu_s for window in self.windows)

    def count(self, kind: Kind) -> int:
        """Return how many entries of a kind the log has."""
        return sum(entry.kind == kind for entry in self.entries)


class ControlledCluster:
    """A simulated cluster under the controller: it carries out decisions, and shows the controller what a live one
    would."""

    def __init__(
        self,
        load: ControlledLoad,
        workload: Workload,
        plan: Plan,
        gpus: Sequence[Gpu],
        profiles: Profiles,
        settings: ControlSettings,
        make_scheduler: Callable[[System], Scheduler],
        *,
        network: NetworkDelay = NO_DELAY,
        seed: int = 0,
        incidents: Sequence[Incident] = (),
        growth: Mapping[str, Gpu] | None = None,
        provision_s: tuple[float, float] = _PROVISION_S,
    ) -> None:
        """Bring up the first plan.

        Args:
            load: the requests.
            workload: declared at the start.
            plan: deployed and ready at the start.
            gpus: present at the start.
            profiles: for the planner.
            settings: of the controller.
            make_scheduler: builds the scheduler of a plan's system.
            network: delays on the way to gpu-lets and back.
            seed: of the times that processes need.
            incidents: in order of time.
            growth: one GPU of each type that the cluster can grow by.
            provision_s: least and most time until nodes that are asked for are present, drawn for each. How long nodes
                of spot GPUs then live is drawn, too.
        """
        self._duration_s = load.duration_s
        self._profiles, self._settings, self._growth = profiles, settings, growth or {}
        self._provision_s, self._random = provision_s, np.random.default_rng(seed)
        self._leaving: dict[str, float] = {}  # by GPU or node: when it ends
        slo_ms = {spec.name: spec.slo_ms for spec in workload.models}
        self._system = RunningSystem(
            load.names,
            [slo_ms.get(name, 1000.0) for name in load.names],
            load.times_ms,
            load.model_index,
            make_scheduler,
            deadlines_ms=load.deadlines_ms,
            follows=load.follows,
            life=Life((0.0, 0.0), (0.0, 0.0)),
            network=network,
            seed=seed,
            tokens=load.tokens,
            sizes=load.sizes,
            offline=load.offline,
        )
        self._offline = load.offline
        self._system.apply(plan)
        self._system.advance(0.0)
        self._system.life = Life()
        self._gpus = {gpu.id: gpu for gpu in gpus}
        self._unnoticed: dict[str, tuple[float, Gpu]] = {}  # lost GPUs: when the loss becomes known, the GPU
        self._requested: Mapping[str, int] = {}  # GPUs of each type that were asked for last
        self._coming: Counter[str] = Counter()  # nodes by type
        self._grown = 0
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._count = 0
        self._controller = Controller(settings, Memory(plan, workload))
        self._result = ControlledRun(load.names)
        self._result.plans.append((0.0, plan, "the first plan"))
        for incident in incidents:
            self._expect(incident)

    # Format: seconds of a window of the report.
    def run(
        self, window_s: float = 20.0, progress: Callable[[float, ControlledRun], None] = lambda _now_s, _run: None
    ) -> ControlledRun:
        """Run to the end of the load, and until the last requests have ended.

        Args:
            window_s: length of the windows of the figures.
            progress: called at the end of every window.
        """
        look_s, duration_s = self._settings.look_s, self._duration_s
        looks: list[Look] = []
        ends_s = window_s
        step = 0
        while step * look_s < duration_s:
            step += 1
            now_s = step * look_s
            while self._events and self._events[0][0] <= now_s:
                at_s, _, happen = heappop(self._events)
                self._system.advance(1000.0 * at_s)
                happen(at_s)
            self._system.advance(1000.0 * now_s)
            look = self._system.observe()
            looks.append(look)
            self._controller.observe(now_s, self._seen(now_s, look))
            self._carry_out(now_s)
            for kind in {gpu.device: gpu.whole_type for gpu in self._gpus.values()}.values():
                self._result.present_s[kind] += look_s
            if now_s >= ends_s - 1e-9 or now_s >= duration_s:
                self._close(now_s, looks)
                looks = []
                ends_s += window_s
                progress(now_s, self._result)
        self._result.offline = self._system.end_offline(self._result.gpu_s)
        for rest_s in range(60, 3660, 60):  # limit: an hour for what is under way at the end, as long answers are
            self._system.advance(1000.0 * (duration_s + rest_s))
            self._close(duration_s + rest_s, [self._system.observe()], is_rest=True)
            if sum(int(window.arrived.sum() - window.ended.sum()) for window in self._result.windows) <= 0:
                break
        return self._result

    def _close(self, now_s: float, looks: Sequence[Look], *, is_rest: bool = False) -> None:
        arrived = np.sum([look.arrived for look in looks], axis=0)
        ended = np.sum([look.ended for look in looks], axis=0)
        if is_rest and self._result.windows:
            last = self._result.windows.pop()
            self._result.windows.append(
                Window(last.end_s, last.arrived + arrived, last.ended + ended, last.share_s, last.gpu_s)
            )
            return
        share_s, gpu_s = sum(look.share_s for look in looks), sum(look.gpu_s for look in looks)
        self._result.windows.append(Window(now_s, arrived, ended, share_s, gpu_s))

    # --- what the controller sees ---------------------------------------------------------------------------------

    def _seen(self, now_s: float, look: Look) -> Observation:
        bad = look.ended.sum(axis=1) - look.ended[:, Outcome.OK]
        at_work = set[int]() if self._offline is None else self._offline.models_at_work()
        offline = [place in at_work for place in range(len(self._result.names))]
        counts = np.column_stack([look.arrived, look.ended[:, Outcome.OK], bad, look.generated, offline]).tolist()
        models = {name: ModelSeen(*row) for name, row in zip(self._result.names, counts, strict=True)}
        known = {**self._gpus, **{name: gpu for name, (at_s, gpu) in self._unnoticed.items() if at_s > now_s}}
        return Observation(
            models=models,
            ready=look.ready,
            gpus=tuple(known[name] for name in sorted(known)),
            broken=look.broken,
            slowdowns={name: use.ratio for name, use in look.gpulets.items() if use.ratio},
            leaving={gpu: s for name, s in self._leaving.items() for gpu in _named((name,), self._gpus)},
        )

    # --- what it decides ------------------------------------------------------------------------------------------

    def _carry_out(self, now_s: float) -> None:
        for decision in self._controller.take_decisions():
            if isinstance(decision, LogLine):
                self._result.entries.append(decision)
            elif isinstance(decision, Apply):
                later_s = self._cut_for(decision.plan)
                self._system.apply(decision.plan, decision.standby, later_s=later_s)
                self._result.plans.append((now_s, decision.plan, decision.why))
                gone = [g.id for g in decision.plan.gpulets if not self._gpus.keys() >= {*g.gpus}]
                if gone:
                    self._system.lose(gone)
            elif isinstance(decision, MakePlan):
                self._plan(now_s, decision)
            elif isinstance(decision, WantGpus):
                self._requested = decision.by_type
                self._provide(now_s)

    def _cut_for(self, plan: Plan) -> dict[str, float]:
        """Cut the present GPUs as a plan needs them. Return how much later its gpu-lets start on those that are cut."""
        gpus = tuple(self._gpus.values())
        present, to_be = {gpu.device for gpu in gpus}, {gpu.id for gpu in places_to_be(plan, gpus)}
        if to_be:
            cluster = Cluster.of(gpus).uncut.cut_as(gpu for gpu in plan.gpus if gpu.device in present)
            self._gpus = {gpu.id: gpu for gpu in cluster.gpus}
        return {gpulet.id: CUTTING_S for gpulet in plan.gpulets if not to_be.isdisjoint(gpulet.gpus)}

    def _plan(self, now_s: float, decision: MakePlan) -> None:
        result: Proposal | str
        try:
            result = propose(decision.request, self._profiles)
        except InvalidInputError as error:
            result = str(error)

        def arrive(at_s: float) -> None:
            self._controller.planned(at_s, decision.number, result)
            self._carry_out(at_s)

        self._at(now_s + _PLANNING_S, arrive)

    def _provide(self, now_s: float) -> None:
        """Bring missing GPUs, and release empty ones above what is wanted, both a node at a time. As with Ray's
        autoscaler, nodes on their way count, and those that leave do not."""
        plan = self._controller.plan
        used = set(plan.devices(plan.used_gpus))
        for kind, count in self._requested.items():
            per_node = self._settings.gpus[kind].per_node
            nodes: dict[str, set[str]] = defaultdict(set)  # devices
            for gpu in self._gpus.values():
                if gpu.whole_type == kind and {gpu.id, gpu.device, node_of(gpu.id)}.isdisjoint(self._leaving):
                    nodes[node_of(gpu.id) if per_node > 1 else gpu.device].add(gpu.device)
            present = sum(map(len, nodes.values()))
            excess = present - count
            for node in [*nodes.values()][::-1]:
                if len(node) <= excess and used.isdisjoint(node):
                    excess -= len(node)
                    self._gpus = {name: gpu for name, gpu in self._gpus.items() if gpu.device not in node}
            for _ in range(math.ceil((count - present) / per_node) - self._coming[kind]):
                self._coming[kind] += 1
                self._at(now_s + self._random.uniform(*self._provision_s), partial(self._new_node, kind=kind))

    def _new_node(self, now_s: float, kind: str) -> None:
        self._coming[kind] -= 1
        self._grown += 1
        bounds, node = self._settings.gpus[kind], f"grown{self._grown}"
        for place in range(bounds.per_node):
            grown = {"id": f"{node}/{place}", **({"mig": bounds.mig} if bounds.mig == "managed" else {})}
            self._gpus[f"{node}/{place}"] = self._growth[kind].model_copy(update=grown)
        if bounds.spot is not None:
            life_s = max(bounds.spot.notice_s, self._random.exponential(3600.0 * bounds.spot.life_hours))
            self._expect(Incident(now_s + life_s, lose=(node,), notice_s=bounds.spot.notice_s))

    # --- what befalls it --------------------------------------------------------------------------------------------

    def _expect(self, incident: Incident) -> None:
        if incident.notice_s:
            self._at(incident.at_s - incident.notice_s, partial(self._announce, incident=incident))
        self._at(incident.at_s, partial(self._befall, incident=incident))

    def _announce(self, now_s: float, incident: Incident) -> None:
        self._leaving |= dict.fromkeys(incident.lose, incident.at_s)
        self._provide(now_s)

    def _befall(self, now_s: float, incident: Incident) -> None:
        lost = _named(incident.lose, self._gpus)
        if lost:
            for name in lost:
                self._unnoticed[name] = now_s + _NOTICE_S, self._gpus.pop(name)
            self._system.lose([g.id for g in self._controller.plan.gpulets if {*lost} & {*g.gpus}])
            self._provide(now_s)
        for program, factor in incident.slow.items():
            self._system.slow_down(program, factor)

    def _at(self, at_s: float, happen: Callable[[float], None]) -> None:
        self._count += 1
        heappush(self._events, (at_s, self._count, happen))


def _named(names: Sequence[str], gpus: Mapping[str, Gpu]) -> list[str]:
    """Return the GPUs named, directly, as a part of a GPU, or by their node."""
    return [name for name, gpu in gpus.items() if not {name, gpu.device, node_of(name)}.isdisjoint(names)]
