"""First-fit decreasing as iGniter's paper compares with: FFD++ with its shares under interference, FFD+ without."""

from __future__ import annotations

from tenuto.placement.cluster import Cluster
from tenuto.placement.plan import Plan
from tenuto.placement.policies.igniter.igniter import beside
from tenuto.placement.policies.igniter.packing import OpenGpu, igniter_plan, pack_cluster
from tenuto.placement.policies.igniter.shares import Demand, Shares
from tenuto.placement.policy import Policy
from tenuto.placement.workload import Workload
from tenuto.profiles import Profiles

__all__ = ["FirstFitPlusPlus", "lower_bounds"]


def lower_bounds(gpu: OpenGpu, demand: Demand) -> Shares | None:
    """Return the shares of a GPU with one more resident at its lower bound, the others as they are; or None."""
    shares = (*gpu.shares, demand.lower_units or demand.most_units)
    return shares if sum(shares) <= demand.most_units else None


class FirstFitPlusPlus(Policy):
    """Places models, largest lower bound of the share first, on the first GPU where they fit.

    Options:
        interference: raise shares against interference (iGniter's Algorithm 2). Without it every model gets its lower
            bound of Theorem 1, which is the paper's FFD+.
    """

    name = "ffd++"
    summary = "first-fit decreasing with iGniter's shares; interference=false is FFD+"
    source = "the baselines FFD+ and FFD++ of iGniter (arXiv 2211.01713), section 5"

    def __init__(self, *, interference: bool = True) -> None:
        self.interference = interference

    def place(self, workload: Workload, cluster: Cluster, profiles: Profiles) -> Plan:
        """Return the plan.

        Raises:
            InvalidInputError: a model has iGniter's coefficients on no GPU type of the cluster.
        """
        attempt = beside if self.interference else lower_bounds
        packed = pack_cluster(workload, cluster, profiles, attempt, first=True)
        notes = () if self.interference else ("shares are lower bounds; the expected latencies include interference",)
        return igniter_plan(self.name, workload, cluster, packed, notes)
