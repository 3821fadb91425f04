"""Plans models that generate beside models of fixed cost: on GPUs apart, or both kinds on the same GPUs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from tenuto.errors import Problem, raise_if_any
from tenuto.placement.cluster import Cluster, Gpu
from tenuto.placement.components import connected_components
from tenuto.placement.costs import costs_of
from tenuto.placement.expectation.outlook import expected_of, told
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
from tenuto.placement.placement_constraints import ANYWHERE
from tenuto.placement.plan import Believed, ExpectedModel, Plan, PlannedGpu
from tenuto.placement.planner.completion import (
    ATTAINED,
    check_plan,
    nothing_on,
    policy_used,
    usage_of,
    with_losses_said,
)
from tenuto.placement.planner.fault_tolerance import PlacementContext, arranged, asks
from tenuto.placement.planner.fixed_cost import plan_fixed_cost
from tenuto.placement.planner.generation_packing import Means, buy_generating, by_gpu_type, place_generating
from tenuto.placement.planner.gpu_slices import Mixing, SlicedCluster
from tenuto.placement.planner.task import PlanTask
from tenuto.placement.policies.shared.gpu_pool import GpuPool
from tenuto.placement.policies.shared.hosting import gpulet_id
from tenuto.placement.policy import Policy
from tenuto.placement.workload import ModelSpec, Workload
from tenuto.profiles import Profiles
from tenuto.profiles.mig_instances import instance_type_of

_MIXES = 5  # limit: layouts of both kinds that are planned; each takes as long as a plan of the others
_OTHERS_WEIGH = 1.25  # fitted on five random workloads: what closed forms give others over what trials do
_REWEIGH = 1.3  # fitted: by how much more the kind that falls behind must carry in the next layout
_FEWER = "both kinds together take fewer GPUs than apart"


def plan_mixed(task: PlanTask) -> Plan:
    """Return the plan of models that generate on GPUs of their own, and of the policy for all others on the rest; where
    that does not serve all, that of both kinds on the same GPUs if the model served worst gets more of its rate by it.
    On an elastic cluster both kinds are bought apart, and together where that is cheaper and serves all.

    Where models are to lie, and what is to survive, is arranged at the end, for both kinds at once.
    """
    policy, workload, cluster, profiles = task.policy, task.workload, task.cluster, task.profiles
    generating = tuple(with_lengths(spec) for spec in workload.models if spec.generates is not None)
    problems = generating_problems(generating, cluster, profiles)
    generation = policy.abilities.generation
    others = tuple(spec.model_copy(update=ANYWHERE) for spec in workload.models if spec.generates is None)
    if generation == "none":
        rule, cure = "this policy does not plan models that generate", "Use --policy tenuto."
        problems = [Problem(f"models.{spec.name}.generates", spec.name, rule, cure) for spec in generating]
    elif generation == "alone" and (others or cluster.elastic):
        rule = "this policy plans only models that generate, on a fixed cluster"
        problems.append(Problem("--policy", policy.name, rule, "Use --policy tenuto."))
    raise_if_any(problems)
    if generation == "alone":
        own = policy.place_generating(generating, cluster, profiles)
        found = _as_believed(own, policy, workload, generating, cluster)
    else:
        kinds = workload.model_copy(update={"models": others})
        means = Means(profiles, policy.carries, policy.serves, shares_of(workload))
        both = _BothKinds(generating, kinds, workload, policy, means)
        found = both.bought(cluster) if cluster.elastic else both.on(cluster)
    known = {spec.name: spec for spec in generating}
    models = tuple(known.get(spec.name, spec) for spec in workload.models)
    if any(asks(spec) or spec.prefer is not None for spec in models):
        sharing = Sharing(costs_of(workload, cluster, profiles), profiles, found.streaming)
        scene = PlacementContext(
            workload.model_copy(update={"models": models}), cluster, sharing, task.trial, policy.carries
        )
        found = _arranged(found, scene).model_copy(update={"models": workload.models})
    found = _with_assumptions(found, profiles)
    check_plan(found, cluster)
    return found


def _as_believed(
    own: GeneratingPlan, policy: Policy, workload: Workload, generating: Sequence[ModelSpec], cluster: Cluster
) -> Plan:
    """Return the plan of a policy that places models that generate by itself: it promises what the closed form says of
    its gpu-lets, beside what the policy believes."""
    plan = _joined(own, nothing_on(cluster), policy, workload, cluster)
    believed = Believed(goodput_rps=plan.expected.goodput_rps, models=plan.expected.models)
    found = expected_of(plan.model_copy(update={"models": tuple(generating)}))
    reasons = dict(plan.unserved_reasons)
    for spec in generating:
        rps = found.models[spec.name].goodput_rps if spec.name in found.models else 0.0
        if spec.name in found.models and rps < ATTAINED * spec.rate_rps:
            reasons[spec.name] = (
                f"{rps:.4g} of {spec.rate_rps:g} rps expected in time; it carries less than the policy believed"
            )
    update = {"goodput_rps": found.goodput_rps, "models": found.models}
    expected = plan.expected.model_copy(update=update)
    return plan.model_copy(update={"believed": believed, "expected": expected, "unserved_reasons": reasons})


@dataclass(frozen=True)
class _BothKinds:
    """Plans models that generate beside all others. `others` are without wishes for their places."""

    generating: tuple[ModelSpec, ...]
    others: Workload
    workload: Workload
    policy: Policy
    means: Means

    @property
    def profiles(self) -> Profiles:
        """Of all models."""
        return self.means.profiles

    def on(self, cluster: Cluster) -> Plan:
        """Return the plan on a fixed cluster."""
        policy, others = self.policy, self.others
        at_most = max(1, len(cluster.gpus) - bool(others.models))
        own = place_generating(self.generating, cluster, self.means, most_gpus=at_most, fewest=bool(others.models))
        plan = self._of_others(policy, others, _without(cluster, own.gpus), self.profiles)
        found = _joined(own, plan, policy, self.workload, cluster)
        if not others.models:
            return found
        if self.workload.mps == "off":
            return _noted(found, "models that generate share no GPU with others, as shares need CUDA MPS (mps: off)")
        if _worst_served(found)[0] >= ATTAINED:
            return _noted(found, "models that generate share no GPU with others, as all are in time on GPUs apart")
        apart = _worst_served(found)
        found = self._mixed(found, own, cluster)
        worst = min(_parts_served(found))
        if _worst_served(found) == apart:
            return _noted(found, f"models that generate share no GPU with others, as that gives {worst[1]} no more")
        more = "serves more in all"
        if worst[0] > apart[0]:
            parts = f"{100 * worst[0]:.3g} % in place of {100 * apart[0]:.3g} %"
            more = f"gives {worst[1]}, the model served worst, {parts} of its rate in time"
        return _noted(
            found,
            f"models that generate share GPUs with others, which {more}; how they slow each other down beyond their "
            "shares is not known",
        )

    def _of_others(self, policy: Policy, others: Workload, there: Cluster, profiles: Profiles) -> Plan:
        """Return the plan of the others on what is left of a cluster; what runs on none of it goes unserved."""
        costs = costs_of(others, there, profiles)
        able = tuple(spec for spec in others.models if costs[spec.name])
        why = dict.fromkeys(
            (spec.name for spec in others.models if not costs[spec.name]),
            "the models that generate take all GPUs that it runs on",
        )
        if why:
            others = others.model_copy(update={"models": able, "merge": "off"})
        plan = plan_fixed_cost(PlanTask(policy, others, there, profiles)) if there.gpus else nothing_on(there)
        update = {"unserved": (*plan.unserved, *why), "unserved_reasons": {**plan.unserved_reasons, **why}}
        return plan.model_copy(update=update)

    def _mixed(self, found: Plan, own: GeneratingPlan, cluster: Cluster) -> Plan:
        """Return the plan of both kinds on the same GPUs that serves the worst served model best, or else the given
        one. What runs on several GPUs together stays there, with the models beside it: first only models that no single
        GPU carries, then all of them."""
        costs = costs_of(self.others, cluster, self.profiles)
        for stays in _of_several_gpus(own, self._only_together(cluster)):
            moving = tuple(spec for spec in self.generating if spec.name not in (stays.goodput_rps or {}))
            left = _without(cluster, stays.gpus)
            for gpus in by_gpu_type(left) if moving else ():
                elsewhere = [gpu for gpu in left.gpus if gpu not in gpus]
                mixing = Mixing(moving, gpus, self.others.models, elsewhere, costs, self.means)
                if mixing.is_possible and _worst_served(found)[0] < ATTAINED:
                    found = self._best_mix(found, stays, mixing, left, cluster, costs)
        return found

    def _only_together(self, cluster: Cluster) -> set[str]:
        """Return the models that no share of a single GPU carries."""
        options = [self.means.options(self.generating, gpu) for gpu in cluster.one_of_each.values()]
        return {spec.name for spec in self.generating if not any(of[spec.name] for of in options)}

    def _best_mix(
        self, found: Plan, stays: GeneratingPlan, mixing: Mixing, left: Cluster, cluster: Cluster, costs: Costs
    ) -> Plan:
        # A layout is chosen by the model that is served worst, so the others' plans are compared by that, too.
        policy = self.policy.for_worst_served()
        weigh, low, high = _OTHERS_WEIGH, 0.0, math.inf
        tried: dict[object, Plan] = {}
        for _ in range(_MIXES):
            mix = mixing.best(weigh)
            if mix is None or self.policy.watch.is_stopped():
                break
            if mix.told not in tried:
                sliced = SlicedCluster(left, mix, self.others, costs, self.profiles)
                if not sliced.cluster.gpus:
                    break  # no layout leaves the others room in which they are in time
                plan = self._of_others(policy, sliced.workload, sliced.cluster, sliced.profiles)
                plan = sliced.in_place(plan, cluster)
                mixed = stays.and_then(mixing.plan(mix))
                tried[mix.told] = _joined(mixed, plan, self.policy, self.workload, cluster)
            both = tried[mix.told]
            found = max(found, both, key=_worst_served)
            part, behind = min(_parts_served(both))
            if part >= 1.0:
                break
            if self.workload[behind].generates is None:
                low = weigh
            else:
                high = weigh
            weigh = (
                math.sqrt(low * high) if low and high < math.inf else (weigh * _REWEIGH if low else weigh / _REWEIGH)
            )
        return found

    def bought(self, cluster: Cluster) -> Plan:
        """Return the plan on an elastic cluster: each kind on the cheapest GPUs found for it; and both on fewer of
        these as long as all are served on them."""
        task = PlanTask(self.policy, self.others, cluster, self.profiles)
        plan = plan_fixed_cost(task) if self.others.models else nothing_on(cluster)
        pool = GpuPool(cluster)
        for gpu in plan.gpus:
            pool.take_named(gpu.device, gpu.whole_type)
        own = buy_generating(self.generating, cluster, self.means, pool.take)
        found = _joined(own, plan, self.policy, self.workload, cluster)
        if not self.others.models or self.workload.mps == "off" or found.unserved_reasons:
            return found
        apart, gpus = found.expected.cost_per_hour, [*own.bought, *_as_bought(plan, cluster)]
        while len(gpus) > 1 and not self.policy.watch.is_stopped():
            dearest = max(gpus, key=lambda gpu: (gpu.price_per_hour or 0.0, gpu.id))
            gpus = [gpu for gpu in gpus if gpu is not dearest]
            fewer = self.on(Cluster.of(gpus))
            if fewer.unserved_reasons:
                break
            used = set(fewer.used_gpus)
            found = fewer.model_copy(update={"gpus": tuple(gpu for gpu in fewer.gpus if gpu.id in used)})
        if found.expected.cost_per_hour != apart:
            found = _noted(found, f"both kinds together cost less than apart ({apart:g} per hour)" if apart else _FEWER)
        return found


def _of_several_gpus(own: GeneratingPlan, only_together: Collection[str]) -> list[GeneratingPlan]:
    """Return parts of a plan with all that lies beside models on several GPUs together, directly or through others:
    beside those that cannot lie on one, and beside all of them."""
    groups = [(*((gpu,) for gpu in g.gpus), g.models[0].name) for g in own.gpulets]
    wide = {gpulet.models[0].name for gpulet in own.gpulets if gpulet.also_on}
    found = []
    for chosen in dict.fromkeys((frozenset(wide & {*only_together}), frozenset(wide))):
        kept = {each for group in connected_components(groups) if group & chosen for each in group}
        found.append(
            GeneratingPlan(
                tuple(gpulet for gpulet in own.gpulets if gpulet.models[0].name in kept),
                {name: rate for name, rate in (own.goodput_rps or {}).items() if name in kept},
                {name: why for name, why in (own.reasons or {}).items() if name in kept},
            )
        )
    return found


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
            short = f"{model.goodput_rps:.4g} of {rate_rps:g} rps expected in time; no GPU time is left for more"
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
    found: dict[str, list[object]] = {"": []}
    for gpulets in plan.by_gpu().values():
        others = [told(gpulet) for gpulet in gpulets if gpulet.models[0].steps is None]
        found[""] += [others] if others else []
    for gpulet in plan.gpulets:
        if gpulet.models[0].steps is not None:
            found.setdefault(gpulet.models[0].name, []).append(told(gpulet))
    return {name: sorted(map(repr, each)) for name, each in found.items()}


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


def _joined(own: GeneratingPlan, plan: Plan, policy: Policy, workload: Workload, cluster: Cluster) -> Plan:
    """Return one plan of gpu-lets that generate and of a plan for all other models.

    Raises:
        InvalidInputError: it breaks a rule.
    """
    by_id = {gpu.id: gpu for gpu in plan.gpus}
    bought = (*plan.gpus, *map(PlannedGpu.of, own.bought))
    cluster = cluster.cut_as(bought)
    gpus = () if cluster.elastic else tuple(by_id.get(gpu.id, PlannedGpu.of(gpu)) for gpu in cluster.gpus)
    gpus += tuple(gpu for gpu in bought if gpu.id not in {known.id for known in gpus})
    goodput = dict(own.goodput_rps or {})
    models = plan.expected.models | {name: ExpectedModel(goodput_rps=rate) for name, rate in goodput.items()}
    counts = Counter(gpulet.gpu for gpulet in plan.gpulets)
    named = []
    for gpulet in own.gpulets:
        named.append(gpulet.model_copy(update={"id": gpulet_id(gpulet.gpu, counts[gpulet.gpu])}))
        counts[gpulet.gpu] += 1
    plan = plan.model_copy(update={"gpus": gpus, "gpulets": (*plan.gpulets, *named)})
    expected = plan.expected.model_copy(
        update=usage_of(plan, cluster)
        | {
            "goodput_rps": round(plan.expected.goodput_rps + sum(goodput.values()), 6),
            "models": {spec.name: models[spec.name] for spec in workload.models if spec.name in models},
        }
    )
    unserved = {
        *plan.unserved,
        *(spec.name for spec in workload.models if spec.generates and not goodput.get(spec.name)),
    }
    whole = plan.model_copy(
        update={
            "policy": policy_used(policy),
            "models": workload.models,
            "mps": workload.mps,
            "objective": workload.objective,
            "overcommits": plan.overcommits or own.overcommits,
            "expected": expected,
            "unserved": tuple(spec.name for spec in workload.models if spec.name in unserved),
            "unserved_reasons": {**plan.unserved_reasons, **(own.reasons or {})},
            "notes": (*plan.notes, *own.notes, *too_long(workload.models, own.gpulets)),
        }
    )
    check_plan(whole, cluster)
    return whole
