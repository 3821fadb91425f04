"""What to change the plan to: candidates from a policy, laid on what runs, and the one that pays best.

*Incremental* first: what is placed stays, and the policy plans only what is missing (`extended`), or gpu-lets that are
not needed go (`trimmed`). Beside them stands the policy's plan for everything (`planned anew`), which has to pay for
what it moves, and on GPUs that plans may cut into MIG instances one with layouts of its own (`cut anew`), which has to
pay for the cutting, too. Pure functions; the live controller calls them in a process of its own, with a time limit.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from tenuto.deployments.control.batches import raised
from tenuto.deployments.control.fit import fitted, fresh_id, gpus_of
from tenuto.deployments.control.standby import Standby, standbys, twins
from tenuto.deployments.control.steps import fits
from tenuto.deployments.control.worth import ChangeWorth, Durations, Rent, Scale
from tenuto.errors import InvalidInputError
from tenuto.placement import Cluster, Gpulet, Plan, Workload
from tenuto.placement.cluster import Gpu, GpuGroup, Node
from tenuto.placement.components import connected_components
from tenuto.placement.expectation.outlook import Outlooks, Traffic, expected_of
from tenuto.placement.plan import Expected, PlannedGpu, PolicyUsed
from tenuto.placement.policies.shared.hosting import cost_of
from tenuto.placement.policy import load_policy
from tenuto.placement.solve import complete, solve
from tenuto.placement.surviving import (
    asks,
    bearable,
    drained,
    is_at,
    may_lie,
    prefers,
    unmet,
    with_losses,
    with_the_rest,
)
from tenuto.placement.workload import ModelSpec
from tenuto.profiles import ModelProfile, Profile, Profiles
from tenuto.profiles.mig_instances import instance_type_of

SLIGHT = 1e-3  # derived: ten times what a promise near its limit lacks (`expectation.outlook.NOTHING`), of attainment
ANYWHERE = {
    "spread": None,
    "survive": None,
    "only_on": (),
    "keep_off": (),
    "prefer": None,
}  # what asks nothing of where it lies
BORROWS = 1.1  # derived from `batching.core.admission.MARGIN`: beyond it a model exceeds its planned rate


@dataclass(frozen=True)
class PlanRequest:
    """What is asked of the planner.

    `workload` says which models, `traffic` what has to be carried of them and `expected_rps` what is to be expected on
    average. `running` is what serves now, on `gpus`, those that are there. `types` are the GPU types a cluster can grow
    by, with how many there may be at most; empty: it cannot grow. `slowdowns` is what batches of a program take over
    their profile, `attainment` the share of every model's requests that has to be in time. `standby_pct` asks for
    standby processes with so much more of a GPU, `standby_gpus` for twins on so many; `standby_ids` are those that wait
    beside what runs. `only_standby`: no other plan is asked for.
    """

    workload: Workload
    traffic: Traffic
    expected_rps: Mapping[str, float]
    running: Plan
    gpus: tuple[Gpu, ...]
    policy: PolicyUsed
    durations: Durations
    horizon_s: float
    hysteresis: float
    types: Mapping[str, int] = field(default_factory=dict)
    slowdowns: Mapping[str, float] = field(default_factory=dict)
    attainment: float = 0.99
    standby_pct: float | None = None
    standby_gpus: int = 0
    standby_ids: frozenset[str] = frozenset()
    only_standby: bool = False


@dataclass(frozen=True)
class Proposal:
    """The best candidate, how it came about and what it is worth; `plan` None: nothing was found, as `worth` says.

    `wanted` is how many GPUs of each type would carry everything; None: the policy could not tell. `standby` are idle
    processes to have beside what runs after it.
    """

    plan: Plan | None
    how: str
    worth: ChangeWorth
    wanted: Mapping[str, int] | None = None
    standby: tuple[Standby, ...] = ()


def propose(request: PlanRequest, profiles: Profiles) -> Proposal:
    """Return the candidate that pays best, or else the one that would come nearest to it; and the standby processes of
    what runs then."""
    running, places = request.running, request.running.drained
    aside = [gpu for gpu in request.gpus if is_at(gpu, places)]
    if places:  # what is still there has to go
        gpus = {gpu.id: gpu for gpu in request.gpus if gpu not in aside}
        running = running.model_copy(update={"gpulets": tuple(g for g in running.gpulets if g.gpu in gpus)})
        request = replace(request, gpus=tuple(gpus.values()), running=running)
    only = Proposal(None, "", ChangeWorth(False, "only standby processes were asked for"))
    found = only if request.only_standby else _proposed(request, profiles)
    if found.plan is not None:
        found = replace(found, plan=drained(found.plan, Cluster.of(aside), places))
    plan = found.plan if found.plan is not None and found.worth.pays else request.running
    waiting = twins(plan, request.standby_gpus, request.gpus, request.running)
    if request.standby_pct is not None:
        waiting += standbys(plan, request.standby_pct, profiles, request.gpus, request.running)
    return replace(found, standby=waiting)


def _proposed(request: PlanRequest, profiles: Profiles) -> Proposal:
    rent = Rent(bool(request.types), _prices(request.gpus))
    wanted, found, faults = _candidates(request, profiles)
    best: tuple[tuple[float, ...], Proposal] | None = None
    scale = Scale(
        request.running,
        request.gpus,
        request.traffic,
        request.expected_rps,
        request.durations,
        rent,
        horizon_s=request.horizon_s,
        hysteresis=request.hysteresis,
        slowdowns=request.slowdowns,
        attainment=request.attainment,
    )
    asking, unmet_before = any(map(asks, request.workload.models)), _unmet(request, request.running)
    for how, unrated in found:
        plan = _made_for(unrated, request.traffic.upper_rps)
        relieved = unmet_before - _unmet(request, plan)
        weighed = scale.weigh(plan, relieved)
        net = weighed.gained_requests - weighed.lost_requests
        saved = weighed.saved_rent - weighed.spent_rent
        carried = round(weighed.carried_rps)
        first = (carried, relieved) if asking else ()
        rank = (float(weighed.pays), *first, round(net), carried, saved, -float(weighed.stages))
        if best is None or rank > best[0]:
            best = rank, Proposal(plan, how, weighed, wanted)
    if best is None:
        return Proposal(None, "", ChangeWorth(False, "; ".join(faults) or "no other plan was found"), wanted)
    if not best[1].worth.pays:
        return _kept(request, wanted) or best[1]
    chosen = best[1]
    assert chosen.plan is not None
    return replace(chosen, plan=_promised(chosen.plan, request.gpus))


def _unmet(request: PlanRequest, plan: Plan) -> int:
    """Return how many models do not lie as they ask and as the GPUs that are there allow."""
    if not any(map(asks, request.workload.models)):
        return 0
    there = of_workload(plan, bearable(request.workload, request.gpus))
    return len(unmet(_promised(_made_for(there, request.traffic.upper_rps), request.gpus)))


def _made_for(plan: Plan, rates_rps: Mapping[str, float]) -> Plan:
    """Return the plan with the rates that it is made for: those that the scheduler takes as agreed under overload."""
    models = [spec.model_copy(update={"rate_rps": rates_rps.get(spec.name, spec.rate_rps)}) for spec in plan.models]
    return plan.model_copy(update={"models": tuple(models)})


def _promised(plan: Plan, gpus: Sequence[Gpu]) -> Plan:
    """Return the plan with what it promises at the rates it is made for, after losses too, and what its GPUs cost."""
    used = plan.devices(gpulet.gpu for gpulet in plan.gpulets)
    totals = {"gpus_used": len(used), "cost_per_hour": cost_of(gpu for gpu in gpus if gpu.device in used)}
    return with_losses(plan.model_copy(update={"expected": expected_of(plan).model_copy(update=totals)}))


def _kept(request: PlanRequest, wanted: Mapping[str, int] | None) -> Proposal | None:
    """Return what runs, as it is asked for now, which has to gain nothing; None where it is as it was: without models
    that are no longer asked for, with the entries that operators have changed, or for the rates of now, where a model
    needs more than its plan allows it under overload and has it. No process is touched."""
    running, asked = request.running, {spec.name: spec for spec in request.workload.models}
    before, upper = {spec.name: spec for spec in running.models}, request.traffic.upper_rps
    gone = sorted(before.keys() - asked.keys())
    changed = sorted(name for name in before.keys() & asked.keys() if _terms(before[name]) != _terms(asked[name]))
    why = [f"{', '.join(gone)} is no longer asked for"] if gone else []
    why += [f"the entry of {', '.join(changed)} has changed"] if changed else []
    more = [spec.name for spec in running.models if upper.get(spec.name, 0.0) > BORROWS * spec.rate_rps]
    if more and not why and before.keys() == asked.keys() and not _missing(request, running):
        why = [f"it carries more than was planned of {', '.join(more)}"]
    plan = of_workload(running, request.workload)
    if not why or not plan.gpulets:
        return None
    return Proposal(_promised(_made_for(plan, upper), request.gpus), "kept", ChangeWorth(True, "; ".join(why)), wanted)


def _terms(spec: ModelSpec) -> tuple[float, float, int, float | None, bool]:
    """Return on what terms a model is served."""
    return spec.slo_ms, spec.weight, spec.priority, spec.share_pct, spec.shadow


def _prices(gpus: Sequence[Gpu]) -> dict[str, float]:
    """Return prices by type where there are several types to choose from; of one type a GPU is a GPU."""
    prices = {gpu.type: gpu.price_per_hour for gpu in gpus}
    return {kind: price for kind, price in prices.items() if price is not None} if len(prices) > 1 else {}


def _candidates(
    request: PlanRequest, profiles: Profiles
) -> tuple[Mapping[str, int] | None, list[tuple[str, Plan]], list[str]]:
    """Return the GPUs wanted by type, the candidates with how they came about, and what went wrong."""
    found: list[tuple[str, Plan]] = []
    faults: list[str] = []
    wanted: Counter[str] | None = None
    uncut = Cluster.of(request.gpus).uncut.gpus
    there = Counter(gpu.type for gpu in uncut)
    types = tuple(dict.fromkeys([*there, *request.types]))
    if not types:
        return None, [], ["no GPU is there"]
    anew: Plan | None = None
    try:
        anew = _anew(request, profiles, _cluster_of(request, types))
        used = anew.devices(gpulet.gpu for gpulet in anew.gpulets)
        wanted = Counter({gpu.device: _whole_type(gpu) for gpu in anew.gpus if gpu.device in used}.values())
    except InvalidInputError as error:
        faults.append(str(error))
    is_enough = wanted is not None and all(count <= there[kind] for kind, count in wanted.items())
    may_cut = any(gpu.mig == "managed" for gpu in uncut)
    try:
        if may_cut:
            chosen = _to_cut(request, wanted if wanted is not None and is_enough else there)
            found += [("cut anew", _cut_anew(request, profiles, devices)) for devices in chosen]
    except InvalidInputError as error:
        faults.append(str(error))
    try:
        if anew is None or not is_enough or may_cut:
            anew = _anew(request, profiles, Cluster.of(request.gpus).as_cut) if there else None
        if anew is not None:
            found.append(("planned anew", _fitted(anew, request)))
    except InvalidInputError as error:
        faults.append(str(error))
    if request.running.gpulets:
        try:
            running = raised(of_workload(request.running, request.workload), request.workload, profiles, request.gpus)
            if running.to_data() != request.running.to_data():
                found.append(("kept", running))
            found += [(how, plan) for how, plan in incremental(request, profiles, running) if plan is not None]
        except InvalidInputError as error:
            faults.append(str(error))
    return wanted, found, faults


def _whole_type(gpu: PlannedGpu) -> str:
    """Return the type of a GPU that plans may cut, also of an instance of it; any other's own."""
    mig = instance_type_of(gpu.type) if gpu.mig == "managed" else None
    return gpu.type if mig is None else mig.base


def _to_cut(request: PlanRequest, counts: Mapping[str, int]) -> list[frozenset[str]]:
    """Return so many of the GPUs that plans may cut, by type: those with most gpu-lets, of which some can stay; and
    those with fewest, where fewer have to end before others start."""
    held = Counter(gpu.device for gpu in request.running.gpus for _ in request.running.on_gpu(gpu.id))
    kinds = {gpu.device: gpu.type for gpu in Cluster.of(request.gpus).uncut.gpus if gpu.mig == "managed"}
    found = []
    for sign in (-1, 1):
        chosen: dict[str, list[str]] = defaultdict(list)
        for device in sorted(kinds, key=lambda device: sign * held[device]):
            if len(chosen[kinds[device]]) < counts.get(kinds[device], 0):
                chosen[kinds[device]].append(device)
        found.append(frozenset(device for devices in chosen.values() for device in devices))
    return list(dict.fromkeys(found))


def _cut_anew(request: PlanRequest, profiles: Profiles, chosen: Collection[str]) -> Plan:
    """Return the policy's plan with layouts of its own on some of the GPUs that it may cut, and on those that it may
    not. Instances that are there in both plans keep what they hold where they can."""
    plan = _anew(request, profiles, Cluster.of(g for g in request.gpus if g.mig != "managed" or g.device in chosen))
    devices = {gpu.device for gpu in plan.gpus}
    gpus = (*gpus_of(plan), *(gpu for gpu in request.gpus if gpu.device not in devices))
    return fitted(plan, request.running, gpus, keep_idle=not request.types, reserved=request.standby_ids)


def incremental(request: PlanRequest, profiles: Profiles, running: Plan) -> Iterator[tuple[str, Plan | None]]:
    """Yield the plans that leave what runs where it is, with how they came about; None where there is none such."""
    missing = _missing(request, running)
    if missing:
        upper = request.traffic.upper_rps
        short = {name: part * upper[name] for name, part in missing.items()}
        yield "extended", _extended(request, profiles, running, short)
    else:
        yield "trimmed", trimmed(request, running)
    if any(map(asks, request.workload.models)):
        kept = running.model_copy(update={"gpus": tuple(PlannedGpu.of(gpu) for gpu in request.gpus)})
        plan = _planned(request, profiles, request.workload, Cluster.of(request.gpus).as_cut, kept)
        yield "arranged", raised(plan, request.workload, profiles, request.gpus)


def _missing(request: PlanRequest, plan: Plan) -> dict[str, float]:
    """Return the models of which a plan promises too little, and which part of what they may lose is missing."""
    kept = Outlooks(request.slowdowns).kept(plan, request.traffic, request.attainment)
    return {name: 1.0 - part for name, part in kept.items() if 1.0 - part > SLIGHT}


def _anew(request: PlanRequest, profiles: Profiles, cluster: Cluster) -> Plan:
    """Return the policy's plan for everything.

    It is asked to plan for the whole burst of every model first, and again for the part that is left where its plan has
    models share gpu-lets, unless that plan would not carry it.
    """

    def planned(rates_rps: Mapping[str, float]) -> Plan:
        models = tuple(spec.model_copy(update={"rate_rps": rates_rps[spec.name]}) for spec in request.workload.models)
        workload = request.workload.model_copy(update={"models": models})
        plan = _planned(request, profiles, workload, cluster)
        return raised(plan, request.workload, profiles, (*request.gpus, *gpus_of(plan)))

    plan = planned(request.traffic.upper_rps)
    pooled = _pooled(plan, request.traffic)
    if pooled != request.traffic.upper_rps:
        smaller = planned(pooled)
        if not _missing(request, smaller).keys() - _missing(request, plan).keys():
            return smaller
    return plan


def _pooled(plan: Plan, traffic: Traffic) -> dict[str, float]:
    """Return the rate each model needs on its gpu-lets. Bursts of models that share them add up as independent ones do:
    of each is left sqrt(sum (c u)^2) / sum (c u), u the bursts and c what a request costs."""
    burst, found = traffic.burst_rps, traffic.upper_rps
    cost = {r.name: (r.latency_ms or 0.0) / r.batch_size for gpulet in plan.gpulets for r in gpulet.models}
    for together in connected_components([r.name for r in gpulet.models] for gpulet in plan.gpulets):
        weighted = [cost[name] * burst.get(name, 0.0) for name in together]
        left = math.hypot(*weighted) / sum(weighted) if sum(weighted) > 0.0 else 1.0
        found |= {name: traffic.mean_rps[name] + left * burst[name] for name in together & burst.keys()}
    return found


def _fitted(plan: Plan, request: PlanRequest) -> Plan:
    return fitted(plan, request.running, request.gpus, keep_idle=not request.types, reserved=request.standby_ids)


def _extended(request: PlanRequest, profiles: Profiles, running: Plan, missing_rps: Mapping[str, float]) -> Plan | None:
    """Return what runs, and beside it the policy's plan for what is missing: each of its gpu-lets where the least room
    is left, GPUs that are not in use last."""
    short = request.workload.model_copy(
        update={
            "models": tuple(
                spec.model_copy(update={"rate_rps": missing_rps[spec.name], **ANYWHERE})
                for spec in request.workload.models
                if spec.name in missing_rps
            ),
            "applications": (),
            "merge": "off",
        }
    )
    there = dict.fromkeys(gpu.type for gpu in request.gpus)
    specs = {spec.name: spec for spec in request.workload.models}
    more = _planned(request, profiles, short, _cluster_of(request, there))
    types = {gpu.id: gpu.type for gpu in more.gpus}
    held = {gpu.id: [g for g in running.gpulets if g.gpu == gpu.id] for gpu in request.gpus}
    names = {gpulet.id for gpulet in running.gpulets} | request.standby_ids
    new: list[Gpulet] = []
    for gpulet in sorted(more.gpulets, key=lambda g: (-g.effective_share_pct, g.id)):
        asked = [specs[replica.name] for replica in gpulet.models]
        room = [
            gpu
            for gpu in request.gpus
            if gpu.type == types[gpulet.gpu]
            and fits([*held[gpu.id], gpulet], gpu)
            and all(may_lie(spec, gpu) for spec in asked)
        ]
        if not room:
            continue
        gpu = max(
            room,
            key=lambda g: (
                sum(other.effective_share_pct for other in held[g.id]),
                sum(prefers(spec, g) for spec in asked),
            ),
        )
        placed = gpulet.model_copy(update={"id": fresh_id(gpu.id, names), "gpu": gpu.id})
        names.add(placed.id)
        held[gpu.id].append(placed)
        new.append(placed)
    if not new:
        return None
    gpus = tuple(PlannedGpu.of(gpu) for gpu in request.gpus if not request.types or held[gpu.id])
    plan = _with_gpulets(running, [*running.gpulets, *new]).model_copy(update={"gpus": gpus})
    return raised(plan, request.workload, profiles, request.gpus)


def trimmed(request: PlanRequest, running: Plan) -> Plan | None:
    """Return what runs without what is not needed: whole GPUs first, then single gpu-lets, the largest share first."""
    kept = {gpulet.id for part in _parts(running) for gpulet in _needed(request, part)}
    if len(kept) == len(running.gpulets):
        return None
    return _with_gpulets(running, [gpulet for gpulet in running.gpulets if gpulet.id in kept])


def _needed(request: PlanRequest, running: Plan) -> tuple[Gpulet, ...]:
    """Return the gpu-lets of a plan that are needed."""
    groups = [gpulets for gpulets in running.by_gpu().values() if gpulets]
    groups.sort(key=lambda gpulets: len({replica.name for gpulet in gpulets for replica in gpulet.models}))
    singles = sorted(running.gpulets, key=lambda gpulet: -gpulet.effective_share_pct)
    outlooks = Outlooks(request.slowdowns)

    def promised(plan: Plan) -> dict[str, float]:
        return outlooks.kept(plan, request.traffic, request.attainment)

    before, unmet_before = promised(running), _unmet(request, running)
    for group in [*groups, *([gpulet] for gpulet in singles)]:
        gone = {gpulet.id for gpulet in group}
        left = _with_gpulets(running, [gpulet for gpulet in running.gpulets if gpulet.id not in gone])
        if len(left.gpulets) < len(running.gpulets) and (
            all(part > before[name] - SLIGHT for name, part in promised(left).items())
            and _unmet(request, left) <= unmet_before
        ):
            running = left
    return running.gpulets


def _parts(plan: Plan) -> Iterator[Plan]:
    """Yield the parts of a plan that have neither models nor GPUs in common: what one needs is no matter of another."""
    held = [(gpulet, [(gpulet.gpu,), *(replica.name for replica in gpulet.models)]) for gpulet in plan.gpulets]
    together = connected_components(members for _, members in held)
    part_of = {member: index for index, each in enumerate(together) for member in each}
    gpulets: dict[int, list[Gpulet]] = defaultdict(list)
    for gpulet, members in held:
        gpulets[part_of[members[0]]].append(gpulet)
    for index, own in gpulets.items():
        models = tuple(spec for spec in plan.models if spec.name in together[index])
        yield plan.model_copy(update={"gpulets": tuple(own), "models": models})


def of_workload(running: Plan, workload: Workload) -> Plan:
    """Return what runs with the workload's entries in place of its own; models that left are gone from its gpu-lets."""
    wanted = {spec.name for spec in workload.models}
    left = []
    for gpulet in running.gpulets:
        models = tuple(replica for replica in gpulet.models if replica.name in wanted)
        merge = tuple(group for group in gpulet.merge if wanted.issuperset(group.models))
        if models:
            left.append(gpulet.model_copy(update={"models": models, "merge": merge}))
    return _with_gpulets(running.model_copy(update={"models": workload.models}), left)


def without_others(plan: Plan, workload: Workload) -> Plan:
    """Return a plan without the models that a workload does not have, with requests split as that says."""
    asked = {spec.name: spec for spec in workload.models}
    models = tuple(
        spec.model_copy(update={"share_pct": asked[spec.name].share_pct, "shadow": asked[spec.name].shadow})
        for spec in plan.models
        if spec.name in asked
    )
    if models == plan.models:
        return plan
    return of_workload(plan, plan.workload.model_copy(update={"models": models}))


def _with_gpulets(plan: Plan, gpulets: Sequence[Gpulet]) -> Plan:
    held = {replica.name for gpulet in gpulets for replica in gpulet.models}
    unserved = tuple(spec.name for spec in plan.models if spec.name not in held)
    reasons = dict.fromkeys(unserved, "no room was found for it")
    return plan.model_copy(update={"gpulets": tuple(gpulets), "unserved": unserved, "unserved_reasons": reasons})


def _planned(
    request: PlanRequest, profiles: Profiles, workload: Workload, cluster: Cluster, kept: Plan | None = None
) -> Plan:
    """Return the policy's plan, or `kept` with replicas added until it serves all and models lie as they ask, made from
    what batches really take, with the latencies of the profiles in it.

    What a batch takes over its profile is a fact of its own, which holds for old and new plans alike; a plan that had
    it in its latencies would have it counted twice.
    """
    slow = {name: factor for name, factor in request.slowdowns.items() if factor != 1.0}
    asked, known = _slowed(workload, profiles, cluster, slow) if slow else (workload, profiles)
    policy = load_policy(request.policy.name, request.policy.options)
    if not cluster.elastic:
        asked = bearable(asked, cluster.gpus)
    if kept is None:
        plan = solve(policy, asked, cluster, known)
    else:
        bare = of_workload(kept, asked).model_copy(update={"expected": Expected(), "notes": ()})
        plan = complete(
            bare,
            policy,
            asked.model_copy(update={"merge": "off"}),
            cluster,
            known,
            parts={spec.name: 1.0 for spec in asked.models},
        )
    plan = with_the_rest(plan, workload)
    if not slow:
        return plan
    gpulets = []
    for gpulet in plan.gpulets:
        models = []
        for replica in gpulet.models:
            factor = 1.0 / slow.get(replica.name, 1.0)
            latency = replica.latency.scaled(factor) if replica.latency is not None else None
            whole_ms = replica.latency_ms * factor if replica.latency_ms is not None else None
            models.append(replica.model_copy(update={"latency": latency, "latency_ms": whole_ms}))
        gpulets.append(gpulet.model_copy(update={"models": tuple(models)}))
    return plan.model_copy(update={"gpulets": tuple(gpulets), "models": workload.models})


def _slowed(
    workload: Workload, profiles: Profiles, cluster: Cluster, slow: Mapping[str, float]
) -> tuple[Workload, Profiles]:
    """Return the workload with rows of their own for models that are slower or faster than profiled, and these rows."""
    specs = []
    rows: dict[str, dict[str, ModelProfile]] = {kind: {} for kind in cluster.gpu_types}
    for spec in workload.models:
        factor = slow.get(spec.name)
        if factor is None:
            specs.append(spec)
            continue
        if spec.latency is not None:
            specs.append(spec.model_copy(update={"latency": spec.latency.scaled(factor)}))
            continue
        row = f"{spec.name} x {factor:g}"
        for kind in cluster.gpu_types:
            measured = profiles.for_type(kind).get(spec.profile_row)
            if measured is not None:
                rows[kind][row] = measured.scaled(factor)
        specs.append(spec.model_copy(update={"profile": row}))
    measured_here = [
        Profile(name="measured while serving", gpu_type=kind, source="this cluster", models=models)
        for kind, models in rows.items()
        if models
    ]
    return workload.model_copy(update={"models": tuple(specs)}), Profiles([*measured_here, *profiles])


def _cluster_of(request: PlanRequest, types: Iterable[str]) -> Cluster:
    """Return a cluster of as many GPUs of these types as it takes."""
    known = {gpu.type: gpu for gpu in (*request.gpus, *Cluster.of(request.gpus).uncut.gpus)}
    groups = []
    for kind in types:
        gpu = known.get(kind)
        memory, price = (gpu.memory_mib, gpu.price_per_hour) if gpu is not None else (None, None)
        mig = gpu.mig if gpu is not None and gpu.mig == "managed" and gpu.instance is None else None
        groups.append(GpuGroup(type=kind, memory_mib=memory, price_per_hour=price, mig=mig))
    return Cluster(nodes=(Node(name="n", gpus=tuple(groups)),), elastic=True)
