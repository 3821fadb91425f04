"""What a plan is made from."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tenuto.placement.cluster import Cluster
from tenuto.placement.fault_tolerance import Trial
from tenuto.placement.policy import Policy
from tenuto.placement.workload import Workload
from tenuto.profiles import Profiles


@dataclass(frozen=True)
class PlanTask:
    """One question to the planner.

    `policy` decides for all models of `workload` on the GPUs of `cluster`, which cost what `profiles` say. `trial`
    tries the plan after each loss that models must survive; without it, formulas expect the result.
    """

    policy: Policy
    workload: Workload
    cluster: Cluster
    profiles: Profiles
    trial: Trial | None = None

    def on(self, cluster: Cluster) -> PlanTask:
        """Return the same task on another cluster."""
        return replace(self, cluster=cluster)
