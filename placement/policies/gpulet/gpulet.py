"""gpulet: elastic partitioning of GPUs into gpu-lets in which models take turns.

Source: Choi et al., "Serving Heterogeneous Machine Learning Models on Multi-GPU Servers with Spatio-Temporal Sharing"
(arXiv: "Multi-model Machine Learning Inference Serving with GPU Spatial Partitioning"), section 4.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from tenuto.options import option
from tenuto.placement.cluster import Cluster
from tenuto.placement.interference.named import canonical_name, interference_models, stand_ins
from tenuto.placement.plan import Plan
from tenuto.placement.policies.gpulet.disturbance import Disturbance, Reserve
from tenuto.placement.policies.gpulet.elastic_partitioning import ElasticPartitioning, Rules
from tenuto.placement.policies.gpulet.knee import KNEES
from tenuto.placement.policies.gpulet.share_costs import CostsByType, share_costs
from tenuto.placement.policies.shared.gpu_pool import GpuPool
from tenuto.placement.policies.shared.hosting import hosting_plan
from tenuto.placement.policy import Abilities, Policy
from tenuto.placement.workload import Workload
from tenuto.profiles import Profiles
from tenuto.profiles.share_latency import WHOLE_GPU_PCT


@dataclass(kw_only=True, eq=False)
class GpuletPolicy(Policy):
    """Gives every model the smaller of its knee share and the share its rate requires, best fit first.

    Models come in descending order of rate. Until a model's rate is carried, it takes the smallest free gpu-let of at
    least min(knee, required share); a whole GPU is split there first. Before using it, the policy tries the same rate
    as a further turn in a used gpu-let, the smallest first. When all models there keep their SLOs, the split is undone
    (merging in time). Every replica keeps duty cycle + l(b) <= SLO, with l(b) slowed down by the neighbours' batches
    when interference counts. A placement that would break a neighbour's SLO is not made.

    The paper leaves open: when no free gpu-let is as large as wanted, the largest free one carries what it can
    (`smaller=false`: the model stops there). A gpu-let's memory is its share of the GPU's.

    With interference, a full gpu-let could never get a neighbour, whose slowdown would break its SLOs, and the rest of
    its GPU would stay empty. So the search runs twice. One run leaves room in every gpu-let beside a free one for the
    workload's worst neighbour (`Reserve`), the other does not. The plan of higher goodput wins, then the one on fewer
    GPUs, then the first.

    Options:
        interference: what neighbours on a GPU cost: `none`, `gpulet` (or true, the paper's gpulet+int: its linear model
            with the constants for the GPU type), `igniter`, `contention` or `contention:FILE`
            (docs/reference/interference.md). A model whose profile lacks what the interference model needs gets no
            neighbours.
        max_partitions: gpu-lets per GPU at most; 2 in the paper.
        shares: the sizes in percent a gpu-let may have; both parts of a split must be among them.
        knee: `curvature` (largest curvature, the paper) or `chord` (furthest above the chord).
        smaller: use free gpu-lets below the wanted size when nothing else is left.
        turns: models may share a gpu-let in time; without it every gpu-let has one model.
        merge_without_free: seek a turn also when no free gpu-let is as large as wanted; the paper seeks one only after
            choosing a free gpu-let. On a full cluster this serves more.
        max_batch: largest batch considered; 32 in the paper.
    """

    name = "gpulet"
    summary = "splits GPUs at the knee of each model's rate-share curve; models also take turns in a gpu-let"
    source = "Choi et al., gpulet (USENIX ATC 2022), section 4"
    readings = (
        "a free gpu-let below the wanted size carries what it can (smaller=false: none); ours: room is kept for "
        "neighbours"
    )
    abilities = Abilities(is_interruptible=True, most_models=500)  # limit: with more it takes minutes

    interference: str = "none"
    max_partitions: int = option(2, minimum=1)
    shares: tuple[float, ...] = option((20.0, 40.0, 50.0, 60.0, 80.0), above=0, below=WHOLE_GPU_PCT)
    knee: str = option("curvature", choices=tuple(KNEES))
    smaller: bool = True
    turns: bool = True
    merge_without_free: bool = False
    max_batch: int = option(32, minimum=1)

    def __post_init__(self) -> None:
        self.interference = canonical_name(self.interference)
        super().__post_init__()

    def place(self, workload: Workload, cluster: Cluster, profiles: Profiles) -> Plan:
        """Return the plan; deterministic, ties broken by the order of the workload and of the cluster."""
        costs, reasons = share_costs(workload, cluster, profiles, self._sizes(workload), self.max_batch)
        models = interference_models(self.interference, cluster.gpu_types, profiles)
        rules = Rules(
            shares_pct=self._sizes(workload)[:-1],
            max_partitions=self.max_partitions,
            knee=KNEES[self.knee],
            smaller=self.smaller,
            turns=self.turns,
            merge_without_free=self.merge_without_free,
            disturbances={kind: Disturbance(model) for kind, model in models.items()},
        )
        plain = self._search(workload, cluster, costs, rules, reasons)
        if self.interference == "none":
            return plain
        reserve = Reserve(list(costs.values()), rules.disturbances)
        reserved = self._search(workload, cluster, costs, replace(rules, reserve=reserve), reasons)
        return max(reserved, plain, key=_worth)

    def _search(
        self, workload: Workload, cluster: Cluster, costs: CostsByType, rules: Rules, reasons: Mapping[str, str]
    ) -> Plan:
        search = ElasticPartitioning(GpuPool(cluster), rules)
        why = dict(reasons)
        for number, spec in enumerate(sorted(workload.models, key=lambda m: -m.rate_rps)):
            self.watch.say(f"placed {number} of {len(workload.models)} models")
            if self.watch.is_stopped():
                why.setdefault(spec.name, "planning was interrupted before its turn")
            elif costs[spec.name]:
                search.place(spec, costs[spec.name])
        notes = stand_ins(self.interference, cluster.gpu_types)
        return hosting_plan(self.name, workload, cluster, search.hosted(), why, notes)

    def _sizes(self, workload: Workload) -> tuple[float, ...]:
        """Return the sizes of gpu-lets, ascending; only whole GPUs when CUDA MPS is off."""
        return (*(sorted(set(self.shares)) if workload.mps != "off" else ()), WHOLE_GPU_PCT)


def _worth(plan: Plan) -> tuple[float, int]:
    return round(plan.expected.goodput_rps, 3), -len(plan.used_gpus)
