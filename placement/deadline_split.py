"""The split of applications' deadlines over their stages, so that the models take the least GPU time.

An integer program chooses for each model a batch, a GPU type and a share, so that on every path through the graphs the
batches and the waiting for them end within the deadline. It finds what the dynamic program of Nexus (section 6.2) finds
on trees, on every graph, and chooses once for models that several stages ask. The time that is left on a path is dealt
out in proportion.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from tenuto.placement.application import Application
from tenuto.placement.cluster import Cluster
from tenuto.placement.costs import MOST_BATCH, ModelOnGpu, costs_of
from tenuto.placement.solver import Rows, integer_program
from tenuto.placement.workload import ModelSpec, Workload
from tenuto.profiles import Profiles
from tenuto.profiles.share_latency import WHOLE_GPU_PCT

_SAVES = 0.005  # derived: a batch that saves less than this part of the next smaller one's cost is no way of its own
_GAP = 1e-3  # limit: of the cost, at which the integer program ends
_BUSY = 0.7  # derived: of a GPU's time; Poisson requests then wait for 1.2 batches in the mean (M/D/1), as is left here
_ROUNDS = 200  # limit: in which the time left on paths is dealt out
_PATIENCE = (1.0, 0.5, 0.25, 0.0)  # derived: parts of the waiting that are left out when no split has all of it

Waiting = Callable[[float, int, float], float]
"""How long a request waits at most for its batch to begin, in ms: of l(b), b, and requests per ms."""


class BatchChoice(NamedTuple):
    """A batch that a model may run. A request needs `needs_ms` with its waiting; `cost` is the price of an hour of the
    GPU time that all requests of the model take."""

    needs_ms: float
    cost: float


def while_it_fills(batch_ms: float, size: int, per_ms: float) -> float:
    """Return the wait of deferred batching: while the other requests of the batch come, and at least for one batch
    before, or for the next of several gpu-lets."""
    return max((size - 1) / per_ms, min(batch_ms, size / per_ms))


def for_a_batch(batch_ms: float, size: int, per_ms: float) -> float:
    """Return the wait of Nexus: for a whole batch before."""
    del size, per_ms
    return batch_ms


def batch_choices(
    by_type: Mapping[str, ModelOnGpu], rate_rps: float, prices: Mapping[str, float], waiting: Waiting
) -> list[BatchChoice]:
    """Return the batches of a model of which none is both faster and cheaper, the fastest first, on the whole GPU and
    on the shares that its profile has."""
    choices = []
    for kind, on in by_type.items():
        for share_pct in {WHOLE_GPU_PCT, *(point.share_pct for point in on.profile.points)}:
            for size, batch_ms in enumerate(on.steps(share_pct, MOST_BATCH)):
                if size:
                    needs_ms = batch_ms + waiting(batch_ms, size, rate_rps / 1000.0)
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
) -> dict[str, float] | None:
    """Return budgets of the models in ms with which every path of every application ends within its SLO, at the least
    cost; None if there are none.

    As much may be spent as is `affordable` where that is the least cost. Of all budgets that keep this, those are
    returned of which the shortest, in units of the model's fastest choice, is the longest.
    """
    rows, costs, most = Rows(), list[float](), list[float]()

    def column(cost: float, upper: float) -> int:
        costs.append(cost)
        most.append(upper)
        return len(costs) - 1

    picks = {name: [column(choice.cost, 1.0) for choice in of] for name, of in choices.items()}
    whole = [True] * len(costs)
    paid = costs.copy()
    units = column(0.0, math.inf)
    budgets = {name: column(0.0, math.inf) for name in choices}
    for name, columns in picks.items():
        rows.add(columns, [1.0] * len(columns), 1.0, 1.0)
        rows.add([budgets[name], *columns], [1.0, *(-choice.needs_ms for choice in choices[name])], math.inf, 0.0)
        rows.add([budgets[name], units], [1.0, -choices[name][0].needs_ms], math.inf, 0.0)
    for application in applications:
        ends = {stage.label: column(0.0, application.slo_ms) for stage in application.stages}
        for stage in application.stages:
            own = [ends[stage.label], budgets[application.model_name(stage)]]
            for before in stage.after:
                rows.add([*own, ends[before]], [1.0, -1.0, -1.0], math.inf, 0.0)
            if not stage.after:
                rows.add(own, [1.0, -1.0], math.inf, 0.0)
    whole += [False] * (len(costs) - len(whole))
    least = [0.0] * len(costs)
    x = integer_program(costs, rows, least, most, whole, gap=_GAP).x
    if x is None:
        return None
    cost = float(x[: len(paid)] @ paid)
    rows.add(range(len(paid)), paid, max(affordable(cost), cost * (1.0 + _GAP)))
    goal = [-float(place == units) for place in range(len(costs))]
    fairest = integer_program(goal, rows, least, most, whole, start=x, gap=_GAP).x
    x = x if fairest is None else fairest
    return {name: float(x[place]) for name, place in budgets.items()}


def is_split(application: Application) -> bool:
    """Whether the file or an earlier plan says how the deadline of an application is split."""
    return any(stage.part is not None or stage.budget_ms is not None for stage in application.stages)


def split_deadlines(
    workload: Workload, cluster: Cluster, profiles: Profiles, waiting: Waiting = while_it_fills
) -> Workload:
    """Return the workload with a budget for every stage of its applications.

    Applications that are split already stay so, and so do those with a stage of which nobody says what it costs. When
    not even batches of one end in time, the deadline is split in proportion to what these take.
    """
    specs, costs = {spec.name: spec for spec in workload.models}, costs_of(workload, cluster, profiles)
    fixed = [app for app in workload.applications if is_split(app)]
    split = [
        app
        for app in workload.applications
        if app not in fixed and all(costs[app.model_name(stage)] for stage in app.stages)
    ]
    names = dict.fromkeys(app.model_name(stage) for app in split for stage in app.stages)
    limits = {
        name: min([budget for app in fixed for budget in _budgets(app, name)], default=math.inf) for name in names
    }
    if not split:
        return workload
    for patience in _PATIENCE:

        def wait_ms(batch_ms: float, size: int, per_ms: float, patience: float = patience) -> float:
            return patience * waiting(batch_ms, size, per_ms)

        choices = {
            name: list(_choices_of(specs[name], costs[name], limits[name], cluster.prices, wait_ms)) for name in names
        }
        needs_ms = least_budgets(split, choices, lambda cost: _affordable(cost, cluster))
        if needs_ms is not None:
            break
    else:
        needs_ms = {name: choices[name][0].needs_ms for name in names}
    budgets = [_dealt_out(app, needs_ms) if app in split else app for app in workload.applications]
    return workload.with_budgets(budgets)


def candidate_splits(workload: Workload, cluster: Cluster, profiles: Profiles) -> Iterator[Workload]:
    """Yield the workload with different splits of the deadlines that may be the best, the likeliest first."""
    seen = list[Workload]()
    for waiting in (while_it_fills, for_a_batch):
        split = split_deadlines(workload, cluster, profiles, waiting)
        if split not in seen:
            yield split
        seen.append(split)
    if workload not in seen:
        yield workload


def least_price(workload: Workload, cluster: Cluster, profiles: Profiles) -> float:
    """Return a price that no cluster of one GPU type goes below, however the deadlines are split: that of the GPU time
    which the models' cheapest batches take. It is 0 where that is not known, and with several types."""
    if len(cluster.prices) != 1:
        return 0.0
    (price,), costs = cluster.prices.values(), costs_of(workload, cluster, profiles)
    fixed = [spec for spec in workload.models if spec.generates is None and costs[spec.name]]
    cheapest = (batch_choices(costs[spec.name], spec.rate_rps, cluster.prices, for_a_batch)[-1].cost for spec in fixed)
    return price * math.ceil(sum(cheapest) / price - 1e-6)


def _affordable(cost: float, cluster: Cluster) -> float:
    """Return the price of the GPU time that may be taken without another GPU, with room for bursts."""
    prices = cluster.prices
    if cluster.elastic:
        price = min(prices.values())
        return _BUSY * price * math.ceil(cost / price)
    return _BUSY * sum(prices[gpu.type] for gpu in cluster.gpus)


def _budgets(application: Application, model: str) -> list[float]:
    return [application.budget_ms(stage) for stage in application.stages if application.model_name(stage) == model]


def _choices_of(
    spec: ModelSpec, by_type: Mapping[str, ModelOnGpu], limit_ms: float, prices: Mapping[str, float], waiting: Waiting
) -> Iterator[BatchChoice]:
    """Yield the choices of a model within what else asks it, or only the fastest. A model that generates has one."""
    if spec.generates is not None:
        yield BatchChoice(spec.slo_ms, 0.0)
        return
    own_ms = math.inf if spec.alone is None or spec.alone.slo_ms is None else spec.alone.slo_ms
    for place, choice in enumerate(batch_choices(by_type, spec.rate_rps, prices, waiting)):
        if not place or choice.needs_ms <= min(limit_ms, own_ms):
            yield choice


def _dealt_out(application: Application, needs_ms: Mapping[str, float]) -> Application:
    """Return the application with the budgets that its stages need, and the time that is left on their paths."""
    for number in range(_ROUNDS):
        budgets = [
            needs_ms[application.model_name(stage)] if not number else application.budget_ms(stage)
            for stage in application.stages
        ]
        stages = [s.model_copy(update={"budget_ms": ms}) for s, ms in zip(application.stages, budgets, strict=True)]
        application = application.model_copy(update={"stages": tuple(stages)})
    return application
