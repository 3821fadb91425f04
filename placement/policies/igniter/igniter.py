"""iGniter: interference-aware shares and placement that keep every batch within half its SLO at the lowest cost."""

from __future__ import annotations

from tenuto.placement.cluster import Cluster
from tenuto.placement.plan import Plan
from tenuto.placement.policies.igniter.packing import OpenGpu, igniter_plan, pack_cluster
from tenuto.placement.policies.igniter.shares import Demand, Shares, allocate
from tenuto.placement.policy import Policy
from tenuto.placement.workload import Workload
from tenuto.profiles import Profiles

__all__ = ["Igniter"]


def beside(gpu: OpenGpu, demand: Demand) -> Shares | None:
    """Return the shares of a GPU with one more resident, its neighbours' shares raised as needed."""
    return allocate([*gpu.demands, demand], [*gpu.shares, demand.lower_units or demand.most_units])


class Igniter(Policy):
    """Places models, largest lower bound of the share first, where they raise the shares of all least.

    Algorithms 1 and 2 of the paper. A model that needs more than one GPU becomes several replicas of equal rate. All
    GPUs are of the type that serves all at the lowest price, mixed with others only where that serves more or costs
    less (see `pack_cluster`). What fits nowhere on a fixed cluster is left out. Every batch is within half its SLO; the
    other half is for filling it. As in the paper, arrivals count as evenly spaced: bursts need headroom, that is a
    workload of higher rates (docs/benchmarks-placement.md has figures).
    """

    name = "igniter"
    summary = "smallest shares that meet half the SLO under an analytic interference model; least interference first"
    source = "iGniter (arXiv 2211.01713), Theorem 1, Algorithms 1 and 2"

    def place(self, workload: Workload, cluster: Cluster, profiles: Profiles) -> Plan:
        """Return the plan.

        Raises:
            InvalidInputError: a model has iGniter's coefficients on no GPU type of the cluster.
        """
        packed = pack_cluster(workload, cluster, profiles, beside, first=False)
        return igniter_plan(self.name, workload, cluster, packed)
