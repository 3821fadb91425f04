"""The way from one plan to another, make before break: each stage is a plan that can run, and the next one is asked for
when the gpu-lets of the last are ready.

A stage follows from what runs and the target alone. So a change that was interrupted goes on where it stands, and going
back is the same way with the old plan as its target.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from tenuto.errors import InvalidInputError
from tenuto.placement import Gpulet, Plan
from tenuto.placement.cluster import Gpu, excludes
from tenuto.placement.expectation.outlook import Outlooks, Traffic
from tenuto.placement.plan import PlannedGpu
from tenuto.placement.versions import taking_the_rest
from tenuto.profiles.gpu_types import memory_mib_of


def next_stage(now: Plan, target: Plan, gpus: Sequence[Gpu], rates_rps: Mapping[str, float]) -> Plan | None:
    """Return the plan to apply next on the way to `target`; None where it has been reached.

    1. What is new starts beside what runs, where share and memory allow.
    2. Where they do not, gpu-lets that the target lacks make room: those without which all rates are still carried,
       all at once; where there are none, those in the way of one new gpu-let that cost fewest requests and, if that
       can be, leave every model a replica.
    3. Once nothing is left to start or to load, the target itself.

    What starts in a MIG instance that is not there yet has room once the instances that it takes the place of are
    empty.

    Args:
        now: what runs, all of it ready.
        target: fitted to it (`tenuto.deployments.control.fit`).
        gpus: with their memory.
        rates_rps: by model, to judge what each gpu-let is worth while it is away.
    """
    running = {gpulet.id: gpulet for gpulet in now.gpulets}
    starts = [gpulet for gpulet in target.gpulets if gpulet.id not in running]
    loads = [g for g in target.gpulets if g.id in running and _loads(running[g.id], g)]
    if not starts and not loads:
        return None if now.to_data() == target.to_data() else target
    gpus = (*gpus, *places_to_be(target, gpus))
    beside = _beside(starts, now, target, now.gpulets, gpus)
    stage = staged(now, target, [*now.gpulets, *beside]) if beside else None
    if stage is not None:
        return stage
    return _with_room(now, target, gpus, rates_rps, starts, loads)


def places_to_be(target: Plan, gpus: Sequence[Gpu]) -> tuple[Gpu, ...]:
    """Return the MIG instances of a plan that are not there yet, and its GPUs that are still cut into others."""
    there = {(gpu.id, gpu.type) for gpu in gpus}
    return tuple(
        Gpu(**gpu.model_dump(), memory_mib=memory_mib_of(gpu.type) or float("inf"))
        for gpu in target.gpus
        if (gpu.id, gpu.type) not in there and (gpu.instance is not None or gpu.mig is not None)
    )


def made_anew(before: Plan, after: Plan) -> tuple[PlannedGpu, ...]:
    """Return the MIG instances of a plan, and whole GPUs that were cut, that the one before does not have."""
    known, cut = {(gpu.id, gpu.type) for gpu in before.gpus}, {g.device for g in before.gpus if g.instance is not None}
    return tuple(
        gpu for gpu in after.gpus if (gpu.id, gpu.type) not in known and (gpu.instance is not None or gpu.device in cut)
    )


def not_ready(before: Plan, stage: Plan) -> frozenset[str]:
    """Return the gpu-lets of a stage that have to start or to load models when it follows on `before`."""
    running = {gpulet.id: gpulet for gpulet in before.gpulets}
    return frozenset(g.id for g in stage.gpulets if g.id not in running or _loads(running[g.id], g))


def needed_mib(gpulet: Gpulet) -> float:
    """Return the memory a gpu-let needs: its limit, or what its programs are known to need."""
    if gpulet.memory_mib is not None:
        return gpulet.memory_mib
    return sum(program.memory_mib or 0.0 for program in gpulet.programs)


def fits(gpulets: Iterable[Gpulet], gpu: Gpu, *, overcommits: bool = False) -> bool:
    """Whether these gpu-lets have room on one GPU, in share and memory."""
    together = list(gpulets)
    share_fits = overcommits or sum(g.effective_share_pct for g in together) <= 100.0 + 1e-6
    return share_fits and sum(map(needed_mib, together)) <= gpu.memory_mib + 1e-6


def staged(now: Plan, target: Plan, gpulets: Sequence[Gpulet]) -> Plan | None:
    """Return the plan of a stage that holds these gpu-lets; None where they cannot be in one plan, as when models are
    merged on one of them and not on another.

    Models keep the rates of `now`: under overload the scheduler holds models to what they were planned for, and what
    the target has room for beyond that is not there yet. Others would lose requests to one that has outgrown its plan.
    Requests are split among versions as before: new ones are sent none yet.
    """
    specs = {spec.name: spec for spec in (*now.models, *target.models)}
    held = {replica.name for gpulet in gpulets for replica in gpulet.models}
    wanted = {spec.name for spec in target.models}
    split = {spec.model for spec in now.models if taking_the_rest([spec]) and spec.name in wanted | held}
    before = {spec.name: spec for spec in now.models}
    for name, spec in specs.items():
        kept: dict[str, object] = {"rate_rps": before[name].rate_rps} if name in before else {}
        if spec.model in split and name in before:
            kept |= {"share_pct": before[name].share_pct, "shadow": before[name].shadow}
        elif spec.model in split and not spec.shadow:
            kept["share_pct"] = 0.0
        if kept:
            specs[name] = spec.model_copy(update=kept)
    unserved = tuple(name for name in specs if name in wanted and name not in held)
    stage = target.model_copy(
        update={
            "gpus": _gpus_of_stage(now, target, gpulets),
            "gpulets": tuple(gpulets),
            "models": tuple(spec for name, spec in specs.items() if name in wanted or name in held),
            "unserved": unserved,
            "unserved_reasons": dict.fromkeys(unserved, "the plan is being changed"),
            "overcommits": now.overcommits or target.overcommits,
        }
    )
    try:
        stage.check_references()
    except InvalidInputError:
        return None
    return stage


def _loads(before: Gpulet, after: Gpulet) -> bool:
    """Whether a running gpu-let has to load something to become another."""
    return not {program.name for program in after.programs} <= {program.name for program in before.programs}


def _gpus_of_stage(now: Plan, target: Plan, gpulets: Sequence[Gpulet]) -> tuple[PlannedGpu, ...]:
    """Return the GPUs of both plans; of MIG instances that exclude each other those that hold one of the gpu-lets, or
    else the target's."""
    before, after = ({gpu.id: gpu for gpu in plan.gpus} for plan in (now, target))
    if not any(gpu.instance is not None for gpu in (*now.gpus, *target.gpus)):
        return tuple((before | after).values())
    running = {gpulet.id for gpulet in now.gpulets}
    held = {g.gpu: (before if g.id in running else after)[g.gpu] for g in gpulets}
    on: dict[str, list[PlannedGpu]] = {}
    for gpu in (*held.values(), *target.gpus, *now.gpus):
        there = on.setdefault(gpu.device, [])
        if not any(gpu.id == other.id or excludes(gpu, other) for other in there):
            there.append(gpu)
    return tuple(gpu for there in on.values() for gpu in there)


def _in_the_way(start: Gpulet, now: Plan, target: Plan) -> set[str]:
    """Return the GPUs of the running plan that cannot be there together with the one a new gpu-let is to lie on."""
    place = next(gpu for gpu in target.gpus if gpu.id == start.gpu)
    return {gpu.id for gpu in now.gpus if gpu.device == place.device and excludes(place, gpu)}


def _beside(
    starts: Sequence[Gpulet], now: Plan, target: Plan, there: Sequence[Gpulet], gpus: Sequence[Gpu]
) -> list[Gpulet]:
    """Return those of the new gpu-lets that have room beside what is there, first come first served."""
    overcommits = now.overcommits or target.overcommits
    by_gpu: dict[str, list[Gpulet]] = {gpu.id: [] for gpu in gpus}
    for gpulet in there:
        by_gpu.setdefault(gpulet.gpu, []).append(gpulet)
    sizes = _sizes(gpus, target)
    running, found = {gpulet.id for gpulet in there}, []
    for gpulet in starts:
        blocked = any(g.id in running for gpu in _in_the_way(gpulet, now, target) for g in by_gpu.get(gpu, ()))
        room = gpulet.gpu in sizes and not blocked
        if room and fits([*by_gpu[gpulet.gpu], gpulet], sizes[gpulet.gpu], overcommits=overcommits):
            by_gpu[gpulet.gpu].append(gpulet)
            found.append(gpulet)
    return found


def _sizes(gpus: Sequence[Gpu], target: Plan) -> dict[str, Gpu]:
    """Return the GPUs by id; where a MIG instance becomes another one at the same place, that of the target."""
    types = {gpu.id: gpu.type for gpu in target.gpus}
    sizes = {gpu.id: gpu for gpu in gpus}
    return sizes | {gpu.id: gpu for gpu in gpus if types.get(gpu.id) == gpu.type}


def _with_room(
    now: Plan,
    target: Plan,
    gpus: Sequence[Gpu],
    rates_rps: Mapping[str, float],
    starts: Sequence[Gpulet],
    loads: Sequence[Gpulet],
) -> Plan:
    """Return the stage in which gpu-lets have made room, and what has room then has been started."""
    impact = _Impact(now, rates_rps)
    overcommits = now.overcommits or target.overcommits
    stays = {gpulet.id for gpulet in target.gpulets}
    sizes = _sizes(gpus, target)
    # Each way to go on is what is away meanwhile: for what starts, those in its way; what loads, itself.
    ways = [[gpulet.id] for gpulet in loads]
    for start in starts:
        blocking = _in_the_way(start, now, target)
        blocked = [gpulet.id for gpulet in now.gpulets if gpulet.gpu in blocking]
        there = [gpulet for gpulet in now.gpulets if gpulet.gpu == start.gpu and gpulet.gpu not in blocking]
        leave = sorted((g for g in there if g.id not in stays), key=lambda g: impact.without([g.id]))
        for count in range(0 if blocked else 1, len(leave) + 1):
            gone = [*blocked, *(gpulet.id for gpulet in leave[:count])]
            if fits([*(g for g in there if g.id not in gone), start], sizes[start.gpu], overcommits=overcommits):
                ways.append(gone)
                break
    away: set[str] = set()
    for way in sorted(ways, key=impact.without):
        if not away or impact.without([*away, *way]) == impact.without([]):
            away |= set(way)
    loading = {gpulet.id: gpulet for gpulet in loads if gpulet.id in away}
    left = [loading.get(g.id, g) for g in now.gpulets if g.id not in away or g.id in loading]
    stage = staged(now, target, [*left, *_beside(starts, now, target, left, gpus)])
    if not away or stage is None:
        return target  # nothing can be done step by step: all at once, as a plain deploy would
    return stage


class _Impact:
    """What taking gpu-lets of a plan away does to its service, as something to sort by: least harm first."""

    def __init__(self, plan: Plan, rates_rps: Mapping[str, float]) -> None:
        self._plan, self._outlooks = plan, Outlooks()
        self._known: dict[frozenset[str], tuple[int, float]] = {}
        self._rates = {spec.name: rates_rps.get(spec.name, 0.0) for spec in plan.models}
        self._hosts = {name: {g.id for g in plan.hosts_of(name)} for name in self._rates}
        self._weights = {spec.name: spec.weight for spec in plan.models}

    def without(self, away: Iterable[str]) -> tuple[int, float]:
        """Return how many models that are hosted lose all of their gpu-lets, and the weighted requests per second that
        are no longer in time."""
        gone = frozenset(away)
        if gone in self._known:
            return self._known[gone]
        alone = sum(1 for hosts in self._hosts.values() if hosts and hosts <= gone)
        left = tuple(gpulet for gpulet in self._plan.gpulets if gpulet.id not in gone)
        parts = self._outlooks.of(self._plan.model_copy(update={"gpulets": left}), Traffic(self._rates)).parts
        lost = sum(self._weights[name] * rate * (1.0 - parts.get(name, 0.0)) for name, rate in self._rates.items())
        found = self._known[gone] = alone, round(lost, 3)
        return found
