"""Names a new plan's GPUs and gpu-lets after running ones, so that as many gpu-lets as possible keep running.

A policy numbers GPUs and gpu-lets as it likes. This module assigns the plan's GPUs to real ones of their types so that
most running gpu-lets are kept. When a gpu-let can go on in the process of a running one, it takes that one's id. Every
other gpu-let gets an id that no running one has, so that it can start beside them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from tenuto.errors import refused
from tenuto.placement.cluster import Gpu
from tenuto.placement.placement_constraints import may_lie, prefers
from tenuto.placement.plan import GpuletProcess, Plan, PlannedGpu
from tenuto.placement.planner.change_stages import fits
from tenuto.placement.planner.fault_tolerance import SLIGHT, with_losses
from tenuto.placement.policies.shared.hosting import free_gpulet_id
from tenuto.placement.program import Gpulet, total_mib

FORBIDDEN = 1e12  # derived: more than all breaks together: no model goes where it must not
PREFERRED = 1e-6  # derived: less than any model that stays loaded: a preference only breaks ties
BREAKS = 1e6  # derived: more than all models that stay loaded: fewest models go away first


def match_to_running(
    plan: Plan,
    running: Plan | None,
    gpus: Sequence[Gpu],
    *,
    keep_idle: bool,
    reserved: Collection[str] = (),
    in_place: bool = False,
) -> Plan:
    """Return `plan` on these GPUs, with the ids of the gpu-lets that it keeps of `running`.

    Models lie only where they may. No node or rack holds more of a model with `spread` than in `plan`.

    Args:
        plan: a policy's plan, on at most as many GPUs of each type as exist.
        running: the plan that serves now.
        gpus: the GPUs that are present.
        keep_idle: also list GPUs without gpu-lets.
        reserved: ids that no new gpu-let may get.
        in_place: the plan is for these very GPUs: its gpu-lets stay on theirs.

    Raises:
        InvalidInputError: the plan uses more GPUs of a type than exist.
    """
    from scipy.optimize import linear_sum_assignment

    before = running.by_gpu() if running is not None else {}
    then = running.processes() if running is not None else {}

    def pairs(new: Sequence[Gpulet], gpu: Gpu) -> _Pairs:
        return _pairs(plan.processes_on(PlannedGpu.of(gpu), new), before.get(gpu.id, []), then)

    specs = {spec.name: spec for spec in plan.models}

    def may_or_likes(name: str, gpu: Gpu) -> float:
        """Return what laying a planned GPU's gpu-lets on this GPU is worth, apart from models that stay loaded."""
        held = [specs[model] for model in _models(planned[name]) & specs.keys()]
        wrong = (in_place and gpu.id != name) or not all(may_lie(spec, gpu) for spec in held)
        return PREFERRED * sum(prefers(spec, gpu) for spec in held) - FORBIDDEN * wrong

    says_where = in_place or any(spec.only_on or spec.keep_off or spec.prefer for spec in plan.models)
    planned = {gpu: gpulets for gpu, gpulets in plan.by_gpu().items() if gpulets}
    types = {gpu.id: gpu.type for gpu in plan.gpus}
    taken = {*reserved, *(gpulet.id for gpulet in (running.gpulets if running is not None else ()))}
    gpulets: list[Gpulet] = []
    used: dict[str, PlannedGpu] = {}
    in_place = in_place or any(gpulet.also_on for gpulet in plan.gpulets)  # GPUs of one node stay together
    now_on: dict[str, str] = {}  # by planned GPU the real one
    for gpu_type in dict.fromkeys(types[gpu] for gpu in planned):
        new = [gpu for gpu in planned if types[gpu] == gpu_type]
        present = [gpu for gpu in gpus if gpu.type == gpu_type]
        if len(new) > len(present):
            rule = f"the plan has {len(new)} GPUs of type {gpu_type}, the cluster {len(present)}"
            raise refused("gpus", len(new), rule, "Plan on the GPUs that are there.")
        held = [before.get(gpu.id, []) for gpu in present]
        values = _values_beside([planned[name] for name in new], held, [gpu.memory_mib for gpu in present])
        lies_on: dict[str, list[int]] = defaultdict(list)
        for column, gpulets_there in enumerate(held):
            for model in _models(gpulets_there):
                lies_on[model].append(column)
        first: dict[object, int] = {}  # rows of planned GPUs that hold alike gpu-lets are equal
        for row, name in enumerate(new):
            alike = tuple(
                (g.share_pct, g.memory_mib, g.also_on, *map(id, (*g.models, *g.merge))) for g in planned[name]
            )
            if first.setdefault(alike, row) != row:
                values[row] = values[first[alike]]
                continue
            for column in {column for model in _models(planned[name]) for column in lies_on[model]}:
                going_on = pairs(planned[name], present[column])
                values[row, column] = _value(planned[name], held[column], present[column], going_on)
        if says_where:
            values += [[may_or_likes(name, gpu) for gpu in present] for name in new]
        for row, column in zip(*linear_sum_assignment(values, maximize=True), strict=True):
            gpu = present[column]
            used[gpu.id], now_on[new[row]] = PlannedGpu.of(gpu), gpu.id
            own = [gpulet for gpulet in planned[new[row]] if gpulet.gpu == new[row]]
            gpulets += _named(own, gpu.id, pairs(own, gpu), taken)
    gpulets = [g.model_copy(update={"also_on": tuple(now_on[gpu] for gpu in g.also_on)}) for g in gpulets]
    if keep_idle:
        used |= {gpu.id: PlannedGpu.of(gpu) for gpu in gpus if gpu.id not in used}
    order = {gpu.id: place for place, gpu in enumerate(gpus)}
    matched = plan.model_copy(
        update={
            "gpus": tuple(sorted(used.values(), key=lambda gpu: order[gpu.id])),
            "gpulets": tuple(sorted(gpulets, key=lambda gpulet: (order[gpulet.gpu], gpulet.id))),
        }
    )
    matched = with_losses(matched)  # places have other names now
    if not in_place and any(spec.spread in ("node", "rack") for spec in plan.models):
        most, less = _left(with_losses(plan)), _left(matched)
        if any(less[name] < part - SLIGHT * specs[name].rate_rps for name, part in most.items()):
            return match_to_running(plan, running, gpus, keep_idle=keep_idle, reserved=reserved, in_place=True)
    return matched


def _left(plan: Plan) -> dict[str, float]:
    """Return the rate left after the worst loss, in requests per second, for each model with `spread` or `survive`."""
    left_rps: dict[str, float] = {}
    for loss in plan.expected.losses:
        for name, rate in loss.goodput_rps.items():
            left_rps[name] = min(rate, left_rps.get(name, rate))
    return left_rps


def renamed(plan: Plan, running: Plan) -> Plan:
    """Return an operator's plan in which every gpu-let has an id of its own, unless it can go on in the process with
    its id. So it can start beside that process."""
    then, now = running.processes(), plan.processes()
    taken = {gpulet.id for gpulet in (*running.gpulets, *plan.gpulets)}
    gpulets = []
    for gpulet in plan.gpulets:
        if then.get(gpulet.id, now[gpulet.id]) != now[gpulet.id]:
            gpulet = gpulet.model_copy(update={"id": fresh_id(gpulet.gpu, taken)})
        gpulets.append(gpulet)
    return plan.model_copy(update={"gpulets": tuple(gpulets)})


def gpus_of(*plans: Plan) -> tuple[Gpu, ...]:
    """Return the GPUs of plans, with their memory and the price of their types.

    Raises:
        InvalidInputError: the memory of a GPU is not known.
    """
    known = {gpu.id: gpu for plan in plans for gpu in plan.gpus}
    return tuple(gpu.as_gpu for gpu in known.values())


def fresh_id(gpu_id: str, taken: set[str]) -> str:
    """Return the first id on a GPU that no gpu-let has yet, and add it to those that are taken."""
    name = free_gpulet_id(gpu_id, taken)
    taken.add(name)
    return name


_Pairs = list[tuple[float, int, str]]


def _models(gpulets: Iterable[Gpulet]) -> set[str]:
    return {replica.name for gpulet in gpulets for replica in gpulet.models}


def _values_beside(
    new: Sequence[Sequence[Gpulet]], old: Sequence[Sequence[Gpulet]], memory_mib: Sequence[float]
) -> NDArray[np.float64]:
    """Return `_value` of every planned GPU on every real one, when no running process could go on."""
    pct, mib = (
        [np.array([total(gpulets) for gpulets in each]) for each in (new, old)] for total in (_total_pct, total_mib)
    )
    is_room = (pct[0][:, None] + pct[1] <= 100.0 + 1e-6) & (mib[0][:, None] + mib[1] <= np.array(memory_mib) + 1e-6)
    starts = np.array([sum(len(gpulet.models) for gpulet in gpulets) for gpulets in new], dtype=float)
    return np.where(is_room, 0.0, -BREAKS * starts[:, None])


def _total_pct(gpulets: Iterable[Gpulet]) -> float:
    return sum(gpulet.effective_share_pct for gpulet in gpulets)


def _value(new: Sequence[Gpulet], old: Sequence[Gpulet], gpu: Gpu, pairs: _Pairs) -> float:
    """Return what laying a GPU's gpu-lets on this GPU is worth: models that stay loaded, less models that could start
    only after others have gone."""
    stay = {i for _, i, _ in pairs}
    starts = [gpulet for index, gpulet in enumerate(new) if index not in stay]
    breaks = 0.0 if fits([*old, *starts], gpu) else sum(len(gpulet.models) for gpulet in starts)
    return sum(value for value, _, _ in pairs) - BREAKS * breaks


def _pairs(
    new: Sequence[tuple[Gpulet, GpuletProcess]], old: Sequence[Gpulet], then: Mapping[str, GpuletProcess]
) -> _Pairs:
    """Return (value, new, id of the old) for every gpu-let whose process goes on, greedily by value. The value counts
    its models, twice when the process holds no others, and a little more when nothing changes."""
    possible = []
    for i, (after, process) in enumerate(new):
        models = {replica.name for replica in after.models}
        for j, before in enumerate(old):
            same = {replica.name for replica in before.models}
            if process == then[before.id] and models & same:
                # Derived: below 1, so that it decides between equals.
                more = (models == same) * 1.0 + (after.models == before.models) * 0.1
                possible.append((len(models & same) * (1.0 + more), i, j))
    chosen: list[tuple[float, int, int]] = []
    for value, i, j in sorted(possible, key=lambda pair: (-pair[0], pair[1], pair[2])):
        if all(i != other and j != another for _, other, another in chosen):
            chosen.append((value, i, j))
    return [(value, i, old[j].id) for value, i, j in chosen]


def _named(new: Sequence[Gpulet], gpu_id: str, pairs: _Pairs, taken: set[str]) -> list[Gpulet]:
    """Return the gpu-lets of a GPU with their ids; add new ids to `taken`."""
    ids = {i: name for _, i, name in pairs}
    named = []
    for index, gpulet in enumerate(new):
        name = ids.get(index) or fresh_id(gpu_id, taken)
        named.append(gpulet.model_copy(update={"id": name, "gpu": gpu_id}))
    return named
