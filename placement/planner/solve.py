"""The entrance of the planner: a task goes in, a completed and checked plan with its reasons comes out."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import zip_longest

from tenuto.errors import InvalidInputError
from tenuto.placement.application import online
from tenuto.placement.cluster import Cluster, Gpu
from tenuto.placement.deadline_split import candidate_splits, least_price
from tenuto.placement.expectation.outlook import Traffic
from tenuto.placement.placement_constraints import bearable, domain_of, without
from tenuto.placement.plan import Plan, PlannedGpu, PolicyUsed
from tenuto.placement.plan_edits import drained, with_the_rest
from tenuto.placement.planner.fault_tolerance import Trial
from tenuto.placement.planner.gpu_matching import gpus_of
from tenuto.placement.planner.minimal_change import plan_from_what_runs, plan_with_fewest_changes
from tenuto.placement.planner.mixed_workloads import plan_anew
from tenuto.placement.planner.plan_order import PlanRank
from tenuto.placement.planner.task import PlanTask, RunningPlan
from tenuto.placement.policy import Policy, load_policy
from tenuto.placement.workload import Workload, own_demands
from tenuto.profiles import Profiles


def make_plan(task: PlanTask) -> Plan:
    """Return the completed and checked plan of the task's policy: from nothing, or near the running plan.

    When no GPU of the cluster can serve a model, the model is unserved with the reason, and the others are planned.
    Deadlines of applications are split so that the models take the least GPU time (`tenuto.placement.deadline_split`).
    The policy plans for other splits, too, where that may serve more or cost less, unless it chooses among them itself.

    Raises:
        InvalidInputError: the inputs contradict each other, the plan breaks a rule, or what runs needs more changes
            than it may; it lists all problems.
    """
    if not task.workload.applications:
        if task.running is None:
            return plan_anew(task)
        plan, tried = plan_from_what_runs(task)
        return plan or plan_with_fewest_changes(task, plan_anew(task), tried)
    splits = candidate_splits(task.workload, task.cluster, task.profiles)
    is_fixed_cost = all(spec.generates is None for spec in task.workload.models)
    if task.policy.abilities.splits_deadlines and is_fixed_cost:
        splits = iter([task.workload])
    task = replace(task, workload=next(splits))
    best = plan_anew(task)
    if task.running is not None:
        return plan_with_fewest_changes(replace(task, workload=task.workload.with_budgets(best.applications)), best)
    cluster = task.cluster
    least = least_price(task.workload, cluster, task.profiles) if cluster.elastic else math.inf
    for workload in splits:
        is_best = not best.unserved_reasons and best.expected.price <= least
        if is_best or task.policy.watch.is_stopped():
            break
        best = min(best, plan_anew(replace(task, workload=workload)), key=_rank)
    return best


def _rank(plan: Plan) -> PlanRank:
    """Return the place of a plan among those for other splits or on other GPUs. Of an application, as many requests
    are in time as the stage that is served worst allows."""
    promised = plan.expected.models
    parts = {s.name: promised[s.name].goodput_rps / s.rate_rps if s.name in promised else 0.0 for s in plan.models}
    lacking_rps = sum(s.rate_rps * (1.0 - parts[s.name]) for s in own_demands(plan.models, plan.applications))
    for app in online(plan.applications):
        lacking_rps += app.rate_rps * (1.0 - min(parts[app.model_name(stage)] for stage in app.stages))
    return PlanRank(misses_attainment=bool(plan.unserved_reasons), lacking_rps=lacking_rps, price=plan.expected.price)


def solve(
    policy: Policy, workload: Workload, cluster: Cluster, profiles: Profiles, *, trial: Trial | None = None
) -> Plan:
    """Return the plan of a policy for a workload on a cluster: `make_plan` of a task with these values.

    Raises:
        InvalidInputError: the inputs contradict each other, or the plan breaks a rule; it lists all problems.
    """
    return make_plan(PlanTask(policy, workload, cluster, profiles, trial))


def enough_for_all(task: PlanTask) -> Plan:
    """Return the plan of a policy on as many GPUs of the cluster's types as it takes.

    When this plan does not serve a model as asked, the reason is not a lack of GPUs; the plan gives the reason.

    Raises:
        InvalidInputError: the policy does not plan on elastic clusters.
    """
    return make_plan(task.on(task.cluster.model_copy(update={"elastic": True})))


def plan_on_fewest(task: PlanTask, first: Collection[str] | None = None) -> Plan:
    """Return a plan that serves every model as asked on as few GPUs of a fixed cluster as this search finds.

    The search begins with the GPUs `first`, by default with all. While these are too few, it adds twice as many of each
    of their types as before, or all when some stayed idle. Then it leaves out half of what may be too many, and ever
    fewer, the dearest type first. When not even all GPUs serve every model as asked, it is the best plan of these.

    Raises:
        InvalidInputError: `make_plan` raised it for all GPUs.
    """
    cluster, prices, more = task.cluster, task.cluster.prices, 1
    gpus = in_turns(cluster.gpus, task.workload)
    tried = [gpu for gpu in gpus if first is None or gpu.id in first]
    best = plan = _plan_on(task, tried)
    too_few = 0 if first is None else len(tried)
    while plan is None or (plan.unserved_reasons and not task.policy.watch.is_stopped()):
        rest = [gpu for gpu in gpus if gpu not in tried]
        if not rest:
            break
        types, too_few = {gpu.type for gpu in rest} & {gpu.type for gpu in tried} or {rest[0].type}, len(tried)
        if plan is not None and len(_held(plan)) < len({gpu.device for gpu in tried}):
            types, more = {gpu.type for gpu in rest}, len(rest)
        tried += [gpu for kind in types for gpu in [each for each in rest if each.type == kind][:more]]
        plan, more = _plan_on(task, tried), 2 * more
        best = min((each for each in (best, plan) if each is not None), key=_rank, default=None)
    best = best or make_plan(task)
    step = (len(tried) - too_few) // 2
    while step and not best.unserved_reasons and not task.policy.watch.is_stopped():
        held = _held(best)
        used = [gpu for gpu in gpus if gpu.device in held]
        for kind in sorted(prices, key=lambda kind: (-prices[kind], kind)):
            of_type = [gpu for gpu in used if gpu.type == kind]
            if step <= len(of_type) and step < len(used):
                fewer = _plan_on(task, [gpu for gpu in used if gpu not in of_type[-step:]])
                if fewer is not None and not fewer.unserved_reasons:
                    best = fewer
                    break
        else:
            step //= 2
    uncut = cluster.cut_as(best.gpus)
    return best.model_copy(update={"gpus": tuple(PlannedGpu.of(gpu) for gpu in uncut.gpus)})


def in_turns(gpus: Sequence[Gpu], workload: Workload) -> Sequence[Gpu]:
    """Return GPUs so that the first ones lie apart, as models ask to be spread over nodes or racks."""
    kinds = {spec.spread for spec in workload.models}
    kind = "rack" if "rack" in kinds else "node" if "node" in kinds else None
    if kind is None:
        return gpus
    together: dict[str, list[Gpu]] = defaultdict(list)
    for gpu in gpus:
        together[domain_of(gpu, kind)].append(gpu)
    return [gpu for row in zip_longest(*together.values()) for gpu in row if gpu is not None]


def _plan_on(task: PlanTask, gpus: Collection[Gpu]) -> Plan | None:
    """Return the plan on some GPUs of a task's cluster; None where models cannot lie as they ask on so few."""
    try:
        return make_plan(_on_only(task, gpus))
    except InvalidInputError:
        if len(gpus) == len(task.cluster.gpus):
            raise
        return None


def _held(plan: Plan) -> set[str]:
    return {*plan.devices(plan.used_gpus)}


def _on_only(task: PlanTask, gpus: Collection[Gpu]) -> PlanTask:
    """Return the task with all other GPUs of its cluster left out."""
    ids, cluster = {gpu.id for gpu in gpus}, task.cluster
    left_out = (*(gpu.id for gpu in cluster.gpus if gpu.id not in ids), *(cluster.left_out or ()))
    return task.on(cluster.model_copy(update={"left_out": left_out}))


def plan_without_places(
    running: Plan,
    places: Sequence[str],
    profiles: Profiles,
    gpus: Sequence[Gpu] = (),
    *,
    lost: Sequence[str] = (),
    used: PolicyUsed | None = None,
) -> Plan:
    """Return the plan near the running one that leaves some nodes, racks or GPUs empty, and all else in place. It keeps
    what every model is promised as far as there is room. When a place is no longer drained, it also promises what the
    policy would.

    Args:
        running: the running plan.
        places: to leave empty.
        profiles: what the models cost.
        gpus: the cluster's, beside those of the plan.
        lost: GPUs that are not present either.
        used: the policy; default: the plan's.

    Raises:
        InvalidInputError: there is no such place, or no GPU would be left.
    """
    whole = Cluster.of({gpu.id: gpu for gpu in (*gpus_of(running), *gpus)}.values()).as_cut
    left, used = without(whole, (*places, *lost)), used or running.policy
    workload = bearable(running.workload, left.gpus)
    undrained, traffic = set(running.drained) - set(places), Traffic.declared(workload.models)
    runs = RunningPlan(running, traffic, promises="larger" if undrained else "running")
    plan = make_plan(PlanTask(load_policy(used.name, used.options), workload, left, profiles, running=runs))
    return drained(with_the_rest(plan, running.workload), whole, places)
