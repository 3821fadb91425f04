"""Proposes the plan that takes the place of the running one: the candidate whose change pays best, or else the one that
comes nearest to paying. The controller calls it in a process of its own, with a time limit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter

from tenuto.errors import InvalidInputError
from tenuto.placement.cluster import Cluster, Gpu
from tenuto.placement.placement_constraints import is_at
from tenuto.placement.plan import Plan
from tenuto.placement.plan_edits import drained, for_workload, on_gpus
from tenuto.placement.planner.candidates import Candidate, Candidates, gpus_used
from tenuto.placement.planner.change_cost import ChangeScale, ChangeWorth, Rent
from tenuto.placement.planner.plan_order import PlanRank
from tenuto.placement.planner.standby import Standby, standbys, twins
from tenuto.placement.planner.task import PlanRequest, PlanTask
from tenuto.placement.workload import EXCESS, ModelSpec
from tenuto.profiles import Profiles


@dataclass(frozen=True)
class Proposal:
    """The best candidate, how it was made and what it is worth. `plan` None: there is none, as `worth` says.

    `needed_gpus` is how many GPUs of each type would carry everything; None: the policy could not tell. `standby` are
    idle processes for the plan that then runs.
    """

    plan: Plan | None
    how: str
    worth: ChangeWorth
    needed_gpus: Mapping[str, int] | None = None
    standby: tuple[Standby, ...] = ()


def propose(request: PlanRequest, profiles: Profiles) -> Proposal:
    """Return the best candidate, and the standby processes for the plan that then runs. Nothing is planned onto drained
    places, and what still runs there has to go. Where the policy cannot be had, there is no candidate."""
    running, places = request.running.plan, request.running.plan.drained
    aside: list[Gpu] = []
    if places:
        aside = [gpu for gpu in request.gpus if is_at(gpu, places)]
        gpus = tuple(gpu for gpu in request.gpus if gpu not in aside)
        running = on_gpus(running, gpus)
        request = replace(request, gpus=gpus, running=replace(request.running, plan=running))
    task, why = None, "only standby processes were wanted"
    if not request.only_standby:
        try:
            task = request.task(profiles)
        except InvalidInputError as error:
            why = str(error)
    proposal = Proposal(None, "", ChangeWorth(False, why)) if task is None else _best(task)
    if proposal.plan is not None and places:
        proposal = replace(proposal, plan=drained(proposal.plan, Cluster.of(aside), places))
    plan = proposal.plan if proposal.plan is not None and proposal.worth.pays else running
    waiting: tuple[Standby, ...] = ()
    if request.standby_gpus:
        waiting = twins(plan, request.standby_gpus, request.gpus, running)
    if request.standby_pct is not None:
        waiting += standbys(plan, request.standby_pct, profiles, request.gpus, running)
    return replace(proposal, standby=waiting)


def _best(task: PlanTask) -> Proposal:
    """Return the best candidate of a task, or the running plan with what is declared now where no change pays. Where it
    pays to add models that came, nothing else is tried."""
    candidates = Candidates(task)
    best = _best_of(candidates, candidates.additions()) if candidates.models_to_add else None
    if best is None or not best.worth.pays:
        best = _best_of(candidates, candidates.all())
    if best is None:
        why = "; ".join(candidates.faults) or "no other plan was found"
        needed = candidates.needed_where_runs(candidates.running.plan)
        return Proposal(None, "", ChangeWorth(False, why), needed)
    if best.worth.pays and best.plan is not None:
        best = replace(best, plan=candidates.with_promises(best.plan))
    elif why := _why_declared_otherwise(candidates):
        plan = for_workload(candidates.running.plan, task.workload)
        if plan.gpulets:
            plan = candidates.with_promises(candidates.made_for_traffic(candidates.completed(plan)))
            best = Proposal(plan, "kept", ChangeWorth(True, why))
    runs = best.plan if best.worth.pays and best.plan is not None else candidates.running.plan
    return replace(best, needed_gpus=candidates.needed_where_runs(runs))


def _best_of(candidates: Candidates, plans: Sequence[Candidate]) -> Proposal | None:
    """Return the best of some candidates on the GPUs that are present. Where one on GPUs to come saves more, those are
    needed."""
    if not plans:
        return None
    judge = _WorthOfChange(candidates)
    ranked = sorted(((*judge.judged(candidate), candidate.plan) for candidate in plans), key=itemgetter(0))
    present = (each for each in ranked if candidates.to_come.keys().isdisjoint(each[2].used_gpus))
    (rank, first, plan), (rank_here, best, _) = ranked[0], next(present)
    if first.worth.pays and rank.price < (min(0.0, rank_here.price) if best.worth.pays else 0.0):
        candidates.needed_gpus = gpus_used(plan)  # it saves more than what can be had now
    return best


class _WorthOfChange:
    """Judges candidates by what the change to them is worth."""

    def __init__(self, candidates: Candidates) -> None:
        to_come, running = tuple(candidates.to_come.values()), candidates.running
        gpus = (*candidates.gpus, *to_come)
        rent = Rent.on(gpus, by_gpu=bool(running.growth), by_node=running.by_node)
        self._candidates = candidates
        self._scale = ChangeScale(running, candidates.gpus, rent, to_come)

    def judged(self, candidate: Candidate) -> tuple[PlanRank, Proposal]:
        """Return the rank of a candidate, and the candidate made for the traffic."""
        plan = self._candidates.made_for_traffic(candidate.plan)
        relieved = self._candidates.relieved(plan)
        worth = self._scale.weigh(plan, relieved)
        uncarried_rps = -round(worth.carried_rps)  # and as much again for every plan as there is to carry
        rank = PlanRank(
            does_not_pay=not worth.pays,
            # Where no model asks for places, what the change gains counts more than what may come at once.
            lacking_rps=uncarried_rps if self._candidates.asks_for_places else 0,
            unmet_wishes=-relieved,
            lost_requests=round(worth.lost_requests - worth.gained_requests),
            uncarried_rps=uncarried_rps,
            price=worth.spent_rent - worth.saved_rent,
            stages=worth.stages,
        )
        return rank, Proposal(plan, candidate.how, worth)


def _why_declared_otherwise(candidates: Candidates) -> str:
    """Return how the workload differs from the running plan's, so that the running plan has to be told; empty when it
    does not: no model was removed, no operator changed an entry, and no model needs more than the scheduler grants it
    under overload while the plan carries it."""
    running, upper_rps = candidates.running.plan, candidates.running.traffic.upper_rps
    before, after = ({spec.name: spec for spec in models} for models in (running.models, candidates.workload.models))
    gone = sorted(before.keys() - after.keys())
    changed = sorted(name for name in before.keys() & after.keys() if _entry(before[name]) != _entry(after[name]))
    why = [f"{', '.join(gone)} left the workload"] if gone else []
    why += [f"the entry of {', '.join(changed)} has changed"] if changed else []
    more = [spec.name for spec in running.models if upper_rps.get(spec.name, 0.0) > EXCESS * spec.rate_rps]
    if more and not why and before.keys() == after.keys() and not candidates.missing(running):
        why = [f"the running plan carries more of {', '.join(more)} than it was made for"]
    return "; ".join(why)


def _entry(spec: ModelSpec) -> tuple[object, ...]:
    """Return the terms on which a model is served, and what is served."""
    terms = (spec.slo_ms, spec.slo, spec.weight, spec.priority, spec.share_pct, spec.shadow)
    return (*terms, spec.source, spec.weights_path, spec.options)
