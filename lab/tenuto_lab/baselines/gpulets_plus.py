"""gpulets+: the baseline gpu-lets of iGniter's paper, with spatial sharing only."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass

from tenuto.options import option
from tenuto.placement.cluster import Cluster
from tenuto.placement.interference.named import canonical_name, interference_models
from tenuto.placement.plan import Plan
from tenuto.placement.policies.gpulet.knee import FLAT, KNEES, Curve
from tenuto.placement.policies.gpulet.share_costs import ShareCosts, share_costs
from tenuto.placement.policies.shared.gpu_pool import GpuPool
from tenuto.placement.policies.shared.hosting import hosting_plan
from tenuto.placement.policy import Policy
from tenuto.placement.workload import ModelSpec, Workload
from tenuto.profiles import Profiles
from tenuto.profiles.share_latency import WHOLE_GPU_PCT
from tenuto_lab.baselines.gpulets_plus_search import PairSearch, Rules

CHOICES = {"batch": ("smallest", "largest"), "order": ("rate", "load"), "booked": ("alone", "beside")}


def knee_by_bend(curve: Curve) -> float:
    """Return the share at which the curve turns most sharply either way, or the largest share of a straight line.

    The turn is that of the curve in logarithms: the change of elasticity d ln(rate) / d ln(share), which depends on no
    unit. For positive rates this gives the shares that iGniter's paper states for gpu-lets.
    """
    best, share = FLAT, curve[-1][0]
    gains = [
        math.log(after / before) / math.log(larger / smaller)
        for (smaller, before), (larger, after) in itertools.pairwise(curve)
    ]
    for before, after, (candidate, _) in zip(gains, gains[1:], curve[1:], strict=False):
        if abs(after - before) > best:
            best, share = abs(after - before), candidate
    return share


ALL_KNEES = {**KNEES, "bend": knee_by_bend}


@dataclass(kw_only=True, eq=False)
class GpuletsPlus(Policy):
    """Gives every model its most efficient share, at most two gpu-lets per GPU, best fit first.

    Models come in descending order of rate. Until its rate is carried, a model takes the smaller of two shares: the one
    where the curve of throughput over share (batches of one) bends most, and the smallest one that carries the rate
    with batches of one. When GPUs have a free part of at least that share, the model goes to the smallest free part and
    gets all of it. Otherwise it gets a GPU of its own. A batch beside a neighbour must stay within half the SLO under
    the linear interference model of gpu-lets.

    Readings of what iGniter's paper leaves open. With them, everything comes out that the paper states about its twelve
    workloads: eight GPUs, W2 on the second with 40 %, W4 with 60 % and batch 2, W9 with 40 %, and W7, W8 and W12 too
    slow for their rates. The last needs `booked=alone`: a gpu-let is booked for the rate that it carries alone, also
    beside a neighbour, as in the authors' published script; notes name models that this overloads. The batch is the
    smallest that carries the rate. The paper's first example was made by other rules: `batch=largest`, `order=load` and
    `check_neighbours=false` give its plan. A model whose L2 and DRAM utilisation were not measured gets no neighbour. A
    model that cannot run on any of the shares gets a whole GPU.

    Options:
        shares: the sizes in percent a gpu-let may have.
        interference: the model of what a neighbour costs: `gpulet`, the linear model with the constants for the GPU
            type; another one of docs/reference/interference.md; or `none`.
        batch: `smallest` that carries the rate, or `largest` within half the SLO.
        order: `rate`, or `load` (rate times the latency of one request on the efficient share).
        booked: `alone` or `beside`, see above.
        check_neighbours: refuse a place where the model that is there already would exceed half its SLO.
        knee: `bend` (see `knee_by_bend`), `curvature` or `chord`.
        max_batch: largest batch considered.
    """

    name = "gpulets+"
    summary = "gpu-lets as iGniter compares with: efficient shares, two gpu-lets per GPU, linear interference"
    source = "the baseline gpu-lets+ of iGniter (arXiv 2211.01713), section 5; Choi et al., gpulet (USENIX ATC 2022)"
    readings = (
        "defaults give the paper's twelve workloads; its first example needs batch=largest, order=load, "
        "check_neighbours=false"
    )

    shares: tuple[float, ...] = option((20.0, 40.0, 50.0, 60.0, 80.0), above=0, below=WHOLE_GPU_PCT)
    interference: str = "gpulet"
    batch: str = option("smallest", choices=CHOICES["batch"])
    order: str = option("rate", choices=CHOICES["order"])
    booked: str = option("alone", choices=CHOICES["booked"])
    check_neighbours: bool = True
    knee: str = option("bend", choices=tuple(ALL_KNEES))
    max_batch: int = option(32, minimum=1)

    def __post_init__(self) -> None:
        self.interference = canonical_name(self.interference)
        super().__post_init__()

    def place(self, workload: Workload, cluster: Cluster, profiles: Profiles) -> Plan:
        """Return the plan; deterministic, ties broken by the order of the workload and of the cluster.

        Raises:
            InvalidInputError: the profiles lack the hardware coefficients of the chosen interference model.
        """
        costs, reasons = share_costs(workload, cluster, profiles, self._sizes(workload), self.max_batch)
        whole, _ = share_costs(workload, cluster, profiles, (WHOLE_GPU_PCT,), self.max_batch)
        costs = {name: {**whole[name], **costs[name]} for name in costs}
        rules = Rules(
            knee=ALL_KNEES[self.knee],
            smallest_batch=self.batch == "smallest",
            book_alone=self.booked == "alone",
            check_neighbours=self.check_neighbours,
            interference=interference_models(self.interference, cluster.gpu_types, profiles),
        )
        search = PairSearch(GpuPool(cluster), rules)
        for spec in sorted(workload.models, key=lambda m: -self._rank(m, costs[m.name], rules)):
            if costs[spec.name]:
                search.place(spec, costs[spec.name])
        return hosting_plan(self.name, workload, cluster, search.hosted(), reasons, search.overloaded())

    def _sizes(self, workload: Workload) -> tuple[float, ...]:
        return tuple(sorted(set(self.shares))) if workload.mps != "off" else ()

    def _rank(self, spec: ModelSpec, costs: Mapping[str, ShareCosts], rules: Rules) -> float:
        if self.order == "rate" or not costs:
            return spec.rate_rps
        return spec.rate_rps * min(one.latency_ms[rules.efficient_pct(one)][1] for one in costs.values())
