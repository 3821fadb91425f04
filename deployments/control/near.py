"""A plan near one that is there: what need not move stays. The candidates are those of the controller; of those that
serve every model as well as the policy's plan made anew, the one counts that starts or loads fewest gpu-lets."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from tenuto.deployments.control.fit import fitted, gpus_of, renamed
from tenuto.deployments.control.planning import PlanRequest, incremental, of_workload, trimmed
from tenuto.deployments.control.steps import not_ready
from tenuto.deployments.control.worth import Durations
from tenuto.errors import refused
from tenuto.placement import Cluster, Plan, Policy, Workload
from tenuto.placement.cluster import Gpu
from tenuto.placement.expectation.outlook import IN_FULL, Traffic
from tenuto.placement.plan import Expected, PlannedGpu, PolicyUsed
from tenuto.placement.policies.shared.gpu_pool import GpuPool
from tenuto.placement.policy import load_policy
from tenuto.placement.solve import complete, solve
from tenuto.placement.surviving import SLIGHT, bearable, drained, unmet, without
from tenuto.profiles import Profiles


def changes_of(old: Plan, plan: Plan) -> int:
    """Return how many gpu-lets start, or load a model, when a plan follows on another."""
    return len(not_ready(old, renamed(plan, old)))


def planned_near(
    old: Plan,
    anew: Plan,
    policy: Policy,
    used: PolicyUsed,
    workload: Workload,
    cluster: Cluster,
    profiles: Profiles,
    *,
    at_most: int | None = None,
) -> Plan:
    """Return the plan that serves every model as well as `anew` with fewest changes of `old`, then at the lowest price;
    where changes are limited, the one that lacks least. Its last note says what it costs to stay near.

    Args:
        old: what runs.
        anew: the plan of the policy for the same.
        policy: that plans.
        used: the same, as it is loaded by name.
        workload: what is asked for.
        cluster: what of `old` lies elsewhere is gone.
        profiles: what the models cost.
        at_most: gpu-lets that may start or load.

    Raises:
        InvalidInputError: even to keep what runs takes more changes.
    """
    gpus = _gpus(old, anew, cluster)
    types = {gpu.id: gpu.type for gpu in gpus}
    there = {gpu.id for gpu in old.gpus if types.get(gpu.id) == gpu.type}
    held = tuple(gpulet for gpulet in old.gpulets if gpulet.gpu in there)
    kept = of_workload(old.model_copy(update={"gpulets": held}), workload)
    listed = gpus if not cluster.elastic else [gpu for gpu in gpus if any(g.gpu == gpu.id for g in held)]
    kept = kept.model_copy(update={"gpus": tuple(map(PlannedGpu.of, listed)), "notes": (), "expected": Expected()})
    rates = {spec.name: spec.rate_rps for spec in workload.models}
    promised = {name: anew.expected.models[name].goodput_rps if name in anew.expected.models else 0.0 for name in rates}
    parts = {name: min(IN_FULL, promised[name] / rates[name]) for name in rates}
    asked = workload.model_copy(update={"merge": "off"})  # what is merged is so already
    request = PlanRequest(
        asked,
        Traffic(rates),
        rates,
        kept,
        gpus,
        used,
        Durations(1.0, 1.0),  # nothing is weighed by time
        1.0,
        0.0,
        types=dict(Counter(types.values())) if cluster.elastic else {},
        attainment=IN_FULL,
    )

    def whole(plan: Plan, most: int = 0) -> Plan:
        """Return a candidate with what is expected of it, and at most so many replicas more."""
        bare = plan.model_copy(update={"notes": (), "expected": Expected()})
        found = complete(bare, policy, asked, cluster, profiles, parts=parts, at_most=most)
        return renamed(found, old)

    def candidates() -> Iterator[Plan]:
        yield whole(kept)
        yield whole(kept, len(gpus) * len(rates) if at_most is None else at_most)
        yield made_anew
        if at_most is None:
            for _, plan in incremental(request, profiles, kept):
                if plan is not None:
                    yield whole(plan)

    def rank(plan: Plan) -> tuple[float, ...]:
        got = {name: model.goodput_rps for name, model in plan.expected.models.items()}
        lacking = sum(max(0.0, (parts[n] - SLIGHT) * rates[n] - got.get(n, 0.0)) for n in rates)
        price = plan.expected.cost_per_hour
        used = plan.expected.gpus_used
        return len(unmet(plan)), round(lacking, 6), changes_of(old, plan), used if price is None else price, used

    made_anew = renamed(fitted(anew, kept, gpus, keep_idle=not cluster.elastic), old)
    found = list(candidates())
    allowed = [plan for plan in found if at_most is None or changes_of(old, plan) <= at_most]
    if not allowed:
        least = min(changes_of(old, plan) for plan in found)
        raise refused("--at-most", at_most, f"what is asked takes {least} changes at least", f"Allow {least}.")
    best = min(allowed, key=rank)
    smaller = trimmed(request, best)
    if smaller is not None:
        best = min(best, whole(smaller), key=rank)
    return best.model_copy(update={"notes": (*best.notes, _told(old, best, made_anew))})


def planned_without(running: Plan, places: Sequence[str], profiles: Profiles, gpus: Sequence[Gpu]) -> Plan:
    """Return the plan near the one that runs which has nothing on some nodes, racks or GPUs.

    Raises:
        InvalidInputError: there is no such place, or no GPU would be left.
    """
    whole = Cluster.of({gpu.id: gpu for gpu in (*gpus_of(running), *gpus)}.values())
    left, asked = without(whole, places), running.workload
    policy = load_policy(running.policy.name, running.policy.options)
    anew = solve(policy, bearable(asked, left.gpus), left, profiles)
    plan = planned_near(running, anew, policy, running.policy, bearable(asked, left.gpus), left, profiles)
    nowhere = tuple(spec.name for spec in asked.models if spec.name not in {other.name for other in plan.models})
    reasons = plan.unserved_reasons | dict.fromkeys(nowhere, "it may be on no other GPU")
    missing = {"models": asked.models, "unserved": (*plan.unserved, *nowhere), "unserved_reasons": reasons}
    return drained(plan.model_copy(update=missing), whole, places)


def _gpus(old: Plan, anew: Plan, cluster: Cluster) -> tuple[Gpu, ...]:
    """Return the GPUs to plan on: those of a fixed cluster; of an elastic one those of the old plan, and as many as the
    new one takes."""
    if not cluster.elastic:
        return cluster.gpus
    pool, sizes = GpuPool(cluster), cluster.one_of_each
    here = [sizes[g.type].model_copy(update=g.model_dump()) for g in old.gpus if g.type in sizes and old.on_gpu(g.id)]
    for gpu in here:
        pool.take_named(gpu.id, gpu.type)
    more = (pool.take(gpu.type) for gpu in anew.gpus if anew.on_gpu(gpu.id))
    return (*here, *(gpu for gpu in more if gpu is not None))


def _told(old: Plan, plan: Plan, anew: Plan) -> str:
    """Return what it costs to stay near, beside the plan made anew."""

    def said(each: Plan) -> str:
        expected = each.expected
        price = "" if expected.cost_per_hour is None else f", {expected.cost_per_hour:,.2f} $/h"
        return f"{expected.goodput_rps:,.4g} rps on {expected.gpus_used} GPUs{price}, changes: {changes_of(old, each)}"

    return f"near what runs: {said(plan)}; made anew: {said(anew)}"
