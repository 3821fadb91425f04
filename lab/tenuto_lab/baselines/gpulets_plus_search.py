"""The search of gpulets+: which share a model gets and beside whom, with at most two gpu-lets per GPU."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from tenuto.errors import InvalidInputError, MissingProfileError
from tenuto.placement.cluster import Gpu
from tenuto.placement.interference import InterferenceModel, Resident
from tenuto.placement.policies.gpulet.share_costs import ShareCosts, Turn
from tenuto.placement.policies.shared.gpu_pool import GpuPool
from tenuto.placement.policies.shared.hosting import CARRIED, Hosted
from tenuto.placement.workload import ModelSpec
from tenuto.profiles.share_latency import WHOLE_GPU_PCT

MOST_GPULETS = 2
ROUNDING = 1e-9


@dataclass(frozen=True)
class Rules:
    """What the search may do; see the options of the policy."""

    knee: Callable[[Sequence[tuple[float, float]]], float]
    smallest_batch: bool
    book_alone: bool
    check_neighbours: bool
    interference: Mapping[str, InterferenceModel]  # by GPU type

    def efficient_pct(self, costs: ShareCosts) -> float:
        """Return the share at the bend of throughput over share with batches of one."""
        return self.knee([(share, _alone_rps(costs, share, 1)) for share in sorted(costs.latency_ms)])

    def wanted_pct(self, costs: ShareCosts, rate_rps: float) -> float:
        """Return the smaller of the efficient share and the one that carries the rate with batches of one."""
        shares = sorted(costs.latency_ms)
        required = next((share for share in shares if _alone_rps(costs, share, 1) >= rate_rps), shares[-1])
        return min(self.efficient_pct(costs), required)


@dataclass(frozen=True)
class _Tenant:
    costs: ShareCosts
    batch_size: int
    share_pct: float
    rate_rps: float

    @property
    def resident(self) -> Resident:
        return Resident(self.costs.model, self.batch_size, self.share_pct)

    @property
    def latency_ms(self) -> float:
        return self.costs.latency_ms[self.share_pct][self.batch_size]

    @property
    def alone_rps(self) -> float:
        return _alone_rps(self.costs, self.share_pct, self.batch_size)


@dataclass
class _OpenGpu:
    gpu: Gpu
    tenants: list[_Tenant] = field(default_factory=list)

    @property
    def room_pct(self) -> float:
        used = sum(tenant.share_pct for tenant in self.tenants)
        return WHOLE_GPU_PCT - used if len(self.tenants) < MOST_GPULETS else 0.0


class PairSearch:
    """Places one model after another; earlier decisions are never changed."""

    def __init__(self, pool: GpuPool, rules: Rules) -> None:
        self._pool, self._rules = pool, rules
        self._open: list[_OpenGpu] = []
        self._half: list[_OpenGpu] = []  # GPUs with room for one more gpu-let

    def place(self, spec: ModelSpec, costs: Mapping[str, ShareCosts]) -> None:
        """Give a model gpu-lets until its rate is carried or nothing is left.

        Args:
            costs: of this model by GPU type, with at least one share each.
        """
        left = spec.rate_rps
        while left > CARRIED * spec.rate_rps:
            tenant = self._beside(costs, left) or self._on_its_own(costs, left) or self._in_what_is_left(costs, left)
            if tenant is None:
                break
            left -= tenant.rate_rps

    def hosted(self) -> list[Hosted]:
        """Return the gpu-lets in use, each with one model."""
        found = []
        for one in self._open:
            for tenant in one.tenants:
                turn = Turn(tenant.costs, tenant.batch_size, tenant.rate_rps, self._factor(one, tenant))
                whole = tenant.share_pct >= WHOLE_GPU_PCT
                found.append(Hosted(one.gpu, None if whole else tenant.share_pct, [turn.replica(tenant.share_pct)]))
        return found

    def overloaded(self) -> list[str]:
        """Return notes on gpu-lets that are given more than they are expected to carry beside their neighbour."""
        notes = []
        for one in self._open:
            for tenant in one.tenants:
                factor = self._factor(one, tenant)
                carried = tenant.alone_rps / factor
                if carried < tenant.rate_rps * (1 - CARRIED):
                    notes.append(
                        f"{tenant.costs.spec.name}: given {tenant.rate_rps:.4g} rps on {one.gpu.id}, where it carries "
                        f"{carried:.4g} beside its neighbour"
                    )
        return notes

    def _factor(self, one: _OpenGpu, tenant: _Tenant) -> float:
        """Return the slowdown by the neighbours; infinite if unknown, so that no model gets an unknown neighbour."""
        others = [other.resident for other in one.tenants if other is not tenant]
        try:
            return self._rules.interference[one.gpu.type].slowdown(tenant.resident, others) if others else 1.0
        except InvalidInputError:
            return math.inf

    def _beside(self, costs: Mapping[str, ShareCosts], left: float) -> _Tenant | None:
        """Put the model into the smallest room beside another that is as large as wanted."""
        wanted = {kind: self._rules.wanted_pct(own, left) for kind, own in costs.items()}
        rooms = [one for one in self._half if wanted.get(one.gpu.type, math.inf) <= one.room_pct + ROUNDING]
        for one in sorted(rooms, key=lambda one: one.room_pct):
            tenant = self._try(one, costs[one.gpu.type], _largest_share(costs[one.gpu.type], one.room_pct), left)
            if tenant is not None:
                return tenant
        return None

    def _on_its_own(self, costs: Mapping[str, ShareCosts], left: float) -> _Tenant | None:
        """Open a GPU, of the type that carries most of the rate per price."""
        for kind in sorted(costs, key=lambda kind: -costs[kind].value(left, self._pool.prices[kind])):
            gpu = self._pool.next_gpu(kind)
            if gpu is not None:
                self._open.append(_OpenGpu(gpu))
                return self._try(self._open[-1], costs[kind], self._rules.wanted_pct(costs[kind], left), left)
        return None

    def _in_what_is_left(self, costs: Mapping[str, ShareCosts], left: float) -> _Tenant | None:
        """On a full cluster use the largest room that is smaller than wanted."""
        for one in sorted((one for one in self._half if one.gpu.type in costs), key=lambda one: -one.room_pct):
            tenant = self._try(one, costs[one.gpu.type], _largest_share(costs[one.gpu.type], one.room_pct), left)
            if tenant is not None:
                return tenant
        return None

    def _try(self, one: _OpenGpu, costs: ShareCosts, share_pct: float | None, left: float) -> _Tenant | None:
        """Put the model on that share of a GPU if a batch exists that the rules allow; return it."""
        if share_pct is None:
            return None
        allowed: dict[int, float] = {}  # requests/s to book by batch size
        for size, latency in enumerate(costs.latency_ms[share_pct]):
            if size:
                tenant = _Tenant(costs, size, share_pct, left)
                factor = self._factor(_OpenGpu(one.gpu, [*one.tenants, tenant]), tenant)
                if 2 * latency * factor <= costs.slo_ms:
                    allowed[size] = _alone_rps(costs, share_pct, size) / (1.0 if self._rules.book_alone else factor)
        for size in self._preferred(allowed, left):
            tenant = _Tenant(costs, size, share_pct, min(left, allowed[size]))
            if all(self._bears(one, other, tenant) for other in one.tenants):
                one.tenants.append(tenant)
                if len(one.tenants) == 1:
                    self._half.append(one)
                else:
                    self._half = [other for other in self._half if other is not one]
                return tenant
        return None

    def _preferred(self, allowed: Mapping[int, float], left: float) -> list[int]:
        """Return the batch size to use, if any."""
        if not allowed:
            return []
        if not self._rules.smallest_batch:
            return [max(allowed)]
        enough = [size for size, rate in allowed.items() if rate >= left]
        return [min(enough) if enough else max(allowed, key=lambda size: allowed[size])]

    def _bears(self, one: _OpenGpu, resident: _Tenant, newcomer: _Tenant) -> bool:
        """Say whether a resident keeps half its SLO, and its rate where that counts, beside one more."""
        factor = self._factor(_OpenGpu(one.gpu, [*one.tenants, newcomer]), resident)
        if not self._rules.check_neighbours:
            return math.isfinite(factor)
        latency = resident.latency_ms * factor
        carried = resident.alone_rps / factor
        keeps_rate = self._rules.book_alone or carried >= resident.rate_rps * (1 - CARRIED)
        return 2 * latency <= resident.costs.slo_ms and keeps_rate


def _alone_rps(costs: ShareCosts, share_pct: float, batch_size: int) -> float:
    """Return the throughput of batches that follow each other: the measured one if there is one, else that of the
    latency."""
    try:
        return costs.model.throughput_rps(batch_size, share_pct)
    except MissingProfileError:
        return 1000.0 * batch_size / costs.latency_ms[share_pct][batch_size]


def _largest_share(costs: ShareCosts, room_pct: float) -> float | None:
    return max((share for share in costs.latency_ms if share <= room_pct + ROUNDING), default=None)
