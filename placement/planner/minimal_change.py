"""Finds a plan near a given one: what need not move stays. Among the candidates that serve every model as well as the
policy's fresh plan, the one that starts or loads fewest gpu-lets wins."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain

from tenuto.errors import InvalidInputError, refused
from tenuto.placement.cluster import Cluster, Gpu
from tenuto.placement.components import connected_with
from tenuto.placement.costs import costs_of
from tenuto.placement.expectation.outlook import IN_FULL, Outlooks, alike_key, expected_of
from tenuto.placement.expectation.sharing import Sharing
from tenuto.placement.plan import Believed, ExpectedModel, Plan, PlannedGpu
from tenuto.placement.plan_edits import for_workload, on_gpus
from tenuto.placement.planner.candidates import Candidates
from tenuto.placement.planner.change_stages import not_ready
from tenuto.placement.planner.completion import complete_successor
from tenuto.placement.planner.fault_tolerance import SLIGHT, Trial, unmet
from tenuto.placement.planner.gpu_matching import match_to_running, renamed
from tenuto.placement.planner.plan_order import PlanRank
from tenuto.placement.planner.replica_placement import TRIED
from tenuto.placement.planner.task import PlanTask
from tenuto.placement.policies.shared.gpu_pool import GpuPool


def changes_of(old: Plan, plan: Plan) -> int:
    """Return how many gpu-lets start, or load a model, in going from one plan to another."""
    return len(not_ready(old, renamed(plan, old)))


def plan_from_what_runs(task: PlanTask) -> tuple[Plan | None, Sequence[Plan]]:
    """Return what runs, with the few replicas that it lacks, where that promises all that can be asked for: the policy
    need not plan. None: it does not, or only the policy's plan from nothing can tell, as on an elastic cluster, of
    applications, and where that plan is the measure. Return also what was tried."""
    if task.replaced.promises == "anew" or task.cluster.elastic or task.workload.applications:
        return None, ()
    return _MinimalChange(task, None).from_what_runs()


def plan_with_fewest_changes(task: PlanTask, anew: Plan, tried: Sequence[Plan] = ()) -> Plan:
    """Return the plan that promises every model as much as the task asks with the fewest changes of what runs, then at
    the lowest price. When changes are limited, it lacks as little as possible. Its last note says what staying near
    costs.

    When it is to promise what the running plan does, gpu-lets that end count as changes, too, and none ends only
    because it is not needed.

    Args:
        task: with a running plan. Its gpu-lets outside the cluster are gone. The trial of a policy that promises what
            trials serve also judges plans near it.
        anew: the policy's plan of the task from nothing.
        tried: what runs, and that with a few more replicas, as `plan_from_what_runs` tried them.

    Raises:
        InvalidInputError: keeping what runs already takes more changes.
    """
    return _MinimalChange(task, anew, tried).best()


class _MinimalChange:
    """Finishes candidates near a running plan, and judges them by what they lack and change."""

    def __init__(self, task: PlanTask, anew: Plan | None, tried: Sequence[Plan] = ()) -> None:
        running, cluster = task.replaced, task.cluster
        old, at_most = running.plan, running.most_changes
        gpus = cluster.gpus if anew is None else _gpus(old, anew, cluster)
        rates_rps: Mapping[str, float] = {spec.name: spec.rate_rps for spec in task.workload.models}
        types = {gpu.id: gpu.type for gpu in gpus}
        held = on_gpus(old, (gpu for gpu in old.gpus if types.get(gpu.id) == gpu.type))
        used = set(held.used_gpus)
        listed = tuple(PlannedGpu.of(gpu) for gpu in gpus if not cluster.elastic or gpu.id in used)
        restricted = for_workload(held, task.workload)
        self._kept = restricted.model_copy(update={"gpus": listed, "notes": (), "believed": None})
        self._old, self._held = old, held
        self._made_anew: Plan | None = None
        self._near_anew: Plan | None = None  # without its needless changes
        if anew is not None:
            self._made_anew = renamed(match_to_running(anew, self._kept, gpus, keep_idle=not cluster.elastic), old)
        self._rates_rps, self._at_most, self._ends_what_idles = rates_rps, at_most, running.promises == "anew"
        # Where many replicas are missing, the policy's plan without its needless changes comes sooner than they do.
        is_full = not cluster.elastic and used >= {gpu.id for gpu in gpus}
        self._is_asked_first = running.promises == "larger" or (running.promises == "anew" and is_full)
        self._most_replicas = len(gpus) * len(rates_rps) if at_most is None else at_most
        # Formulas judge what is added, so the target is what formulas give for the fresh plan. What plans promise,
        # which trials may decide, chooses among the candidates.
        by_formulas, by_promise = (rates_rps, rates_rps) if anew is None else (formula_rps(anew), _promised_rps(anew))
        if running.promises != "anew":
            running_rps, fresh_rps = formula_rps(old), by_formulas if running.promises == "larger" else {}
            by_formulas = by_promise = {n: max(running_rps.get(n, 0.0), fresh_rps.get(n, 0.0)) for n in rates_rps}
        # Where the policy may plan after all, nothing less than a full promise stands for its plan.
        full = task.attainment if running.promises == "larger" else IN_FULL
        self._parts = {name: min(full, by_formulas.get(name, 0.0) / rate) for name, rate in rates_rps.items()}
        self._least_rps = {
            name: (min(full, by_promise.get(name, 0.0) / rate) - SLIGHT) * rate for name, rate in rates_rps.items()
        }
        # Replicas were sought for full promises. Where the policy promises less, fewer of them may do.
        self._tried = tried if all(part >= IN_FULL - 2.0 * SLIGHT for part in self._parts.values()) else ()
        growth = tuple(dict.fromkeys(types.values())) if cluster.elastic else ()
        self._losses, self._trial = task.trial, task.trial if task.policy.abilities.tries_plans else None
        runs = replace(running, plan=self._kept, growth=growth)
        self._task = replace(task, trial=None, running=runs)
        self._source = Candidates(self._task.on(Cluster.of(gpus)))

    def from_what_runs(self) -> tuple[Plan | None, Sequence[Plan]]:
        """Return what runs, else that with a few more replicas, with the note; None where that lacks anything. Return
        also what was tried."""
        tried = []
        # A replica is judged in so many places, and where the policy is asked, each gpu-let about once: see `_spared`.
        few = max(1, len(self._kept.gpulets) // TRIED) if self._is_asked_first else self._most_replicas
        for plan in chain(self._finished(self._kept), self._finished(self._kept, min(few, self._most_replicas))):
            tried.append(plan)
            if self._is_enough(plan):
                return self._settled(plan), tried
        return None, tried

    def best(self) -> Plan:
        """Return the best plan, with the note."""
        plans = list(self._candidates())
        allowed = [plan for plan in plans if self._at_most is None or changes_of(self._old, plan) <= self._at_most]
        if not allowed:
            least = min(changes_of(self._old, plan) for plan in plans)
            rule = f"the plan takes at least {least} changes"
            raise refused("--at-most", self._at_most, rule, f"Allow {least}.")
        best = min(allowed, key=self._rank)
        if self._ends_what_idles and (smaller := self._source.trimmed(best)) is not None:
            best = min([best, *self._finished(smaller)], key=self._rank)
        return self._settled(best)

    def _is_enough(self, plan: Plan) -> bool:
        """Return whether a plan promises all that it is to, with no more changes than are allowed."""
        rank = self._rank(plan)
        is_allowed = self._at_most is None or changes_of(self._old, plan) <= self._at_most
        return is_allowed and not rank.lacking_rps and not rank.unmet_wishes

    def _settled(self, best: Plan) -> Plan:
        """Return a plan without needless changes, with what survives losses and with the note."""
        if best is not self._near_anew:
            best = min([best, *self._spared(best)], key=self._rank)
        if self._losses is not None and any(spec.survive for spec in self._task.workload.models):
            left = self._most_replicas - changes_of(self._old, best)
            best = next(self._finished(best, left, self._losses), best)
        anew = "not needed" if self._made_anew is None else self._described(self._made_anew)
        note = f"near what runs: {self._described(best)}; made anew: {anew}"
        return best.model_copy(update={"notes": (*best.notes, note)})

    def _candidates(self) -> Iterator[Plan]:
        yield from self._tried or self._finished(self._kept)
        if self._made_anew is not None:
            yield self._made_anew
            if self._is_asked_first:
                self._near_anew = next(self._spared(self._made_anew), self._made_anew)
                yield self._near_anew
                if self._is_enough(self._near_anew):
                    return  # a search replica by replica takes longer, and mostly changes more
        if self._is_asked_first or not self._tried:
            yield from self._finished(self._kept, self._most_replicas)
        if self._at_most is None:
            for candidate in self._source.incremental(self._kept):
                yield from self._finished(candidate.plan)

    def _rank(self, plan: Plan) -> PlanRank:
        promised_rps, expected = _promised_rps(plan), plan.expected
        lacking = sum(max(0.0, rate - promised_rps.get(name, 0.0)) for name, rate in self._least_rps.items())
        changes = changes_of(self._old, plan)
        if not self._ends_what_idles:
            changes += len({gpulet.id for gpulet in self._kept.gpulets} - {gpulet.id for gpulet in plan.gpulets})
        return PlanRank(
            lacking_rps=round(lacking, 6),
            unmet_wishes=round(sum(unmet(plan).values()), 2),  # to one percent of a model
            changes=changes,
            price=expected.price,
            gpus=expected.gpus_used,
        )

    def _finished(self, plan: Plan, replicas: int = 0, losses: Trial | None = None) -> Iterator[Plan]:
        """Yield a candidate with its expectations, and at most so many more replicas. When the policy promises what
        trials serve, the candidate is tried. Yield nothing when memory limits leave a new process no room."""
        try:
            done = self._completed(plan, replicas, losses)
            served = None if self._trial is None else self._trial(done)
            if served is not None:
                models = {
                    name: ExpectedModel(goodput_rps=served[name] * self._rates_rps[name])
                    for name in done.expected.models
                }
                believed = Believed(goodput_rps=sum(model.goodput_rps for model in models.values()), models=models)
                done = self._completed(done.model_copy(update={"believed": believed}), 0, losses)
        except InvalidInputError:
            return
        yield renamed(done, self._old)

    def _completed(self, plan: Plan, replicas: int, losses: Trial | None) -> Plan:
        task = replace(self._task, trial=losses)
        return complete_successor(plan, self._held, task, parts=self._parts, at_most=replicas)

    def _spared(self, plan: Plan) -> Iterator[Plan]:
        """Yield a plan without needless changes, with latencies beside the new neighbours; nothing when all count."""
        if not (changed := sorted(not_ready(self._old, plan))):
            return
        workload, cluster, profiles = self._task.workload, self._task.cluster, self._task.profiles
        streaming = cluster.streams if workload.streaming is None else workload.streaming
        sharing, outlooks = Sharing(costs_of(workload, cluster, profiles), profiles, streaming), Outlooks()
        before = {gpulet.id: gpulet for gpulet in self._kept.gpulets}
        promised = outlooks.promised(plan)[0]
        least = {name: min(part, self._parts.get(name, 0.0)) - SLIGHT for name, part in promised.items()}
        less, types, needed = plan, {gpu.id: gpu.type for gpu in plan.gpus}, set[object]()
        hosted = {replica.name for gpulet in self._kept.gpulets for replica in gpulet.models}
        models = {gpulet.id: sorted(replica.name for replica in gpulet.models) for gpulet in plan.gpulets}
        # Halves of what changes are undone at once, and what new models need comes last.
        changed.sort(key=lambda name: (not hosted.issuperset(models[name]), models[name], name))
        halves = [changed]
        while halves:
            names = {*(half := halves.pop())}
            own = tuple(gpulet for gpulet in less.gpulets if gpulet.id in names)
            undone = (before.get(gpulet.id) if gpulet.id in names else gpulet for gpulet in less.gpulets)
            gpulets = {gpulet.id: gpulet for gpulet in undone if gpulet is not None}
            on = {gpu for gpulet in own for gpu in gpulet.gpus}
            beside = tuple(gpulet for gpulet in gpulets.values() if not on.isdisjoint(gpulet.gpus))
            kinds = Counter((types[gpulet.gpu], alike_key(gpulet)) for gpulet in own)
            change = frozenset(kinds.items()), frozenset(Counter(map(alike_key, beside)).items())
            if change in needed:  # as much is lost without these as without those before
                continue
            completed = sharing.completed(less.model_copy(update={"gpulets": beside})).gpulets
            gpulets |= {gpulet.id: gpulet for gpulet in completed}
            other = less.model_copy(update={"gpulets": tuple(gpulets.values())})
            # Under the objective `each`, what a model gets depends on all others.
            near = other.gpulets if plan.objective == "each" else connected_with((*own, *beside), other.gpulets)
            parts = outlooks.promised(other.model_copy(update={"gpulets": near}))[0]
            concerned = {replica.name for gpulet in (*own, *near) for replica in gpulet.models} & least.keys()
            if all(parts.get(model, 0.0) >= least[model] for model in concerned):
                less, needed = other, set()
            elif len(half) > 1:
                middle = len(half) // 2
                halves += [half[middle:], half[:middle]]
            else:
                needed.add(change)
        if less is not plan:
            yield from self._finished(less)

    def _described(self, plan: Plan) -> str:
        """Return what a plan serves, costs and changes."""
        expected = plan.expected
        price = "" if expected.cost_per_hour is None else f", {expected.cost_per_hour:,.2f} $/h"
        changes = changes_of(self._old, plan)
        return f"{expected.goodput_rps:,.4g} rps on {expected.gpus_used} GPUs{price}, changes: {changes}"


def less_by(old: Plan, plan: Plan) -> dict[str, tuple[float, float]]:
    """Return the models of which a plan promises less than the old one, with the old and new rate in requests per
    second. A rate promised with a margin counts as promised in full."""
    after_rps = formula_rps(plan)
    pairs = {name: (rate, after_rps.get(name, 0.0)) for name, rate in formula_rps(old).items()}
    return {name: (before, after) for name, (before, after) in pairs.items() if after < (IN_FULL - SLIGHT) * before}


def formula_rps(plan: Plan) -> dict[str, float]:
    """Return the requests per second in time that the formulas promise of each served model."""
    return {name: model.goodput_rps for name, model in expected_of(plan).models.items()}


def _promised_rps(plan: Plan) -> dict[str, float]:
    """Return the requests per second that a plan says it promises."""
    return {name: model.goodput_rps for name, model in plan.expected.models.items()}


def _gpus(old: Plan, anew: Plan, cluster: Cluster) -> tuple[Gpu, ...]:
    """Return the GPUs to plan on: a fixed cluster's; for an elastic one the old plan's, and as many as the new one
    takes."""
    if not cluster.elastic:
        return cluster.gpus
    pool, one_of_each = GpuPool(cluster), cluster.one_of_each
    used = ((gpu, one_of_each[gpu.type]) for gpu in old.gpus if gpu.type in one_of_each and old.on_gpu(gpu.id))
    gpus = [known.model_copy(update={**dict(gpu), "memory_mib": known.memory_mib}) for gpu, known in used]
    for gpu in gpus:
        pool.named_gpu(gpu.id, gpu.type)
    more = (pool.next_gpu(gpu.type) for gpu in anew.gpus if anew.on_gpu(gpu.id))
    return (*gpus, *(gpu for gpu in more if gpu is not None))
