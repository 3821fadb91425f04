"""First-fit decreasing on the needed share: the plain baseline that every other policy must beat."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from tenuto.options import option
from tenuto.placement.cluster import Cluster, Gpu
from tenuto.placement.costs import context_mib_of, costs_of
from tenuto.placement.plan import Plan
from tenuto.placement.policies.shared.gpu_pool import GpuPool
from tenuto.placement.policies.shared.hosting import Hosted, hosting_plan
from tenuto.placement.policy import Policy
from tenuto.placement.program import Replica
from tenuto.placement.workload import ModelSpec, Workload
from tenuto.profiles import Profiles
from tenuto_lab.baselines.filled_batches import FfdCost, FilledBatch


@dataclass(slots=True)
class _Placed:
    """A replica on a GPU. `share_pct` None: it takes turns with the other replicas of its gpu-let."""

    cost: FfdCost
    rate_rps: float
    share_pct: float | None
    batch: FilledBatch


@dataclass(slots=True)
class _OpenGpu:
    """A GPU in use. `least_busy` is the part of the time that its turns take when each model has its best batch."""

    gpu: Gpu
    placed: list[_Placed] = field(default_factory=list)
    least_busy: float = 0.0

    @property
    def takes_turns(self) -> bool:
        return bool(self.placed) and self.placed[0].share_pct is None

    @property
    def free_share_pct(self) -> float:
        return 100.0 - sum(p.share_pct or 100.0 for p in self.placed)

    @property
    def free_memory_mib(self) -> float:
        """The memory that replicas and the contexts of their processes leave."""
        processes = 1 if self.takes_turns else len(self.placed)
        context_mib = self.placed[0].cost.context_mib if self.placed else 0.0
        held = sum(p.batch.memory_mib for p in self.placed)
        if self.takes_turns:
            held = sum(p.batch.static_mib for p in self.placed) + max(p.batch.working_mib for p in self.placed)
        return self.gpu.memory_mib - held - processes * context_mib


@dataclass(kw_only=True, eq=False)
class FirstFitDecreasing(Policy):
    """Gives each model the smallest share that carries its rate, largest need first, on the first GPU with room.

    A batch size is eligible under two conditions: l(b) <= SLO/2, so that one batch can form while another runs; and it
    fills in time, (b-1)/rate + l(b) <= SLO. Interference between neighbours is not considered. The latency on a part of
    a GPU cannot be derived from the latency on the whole GPU. So the profile decides what a share is:

    - *Space*, for a profile with measurements below 100 %: the smallest measured share on which some batch carries the
      rate, with the smallest such batch. Each model has a gpu-let; shares of a GPU sum to at most 100 %.
    - *Time*, for a profile (or inline latency) of the whole GPU only: the busy fraction rate*l(b)/b. The models of a
      GPU live in one unrestricted gpu-let and take turns. Batches start at the smallest and grow until the busy
      fractions fit; the batch that frees most time grows first. A batch may have to wait for one running batch of
      another model, so l_i(b_i) + max over others of l_j(b_j) <= SLO_i (non-preemptive earliest deadline first; Jeffay
      et al., RTSS 1991).

    A model that needs more than one GPU is split into whole-GPU replicas and a rest. The notes name models without
    room.

    Options:
        fill_pct: part of a replica's throughput that is planned for; the rest is head-room for random arrivals.
        sharing: `auto` as above; `time` ignores measured shares; `space` assumes l(b)/(s/100) on a share of s % when
            only the whole GPU was measured (the upper bound of compute-bound work), and says so in the plan's notes.
        max_batch: largest batch considered.
    """

    name = "ffd"
    summary = "first-fit decreasing on the needed share; smallest batch that carries the rate within SLO/2"
    source = "textbook bin packing; batch rule as in Nexus (SOSP 2019, section 4)"
    readings = (
        "ours, of no paper: models take turns where only whole GPUs were measured; a fifth of a replica is left "
        "for bursts"
    )

    fill_pct: float = option(80.0, above=0, maximum=100)
    sharing: str = option("auto", choices=("auto", "time", "space"))
    max_batch: int = option(128, minimum=1)

    def place(self, workload: Workload, cluster: Cluster, profiles: Profiles) -> Plan:
        """Return the plan; deterministic, ties broken by the order of the workload."""
        return _Packing(self, workload, cluster, profiles).plan()


class _Packing:
    """One run of the policy: the open GPUs and what could not be placed."""

    def __init__(self, policy: FirstFitDecreasing, workload: Workload, cluster: Cluster, profiles: Profiles) -> None:
        self.policy, self.workload, self.cluster = policy, workload, cluster
        self.fill = policy.fill_pct / 100.0
        self.pool = GpuPool(cluster)
        self.open: list[_OpenGpu] = []
        sharing = "time" if policy.sharing == "auto" and workload.mps == "off" else policy.sharing
        contexts = {kind: context_mib_of(kind, profiles) for kind in cluster.gpu_types}
        self.costs = {
            name: {
                kind: FfdCost(on, self.fill, sharing, policy.max_batch, contexts[kind]) for kind, on in by_type.items()
            }
            for name, by_type in costs_of(workload, cluster, profiles).items()
        }

    def plan(self) -> Plan:
        reasons: dict[str, str] = {}
        for spec in sorted(self.workload.models, key=self._need, reverse=True):
            reason = self._place(spec)
            if reason:
                reasons[spec.name] = reason
        notes = []
        if any(p.cost.assumes_proportional for gpu in self.open for p in gpu.placed):
            notes.append("planned with l(b)/(s/100) on a share of s % where only the whole GPU was measured")
        hosted = [each for gpu in self.open for each in _hosted(gpu)]
        return hosting_plan(self.policy.name, self.workload, self.cluster, hosted, reasons, notes)

    def _need(self, spec: ModelSpec) -> float:
        """Return the GPUs that a model needs on the first type that can serve it; above 1 when it must be split."""
        needs = [cost.need(spec.rate_rps) for cost in self.costs[spec.name].values() if cost.best_rps > 0]
        return needs[0] if needs else 0.0

    def _place(self, spec: ModelSpec) -> str:
        """Place one model; return why not all of its rate is carried, if so."""
        costs = {kind: cost for kind, cost in self.costs[spec.name].items() if cost.best_rps > 0}
        if not costs:
            return next((cost.why_not for cost in self.costs[spec.name].values()), "no GPU type has a profile of it")
        left = spec.rate_rps
        while left > 1e-9:
            piece = self._first_fit(costs, left) or self._whole_gpu(costs, left)
            if piece is None:
                return self._no_room(costs, left)
            left -= piece
        return ""

    def _first_fit(self, costs: dict[str, FfdCost], rate_rps: float) -> float | None:
        """Place all of `rate_rps` on the first GPU that can take it: open ones in order, then a new one."""
        able = {kind: cost for kind, cost in costs.items() if rate_rps <= cost.best_rps * (1 + 1e-9)}
        if not able:
            return None
        for gpu in self.open:
            cost = able.get(gpu.gpu.type)
            if cost is not None and self._fits(gpu, cost, rate_rps):
                return rate_rps
        return self._on_new_gpu(able, rate_rps)

    def _whole_gpu(self, costs: dict[str, FfdCost], rate_rps: float) -> float | None:
        """Place one GPU's worth of a model that needs more than one; returns the rate carried there."""
        for kind in self._by_price({kind: cost for kind, cost in costs.items() if rate_rps > cost.best_rps}):
            rate = costs[kind].best_rps
            if self._on_new_gpu({kind: costs[kind]}, rate):
                return rate
        return None

    def _by_price(self, costs: dict[str, FfdCost]) -> list[str]:
        """Order types by the price of carrying one request per second when GPUs are bought, else as in the file."""
        if not self.cluster.elastic:
            return list(costs)
        return sorted(costs, key=lambda kind: self.pool.prices[kind] / costs[kind].best_rps)

    def _on_new_gpu(self, costs: dict[str, FfdCost], rate_rps: float) -> float | None:
        for kind in self._by_price(costs):
            trial = _OpenGpu(self.pool.types[kind])
            if not self.pool.left(kind) or not self._fits(trial, costs[kind], rate_rps):
                continue
            gpu = self.pool.next_gpu(kind)
            if gpu is not None:
                trial.gpu = gpu
                self.open.append(trial)
                return rate_rps
        return None

    def _fits(self, gpu: _OpenGpu, cost: FfdCost, rate_rps: float) -> bool:
        """Add a replica to a GPU if everything on it still holds its limits."""
        if cost.in_space:
            if gpu.takes_turns:
                return False
            choice = cost.smallest_share(rate_rps, gpu.free_share_pct, gpu.free_memory_mib - cost.context_mib)
            if choice is not None:
                gpu.placed.append(_Placed(cost, rate_rps, *choice))
            return choice is not None
        busy = gpu.least_busy + cost.least_busy_s * rate_rps
        if busy > self.fill * (1 + 1e-9) or (gpu.placed and not gpu.takes_turns):
            return False
        if any(p.cost is cost for p in gpu.placed):
            return False
        trial = [_Placed(p.cost, p.rate_rps, None, p.cost.frontier[0]) for p in gpu.placed]
        trial.append(_Placed(cost, rate_rps, None, cost.frontier[0]))
        if not _take_turns(trial, self.fill, gpu.gpu.memory_mib - cost.context_mib):
            return False
        gpu.placed, gpu.least_busy = trial, busy
        return True

    def _no_room(self, costs: dict[str, FfdCost], rate_rps: float) -> str:
        kind, cost = next(iter(costs.items()))
        memory = max((gpu.free_memory_mib for gpu in self.open if gpu.gpu.type in costs), default=None)
        if memory is not None and cost.smallest_memory_mib > memory:
            return f"no memory left: it needs {cost.smallest_memory_mib:.0f} MiB, at most {memory:.0f} MiB are free"
        if cost.smallest_memory_mib + cost.context_mib > cost.on.gpu.memory_mib:
            return f"memory: it needs {cost.smallest_memory_mib:.0f} MiB beside its process's context"
        need = min(cost.need(rate_rps), 1.0) * 100
        return f"no GPU time left: {rate_rps:.4g} rps need {need:.0f} % of a {kind} within all SLOs"


def _take_turns(placed: list[_Placed], fill: float, memory_mib: float) -> bool:
    """Raise batch sizes until the busy fractions of one gpu-let fit into `fill`; False when they cannot.

    A batch may have to wait for one running batch of another model. So l_i + max over others of l_j must be within its
    SLO: a larger batch must fit beside the longest of the others, and within the wait that every other can bear.
    Memory that only a running batch needs counts once: the most that any batch needs.
    """
    static = sum(p.batch.static_mib for p in placed)
    if static + max(p.batch.working_mib for p in placed) > memory_mib + 1e-6:
        return False
    at = [0] * len(placed)
    busy = sum(p.batch.busy_s * p.rate_rps for p in placed)
    first = True
    while first or busy > fill * (1 + 1e-9):
        longest = sorted(((p.batch.latency_ms, i) for i, p in enumerate(placed)), reverse=True)[:2]
        bearable = sorted((p.cost.spec.slo_ms * (1 + 1e-9) - p.batch.latency_ms, i) for i, p in enumerate(placed))[:2]
        if first:
            if not all(p.cost.in_time(p.batch, _beside(longest, i, 0.0)) for i, p in enumerate(placed)):
                return False
            first = False
            continue
        working = sorted(((p.batch.working_mib, i) for i, p in enumerate(placed)), reverse=True)[:2]
        best: tuple[float, int] | None = None
        for index, one in enumerate(placed):
            frontier, now = one.cost.frontier, one.batch
            if at[index] + 1 >= len(frontier):
                continue
            larger = frontier[at[index] + 1]
            gain = (now.busy_s - larger.busy_s) * one.rate_rps
            if (
                (best is None or gain > best[0])
                and static - now.static_mib + larger.static_mib + max(larger.working_mib, _beside(working, index, 0.0))
                <= memory_mib + 1e-6
                and larger.latency_ms <= _beside(bearable, index, math.inf)
                and one.cost.in_time(larger, _beside(longest, index, 0.0))
            ):
                best = (gain, index)
        if best is None:
            return False
        gain, index = best
        at[index] += 1
        one = placed[index]
        static += one.cost.frontier[at[index]].static_mib - one.batch.static_mib
        one.batch = one.cost.frontier[at[index]]
        busy -= gain
    return True


def _beside(ranked: list[tuple[float, int]], index: int, alone: float) -> float:
    """Return the first value that belongs to another index."""
    return next((value for value, owner in ranked if owner != index), alone)


def _hosted(gpu: _OpenGpu) -> list[Hosted]:
    replicas = []
    for p in gpu.placed:
        assumed = p.cost.assumed_latency(p.share_pct)
        latency_ms = p.batch.latency_ms if assumed is None else assumed.at(p.batch.size)
        replicas.append(
            Replica(
                name=p.cost.spec.name,
                batch_size=p.batch.size,
                rate_rps=round(p.rate_rps, 6),
                latency_ms=round(latency_ms, 6),
            )
        )
    if gpu.takes_turns:
        return [Hosted(gpu.gpu, None, replicas)]
    return [Hosted(gpu.gpu, p.share_pct, [replica]) for p, replica in zip(gpu.placed, replicas, strict=True)]
