"""The search of gpulet: which gpu-let a model gets, when GPUs are split, and when gpu-lets are merged in time."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

from tenuto.placement.cluster import Gpu
from tenuto.placement.interference import Resident
from tenuto.placement.policies.gpulet.disturbance import Disturbance, Reserve, slowed_rps
from tenuto.placement.policies.gpulet.share_costs import ShareCosts
from tenuto.placement.policies.gpulet.shared_gpu import Solved, Tenants, running, solve_gpu
from tenuto.placement.policies.shared.gpu_pool import GpuPool
from tenuto.placement.policies.shared.hosting import CARRIED, Hosted
from tenuto.placement.workload import ModelSpec
from tenuto.profiles.share_latency import WHOLE_GPU_PCT


@dataclass(frozen=True)
class Rules:
    """What the search may do; see the options of the policy."""

    shares_pct: Sequence[float]  # below 100, ascending
    max_partitions: int
    knee: Callable[[Sequence[tuple[float, float]]], float]
    smaller: bool
    turns: bool  # whether models may share a gpu-let in time
    merge_without_free: bool  # also where no free gpu-let is as large as wanted
    disturbances: Mapping[str, Disturbance]  # by GPU type
    reserve: Reserve | None = None  # None: gpu-lets are filled as if no neighbour came


@dataclass
class _OpenGpu:
    """A GPU and its gpu-lets; those without tenants are free. Invariant: the shares sum to 100."""

    gpu: Gpu
    order: int
    gpulets: list[tuple[float, Tenants]] = field(default_factory=lambda: [(WHOLE_GPU_PCT, ())])
    solved: tuple[Solved | None, ...] = (None,)

    def try_on(self, gpulets: list[tuple[float, Tenants]], disturbances: Mapping[str, Disturbance]) -> bool:
        """Take over these gpu-lets if all of them keep their rates and SLOs."""
        solved = solve_gpu(gpulets, disturbances[self.gpu.type])
        if solved is None:
            return False
        self.gpulets, self.solved = gpulets, solved
        return True

    def busy(self, index: int) -> float:
        """Return the least part of the time a gpu-let is busy, with its tenants' largest batches."""
        share, tenants = self.gpulets[index]
        return sum(rate / costs.capacity_rps(share) for costs, rate in tenants)

    def running_beside(self, index: int) -> list[list[Resident]]:
        """Return the batches of every used gpu-let but one."""
        each = enumerate(zip(self.gpulets, self.solved, strict=True))
        return [running(gpulet, one) for position, (gpulet, one) in each if position != index and one is not None]


class ElasticPartitioning:
    """Places one model after another; earlier decisions stay, but gpu-lets may be split further or shared.

    Invariant: `_free` and `_used` hold every gpu-let of the open GPUs, by share, order and place on the GPU; used ones
    also with the part of the time they are busy.
    """

    def __init__(self, pool: GpuPool, rules: Rules) -> None:
        self._pool, self._rules = pool, rules
        self._open: list[_OpenGpu] = []
        self._free: list[tuple[float, int, int]] = []
        self._used: list[tuple[float, int, int, float]] = []
        if not pool.elastic:
            for kind in pool.types:
                while (gpu := pool.next_gpu(kind)) is not None:
                    self._add(gpu)

    def place(self, spec: ModelSpec, costs: Mapping[str, ShareCosts]) -> float:
        """Place as much of a model's rate as possible; return the placed rate in requests per second.

        Args:
            costs: of this model by GPU type, each with at least one share.
        """
        left = spec.rate_rps
        while left > CARRIED * spec.rate_rps:
            took = self._place_part(costs, left)
            if not took and self._open_one(costs, left):
                took = self._place_part(costs, left)
            if not took:
                break
            left -= took
        return spec.rate_rps - max(0.0, left)

    def hosted(self) -> list[Hosted]:
        """Return the gpu-lets in use."""
        return [
            solved.hosted(one.gpu, share, tenants)
            for one in self._open
            for (share, tenants), solved in zip(one.gpulets, one.solved, strict=True)
            if solved is not None
        ]

    def _place_part(self, costs: Mapping[str, ShareCosts], left: float) -> float:
        """Give the model one gpu-let, or a turn in one; return the rate it carries, 0 when there is none."""
        sizes = {kind: self._wanted(kind, own, left) for kind, own in costs.items()}
        first = bisect_left(self._free, (min(sizes.values()),))
        for share, order, index in islice(self._free, first, None):
            one = self._open[order]
            own = costs.get(one.gpu.type)
            if own is not None and share >= sizes[one.gpu.type]:
                size = self._split_size(one, share, sizes[one.gpu.type])
                rate = min(left, self._capacity_rps(one.gpu.type, own, size))
                if rate and self._merge(costs, rate):
                    return rate
                rate = self._occupy(one, index, size, own, left)
                if rate:
                    return rate
        for kind, own in costs.items() if self._rules.merge_without_free else ():
            rate = min(left, self._capacity_rps(kind, own, sizes[kind]))
            if self._merge(costs, rate):
                return rate
        if self._rules.smaller:
            smaller = self._free[: bisect_left(self._free, (max(sizes.values()),))]
            for share, order, index in sorted(smaller, key=lambda entry: (-entry[0], entry[1:])):
                one = self._open[order]
                if share < sizes.get(one.gpu.type, 0.0):
                    rate = self._occupy(one, index, share, costs[one.gpu.type], left)
                    if rate:
                        return rate
        return 0.0

    def _capacity_rps(self, kind: str, costs: ShareCosts, share: float) -> float:
        """Return what a share carries, with reserve for a coming neighbour where the rules ask for it."""
        reserve = self._rules.reserve
        return costs.capacity_rps(share) if reserve is None else reserve.capacity_rps(kind, costs, share)

    def _wanted(self, kind: str, costs: ShareCosts, rate_rps: float) -> float:
        """Return min(knee, required share); the largest share when none carries the rate."""
        curve = [(share, self._capacity_rps(kind, costs, share)) for share in sorted(costs.latency_ms)]
        required = next((share for share, rate in curve if rate >= rate_rps * (1 - CARRIED)), curve[-1][0])
        return min(self._rules.knee(curve), required)

    def _split_size(self, one: _OpenGpu, share: float, least: float) -> float:
        """Return the smallest size of at least `wanted` that a free gpu-let can be split into, or its whole share."""
        if len(one.gpulets) >= self._rules.max_partitions:
            return share
        sizes = self._rules.shares_pct
        return next(
            (s for s in sizes if least <= s < share and any(abs(share - s - rest) < 1e-6 for rest in sizes)), share
        )

    def _occupy(self, one: _OpenGpu, index: int, size: float, costs: ShareCosts, left: float) -> float:
        """Put the model alone on a free gpu-let, or on a part of it; return the rate it carries there.

        When the rest of the GPU is free and the rules say so, room is left for a neighbour's slowdown. Beside present
        neighbours the rate is lowered to what the gpu-let then carries.
        """
        share = one.gpulets[index][0]
        others = one.running_beside(index)
        disturbance = self._rules.disturbances[one.gpu.type]
        full = costs.capacity_rps(size) if others else self._capacity_rps(one.gpu.type, costs, size)
        slowed = slowed_rps(costs, size, lambda batch: disturbance.factor(batch, others))
        for rate in (min(left, full), min(left, slowed)):
            if rate <= CARRIED * left:
                continue
            parts = [(size, ((costs, rate),))] + ([(share - size, ())] if size < share else [])
            gpulets: list[tuple[float, Tenants]] = [*one.gpulets[:index], *parts, *one.gpulets[index + 1 :]]
            if self._try_on(one, gpulets):
                return rate
        return 0.0

    def _merge(self, costs: Mapping[str, ShareCosts], rate: float) -> bool:
        """Give the model a turn in the smallest gpu-let in use that has room for this rate."""
        if not self._rules.turns:
            return False
        needs = {
            (kind, share): rate / (own.capacity_rps(share) or 1e-9)
            for kind, own in costs.items()
            for share in (*self._rules.shares_pct, WHOLE_GPU_PCT)
        }
        for share, order, index, busy in self._used:
            one = self._open[order]
            need = needs.get((one.gpu.type, share))
            if need is None or busy + need > 1 + 1e-9:
                continue  # too busy for any cycle
            own, tenants = costs[one.gpu.type], one.gpulets[index][1]
            if any(costs_.spec.name == own.spec.name for costs_, _ in tenants):
                continue  # a gpu-let holds a model only once
            gpulets = list(one.gpulets)
            gpulets[index] = (share, (*tenants, (own, rate)))
            if self._try_on(one, gpulets):
                return True
        return False

    def _try_on(self, one: _OpenGpu, gpulets: list[tuple[float, Tenants]]) -> bool:
        """Give a GPU these gpu-lets if all of them keep their rates and SLOs."""
        before = self._entries(one)
        if not one.try_on(gpulets, self._rules.disturbances):
            return False
        for entry in before[0]:
            del self._free[bisect_left(self._free, entry)]
        for entry_ in before[1]:
            del self._used[bisect_left(self._used, entry_)]
        self._list(one)
        return True

    def _entries(self, one: _OpenGpu) -> tuple[list[tuple[float, int, int]], list[tuple[float, int, int, float]]]:
        """Return a GPU's entries in the lists of free and of used gpu-lets."""
        free = [(share, one.order, index) for index, (share, tenants) in enumerate(one.gpulets) if not tenants]
        used = [
            (share, one.order, index, one.busy(index)) for index, (share, tenants) in enumerate(one.gpulets) if tenants
        ]
        return free, used

    def _list(self, one: _OpenGpu) -> None:
        free, used = self._entries(one)
        for entry in free:
            insort(self._free, entry)
        for entry_ in used:
            insort(self._used, entry_)

    def _add(self, gpu: Gpu) -> None:
        self._open.append(_OpenGpu(gpu, len(self._open)))
        self._list(self._open[-1])

    def _open_one(self, costs: Mapping[str, ShareCosts], rate_rps: float) -> bool:
        """Open another GPU of an elastic cluster, of the type that carries most of the rate per price."""
        if not self._pool.elastic:
            return False
        kinds = sorted(costs, key=lambda kind: -costs[kind].value(rate_rps, self._pool.prices[kind]))
        gpu = next((gpu for kind in kinds if (gpu := self._pool.next_gpu(kind)) is not None), None)
        if gpu is None:
            return False
        self._add(gpu)
        return True
