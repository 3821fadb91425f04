"""What a plan is made from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from tenuto.outcome import ATTAINED
from tenuto.placement.cluster import Cluster, Gpu
from tenuto.placement.expectation.outlook import Traffic
from tenuto.placement.plan import Plan, PolicyUsed
from tenuto.placement.planner.fault_tolerance import Trial
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


@dataclass(frozen=True)
class Durations:
    """What the phases of a change take on this cluster, in seconds: starting a process, and loading a model into a
    running one."""

    start_s: float
    load_s: float


@dataclass(frozen=True)
class PlanRequest:
    """A question to the planner.

    `workload` names the models, `traffic` is what has to be carried and `expected_rps` the expected average. `running`
    is the plan that serves now, on `gpus`, those present. `types` are the GPU types that the cluster can grow by, with
    the most of each; empty: it cannot grow. `slowdowns` is what batches of a program take over their profile.
    `attainment` is the share of every model's requests that has to be in time. `standby_pct` asks for standby processes
    with so much more of a GPU, `standby_gpus` for twins on so many GPUs; `standby_ids` already wait beside the running
    plan. `only_standby`: no other plan is wanted.
    """

    workload: Workload
    traffic: Traffic
    expected_rps: Mapping[str, float]
    running: Plan
    gpus: tuple[Gpu, ...]
    policy: PolicyUsed
    durations: Durations
    horizon_s: float
    hysteresis: float
    types: Mapping[str, int] = field(default_factory=dict)
    slowdowns: Mapping[str, float] = field(default_factory=dict)
    attainment: float = ATTAINED
    standby_pct: float | None = None
    standby_gpus: int = 0
    standby_ids: frozenset[str] = frozenset()
    only_standby: bool = False
