"""Large workloads: GPUs that look alike are planned as patterns with integer counts, found by column generation.

A *pattern* is what one GPU of a type hosts, and what it then serves of every model by the model of queueing and batch
formation (`tenuto.placement.expectation`). A linear program chooses how many GPUs follow each pattern; its dual values
say what a request of each model is worth and what a GPU costs, and new patterns are built for those (the classical
column generation of the cutting-stock problem: Gilmore and Gomory, 1961). At the end counts are made whole by an
integer program. The first patterns are the GPUs of other policies' plans, so that the result is compared with them and
is never below the best of them by the same model. No trial in virtual time takes part: for a thousand models one alone
would take minutes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, linprog
from scipy.sparse import csr_array, hstack, vstack

from tenuto.batching.planning.fairness import best_batch
from tenuto.placement import Cluster, Gpulet, Plan, Replica, Workload
from tenuto.placement.costs import ModelOnGpu, context_mib_of, costs_of
from tenuto.placement.expectation.goodput import expected_of
from tenuto.placement.plan import PlannedGpu, PolicyUsed
from tenuto.placement.policies.shared.gpu_pool import GpuPool
from tenuto.placement.policies.shared.hosting import Hosted, hosting_plan
from tenuto.placement.program import held_mib
from tenuto.placement.solver import integer_program
from tenuto.placement.watch import Watch
from tenuto.profiles import Profiles

ROUNDS = 12  # of new patterns
ANCHORS = 24  # models for which a pattern is built per round and GPU type: those whose requests are worth most
MOST_MODELS = 6  # of a pattern that is built; those of other policies may have more
FILL = 0.92  # of a GPU's time that a pattern is built for; the expectation then says what it serves
NODES = 400  # of the integer program's search: a limit that gives the same plan on every machine
ROUNDING_S = 6.0  # time limit of it all the same
REPAIRS = 3  # times that the rates of models below their attainment are raised and the counts chosen again
EVEN = 1e-3  # weight of the total beside the least part of any model, under the objective `each`

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Pattern:
    """What one GPU of a type hosts, `gpulets` as (share, replicas), and the requests per second it serves in time."""

    kind: str
    gpulets: tuple[tuple[float | None, tuple[Replica, ...]], ...]
    served: Mapping[str, float] = field(hash=False)

    @property
    def key(self) -> tuple[object, ...]:
        return self.kind, tuple((s, tuple((r.name, r.batch_size) for r in rs)) for s, rs in self.gpulets)


def best_by_patterns(
    name: str, workload: Workload, cluster: Cluster, profiles: Profiles, starts: Sequence[tuple[str, Plan]],
    attainment: float, watch: Watch | None = None,
) -> tuple[Plan, str] | None:
    """Return the best plan found and how it came about; None where there is nothing to choose from.

    Args:
        name: of the policy in the plan.
        workload: what is asked for.
        cluster: fixed, or elastic: then the cheapest plan in which every model is expected to keep its attainment.
        profiles: what models cost.
        starts: completed plans with what makes them.
        attainment: of every model, where GPUs are bought.
        watch: told how far it is; once it is stopped no more patterns are built.
    """
    watch = watch or Watch()
    case = _Case(workload, cluster, profiles)
    for _, plan in starts:
        case.take(plan)
    if not case.patterns:
        return None
    start, plan = max(starts, key=lambda each: case.rank(each[1], attainment))
    if not cluster.elastic and keeps(plan, attainment):
        return plan, f"the plan of {start}"
    for number in range(ROUNDS):
        watch.say(f"{len(case.patterns)} patterns of a GPU, round {number + 1} of {ROUNDS} at most")
        if watch.is_stopped():
            return plan, f"the plan of {start}"
        worth, rent = case.prices()
        if not case.built(worth, rent):
            break
    found = [(f"the plan of {start}", plan) for start, plan in starts]
    for combined in case.plans(name, attainment):
        found.append((f"{len(case.patterns)} patterns of a GPU, the starts' and new ones", combined))
    how, best = max(found, key=lambda pair: case.rank(pair[1], attainment))
    return best, how


def keeps(plan: Plan, attainment: float) -> bool:
    """Say whether every model of a completed plan is expected to keep its attainment."""
    served = plan.expected.models
    return all(m.name in served and served[m.name].goodput_rps >= attainment * m.rate_rps for m in plan.models)


class _Case:
    """One workload: its patterns, and the programs over them."""

    def __init__(self, workload: Workload, cluster: Cluster, profiles: Profiles) -> None:
        self._workload, self._cluster = workload, cluster
        self._place = {spec.name: index for index, spec in enumerate(workload.models)}
        self._rates = np.array([spec.rate_rps for spec in workload.models])
        by_weight = workload.objective == "weighted"
        self._weights = np.array([spec.weight if by_weight else 1.0 for spec in workload.models])
        self._costs = costs_of(workload, cluster, profiles)
        self._context = {kind: context_mib_of(kind, profiles) for kind in cluster.gpu_types}
        self._counts = cluster.counts
        self._gpu_prices = cluster.prices
        self.patterns: list[Pattern] = []
        self._known: set[tuple[object, ...]] = set()
        self._asked = self._rates.copy()  # what the counts are to serve

    def rank(self, plan: Plan, attainment: float) -> tuple[float, float, float]:
        """Return what plans are compared by, the larger the better: models below their attainment and
        cost where GPUs are bought, else the value by the objective; then the total."""
        parts = self._parts(plan)
        used = {gpulet.gpu for gpulet in plan.gpulets}
        cost = sum(self._gpu_prices[gpu.type] for gpu in plan.gpus if gpu.id in used)
        total = float(self._weights @ (parts * self._rates))
        if self._cluster.elastic:
            below = float((parts < attainment - 1e-9).sum())
            return -below, -cost, total
        least = float(parts.min()) if self._workload.objective == "each" else 0.0
        return round(least, 4), round(total, 3), -cost

    def _parts(self, plan: Plan) -> Floats:
        expected = plan.expected.models
        served = [expected[n].goodput_rps if n in expected else 0.0 for n in self._place]
        return np.asarray(np.array(served) / self._rates, dtype=np.float64)

    # --- patterns -------------------------------------------------------------------------------------------------

    def take(self, plan: Plan) -> None:
        """Add the GPUs of a completed plan as patterns; of a model's expected goodput each replica gets its part."""
        types = {gpu.id: gpu.type for gpu in plan.gpus}
        carries: dict[str, float] = {}
        parts: dict[tuple[str, str], float] = {}
        for gpulet in plan.gpulets:
            for replica in gpulet.models:
                able = replica.rate_rps
                if able is None:
                    able = 1000.0 * replica.batch_size / (replica.latency_ms or 1e9) / len(gpulet.models)
                parts[gpulet.id, replica.name] = able
                carries[replica.name] = carries.get(replica.name, 0.0) + able
        for gpu_id, gpulets in plan.by_gpu().items():
            if not gpulets or any(gpulet.merge for gpulet in gpulets):
                continue
            served: dict[str, float] = {}
            for gpulet in gpulets:
                for replica in gpulet.models:
                    part = parts[gpulet.id, replica.name] / max(carries[replica.name], 1e-12)
                    goodput = plan.expected.models[replica.name].goodput_rps
                    served[replica.name] = served.get(replica.name, 0.0) + part * goodput
            hosts = tuple((g.share_pct, tuple(r.model_copy(update={"rate_rps": None}) for r in g.models))
                          for g in gpulets)  # fmt: skip
            self._add(Pattern(types[gpu_id], hosts, served))

    def _add(self, pattern: Pattern) -> bool:
        rates = tuple(round(rate, 1) for rate in pattern.served.values())
        key = (*pattern.key, rates)
        if key in self._known:
            return False
        self._known.add(key)
        self.patterns.append(pattern)
        return True

    def built(self, worth: Floats, rent: Mapping[str, float]) -> int:
        """Add patterns that are worth more than the rent of their GPU; return how many."""
        added = 0
        for kind in self._cluster.gpu_types:
            able = [(on, worth[self._place[name]]) for name, by in self._costs.items() if (on := by.get(kind))]
            dense = sorted(
                ((value / batch[1], on, batch) for on, value in able
                 if value > 1e-9 and (batch := best_batch(on, on.spec.rate_rps, 0.5 * on.slo_ms)) is not None),
                key=lambda each: -each[0],
            )  # fmt: skip
            for first in range(min(ANCHORS, len(dense))):
                chosen = self._gathered([dense[first], *dense[:first], *dense[first + 1 :]], kind)
                pattern = self._judged(chosen, kind)
                if pattern is None:
                    continue
                value = sum(worth[self._place[name]] * rate for name, rate in pattern.served.items())
                if value > rent[kind] * (1.0 + 1e-6) + 1e-9:
                    added += self._add(pattern)
        return added

    def _gathered(
        self, ranked: Sequence[tuple[float, ModelOnGpu, tuple[int, float]]], kind: str
    ) -> list[tuple[ModelOnGpu, int, float]]:
        """Return models that take turns on one GPU until its time is full: with batch size and rate."""
        left, chosen = FILL, list[tuple[ModelOnGpu, int, float]]()
        room = self._cluster.one_of_each[kind].memory_mib - self._context[kind]
        needs = list[tuple[float, float | None]]()
        longest = 0.0
        for _, on, (size, per_request_s) in ranked[: 6 * MOST_MODELS]:
            rate = min(on.spec.rate_rps, left / per_request_s)
            own = best_batch(on, rate, 0.5 * on.slo_ms)
            if own is None or rate <= 0.0:
                continue
            size, per_request_s = own
            rate = min(on.spec.rate_rps, left / per_request_s)
            ms = on.steps()[size]
            needed = on.needs_mib(size)
            waits = all(ms + other.steps()[b] <= other.slo_ms for other, b, _ in chosen)
            if held_mib([*needs, needed]) > room or not waits or ms + longest > on.slo_ms:
                continue
            chosen.append((on, size, rate))
            needs.append(needed)
            left, longest = left - rate * per_request_s, max(longest, ms)
            if left < 0.03 or len(chosen) == MOST_MODELS:
                break
        return chosen

    def _judged(self, chosen: Sequence[tuple[ModelOnGpu, int, float]], kind: str) -> Pattern | None:
        """Return the pattern of models that take turns on a GPU, with what it is expected to serve of these rates."""
        if not chosen:
            return None
        order = sorted(chosen, key=lambda each: self._place[each[0].name])
        replicas = tuple(
            Replica(name=on.name, batch_size=size, latency=on.cut(100.0, size),
                    latency_ms=round(on.steps()[size], 6))
            for on, size, _ in order
        )  # fmt: skip
        plan = Plan(
            policy=PolicyUsed(name="pattern"), gpus=(PlannedGpu(id="g", type=kind),),
            gpulets=(Gpulet(id="g/a", gpu="g", models=replicas),),
            models=tuple(on.spec.model_copy(update={"rate_rps": rate}) for on, _, rate in order),
        )  # fmt: skip
        served = {name: model.goodput_rps for name, model in expected_of(plan, with_margin=False).models.items()}
        return Pattern(kind, ((None, replicas),), served)

    # --- the programs ---------------------------------------------------------------------------------------------

    def _matrix(self) -> csr_array:
        """Return what each pattern (column) serves of each model (row)."""
        rows, columns, values = [], [], []
        for column, pattern in enumerate(self.patterns):
            for name, rate in pattern.served.items():
                rows.append(self._place[name])
                columns.append(column)
                values.append(rate)
        return csr_array((values, (rows, columns)), shape=(len(self._rates), len(self.patterns)))

    def _program(self) -> tuple[Floats, csr_array, Floats, Floats, Floats]:
        """Return costs, constraint matrix with its upper bounds, and upper bounds of the variables: counts of patterns,
        then what is served of each model, then the least part of any. Rows: models, then GPU types, then parts."""
        serves, models, counts = self._matrix(), len(self._rates), len(self.patterns)
        kinds = list(self._cluster.gpu_types)
        eye = _identity(models)
        total = float(self._weights @ self._rates)
        rows = [hstack([-serves, eye, csr_array((models, 1))])]
        upper = [np.zeros(models)]
        rent = np.zeros(counts)
        if self._cluster.elastic:
            rent = np.array([self._gpu_prices[p.kind] for p in self.patterns])
            missing = 100.0 * max(self._gpu_prices.values())  # what a request that is missing costs, in GPUs
            served = np.full(models, -missing) / np.array([self._most(index) for index in range(models)])
            most = self._asked
            objective = np.concatenate([rent, served, [0.0]])
        else:
            member = csr_array(
                (np.ones(counts), ([kinds.index(p.kind) for p in self.patterns], range(counts))),
                shape=(len(kinds), counts),
            )
            rows.append(hstack([member, csr_array((len(kinds), models + 1))]))
            upper.append(np.array([float(self._counts[kind]) for kind in kinds]))
            most = self._rates
            fair = self._workload.objective == "each"
            served = -self._weights / total * (EVEN if fair else 1.0)
            objective = np.concatenate([rent + 1e-9, served, [-1.0 if fair else 0.0]])
            if fair:
                part = csr_array(self._rates.reshape(-1, 1))
                rows.append(hstack([csr_array((models, counts)), -eye, part]))
                upper.append(np.zeros(models))
        bounds = np.concatenate([np.full(counts, np.inf), most, [1.0]])
        return objective, csr_array(vstack(rows)), np.concatenate(upper), np.zeros(len(bounds)), bounds

    def _most(self, index: int) -> float:
        """Return the most that one GPU serves of a model."""
        name = self._workload.models[index].name
        return max((p.served.get(name, 0.0) for p in self.patterns), default=0.0) or self._rates[index]

    def prices(self) -> tuple[Floats, dict[str, float]]:
        """Return what a request per second of each model is worth and what a GPU of each type costs: the dual values of
        the relaxed program."""
        objective, matrix, upper, least, most = self._program()
        result = linprog(objective, A_ub=matrix, b_ub=upper, bounds=np.column_stack([least, most]), method="highs")
        duals = -np.asarray(result.ineqlin.marginals)
        models = len(self._rates)
        if self._cluster.elastic:
            return duals[:models], dict(self._gpu_prices)
        kinds = self._cluster.gpu_types
        return duals[:models], {kind: float(duals[models + row]) for row, kind in enumerate(kinds)}

    def plans(self, name: str, attainment: float) -> list[Plan]:
        """Return plans of whole counts. Where GPUs are bought, models that are expected to stay below their attainment
        are asked for more and the counts chosen again."""
        found = []
        for _ in range(REPAIRS if self._cluster.elastic else 1):
            plan = self._whole(name)
            if plan is None:
                break
            found.append(plan)
            missing = attainment - self._parts(plan)
            if missing.max() <= 0.0:
                break
            self._asked = np.where(missing > 0.0, self._asked * (1.01 + 2.0 * np.maximum(missing, 0.0)), self._asked)
        return found

    def _whole(self, name: str) -> Plan | None:
        """Return the plan of the best whole counts; None where the program finds none in time."""
        objective, matrix, upper, least, most = self._program()
        integral = np.zeros(len(objective))
        integral[: len(self.patterns)] = 1
        result = integer_program(
            objective, integrality=integral, bounds=Bounds(least, most),
            constraints=LinearConstraint(matrix, np.full(len(upper), -np.inf), upper),
            options={"time_limit": ROUNDING_S, "node_limit": NODES, "mip_rel_gap": 1e-3},
        )  # fmt: skip
        if result.x is None:
            return None
        pool, hosted = GpuPool(self._cluster), list[Hosted]()
        for pattern, count in zip(self.patterns, result.x, strict=False):
            for _ in range(math.floor(count + 1e-6)):
                gpu = pool.take(pattern.kind)
                if gpu is None:
                    break
                for share, replicas in pattern.gpulets:
                    rated = [r.model_copy(update={"rate_rps": pattern.served.get(r.name, 0.0)}) for r in replicas]
                    hosted.append(Hosted(gpu, share, rated))
        plan = hosting_plan(name, self._workload, self._cluster, hosted, {})
        plan = plan.model_copy(update={"models": self._workload.models, "objective": self._workload.objective})
        return plan.model_copy(update={"expected": expected_of(plan)})


def _identity(size: int) -> csr_array:
    return csr_array((np.ones(size), (np.arange(size), np.arange(size))), shape=(size, size))
