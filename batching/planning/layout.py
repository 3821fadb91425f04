"""Layouts: which models live on which share of which GPU. A plan without its numbers, small enough to search in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from heapq import heapify, heappop, heappush

from tenuto.errors import InvalidInputError
from tenuto.placement import Cluster, Gpulet, ModelSpec, Plan, Replica, Workload, profile_of
from tenuto.placement.cluster import Gpu
from tenuto.placement.costs import context_mib_of, memory_of
from tenuto.placement.interference import InterferenceModel, Resident
from tenuto.placement.plan import PolicyUsed
from tenuto.placement.policies.shared.hosting import gpulet_id, planned_gpus
from tenuto.placement.program import held_mib
from tenuto.profiles import LatencyTable, LinearLatency, ModelProfile, Profiles
from tenuto.profiles.share_latency import ShareRule, latency_on_share, with_share


@dataclass(frozen=True, order=True)
class Slot:
    """A gpu-let: its share in percent (100: the whole GPU) and its models, in the order of the workload."""

    share_pct: float
    models: tuple[str, ...]


SHARES_PCT = tuple(float(share) for share in range(100, 0, -5))  # looked at to bound the GPU time of a request

_Caps = tuple[tuple[int | None, ...], ...]  # largest batches that are enough, by slot and model; (): as many as can be
_Named = tuple[str, Resident]  # a model's name and what it is to its neighbours

# Of every GPU in order; () is an idle one.
Layout = tuple[tuple[Slot, ...], ...]


@dataclass(frozen=True)
class _Cost:
    """A model on a share of a GPU type, alone."""

    profile: ModelProfile
    latency: LatencyTable | LinearLatency
    rule: ShareRule
    largest: int
    _memory_mib: dict[int, float] = field(default_factory=dict, compare=False)  # by batch size, as asked

    def memory_mib(self, batch_size: int) -> float:
        if batch_size not in self._memory_mib:
            self._memory_mib[batch_size] = memory_of(self.profile, batch_size) or 0.0
        return self._memory_mib[batch_size]


@dataclass(frozen=True)
class _Sized:
    """A replica with its largest batch and what its neighbours cost."""

    name: str
    cost: _Cost
    batch_size: int
    slowdown: float

    @property
    def memory_mib(self) -> float:
        return self.cost.memory_mib(self.batch_size)

    @property
    def needs_mib(self) -> tuple[float, float | None]:
        """Its memory, and the part of it that is weights where that is known."""
        return self.memory_mib, self.cost.profile.weights_mib

    @property
    def working_mib(self) -> float:
        """What a smaller batch needs less of: all but the weights, where they are known."""
        memory, weights = self.needs_mib
        return memory - min(weights or 0.0, memory)

    def shrunk(self) -> _Sized:
        return _Sized(self.name, self.cost, self.batch_size // 2, self.slowdown)


class Builder:
    """Turns layouts into plans: the largest batch that can be in time beside the neighbours and that memory allows.

    The scheduler chooses each batch against its deadline, so that a plan only has to say what may run.
    """

    def __init__(
        self, workload: Workload, profiles: Profiles, interference: dict[str, InterferenceModel], *, max_batch: int
    ) -> None:
        self._specs = {spec.name: spec for spec in workload.models}
        self._order = {name: position for position, name in enumerate(self._specs)}
        self._profiles = profiles
        self._interference = interference
        self._max_batch = max_batch
        self._is_unshared = workload.mps == "off"
        self._objective = workload.objective
        self._costs: dict[tuple[str, str, float], _Cost | None] = {}
        self._gpus: dict[tuple[str, float, tuple[Slot, ...], _Caps], tuple[tuple[_Sized, ...], ...] | None] = {}
        self._slowdowns: dict[tuple[object, ...], float] = {}
        self.modelled: set[str] = set()  # models whose latency on a share was not measured

    def ordered(self, names: Sequence[str]) -> tuple[str, ...]:
        """Return names without repeats, in the order of the workload."""
        return tuple(sorted(set(names), key=self._order.__getitem__))

    def can_run(self, model: str, gpu: Gpu, share_pct: float) -> bool:
        """Say whether one request can be in time on this share, alone."""
        return self._cost(model, gpu.type, share_pct) is not None

    def least_busy(self, gpus: Sequence[Gpu]) -> float:
        """Return how many GPUs the rates keep busy at least: every model where it takes least GPU time per request."""
        busy = 0.0
        for name, spec in self._specs.items():
            times = []
            for kind in {gpu.type: gpu for gpu in gpus}:
                for share_pct in SHARES_PCT:
                    cost = self._cost(name, kind, share_pct)
                    if cost is not None:
                        sizes = range(1, cost.largest + 1)
                        times.append(min(cost.latency.at(size) / size for size in sizes) * share_pct / 100_000.0)
            busy += spec.rate_rps * min(times, default=0.0)
        return busy

    def fits(self, slots: tuple[Slot, ...], gpu: Gpu) -> bool:
        """Say whether a GPU can be laid out so: shares, memory and the latency of one request with neighbours."""
        return self._sized(slots, gpu) is not None

    def fits_with(self, batched: Sequence[tuple[Slot, Mapping[str, int]]], gpu: Gpu) -> bool:
        """Say whether a GPU can be laid out so with these largest batches by model."""
        caps = tuple(tuple(sizes[name] for name in slot.models) for slot, sizes in batched)
        return self._sized(tuple(slot for slot, _ in batched), gpu, caps) is not None

    def plan(
        self, layout: Layout, gpus: Sequence[Gpu], cluster: Cluster, caps: Mapping[tuple[str, str], int] | None = None
    ) -> Plan | None:
        """Return the plan of a layout, or None where a GPU cannot be laid out so.

        Args:
            layout: of the GPUs, in their order.
            gpus: to lay out.
            cluster: they belong to.
            caps: largest batches by (gpu-let, model) that are enough; default: the largest that can be in time.
        """
        gpulets: list[Gpulet] = []
        for gpu, slots in zip(gpus, layout, strict=True):
            here = () if caps is None else tuple(
                tuple(caps.get((gpulet_id(gpu.id, i), name)) for name in s.models) for i, s in enumerate(slots)
            )  # fmt: skip
            sized = self._sized(slots, gpu, here)
            if sized is None:
                return None
            for index, (slot, replicas) in enumerate(zip(slots, sized, strict=True)):
                gpulets.append(Gpulet(
                    id=gpulet_id(gpu.id, index), gpu=gpu.id,
                    share_pct=slot.share_pct if slot.share_pct < 100.0 or len(slots) > 1 else None,
                    models=tuple(_replica(replica) for replica in replicas),
                ))  # fmt: skip
        used = [gpu for gpu, slots in zip(gpus, layout, strict=True) if slots]
        return Plan(
            policy=PolicyUsed(name="tenuto"),
            gpus=planned_gpus(cluster, used),
            gpulets=tuple(gpulets),
            models=tuple(self._specs.values()),
            objective=self._objective,
        )

    def _cost(self, model: str, gpu_type: str, share_pct: float) -> _Cost | None:
        key = (model, gpu_type, share_pct)
        if key not in self._costs:
            self._costs[key] = self._new_cost(self._specs[model], gpu_type, share_pct)
        return self._costs[key]

    def _new_cost(self, spec: ModelSpec, gpu_type: str, share_pct: float) -> _Cost | None:
        try:
            profile = profile_of(spec, gpu_type, self._profiles)
            latency, rule = latency_on_share(profile, share_pct)
            profile = with_share(profile, share_pct, latency)
        except InvalidInputError:
            return None
        largest = min(self._max_batch, latency.largest_batch(spec.slo_ms))
        return _Cost(profile, latency, rule, largest) if largest >= 1 else None

    def _sized(self, slots: tuple[Slot, ...], gpu: Gpu, caps: _Caps = ()) -> tuple[tuple[_Sized, ...], ...] | None:
        key = (gpu.type, gpu.memory_mib, slots, caps)
        if key not in self._gpus:
            self._gpus[key] = self._size(slots, gpu, caps)
        return self._gpus[key]

    def _size(self, slots: tuple[Slot, ...], gpu: Gpu, caps: _Caps) -> tuple[tuple[_Sized, ...], ...] | None:
        if sum(slot.share_pct for slot in slots) > 100.0 + 1e-6:
            return None
        if self._is_unshared and gpu.type != "cpu" and any(slot.share_pct < 100.0 for slot in slots):
            return None
        found: list[list[_Sized]] = []
        for position, slot in enumerate(slots):
            costs = [(name, self._cost(name, gpu.type, slot.share_pct)) for name in slot.models]
            if not costs or any(cost is None for _, cost in costs):
                return None
            limits = [limit or self._max_batch for limit in caps[position]] if caps else [self._max_batch] * len(costs)
            capped = [
                (name, replace(cost, largest=min(cost.largest, limit)))
                for (name, cost), limit in zip(costs, limits, strict=True) if cost
            ]  # fmt: skip
            found.append([_Sized(name, cost, cost.largest, 1.0) for name, cost in capped])
        for _ in range(2):  # batches shape the slowdown and the slowdown the batches
            slowed = self._slowed(slots, found, gpu.type)
            if slowed is None:
                return None
            found = slowed
        room_mib = gpu.memory_mib - len(slots) * context_mib_of(gpu.type, self._profiles)
        return _in_room(found, room_mib)

    def _slowdown(self, gpu_type: str, own: _Named, others: Sequence[_Named]) -> float:
        """Return what these neighbours cost; the same few are asked for in most layouts."""
        key = (gpu_type, *((name, resident.batch_size, resident.share_pct) for name, resident in (own, *others)))
        if key not in self._slowdowns:
            model = self._interference[gpu_type]
            self._slowdowns[key] = max(1.0, model.slowdown(own[1], [resident for _, resident in others]))
        return self._slowdowns[key]

    def _slowed(self, slots: Sequence[Slot], found: list[list[_Sized]], gpu_type: str) -> list[list[_Sized]] | None:
        """Return the replicas with their slowdown and the batch that is then in time; None where not even one is."""
        if len(slots) == 1:
            return found
        residents = [
            [(r.name, Resident(r.cost.profile, r.batch_size, slot.share_pct)) for r in replicas]
            for slot, replicas in zip(slots, found, strict=True)
        ]
        slowed: list[list[_Sized]] = []
        for position, replicas in enumerate(found):
            changed = []
            for own, replica in zip(residents[position], replicas, strict=True):
                others = [around for index, around in enumerate(residents) if index != position]
                try:  # of the models of a neighbour, the one that hurts most
                    worst = [max(around, key=lambda other: self._slowdown(gpu_type, own, [other])) for around in others]
                    slowdown = self._slowdown(gpu_type, own, worst)
                except InvalidInputError:
                    return None
                budget = self._specs[replica.name].slo_ms / slowdown
                size = min(replica.cost.largest, replica.cost.latency.largest_batch(budget))
                if size < 1:
                    return None
                changed.append(_Sized(replica.name, replica.cost, size, slowdown))
                if replica.cost.rule == "utilisation":
                    self.modelled.add(replica.name)
            slowed.append(changed)
        return slowed


def _held_mib(replicas: Sequence[_Sized]) -> float:
    return held_mib(replica.needs_mib for replica in replicas)


def _in_room(found: list[list[_Sized]], room_mib: float) -> tuple[tuple[_Sized, ...], ...] | None:
    """Return replicas whose gpu-lets fit into this memory: batches are halved, always that with the most working
    memory, which alone counts in its gpu-let; None where even batches of one do not fit."""
    held = [_held_mib(replicas) for replicas in found]
    heap = [(-r.working_mib, s, p) for s, replicas in enumerate(found) for p, r in enumerate(replicas)]
    heapify(heap)
    while sum(held) > room_mib + 1e-6:
        if not heap:
            return None
        _, position, place = heappop(heap)
        replica = found[position][place]
        if replica.batch_size > 1:
            found[position][place] = smaller = replica.shrunk()
            heappush(heap, (-smaller.working_mib, position, place))
            held[position] = _held_mib(found[position])
    return tuple(tuple(replicas) for replicas in found)


def _replica(sized: _Sized) -> Replica:
    latency = sized.cost.latency
    if isinstance(latency, LatencyTable):
        points = {size: ms for size, ms in latency.points.items() if size < sized.batch_size}
        points[sized.batch_size] = latency.at(sized.batch_size)
        latency = LatencyTable(points={size: round(ms, 6) for size, ms in points.items()})
    return Replica(
        name=sized.name,
        batch_size=sized.batch_size,
        slowdown=round(sized.slowdown, 6),
        latency=latency,
        latency_ms=round(latency.at(sized.batch_size) * sized.slowdown, 6),
        memory_mib=sized.memory_mib or None,
        weights_mib=sized.cost.profile.weights_mib if sized.memory_mib else None,
    )


def layout_of(plan: Plan, gpus: Sequence[Gpu], builder: Builder) -> tuple[Layout, dict[tuple[str, str], int]]:
    """Return the layout of another policy's plan on these GPUs, matched in order within each type, and its largest
    batches by (gpu-let, model).

    Unrestricted gpu-lets that share a GPU become one that holds the models of all. A model that beside its neighbours
    is late even alone in its batch is left out there.
    """
    types = {gpu.id: gpu.type for gpu in plan.gpus}
    left: dict[str, list[list[Gpulet]]] = {}
    for gpu_id, gpulets in plan.by_gpu().items():
        if gpulets:
            left.setdefault(types[gpu_id], []).append(gpulets)
    layout: list[tuple[Slot, ...]] = []
    caps: dict[tuple[str, str], int] = {}
    for gpu in gpus:
        groups = [[gpulet] for gpulet in left[gpu.type].pop(0)] if left.get(gpu.type) else []
        if len(groups) > 1 and any(gpulet.share_pct is None for (gpulet,) in groups):
            groups = [[gpulet for (gpulet,) in groups]]
        batches: list[dict[str, int]] = []
        slots = []
        for group in groups:
            sizes: dict[str, int] = {}
            for replica in (replica for gpulet in group for replica in gpulet.models):
                sizes[replica.name] = max(sizes.get(replica.name, 1), replica.batch_size)
            batches.append(sizes)
            share_pct = 100.0 if len(group) > 1 else round(group[0].effective_share_pct, 6)
            slots.append(Slot(share_pct, builder.ordered([*sizes])))
        kept = _in_time(slots, batches, gpu, builder)
        layout.append(tuple(slot for slot, _ in kept))
        for index, (slot, sizes) in enumerate(kept):
            caps |= {(gpulet_id(gpu.id, index), name): sizes[name] for name in slot.models}
    return tuple(layout), caps


def _in_time(
    slots: Sequence[Slot], batches: Sequence[dict[str, int]], gpu: Gpu, builder: Builder
) -> list[tuple[Slot, dict[str, int]]]:
    """Return gpu-lets with their batches, without models that keep the GPU from being laid out so: the one without
    which it can be, and where there is none one of the smallest share, until it can be."""
    kept = list(zip(slots, batches, strict=True))
    while kept and not builder.fits_with(kept, gpu):
        fewer = [
            _left_out(kept, place, name)
            for place in sorted(range(len(kept)), key=lambda index: kept[index][0].share_pct)
            for name in kept[place][0].models
        ]
        kept = next((each for each in fewer if builder.fits_with(each, gpu)), fewer[0])
    return kept


def _left_out(
    kept: Sequence[tuple[Slot, dict[str, int]]], place: int, name: str
) -> list[tuple[Slot, dict[str, int]]]:
    slot, sizes = kept[place]
    rest = Slot(slot.share_pct, tuple(other for other in slot.models if other != name))
    changed = [*kept[:place], (rest, sizes), *kept[place + 1 :]]
    return [each for each in changed if each[0].models]
