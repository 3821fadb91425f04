"""The ideal placement: a search over all partitions of all GPUs, and all ways to give models whole gpu-lets and turns.

Source: the ideal scheduler that Choi et al. (gpulet, USENIX ATC 2022, section 6) compare with. For small cases.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations_with_replacement, product

from tenuto.errors import refused
from tenuto.options import option
from tenuto.placement.cluster import Cluster
from tenuto.placement.plan import Plan
from tenuto.placement.policies.gpulet.gpulet import GpuletPolicy
from tenuto.placement.policies.gpulet.share_costs import CostsByType, share_costs
from tenuto.placement.policies.shared.gpu_pool import GpuPool
from tenuto.placement.policies.shared.hosting import CARRIED, Hosted, hosting_plan
from tenuto.placement.policy import Abilities, Policy
from tenuto.placement.workload import Workload
from tenuto.profiles import Profiles
from tenuto.profiles.share_latency import WHOLE_GPU_PCT
from tenuto_lab.baselines.partition_search import Let, PartitionSearch, SearchStopped
from tenuto_lab.baselines.sbp import SquishyBinPacking


@dataclass(kw_only=True, eq=False)
class Ideal(Policy):
    """Accepts a workload if any partition of the GPUs into at most two gpu-lets each carries it, without interference.

    The plans of gpulet and SBP (whole GPUs and halves) are tried first, so a workload that one of them accepts is
    accepted. Then every combination of partitions is searched: a model fills any set of gpu-lets alone at their full
    rate, and the rest of its rate takes turns in one more. Plans in which this rest is divided over several shared
    gpu-lets are not searched. When nothing carries every rate, the candidate with the highest goodput is the plan, and
    the notes say so. On an elastic cluster the number of GPUs grows, in the order of the cluster's types, until a plan
    is found.

    Options:
        shares: the sizes in percent below 100 that a gpu-let may have; both parts of a split must be among them.
        max_batch: largest batch considered.
        max_gpus: refuses clusters with more GPUs; the search grows exponentially.
        max_steps: steps per search; when they run out the notes say that the answer is not proven.
        turns: models may share a gpu-let in time; without it every gpu-let has one model.
    """

    name = "ideal"
    summary = "exhaustive search over all partitions of the GPUs, for small cases"
    source = "Choi et al., gpulet (USENIX ATC 2022), section 6: the ideal scheduler"
    readings = "a model's rest takes turns in one gpu-let, never divided over several; up to max_gpus GPUs"
    abilities = Abilities(is_interruptible=True, most_models=40, plans_at_once=False)  # limit: it serves half of others

    shares: tuple[float, ...] = option((20.0, 40.0, 50.0, 60.0, 80.0), above=0, below=WHOLE_GPU_PCT)
    max_batch: int = option(32, minimum=1)
    max_gpus: int = option(8, minimum=1)
    max_steps: int = option(50_000, minimum=1)
    turns: bool = True

    def place(self, workload: Workload, cluster: Cluster, profiles: Profiles) -> Plan:
        """Return the plan; deterministic.

        Raises:
            InvalidInputError: the cluster has more GPUs than `max_gpus`.
        """
        if len(cluster.gpus) > self.max_gpus:
            raise refused(
                "--gpus",
                len(cluster.gpus),
                f"the ideal policy searches at most {self.max_gpus} GPUs",
                "Use fewer GPUs, another policy such as gpulet, or --option max_gpus (expect long runs).",
            )
        candidates = self._candidates(workload, cluster, profiles)
        best = max(candidates, key=lambda plan: plan.expected.goodput_rps)
        if not workload.models or (_accepts(best, workload) and not cluster.elastic):
            return best
        sizes = (*(sorted(set(self.shares)) if workload.mps != "off" else ()), WHOLE_GPU_PCT)
        costs, reasons = share_costs(workload, cluster, profiles, sizes, self.max_batch)
        note = "no partition of the GPUs carries every rate; this is the best of the candidates"
        if not reasons:
            accepting = [plan for plan in candidates if _accepts(plan, workload)]
            fewest = min((len(plan.gpus) for plan in accepting), default=self.max_gpus + 1)
            try:
                for gpus in self._gpu_sets(cluster, fewest):
                    found = self._search(gpus, cluster, costs, workload, sizes)
                    if found is not None:
                        return hosting_plan(self.name, workload, cluster, found, {})
            except SearchStopped:
                note = f"search stopped after {self.max_steps} steps: not proven that nothing better exists"
            if accepting:
                return min(accepting, key=lambda plan: len(plan.gpus))
        return best.model_copy(update={"notes": (*best.notes, note)})

    def _candidates(self, workload: Workload, cluster: Cluster, profiles: Profiles) -> list[Plan]:
        space_only = GpuletPolicy(shares=self.shares, max_batch=self.max_batch, turns=False)
        if not self.turns:
            return [space_only.place(workload, cluster, profiles)]
        policies: list[Policy] = [SquishyBinPacking(max_batch=self.max_batch)]
        if workload.mps != "off":
            policies.append(SquishyBinPacking(halves=True, max_batch=self.max_batch))
        policies.append(GpuletPolicy(shares=self.shares, max_batch=self.max_batch))
        return [policy.place(workload, cluster, profiles) for policy in policies]

    def _gpu_sets(self, cluster: Cluster, fewer_than: int) -> list[tuple[str, ...]]:
        """Return the GPU types of every cluster to search; for an elastic one, in growing number."""
        if not cluster.elastic:
            return [tuple(gpu.type for gpu in cluster.gpus)]
        counts = range(1, min(fewer_than, self.max_gpus + 1))
        return [types for count in counts for types in combinations_with_replacement(cluster.gpu_types, count)]

    def _search(
        self, types: tuple[str, ...], cluster: Cluster, costs: CostsByType, workload: Workload, sizes: tuple[float, ...]
    ) -> list[Hosted] | None:
        splits = [(WHOLE_GPU_PCT,)] + [
            (low, high) for low in sizes for high in sizes if low <= high and abs(low + high - WHOLE_GPU_PCT) < 1e-6
        ]
        counts = {kind: types.count(kind) for kind in dict.fromkeys(types)}
        pool = GpuPool(cluster)
        rates = {spec.name: spec.rate_rps for spec in workload.models}
        search = PartitionSearch(costs, rates, self.max_steps, turns=self.turns, watch=self.watch)
        for parts in product(*(combinations_with_replacement(splits, count) for count in counts.values())):
            gpus = [(kind, split) for kind, chosen in zip(counts, parts, strict=True) for split in chosen]
            self.watch.say(f"{len(gpus)} gpu-lets on {len(types)} GPUs")
            lets = [Let(position, kind, share) for position, (kind, split) in enumerate(gpus) for share in split]
            if search.run(lets):
                return search.hosted(lets, [gpu for kind, _ in gpus if (gpu := pool.next_gpu(kind)) is not None])
        return None


def _accepts(plan: Plan, workload: Workload) -> bool:
    goodput = {name: model.goodput_rps for name, model in plan.expected.models.items()}
    return all(goodput.get(spec.name, 0.0) >= spec.rate_rps * (1 - 10 * CARRIED) - 1e-6 for spec in workload.models)
