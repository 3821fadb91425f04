"""What a workload takes of a cluster or a fleet: models that cannot be parted, the GPUs that they need of each kind,
and what a GPU of a kind is worth where kinds are scarce.

All of it is a fluid: a model needs its rate times the least GPU time of a request among the batches that its SLO
allows. Only the planner of a cell knows what whole GPUs carry.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

from tenuto.placement.application import Application
from tenuto.placement.cluster import Cluster, Gpu, node_of
from tenuto.placement.components import connected_components
from tenuto.placement.costs import MOST_BATCH, ModelOnGpu, costs_of
from tenuto.placement.expectation.outlook import MORE
from tenuto.placement.generation_capacity import carried, options_of, shares_of, with_lengths
from tenuto.placement.solver import Rows, linear_program
from tenuto.placement.workload import ModelSpec, Workload
from tenuto.profiles import Profiles
from tenuto.profiles.share_latency import WHOLE_GPU_PCT

HEADROOM = 1.0 + MORE  # derived: a promise in full stands so much more load
SLIGHT = 1e-6  # derived: of a model's rate; sums of shares are rounded
# Derived: dearer than any GPU that could serve the request, so that a fluid leaves none out that finds room.
_UNSERVED = 1e3

Kind = tuple[str, float]
"""A kind of GPUs: their type, and what an hour of one counts."""


def kind_of(gpu: Gpu, prices: Mapping[str, float]) -> Kind:
    """Return the kind of a GPU in a cell whose types count `prices` an hour."""
    return gpu.type, prices[gpu.type]


def room_of(cluster: Cluster) -> Counter[Kind]:
    """Return how many GPUs of each kind a cell has."""
    prices = cluster.prices
    return Counter(kind_of(gpu, prices) for gpu in cluster.gpus)


@dataclass(frozen=True)
class ModelGroup:
    """Models that have to be in a cell together: those of an application, versions of a model, and what is merged. It
    has the name of its first model. `gpus` is by model how many GPUs of each type its whole rate needs; a type that
    cannot serve the model is missing."""

    models: tuple[ModelSpec, ...]
    applications: tuple[Application, ...]
    gpus: Mapping[str, Mapping[str, float]]

    @cached_property
    def name(self) -> str:
        """The name of the group."""
        return self.models[0].name

    @cached_property
    def placed(self) -> list[ModelSpec]:
        """The models that say where they may lie."""
        return [spec for spec in self.models if spec.only_on or spec.keep_off]

    @cached_property
    def _served_by(self) -> dict[frozenset[str], bool]:
        return {}

    def is_served_by(self, types: frozenset[str]) -> bool:
        """Return whether these types can serve all models."""
        if types not in self._served_by:
            self._served_by[types] = not self.unserved_by(types)
        return self._served_by[types]

    def unserved_by(self, types: Iterable[str]) -> list[str]:
        """Return the models that no GPU of these types can serve."""
        types = {*types}
        return [name for name, needs in self.gpus.items() if types.isdisjoint(needs)]

    def part(self, share: float) -> tuple[list[ModelSpec], list[Application]]:
        """Return the models and applications with a share of their rates."""
        models = [spec.with_rate_scaled(share) for spec in self.models]
        return models, [a.model_copy(update={"rate_rps": share * a.rate_rps}) for a in self.applications]


def group_models(workload: Workload, cluster: Cluster, profiles: Profiles) -> list[ModelGroup]:
    """Return the groups of a workload, in its order, with what they need of the GPU types of a cluster."""
    merged = workload.merge if isinstance(workload.merge, tuple) else ()
    versions: dict[str, list[str]] = defaultdict(list)
    for spec in workload.models:
        versions[spec.model].append(spec.name)
    staged = ([app.model_name(stage) for stage in app.stages] for app in workload.applications)
    together = connected_components(chain(versions.values(), merged, staged))
    group_of = {name: index for index, names in enumerate(together) for name in names}
    models: dict[int, list[ModelSpec]] = defaultdict(list)
    applications: dict[int, list[Application]] = defaultdict(list)
    for spec in workload.models:
        models[group_of[spec.name]].append(spec)
    for app in workload.applications:
        applications[group_of[app.model_name(app.stages[0])]].append(app)
    costs, shares = costs_of(workload, cluster, profiles), shares_of(workload)
    # Nodes of two cells may have one name, and their GPUs one id.
    nodes = Counter((kind, node_of(name)) for kind, name in {(gpu.type, gpu.id) for gpu in cluster.gpus})
    largest = {kind: max(n for (of, _), n in nodes.items() if of == kind) for kind in cluster.gpu_types}
    return [
        ModelGroup(
            tuple(specs),
            tuple(applications[index]),
            {spec.name: _gpus_needed(spec, cluster, costs[spec.name], profiles, shares, largest) for spec in specs},
        )
        for index, specs in models.items()
    ]


def _gpus_needed(
    spec: ModelSpec,
    cluster: Cluster,
    by_type: Mapping[str, ModelOnGpu],
    profiles: Profiles,
    shares: Sequence[int],
    largest: Mapping[str, int],
) -> dict[str, float]:
    """Return how many GPUs of each type the rate of a model needs; `largest` is by type how many a node has."""
    if spec.generates is not None:
        spec, needs = with_lengths(spec), {}
        for kind, gpu in cluster.one_of_each.items():
            ways = options_of(spec, gpu, profiles, carried, largest[kind], shares)
            needs[kind] = spec.rate_rps * min((w.takes_pct / 100.0 / w.rate_rps for w in ways), default=math.inf)
        return {kind: gpus for kind, gpus in needs.items() if gpus < math.inf}
    needs = {kind: spec.rate_rps * request_gpu_s(on, spec.rate_rps) for kind, on in by_type.items()}
    return {kind: gpus for kind, gpus in needs.items() if gpus < math.inf}


def request_gpu_s(on: ModelOnGpu, rate_rps: float) -> float:
    """Return the least GPU seconds of a request among the batches that can be gathered and run within the SLO: the b
    with l(b) + (b - 1/2) / rate <= SLO, as plans promise (`expectation.outlook`). It is infinite where not even one
    request ends in time. With an infinite rate nothing waits: no plan needs less."""
    least_ms = math.inf
    for share_pct in {WHOLE_GPU_PCT, *(point.share_pct for point in on.profile.points)}:
        for size, batch_ms in enumerate(on.steps(share_pct, MOST_BATCH)):
            if size and batch_ms + (size - 0.5) * 1000.0 / rate_rps <= on.slo_ms:
                least_ms = min(least_ms, batch_ms / size * share_pct / WHOLE_GPU_PCT)
        if least_ms == math.inf and len(alone := on.steps(share_pct, 1)) > 1 and alone[1] <= on.slo_ms:
            least_ms = alone[1] * share_pct / WHOLE_GPU_PCT  # a request that waits for no other
    return least_ms / 1000.0


@dataclass(frozen=True)
class Fluid:
    """The cheapest use of GPUs as if they could be cut at will: what it costs an hour, what a GPU of each kind is worth
    to it, scarcity included, and by model which part of its rate each kind serves."""

    cost: float
    worth: Mapping[Kind, float]
    shares: Mapping[str, Mapping[Kind, float]]


def fluid_of(groups: Iterable[ModelGroup], room: Mapping[Kind, float]) -> Fluid:
    """Return the cheapest fluid of models on so many GPUs of each kind: a linear program over models and kinds."""
    rows, costs, columns = Rows(), list[float](), dict[str, dict[Kind, int]]()
    held: dict[Kind, tuple[list[int], list[float]]] = {kind: ([], []) for kind in room}
    dearest = max((price for _, price in room), default=1.0)
    for name, needs in ((name, needs) for group in groups for name, needs in group.gpus.items() if needs):
        first, columns[name] = len(costs), {}
        for kind in room:
            if kind[0] in needs:
                columns[name][kind] = len(costs)
                held[kind][0].append(len(costs))
                held[kind][1].append(needs[kind[0]])
                costs.append(needs[kind[0]] * kind[1])
        costs.append(_UNSERVED * dearest * max(needs.values()))
        rows.add(range(first, len(costs)), [1.0] * (len(costs) - first), 1.0, 1.0)
    for kind, (places, values) in held.items():
        rows.add(places, values, float(room[kind]))
    best = linear_program(costs, rows, [1.0] * len(costs))
    scarcity = best.duals[len(rows.most) - len(held) :]
    worth = {kind: kind[1] - float(dual) for kind, dual in zip(held, scarcity, strict=True)}
    if best.x is None:
        return Fluid(0.0, worth, {})
    shares = {
        name: {kind: part for kind, at in own.items() if (part := float(best.x[at])) > 1e-6}
        for name, own in columns.items()
    }
    return Fluid(float(best.x @ costs), worth, shares)
