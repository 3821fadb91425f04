"""iGniter: shares that meet half the SLO beside the neighbours."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from tenuto.placement.cluster import Cluster
from tenuto.placement.plan import Plan
from tenuto.placement.policy import Policy
from tenuto.placement.workload import Workload
from tenuto.profiles import Profiles
from tenuto_lab.baselines.igniter.packing import OpenGpu, igniter_plan, pack_cluster
from tenuto_lab.baselines.igniter.shares import ShareDemand, Shares, allocate


def raised(gpu: OpenGpu, demand: ShareDemand) -> Shares | None:
    """Return the shares of a GPU with one more resident, all shares raised as needed (Algorithm 2)."""
    return allocate([*gpu.demands, demand], [*gpu.shares, demand.lower_units or demand.most_units])


def beside(gpu: OpenGpu, demand: ShareDemand) -> Shares | None:
    """As `raised`, but return the lower bound on a new GPU (Algorithm 1, line 14)."""
    return raised(gpu, demand) if gpu.demands else (demand.lower_units or demand.most_units,)


@dataclass(kw_only=True, eq=False)
class Igniter(Policy):
    """Places models, largest lower bound of the share first, where they raise the shares of all least.

    Algorithms 1 and 2 of the paper. A model that needs more than one GPU gets whole ones and a rest, as in the authors'
    code (see `demands_of`). All GPUs are of the type that serves everything at the lowest price; others are mixed in
    only when that serves more or costs less (see `pack_cluster`). What fits nowhere on a fixed cluster is left out.
    Every batch takes at most half its SLO; the other half is for filling it. As in the paper, arrivals count as evenly
    spaced: bursts need headroom, that is a workload of higher rates (figures: lab/journal/benchmarks-placement.md).

    Newcomers (section 4.2) are for `tenuto plan --from`, as under every policy.

    Options:
        raise_alone: Algorithm 2 also for a model alone on a new GPU. In the paper it gets its lower bound there, which
            ignores that a batch can slow the GPU's clock down by itself: it may take slightly longer than half its SLO.
    """

    name = "igniter"
    summary = "smallest shares that meet half the SLO under an analytic interference model; least interference first"
    source = "iGniter (arXiv 2211.01713), Theorem 1, Algorithms 1 and 2; several GPUs per model as in the authors' code"
    readings = "ours: memory is checked, and GPU types are compared by price; the paper has one type and no memory"
    _first: ClassVar[bool] = False
    _notes: ClassVar[tuple[str, ...]] = ()

    raise_alone: bool = False

    def _attempt(self, gpu: OpenGpu, demand: ShareDemand) -> Shares | None:
        return (raised if self.raise_alone else beside)(gpu, demand)

    def place(self, workload: Workload, cluster: Cluster, profiles: Profiles) -> Plan:
        """Return the plan.

        Raises:
            InvalidInputError: a model has iGniter's coefficients on no GPU type of the cluster.
        """
        packed = pack_cluster(workload, cluster, profiles, self._attempt, first=self._first)
        return igniter_plan(self.name, workload, cluster, packed, self._notes)
