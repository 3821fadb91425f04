"""Finds a plan near a given one: what need not move stays. The candidates are the controller's. Among those that serve
every model as well as the policy's fresh plan, the one that starts or loads fewest gpu-lets wins."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

from tenuto.errors import InvalidInputError, refused
from tenuto.placement import Cluster, Gpulet, Plan
from tenuto.placement.cluster import Gpu
from tenuto.placement.costs import costs_of
from tenuto.placement.expectation.outlook import IN_FULL, Outlooks, Traffic, expected_of
from tenuto.placement.expectation.sharing import Sharing
from tenuto.placement.plan import Expected, ExpectedModel, PlannedGpu, PolicyUsed
from tenuto.placement.planner.change_stages import not_ready
from tenuto.placement.planner.completion import complete
from tenuto.placement.planner.fault_tolerance import SLIGHT, Trial, bearable, drained, unmet, with_the_rest, without
from tenuto.placement.planner.gpu_matching import gpus_of, match_to_running, renamed
from tenuto.placement.planner.planning import incremental, of_workload, trimmed
from tenuto.placement.planner.solve import make_plan
from tenuto.placement.planner.task import Durations, PlanRequest, PlanTask
from tenuto.placement.policies.shared.gpu_pool import GpuPool
from tenuto.placement.policy import load_policy
from tenuto.profiles import Profiles


def changes_of(old: Plan, plan: Plan) -> int:
    """Return how many gpu-lets start, or load a model, in going from one plan to another."""
    return len(not_ready(old, renamed(plan, old)))


def plan_with_fewest_changes(
    old: Plan,
    anew: Plan,
    task: PlanTask,
    used: PolicyUsed,
    *,
    at_most: int | None = None,
    promised_rps: Mapping[str, float] | None = None,
) -> Plan:
    """Return the plan that serves every model as well as `anew` with the fewest changes of `old`, then at the lowest
    price. When changes are limited, it lacks as little as possible. Its last note says what staying near costs.

    Args:
        old: the running plan.
        anew: the policy's fresh plan for the same workload.
        task: what `anew` was made from; gpu-lets of `old` outside its cluster are gone. The trial of a policy that
            promises what trials serve also judges plans near `old`.
        used: the policy, as loaded by name.
        at_most: limit of gpu-lets that start or load.
        promised_rps: what to promise of each model in place of what `anew` promises. Then gpu-lets that end count as
            changes, too, and none ends only because it is not needed.

    Raises:
        InvalidInputError: keeping what runs already takes more changes.
    """
    workload, cluster, profiles, trial = task.workload, task.cluster, task.profiles, task.trial
    gpus = _gpus(old, anew, cluster)
    types = {gpu.id: gpu.type for gpu in gpus}
    there = {gpu.id for gpu in old.gpus if types.get(gpu.id) == gpu.type}
    held = tuple(gpulet for gpulet in old.gpulets if there.issuperset(gpulet.gpus))
    kept = of_workload(old.model_copy(update={"gpulets": held}), workload)
    listed = gpus if not cluster.elastic else [gpu for gpu in gpus if any(gpu.id in g.gpus for g in held)]
    kept = kept.model_copy(update={"gpus": tuple(map(PlannedGpu.of, listed)), "notes": (), "believed": None})
    rates = {spec.name: spec.rate_rps for spec in workload.models}
    stays = promised_rps is not None
    # Formulas judge what is added, so the target is what formulas give for the fresh plan. What plans promise, which
    # trials may decide, chooses among the candidates.
    by_formulas, told_rps = (_promised(anew), _told_rps(anew)) if promised_rps is None else (promised_rps, promised_rps)
    parts = {name: min(IN_FULL, by_formulas.get(name, 0.0) / rates[name]) for name in rates}
    wanted_rps = {name: (min(IN_FULL, told_rps.get(name, 0.0) / rates[name]) - SLIGHT) * rates[name] for name in rates}
    asked = workload.model_copy(update={"merge": "off"})  # merged programs are merged already
    request = PlanRequest(
        asked,
        Traffic(rates),
        rates,
        kept,
        gpus,
        used,
        Durations(1.0, 1.0),  # time does not count here
        1.0,
        0.0,
        types=dict(Counter(types.values())) if cluster.elastic else {},
        attainment=IN_FULL,
    )

    def sizes_of(gpulet: Gpulet) -> dict[str, int]:
        return {replica.name: replica.batch_size for replica in gpulet.models}

    tries = trial if task.policy.abilities.tries_plans else None

    def whole(plan: Plan, most: int = 0, losses: Trial | None = None) -> Plan:
        """Return a candidate with its expectations, and at most so many more replicas. When the policy promises what
        trials serve, the candidate is tried."""
        finished = partial(complete, task=replace(task, workload=asked, trial=losses), parts=parts)
        believed = Expected() if plan.believed is None else Expected(**plan.believed.model_dump())
        completed = finished(plan.model_copy(update={"notes": (), "expected": believed}), at_most=most)
        served = None if tries is None else tries(completed)
        if served is not None:
            told = {name: ExpectedModel(goodput_rps=served[name] * rates[name]) for name in completed.expected.models}
            believed = Expected(goodput_rps=sum(each.goodput_rps for each in told.values()), models=told)
            completed = finished(completed.model_copy(update={"notes": (), "expected": believed}), at_most=0)
        # A gpu-let with the same programs keeps its memory limit (or none): another limit is another process.
        same = {gpulet.id: gpulet for gpulet in held}
        gpulets = [
            gpulet.model_copy(update={"memory_mib": before.memory_mib})
            if (before := same.get(gpulet.id)) is not None and sizes_of(before) == sizes_of(gpulet)
            else gpulet
            for gpulet in completed.gpulets
        ]
        return renamed(completed.model_copy(update={"gpulets": tuple(gpulets)}), old)

    def possible(plan: Plan, most: int = 0, losses: Trial | None = None) -> Iterator[Plan]:
        """Yield the same; nothing when memory limits leave a new process no room."""
        with suppress(InvalidInputError):
            yield whole(plan, most, losses)

    def spared(plan: Plan) -> Iterator[Plan]:
        """Yield a plan without needless changes, with latencies beside the new neighbours; nothing when all count."""
        less, outlooks = plan, Outlooks()
        streaming = cluster.streams if asked.streaming is None else asked.streaming
        sharing = Sharing(costs_of(asked, cluster, profiles), profiles, streaming)
        then = {gpulet.id: gpulet for gpulet in kept.gpulets}
        least = {name: min(part, parts.get(name, 0.0)) - SLIGHT for name, part in outlooks.promised(plan)[0].items()}
        for name in sorted(not_ready(old, plan)):
            gpulets = (then.get(name) if gpulet.id == name else gpulet for gpulet in less.gpulets)
            others = {gpulet.id: gpulet for gpulet in gpulets if gpulet is not None}
            [changed] = (set(gpulet.gpus) for gpulet in plan.gpulets if gpulet.id == name)
            here = tuple(gpulet for gpulet in others.values() if not changed.isdisjoint(gpulet.gpus))
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
    made_anew = renamed(match_to_running(anew, kept, gpus, keep_idle=not cluster.elastic), old)
    found = list(candidates())
    allowed = [plan for plan in found if at_most is None or changes_of(old, plan) <= at_most]
    if not allowed:
        least = min(changes_of(old, plan) for plan in found)
        raise refused("--at-most", at_most, f"the plan takes at least {least} changes", f"Allow {least}.")
    best = min(allowed, key=rank)
    smaller = None if stays else trimmed(request, best)
    best = min([best, *(possible(smaller) if smaller is not None else ())], key=rank)
    best = min([best, *spared(best)], key=rank)
    if trial is not None and any(spec.survive for spec in workload.models):
        best = next(possible(best, most - changes_of(old, best), trial), best)
    return best.model_copy(update={"notes": (*best.notes, _told(old, best, made_anew))})


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
    left, asked, used = without(whole, (*places, *lost)), running.workload, used or running.policy
    policy, promised = load_policy(used.name, used.options), _promised(running)
    task = PlanTask(policy, bearable(asked, left.gpus), left, profiles)
    anew = make_plan(task)
    if set(running.drained) - set(places):
        promised |= {name: max(rate, promised.get(name, 0.0)) for name, rate in _promised(anew).items()}
    plan = plan_with_fewest_changes(running, anew, task, used, promised_rps=promised)
    return drained(with_the_rest(plan, asked), whole, places)


def less_by(old: Plan, plan: Plan) -> dict[str, tuple[float, float]]:
    """Return the models of which a plan promises less than the old one, with the old and new rate in requests per
    second. A rate promised with a margin counts as promised in full."""
    left = _promised(plan)
    pairs = {name: (rate, left.get(name, 0.0)) for name, rate in _promised(old).items()}
    return {name: (now, then) for name, (now, then) in pairs.items() if then < (IN_FULL - SLIGHT) * now}


def _promised(plan: Plan) -> dict[str, float]:
    """Return the requests per second in time that the formulas promise of each served model."""
    return _told_rps(plan.model_copy(update={"expected": expected_of(plan)}))


def _told_rps(plan: Plan) -> dict[str, float]:
    """Return the requests per second that a plan says it promises."""
    return {name: model.goodput_rps for name, model in plan.expected.models.items()}


def _gpus(old: Plan, anew: Plan, cluster: Cluster) -> tuple[Gpu, ...]:
    """Return the GPUs to plan on: a fixed cluster's; for an elastic one the old plan's, and as many as the new one
    takes."""
    if not cluster.elastic:
        return cluster.gpus
    pool, sizes = GpuPool(cluster), cluster.one_of_each
    kept = ((g, sizes[g.type]) for g in old.gpus if g.type in sizes and old.on_gpu(g.id))
    here = [size.model_copy(update={**dict(gpu), "memory_mib": size.memory_mib}) for gpu, size in kept]
    for gpu in here:
        pool.take_named(gpu.id, gpu.type)
    more = (pool.take(gpu.type) for gpu in anew.gpus if anew.on_gpu(gpu.id))
    return (*here, *(gpu for gpu in more if gpu is not None))


def _told(old: Plan, plan: Plan, anew: Plan) -> str:
    """Return what staying near costs, beside the fresh plan."""

    def said(each: Plan) -> str:
        expected = each.expected
        price = "" if expected.cost_per_hour is None else f", {expected.cost_per_hour:,.2f} $/h"
        return f"{expected.goodput_rps:,.4g} rps on {expected.gpus_used} GPUs{price}, changes: {changes_of(old, each)}"

    return f"near what runs: {said(plan)}; made anew: {said(anew)}"
