"""Starts of policy `tenuto` that no other policy makes: every model on every GPU, the models that each GPU type serves
for least on GPUs of that type, and for `objective: each` every model at home on one GPU, all GPUs equally far beyond
what they carry.

On a cluster that is too small the part that is served of a model is what its GPU carries of its load. Where all GPUs
are asked for the same share of their time, all models get the same part; the heaviest first to the least loaded GPU
comes near that (longest processing time first: Graham, 1969), and moves that help the worst served come nearer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tenuto.placement import Cluster, Plan, Policy, Replica, Workload
from tenuto.placement.cluster import Gpu
from tenuto.placement.costs import MOST_BATCH, ModelOnGpu, context_mib_of, costs_of
from tenuto.placement.demand import HEADROOM, SLIGHT, fluid_of, group_models, room_of
from tenuto.placement.expectation.outlook import expected_of
from tenuto.placement.plan import PolicyUsed
from tenuto.placement.policies.shared.hosting import Hosted, hosting_plan, planned_gpus
from tenuto.placement.program import held_mib
from tenuto.profiles import Profiles

MOVES_PER_GPU = 4  # limit: of a model to another GPU, in the mean, before the balance is taken as it is
TRIED = 6  # limit: GPUs that a model is tried on


@dataclass(kw_only=True, eq=False)
class Everywhere(Policy):
    """Every model on every GPU of a fixed cluster, with the largest batches that are in time and that memory allows."""

    name = "every model on every GPU"
    summary = source = "a start of policy tenuto"

    def place(self, workload: Workload, cluster: Cluster, profiles: Profiles) -> Plan:
        """Return the plan; GPUs whose memory does not hold all models stay empty."""
        costs, hosted = costs_of(workload, cluster, profiles), []
        for gpu in cluster.gpus:
            able = [on for by in costs.values() if (on := by.get(gpu.type)) and on.largest_batch(on.slo_ms)]
            room_mib, most = gpu.memory_mib - context_mib_of(gpu.type, profiles), MOST_BATCH
            while most and held_mib(on.needs_mib(min(most, on.largest_batch(on.slo_ms))) for on in able) > room_mib:
                most //= 2
            if able and most:
                sizes = [(on, min(most, on.largest_batch(on.slo_ms))) for on in able]
                replicas = [_replica(on, size, on.spec.rate_rps / len(cluster.gpus)) for on, size in sizes]
                hosted.append(Hosted(gpu, None, replicas))
        return hosting_plan(self.name, workload, cluster, hosted, {})


@dataclass(kw_only=True, eq=False)
class Balanced(Policy):
    """For `objective: each`: whole GPUs in which models take turns, each on as few GPUs as its load asks for; models
    that no GPU has room for are left out."""

    name = "every model at home on one GPU, all equally loaded"
    summary = source = "a start of policy tenuto"

    def place(self, workload: Workload, cluster: Cluster, profiles: Profiles) -> Plan:
        """Return the plan."""
        return _Balance(workload, cluster, profiles).plan()


@dataclass(kw_only=True, eq=False)
class TypesApart(Policy):
    """Each GPU type of a fixed cluster planned by itself, with the part of every model that the cheapest fluid gives
    it, where possible with a tenth more load, as whatever is promised in full stands it."""

    name = "each GPU type by itself"
    summary = source = "a start of policy tenuto"
    by: Policy

    def place(self, workload: Workload, cluster: Cluster, profiles: Profiles) -> Plan:
        """Return the plans of the policy `by` as one."""
        groups, room = group_models(workload, cluster, profiles), room_of(cluster)
        shares = fluid_of(groups, {kind: count / HEADROOM for kind, count in room.items()}).shares
        if any(sum(parts.values()) < 1.0 - SLIGHT for parts in shares.values()):
            shares = fluid_of(groups, room).shares
        hosted, reasons = list[Hosted](), dict[str, str]()
        for kind in room:
            parts = ((spec, shares.get(spec.name, {}).get(kind, 0.0)) for spec in workload.models)
            models = tuple(spec.with_rate_scaled(part) for spec, part in parts if part > 0.0)
            if models:
                gpus = {gpu.id: gpu for gpu in cluster.gpus if gpu.type == kind[0]}
                own = workload.model_copy(update={"models": models, "applications": ()})
                plan = self.by.place(own, Cluster.of(gpus.values()), profiles)
                hosted += [Hosted(gpus[g.gpu], g.share_pct, g.models, g.duty_cycle_ms) for g in plan.gpulets]
                reasons |= plan.unserved_reasons
        return hosting_plan(self.name, workload, cluster, hosted, reasons)


def best_batch(on: ModelOnGpu, rate_rps: float, most_ms: float) -> tuple[int, float] | None:
    """Return the batch that takes at most so long and fills in the rest of the SLO, and GPU seconds per request; None
    where not even one request takes so little."""
    best: tuple[int, float] | None = None
    for size, ms in enumerate(on.steps()[1:], 1):
        if ms > most_ms or (size > 1 and ms + 1000.0 * size / rate_rps > on.slo_ms):
            break
        if best is None or ms / size / 1000.0 < best[1]:
            best = (size, ms / size / 1000.0)
    return best


@dataclass(frozen=True)
class _Guest:
    """A model, or an equal part of one, on one GPU type, with its batch and the part of the GPU's time it asks for."""

    on: ModelOnGpu
    rate_rps: float
    size: int
    load: float

    @classmethod
    def of(cls, on: ModelOnGpu, rate_rps: float, most_ms: float = math.inf) -> _Guest | None:
        """Return it with a batch of at most that time, within half the SLO where one request is; None: not in time."""
        batch = best_batch(on, rate_rps, min(0.5 * on.slo_ms, most_ms))
        batch = batch or best_batch(on, rate_rps, min(on.slo_ms, most_ms))
        return None if batch is None else cls(on, rate_rps, batch[0], rate_rps * batch[1])

    @property
    def patience_ms(self) -> float:
        """How long a batch of another may take that it comes behind."""
        return self.on.slo_ms - self.on.steps()[1]


@dataclass
class _Home:
    """A GPU and its models, each with batches that the others can wait for."""

    gpu: Gpu
    room_mib: float
    guests: tuple[_Guest, ...] = ()

    @property
    def load(self) -> float:
        return sum(guest.load for guest in self.guests)

    def settled(self, guests: tuple[_Guest, ...]) -> tuple[_Guest, ...] | None:
        """Return guests with batches that all others can wait for; None where there are none, or no memory."""
        if len({guest.on.name for guest in guests}) < len(guests):
            return None
        calm = []
        for guest in guests:
            most_ms = min((other.patience_ms for other in guests if other is not guest), default=math.inf)
            calm.append(_Guest.of(guest.on, guest.rate_rps, most_ms))
        settled = tuple(guest for guest in calm if guest is not None)
        held = held_mib(guest.on.needs_mib(guest.size) for guest in settled)
        return settled if len(settled) == len(guests) and held <= self.room_mib else None


class _Balance:
    def __init__(self, workload: Workload, cluster: Cluster, profiles: Profiles) -> None:
        self._workload, self._cluster = workload, cluster
        self._costs = costs_of(workload, cluster, profiles)
        context = {kind: context_mib_of(kind, profiles) for kind in cluster.gpu_types}
        self._homes = [_Home(gpu, gpu.memory_mib - context[gpu.type]) for gpu in cluster.gpus]
        self._least: dict[tuple[object, ...], float] = {}

    def plan(self) -> Plan:
        items = []
        for spec in self._workload.models:
            whole = self._guests(spec.name, spec.rate_rps)
            if whole:
                items.append((min(guest.load for guest in whole.values()), spec))
        mean = sum(load for load, _ in items) / max(1, len(self._homes))
        parts = []
        for load, spec in items:
            count = max(1, math.ceil(load / max(mean, 1e-9) - 1e-9))
            parts += [(load / count, spec, spec.rate_rps / count)] * min(count, len(self._homes))
        for _, spec, rate in sorted(parts, key=lambda part: -part[0]):
            self._settle(self._guests(spec.name, rate))
        self._improve()
        hosted = [Hosted(home.gpu, None, _replicas(home.guests)) for home in self._homes if home.guests]
        return hosting_plan(Balanced.name, self._workload, self._cluster, hosted, {})

    def _guests(self, name: str, rate_rps: float) -> dict[str, _Guest]:
        guests = {kind: _Guest.of(on, rate_rps) for kind, on in self._costs[name].items()}
        return {kind: guest for kind, guest in guests.items() if guest is not None}

    def _settle(self, by_kind: Mapping[str, _Guest]) -> None:
        homes = [home for home in self._homes if home.gpu.type in by_kind]
        for home in sorted(homes, key=lambda home: home.load + by_kind[home.gpu.type].load):
            guests = home.settled((*home.guests, by_kind[home.gpu.type]))
            if guests is not None:
                home.guests = guests
                return

    def _improve(self) -> None:
        """Move models from the GPU that serves the least part to those that serve most, or swap them for lighter ones,
        as long as the lesser of the two parts grows."""
        left = MOVES_PER_GPU * len(self._homes)
        while left > 0 and self._relieve_worst():
            left -= 1

    def _relieve_worst(self) -> bool:
        ranked = sorted(self._homes, key=lambda home: self._part(home.guests))
        worst = ranked[0]
        before = self._part(worst.guests)
        for other in ranked[: -TRIED - 1 : -1]:
            best, changed = before + 1e-3, None
            for guest in worst.guests if other is not worst else ():
                for back in (None, *other.guests):
                    if back is not None and back.load >= guest.load:
                        continue
                    without = self._swapped(worst, guest, back)
                    with_it = self._swapped(other, back, guest)
                    if without is None or with_it is None:
                        continue
                    least = min(self._part(without), self._part(with_it))
                    if least > best:
                        best, changed = least, (without, with_it)
            if changed is not None:
                worst.guests, other.guests = changed
                return True
        return False

    def _swapped(self, home: _Home, goes: _Guest | None, comes: _Guest | None) -> tuple[_Guest, ...] | None:
        """Return the guests of a GPU with one going and one coming, where the latter can run there."""
        rest = tuple(guest for guest in home.guests if guest is not goes)
        if comes is None:
            return home.settled(rest)
        guest = self._guests(comes.on.name, comes.rate_rps).get(home.gpu.type)
        return None if guest is None else home.settled((*rest, guest))

    def _part(self, guests: tuple[_Guest, ...]) -> float:
        """Return the least part of any rate that models are expected to be served on one GPU."""
        key = tuple(sorted((guest.on.name, guest.on.gpu.type, guest.rate_rps, guest.size) for guest in guests))
        if key not in self._least:
            self._least[key] = self._least_part(guests) if guests else 1.0
        return self._least[key]

    def _least_part(self, guests: tuple[_Guest, ...]) -> float:
        gpu = guests[0].on.gpu
        hosted = [Hosted(gpu, None, _replicas(guests))]
        models = tuple(guest.on.spec.model_copy(update={"rate_rps": guest.rate_rps}) for guest in guests)
        part = self._workload.model_copy(update={"models": models})  # not made anew: a canary may be without its model
        plan = hosting_plan("balanced", part, self._cluster, hosted, {})
        update = {
            "policy": PolicyUsed(name="balanced"),
            "gpus": planned_gpus(self._cluster, [gpu]),
            "models": models,
            "objective": "each",
        }
        served = expected_of(plan.model_copy(update=update), with_margin=False).models
        return min(served[guest.on.name].goodput_rps / guest.rate_rps for guest in guests)


def _replicas(guests: Sequence[_Guest]) -> list[Replica]:
    return [_replica(guest.on, guest.size, guest.rate_rps) for guest in guests]


def _replica(on: ModelOnGpu, size: int, rate_rps: float) -> Replica:
    latency_ms = round(on.steps()[size], 6)
    return Replica(
        name=on.name, batch_size=size, rate_rps=round(rate_rps, 6), latency=on.cut(100.0, size), latency_ms=latency_ms
    )
