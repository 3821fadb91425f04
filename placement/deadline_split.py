"""The split of applications' deadlines over their stages, so that the models take the least GPU time.

An integer program chooses for each model a batch, a GPU type and a share, so that on every path through the graphs the
batches and the waiting for them end within the deadline. It finds what the dynamic program of Nexus (section 6.2) finds
on trees, on every graph, and chooses once for models that several stages ask. The time that is left on a path is dealt
out in proportion.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice, product
from typing import NamedTuple

from tenuto.placement.application import Application, online
from tenuto.placement.cluster import Cluster
from tenuto.placement.costs import MOST_BATCH, ModelOnGpu, costs_of
from tenuto.placement.solver import Rows, integer_program
from tenuto.placement.workload import Workload
from tenuto.profiles import Profiles
from tenuto.profiles.share_latency import WHOLE_GPU_PCT

_SAVES = 0.005  # derived: a batch that saves less than this part of the next smaller one's cost is no way of its own
_GAP = 1e-3  # limit: of the cost, at which the integer program ends
_BUSY = 0.7  # derived: of a GPU's time; Poisson requests then wait for 1.2 batches in the mean (M/D/1), as is left here
_FASTER = 0.9  # format: of the time of a batch; explained is what that saves
_SPARED = 0.03  # derived: of GPU time; as a plan needs whole GPUs, a few percent more cost nothing mostly
_SMALL = 4  # fitted: requests of a small batch; with 1, 0.1 points less of random graphs' requests are in time
# Derived: powers of two of one stage's budget, of which the others get the rest. In one of eight random workloads 99 %
# are in time on one GPU less with half of a budget, and 98.6 % with the splits of least GPU time.
SHORTER = (0.5, 0.25)
MOST_SHORTER = 12  # limit: of such splits; two of each stage of a usual graph
_ROUNDS = 200  # limit: in which the time left on paths is dealt out
_PATIENCE = (1.0, 0.5, 0.25, 0.0)  # derived: parts of the waiting that are left out when no split has all of it


class BatchChoice(NamedTuple):
    """A batch that a model may run. A request needs `needs_ms` with its waiting; `cost` is the price of an hour of the
    GPU time that all requests of the model take."""

    needs_ms: float
    cost: float


def batch_choices(
    by_type: Mapping[str, ModelOnGpu],
    rate_rps: float,
    prices: Mapping[str, float],
    *,
    patience: float = 1.0,
    times: float = 1.0,
) -> list[BatchChoice]:
    """Return the batches of a model of which none is both faster and cheaper, the fastest first, on the whole GPU and
    on the shares that its profile has.

    By deferred batching a request waits while the others of its batch come, and at least for one batch before, or for
    the next of several gpu-lets. The part `patience` of that counts. A batch takes so many `times` as long as profiled.
    """
    per_ms, choices = rate_rps / 1000.0, []
    for kind, on in by_type.items():
        for share_pct in {WHOLE_GPU_PCT, *(point.share_pct for point in on.profile.points)}:
            for size, profiled_ms in enumerate(on.steps(share_pct, MOST_BATCH)):
                if size:
                    batch_ms = times * profiled_ms
                    waits_ms = max((size - 1) / per_ms, min(batch_ms, size / per_ms))
                    needs_ms = batch_ms + patience * waits_ms
                    gpus = rate_rps * batch_ms / size / 1000.0 * share_pct / WHOLE_GPU_PCT
                    choices.append(BatchChoice(needs_ms, prices[kind] * gpus))
    best: list[BatchChoice] = []
    for choice in sorted(choices):
        if not best or choice.cost < best[-1].cost * (1.0 - _SAVES):
            best.append(choice)
    return best


def least_budgets(
    applications: Sequence[Application],
    choices: Mapping[str, Sequence[BatchChoice]],
    affordable: Callable[[float], float],
    more: float = 0.0,
    writing_ms: Mapping[str, float] | None = None,
) -> tuple[float, dict[str, float]] | None:
    """Return the least cost with which every path of every application ends within its SLO, and budgets of the models
    in ms that keep this; None if there are none.

    As much may be spent as is `affordable` where that is the least cost, and at least the part `more` above it. Of all
    budgets that keep this, those are returned that leave the model with the shortest spare time the longest one, as it
    may wait for the batches of others on its GPUs. `writing_ms` is by model what it writes behind its first token, for
    which a stream does not wait.
    """
    rows, costs, most = Rows(), list[float](), list[float]()

    def column(cost: float, upper: float) -> int:
        costs.append(cost)
        most.append(upper)
        return len(costs) - 1

    picks = {name: [column(choice.cost, 1.0) for choice in of] for name, of in choices.items()}
    whole = [True] * len(costs)
    paid = costs.copy()
    spare = column(0.0, math.inf)
    budgets = {name: column(0.0, math.inf) for name in choices}
    for name, columns in picks.items():
        rows.add(columns, [1.0] * len(columns), 1.0, 1.0)
        needs = [-choice.needs_ms for choice in choices[name]]
        rows.add([budgets[name], spare, *columns], [1.0, -1.0, *needs], math.inf, 0.0)
    for application in applications:
        ends = {stage.label: column(0.0, application.slo_ms) for stage in application.stages}
        for stage in application.stages:
            name = application.model_name(stage)
            own, least_ms = [ends[stage.label], budgets[name]], 0.0
            if stage == application.streamed:
                least_ms = -(writing_ms or {}).get(name, 0.0)
            for before in stage.after:
                rows.add([*own, ends[before]], [1.0, -1.0, -1.0], math.inf, least_ms)
            if not stage.after:
                rows.add(own, [1.0, -1.0], math.inf, least_ms)
    whole += [False] * (len(costs) - len(whole))
    least = [0.0] * len(costs)
    x = integer_program(costs, rows, least, most, whole, gap=_GAP).x
    if x is None:
        return None
    cost = float(x[: len(paid)] @ paid)
    rows.add(range(len(paid)), paid, max(affordable(cost), cost * (1.0 + _GAP + more)))
    goal = [-float(place == spare) for place in range(len(costs))]
    fairest = integer_program(goal, rows, least, most, whole, start=x, gap=_GAP).x
    x = x if fairest is None else fairest
    return cost, {name: float(x[place]) for name, place in budgets.items()}


def is_split(application: Application) -> bool:
    """Whether nothing is left to split: the file or an earlier plan says how, or the application is offline."""
    is_given = any(stage.part is not None or stage.budget_ms is not None for stage in application.stages)
    return is_given or application.offline


class _Split:
    """What the split of a workload is made from. `free` are the applications to split."""

    def __init__(self, workload: Workload, cluster: Cluster, profiles: Profiles) -> None:
        self._specs, self._costs = {m.name: m for m in workload.models}, costs_of(workload, cluster, profiles)
        self._workload, self._cluster = workload, cluster
        known = [a for a in online(workload.applications) if all(self._costs.get(a.model_name(s)) for s in a.stages)]
        self.free = [application for application in known if not is_split(application)]
        self.names = [*dict.fromkeys(application.model_name(s) for application in known for s in application.stages)]
        slos = ((spec, spec.slo) for spec in workload.models)
        self.writing_ms = {spec.name: spec.slo_ms - slo.ttft_ms for spec, slo in slos if slo is not None}
        self._limits_ms = dict.fromkeys(self.names, math.inf)
        for spec in (self._specs[name] for name in self.names):
            if spec.alone is not None and spec.alone.slo_ms is not None:
                self._limits_ms[spec.name] = spec.alone.slo_ms
        for application in known:
            for stage in application.stages if application not in self.free else ():
                name = application.model_name(stage)
                self._limits_ms[name] = min(self._limits_ms[name], application.budget_ms(stage))

    def least_budgets(
        self, more: float = 0.0, times: Mapping[str, float] | None = None
    ) -> tuple[float, dict[str, float]]:
        """Return the least cost and the budgets of the models in ms. Batches of some models take so many times as
        long. When not even batches of one end in time, each model has what one request takes."""
        choices: dict[str, list[BatchChoice]] = {}
        for patience in _PATIENCE:
            choices = {name: self._choices(name, patience, (times or {}).get(name, 1.0)) for name in self.names}
            least = least_budgets(
                self.free, choices, lambda cost: _affordable(cost, self._cluster), more, self.writing_ms
            )
            if least is not None:
                return least
        fastest = [of[0] for of in choices.values()]
        return sum(choice.cost for choice in fastest), dict(zip(choices, (c.needs_ms for c in fastest), strict=True))

    def small_batches(self) -> dict[str, float]:
        """Return what a small batch of each model takes on the fastest GPU type, in ms; of one that generates, its
        SLO."""
        fixed = [name for name in self.names if self._specs[name].generates is None]
        small = {name: min(on.steps()[: _SMALL + 1][-1] for on in self._costs[name].values()) for name in fixed}
        return {name: self._specs[name].slo_ms for name in self.names} | small

    def dealt_out(self, needs_ms: Mapping[str, float]) -> Workload:
        """Return the workload with budgets in proportion to what the models need."""
        given = self._workload.applications
        split = [_dealt_out(a, needs_ms, self.writing_ms) if a in self.free else a for a in given]
        return self._workload.with_budgets(split)

    def _choices(self, name: str, patience: float, times: float) -> list[BatchChoice]:
        """Return the choices of a model within what else asks it, or only the fastest. One that generates has one."""
        spec = self._specs[name]
        if spec.generates is not None:
            return [BatchChoice(spec.slo_ms, 0.0)]
        prices = self._cluster.prices
        choices = batch_choices(self._costs[name], spec.rate_rps, prices, patience=patience, times=times)
        return [choice for place, choice in enumerate(choices) if not place or choice.needs_ms <= self._limits_ms[name]]


def split_deadlines(workload: Workload, cluster: Cluster, profiles: Profiles) -> Workload:
    """Return the workload with a budget for every stage of its applications.

    Applications that are split already stay so, and so do those with a stage of which nobody says what it costs. When
    not even batches of one end in time, the deadline is split in proportion to what these take.
    """
    if all(map(is_split, workload.applications)):
        return workload
    split = _Split(workload, cluster, profiles)
    if not split.free:
        return workload
    return split.dealt_out(split.least_budgets(_SPARED)[1])


def savings(workload: Workload, cluster: Cluster, profiles: Profiles) -> dict[str, float]:
    """Return, for each model that a stage asks in batches, the part of the GPU time of all of them that is saved when
    its batches take a tenth less. Where the planner split a deadline, it is split anew."""
    unsplit = [application.without_budgets() for application in workload.applications]
    split = _Split(workload.model_copy(update={"applications": unsplit}), cluster, profiles)
    cost = split.least_budgets()[0]
    fixed = [name for name in split.names if workload[name].generates is None]
    return {name: 1.0 - split.least_budgets(times={name: _FASTER})[0] / cost if cost else 0.0 for name in fixed}


def candidate_splits(workload: Workload, cluster: Cluster, profiles: Profiles) -> Iterator[Workload]:
    """Yield the workload with different splits of the deadlines that may be the best, the likeliest first: of the least
    GPU time, in proportion to what small batches take, and even."""
    given = workload.applications
    if all(map(is_split, given)):
        yield workload
        return
    yield (least := split_deadlines(workload, cluster, profiles))
    split = _Split(workload, cluster, profiles)
    if (small := split.dealt_out(split.small_batches())) != least:
        yield small
    even = [a if is_split(a) else _dealt_out(a, dict.fromkeys(map(a.model_name, a.stages), 1.0)) for a in given]
    if (evenly := workload.with_budgets(even)) not in (least, small):
        yield evenly


def shortened_splits(workload: Workload, split: Workload) -> Iterator[Workload]:
    """Yield the workload with splits in which one stage has a part of the budget that it has in the given split, and
    the others on its paths have the rest; none for a stage beside which others take as long."""
    pairs = list(zip(workload.applications, split.applications, strict=True))
    base = {after.model_name(s): after.budget_ms(s) for before, after in pairs if after != before for s in after.stages}
    seen = [split.models]
    for part, name in islice(product(SHORTER, base), MOST_SHORTER):
        needs_ms = base | {name: part * base[name]}
        shorter = workload.with_budgets([a if a == after else _dealt_out(a, needs_ms) for a, after in pairs])
        if shorter.models not in seen:
            yield shorter
        seen.append(shorter.models)


def least_price(workload: Workload, cluster: Cluster, profiles: Profiles) -> float:
    """Return a price that no cluster of one GPU type goes below, however the deadlines are split: that of the GPU time
    which the models' cheapest batches take. It is 0 where that is not known, and with several types."""
    if len(cluster.prices) != 1 or not any(cluster.prices.values()):
        return 0.0
    (price,), costs = cluster.prices.values(), costs_of(workload, cluster, profiles)
    fixed = [spec for spec in workload.models if spec.generates is None and costs[spec.name]]
    cheapest = (batch_choices(costs[spec.name], spec.rate_rps, cluster.prices)[-1].cost for spec in fixed)
    return price * math.ceil(sum(cheapest) / price - 1e-6)


def _affordable(cost: float, cluster: Cluster) -> float:
    """Return the price of the GPU time that may be taken without another GPU, with room for bursts."""
    prices = cluster.prices
    if cluster.elastic:
        price = min(prices.values())
        return _BUSY * price * math.ceil(cost / price)
    return _BUSY * sum(prices[gpu.type] for gpu in cluster.gpus)


def _dealt_out(
    application: Application, needs_ms: Mapping[str, float], writing_ms: Mapping[str, float] | None = None
) -> Application:
    """Return the application with the budgets that its stages need, and the time that is left on their paths."""
    budgets = [needs_ms[application.model_name(stage)] for stage in application.stages]
    if application.streamed is not None:
        name = application.model_name(application.streamed)
        budgets[application.stages.index(application.streamed)] -= (writing_ms or {}).get(name, 0.0)
    for _ in range(_ROUNDS):
        stages = [s.model_copy(update={"budget_ms": ms}) for s, ms in zip(application.stages, budgets, strict=True)]
        application = application.model_copy(update={"stages": tuple(stages)})
        budgets = [application.budget_ms(stage) for stage in application.stages]
    return application
