"""SBP: Nexus's squishy bin packing. Models share GPUs in time only, on whole GPUs or on even halves.

Source: Shen et al., "Nexus: A GPU Cluster Engine for Accelerating DNN-Based Video Analysis", SOSP 2019, section 6.1;
on even halves as the second baseline of Choi et al., "Serving Heterogeneous Machine Learning Models on Multi-GPU
Servers with Spatio-Temporal Sharing" (gpulet).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tenuto.options import option
from tenuto.placement.cluster import Cluster, Gpu
from tenuto.placement.plan import Plan
from tenuto.placement.policies.gpulet.share_costs import ShareCosts, Turn, share_costs
from tenuto.placement.policies.shared.gpu_pool import GpuPool
from tenuto.placement.policies.shared.hosting import CARRIED, Hosted, hosting_plan
from tenuto.placement.policy import Policy
from tenuto.placement.program import held_mib
from tenuto.placement.workload import Workload
from tenuto.profiles import Profiles
from tenuto.profiles.share_latency import WHOLE_GPU_PCT
from tenuto_lab.squishy import Bin, Demand, Part, pack


@dataclass(kw_only=True, eq=False)
class SquishyBinPacking(Policy):
    """Packs models into duty cycles: whole GPUs at full batches first, remainders merged best fit decreasing.

    The rule for every replica is duty cycle + l(b) <= SLO: a request waits at most one cycle for its turn. A batch is
    full at 2 l(b) <= SLO. On a fixed cluster, bins get GPUs in the order in which they were made, full ones first,
    until there are no more GPUs. The next GPU type takes the rates that are left. An elastic cluster begins with the
    type on which the workload is cheapest; when a price is unknown, with the type that needs the fewest GPUs.

    Options:
        halves: bins are halves of a GPU (share 50 %, half of the memory) instead of whole ones.
        max_batch: largest batch considered.
    """

    name = "sbp"
    summary = "squishy bin packing: models take turns in duty cycles on whole GPUs (or even halves)"
    source = "Nexus (SOSP 2019), section 6.1; baseline of gpulet (Choi et al.)"
    readings = "what has no room is cut off in order of the bins; ours: memory, several GPU types"

    halves: bool = False
    max_batch: int = option(128, minimum=1)

    def place(self, workload: Workload, cluster: Cluster, profiles: Profiles) -> Plan:
        """Return the plan; deterministic, ties broken by the order of the workload."""
        pool = GpuPool(cluster)
        share = WHOLE_GPU_PCT / 2 if self.halves else WHOLE_GPU_PCT
        by_model, reasons = share_costs(workload, cluster, profiles, (share,), self.max_batch)
        costs = {kind: {name: views[kind] for name, views in by_model.items() if kind in views} for kind in pool.types}
        left = {spec.name: spec.rate_rps for spec in workload.models}
        hosted: list[Hosted] = []
        for kind in self._order(pool, costs, left, share):
            hosted += self._fill(pool, kind, costs[kind], left, share)
        return hosting_plan(self.name, workload, cluster, hosted, reasons)

    def _order(
        self, pool: GpuPool, costs: dict[str, dict[str, ShareCosts]], rates: dict[str, float], share: float
    ) -> list[str]:
        """Return the GPU types in the order in which they are filled."""
        if not pool.elastic or len(costs) < 2:
            return list(costs)
        bins = {kind: len(self._bins(costs[kind], rates, share, None)) for kind in costs}
        return sorted(costs, key=lambda kind: (-len(costs[kind]), bins[kind] * pool.prices[kind]))

    def _bins(self, costs: dict[str, ShareCosts], rates: dict[str, float], share: float, most: int | None) -> list[Bin]:
        names = list(costs)
        demands = [
            Demand(index, rates[name], costs[name].slo_ms, costs[name].latency_ms[share])
            for index, name in enumerate(names)
            if rates[name] > 0
        ]

        def fits(parts: Sequence[Part]) -> bool:
            needs = (costs[names[part.model]].on.needs_mib(part.batch) for part in parts)
            return held_mib(needs) <= costs[names[parts[0].model]].room_mib(share)

        return pack(demands, fits=fits, most=most)

    def _fill(
        self, pool: GpuPool, kind: str, costs: dict[str, ShareCosts], left: dict[str, float], share: float
    ) -> list[Hosted]:
        """Give the bins of one GPU type their GPUs, and subtract what they carry from the rates that are left."""
        names = list(costs)
        hosted: list[Hosted] = []
        gpu: Gpu | None = None
        per_gpu = round(WHOLE_GPU_PCT / share)
        most = None if pool.elastic else per_gpu * int(pool.left(kind))
        asked = dict(left)
        for index, node in enumerate(self._bins(costs, left, share, most)):
            if index % per_gpu == 0:
                gpu = pool.next_gpu(kind)
            if gpu is None:
                break
            turns = [Turn(costs[names[part.model]], part.batch, part.rate_rps) for part in node.parts]
            replicas = [turn.replica(share) for turn in turns]
            hosted.append(Hosted(gpu, share if self.halves else None, replicas, round(node.duty_ms, 6)))
            for turn in turns:
                left[turn.costs.spec.name] -= turn.rate_rps
        for name, rate in left.items():
            left[name] = rate if rate >= CARRIED * asked[name] else 0.0
        return hosted
