"""gpulets+: gpu-lets as iGniter's paper has them as a baseline, spatial sharing only."""

from __future__ import annotations

from collections.abc import Mapping

from tenuto.errors import InvalidInputError, Problem, raise_if_any
from tenuto.placement.cluster import Cluster
from tenuto.placement.interference.named import canonical_name, interference_models
from tenuto.placement.plan import Plan
from tenuto.placement.policies.gpulet.gpulets_plus_search import PairSearch, Rules
from tenuto.placement.policies.gpulet.knee import KNEES
from tenuto.placement.policies.gpulet.share_costs import CANNOT_RUN, WHOLE_GPU, ShareCosts, share_costs
from tenuto.placement.policies.gpulet.turns_plan import turns_plan
from tenuto.placement.policies.shared.gpu_pool import GpuPool
from tenuto.placement.policy import Policy
from tenuto.placement.workload import ModelSpec, Workload
from tenuto.profiles import Profiles

__all__ = ["GpuletsPlus"]

MOST_GPULETS_OF_A_MODEL = 100_000
CHOICES = {"batch": ("smallest", "largest"), "order": ("rate", "load"), "booked": ("alone", "beside")}


class GpuletsPlus(Policy):
    """Gives every model its most efficient share, at most two gpu-lets per GPU, best fit first.

    Models come in descending order of rate. Until its rate is carried, a model takes the smaller of two shares: the one
    where the curve of throughput over share (batches of one) bends most, and the smallest that carries the rate with
    batches of one. It goes beside the model that leaves the least room of at least that share, and then gets all that
    room; else to a GPU of its own. A batch beside a neighbour must stay within half the SLO under the linear
    interference model of gpu-lets.

    Readings of what iGniter's paper leaves open. All it states about its twelve workloads comes out: eight GPUs, W2 on
    the second with 40 %, W4 with 60 % and batch 2, W9 with 40 %, and W7, W8 and W12 too slow for their rates. The last
    needs `booked=alone`: a gpu-let is trusted to carry beside a neighbour what it carries alone, as in the authors'
    published script; notes name whom that overloads. The batch is the smallest that carries the rate. The paper's first
    example was made by other rules: with `batch=largest`, `order=load` and `check_neighbours=false` its plan comes out.
    A model whose L2 and DRAM utilisation were not measured gets no neighbour. One that cannot run on any of the shares
    gets a whole GPU.

    Options:
        shares: the sizes in percent a gpu-let may have.
        interference: what a neighbour costs: `gpulet`, the linear model with the constants for the GPU type, or one of
            the others in docs/interference.md; `none`.
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

    def __init__(
        self,
        *,
        shares: tuple[float, ...] = (20.0, 40.0, 50.0, 60.0, 80.0),
        interference: bool | str = "gpulet",
        batch: str = "smallest",
        order: str = "rate",
        booked: str = "alone",
        check_neighbours: bool = True,
        knee: str = "bend",
        max_batch: int = 32,
    ) -> None:
        problems = []
        if not shares or not all(0 < share < WHOLE_GPU for share in shares):
            problems.append(Problem("--option shares", shares, "must be above 0 and below 100", "Try 20,40,50,60,80."))
        for name, value in (("batch", batch), ("order", order), ("booked", booked)):
            if value not in CHOICES[name]:
                problems.append(Problem(f"--option {name}", value, "unknown", f"Use {' or '.join(CHOICES[name])}."))
        if knee not in KNEES:
            problems.append(Problem("--option knee", knee, "unknown", f"Use {' or '.join(KNEES)}."))
        if max_batch < 1:
            problems.append(Problem("--option max_batch", max_batch, "must be at least 1", "32 in the paper."))
        raise_if_any(problems)
        self.shares, self.batch, self.order = tuple(shares), batch, order
        self.interference = canonical_name(interference)
        self.booked, self.check_neighbours, self.knee, self.max_batch = booked, check_neighbours, knee, max_batch

    def place(self, workload: Workload, cluster: Cluster, profiles: Profiles) -> Plan:
        """Return the plan; deterministic, ties broken by the order of the workload and of the cluster.

        Raises:
            InvalidInputError: a model would need more than 100,000 gpu-lets of an elastic cluster, or the profiles lack
                the hardware coefficients of the chosen interference model.
        """
        pool = GpuPool(cluster)
        unserved: dict[str, str] = {}
        costs = {spec.name: self._costs(spec, pool, profiles, workload.mps, unserved) for spec in workload.models}
        rules = Rules(
            knee=KNEES[self.knee],
            smallest_batch=self.batch == "smallest",
            book_alone=self.booked == "alone",
            check_neighbours=self.check_neighbours,
            interference=interference_models(self.interference, pool.types, profiles),
        )
        if cluster.elastic:
            _check_rates(workload, costs)
        search = PairSearch(pool, rules)
        for spec in sorted(workload.models, key=lambda m: -self._rank(m, costs[m.name], rules)):
            if costs[spec.name]:
                search.place(spec, costs[spec.name])
        return turns_plan(self.name, workload, cluster, search.gpulets(), unserved, search.overloaded())

    def _costs(
        self, spec: ModelSpec, pool: GpuPool, profiles: Profiles, mps: str, unserved: dict[str, str]
    ) -> dict[str, ShareCosts]:
        """Return a model's costs by GPU type, or none with the reason in `unserved`."""
        found: dict[str, ShareCosts] = {}
        reasons = []
        parts = sorted(set(self.shares)) if mps != "off" else []
        for kind, gpu in pool.types.items():
            try:
                costs = share_costs(spec, gpu, profiles, parts, self.max_batch)
                if not costs.latency_ms:
                    costs = share_costs(spec, gpu, profiles, [WHOLE_GPU], self.max_batch)
            except InvalidInputError as error:
                reasons.append(f"{kind}: {error}")
                continue
            if costs.latency_ms:
                found[kind] = costs
            else:
                reasons.append(f"{kind}: " + CANNOT_RUN.format(shares="every share"))
        if not found:
            unserved[spec.name] = "; ".join(reasons) or "the cluster has no GPU"
        return found

    def _rank(self, spec: ModelSpec, costs: Mapping[str, ShareCosts], rules: Rules) -> float:
        if self.order == "rate" or not costs:
            return spec.rate_rps
        return spec.rate_rps * min(one.latency_ms[rules.efficient_pct(one)][1] for one in costs.values())


def _check_rates(workload: Workload, costs: Mapping[str, Mapping[str, ShareCosts]]) -> None:
    problems = []
    for index, spec in enumerate(workload.models):
        best = max(
            (one.capacity_rps(share) for one in costs[spec.name].values() for share in one.latency_ms), default=0
        )
        if best and spec.rate_rps / best > MOST_GPULETS_OF_A_MODEL:
            rule = f"needs more than {MOST_GPULETS_OF_A_MODEL:,} gpu-lets, each of which carries {best:.4g} rps at most"
            cure = "Lower it; rates are in requests per second."
            problems.append(Problem(f"models.{index}.rate_rps", spec.rate_rps, rule, cure))
    raise_if_any(problems)
