"""First-fit decreasing on the needed share: the plain baseline every other policy must beat."""

from __future__ import annotations

from dataclasses import dataclass, field

from tenuto.errors import InvalidInputError, Problem
from tenuto.placement.cluster import Cluster, Gpu
from tenuto.placement.plan import Gpulet, Plan, PolicyUsed, Replica
from tenuto.placement.policies.ffd.costs import Batch, ModelCost
from tenuto.placement.policies.shared.gpu_pool import GpuPool, gpulet_id, planned_gpus
from tenuto.placement.policy import Policy
from tenuto.placement.workload import ModelSpec, Workload, profile_of
from tenuto.profiles import Profiles

__all__ = ["FirstFitDecreasing"]


@dataclass
class _Placed:
    """A replica on a GPU. `share_pct` None: it takes turns with the other replicas of its gpu-let."""

    cost: ModelCost
    rate_rps: float
    share_pct: float | None
    batch: Batch


@dataclass
class _OpenGpu:
    gpu: Gpu
    placed: list[_Placed] = field(default_factory=list)

    @property
    def free_share_pct(self) -> float:
        return 100.0 - sum(p.share_pct or 100.0 for p in self.placed)

    @property
    def free_memory_mib(self) -> float:
        return self.gpu.memory_mib - sum(p.batch.memory_mib for p in self.placed)


class FirstFitDecreasing(Policy):
    """Gives each model the smallest share that carries its rate, largest need first, on the first GPU with room.

    A batch size is eligible when l(b) <= SLO/2, so that one batch can form while another runs, and when it fills in
    time: (b-1)/rate + l(b) <= SLO. Interference between neighbours is not considered. What "share" means follows from
    what was measured, because the latency on a part of a GPU cannot be derived from the latency on the whole one:

    - *Space*: a profile with measurements below 100 % gives the smallest measured share on which some batch carries
      the rate, with the smallest such batch; one gpu-let per model, shares of a GPU sum to at most 100 %.
    - *Time*: a profile (or inline latency) of the whole GPU only gives the busy fraction rate*l(b)/b. The models of a
      GPU live in one unrestricted gpu-let and take turns. Batches start at the smallest and grow, the one that frees
      most time first, only until the busy fractions fit. A batch may have to wait for one running batch of another
      model, hence l_i(b_i) + max over others of l_j(b_j) <= SLO_i (non-preemptive earliest deadline first; Jeffay et
      al., RTSS 1991).

    A model that needs more than one GPU is split into whole-GPU replicas and a rest; what finds no room is named in
    the notes.

    Options:
        fill_pct: part of a replica's throughput that is planned for; the rest is head-room for random arrivals.
        sharing: `auto` as above; `time` ignores measured shares; `space` assumes l(b)/(s/100) on a share of s % where
            only the whole GPU was measured (the upper bound of compute-bound work), and says so in the plan's notes.
        max_batch: largest batch considered.
    """

    name = "ffd"
    summary = "first-fit decreasing on the needed share; smallest batch that carries the rate within SLO/2"
    source = "textbook bin packing; batch rule as in Nexus (SOSP 2019, section 4)"

    def __init__(self, *, fill_pct: float = 80.0, sharing: str = "auto", max_batch: int = 128) -> None:
        problems = []
        if not 0 < fill_pct <= 100:
            problems.append(Problem("--option fill_pct", fill_pct, "must be above 0 and at most 100", "Try 80."))
        if sharing not in ("auto", "time", "space"):
            problems.append(Problem("--option sharing", sharing, "unknown", "Use auto, time or space."))
        if max_batch < 1:
            problems.append(Problem("--option max_batch", max_batch, "must be at least 1", "Try 128."))
        if problems:
            raise InvalidInputError(problems)
        self.fill_pct, self.sharing, self.max_batch = fill_pct, sharing, max_batch

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
        self.costs = {spec.name: self._costs(spec, profiles) for spec in workload.models}

    def _costs(self, spec: ModelSpec, profiles: Profiles) -> dict[str, ModelCost]:
        sharing = "time" if self.policy.sharing == "auto" and self.workload.mps == "off" else self.policy.sharing
        costs = {}
        for gpu_type in self.cluster.gpu_types:
            try:
                model = profile_of(spec, gpu_type, profiles)
            except InvalidInputError:
                continue  # another type has it, or `solve` has already refused the workload
            costs[gpu_type] = ModelCost(spec, model, self.fill, sharing, self.policy.max_batch)
        return costs

    def plan(self) -> Plan:
        unserved: dict[str, str] = {}
        notes: list[str] = []
        for spec in sorted(self.workload.models, key=self._need, reverse=True):
            carried, reason = self._place(spec)
            if carried == 0:
                unserved[spec.name] = reason
            elif reason:
                notes.append(f"{spec.name}: {carried:.4g} of {spec.rate_rps:g} rps carried; {reason}")
        if any(p.cost.assumes_proportional for gpu in self.open for p in gpu.placed):
            notes.append("latency on a share s % assumed as l(b)/(s/100) where only the whole GPU was measured")
        names = [spec.name for spec in self.workload.models]
        return Plan(
            policy=PolicyUsed(name=self.policy.name),
            gpus=planned_gpus(self.cluster, (gpu.gpu for gpu in self.open)),
            gpulets=tuple(gpulet for gpu in self._in_cluster_order() for gpulet in _gpulets(gpu)),
            unserved=tuple(name for name in names if name in unserved),
            unserved_reasons={name: unserved[name] for name in names if name in unserved},
            notes=tuple(notes),
        )

    def _in_cluster_order(self) -> list[_OpenGpu]:
        order = {gpu.id: index for index, gpu in enumerate(self.cluster.gpus)}
        return sorted(self.open, key=lambda gpu: order.get(gpu.gpu.id, len(order)))

    def _need(self, spec: ModelSpec) -> float:
        """Return the GPUs a model needs on the first type that can serve it; above 1 where it must be split."""
        needs = [cost.need(spec.rate_rps) for cost in self.costs[spec.name].values() if cost.best_rps > 0]
        return needs[0] if needs else 0.0

    def _place(self, spec: ModelSpec) -> tuple[float, str]:
        """Place one model; return the rate carried and why not all of it."""
        costs = {kind: cost for kind, cost in self.costs[spec.name].items() if cost.best_rps > 0}
        if not costs:
            reasons = [f"{kind}: {cost.why_not}" for kind, cost in self.costs[spec.name].items()]
            return 0.0, "; ".join(reasons)
        left = spec.rate_rps
        while left > 1e-9:
            piece = self._first_fit(costs, left) or self._whole_gpu(costs, left)
            if piece is None:
                return spec.rate_rps - left, self._no_room(costs, left)
            left -= piece
        return spec.rate_rps, ""

    def _first_fit(self, costs: dict[str, ModelCost], rate_rps: float) -> float | None:
        """Place all of `rate_rps` on the first GPU that can take it: open ones in order, then a new one."""
        for gpu in self.open:
            cost = costs.get(gpu.gpu.type)
            if cost and rate_rps <= cost.best_rps * (1 + 1e-9) and self._fits(gpu, cost, rate_rps):
                return rate_rps
        able = {kind: cost for kind, cost in costs.items() if rate_rps <= cost.best_rps * (1 + 1e-9)}
        return self._on_new_gpu(able, rate_rps)

    def _whole_gpu(self, costs: dict[str, ModelCost], rate_rps: float) -> float | None:
        """Place one GPU's worth of a model that needs more than one; returns the rate carried there."""
        kinds = [kind for kind in costs if rate_rps > costs[kind].best_rps]
        for kind in self._by_price({kind: costs[kind] for kind in kinds}):
            rate = costs[kind].best_rps
            if self._on_new_gpu({kind: costs[kind]}, rate):
                return rate
        return None

    def _by_price(self, costs: dict[str, ModelCost]) -> list[str]:
        """Order types by the price of carrying one request per second when GPUs are bought, else as in the file."""
        prices = {kind: gpu.price_per_hour for kind, gpu in self.pool.types.items()}
        if not self.cluster.elastic or any(prices[kind] is None for kind in costs):
            return list(costs)
        return sorted(costs, key=lambda kind: (prices[kind] or 0.0) / costs[kind].best_rps)

    def _on_new_gpu(self, costs: dict[str, ModelCost], rate_rps: float) -> float | None:
        for kind in self._by_price(costs):
            memory = self.pool.types[kind].memory_mib
            if not self.pool.has(kind) or costs[kind].smallest_memory_mib > memory:
                continue
            trial = _OpenGpu(self.pool.types[kind])
            if not self._fits(trial, costs[kind], rate_rps):
                continue
            gpu = self.pool.take(kind)
            if gpu is not None:
                self.open.append(_OpenGpu(gpu, trial.placed))
                return rate_rps
        return None

    def _fits(self, gpu: _OpenGpu, cost: ModelCost, rate_rps: float) -> bool:
        """Add a replica to a GPU if everything on it still holds its limits."""
        if cost.in_space:
            if any(p.share_pct is None for p in gpu.placed):
                return False
            choice = cost.smallest_share(rate_rps, gpu.free_share_pct, gpu.free_memory_mib)
            if choice is not None:
                gpu.placed.append(_Placed(cost, rate_rps, *choice))
            return choice is not None
        if any(p.share_pct is not None or p.cost is cost for p in gpu.placed):
            return False
        trial = [_Placed(p.cost, p.rate_rps, None, p.cost.frontier[0]) for p in gpu.placed]
        trial.append(_Placed(cost, rate_rps, None, cost.frontier[0]))
        if not _take_turns(trial, self.fill, gpu.gpu.memory_mib):
            return False
        gpu.placed = trial
        return True

    def _no_room(self, costs: dict[str, ModelCost], rate_rps: float) -> str:
        kind, cost = next(iter(costs.items()))
        memory = max((gpu.free_memory_mib for gpu in self.open if gpu.gpu.type in costs), default=0.0)
        need = min(cost.need(rate_rps), 1.0) * 100
        text = f"{rate_rps:.4g} rps need {need:.0f} % of a {kind}, and no GPU has that much left within all SLOs"
        if cost.smallest_memory_mib <= memory:
            return text
        return f"{text} (memory: {cost.smallest_memory_mib:.0f} MiB needed, {memory:.0f} MiB free)"


def _take_turns(placed: list[_Placed], fill: float, memory_mib: float) -> bool:
    """Raise batch sizes until the busy fractions of one gpu-let fit into `fill`; False when they cannot."""

    def holds() -> bool:
        if sum(p.batch.memory_mib for p in placed) > memory_mib + 1e-6:
            return False
        for one in placed:
            others = max((p.batch.latency_ms for p in placed if p is not one), default=0.0)
            if not one.cost.in_time(one.batch, others):
                return False
        return True

    if not holds():
        return False
    while sum(p.cost.busy(p.batch, p.rate_rps) for p in placed) > fill * (1 + 1e-9):
        gains = []
        for index, one in enumerate(placed):
            now, larger = one.batch, one.cost.after(one.batch)
            if larger is None:
                continue
            one.batch = larger
            if holds():
                gains.append((one.cost.busy(now, one.rate_rps) - one.cost.busy(larger, one.rate_rps), -index, larger))
            one.batch = now
        if not gains:
            return False
        _, index, larger = max(gains, key=lambda gain: gain[:2])
        placed[-index].batch = larger
    return True


def _gpulets(gpu: _OpenGpu) -> list[Gpulet]:
    replicas = [
        Replica(name=p.cost.spec.name, batch_size=p.batch.size, rate_rps=round(p.rate_rps, 6),
                memory_mib=p.batch.memory_mib or None,
                latency=p.cost.assumed_latency(p.share_pct))
        for p in gpu.placed
    ]
    if gpu.placed[0].share_pct is None:
        return [Gpulet(id=gpulet_id(gpu.gpu.id, 0), gpu=gpu.gpu.id, models=tuple(replicas))]
    return [
        Gpulet(id=gpulet_id(gpu.gpu.id, index), gpu=gpu.gpu.id, share_pct=p.share_pct, models=(replica,))
        for index, (p, replica) in enumerate(zip(gpu.placed, replicas, strict=True))
    ]
