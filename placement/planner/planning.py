"""Finds what to change the plan to: candidates from a policy, fitted to the running plan, and the one that pays best.

*Incremental* candidates come first: what is placed stays, and the policy adds what is missing (`extended`), or needless
gpu-lets go (`trimmed`). Beside them stands the policy's plan for everything (`planned anew`), which has to pay for what
it moves. On GPUs that plans may cut into MIG instances there is also a plan with other layouts (`cut anew`), which has
to pay for the cutting, too. These are pure functions; the live controller calls them in a process of its own, with a
time limit.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from tenuto.errors import InvalidInputError
from tenuto.placement import Cluster, Gpulet, Plan, Workload
from tenuto.placement.cluster import Gpu, GpuGroup, Node
from tenuto.placement.components import connected_components
from tenuto.placement.expectation.outlook import Outlooks, Traffic, expected_of
from tenuto.placement.generation_capacity import in_proportion
from tenuto.placement.placement_constraints import ANYWHERE, is_at, may_lie, prefers
from tenuto.placement.plan import Expected, PlannedGpu
from tenuto.placement.planner.batch_growth import enlarge_batches
from tenuto.placement.planner.change_cost import ChangeWorth, Rent, Scale
from tenuto.placement.planner.change_stages import fits, made_anew
from tenuto.placement.planner.completion import complete, usage_of
from tenuto.placement.planner.fault_tolerance import asks, bearable, drained, unmet, with_losses, with_the_rest
from tenuto.placement.planner.gpu_matching import fresh_id, gpus_of, match_to_running
from tenuto.placement.planner.solve import make_plan
from tenuto.placement.planner.standby import Standby, standbys, twins
from tenuto.placement.planner.task import PlanRequest, PlanTask
from tenuto.placement.policy import load_policy
from tenuto.placement.workload import ModelSpec
from tenuto.profiles import ModelProfile, Profile, Profiles

SLIGHT = 1e-3  # derived: of attainment; ten times `expectation.outlook.NOTHING`, the noise of promises
BORROWS = 1.1  # derived from `batching.core.deferred.allowance.MARGIN`: beyond it a model exceeds its planned rate


@dataclass(frozen=True)
class Proposal:
    """The best candidate, how it was made and what it is worth. `plan` None: none was found, as `worth` says.

    `wanted` is how many GPUs of each type would carry everything; None: the policy could not tell. `standby` are idle
    processes for the plan that then runs.
    """

    plan: Plan | None
    how: str
    worth: ChangeWorth
    wanted: Mapping[str, int] | None = None
    standby: tuple[Standby, ...] = ()


def propose(request: PlanRequest, profiles: Profiles) -> Proposal:
    """Return the candidate that pays best, or else the one that comes nearest to paying; and the standby processes for
    the plan that then runs."""
    running, places = request.running, request.running.drained
    aside = [gpu for gpu in request.gpus if is_at(gpu, places)]
    if places:  # what is still in drained places has to go
        gpus = {gpu.id: gpu for gpu in request.gpus if gpu not in aside}
        running = running.model_copy(update={"gpulets": tuple(g for g in running.gpulets if gpus.keys() >= {*g.gpus})})
        request = replace(request, gpus=tuple(gpus.values()), running=running)
    only = Proposal(None, "", ChangeWorth(False, "only standby processes were wanted"))
    found = only if request.only_standby else _proposed(request, profiles)
    if found.plan is not None:
        found = replace(found, plan=drained(found.plan, Cluster.of(aside), places))
    plan = found.plan if found.plan is not None and found.worth.pays else request.running
    waiting = twins(plan, request.standby_gpus, request.gpus, request.running)
    if request.standby_pct is not None:
        waiting += standbys(plan, request.standby_pct, profiles, request.gpus, request.running)
    return replace(found, standby=waiting)


def _proposed(request: PlanRequest, profiles: Profiles) -> Proposal:
    scale = Scale(request, Rent(bool(request.types), _prices(request.gpus)))
    wanted, found, faults = _candidates(request, profiles)
    best: tuple[tuple[float, ...], Proposal] | None = None
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
    """Return how many models do not lie as they ask, as far as the present GPUs allow it."""
    if not any(map(asks, request.workload.models)):
        return 0
    there = of_workload(plan, bearable(request.workload, request.gpus))
    return len(unmet(_promised(_made_for(there, request.traffic.upper_rps), request.gpus)))


def _made_for(plan: Plan, rates_rps: Mapping[str, float]) -> Plan:
    """Return the plan made for these rates, which the scheduler grants under overload."""
    models = [spec.model_copy(update={"rate_rps": rates_rps.get(spec.name, spec.rate_rps)}) for spec in plan.models]
    return plan.model_copy(update={"models": tuple(models)})


def _promised(plan: Plan, gpus: Sequence[Gpu]) -> Plan:
    """Return the plan with what it promises at its rates, after losses too, and the cost of its GPUs."""
    expected = expected_of(plan).model_copy(update=usage_of(plan, Cluster.of(gpus)))
    return with_losses(plan.model_copy(update={"expected": expected}))


def _kept(request: PlanRequest, wanted: Mapping[str, int] | None) -> Proposal | None:
    """Return the running plan with what is declared now; it need not gain anything, as no process is touched.

    None when nothing differs: no model was removed, no operator changed an entry, and no model needs more than the
    scheduler grants it under overload while the plan carries it.
    """
    running, asked = request.running, {spec.name: spec for spec in request.workload.models}
    before, upper = {spec.name: spec for spec in running.models}, request.traffic.upper_rps
    gone = sorted(before.keys() - asked.keys())
    changed = sorted(name for name in before.keys() & asked.keys() if _terms(before[name]) != _terms(asked[name]))
    why = [f"{', '.join(gone)} left the workload"] if gone else []
    why += [f"the entry of {', '.join(changed)} has changed"] if changed else []
    more = [spec.name for spec in running.models if upper.get(spec.name, 0.0) > BORROWS * spec.rate_rps]
    if more and not why and before.keys() == asked.keys() and not _missing(request, running):
        why = [f"the running plan carries more of {', '.join(more)} than it was made for"]
    plan = of_workload(running, request.workload)
    if not why or not plan.gpulets:
        return None
    return Proposal(_promised(_made_for(plan, upper), request.gpus), "kept", ChangeWorth(True, "; ".join(why)), wanted)


def _terms(spec: ModelSpec) -> tuple[object, ...]:
    """Return the terms on which a model is served, and what is served."""
    terms = (spec.slo_ms, spec.slo, spec.weight, spec.priority, spec.share_pct, spec.shadow)
    return (*terms, spec.source, spec.weights_path, spec.options)


def _prices(gpus: Sequence[Gpu]) -> dict[str, float]:
    """Return prices by type when there are several types; GPUs of one type cost the same."""
    prices = {gpu.type: gpu.price_per_hour for gpu in gpus}
    return {kind: price for kind, price in prices.items() if price is not None} if len(prices) > 1 else {}


def _candidates(
    request: PlanRequest, profiles: Profiles
) -> tuple[Mapping[str, int] | None, list[tuple[str, Plan]], list[str]]:
    """Return the GPUs wanted by type, the candidates with how they were made, and what went wrong."""
    found: list[tuple[str, Plan]] = []
    faults: list[str] = []
    wanted: Counter[str] | None = None
    uncut = Cluster.of(request.gpus).uncut.gpus
    there = Counter(gpu.type for gpu in uncut)
    types = tuple(dict.fromkeys([*there, *request.types]))
    if not types:
        return None, [], ["no GPU is present"]
    anew: Plan | None = None
    try:
        anew = _anew(request, profiles, _cluster_of(request, types))
        used = anew.devices(anew.used_gpus)
        wanted = Counter(
            {
                gpu.device: gpu.whole_type if gpu.mig == "managed" else gpu.type
                for gpu in anew.gpus
                if gpu.device in used
            }.values()
        )
    except InvalidInputError as error:
        faults.append(str(error))
    is_enough = wanted is not None and all(count <= there[kind] for kind, count in wanted.items())
    may_cut = any(gpu.mig == "managed" for gpu in uncut)
    try:
        if may_cut:
            chosen = _to_cut(request, wanted if wanted is not None and is_enough else there)
            for plan in (_cut_anew(request, profiles, devices) for devices in chosen):
                found.append(("cut anew" if made_anew(request.running, plan) else "planned anew", plan))
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
            running = enlarge_batches(
                of_workload(request.running, request.workload), request.workload, profiles, request.gpus
            )
            if running.to_data() != request.running.to_data():
                found.append(("kept", running))
            found += [(how, plan) for how, plan in incremental(request, profiles, running) if plan is not None]
        except InvalidInputError as error:
            faults.append(str(error))
    return wanted, found, faults


def _to_cut(request: PlanRequest, counts: Mapping[str, int]) -> list[frozenset[str]]:
    """Return sets of so many GPUs to cut, by type: those with most gpu-lets, of which some can stay, and those with
    fewest, where fewer must end first."""
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
    """Return the policy's plan with its own layouts on some of the GPUs that it may cut, and on those that it may not.
    Instances in both plans keep their gpu-lets where they can."""
    plan = _anew(request, profiles, Cluster.of(g for g in request.gpus if g.mig != "managed" or g.device in chosen))
    devices = {gpu.device for gpu in plan.gpus}
    gpus = (*gpus_of(plan), *(gpu for gpu in request.gpus if gpu.device not in devices))
    return match_to_running(plan, request.running, gpus, keep_idle=not request.types, reserved=request.standby_ids)


def incremental(request: PlanRequest, profiles: Profiles, running: Plan) -> Iterator[tuple[str, Plan | None]]:
    """Yield the plans that leave running gpu-lets where they are, with how they were made; None when there is none."""
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
        yield "arranged", enlarge_batches(plan, request.workload, profiles, request.gpus)


def _missing(request: PlanRequest, plan: Plan) -> dict[str, float]:
    """Return the models of which a plan promises too little, with the missing part."""
    kept = Outlooks(request.slowdowns).kept(plan, request.traffic, request.attainment)
    return {name: 1.0 - part for name, part in kept.items() if 1.0 - part > SLIGHT}


def _anew(request: PlanRequest, profiles: Profiles, cluster: Cluster) -> Plan:
    """Return the policy's plan for everything.

    The first attempt plans for every model's whole burst. The second plans for less where models share gpu-lets in the
    first, unless that plan would not carry the traffic.
    """

    def planned(rates_rps: Mapping[str, float]) -> Plan:
        models = tuple(spec.model_copy(update={"rate_rps": rates_rps[spec.name]}) for spec in request.workload.models)
        workload = request.workload.model_copy(update={"models": models})
        plan = _planned(request, profiles, workload, cluster)
        return enlarge_batches(plan, request.workload, profiles, (*request.gpus, *gpus_of(plan)))

    plan = planned(request.traffic.upper_rps)
    pooled = _pooled(plan, request.traffic)
    if pooled != request.traffic.upper_rps:
        smaller = planned(pooled)
        if not _missing(request, smaller).keys() - _missing(request, plan).keys():
            return smaller
    return plan


def _pooled(plan: Plan, traffic: Traffic) -> dict[str, float]:
    """Return the rate each model needs on its gpu-lets. Independent bursts of models that share them partly cancel: of
    each burst remains sqrt(sum (c u)^2) / sum (c u), with u the bursts and c the cost of a request."""
    burst, found = traffic.burst_rps, traffic.upper_rps
    cost = {r.name: (r.latency_ms or 0.0) / r.batch_size for gpulet in plan.gpulets for r in gpulet.models}
    for together in connected_components([r.name for r in gpulet.models] for gpulet in plan.gpulets):
        weighted = [cost[name] * burst.get(name, 0.0) for name in together]
        left = math.hypot(*weighted) / sum(weighted) if sum(weighted) > 0.0 else 1.0
        found |= {name: traffic.mean_rps[name] + left * burst[name] for name in together & burst.keys()}
    return found


def _fitted(plan: Plan, request: PlanRequest) -> Plan:
    return match_to_running(
        plan, request.running, request.gpus, keep_idle=not request.types, reserved=request.standby_ids
    )


def _extended(request: PlanRequest, profiles: Profiles, running: Plan, missing_rps: Mapping[str, float]) -> Plan | None:
    """Return the running plan, and beside it the policy's plan for what is missing. Each new gpu-let goes where least
    room is left, on unused GPUs last."""
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
    bought = {gpu.id: gpu for gpu in gpus_of(more)}
    held = {gpu.id: [*running.on_gpu(gpu.id)] for gpu in request.gpus}
    names = {gpulet.id for gpulet in running.gpulets} | request.standby_ids
    new: list[Gpulet] = []
    alone = (gpulet for gpulet in more.gpulets if not gpulet.also_on)  # several GPUs of a node are planned anew
    for whole in sorted(alone, key=lambda g: (-g.effective_share_pct, g.id)):
        gpulet = in_proportion(whole, bought[whole.gpu], profiles)
        asked = [specs[replica.name] for replica in gpulet.models]
        room = [
            gpu
            for gpu in request.gpus
            if gpu.type == bought[gpulet.gpu].type
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
        held[gpu.id].append(placed)
        new.append(placed)
    if not new:
        return None
    gpus = tuple(PlannedGpu.of(gpu) for gpu in request.gpus if not request.types or held[gpu.id])
    plan = _with_gpulets(running, [*running.gpulets, *new]).model_copy(update={"gpus": gpus})
    return enlarge_batches(plan, request.workload, profiles, request.gpus)


def trimmed(request: PlanRequest, running: Plan) -> Plan | None:
    """Return the running plan without what it does not need: whole GPUs go first, then gpu-lets, the largest share
    first."""
    kept = {gpulet.id for part in _parts(running) for gpulet in _needed(request, part)}
    if len(kept) == len(running.gpulets):
        return None
    return _with_gpulets(running, [gpulet for gpulet in running.gpulets if gpulet.id in kept])


def _needed(request: PlanRequest, running: Plan) -> tuple[Gpulet, ...]:
    """Return the gpu-lets that a plan needs."""
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
    """Yield the parts of a plan that share neither models nor GPUs; they can be judged one by one."""
    held = [(g, [*((gpu,) for gpu in g.gpus), *(replica.name for replica in g.models)]) for g in plan.gpulets]
    together = connected_components(members for _, members in held)
    part_of = {member: index for index, each in enumerate(together) for member in each}
    gpulets: dict[int, list[Gpulet]] = defaultdict(list)
    for gpulet, members in held:
        gpulets[part_of[members[0]]].append(gpulet)
    for index, own in gpulets.items():
        models = tuple(spec for spec in plan.models if spec.name in together[index])
        yield plan.model_copy(update={"gpulets": tuple(own), "models": models})


def of_workload(running: Plan, workload: Workload) -> Plan:
    """Return the running plan with the workload's entries; models that left are gone from its gpu-lets."""
    wanted = {spec.name for spec in workload.models}
    left = [kept for gpulet in running.gpulets if (kept := gpulet.only(wanted)) is not None]
    return _with_gpulets(running.model_copy(update={"models": workload.models}), left)


def without_others(plan: Plan, workload: Workload) -> Plan:
    """Return a plan without models outside the workload, with requests split as the workload says."""
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
    """Return the policy's plan, or `kept` with replicas added until it serves all and models lie as they ask.

    It is made from what batches really take, and holds the profiles' latencies. Slowdowns apply to old and new plans
    alike; with them in its latencies a plan would count them twice.
    """
    slow = {name: factor for name, factor in request.slowdowns.items() if factor != 1.0}
    asked, known = _slowed(workload, profiles, cluster, slow) if slow else (workload, profiles)
    policy = load_policy(request.policy.name, request.policy.options)
    if not cluster.elastic:
        asked = bearable(asked, cluster.gpus)
    task = PlanTask(policy, asked, cluster, known)
    if kept is None:
        plan = make_plan(task)
    else:
        bare = of_workload(kept, asked).model_copy(update={"expected": Expected(), "notes": ()})
        unmerged = replace(task, workload=asked.model_copy(update={"merge": "off"}))
        plan = complete(bare, unmerged, parts={spec.name: 1.0 for spec in asked.models})
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
    """Return the workload with profile rows of its own for models slower or faster than profiled, and these rows."""
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
    """Return a cluster with as many GPUs of these types as the plan takes."""
    known = {gpu.type: gpu for gpu in (*request.gpus, *Cluster.of(request.gpus).uncut.gpus)}
    groups = []
    for kind in types:
        gpu = known.get(kind)
        memory, price = (gpu.memory_mib, gpu.price_per_hour) if gpu is not None else (None, None)
        mig = gpu.mig if gpu is not None and gpu.mig == "managed" and gpu.instance is None else None
        groups.append(GpuGroup(type=kind, memory_mib=memory, price_per_hour=price, mig=mig))
    return Cluster(nodes=(Node(name="n", gpus=tuple(groups)),), elastic=True)
