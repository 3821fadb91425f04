"""Tenuto's own policy: plans are judged by what the scheduler that serves them makes of them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass

import numpy as np

from tenuto.batching.planning.judging import Worth
from tenuto.batching.planning.plan_search import JudgedPlan, PlanSearch, SearchOptions, is_large
from tenuto.batching.planning.token_trials import STEADY_SLOS, carried_in_trial, served_in_trial
from tenuto.batching.registry import scheduler_class
from tenuto.errors import Problem
from tenuto.placement import Cluster, Plan, Policy, Workload
from tenuto.placement.costs import costs_of
from tenuto.placement.generation_capacity import GeneratingHost
from tenuto.placement.plan import Expected, ExpectedModel, PolicyUsed
from tenuto.placement.policies.shared.hosting import planned_gpus
from tenuto.placement.policy import Abilities
from tenuto.placement.workload import ModelSpec, Objective
from tenuto.profiles import Profiles, StepCost


@dataclass(kw_only=True, eq=False)
class TenutoPolicy(SearchOptions, Policy):
    """Chooses among the plans of other policies by the queueing and batches that are expected of them, and by trials in
    virtual time under the scheduler that will serve them.

    1. PlanSource: the plans of other policies (those that can plan from these profiles), every model on every GPU, and
       under the objective `each` every model at home on one GPU.
    2. Each serves the same arrivals in virtual time; its value is the weighted requests per second in time. Of an
       application the answers count, and splits of its deadline are tried one after the other. The one
       that is expected to serve most, by the model from which every plan's expectation is made, is tried first; of
       those that are expected to serve everything, the one with most headroom. It is taken if it does.
    3. On an elastic cluster the cheapest plan that keeps every model's `attainment` in its trial is sought (`search`).
    4. What is promised is what longer trials of other arrivals served, no more and no less.

    Of more than 40 models or GPUs what is expected decides, without trials. On GPUs that may be cut into MIG
    instances (`mig: managed`): layouts, instances, processes and models that take turns are chosen together
    (`tenuto.batching.planning.cutting`); on an elastic cluster the fewest GPUs on which all are expected to be in time,
    and are in the trial.

    On a fixed cluster the result serves no less in its trial than any candidate. Nothing is random: the arrivals have a
    seed.

    Options:
        scheduler: the scheduler to plan for.
        starts: policies whose plans are candidates; `none` for none.
        requests: arrivals of one trial, about.
        attainment: of every model that is aimed at.
        seed: of the trials' arrivals.
        network_ms: delays the scheduler budgets: sending a batch, its data per request, the answer.
    """

    name = "tenuto"
    summary = "chooses among other policies' plans by expected queueing; trials in virtual time decide"
    source = "this project, docs/reference/own-policy.md"
    readings = "believes the profile; beyond 40 models or GPUs no trials"
    abilities = Abilities(
        ("weighted", "total", "each"),
        generation="shares",
        tries_plans=True,
        splits_deadlines=True,
        is_interruptible=True,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self._compares_by: Objective | None = None
        self._tries_plans = True
        scheduler_class(self.scheduler)

    def _problems(self) -> Iterator[Problem]:
        if not 1 <= len(self.network_ms) <= 3 or math.inf in self.network_ms:
            rule = "must be up to three numbers of ms"
            yield Problem("--option network_ms", self.network_ms, rule, "Write 0.1,0.05,2.")
        if self.name in self.starts:
            yield Problem("--option starts", self.starts, "a policy cannot start from itself", "Leave it away.")

    def for_worst_served(self) -> TenutoPolicy:
        """Return the same policy, which takes the plan that serves the worst served model best. Plans are served by the
        workload's objective all the same."""
        policy = copy(self)
        policy._compares_by = "each"
        return policy

    def for_parts_of(self, workload: Workload, cluster: Cluster) -> TenutoPolicy:
        """Return the same policy, which tries plans on parts of a cluster only if it would try those on all of it."""
        policy = copy(self)
        policy._tries_plans = not is_large(workload, cluster)
        return policy

    def carries(self, spec: ModelSpec, cost: StepCost, kv_tokens: int) -> tuple[float, int]:
        """Return what a share carries of a model that generates, by trials in virtual time."""
        return carried_in_trial(spec, cost, kv_tokens, attainment=self.attainment, seed=self.seed)

    def serves(self, spec: ModelSpec, hosts: Sequence[GeneratingHost]) -> float:
        """Return which part of its rate gpu-lets of a model that generates serve, by a trial in virtual time."""
        return served_in_trial(spec, hosts, attainment=self.attainment, seed=self.seed)

    def place(self, workload: Workload, cluster: Cluster, profiles: Profiles) -> Plan:
        """Return the best plan of the search."""
        if not workload.models:
            return _nothing(cluster, {})
        by, tries_plans = self._compares_by, self._tries_plans
        search = PlanSearch(self, workload, cluster, profiles, self.watch, compares_by=by, tries_plans=tries_plans)
        best = search.best()
        if best is None:
            why = f"no start can plan: {next(iter(search.candidates.refused.values()), 'there is none')}"
            late = "on none of the GPUs is one request within its SLO"
            costs = costs_of(workload, cluster, profiles)
            able = {name: any(on.steps()[1] <= on.slo_ms for on in by.values()) for name, by in costs.items()}
            return _nothing(cluster, {spec.name: why if able[spec.name] else late for spec in workload.models})
        hosted = {replica.name for gpulet in best.plan.gpulets for replica in gpulet.models}
        reasons = {
            spec.name: best.plan.unserved_reasons.get(spec.name, "the other models serve more without it")
            for spec in workload.models
            if spec.name not in hosted
        }
        return best.plan.model_copy(
            update={
                "policy": PolicyUsed(name=self.name),
                # What was tried is a scheduler that runs whichever batch is due, not the rounds of gpulet's plan.
                "gpulets": tuple(gpulet.model_copy(update={"duty_cycle_ms": None}) for gpulet in best.plan.gpulets),
                "expected": _expected(best, search.candidates.worth, hosted, self.attainment),
                "unserved": tuple(reasons),
                "unserved_reasons": reasons,
                "notes": tuple(_notes(search, best, self.scheduler)),
            }
        )


def _nothing(cluster: Cluster, reasons: dict[str, str]) -> Plan:
    """Return the plan that serves no model, each for its reason."""
    return Plan(
        policy=PolicyUsed(name=TenutoPolicy.name),
        gpus=planned_gpus(cluster, ()),
        unserved=tuple(reasons),
        unserved_reasons=reasons,
    )


def _expected(best: JudgedPlan, worth: Worth, hosted: set[str], attainment: float) -> Expected:
    """Return what a trial served; nothing without one, nor of a model in time whose SLO the trial was too short for."""
    judged = best.judged  # of a rare target a single miss is more than it may lose, and kept
    is_kept = judged.kept(attainment)
    parts = np.where(is_kept, np.maximum(judged.attainment, attainment), judged.attainment)
    slos_ms = np.array([spec.slo_ms for spec in worth.targets])
    is_known = ~is_kept | (STEADY_SLOS * slos_ms <= 1000.0 * judged.window_s)
    part_of, known = worth.parts_of_models(parts.tolist()), worth.parts_of_models(is_known.astype(float).tolist())
    models = {
        spec.name: ExpectedModel(goodput_rps=round(spec.rate_rps * part_of[spec.name], 6))
        for spec in worth.models
        if spec.name in hosted and judged is not best.foreseen and known[spec.name] == 1.0
    }
    return Expected(goodput_rps=round(sum(model.goodput_rps for model in models.values()), 6), models=models)


def _notes(search: PlanSearch, best: JudgedPlan, scheduler: str) -> Iterator[str]:
    judged, worst = best.judged, int(best.judged.attainment.argmin())
    by = "in its trial" if judged is not best.foreseen else "by the model of queueing and batches"
    yield f"the plan of {best.start}; plans tried in virtual time under '{scheduler}': {search.count}"
    yield (
        f"{by} {100 * judged.ok_rps.sum() / judged.offered_rps.sum():.4g} % of the requests are in time, the least of "
        f"{search.candidates.worth.targets[worst].name}: {100 * judged.attainment[worst]:.4g} %"
    )
