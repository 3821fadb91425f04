"""The other baselines of gpulet's evaluation: guided self-tuning, and CUDA MPS without shares."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from tenuto.options import option
from tenuto.placement.cluster import Cluster, Gpu
from tenuto.placement.plan import Plan
from tenuto.placement.policies.gpulet.gpulet import GpuletPolicy
from tenuto.placement.policies.gpulet.share_costs import ShareCosts, Turn, share_costs
from tenuto.placement.policies.shared.gpu_pool import GpuPool
from tenuto.placement.policies.shared.hosting import Hosted, hosting_plan
from tenuto.placement.policy import Abilities, Policy
from tenuto.placement.workload import Workload
from tenuto.profiles import Profiles
from tenuto.profiles.share_latency import WHOLE_GPU_PCT
from tenuto_lab.baselines.ideal import Ideal


@dataclass(kw_only=True, eq=False)
class SelfTuning(Policy):
    """The best result of GSLICE's self-tuning: the best partition in space, with no turns in time.

    gpulet's authors start the tuning from the best partition, so that its search online costs nothing. Here the
    exhaustive search of `ideal` with one model per gpu-let finds the partition. Beyond `max_gpus` that takes too long;
    then it is gpulet's own elastic partitioning without turns, and the notes say so.

    Options:
        shares: the sizes in percent below 100 that a gpu-let may have.
        max_batch: largest batch considered.
        max_gpus: clusters up to this size are searched exhaustively.
        max_steps: steps per search.
    """

    name = "self-tuning"
    summary = "guided self-tuning: the best partition of the GPUs with one model per gpu-let, no turns in time"
    source = "Choi et al., gpulet (USENIX ATC 2022), section 6: the baseline after GSLICE (SoCC 2020)"
    readings = "guided by exhaustive search up to max_gpus GPUs, beyond by gpulet's partitioning without turns"
    abilities = Abilities(is_interruptible=True)

    shares: tuple[float, ...] = option((20.0, 40.0, 50.0, 60.0, 80.0), above=0, below=WHOLE_GPU_PCT)
    max_batch: int = option(32, minimum=1)
    max_gpus: int = option(8, minimum=1)
    max_steps: int = option(50_000, minimum=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._ideal = Ideal(**asdict(self), turns=False)
        self._elastic = GpuletPolicy(shares=self.shares, max_batch=self.max_batch, turns=False)

    def place(self, workload: Workload, cluster: Cluster, profiles: Profiles) -> Plan:
        """Return the plan; deterministic."""
        self._ideal.watch = self._elastic.watch = self.watch
        if len(cluster.gpus) <= self.max_gpus:
            return self._ideal.place(workload, cluster, profiles)
        plan = self._elastic.place(workload, cluster, profiles)
        note = f"not the best partition: {len(cluster.gpus)} GPUs are too many for an exhaustive search"
        return plan.model_copy(update={"notes": (*plan.notes, note)})


@dataclass(kw_only=True, eq=False)
class MpsDefault(Policy):
    """Processes without shares: models are spread over the GPUs by load, and the processes on a GPU compete for it.

    The paper does not say which model goes where. Here models come by falling load (rate over the throughput of the
    largest batch within half the SLO). A model that needs more than a GPU gets as many replicas as its load, each with
    an equal part. Every replica goes to the least loaded GPU that has memory for it. What neighbours cost is not
    considered. When no GPU of an elastic cluster has room, it gets another one, of the cheapest type for the load.

    Options:
        max_batch: largest batch considered; 32 in the paper.
    """

    name = "mps-default"
    summary = "CUDA MPS as it comes: models spread by load, processes without shares compete for their GPU"
    source = "Choi et al., gpulet (USENIX ATC 2022), section 6: the baseline MPS (default)"
    readings = "where models go is left open: by falling load to the least loaded GPU"

    max_batch: int = option(32, minimum=1)

    def place(self, workload: Workload, cluster: Cluster, profiles: Profiles) -> Plan:
        """Return the plan; deterministic, ties broken by the order of the workload and of the cluster."""
        costs, reasons = share_costs(workload, cluster, profiles, (WHOLE_GPU_PCT,), self.max_batch)
        loads = {
            name: min(workload[name].rate_rps / own.capacity_rps(WHOLE_GPU_PCT) for own in by_kind.values())
            for name, by_kind in costs.items()
            if by_kind
        }
        spread = _Spread(GpuPool(cluster))
        for name in sorted(loads, key=lambda name: -loads[name]):
            replicas = max(1, math.ceil(loads[name] - 1e-9))
            rate_rps = workload[name].rate_rps / replicas
            if not all(spread.put(costs[name], rate_rps) for _ in range(replicas)):
                reasons[name] = "no GPU without it has memory left for one more replica"
        hosted = spread.hosted()
        crowded = len({each.gpu.id for each in hosted}) < len(hosted)
        return hosting_plan(self.name, workload, cluster, hosted, reasons, overcommits=crowded)


@dataclass
class _Loaded:
    """A GPU with the processes on it; `load` is the part of its time that they need."""

    gpu: Gpu
    order: int
    turns: list[Turn] = field(default_factory=list)
    load: float = 0.0
    held_mib: float = 0.0

    def batch(self, costs: ShareCosts) -> int:
        """Return the largest batch that fits beside the present processes; 0 if the model is there already, or if none
        fits."""
        if any(turn.costs.spec.name == costs.spec.name for turn in self.turns):
            return 0
        room = costs.room_mib(WHOLE_GPU_PCT) - self.held_mib
        return costs.on.batches_in_memory(room, len(costs.latency_ms[WHOLE_GPU_PCT]) - 1) if room > 0.0 else 0


class _Spread:
    """The GPUs while replicas are put on the least loaded one."""

    def __init__(self, pool: GpuPool) -> None:
        self._pool = pool
        self._gpus: list[_Loaded] = []
        if not pool.elastic:
            for kind in pool.types:
                while (gpu := pool.next_gpu(kind)) is not None:
                    self._gpus.append(_Loaded(gpu, len(self._gpus)))

    def put(self, costs: Mapping[str, ShareCosts], rate_rps: float) -> bool:
        """Put a replica with its part of the rate on a GPU; return whether one had room for it."""
        loads = {kind: rate_rps / own.capacity_rps(WHOLE_GPU_PCT) for kind, own in costs.items()}
        places = ((one.load + loads[one.gpu.type], one.order) for one in self._gpus if one.gpu.type in costs)
        best = next(
            (
                self._gpus[order]
                for _, order in sorted(places)
                if self._gpus[order].batch(costs[self._gpus[order].gpu.type])
            ),
            None,
        )
        if self._pool.elastic and (best is None or best.load + loads[best.gpu.type] > 1.0 + 1e-9):
            kind = min(costs, key=lambda kind: self._pool.prices[kind] * loads[kind])
            gpu = self._pool.next_gpu(kind)
            if gpu is not None:
                best = _Loaded(gpu, len(self._gpus))
                self._gpus.append(best)
        if best is None:
            return False
        own = costs[best.gpu.type]
        size = best.batch(own)
        best.turns.append(Turn(own, size, rate_rps))
        best.load += loads[best.gpu.type]
        best.held_mib += own.memory_mib(size) + own.context_mib
        return True

    def hosted(self) -> list[Hosted]:
        """Return the processes, each a gpu-let without a share."""
        return [Hosted(one.gpu, None, [turn.replica(WHOLE_GPU_PCT)]) for one in self._gpus for turn in one.turns]
