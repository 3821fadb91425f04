"""The way from policy to plan: check, decide, complete, promise, validate. Every plan is made here."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from tenuto.errors import InvalidInputError, Problem, one_of, raise_if_any
from tenuto.placement.carrying import (
    Carries,
    Costs,
    GeneratingPlan,
    IsCarried,
    carried,
    generating_problems,
    known_once,
    options_of,
    shares_of,
    too_long,
    with_lengths,
)
from tenuto.placement.cluster import Cluster, Gpu, whole_of
from tenuto.placement.components import connected_components
from tenuto.placement.costs import ModelOnGpu, context_mib_of, costs_of
from tenuto.placement.expectation.outlook import expected_of, told
from tenuto.placement.expectation.sharing import Sharing
from tenuto.placement.laying import buy_generating, by_gpu_type, place_generating
from tenuto.placement.ledger import unknown_memory, with_caps
from tenuto.placement.merging import apply_merging
from tenuto.placement.mixing import Mixing, SlicedCluster
from tenuto.placement.plan import Believed, ExpectedModel, Plan, PlannedGpu, PolicyUsed
from tenuto.placement.policies.shared.gpu_pool import GpuPool
from tenuto.placement.policies.shared.hosting import gpulet_id
from tenuto.placement.policy import Policy
from tenuto.placement.program import Gpulet
from tenuto.placement.rules import measured_otherwise, option_problems
from tenuto.placement.surviving import Scene, Trial, arranged, asks, not_surviving, place_problems, with_losses
from tenuto.placement.watch import INTERRUPTED
from tenuto.placement.whereabouts import ANYWHERE
from tenuto.placement.workload import ModelSpec, Workload, profile_of
from tenuto.profiles import ModelProfile, Profiles
from tenuto.profiles.mig_instances import instance_type_of

MOST_ELASTIC_GPUS = 10_000  # limit: a rate that takes more is probably a typing error, and policies would take minutes
# paper: Symphony's goodput, the 99th percentile within the SLO; the plan names every model that stays below
ATTAINED = 0.99
_SERVED_WITH = frozenset({"torch", "onnxruntime"})  # packages that execute models
_MIXES = 5  # limit: layouts of both kinds that are planned; each takes as long as a plan of the others
_OTHERS_WEIGH = 1.25  # fitted on five random workloads: what closed forms give others over what trials do
_REWEIGH = 1.3  # limit: by how much more the kind that falls behind must carry in the next layout
NEARLY = 0.97  # limit: from this part of the rate on, the reason says "little GPU time left" instead of "none"


def solve(
    policy: Policy, workload: Workload, cluster: Cluster, profiles: Profiles, *, trial: Trial | None = None
) -> Plan:
    """Return the completed and validated plan of a policy.

    When no GPU of the cluster can serve a model, the model is unserved with the reason, and the others are planned.

    Args:
        policy: the policy that decides.
        workload: all models.
        cluster: the GPUs.
        profiles: what the models cost.
        trial: tries the plan after each loss that models must survive; without it, formulas expect the result.

    Raises:
        InvalidInputError: the inputs contradict each other, or the plan breaks a rule; it lists all problems.
    """
    generating = tuple(spec for spec in workload.models if spec.generates is not None)
    if generating:
        return _with_generating(generating, policy, workload, cluster, profiles, trial)
    impossible = _impossible(check_inputs(workload, cluster, profiles), profiles)
    possible = tuple(spec for spec in workload.models if spec.name not in impossible)
    plan = _nothing(cluster)
    if possible:
        asked = workload.model_copy(update={"models": possible})
        plan = policy.place(asked, cluster, profiles)
    unserved = {*plan.unserved, *impossible}
    watch = getattr(policy, "watch", None)
    notes = (INTERRUPTED,) if watch is not None and watch.is_stopped() else ()
    plan = plan.model_copy(
        update={
            "notes": (*plan.notes, *notes),
            "unserved": tuple(spec.name for spec in workload.models if spec.name in unserved),
            "unserved_reasons": {**plan.unserved_reasons, **impossible},
        }
    )
    return complete(plan, policy, workload, cluster, profiles, trial=trial)


def _with_generating(
    generating: tuple[ModelSpec, ...],
    policy: Policy,
    workload: Workload,
    cluster: Cluster,
    profiles: Profiles,
    trial: Trial | None,
) -> Plan:
    """Return the plan of models that generate on GPUs of their own, and of the policy for all others on the rest; where
    that does not serve all, that of both kinds on the same GPUs if the model served worst gets more of its rate by it.
    On an elastic cluster both kinds are bought apart, and together where that is cheaper and serves all.

    Where models are to lie, and what is to survive, is arranged at the end, for both kinds at once.
    """
    check_inputs(workload, cluster, profiles)
    generating = tuple(map(with_lengths, generating))
    problems = generating_problems(generating, cluster, profiles)
    policy_carries, own_way = getattr(policy, "carries", None), getattr(policy, "place_generating", None)
    others = tuple(spec.model_copy(update=ANYWHERE) for spec in workload.models if spec.generates is None)
    if policy_carries is None and own_way is None:
        rule, cure = "this policy does not plan models that generate", "Use --policy tenuto."
        problems = [Problem(f"models.{spec.name}.generates", spec.name, rule, cure) for spec in generating]
    elif own_way is not None and (others or cluster.elastic):
        rule = "this policy plans only models that generate, on a fixed cluster"
        problems.append(Problem("--policy", policy.name, rule, "Use --policy tenuto."))
    raise_if_any(problems)
    carries = known_once(policy_carries or carried)
    if own_way is not None:
        found = _as_believed(own_way(generating, cluster, profiles), policy, workload, generating, cluster)
    else:
        kinds = workload.model_copy(update={"models": others})
        both = _BothKinds(generating, kinds, workload, policy, profiles, carries)
        found = both.bought(cluster) if cluster.elastic else both.on(cluster)
    known = {spec.name: spec for spec in generating}
    models = tuple(known.get(spec.name, spec) for spec in workload.models)
    if any(asks(spec) or spec.prefer is not None for spec in models):
        sharing = Sharing(costs_of(workload, cluster, profiles), profiles, found.streaming)
        scene = Scene(workload.model_copy(update={"models": models}), cluster, sharing, trial, carries)
        found = _arranged(found, scene).model_copy(update={"models": workload.models})
    found = _with_assumptions(found, profiles)
    check_plan(found, cluster)
    return found


def _as_believed(
    own: GeneratingPlan, policy: Policy, workload: Workload, generating: Sequence[ModelSpec], cluster: Cluster
) -> Plan:
    """Return the plan of a policy that places models that generate by itself: it promises what the closed form says of
    its gpu-lets, beside what the policy believes."""
    plan = _joined(own, _nothing(cluster), policy, workload, cluster)
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
    profiles: Profiles
    carries: Carries

    @property
    def _is_carried(self) -> IsCarried | None:
        return getattr(self.policy, "is_carried", None)

    def on(self, cluster: Cluster) -> Plan:
        """Return the plan on a fixed cluster."""
        policy, others = self.policy, self.others
        at_most = max(1, len(cluster.gpus) - bool(others.models))
        own = place_generating(
            self.generating,
            cluster,
            self.profiles,
            most_gpus=at_most,
            fewest=bool(others.models),
            carries=self.carries,
            is_carried=self._is_carried,
            shares=shares_of(self.workload),
        )
        taken = set(own.gpus)
        if len(taken) < len(cluster.gpus):
            plan = solve(policy, others, _without(cluster, taken), self.profiles)
        else:
            plan = _nothing(cluster)
            why = dict.fromkeys((spec.name for spec in others.models), "the models that generate take all GPUs")
            plan = plan.model_copy(update={"unserved": tuple(why), "unserved_reasons": why})
        found = _joined(own, plan, policy, self.workload, cluster)
        if not others.models:
            return found
        if self.workload.mps == "off":
            return _noted(found, "models that generate share no GPU with others, as shares need CUDA MPS (mps: off)")
        if _worst_served(found)[0] >= 1.0:
            return _noted(found, "models that generate share no GPU with others, as all are in time on GPUs apart")
        apart = _worst_served(found)
        found = self._mixed(found, own, cluster)
        worst = min(_parts_served(found))
        if _worst_served(found) == apart:
            return _noted(found, f"models that generate share no GPU with others, as that gives {worst[1]} no more")
        return _noted(
            found,
            f"models that generate share GPUs with others, which gives {worst[1]}, the model served worst, "
            f"{100 * worst[0]:.3g} % in place of {100 * apart[0]:.3g} % of its rate in time; how they slow each other "
            "down beyond their shares is not known",
        )

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
                mixing = Mixing(moving, gpus, self.others.models, elsewhere, costs, self.profiles, self.carries)
                if mixing.is_possible and _worst_served(found)[0] < 1.0:
                    found = self._best_mix(found, stays, mixing, left, cluster, costs)
        return found

    def _only_together(self, cluster: Cluster) -> set[str]:
        """Return the models that no share of a single GPU carries."""
        gpus = cluster.one_of_each.values()
        alone = {
            spec.name for spec in self.generating for gpu in gpus if options_of(spec, gpu, self.profiles, self.carries)
        }
        return {spec.name for spec in self.generating} - alone

    def _best_mix(
        self, found: Plan, stays: GeneratingPlan, mixing: Mixing, left: Cluster, cluster: Cluster, costs: Costs
    ) -> Plan:
        # A layout is chosen by the model that is served worst, so the others' plans are compared by that, too.
        policy = getattr(self.policy, "by_worst_served", lambda: self.policy)()
        weigh, low, high = _OTHERS_WEIGH, 0.0, math.inf
        tried: dict[object, Plan] = {}
        for _ in range(_MIXES):
            mix = mixing.best(weigh)
            if mix is None or self.policy.watch.is_stopped():
                break
            if mix.told not in tried:
                sliced = SlicedCluster(left, mix, self.others, costs, self.profiles)
                plan = sliced.in_place(solve(policy, sliced.workload, sliced.cluster, sliced.profiles), cluster)
                mixed = stays.and_then(mixing.plan(mix, self._is_carried))
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
        plan = solve(self.policy, self.others, cluster, self.profiles) if self.others.models else _nothing(cluster)
        pool = GpuPool(cluster)
        for gpu in plan.gpus:
            pool.take_named(gpu.device, gpu.whole_type)
        own = buy_generating(
            self.generating,
            cluster,
            self.profiles,
            pool.take,
            most_gpus=MOST_ELASTIC_GPUS,
            carries=self.carries,
            is_carried=self._is_carried,
            shares=shares_of(self.workload),
        )
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


_FEWER = "both kinds together take fewer GPUs than apart"


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


def _arranged(plan: Plan, scene: Scene) -> Plan:
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
    there = scene.cluster.cut_as((gpu.id, gpu.type, gpu.instance) for gpu in plan.gpus)
    prices = {gpu.type: whole_of(gpu).price_per_hour for gpu in there.gpus}
    used = set(plan.used_gpus)
    by_device = {gpu.device: prices.get(gpu.type) for gpu in plan.gpus if gpu.id in used}
    cost = None if None in by_device.values() else round(sum(price or 0.0 for price in by_device.values()), 6)
    update = {
        "goodput_rps": round(sum(model.goodput_rps for model in models.values()), 6),
        "models": models,
        "gpus_used": len(by_device),
        "cost_per_hour": cost,
    }
    plan = plan.model_copy(
        update={
            "models": scene.workload.models,
            "expected": plan.expected.model_copy(update=update),
            "unserved": unserved,
            "unserved_reasons": reasons,
        }
    )
    return _with_losses_said(plan, scene.trial)


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
    """Return which part of what is aimed at (`ATTAINED` of its rate) each model is expected to get in time, at most
    1."""
    held = {name: model.goodput_rps for name, model in plan.expected.models.items()}
    parts = ((held.get(spec.name, 0.0) / (ATTAINED * spec.rate_rps), spec.name) for spec in plan.models)
    return [(min(1.0, round(part, 3)), name) for part, name in parts]


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
    cluster = cluster.cut_as((gpu.id, gpu.type, gpu.instance) for gpu in bought)
    gpus = () if cluster.elastic else tuple(by_id.get(gpu.id, PlannedGpu.of(gpu)) for gpu in cluster.gpus)
    gpus += tuple(gpu for gpu in bought if gpu.id not in {known.id for known in gpus})
    goodput = dict(own.goodput_rps or {})
    models = plan.expected.models | {name: ExpectedModel(goodput_rps=rate) for name, rate in goodput.items()}
    counts = Counter(gpulet.gpu for gpulet in plan.gpulets)
    named = []
    for gpulet in own.gpulets:
        named.append(gpulet.model_copy(update={"id": gpulet_id(gpulet.gpu, counts[gpulet.gpu])}))
        counts[gpulet.gpu] += 1
    gpulets = (*plan.gpulets, *named)
    expected = plan.expected.model_copy(
        update=_usage(gpus, gpulets, cluster)
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
            "policy": PolicyUsed(name=getattr(policy, "name", type(policy).__name__), options=_plain_options(policy)),
            "gpus": gpus,
            "gpulets": gpulets,
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


def enough_for_all(
    policy: Policy, workload: Workload, cluster: Cluster, profiles: Profiles, *, trial: Trial | None = None
) -> Plan:
    """Return the plan of a policy on as many GPUs of the cluster's types as it takes.

    When this plan does not serve a model as asked, the reason is not a lack of GPUs; the plan gives the reason.

    Raises:
        InvalidInputError: the policy does not plan on elastic clusters.
    """
    return solve(policy, workload, cluster.model_copy(update={"elastic": True}), profiles, trial=trial)


def solve_on_fewest(
    policy: Policy, workload: Workload, cluster: Cluster, profiles: Profiles, *, trial: Trial | None = None
) -> Plan:
    """Return a plan that serves every model as asked on as few GPUs of a fixed cluster as this search finds.

    The search leaves out many GPUs at a time and then fewer, the dearest type first. When not even all GPUs serve every
    model as asked, the plan is that of `solve`.

    Raises:
        InvalidInputError: `solve` raised it.
    """
    found = solve(policy, workload, cluster, profiles, trial=trial)
    prices, step = cluster.prices, len(cluster.gpus) // 2
    while step and not found.unserved_reasons and not policy.watch.is_stopped():
        held = {*found.devices(found.used_gpus)}
        used = [gpu for gpu in cluster.gpus if gpu.device in held]
        for kind in sorted(prices, key=lambda kind: (-prices[kind], kind)):
            of_type = [gpu.id for gpu in used if gpu.type == kind]
            if step <= len(of_type) and step < len(used):
                kept = {gpu.id for gpu in used} - {*of_type[-step:]}
                left_out = tuple(gpu.id for gpu in cluster.gpus if gpu.id not in kept) + (cluster.left_out or ())
                some = cluster.model_copy(update={"left_out": left_out})
                fewer = solve(policy, workload, some, profiles, trial=trial)
                if not fewer.unserved_reasons:
                    found = fewer
                    break
        else:
            step //= 2
    there = cluster.cut_as((gpu.id, gpu.type, gpu.instance) for gpu in found.gpus)
    return found.model_copy(update={"gpus": tuple(PlannedGpu.of(gpu) for gpu in there.gpus)})


def _nothing(cluster: Cluster) -> Plan:
    gpus = () if cluster.elastic else cluster.gpus
    planned = tuple(PlannedGpu.of(gpu) for gpu in gpus)
    return Plan(policy=PolicyUsed(name=""), gpus=planned)


# --- before: the inputs -----------------------------------------------------------------------------------------


def check_inputs(workload: Workload, cluster: Cluster, profiles: Profiles) -> Mapping[str, Mapping[str, ModelOnGpu]]:
    """Check the inputs, and return what the models cost, as `costs_of` does.

    Raises:
        InvalidInputError: a model has no profile, a model cannot run with its options, or an elastic cluster would grow
            beyond `MOST_ELASTIC_GPUS`.
    """
    on_cpu = {spec.name for spec in workload.models} if set(cluster.gpu_types) == {"cpu"} else set[str]()
    problems = option_problems(workload.models, workload.merge if isinstance(workload.merge, tuple) else (), on_cpu)
    least_gpus: list[tuple[float, int, float]] = []
    most_rps: dict[int, float] = {}
    costs = costs_of(workload, cluster, profiles)
    for index, spec in enumerate(workload.models):
        by_type = costs[spec.name]
        if not by_type:
            missing = [problem for kind in cluster.gpu_types for problem in _missing(spec, kind, profiles)]
            problems += [Problem(f"models.{index}.profile", p.value, p.rule, p.cure) for p in missing]
        if spec.generates is None and any(not on.profile.points and on.profile.line is None for on in by_type.values()):
            rule = "its profile has only steps of a model that generates"
            problems.append(Problem(f"models.{index}.profile", spec.profile_row, rule, "Give `generates` and `slo`."))
        rates = []
        for on in by_type.values():
            if id(on.profile) not in most_rps:
                most_rps[id(on.profile)] = _most_rps(on.profile)
            rates.append(most_rps[id(on.profile)])
        if rates and max(rates) > 0:
            least_gpus.append((spec.rate_rps / max(rates), index, spec.rate_rps))
    needed = sum(gpus for gpus, _, _ in least_gpus)
    if cluster.elastic and needed > MOST_ELASTIC_GPUS:
        gpus, index, rate = max(least_gpus)
        rule = (
            f"takes at least {gpus:,.0f} GPUs, all models together {needed:,.0f}; an elastic cluster grows to "
            f"{MOST_ELASTIC_GPUS:,} at most"
        )
        cure = "Lower it (rates are in requests per second), or plan a part of the load at a time."
        problems.append(Problem(f"models.{index}.rate_rps", rate, rule, cure))
    raise_if_any([*problems, *place_problems(workload, cluster)])

    def known(spec: ModelSpec, gpu_type: str) -> ModelProfile | None:
        on = costs[spec.name].get(gpu_type)
        return None if on is None else on.profile

    raise_if_any(measured_otherwise(workload.models, cluster.gpu_types, known))
    return costs


def _missing(spec: ModelSpec, kind: str, profiles: Profiles) -> tuple[Problem, ...]:
    try:
        profile_of(spec, kind, profiles)
    except InvalidInputError as error:
        return error.problems or (Problem("profiles", spec.name, str(error), "Give another profile."),)
    return ()


def _most_rps(model: ModelProfile) -> float:
    """Return an upper bound for the requests per second of a GPU full of this model's replicas.

    It is the best throughput of a measured batch, divided by the share of the batch.
    """
    if model.line is not None:
        return 1000.0 / model.line.alpha_ms if model.line.alpha_ms > 0 else float("inf")
    rates = (model.throughput_rps(p.batch_size, p.share_pct) * 100.0 / p.share_pct for p in model.points)
    return max(rates, default=0.0)


def _impossible(costs: Mapping[str, Mapping[str, ModelOnGpu]], profiles: Profiles) -> dict[str, str]:
    """Return the models that no GPU of the cluster can serve, whatever a policy does, with the reasons."""
    found = {}
    for name, by_type in costs.items():
        fastest = min(by_type.values(), key=lambda on: on.steps()[1])
        if fastest.steps()[1] > fastest.slo_ms * (1 + 1e-9):
            found[name] = (
                f"SLO below batch 1: a single request takes {fastest.steps()[1]:.4g} ms on a {fastest.gpu.type}, its "
                f"SLO is {fastest.slo_ms:g} ms"
            )
            continue
        room = {kind: on.gpu.memory_mib - context_mib_of(kind, profiles) for kind, on in by_type.items()}
        largest = max(by_type.values(), key=lambda on: room[on.gpu.type])
        need = min((p.memory_mib for p in largest.profile.points if p.memory_mib is not None), default=0.0)
        if all((on.memory_mib(1) or 0.0) > room[kind] for kind, on in by_type.items()):
            found[name] = (
                f"memory: it needs {need:.0f} MiB even with its smallest measured batch, and the context of its "
                f"process leaves {room[largest.gpu.type]:.0f} MiB of a {largest.gpu.type}"
            )
    return found


# --- after: what follows from the decision ----------------------------------------------------------------------


def complete(
    plan: Plan,
    policy: Policy,
    workload: Workload,
    cluster: Cluster,
    profiles: Profiles,
    *,
    parts: Mapping[str, float] | None = None,
    at_most: int | None = None,
    trial: Trial | None = None,
) -> Plan:
    """Return the plan with everything that follows from the policy's decision, and check it.

    These follow: the latency on each share beside the neighbours, memory and its caps, merged programs, the expected
    goodput, the cost, and the workload's entries. The goodput that the policy itself states is kept as `believed`. With
    `parts`, all replicas stay, and at most `at_most` are added until the plan promises these parts (see `arranged`).
    `trial` is as in `solve`.

    Raises:
        InvalidInputError: the plan breaks a rule; it lists all problems.
    """
    expected = plan.expected
    believed = Believed(goodput_rps=expected.goodput_rps, models=expected.models) if expected.models else None
    cluster = cluster.cut_as((gpu.id, gpu.type, gpu.instance) for gpu in plan.gpus)
    known = {(gpu.id, gpu.type): gpu for gpu in cluster.gpus}
    gpus = tuple(PlannedGpu.of(known[key]) if (key := (gpu.id, gpu.type)) in known else gpu for gpu in plan.gpus)
    streaming = cluster.streams if workload.streaming is None else workload.streaming
    plan = plan.model_copy(
        update={
            "policy": PolicyUsed(name=getattr(policy, "name", type(policy).__name__), options=_plain_options(policy)),
            "gpus": gpus,
            "believed": believed,
            "models": workload.models,
            "applications": workload.applications,
            "mps": workload.mps,
            "streaming": streaming,
            "objective": workload.objective,
        }
    )
    sharing = Sharing(costs_of(workload, cluster, profiles), profiles, streaming)
    scene = Scene(workload, cluster, sharing, trial)
    tried = [told(gpulet) for gpulet in plan.gpulets] if getattr(policy, "is_tried", False) else None
    plan = arranged(sharing.completed(plan), scene, parts=parts, at_most=at_most)
    if parts is not None:
        held = {replica.name for gpulet in plan.gpulets for replica in gpulet.models}
        without = tuple(spec.name for spec in workload.models if spec.name not in held)
        reasons = {name: plan.unserved_reasons.get(name, "no room was found for it") for name in without}
        plan = plan.model_copy(update={"unserved": without, "unserved_reasons": reasons})
    plan = apply_merging(plan, workload, profiles, sharing.completed)
    plan = with_caps(plan, cluster, scene.contexts_mib)
    notes = list(plan.notes)
    unknown = unknown_memory(plan)
    if unknown:
        notes.append(f"memory was not measured, so that the ledger cannot tell whether they fit: {', '.join(unknown)}")
    notes += _measured_otherwise_than_here(plan, profiles)
    notes += _estimated(plan, sharing.costs, getattr(policy, "compute_metric", None))
    follows = getattr(policy, "objectives", Policy.objectives)
    if plan.objective not in follows and (plan.objective == "each" or len({spec.weight for spec in plan.models}) > 1):
        notes.append(f"the policy plans by the objective '{follows[0]}'; '{plan.objective}' is for its scheduler alone")
    plan = plan.model_copy(update={"notes": tuple(notes)})
    plan = _with_expectation(plan, scene, tried)
    check_plan(plan, cluster)
    return plan


def _measured_otherwise_than_here(plan: Plan, profiles: Profiles) -> list[str]:
    """Return a line for each GPU type whose profiles come from several devices, and a line for each package that is
    installed here in another version than the plan's profiles were measured with."""
    types = {gpu.id: gpu.type for gpu in plan.gpus}
    devices: dict[str, dict[str, None]] = {}
    versions: dict[tuple[str, str], dict[str, None]] = {}
    specs = {spec.name: spec for spec in plan.models}
    for gpulet in plan.gpulets:
        kind = types.get(gpulet.gpu, "")
        for spec in (specs[replica.name] for replica in gpulet.models if replica.name in specs):
            measured = None if spec.latency is not None else profiles.measured(spec.profile_row, kind)
            if measured is not None:
                devices.setdefault(kind, {})[measured.hardware] = None
                for package in measured.versions.keys() & _SERVED_WITH:
                    versions.setdefault((package, measured.versions[package]), {})[spec.name] = None
    found = [
        f"profiles of {kind} come from several devices: {'; '.join(of)}" for kind, of in devices.items() if len(of) > 1
    ]
    for (package, version), names in versions.items():
        here = _installed(package)
        if here is not None and here.partition("+")[0] != version.partition("+")[0]:
            found.append(f"measured with {package} {version}, installed here is {here}: {', '.join(names)}")
    return found


def _installed(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _estimated(plan: Plan, costs: Mapping[str, Mapping[str, ModelOnGpu]], compute_metric: str | None) -> list[str]:
    """Return, in a line per GPU type, which values of the plan's profiles were estimated and not measured.

    `compute_metric` is the metric from which the policy reads a model's compute requirement; None if it reads none.
    """
    types = {gpu.id: gpu.type for gpu in plan.gpus}
    found: dict[tuple[str, tuple[str, ...]], dict[str, None]] = {}
    for gpulet in plan.gpulets:
        kind = types.get(gpulet.gpu, "")
        for replica in gpulet.models:
            on = costs.get(replica.name, {}).get(kind)
            if on is None:
                continue
            what = on.profile.estimated
            if compute_metric not in (None, *what) and on.profile.estimates_occupancy(str(compute_metric)):
                what = (*what, str(compute_metric))
            if what:
                found.setdefault((kind, what), {})[replica.name] = None
    return [
        f"estimated, not measured ({kind}): {', '.join(what)} of {', '.join(names)}"
        for (kind, what), names in found.items()
    ]


def _usage(gpus: Iterable[PlannedGpu], gpulets: Iterable[Gpulet], cluster: Cluster) -> dict[str, Any]:
    """Return how many GPUs hold gpu-lets and what they cost per hour, as fields of `Expected`. Those that a plan buys
    are none of the cluster's, and cost as the others of their type."""
    taken = {gpu for gpulet in gpulets for gpu in gpulet.gpus}
    prices = {gpu.type: whole_of(gpu).price_per_hour for gpu in cluster.gpus}
    used = {gpu.device: prices.get(gpu.type) for gpu in gpus if gpu.id in taken}
    cost = None if None in used.values() else round(sum(price or 0.0 for price in used.values()), 6)
    return {"gpus_used": len(used), "cost_per_hour": cost}


def _with_expectation(plan: Plan, scene: Scene, tried: Sequence[object] | None) -> Plan:
    """Return the plan with what it promises, and with a reason for every model that it serves below `ATTAINED`.

    `tried`: the gpu-lets that the policy tried, as `told`; None if it tries nothing. The plan promises what its trial
    served. When gpu-lets were added or merged since the trial, only a model that stayed below `ATTAINED` in the trial
    gets that promise; the others get what the formulas give.
    """
    believed = {n: m.goodput_rps for n, m in plan.believed.models.items()} if plan.believed is not None else {}
    is_as_tried = tried == [told(gpulet) for gpulet in plan.gpulets]
    rates = {spec.name: spec.rate_rps for spec in plan.models}
    served_rps = {
        name: rps
        for name, rps in (believed if tried is not None else {}).items()
        if is_as_tried or rps < ATTAINED * rates[name]
    }
    expected = expected_of(plan, with_margin=not served_rps.keys() >= {*rates} - {*plan.unserved})
    assumptions = (*scene.sharing.assumptions(plan), *expected.assumptions)
    reasons = {name: plan.unserved_reasons.get(name, "the policy gave no reason") for name in plan.unserved}
    models = {
        name: model.model_copy(update={"goodput_rps": served_rps.get(name, model.goodput_rps)})
        for name, model in expected.models.items()
    }
    total_rps = round(sum(model.goodput_rps for model in models.values()), 6)
    update = _usage(plan.gpus, plan.gpulets, scene.cluster) | {"assumptions": assumptions}
    expected = expected.model_copy(update=update | {"models": models, "goodput_rps": total_rps})
    fastest = _fastest(plan)
    for spec in plan.models:
        if spec.name in expected.models:
            part = expected.models[spec.name].goodput_rps / spec.rate_rps
            if part < ATTAINED:
                reasons[spec.name] = _why_below(plan, spec, part, believed, fastest.get(spec.name))
    return _with_losses_said(plan.model_copy(update={"expected": expected, "unserved_reasons": reasons}), scene.trial)


def _with_losses_said(plan: Plan, trial: Trial | None) -> Plan:
    """Return the plan with what each loss leaves, and with a reason for every model that keeps less than it asks
    for."""
    plan, reasons = with_losses(plan, trial), dict(plan.unserved_reasons)
    for name, why in not_surviving(plan).items():
        reasons[name] = f"{reasons[name]}; {why}" if name in reasons else why
    return plan.model_copy(update={"unserved_reasons": reasons})


def _why_below(
    plan: Plan, spec: ModelSpec, part: float, believed: Mapping[str, float], fastest: tuple[float, Gpulet] | None
) -> str:
    """Return in words how much of a model's rate is served in time, and why it is not all."""
    why = plan.unserved_reasons.get(spec.name)
    if fastest is not None and fastest[0] > spec.slo_ms:
        why = (
            f"SLO below batch 1: {_circumstances(plan, [fastest[1]])}a request takes {fastest[0]:.4g} ms, its SLO is "
            f"{spec.slo_ms:g} ms"
        )
    if why is None:
        why = "no GPU time left on its gpu-lets" if part < NEARLY else "little GPU time left, a few percent may be late"
        if believed.get(spec.name, 0.0) > 1.001 * part * spec.rate_rps:
            hosts = _circumstances(plan, plan.hosts_of(spec.name))
            why = f"no GPU time left: {hosts}it carries less than the policy believed"
    return f"{part * spec.rate_rps:.4g} of {spec.rate_rps:g} rps expected in time ({100 * part:.3g} %); {why}"


def _circumstances(plan: Plan, gpulets: Sequence[Gpulet]) -> str:
    """Return the beginning of a sentence: why a request takes longer on these gpu-lets than alone on a whole GPU."""
    by_gpu = plan.by_gpu()
    share = "on its share " if any(gpulet.effective_share_pct < 100.0 for gpulet in gpulets) else ""
    beside = "beside its neighbours " if any(len(by_gpu[gpulet.gpu]) > 1 for gpulet in gpulets) else ""
    return share + beside


def _fastest(plan: Plan) -> dict[str, tuple[float, Gpulet]]:
    """Return, for each model, the gpu-let where a request takes the shortest time, and that time in ms."""
    found: dict[str, tuple[float, Gpulet]] = {}
    for gpulet in plan.gpulets:
        for program in gpulet.programs:
            if program.latency is not None:
                takes_ms = program.latency.at(1) * program.slowdown
                for name in program.models:
                    if name not in found or takes_ms < found[name][0]:
                        found[name] = takes_ms, gpulet
    return found


def _plain_options(policy: Policy) -> dict[str, object]:
    return {k: list(v) if isinstance(v, tuple) else v for k, v in getattr(policy, "options", {}).items()}


def check_plan(plan: Plan, cluster: Cluster) -> None:
    """Raise `InvalidInputError` when a plan breaks a rule that holds for every policy.

    The rules: Ids are consistent. Models exist. The gpu-lets of a GPU fit into its memory. The shares of a GPU sum to
    at most 100 %, unless the plan says that it over-commits. Shares below 100 % need CUDA MPS. Every model is served or
    listed as unserved.
    """
    plan.check_references()
    problems: list[Problem] = []
    memory = {gpu.type: gpu.memory_mib for gpu in cluster.gpus}
    known = {spec.name for spec in plan.models}
    by_gpu = plan.by_gpu()
    for gpu in plan.gpus:
        gpulets = by_gpu[gpu.id]
        share = sum(g.effective_share_pct for g in gpulets)
        if share > 100.0 + 1e-6 and not plan.overcommits:
            problems.append(Problem(f"gpus.{gpu.id}", share, "shares sum to more than 100 %", "Make the plan again."))
        need = sum(gpulet.memory_mib or gpulet.held_mib or 0.0 for gpulet in gpulets)
        if gpu.type in memory and need > memory[gpu.type] + 1e-3 * len(gpulets):
            rule = f"more memory than the GPU has ({memory[gpu.type]:.0f} MiB)"
            cure = "Use smaller batches, fewer models per GPU, or a larger GPU type."
            problems.append(Problem(f"gpus.{gpu.id}", f"{need:.0f} MiB", rule, cure))
    types = {gpu.id: gpu.type for gpu in plan.gpus}
    for gpulet in plan.gpulets:
        if plan.mps == "off" and gpulet.effective_share_pct < 100.0 and types[gpulet.gpu] != "cpu":
            rule = "a share needs CUDA MPS, which the workload turns off (mps: off)"
            cure = "Use mps: auto, or a policy without shares, such as symphony."
            problems.append(Problem(f"gpulets.{gpulet.id}.share_pct", gpulet.share_pct, rule, cure))
        for replica in gpulet.models:
            if replica.name not in known:
                cure = one_of(replica.name, sorted(known))
                problems.append(
                    Problem(f"gpulets.{gpulet.id}.models", replica.name, "not a model of the workload", cure)
                )
    served = {replica.name for gpulet in plan.gpulets for replica in gpulet.models}
    for name in sorted(known - served - set(plan.unserved)):
        problems.append(
            Problem("unserved", name, "neither served nor listed as unserved", "This is a fault of the policy.")
        )
    raise_if_any(problems)
