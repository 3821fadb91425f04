"""Plans everything from nothing: models that generate beside models of fixed cost, on GPUs apart or on the same."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import replace

from tenuto.errors import Problem, raise_if_any
from tenuto.placement.cluster import Cluster, Gpu
from tenuto.placement.components import connected_components
from tenuto.placement.costs import costs_of
from tenuto.placement.expectation.outlook import alike_key, expected_of
from tenuto.placement.expectation.sharing import Sharing
from tenuto.placement.generation_capacity import (
    Costs,
    GeneratingPlan,
    generating_problems,
    shares_of,
    too_long,
    with_lengths,
)
from tenuto.placement.ledger import with_caps
from tenuto.placement.placement_constraints import ANYWHERE, asks
from tenuto.placement.plan import Believed, ExpectedModel, Plan, PlannedGpu
from tenuto.placement.planner.completion import ATTAINED, check_plan, policy_used, usage_of, with_losses_said
from tenuto.placement.planner.fixed_cost import check_inputs, nothing_on, plan_fixed_cost
from tenuto.placement.planner.generation_packing import Means, buy_generating, by_gpu_type, place_generating
from tenuto.placement.planner.gpu_slices import ColocationSearch, SlicedCluster
from tenuto.placement.planner.replica_placement import PlacementContext, arranged
from tenuto.placement.planner.task import PlanTask
from tenuto.placement.policies.shared.gpu_pool import GpuPool
from tenuto.placement.policies.shared.hosting import gpulet_id
from tenuto.placement.policy import Policy
from tenuto.profiles import Profiles
from tenuto.profiles.mig_instances import instance_type_of

_COLOCATIONS = 5  # limit: layouts of both kinds that are planned; each takes as long as a plan of the others
_OTHERS_WEIGH = 1.25  # fitted on five random workloads: what closed forms give others over what trials do
_REWEIGH = 1.3  # fitted: by how much more the kind that falls behind must carry in the next layout
_FEWER = "both kinds together take fewer GPUs than apart"


def plan_anew(task: PlanTask) -> Plan:
    """Return the completed and checked plan of the task's policy from nothing, whatever runs.

    Models that generate get GPUs of their own, and the policy plans all others on the rest; where that does not serve
    all, both kinds share GPUs if the model served worst gets more of its rate by it. On an elastic cluster both kinds
    are bought apart, and together where that is cheaper and serves all. Where models are to lie, and what is to
    survive, is arranged at the end, for both kinds at once.

    Raises:
        InvalidInputError: the inputs contradict each other, or the plan breaks a rule; it lists all problems.
    """
    policy, workload, cluster, profiles = task.policy, task.workload, task.cluster, task.profiles
    if all(spec.generates is None for spec in workload.models):
        return plan_fixed_cost(task)
    check_inputs(workload, cluster, profiles)
    mixed = _MixedWorkload(task)
    _raise_if_unable(mixed, policy)
    if policy.abilities.generation == "alone":
        plan = mixed.by_policy_alone()
    else:
        plan = mixed.bought() if cluster.elastic else mixed.on(cluster)
    known = {spec.name: spec for spec in mixed.generating}
    models = tuple(known.get(spec.name, spec) for spec in workload.models)
    if any(asks(spec) or spec.prefer is not None for spec in models):
        sharing = Sharing(costs_of(workload, cluster, profiles), profiles, plan.streaming)
        scene = PlacementContext(
            workload.model_copy(update={"models": models}), cluster, sharing, task.trial, policy.carries
        )
        plan = _arranged(plan, scene).model_copy(update={"models": workload.models})
    plan = _with_assumptions(plan, profiles)
    check_plan(plan, cluster)
    return plan


def _raise_if_unable(mixed: _MixedWorkload, policy: Policy) -> None:
    """Raise `InvalidInputError` when a policy cannot plan the models that generate, or nobody can."""
    cluster, problems = (
        mixed.task.cluster,
        generating_problems(mixed.generating, mixed.task.cluster, mixed.task.profiles),
    )
    generation = policy.abilities.generation
    if generation == "none":
        rule, cure = "this policy does not plan models that generate", "Use --policy tenuto."
        problems = [Problem(f"models.{spec.name}.generates", spec.name, rule, cure) for spec in mixed.generating]
    elif generation == "alone" and (mixed.others.models or cluster.elastic):
        rule = "this policy plans only models that generate, on a fixed cluster"
        problems.append(Problem("--policy", policy.name, rule, "Use --policy tenuto."))
    raise_if_any(problems)


class _MixedWorkload:
    """Plans models that generate beside all others, which are without wishes for their places."""

    def __init__(self, task: PlanTask) -> None:
        models, policy = task.workload.models, task.policy
        others = tuple(spec.model_copy(update=ANYWHERE) for spec in models if spec.generates is None)
        self.generating = tuple(with_lengths(spec) for spec in models if spec.generates is not None)
        self.others = task.workload.model_copy(update={"models": others})
        self.task = task
        self._means = Means(task.profiles, policy.carries, policy.serves, shares_of(task.workload))

    def by_policy_alone(self) -> Plan:
        """Return the plan of a policy that places models that generate by itself: it promises what the closed form says
        of its gpu-lets, beside what the policy believes."""
        task = self.task
        own = task.policy.place_generating(self.generating, task.cluster, task.profiles)
        plan = self._joined(own, nothing_on(task.cluster), task.cluster)
        believed = Believed(goodput_rps=plan.expected.goodput_rps, models=plan.expected.models)
        promised = expected_of(plan.model_copy(update={"models": self.generating}))
        reasons = dict(plan.unserved_reasons)
        for spec in (spec for spec in self.generating if spec.name in promised.models):
            rps = promised.models[spec.name].goodput_rps
            if rps < ATTAINED * spec.rate_rps:
                why = "it carries less than the policy believed"
                reasons[spec.name] = f"{rps:.4g} of {spec.rate_rps:g} rps expected in time; {why}"
        update = {"goodput_rps": promised.goodput_rps, "models": promised.models}
        expected = plan.expected.model_copy(update=update)
        return plan.model_copy(update={"believed": believed, "expected": expected, "unserved_reasons": reasons})

    def on(self, cluster: Cluster) -> Plan:
        """Return the plan on a fixed cluster."""
        others = bool(self.others.models)
        most_gpus = max(1, len(cluster.gpus) - others)
        own = place_generating(self.generating, cluster, self._means, most_gpus=most_gpus, fewest=others)
        task = replace(self.task, workload=self.others, cluster=_without(cluster, own.gpus))
        apart = self._joined(own, _plan_of_others(task), cluster)
        if not others:
            return apart
        if self.task.workload.mps == "off":
            return _noted(apart, "models that generate share no GPU with others, as shares need CUDA MPS (mps: off)")
        before = _worst_served(apart)
        if before[0] >= ATTAINED:
            return _noted(apart, "models that generate share no GPU with others, as all are in time on GPUs apart")
        plan = self._colocated(apart, own, cluster)
        part, name = min(_parts_served(plan))
        if _worst_served(plan) == before:
            return _noted(plan, f"models that generate share no GPU with others, as that gives {name} no more")
        more = "serves more in all"
        if part > before[0]:
            parts = f"{100 * part:.3g} % in place of {100 * before[0]:.3g} %"
            more = f"gives {name}, the model served worst, {parts} of its rate in time"
        note = f"models that generate share GPUs with others, which {more}"
        return _noted(plan, f"{note}; how they slow each other down beyond their shares is not known")

    def _colocated(self, plan: Plan, own: GeneratingPlan, cluster: Cluster) -> Plan:
        """Return the plan of both kinds on the same GPUs that serves the worst served model best, or else the given
        one. What runs on several GPUs together stays there, with the models beside it: first only models that no single
        GPU carries, then all of them."""
        costs = costs_of(self.others, cluster, self.task.profiles)
        options = [self._means.options(self.generating, gpu) for gpu in cluster.one_of_each.values()]
        only_together = {spec.name for spec in self.generating if not any(of[spec.name] for of in options)}
        for stays in _of_several_gpus(own, only_together):
            moving = tuple(spec for spec in self.generating if spec.name not in stays.goodput_rps)
            left = _without(cluster, stays.gpus)
            for gpus in by_gpu_type(left) if moving else ():
                elsewhere = [gpu for gpu in left.gpus if gpu not in gpus]
                search = ColocationSearch(moving, gpus, self.others.models, elsewhere, costs, self._means)
                if search.is_possible and _worst_served(plan)[0] < ATTAINED:
                    plan = max([plan, *self._colocated_plans(stays, search, left, cluster, costs)], key=_worst_served)
        return plan

    def _colocated_plans(
        self, stays: GeneratingPlan, search: ColocationSearch, left: Cluster, cluster: Cluster, costs: Costs
    ) -> Iterator[Plan]:
        """Yield plans of both kinds on the same GPUs. The kind that falls behind in one of them weighs more in the
        next."""
        # A layout is chosen by the model that is served worst, so the others' plans are compared by that, too.
        policy = self.task.policy.for_worst_served()
        weigh, low, high = _OTHERS_WEIGH, 0.0, math.inf
        tried: dict[object, Plan] = {}
        for _ in range(_COLOCATIONS):
            colocation = search.best(weigh)
            if colocation is None or self.task.policy.watch.is_stopped():
                return
            if colocation.key not in tried:
                sliced = SlicedCluster(left, colocation, self.others, costs, self.task.profiles)
                if not sliced.cluster.gpus:
                    return  # no layout leaves the others room in which they are in time
                plan = _plan_of_others(PlanTask(policy, sliced.workload, sliced.cluster, sliced.profiles))
                both = stays.and_then(search.plan(colocation))
                tried[colocation.key] = self._joined(both, sliced.in_place(plan, cluster), cluster)
            yield tried[colocation.key]
            part, behind = min(_parts_served(tried[colocation.key]))
            if part >= 1.0:
                return
            if self.task.workload[behind].generates is None:
                low = weigh
            else:
                high = weigh
            weigh = (
                math.sqrt(low * high) if low and high < math.inf else (weigh * _REWEIGH if low else weigh / _REWEIGH)
            )

    def bought(self) -> Plan:
        """Return the plan on an elastic cluster: each kind on the cheapest GPUs found for it; and both on fewer of
        these as long as all are served on them."""
        cluster = self.task.cluster
        fixed = replace(self.task, workload=self.others, trial=None)
        of_others = plan_fixed_cost(fixed) if self.others.models else nothing_on(cluster)
        pool = GpuPool(cluster)
        for gpu in of_others.gpus:
            pool.named_gpu(gpu.device, gpu.whole_type)
        own = buy_generating(self.generating, cluster, self._means, pool.next_gpu)
        plan = self._joined(own, of_others, cluster)
        if not self.others.models or self.task.workload.mps == "off" or plan.unserved_reasons:
            return plan
        apart, gpus = plan.expected.cost_per_hour, [*own.bought, *_as_bought(of_others, cluster)]
        while len(gpus) > 1 and not self.task.policy.watch.is_stopped():
            gpus.remove(max(gpus, key=lambda gpu: (gpu.price_per_hour or 0.0, gpu.id)))
            fewer = self.on(Cluster.of(gpus))
            if fewer.unserved_reasons:
                break
            used = set(fewer.used_gpus)
            plan = fewer.model_copy(update={"gpus": tuple(gpu for gpu in fewer.gpus if gpu.id in used)})
        if plan.expected.cost_per_hour != apart:
            plan = _noted(plan, f"both kinds together cost less than apart ({apart:g} per hour)" if apart else _FEWER)
        return plan

    def _joined(self, own: GeneratingPlan, plan: Plan, cluster: Cluster) -> Plan:
        """Return one plan of gpu-lets that generate and of a plan for all other models.

        Raises:
            InvalidInputError: it breaks a rule.
        """
        workload, goodput_rps = self.task.workload, own.goodput_rps
        by_id = {gpu.id: gpu for gpu in plan.gpus}
        bought = (*plan.gpus, *map(PlannedGpu.of, own.bought))
        cluster = cluster.cut_as(bought)
        gpus = () if cluster.elastic else tuple(by_id.get(gpu.id, PlannedGpu.of(gpu)) for gpu in cluster.gpus)
        gpus += tuple(gpu for gpu in bought if gpu.id not in {known.id for known in gpus})
        models = plan.expected.models | {name: ExpectedModel(goodput_rps=rps) for name, rps in goodput_rps.items()}
        counts = Counter(gpulet.gpu for gpulet in plan.gpulets)
        gpulets = [*plan.gpulets]
        for gpulet in own.gpulets:
            gpulets.append(gpulet.model_copy(update={"id": gpulet_id(gpulet.gpu, counts[gpulet.gpu])}))
            counts[gpulet.gpu] += 1
        plan = plan.model_copy(update={"gpus": gpus, "gpulets": tuple(gpulets)})
        expected = plan.expected.model_copy(
            update=usage_of(plan, cluster)
            | {
                "goodput_rps": round(plan.expected.goodput_rps + sum(goodput_rps.values()), 6),
                "models": {spec.name: models[spec.name] for spec in workload.models if spec.name in models},
            }
        )
        unserved = {*plan.unserved, *(spec.name for spec in self.generating if not goodput_rps.get(spec.name))}
        plan = plan.model_copy(
            update={
                "policy": policy_used(self.task.policy),
                "models": workload.models,
                "applications": workload.applications,
                "mps": workload.mps,
                "objective": workload.objective,
                "overcommits": plan.overcommits or own.overcommits,
                "expected": expected,
                "unserved": tuple(spec.name for spec in workload.models if spec.name in unserved),
                "unserved_reasons": {**plan.unserved_reasons, **own.reasons},
                "notes": (*plan.notes, *own.notes, *too_long(workload.models, own.gpulets)),
            }
        )
        check_plan(plan, cluster)
        return plan


def _plan_of_others(task: PlanTask) -> Plan:
    """Return the plan of models of fixed cost on what is left of a cluster; what runs on none of it goes unserved."""
    costs, workload = costs_of(task.workload, task.cluster, task.profiles), task.workload
    able = tuple(spec for spec in workload.models if costs[spec.name])
    why = "the models that generate take all GPUs that it runs on"
    reasons = {spec.name: why for spec in workload.models if not costs[spec.name]}
    if reasons:
        workload = workload.model_copy(update={"models": able, "merge": "off"})
    has_gpus = bool(task.cluster.gpus)
    plan = plan_fixed_cost(replace(task, workload=workload, trial=None)) if has_gpus else nothing_on(task.cluster)
    unserved, reasons = (*plan.unserved, *reasons), {**plan.unserved_reasons, **reasons}
    return plan.model_copy(update={"unserved": unserved, "unserved_reasons": reasons})


def _of_several_gpus(own: GeneratingPlan, only_together: Collection[str]) -> list[GeneratingPlan]:
    """Return parts of a plan with all that lies beside models on several GPUs together, directly or through others:
    beside those that cannot lie on one, and beside all of them."""
    groups = [(*((gpu,) for gpu in g.gpus), g.models[0].name) for g in own.gpulets]
    wide = {gpulet.models[0].name for gpulet in own.gpulets if gpulet.also_on}
    parts = []
    for chosen in dict.fromkeys((frozenset(wide & {*only_together}), frozenset(wide))):
        names = {each for group in connected_components(groups) if group & chosen for each in group}
        gpulets = tuple(gpulet for gpulet in own.gpulets if gpulet.models[0].name in names)
        goodput_rps = {name: rate for name, rate in own.goodput_rps.items() if name in names}
        parts.append(GeneratingPlan(gpulets, goodput_rps, {n: why for n, why in own.reasons.items() if n in names}))
    return parts


def _as_bought(plan: Plan, cluster: Cluster) -> list[Gpu]:
    """Return the GPUs that a plan uses of an elastic cluster, whole ones only."""
    known, used = cluster.one_of_each, set(plan.used_gpus)
    return [
        known[gpu.type].model_copy(update={"id": gpu.id, "uuid": gpu.uuid})
        for gpu in plan.gpus
        if gpu.id in used and gpu.type in known
    ]


def _without(cluster: Cluster, taken: Collection[str]) -> Cluster:
    """Return a cluster without GPUs and instances that models that generate take. A GPU that has such an instance stays
    cut as it is."""
    if not taken:
        return cluster
    devices = {gpu.device for gpu in cluster.gpus if gpu.id in taken}
    left = (gpu for gpu in cluster.gpus if gpu.id not in taken)
    if not any(gpu.device in devices for gpu in left):
        return cluster.model_copy(update={"left_out": (*(cluster.left_out or ()), *taken)})
    return Cluster.of(
        gpu.model_copy(update={"mig": "fixed"}) if gpu.device in devices else gpu
        for gpu in cluster.gpus
        if gpu.id not in taken
    )


def _arranged(plan: Plan, scene: PlacementContext) -> Plan:
    """Return a plan of both kinds with its replicas where models ask, and with what each loss leaves.

    What did not move keeps its promise. For the rest the formulas say what it serves, and trials of the policy what a
    gpu-let that generates carries.
    """
    before = _held(plan)
    plan = with_caps(arranged(plan, scene), scene.cluster, scene.contexts_mib)
    after = _held(plan)
    expected = expected_of(plan.model_copy(update={"models": scene.workload.models}), carries=scene.carries)
    models = {
        name: plan.expected.models[name]
        if name in plan.expected.models and before.get(name, before[""]) == after.get(name, after[""])
        else model
        for name, model in expected.models.items()
    }
    held = {replica.name for gpulet in plan.gpulets for replica in gpulet.models}
    unserved = tuple(spec.name for spec in scene.workload.models if spec.name not in held)
    reasons = {name: plan.unserved_reasons.get(name, "no room was found for it where it may lie") for name in unserved}
    specs = {spec.name: spec for spec in scene.workload.models}
    for name, model in models.items():
        rate_rps = specs[name].rate_rps
        if model.goodput_rps < ATTAINED * rate_rps:
            short = f"{model.goodput_rps:.4g} of {rate_rps:g} rps expected in time; more requests would be late"
            reasons[name] = plan.unserved_reasons.get(name, short) if before == after else short
    goodput_rps = round(sum(model.goodput_rps for model in models.values()), 6)
    update = usage_of(plan, scene.cluster.cut_as(plan.gpus)) | {"goodput_rps": goodput_rps, "models": models}
    plan = plan.model_copy(
        update={
            "models": scene.workload.models,
            "expected": plan.expected.model_copy(update=update),
            "unserved": unserved,
            "unserved_reasons": reasons,
        }
    )
    return with_losses_said(plan, scene.trial)


def _held(plan: Plan) -> dict[str, object]:
    """Return what decides how much each model that generates carries, and by the empty name what decides it for all
    others."""
    decisive: dict[str, list[object]] = {"": []}
    for gpulets in plan.by_gpu().values():
        others = [alike_key(gpulet) for gpulet in gpulets if gpulet.models[0].steps is None]
        decisive[""] += [others] if others else []
    for gpulet in plan.gpulets:
        if gpulet.models[0].steps is not None:
            decisive.setdefault(gpulet.models[0].name, []).append(alike_key(gpulet))
    return {name: sorted(map(repr, each)) for name, each in decisive.items()}


def _with_assumptions(plan: Plan, profiles: Profiles) -> Plan:
    """Return the plan, which says what it assumes of steps in MIG instances."""
    types = {gpu.id: gpu.type for gpu in plan.gpus}
    inside: dict[str, dict[str, None]] = {}
    for gpulet in plan.gpulets:
        for replica in gpulet.models:
            kind = types[gpulet.gpu]
            if replica.steps is not None and profiles.is_of_whole_gpu(plan.model(replica.name).profile_row, kind):
                inside.setdefault(kind, {})[replica.name] = None
    lines = tuple(
        f"steps in a {kind} were not measured: {', '.join(names)} count as {mig.at_most:.3g} times as slow as on a "
        "whole GPU, by the part of its GPCs or of its memory bandwidth, whichever is less"
        for kind, names in inside.items()
        if (mig := instance_type_of(kind)) is not None
    )
    if not lines:
        return plan
    expected = plan.expected.model_copy(update={"assumptions": (*plan.expected.assumptions, *lines)})
    return plan.model_copy(update={"expected": expected})


def _parts_served(plan: Plan) -> list[tuple[float, str]]:
    """Return which part of its rate each model is expected to get in time."""
    held = {name: model.goodput_rps for name, model in plan.expected.models.items()}
    return [(min(1.0, round(held.get(spec.name, 0.0) / spec.rate_rps, 4)), spec.name) for spec in plan.models]


def _worst_served(plan: Plan) -> tuple[float, float]:
    """Return the part of the model that is served worst, and the sum of all: requests of both kinds cannot be
    added."""
    parts = [part for part, _ in _parts_served(plan)]
    return min(parts), sum(parts)


def _noted(plan: Plan, note: str) -> Plan:
    return plan.model_copy(update={"notes": (*plan.notes, note)})
