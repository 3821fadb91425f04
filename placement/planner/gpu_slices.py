"""Where models that generate and models of fixed cost share GPUs: each kind a part of a GPU's compute and memory.

Decoding waits for memory more than it computes, so that half a GPU decodes far more than half as fast. What is left of
a GPU beside gpu-lets that generate is a *slice*: for the others' policy a GPU of a type of its own, on which each model
takes as long as on that share. A search by closed forms chooses how many gpu-lets of which share each model that
generates gets, how they lie, and how much of the memory a slice has. What slices and GPUs serve is then planned as
ever. No interference beyond shares is counted, as none was measured.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from tenuto.placement.cluster import Cluster, Gpu
from tenuto.placement.costs import ModelOnGpu, context_mib_of, memory_of
from tenuto.placement.generation_capacity import Costs, GeneratingPlan, PlacedShare, ShareCapacity, carried, room_mib
from tenuto.placement.plan import Plan, PlannedGpu
from tenuto.placement.planner.generation_packing import Means, Room, left_of
from tenuto.placement.solver import Rows, linear_program
from tenuto.placement.workload import ModelSpec, Workload
from tenuto.profiles import ModelProfile, Profile, ProfilePoint, Profiles
from tenuto.profiles.latency import LinearLatency

LEAST_SLICE_PCT = 10.0
"""fitted: the smallest share that is left to other models; below it one of the measured GPUs has a handful of SMs."""
MEMORY_PARTS = (1.0, 0.5, 0.25)
"""fitted: of what its share has of the GPU's memory, what a slice may get; the rest holds keys and values."""
_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)
"""derived: batch sizes of which a slice's profile tells the latency; between them it is interpolated."""
_MEMORY_STEP = 1.5
"""fitted: amounts of memory that are told apart when shares are tried."""
_STARTS = (30, 50, 100)
"""fitted: shares from which a search begins."""
_DRAWN, _CLIMBED = 300, 10
"""limit: layouts that are drawn to begin a search with, many of which do not fit, and how many are made better; each
takes a tenth of a second."""
_GAIN = 1.002
"""fitted: a change of the layout that gains less is not taken."""
_ROUNDS = 60
"""limit: changes of one search."""


@dataclass(frozen=True)
class _Layout:
    """How each model that generates lies: gpu-lets and their share, by its place; whether they spread over the GPUs or
    fill one after the other; and a slice's part of the memory that its share has."""

    lies: tuple[tuple[int, int], ...]
    spreads: bool
    memory_part: float


@dataclass(frozen=True)
class Slice:
    """What gpu-lets that generate leave of a GPU."""

    gpu: Gpu
    share_pct: float
    memory_mib: float

    @property
    def kind(self) -> str:
        """The name of its type."""
        return f"{self.share_pct:g} % of {self.gpu.type} with {self.memory_mib:.0f} MiB"

    @property
    def as_gpu(self) -> Gpu:
        """The slice as a GPU of its own."""
        return self.gpu.model_copy(update={"type": self.kind, "memory_mib": self.memory_mib, "mig": None})


@dataclass(frozen=True)
class Colocation:
    """Both kinds on the same GPUs: the gpu-lets that generate by GPU, and the slices beside them."""

    units: tuple[tuple[Gpu, tuple[ShareCapacity, ...]], ...]
    slices: tuple[Slice, ...]

    @property
    def key(self) -> object:
        """What tells it from others."""
        lies = tuple((gpu.id, tuple((o.spec.name, o.share_pct, o.kv_tokens) for o in unit)) for gpu, unit in self.units)
        return lies, tuple((each.gpu.id, each.kind) for each in self.slices)


class ColocationSearch:
    """Searches the best colocation of both kinds on GPUs of one type."""

    def __init__(
        self,
        specs: Sequence[ModelSpec],
        gpus: Sequence[Gpu],
        others: Sequence[ModelSpec],
        elsewhere: Sequence[Gpu],
        costs: Costs,
        means: Means,
    ) -> None:
        """Take what is to be placed.

        Args:
            specs: of models that generate.
            gpus: that they may lie on.
            others: all other models.
            elsewhere: GPUs that only the others may use.
            costs: of the others.
            means: that models that generate are planned with.
        """
        self._specs, self._gpus, self._means, self._profiles = specs, gpus, means, means.profiles
        self._room = Room(gpus)
        self._options = {
            name: {round(each.share_pct): each for each in of} for name, of in means.options(specs, gpus[0]).items()
        }
        self._others = [(spec, costs[spec.name]) for spec in others]
        self._rates: dict[tuple[str, int, int], float] = {}
        self._tried: dict[tuple[str, int, tuple[float, int]], float] = {}
        self._takes: dict[tuple[str, float, float], list[float]] = {}
        self._elsewhere = [self._times_s(gpu.type, 100.0, gpu.memory_mib) for gpu in elsewhere]

    @property
    def is_possible(self) -> bool:
        """Whether each model that generates can lie on one of the GPUs."""
        return all(self._options.values())

    def plan(self, colocation: Colocation) -> GeneratingPlan:
        """Return the gpu-lets that generate."""
        taken = {each.gpu.id: each.memory_mib / each.gpu.memory_mib for each in colocation.slices}
        laid = [PlacedShare(option, (gpu,)) for gpu, unit in colocation.units for option in unit]
        memory = {name: 1.0 - part for name, part in taken.items()}
        return self._means.plan(self._specs, laid, memory)

    def best(self, others_weigh: float) -> Colocation | None:
        """Return the layout whose worst served model carries most of its rate; None where nothing fits.

        Args:
            others_weigh: by how much more the others must carry than closed forms ask for.
        """
        starts = [(value, each) for each in self._starts() if (value := self._value(each, others_weigh)) is not None]
        starts.sort(key=lambda start: start[0], reverse=True)
        climbed = [self._climbed(value, layout, others_weigh) for value, layout in starts[:_CLIMBED]]
        best = max(climbed, key=lambda each: each[0], default=None)
        return None if best is None else self._colocation(best[1])

    def _starts(self) -> Iterator[_Layout]:
        """Yield layouts to begin with: one gpu-let of each model, and others that are drawn, the same each time."""
        options = [sorted(self._options[spec.name]) for spec in self._specs]
        if not all(options):
            return
        for share in _STARTS:
            shares = [min((s for s in of if s >= share), default=of[-1]) for of in options]
            yield _Layout(tuple((1, each) for each in shares), True, MEMORY_PARTS[1])
        draws = random.Random(0)
        for _ in range(_DRAWN):
            lies = tuple((draws.randint(1, len(self._gpus)), draws.choice(of)) for of in options)
            yield _Layout(lies, draws.random() < 0.5, draws.choice(MEMORY_PARTS))

    def _climbed(self, value: list[float], layout: _Layout, weigh: float) -> tuple[list[float], _Layout]:
        """Return the best layout that single changes lead to, each the best of its round."""
        for _ in range(_ROUNDS):
            tried = [(gain, other) for other in self._changes(layout) if (gain := self._value(other, weigh))]
            best, other = max(tried, key=lambda each: each[0], default=(value, layout))
            if best <= [_GAIN * each for each in value]:
                break
            value, layout = best, other
        return value, layout

    def _changes(self, layout: _Layout) -> Iterator[_Layout]:
        yield replace(layout, spreads=not layout.spreads)
        yield from (replace(layout, memory_part=part) for part in MEMORY_PARTS if part != layout.memory_part)
        for place, (count, _) in enumerate(layout.lies):
            for share in self._options[self._specs[place].name]:
                for more in (-1, 0, 1):
                    if 0 < count + more <= len(self._gpus):
                        lies = (*layout.lies[:place], (count + more, share), *layout.lies[place + 1 :])
                        if lies != layout.lies:
                            yield replace(layout, lies=lies)

    def _packed(self, layout: _Layout) -> list[list[tuple[int, int]]] | None:
        """Return by GPU the (place, share) of its gpu-lets; None where they do not fit."""
        units = [(share, place) for place, (count, share) in enumerate(layout.lies) for _ in range(count)]
        on: list[list[tuple[int, int]]] = [[] for _ in self._gpus]
        left = [100] * len(self._gpus)
        for share, place in sorted(units, key=lambda each: (-each[0], each[1])):
            fits = [i for i, room in enumerate(left) if room >= share and all(other != place for other, _ in on[i])]
            if not fits:
                return None
            chosen = max(fits, key=lambda i: left[i]) if layout.spreads else fits[0]
            on[chosen].append((place, share))
            left[chosen] -= share
        return on

    def _parts(self, unit: Sequence[tuple[int, int]], layout: _Layout) -> tuple[float, float]:
        """Return the rest of a GPU beside gpu-lets: the share, and the part of its memory."""
        left = 100.0 - sum(share for _, share in unit)
        if not unit:
            return 100.0, 1.0
        return (left, layout.memory_part * left / 100.0) if left >= LEAST_SLICE_PCT else (0.0, 0.0)

    def _kv_tokens(self, unit: Sequence[tuple[int, int]], place: int, share: int, left: float) -> int:
        """Return the tokens that a gpu-let has memory for: those on a GPU have it in proportion to their shares."""
        part = (1.0 - left) * share / sum(other for _, other in unit)
        return self._options[self._specs[place].name][share].tokens_in(room_mib(self._gpus[0], part, self._profiles))

    def _value(self, layout: _Layout, weigh: float) -> list[float] | None:
        """Return how many times its rate each model that generates is carried, and all others together, the least
        first; None where the layout does not fit."""
        on = self._packed(layout)
        if on is None:
            return None
        carried_rps = [0.0] * len(self._specs)
        free = list(self._elsewhere)
        for unit in on:
            left, memory = self._parts(unit, layout)
            for place, share in unit:
                rate = self._rate(place, share, self._kv_tokens(unit, place, share, memory))
                if rate <= 0.0:
                    return None
                carried_rps[place] += rate
            if left:
                free.append(self._times_s(self._gpus[0].type, left, memory * self._gpus[0].memory_mib))
        times = [
            part * rate / spec.rate_rps
            for rate, spec, part in zip(carried_rps, self._specs, self._surviving_parts(layout), strict=True)
        ]
        return sorted([*times, self._others_times(free) / weigh])

    def _surviving_parts(self, layout: _Layout) -> list[float]:
        """Return by model which part of what must survive its gpu-lets keep after the loss of a domain, at most 1."""
        parts = []
        for spec, (count, _) in zip(self._specs, layout.lies, strict=True):
            left = left_of(count, self._room.domains(spec)) / count
            parts.append(1.0 if spec.survive is None else min(1.0, left / spec.survive))
        return parts

    def _rate(self, place: int, share: int, kv_tokens: int) -> float:
        """Return the requests per second that a share carries with so much memory, rounded down. It is tried once for
        all amounts that the closed form finds to be the same."""
        spec, known = self._specs[place], self._options[self._specs[place].name][share]
        if kv_tokens < known.kv_tokens / 4:  # limit: a quarter of the share's own memory
            return 0.0
        level = math.floor(math.log(kv_tokens / known.kv_tokens) / math.log(_MEMORY_STEP) + 1e-9)
        key = spec.name, share, level
        if key not in self._rates:
            tokens = int(known.kv_tokens * _MEMORY_STEP**level)
            alike = spec.name, share, carried(spec, known.steps, tokens)
            if alike not in self._tried:
                self._tried[alike] = self._means.carries(spec, known.steps, tokens)[0]
            self._rates[key] = self._tried[alike]
        return self._rates[key]

    def _times_s(self, kind: str, share_pct: float, memory_mib: float) -> list[float]:
        """Return how long a request of each other model takes there, in batches that take half its SLO and fit into
        the memory beside all others' weights; infinite where none does."""
        key = kind, share_pct, memory_mib
        if key not in self._takes:
            on = [costs.get(kind) for _, costs in self._others]
            held = [0.0 if each is None else each.profile.weights_mib or each.memory_mib(1) or 0.0 for each in on]
            left_mib = memory_mib - context_mib_of(kind, self._profiles) - sum(held)
            self._takes[key] = [_takes_s(each, share_pct, left_mib + own) for each, own in zip(on, held, strict=True)]
        return self._takes[key]

    def _others_times(self, free: Sequence[list[float]]) -> float:
        """Return how many times the rates of all others such GPUs and slices carry together."""
        if not self._others:
            return np.inf
        rates = np.array([spec.rate_rps for spec, _ in self._others])
        takes = np.array(free).reshape(-1, len(rates)) * rates  # busy seconds per second, by place and model
        if np.isfinite(takes).all():
            return float((1.0 / takes.sum(axis=1)).sum())
        kinds, counts = np.unique(takes, axis=0, return_counts=True)
        return _flow(kinds, counts)

    def _colocation(self, layout: _Layout) -> Colocation | None:
        on = self._packed(layout)
        if on is None:
            return None
        units, slices = [], []
        for gpu, unit in zip(self._gpus, on, strict=True):
            left, memory = self._parts(unit, layout)
            placed = []
            for place, share in unit:
                known = self._options[self._specs[place].name][share]
                kv_tokens = self._kv_tokens(unit, place, share, memory)
                placed.append(replace(known, rate_rps=self._rate(place, share, kv_tokens), kv_tokens=kv_tokens))
            units.append((gpu, tuple(placed)))
            if unit and left:
                slices.append(Slice(gpu, left, round(memory * gpu.memory_mib, 3)))
        return Colocation(tuple(units), tuple(slices))


def _takes_s(on: ModelOnGpu | None, share_pct: float, room_mib: float) -> float:
    if on is None:
        return np.inf
    batch = on.batches_in_memory(room_mib, on.largest_batch(on.slo_ms / 2.0, share_pct))
    return on.steps(share_pct)[batch] / (1000.0 * batch) if batch > 0 else np.inf


def _flow(takes: np.ndarray, counts: np.ndarray) -> float:
    """Return how many times all rates fit into the time of places: by row what each model's rate takes there."""
    rows, models = takes.shape
    able = np.isfinite(takes)
    if not able.any(axis=0).all():
        return 0.0
    # Columns: how much of each model's rate each place takes, and last how many times all rates are carried.
    last, limits = rows * models, Rows()
    for row in range(rows):
        columns = np.flatnonzero(able[row])
        limits.add((row * models + columns).tolist(), takes[row, columns].tolist(), float(counts[row]))
    for model in range(models):
        limits.add([last, *range(model, last, models)], [1.0, *[-1.0] * rows], 0.0)
    most = np.append(np.where(able, np.inf, 0.0).ravel(), np.inf)
    solution = linear_program([0.0] * last + [-1.0], limits, most).x
    return 0.0 if solution is None else float(solution[-1])


class SlicedCluster:
    """A cluster as the others' policy sees it: some of its GPUs are slices, of types of their own with profiles."""

    def __init__(
        self, cluster: Cluster, colocation: Colocation, workload: Workload, costs: Costs, profiles: Profiles
    ) -> None:
        """Take the cluster, what lies on it, the others with their costs, and the profiles of its types."""
        self._slices = {each.gpu.id: each for each in colocation.slices}
        full = {gpu.id for gpu, unit in colocation.units if unit} - self._slices.keys()
        places = [
            self._slices[gpu.id].as_gpu if gpu.id in self._slices else gpu for gpu in cluster.gpus if gpu.id not in full
        ]
        self.cluster = Cluster.of(places)
        kinds = {each.kind: each for each in colocation.slices}
        inline = [spec for spec in workload.models if spec.latency is not None]
        types = [gpu for gpu in cluster.one_of_each.values() if inline]
        rows = {spec.name: f"{spec.name} of the workload" for spec in inline}
        self.profiles = Profiles(
            [
                *(_profile(gpu.type, 100.0, gpu.type, inline, rows, costs, profiles) for gpu in types),
                *(
                    _profile(each.gpu.type, each.share_pct, kind, workload.models, rows, costs, profiles)
                    for kind, each in kinds.items()
                ),
                *profiles,
            ]
        )
        given = {name: {"latency": None, "profile": row} for name, row in rows.items()}
        models = tuple(spec.model_copy(update=given.get(spec.name, {})) for spec in workload.models)
        streaming = cluster.streams if workload.streaming is None else workload.streaming
        self.workload = workload.model_copy(update={"models": models, "streaming": streaming})

    def in_place(self, plan: Plan, cluster: Cluster) -> Plan:
        """Return a plan for this cluster with each slice as a share of its GPU."""
        gpus = {gpu.id: gpu for gpu in cluster.gpus}
        gpulets = []
        for gpulet in plan.gpulets:
            at = self._slices.get(gpulet.gpu)
            if at is not None:
                share = round(gpulet.effective_share_pct * at.share_pct / 100.0, 6)
                gpulet = gpulet.model_copy(update={"share_pct": share})
            gpulets.append(gpulet)
        real = tuple(PlannedGpu.of(gpus[gpu.id]) if gpu.id in self._slices else gpu for gpu in plan.gpus)
        return plan.model_copy(update={"gpus": real, "gpulets": tuple(gpulets)})


def _profile(
    of: str,
    share_pct: float,
    kind: str,
    specs: Sequence[ModelSpec],
    rows: Mapping[str, str],
    costs: Costs,
    profiles: Profiles,
) -> Profile:
    """Return what models take on a share of a GPU type, as a profile of another type."""
    models = {}
    for spec in specs:
        on = costs[spec.name].get(of)
        if on is not None:
            models[rows.get(spec.name, spec.profile_row)] = _on_share(on, share_pct)
    source = f"{share_pct:g} % of {of}"
    return Profile(name=kind, gpu_type=kind, source=source, models=models, coefficients=dict(profiles.hardware(of)))


def _on_share(on: ModelOnGpu, share_pct: float) -> ModelProfile:
    latency = on.latency(share_pct)
    if isinstance(latency, LinearLatency):
        return on.profile.model_copy(update={"line": latency, "points": ()})
    sizes = [size for size in sorted({*_BATCHES, *latency.points}) if size <= latency.largest]
    points = tuple(
        ProfilePoint(batch_size=size, latency_ms=latency.at(size), memory_mib=memory_of(on.profile, size))
        for size in sizes
    )
    return on.profile.model_copy(update={"points": points, "line": None, "fit": None, "coefficients": {}})
