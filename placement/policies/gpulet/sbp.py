"""SBP: Nexus's squishy bin packing, where models share GPUs in time only; on whole GPUs or on even halves.

Source: Shen et al., "Nexus: A GPU Cluster Engine for Accelerating DNN-Based Video Analysis", SOSP 2019, section 6.1;
on even halves as the second baseline of Choi et al., "Serving Heterogeneous Machine Learning Models on Multi-GPU
Servers with Spatio-Temporal Sharing" (gpulet).
"""

from __future__ import annotations

from collections.abc import Sequence

from tenuto.errors import InvalidInputError, Problem
from tenuto.placement.cluster import Cluster, Gpu
from tenuto.placement.plan import Plan
from tenuto.placement.policies.gpulet.share_costs import CANNOT_RUN, WHOLE_GPU, ShareCosts, share_costs
from tenuto.placement.policies.gpulet.turns_plan import CARRIED, Turn, TurnsGpulet, turns_plan
from tenuto.placement.policies.shared.gpu_pool import GpuPool
from tenuto.placement.policies.shared.squishy import Bin, Demand, Part, pack
from tenuto.placement.policy import Policy
from tenuto.placement.workload import Workload
from tenuto.profiles import Profiles

__all__ = ["SquishyBinPacking"]


class SquishyBinPacking(Policy):
    """Packs models into duty cycles: whole GPUs at full batches first, remainders merged best fit decreasing.

    The rule for every replica is duty cycle + l(b) <= SLO: a request waits at most one cycle for its turn. A batch is
    full at 2 l(b) <= SLO. On a fixed cluster the bins are kept in the order in which they arise, full ones first, as
    far as there are GPUs; further GPU types continue with what is left. An elastic cluster begins with the type on
    which the workload is cheapest (where a price is unknown, with the one that needs the fewest GPUs).

    Options:
        halves: bins are halves of a GPU (share 50 %, half of the memory) instead of whole ones.
        max_batch: largest batch considered.
    """

    name = "sbp"
    summary = "squishy bin packing: models take turns in duty cycles on whole GPUs (or even halves)"
    source = "Nexus (SOSP 2019), section 6.1; baseline of gpulet (Choi et al.)"

    def __init__(self, *, halves: bool = False, max_batch: int = 128) -> None:
        if max_batch < 1:
            raise InvalidInputError(Problem("--option max_batch", max_batch, "must be at least 1", "Try 128."))
        self.halves, self.max_batch = halves, max_batch

    def place(self, workload: Workload, cluster: Cluster, profiles: Profiles) -> Plan:
        """Return the plan; deterministic, ties broken by the order of the workload."""
        pool = GpuPool(cluster)
        share = WHOLE_GPU / 2 if self.halves else WHOLE_GPU
        left = {spec.name: spec.rate_rps for spec in workload.models}
        reasons: dict[str, str] = {}
        gpulets: list[TurnsGpulet] = []
        costs = {kind: self._costs(workload, gpu, profiles, share, reasons) for kind, gpu in pool.types.items()}
        for kind in self._order(pool, costs, left, share):
            gpulets += self._fill(pool, kind, costs[kind], left, share)
        known = {name for by_name in costs.values() for name in by_name}
        reasons = {name: reason for name, reason in reasons.items() if name not in known}
        return turns_plan(self.name, workload, cluster, gpulets, reasons)

    def _costs(
        self, workload: Workload, gpu: Gpu, profiles: Profiles, share: float, reasons: dict[str, str]
    ) -> dict[str, ShareCosts]:
        found = {}
        for spec in workload.models:
            try:
                costs = share_costs(spec, gpu, profiles, (share,), self.max_batch)
            except InvalidInputError as error:
                reason = str(error)
            else:
                if share in costs.latency_ms:
                    found[spec.name] = costs
                    continue
                reason = CANNOT_RUN.format(shares=f"{share:g} %")
            reasons[spec.name] = "; ".join(filter(None, (reasons.get(spec.name), f"{gpu.type}: {reason}")))
        return found

    def _order(
        self, pool: GpuPool, costs: dict[str, dict[str, ShareCosts]], rates: dict[str, float], share: float
    ) -> list[str]:
        kinds = list(costs)
        if not pool.elastic or len(kinds) < 2:
            return kinds
        prices = [pool.types[kind].price_per_hour for kind in kinds]
        unit = [1.0 if None in prices else float(price or 0.0) for price in prices]
        bins = {kind: len(self._bins(pool.types[kind], costs[kind], rates, share, None)) for kind in kinds}
        ranked = {kind: (-len(costs[kind]), bins[kind] * price) for kind, price in zip(kinds, unit, strict=True)}
        return sorted(kinds, key=lambda kind: ranked[kind])

    def _bins(
        self, gpu: Gpu, costs: dict[str, ShareCosts], rates: dict[str, float], share: float, most: int | None
    ) -> list[Bin]:
        names = [name for name, rate in rates.items() if name in costs and rate > 0]
        demands = [
            Demand(index, rates[name], costs[name].slo_ms, costs[name].latency_ms[share])
            for index, name in enumerate(names)
        ]
        room = gpu.memory_mib * share / WHOLE_GPU

        def fits(parts: Sequence[Part]) -> bool:
            return sum(costs[names[part.model]].memory_mib(part.batch, share) for part in parts) <= room

        packed = pack(demands, fits=fits, most=most)
        for node in packed:
            node.parts = [Part(list(costs).index(names[part.model]), part.batch, part.rate_rps) for part in node.parts]
        return packed

    def _fill(
        self, pool: GpuPool, kind: str, costs: dict[str, ShareCosts], left: dict[str, float], share: float
    ) -> list[TurnsGpulet]:
        """Hand the bins of one GPU type their GPUs and take what they carry off the rates that are left."""
        names = list(costs)
        gpulets: list[TurnsGpulet] = []
        gpu: Gpu | None = None
        per_gpu = round(WHOLE_GPU / share)
        most = None if pool.elastic else per_gpu * len(pool.free(kind))
        for index, node in enumerate(self._bins(pool.types[kind], costs, left, share, most)):
            if index % per_gpu == 0:
                gpu = pool.take(kind)
            if gpu is None:
                break
            turns = [Turn(costs[names[part.model]], part.batch, part.rate_rps) for part in node.parts]
            gpulets.append(TurnsGpulet(gpu, share, node.duty_ms, turns))
        asked = dict(left)
        for gpulet in gpulets:
            for turn in gpulet.turns:
                name = turn.costs.spec.name
                left[name] -= turn.rate_rps
                if left[name] < CARRIED * asked[name]:
                    left[name] = 0.0
        return gpulets
