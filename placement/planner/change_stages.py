"""Finds the way from one plan to another, make before break. Each stage is a plan that can run; when its gpu-lets are
ready, the next stage is computed.

A stage depends only on what runs and the target. So an interrupted change goes on where it stands, and going back is a
change to the old plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter
from typing import NamedTuple

from tenuto.errors import InvalidInputError
from tenuto.placement.cluster import Gpu, excludes
from tenuto.placement.expectation.outlook import Outlooks, Traffic
from tenuto.placement.plan import Plan, PlannedGpu
from tenuto.placement.planner.task import Durations
from tenuto.placement.program import Gpulet, fits_memory
from tenuto.placement.versions import taking_the_rest

# Default: of a stage that cuts GPUs, until measured: instances end and begin one after the other, and a GPU that enters
# or leaves MIG mode is reset.
CUTTING_S = 10.0
_NAME = attrgetter("name")
MOST_STAGES = 1000  # limit: one gpu-let at a time; more would be a bug here


class ChangeStage(NamedTuple):
    """A plan on the way of a change: which of its gpu-lets can serve, and whether the others start processes, or load
    models into running ones, and GPUs are cut."""

    plan: Plan
    ready: frozenset[str]
    starts: bool
    loads: bool
    cuts: bool

    def lasts_s(self, durations: Durations) -> float:
        """Return how long the stage takes."""
        lasts_s = durations.start_s if self.starts else durations.load_s if self.loads else 0.0
        return lasts_s + CUTTING_S if self.cuts else lasts_s


def stages(running: Plan, target: Plan, gpus: Sequence[Gpu], rates_rps: Mapping[str, float]) -> list[ChangeStage]:
    """Return the stages from one plan to another."""
    way: list[ChangeStage] = []
    now = running
    for _ in range(MOST_STAGES):
        plan = next_stage(now, target, gpus, rates_rps)
        if plan is None:
            break
        waiting = not_ready(now, plan)
        ready = frozenset(gpulet.id for gpulet in plan.gpulets) - waiting
        starts = bool(waiting - {gpulet.id for gpulet in now.gpulets})
        way.append(ChangeStage(plan, ready, starts, bool(waiting), bool(made_anew(now, plan))))
        now = plan
    return way


def next_stage(now: Plan, target: Plan, gpus: Sequence[Gpu], rates_rps: Mapping[str, float]) -> Plan | None:
    """Return the plan to apply next on the way to `target`; None when it has been reached.

    1. New gpu-lets start beside running ones, where share and memory allow.
    2. When nothing more fits, gpu-lets that the target lacks make room: all at once those without which all rates are
       still carried. When there are none, those in the way of one new gpu-let that cost fewest requests and, if
       possible, leave every model a replica.
    3. When nothing is left to start or to load, versions that leave get no more requests.
    4. Then the target itself is applied.

    A gpu-let in a MIG instance that does not exist yet has room once the instances in its place are empty.

    Args:
        now: the running plan, all of it ready.
        target: fitted to it (`tenuto.placement.planner.gpu_matching`).
        gpus: with their memory.
        rates_rps: by model, to judge what each gpu-let is worth.
    """
    running = {gpulet.id: gpulet for gpulet in now.gpulets}
    starts = [gpulet for gpulet in target.gpulets if gpulet.id not in running]
    loads = [g for g in target.gpulets if g.id in running and _loads(running[g.id], g)]
    if not starts and not loads:
        return None if now.to_data() == target.to_data() else _without_requests(now, target) or target
    gpus = (*gpus, *places_to_be(target, gpus))
    beside = _beside(starts, now, target, now.gpulets, gpus)
    stage = staged(now, target, [*now.gpulets, *beside]) if beside else None
    if stage is not None:
        return stage
    return _with_room(now, target, gpus, rates_rps, starts, loads)


def places_to_be(target: Plan, gpus: Sequence[Gpu]) -> tuple[Gpu, ...]:
    """Return the planned MIG instances that do not exist yet, and planned GPUs that are still cut otherwise."""
    present = {(gpu.id, gpu.type) for gpu in gpus}
    return tuple(
        gpu.as_gpu
        for gpu in target.gpus
        if (gpu.id, gpu.type) not in present and (gpu.instance is not None or gpu.mig is not None)
    )


def made_anew(before: Plan, after: Plan) -> tuple[PlannedGpu, ...]:
    """Return a plan's MIG instances, and its whole GPUs that were cut, that the plan before lacks."""
    known, cut = {(gpu.id, gpu.type) for gpu in before.gpus}, {g.device for g in before.gpus if g.instance is not None}
    return tuple(
        gpu for gpu in after.gpus if (gpu.id, gpu.type) not in known and (gpu.instance is not None or gpu.device in cut)
    )


def not_ready(before: Plan, stage: Plan) -> frozenset[str]:
    """Return the gpu-lets of a stage that have to start or load models after `before`."""
    running = {gpulet.id: gpulet for gpulet in before.gpulets}
    return frozenset(g.id for g in stage.gpulets if g.id not in running or _loads(running[g.id], g))


def fits(gpulets: Iterable[Gpulet], gpu: Gpu, *, overcommits: bool = False) -> bool:
    """Whether these gpu-lets fit on one GPU, by share and memory."""
    together = list(gpulets)
    share_fits = overcommits or sum(g.effective_share_pct for g in together) <= 100.0 + 1e-6
    return share_fits and fits_memory(together, gpu.memory_mib)


def staged(now: Plan, target: Plan, gpulets: Sequence[Gpulet]) -> Plan | None:
    """Return the plan of a stage with these gpu-lets; None when no plan can hold them all, as when models are merged on
    one and not on another.

    Models keep the rates of `now`. The scheduler holds models to these under overload, and the target's additional room
    is not there yet: with higher rates, one model that outgrew its plan would take requests from others. Requests are
    split among versions as before, so new versions get none yet.
    """
    specs = {spec.name: spec for spec in (*now.models, *target.models)}
    held = {replica.name for gpulet in gpulets for replica in gpulet.models}
    planned = {spec.name for spec in target.models}
    split = {spec.model for spec in now.models if taking_the_rest([spec]) and spec.name in planned | held}
    before = {spec.name: spec for spec in now.models}
    for name, spec in specs.items():
        update: dict[str, object] = {"rate_rps": before[name].rate_rps} if name in before else {}
        if spec.model in split and name in before:
            update |= {"share_pct": before[name].share_pct, "shadow": before[name].shadow}
        elif spec.model in split and not spec.shadow:
            update["share_pct"] = 0.0
        if update:
            specs[name] = spec.model_copy(update=update)
    unserved = tuple(name for name in specs if name in planned and name not in held)
    stage = target.model_copy(
        update={
            "gpus": _gpus_of_stage(now, target, gpulets),
            "gpulets": tuple(gpulets),
            "models": tuple(spec for name, spec in specs.items() if name in planned or name in held),
            "unserved": unserved,
            "unserved_reasons": dict.fromkeys(unserved, "the plan is being changed"),
            "overcommits": now.overcommits or target.overcommits,
        }
    )
    return _if_possible(stage)


def _if_possible(stage: Plan) -> Plan | None:
    try:
        stage.check_references()
    except InvalidInputError:
        return None
    return stage


def _without_requests(now: Plan, target: Plan) -> Plan | None:
    """Return the target with versions beside it that it lacks and that get requests now. They get none any more, and
    those that wait for them are still served. None when there are no such versions."""
    planned, versioned = {spec.name for spec in target.models}, {spec.model for spec in target.models}
    leaving = {
        spec.name: spec.model_copy(update={"share_pct": 0.0})
        for spec in now.models
        if spec.name not in planned and spec.model in versioned and not spec.shadow and spec.share_pct != 0.0
    }
    if not leaving:
        return None
    held = {gpulet.id: gpulet for gpulet in now.gpulets if any(r.name in leaving for r in gpulet.models)}
    leaving_gpulets = {name: gpulet.only(planned | leaving.keys()) for name, gpulet in held.items()}
    gpulets = [leaving_gpulets.pop(gpulet.id, None) or gpulet for gpulet in target.gpulets]
    gpulets += [gpulet for gpulet in leaving_gpulets.values() if gpulet is not None]
    stage = target.model_copy(
        update={
            "gpus": _gpus_of_stage(now, target, gpulets),
            "gpulets": tuple(gpulets),
            "models": (*target.models, *leaving.values()),
            "overcommits": now.overcommits or target.overcommits,
        }
    )
    return _if_possible(stage)


def _loads(before: Gpulet, after: Gpulet) -> bool:
    """Whether a running gpu-let has to load something to become another."""
    if before.models is after.models and before.merge is after.merge:
        return False
    return not {*map(_NAME, after.programs)} <= {*map(_NAME, before.programs)}


def _gpus_of_stage(now: Plan, target: Plan, gpulets: Sequence[Gpulet]) -> tuple[PlannedGpu, ...]:
    """Return the GPUs of both plans. Of MIG instances that exclude each other, return those that hold one of the
    gpu-lets, else the target's."""
    before, after = ({gpu.id: gpu for gpu in plan.gpus} for plan in (now, target))
    if not any(gpu.instance is not None for gpu in (*now.gpus, *target.gpus)):
        return tuple((before | after).values())
    running = {gpulet.id for gpulet in now.gpulets}
    held = {gpu: (before if g.id in running else after)[gpu] for g in gpulets for gpu in g.gpus}
    on: dict[str, list[PlannedGpu]] = {}
    for gpu in (*held.values(), *target.gpus, *now.gpus):
        of_device = on.setdefault(gpu.device, [])
        if not any(gpu.id == other.id or excludes(gpu, other) for other in of_device):
            of_device.append(gpu)
    return tuple(gpu for of_device in on.values() for gpu in of_device)


def _in_the_way(start: Gpulet, now: Plan, target: Plan) -> set[str]:
    """Return the running plan's GPUs that cannot exist beside those a new gpu-let needs."""
    places = [gpu for gpu in target.gpus if gpu.id in start.gpus]
    return {gpu.id for gpu in now.gpus for place in places if gpu.device == place.device and excludes(place, gpu)}


def _beside(
    starts: Sequence[Gpulet], now: Plan, target: Plan, present: Sequence[Gpulet], gpus: Sequence[Gpu]
) -> list[Gpulet]:
    """Return the new gpu-lets that fit beside what is present, first come first served."""
    overcommits = now.overcommits or target.overcommits
    by_gpu: dict[str, list[Gpulet]] = {gpu.id: [] for gpu in gpus}
    for gpulet in present:
        for gpu_id in gpulet.gpus:
            by_gpu.setdefault(gpu_id, []).append(gpulet)
    gpu_of = _gpus_by_id(gpus, target)
    running, fitting = {gpulet.id for gpulet in present}, []
    for gpulet in starts:
        blocked = any(g.id in running for gpu in _in_the_way(gpulet, now, target) for g in by_gpu.get(gpu, ()))
        if blocked or not gpu_of.keys() >= {*gpulet.gpus}:
            continue
        if all(fits([*by_gpu[gpu], gpulet], gpu_of[gpu], overcommits=overcommits) for gpu in gpulet.gpus):
            for gpu_id in gpulet.gpus:
                by_gpu[gpu_id].append(gpulet)
            fitting.append(gpulet)
    return fitting


def _gpus_by_id(gpus: Sequence[Gpu], target: Plan) -> dict[str, Gpu]:
    """Return the GPUs by id; when a MIG instance is replaced at its place, the target's."""
    types = {gpu.id: gpu.type for gpu in target.gpus}
    return {gpu.id: gpu for gpu in sorted(gpus, key=lambda gpu: types.get(gpu.id) == gpu.type)}


def _with_room(
    now: Plan,
    target: Plan,
    gpus: Sequence[Gpu],
    rates_rps: Mapping[str, float],
    starts: Sequence[Gpulet],
    loads: Sequence[Gpulet],
) -> Plan:
    """Return the stage in which gpu-lets have made room and the gpu-lets that then fit have started."""
    impact = _Impact(now, rates_rps)
    away: set[str] = set()
    choices = [{gpulet.id} for gpulet in loads] + _ways_to_make_room(now, target, gpus, impact, starts)
    for choice in sorted(choices, key=impact.without):
        if not away or impact.without(away | choice) == impact.without([]):
            away |= choice
    loading = {gpulet.id: gpulet for gpulet in loads if gpulet.id in away}
    serving = [loading.get(g.id, g) for g in now.gpulets if g.id not in away or g.id in loading]
    stage = staged(now, target, [*serving, *_beside(starts, now, target, serving, gpus)])
    if not away or stage is None:
        return target  # no stage is possible: change all at once, as a plain deploy would
    return stage


def _ways_to_make_room(
    now: Plan, target: Plan, gpus: Sequence[Gpu], impact: _Impact, starts: Sequence[Gpulet]
) -> list[set[str]]:
    """Return for each new gpu-let that can get room the running ones that are away for it: those on GPUs that cannot
    exist beside its own, and the fewest of those that leave anyway, least harm first."""
    overcommits = now.overcommits or target.overcommits
    stays, gpu_of = {gpulet.id for gpulet in target.gpulets}, _gpus_by_id(gpus, target)
    ways = []
    for start in starts:
        excluded = _in_the_way(start, now, target)
        blocking = {gpulet.id for gpulet in now.gpulets if not excluded.isdisjoint(gpulet.gpus)}
        neighbours = [g for g in now.gpulets if {*start.gpus} & {*g.gpus} and g.id not in blocking]
        leaving = sorted((g for g in neighbours if g.id not in stays), key=lambda g: impact.without([g.id]))
        for count in range(0 if blocking else 1, len(leaving) + 1):
            away = blocking | {gpulet.id for gpulet in leaving[:count]}
            staying = [g for g in neighbours if g.id not in away]
            if all(
                fits([*(g for g in staying if gpu in g.gpus), start], gpu_of[gpu], overcommits=overcommits)
                for gpu in start.gpus
            ):
                ways.append(away)
                break
    return ways


class _Impact:
    """The harm of taking gpu-lets of a plan away, to sort by: least harm first."""

    def __init__(self, plan: Plan, rates_rps: Mapping[str, float]) -> None:
        self._plan, self._outlooks = plan, Outlooks()
        self._known: dict[frozenset[str], tuple[int, float]] = {}
        self._rates = {spec.name: rates_rps.get(spec.name, 0.0) for spec in plan.models}
        self._hosts = {name: {g.id for g in plan.hosts_of(name)} for name in self._rates}
        self._weights = {spec.name: spec.weight for spec in plan.models}

    def without(self, away: Iterable[str]) -> tuple[int, float]:
        """Return how many hosted models lose all their gpu-lets, and the weighted requests per second no longer in
        time."""
        gone = frozenset(away)
        if gone in self._known:
            return self._known[gone]
        alone = sum(1 for hosts in self._hosts.values() if hosts and hosts <= gone)
        left = tuple(gpulet for gpulet in self._plan.gpulets if gpulet.id not in gone)
        parts = self._outlooks.of(self._plan.model_copy(update={"gpulets": left}), Traffic(self._rates)).parts
        lost = sum(self._weights[name] * rate * (1.0 - parts.get(name, 0.0)) for name, rate in self._rates.items())
        impact = self._known[gone] = alone, round(lost, 3)
        return impact
