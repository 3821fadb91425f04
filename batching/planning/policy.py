"""Tenuto's own policy: plans are judged by what the scheduler that serves them makes of them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from tenuto.batching.planning.buying import cheapest
from tenuto.batching.planning.fairness import BALANCED, balanced, is_shared_out
from tenuto.batching.planning.judging import Judged
from tenuto.batching.planning.patterns import best_by_patterns, keeps
from tenuto.batching.planning.search import QUICKLY, Found, Search, SearchOptions, planned
from tenuto.batching.registry import scheduler_class
from tenuto.errors import Problem
from tenuto.placement import Cluster, Plan, Policy, Workload
from tenuto.placement.interference.named import canonical_name, stand_ins
from tenuto.placement.plan import Expected, ExpectedModel, PolicyUsed
from tenuto.placement.policies.shared.hosting import planned_gpus
from tenuto.placement.program import Gpulet
from tenuto.profiles import Profiles

LARGE = 40  # models or GPUs; beyond, changes of one GPU at a time are too many
# Starts that take minutes for more models, or seconds and serve half of what the others do.
SLOW = {"ideal": LARGE, "gpulet": 500, "usher": 500, "wao-usher": 500}


@dataclass(kw_only=True, eq=False)
class TenutoPolicy(SearchOptions, Policy):
    """Judges plans by the queueing and batches that are expected, improves the best, and tries them in virtual time
    under the scheduler that will serve them.

    1. Starts: the plans of other policies (those that can plan from these profiles), and every model on every GPU,
       whole or in equal gpu-lets. Of each the layout is kept, which models on which share of which GPU, with its own
       largest batches and with the largest that can be in time, because the scheduler chooses each batch against its
       deadlines; gpu-lets of one GPU slow each other by one interference model, the same for all.
    2. Search: each layout is judged by the model from which every plan's expectation is made. From the best two, small
       changes for the models that lose most requests (a model more or less on a gpu-let, shares shifted, gpu-lets split
       or joined, a GPU laid out like another) are kept when they are expected to serve more, until all models have
       their `attainment` (with half of the misses to spare) or `tries` changes are spent. Then batches are capped at
       half as much again as the largest that is gathered.
    3. Trials: the starts within 10 % of the best by the model, as they were planned, and the best by the model, up to
       four within 3 %, serve the same arrivals in virtual time. Their value is the weighted requests per second in
       time. Those within 2 % of the best are told apart by longer trials, in which a start is left only for what serves
       more. Of layouts that are expected to serve everything the one whose busiest gpu-let is the least busy is tried
       first (as busy within 5 %, or below half of its time: the one with the fewest gpu-lets), and taken if it does.
       Where it serves as much in its trial with batches capped as in the search, they are. What only the model finds to
       be enough is improved by the same model at a tenth more load, and tried too.
    4. On an elastic cluster the cheapest plan that keeps every model's `attainment` is sought: from the cheapest start
       that is expected to, fewer GPUs (of one type by bisection) or cheaper ones. Trials then decide: more GPUs where
       the attainment is missed, one less where that is expected to do nearly.

    More than 40 models or GPUs are planned as patterns instead (`patterns`): no trials, but the same model and integer
    counts of GPUs that look alike.

    On a fixed cluster the result serves no less in its trial than any start under the same interference that the model
    does not find to be 10 % worse. Nothing is random: the arrivals have a seed.

    Options:
        scheduler: the scheduler to plan for.
        interference: `contention`, `gpulet`, `igniter`, `none` or `contention:FILE`; see docs/interference.md.
        starts: policies whose plans are starts; `none` for none.
        tries: changes looked at for one set of GPUs at most.
        requests: arrivals of one trial, about.
        attainment: of every model that is aimed at.
        max_batch: largest batch considered.
        seed: of the trials' arrivals.
        network_ms: delays the scheduler budgets: sending a batch, its data per request, the answer.
    """

    name = "tenuto"
    summary = "improves the best of other policies' plans by expected queueing; trials in virtual time decide"
    source = "this project, docs/own-policy.md"
    readings = "believes the profile and one interference model; beyond 40 models or GPUs no trials"
    is_interruptible = True

    def __post_init__(self) -> None:
        super().__post_init__()
        scheduler_class(self.scheduler)
        self.interference = canonical_name(self.interference)

    def _problems(self) -> Iterator[Problem]:
        if not 1 <= len(self.network_ms) <= 3 or math.inf in self.network_ms:
            rule = "must be up to three numbers of ms"
            yield Problem("--option network_ms", self.network_ms, rule, "Write 0.1,0.05,2.")
        if self.name in self.starts:
            yield Problem("--option starts", self.starts, "a policy cannot start from itself", "Leave it away.")

    def place(self, workload: Workload, cluster: Cluster, profiles: Profiles) -> Plan:
        """Return the best plan found.

        Raises:
            InvalidInputError: iGniter's interference was chosen and the profiles lack its hardware coefficients.
        """
        if not workload.models:
            return _nothing(cluster, {})
        if len(workload.models) > LARGE or len(cluster.gpus) > LARGE:
            return self._by_patterns(workload, cluster, profiles)
        search = Search(self, workload, cluster, profiles, self.watch)
        found = cheapest(search, cluster, self.attainment) if cluster.elastic else search.best(cluster.gpus)
        names = tuple(spec.name for spec in workload.models)
        if found is None:
            return _nothing(cluster, {name: _reason(name, search, cluster) for name in names})
        hosted = {replica.name for gpulet in found.judged.plan.gpulets for replica in gpulet.models}
        unserved = tuple(name for name in names if name not in hosted)
        expected = _expected(found.judged, workload, hosted)
        return found.judged.plan.model_copy(
            update={
                "gpulets": _carrying(found.judged, expected, names),
                "expected": expected,
                "unserved": unserved,
                "unserved_reasons": {name: _reason(name, search, cluster) for name in unserved},
                "notes": self._notes(search, found, names),
            }
        )

    def _by_patterns(self, workload: Workload, cluster: Cluster, profiles: Profiles) -> Plan:
        starts: list[tuple[str, Plan]] = []
        refused: dict[str, str] = {}
        count = len(workload.models)
        able = {name: (name, QUICKLY.get(name, {})) for name in self.starting if count <= SLOW.get(name, count)}
        for start, plan in planned(able, workload, cluster, profiles, self.watch, refused):
            starts.append((start, plan))
            if not cluster.elastic and keeps(plan, self.attainment):
                break
        if is_shared_out(workload, cluster):
            starts.append((BALANCED, balanced(workload, cluster, profiles)))
        found = best_by_patterns(self.name, workload, cluster, profiles, starts, self.attainment, self.watch)
        if found is None:
            why = f"no start can plan: {next(iter(refused.values()), 'there is none')}"
            return _nothing(cluster, {spec.name: why for spec in workload.models})
        plan, how = found
        # A start comes with reasons for models that are served in part, which follow from the plan and not from it.
        reasons = {name: plan.unserved_reasons[name] for name in plan.unserved if name in plan.unserved_reasons}
        notes = (f"chosen by its expectation: {how}",)
        return plan.model_copy(
            update={"policy": PolicyUsed(name=self.name), "notes": notes, "unserved_reasons": reasons}
        )

    def _notes(self, search: Search, found: Found, names: tuple[str, ...]) -> tuple[str, ...]:
        judged = found.judged
        worst = int(judged.attainment.argmin())
        how = "in its trial {:.4g} % of the requests were in time, the least of {}: {:.4g} %"
        if found.trial is None:
            how = "interrupted before a trial; by the model {:.4g} % of the requests are in time, least of {}: {:.4g} %"
        notes = [
            f"began as {found.start}; {search.forecasts} layouts judged by the model of queueing and batches, "
            f"{search.trials.count} tried in virtual time under '{self.scheduler}'",
            how.format(
                100 * judged.ok_rps.sum() / judged.offered_rps.sum(), names[worst], 100 * judged.attainment[worst]
            ),
        ]
        crowded = [gpulet for gpulet in judged.plan.gpulets if len(judged.plan.on_gpu(gpulet.gpu)) > 1]
        types = {gpu.id: gpu.type for gpu in found.gpus}
        notes += stand_ins(self.interference, sorted({types[gpulet.gpu] for gpulet in crowded}))
        shared = {r.name for gpulet in judged.plan.gpulets if gpulet.effective_share_pct < 100.0 for r in gpulet.models}
        modelled = [name for name in names if name in shared & search.builder.modelled]
        if modelled:
            notes.append(f"latency on a share follows from SM utilisation, not measured: {', '.join(modelled)}")
        return tuple(notes)


def _nothing(cluster: Cluster, reasons: dict[str, str]) -> Plan:
    """Return the plan that serves no model, each for its reason."""
    return Plan(
        policy=PolicyUsed(name=TenutoPolicy.name), gpus=planned_gpus(cluster, ()), unserved=tuple(reasons),
        unserved_reasons=reasons,
    )  # fmt: skip


def _carrying(judged: Judged, expected: Expected, names: tuple[str, ...]) -> tuple[Gpulet, ...]:
    """Return the gpu-lets with their parts of each model's expected goodput, as in the judged."""
    gpulets = []
    carried = judged.carried_rps.sum(axis=0)
    for index, gpulet in enumerate(judged.plan.gpulets):
        replicas = []
        for replica in gpulet.models:
            place = names.index(replica.name)
            part = float(judged.carried_rps[index, place] / carried[place]) if carried[place] else 0.0
            rate = round(part * expected.models[replica.name].goodput_rps, 6)
            replicas.append(replica.model_copy(update={"rate_rps": rate}))
        gpulets.append(gpulet.model_copy(update={"models": tuple(replicas)}))
    return tuple(gpulets)


def _expected(judged: Judged, workload: Workload, hosted: set[str]) -> Expected:
    models = {}
    for position, spec in enumerate(workload.models):
        if spec.name in hosted:
            goodput = round(spec.rate_rps * float(judged.attainment[position]), 6)
            models[spec.name] = ExpectedModel(goodput_rps=goodput)
    return Expected(goodput_rps=round(sum(model.goodput_rps for model in models.values()), 6), models=models)


def _reason(name: str, search: Search, cluster: Cluster) -> str:
    if not any(search.builder.can_run(name, gpu, 100.0) for gpu in cluster.gpus):
        return "on none of the GPUs is one request within its SLO"
    return "the other models serve more without it on these GPUs"
