"""A plan near one that is there: what need not move stays. The candidates are those of the controller; of those that
serve every model as well as the policy's plan made anew, the one counts that starts or loads fewest gpu-lets."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial

from tenuto.deployments.control.fit import fitted, gpus_of, renamed
from tenuto.deployments.control.planning import PlanRequest, incremental, of_workload, trimmed
from tenuto.deployments.control.steps import not_ready
from tenuto.deployments.control.worth import Durations
from tenuto.errors import InvalidInputError, refused
from tenuto.placement import Cluster, Gpulet, Plan, Policy, Workload
from tenuto.placement.cluster import Gpu
from tenuto.placement.costs import costs_of
from tenuto.placement.expectation.outlook import IN_FULL, Outlooks, Traffic, expected_of
from tenuto.placement.expectation.sharing import Sharing
from tenuto.placement.plan import Expected, ExpectedModel, PlannedGpu, PolicyUsed
from tenuto.placement.policies.shared.gpu_pool import GpuPool
from tenuto.placement.policy import load_policy
from tenuto.placement.solve import complete, solve
from tenuto.placement.surviving import SLIGHT, Trial, bearable, drained, unmet, with_the_rest, without
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
    promised_rps: Mapping[str, float] | None = None,
    trial: Trial | None = None,
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
        promised_rps: what is to be promised of each model in place of what `anew` promises; then gpu-lets that end
            count as changes, too, and none ends only because it is not needed.
        trial: as of `solve`; it also says what plans near `old` serve of a policy that promises what trials serve.

    Raises:
        InvalidInputError: even to keep what runs takes more changes.
    """
    gpus = _gpus(old, anew, cluster)
    types = {gpu.id: gpu.type for gpu in gpus}
    there = {gpu.id for gpu in old.gpus if types.get(gpu.id) == gpu.type}
    held = tuple(gpulet for gpulet in old.gpulets if gpulet.gpu in there)
    kept = of_workload(old.model_copy(update={"gpulets": held}), workload)
    listed = gpus if not cluster.elastic else [gpu for gpu in gpus if any(g.gpu == gpu.id for g in held)]
    kept = kept.model_copy(update={"gpus": tuple(map(PlannedGpu.of, listed)), "notes": (), "believed": None})
    rates = {spec.name: spec.rate_rps for spec in workload.models}
    stays = promised_rps is not None
    # What is added is judged by formulas, so that it is to come up to what these give of the plan made anew; which plan
    # is taken, by what is promised, to which trials may belong.
    by_formulas, told_rps = (_promised(anew), _told_rps(anew)) if promised_rps is None else (promised_rps, promised_rps)
    parts = {name: min(IN_FULL, by_formulas.get(name, 0.0) / rates[name]) for name in rates}
    wanted_rps = {name: (min(IN_FULL, told_rps.get(name, 0.0) / rates[name]) - SLIGHT) * rates[name] for name in rates}
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

    def sizes_of(gpulet: Gpulet) -> dict[str, int]:
        return {replica.name: replica.batch_size for replica in gpulet.models}

    tries = trial if getattr(policy, "is_tried", False) else None

    def whole(plan: Plan, most: int = 0, losses: Trial | None = None) -> Plan:
        """Return a candidate with what is expected of it, and at most so many replicas more. Of a policy that promises
        what trials serve, it is tried."""
        finished = partial(complete, policy=policy, workload=asked, cluster=cluster, profiles=profiles, parts=parts)
        believed = Expected() if plan.believed is None else Expected(**plan.believed.model_dump())
        found = finished(plan.model_copy(update={"notes": (), "expected": believed}), at_most=most, trial=losses)
        served = None if tries is None else tries(found)
        if served is not None:
            told = {name: ExpectedModel(goodput_rps=served[name] * rates[name]) for name in found.expected.models}
            believed = Expected(goodput_rps=sum(each.goodput_rps for each in told.values()), models=told)
            found = finished(found.model_copy(update={"notes": (), "expected": believed}), at_most=0, trial=losses)
        # What holds the same as before keeps its limit, or its lack of one: another limit is another process.
        same = {gpulet.id: gpulet for gpulet in held}
        gpulets = [
            gpulet.model_copy(update={"memory_mib": before.memory_mib})
            if (before := same.get(gpulet.id)) is not None and sizes_of(before) == sizes_of(gpulet)
            else gpulet
            for gpulet in found.gpulets
        ]
        return renamed(found.model_copy(update={"gpulets": tuple(gpulets)}), old)

    def possible(plan: Plan, most: int = 0, losses: Trial | None = None) -> Iterator[Plan]:
        """Yield the same; nothing where the memory limits of what stays leave a new process no room."""
        with suppress(InvalidInputError):
            yield whole(plan, most, losses)

    def spared(plan: Plan) -> Iterator[Plan]:
        """Yield a plan without the changes that are not needed for what is asked of it, with the latencies that batches
        then have beside their neighbours; nothing where all are needed."""
        less, outlooks = plan, Outlooks()
        streaming = cluster.streams if asked.streaming is None else asked.streaming
        sharing = Sharing(costs_of(asked, cluster, profiles), profiles, streaming)
        then = {gpulet.id: gpulet for gpulet in kept.gpulets}
        least = {name: min(part, parts.get(name, 0.0)) - SLIGHT for name, part in outlooks.promised(plan)[0].items()}
        for name in sorted(not_ready(old, plan)):
            gpulets = (then.get(name) if gpulet.id == name else gpulet for gpulet in less.gpulets)
            others = {gpulet.id: gpulet for gpulet in gpulets if gpulet is not None}
            [gpu] = (gpulet.gpu for gpulet in plan.gpulets if gpulet.id == name)
            here = tuple(gpulet for gpulet in others.values() if gpulet.gpu == gpu)
            beside = sharing.completed(less.model_copy(update={"gpulets": here})).gpulets
            others |= {gpulet.id: gpulet for gpulet in beside}
            one = less.model_copy(update={"gpulets": tuple(others.values())})
            promised = outlooks.promised(one)[0]
            if all(promised.get(model, 0.0) >= part for model, part in least.items()):
                less = one
        if less is not plan:
            yield from possible(less)

    def candidates() -> Iterator[Plan]:
        yield from possible(kept)
        yield from possible(kept, most)
        yield made_anew
        if at_most is None:
            for _, plan in incremental(request, profiles, kept):
                if plan is not None:
                    yield from possible(plan)

    def rank(plan: Plan) -> tuple[float, ...]:
        got = _told_rps(plan)
        lacking = sum(max(0.0, rate - got.get(name, 0.0)) for name, rate in wanted_rps.items())
        price = plan.expected.cost_per_hour
        used = plan.expected.gpus_used
        ended = len({gpulet.id for gpulet in kept.gpulets} - {gpulet.id for gpulet in plan.gpulets}) if stays else 0
        changes = changes_of(old, plan) + ended
        return len(unmet(plan)), round(lacking, 6), changes, used if price is None else price, used

    most = len(gpus) * len(rates) if at_most is None else at_most
    made_anew = renamed(fitted(anew, kept, gpus, keep_idle=not cluster.elastic), old)
    found = list(candidates())
    allowed = [plan for plan in found if at_most is None or changes_of(old, plan) <= at_most]
    if not allowed:
        least = min(changes_of(old, plan) for plan in found)
        raise refused("--at-most", at_most, f"what is asked takes {least} changes at least", f"Allow {least}.")
    best = min(allowed, key=rank)
    smaller = None if stays else trimmed(request, best)
    best = min([best, *(possible(smaller) if smaller is not None else ())], key=rank)
    best = min([best, *spared(best)], key=rank)
    if trial is not None and any(spec.survive for spec in workload.models):
        best = next(possible(best, most - changes_of(old, best), trial), best)
    return best.model_copy(update={"notes": (*best.notes, _told(old, best, made_anew))})


def planned_without(
    running: Plan,
    places: Sequence[str],
    profiles: Profiles,
    gpus: Sequence[Gpu] = (),
    *,
    lost: Sequence[str] = (),
    used: PolicyUsed | None = None,
) -> Plan:
    """Return the plan near the one that runs which has nothing on some nodes, racks or GPUs, and all that is elsewhere
    where it is. It keeps what every model is promised, as far as there is room; where a place is drained no more, it
    promises what the policy would, too.

    Args:
        running: the plan that runs.
        places: that are to hold nothing.
        profiles: what the models cost.
        gpus: of the cluster, beside those of the plan.
        lost: GPUs that are not there either.
        used: the policy; default: that of the plan.

    Raises:
        InvalidInputError: there is no such place, or no GPU would be left.
    """
    whole = Cluster.of({gpu.id: gpu for gpu in (*gpus_of(running), *gpus)}.values()).as_cut
    left, asked, used = without(whole, (*places, *lost)), running.workload, used or running.policy
    policy, promised = load_policy(used.name, used.options), _promised(running)
    anew = solve(policy, bearable(asked, left.gpus), left, profiles)
    if set(running.drained) - set(places):
        promised |= {name: max(rate, promised.get(name, 0.0)) for name, rate in _promised(anew).items()}
    near = (policy, used, bearable(asked, left.gpus), left, profiles)
    plan = planned_near(running, anew, *near, promised_rps=promised)
    return drained(with_the_rest(plan, asked), whole, places)


def less_by(old: Plan, plan: Plan) -> dict[str, tuple[float, float]]:
    """Return the models of which a plan promises less than another one, with the rate of each that is promised now and
    that would be, in requests per second. What is promised with a margin is promised in full."""
    left = _promised(plan)
    pairs = {name: (rate, left.get(name, 0.0)) for name, rate in _promised(old).items()}
    return {name: (now, then) for name, (now, then) in pairs.items() if then < (IN_FULL - SLIGHT) * now}


def _promised(plan: Plan) -> dict[str, float]:
    """Return what the formulas promise of each model that a plan serves, in requests per second in time."""
    return _told_rps(plan.model_copy(update={"expected": expected_of(plan)}))


def _told_rps(plan: Plan) -> dict[str, float]:
    """Return what a plan says that it promises."""
    return {name: model.goodput_rps for name, model in plan.expected.models.items()}


def _gpus(old: Plan, anew: Plan, cluster: Cluster) -> tuple[Gpu, ...]:
    """Return the GPUs to plan on: those of a fixed cluster; of an elastic one those of the old plan, and as many as the
    new one takes."""
    if not cluster.elastic:
        return cluster.gpus
    pool, sizes = GpuPool(cluster), cluster.one_of_each
    here = [sizes[g.type].model_copy(update=dict(g)) for g in old.gpus if g.type in sizes and old.on_gpu(g.id)]
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
