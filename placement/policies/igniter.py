"""iGniter: interference-aware shares and placement that keep every batch within half its SLO at the lowest cost."""

from __future__ import annotations

from tenuto.placement.cluster import Cluster
from tenuto.placement.plan import Plan
from tenuto.placement.policies.igniter_packing import OpenGpu, best_type, igniter_plan, pack
from tenuto.placement.policies.igniter_shares import Demand, Shares, allocate
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
    GPUs are of the type that serves most and then costs least. On a fixed cluster what fits nowhere is left out.
    """

    name = "igniter"
    summary = "smallest shares that meet half the SLO under an analytic interference model; least interference first"
    source = "iGniter (arXiv 2211.01713), Theorem 1, Algorithms 1 and 2"

    def place(self, workload: Workload, cluster: Cluster, profiles: Profiles) -> Plan:
        """Return the plan.

        Raises:
            InvalidInputError: no GPU type has iGniter's coefficients of every model.
        """
        rates = {spec.name: spec.rate_rps for spec in workload.models}
        packed = best_type(cluster, lambda kind: pack(workload, cluster, profiles, kind, beside, first=False), rates)
        return igniter_plan(self.name, workload, cluster, packed)
