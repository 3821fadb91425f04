"""What a plan is made from: from nothing, or in place of a plan that runs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from tenuto.outcome import ATTAINED
from tenuto.placement.cluster import Cluster, Gpu, SpotTerms
from tenuto.placement.expectation.component import NOTHING
from tenuto.placement.expectation.outlook import Traffic
from tenuto.placement.plan import Plan, PolicyUsed
from tenuto.placement.planner.fault_tolerance import Trial
from tenuto.placement.policy import Policy, load_policy
from tenuto.placement.workload import Workload
from tenuto.profiles import Profiles


@dataclass(frozen=True)
class Durations:
    """What the phases of a change take on this cluster, in seconds: starting a process, and loading a model into a
    running one."""

    start_s: float
    load_s: float


CHANCE = 3.0  # derived: a steady rate is so many standard deviations off in 0.3 % of the looks


@dataclass(frozen=True)
class ChangeTerms:
    """On which terms another plan may take the running one's place: it serves `expected_rps` for the rest of
    `horizon_s`, and gains more than the change costs, by the part `hysteresis`. These rates are averages with the time
    constant `average_s`: requests taken from one model and given to another are no gain where chance explains it.
    GPUs that are asked for come after `come_s`."""

    expected_rps: Mapping[str, float]
    durations: Durations
    horizon_s: float
    hysteresis: float
    average_s: float = math.inf
    come_s: float = math.inf


@dataclass(frozen=True)
class RunningPlan:
    """The plan that serves now, and what a plan in its place has to do.

    `traffic` has to be carried, and `attainment` is the part of every model's requests that has to be in time. `growth`
    are the GPU types that the cluster can grow by; without any it is fixed. Plans may cut GPUs that come of types in
    `cut` into MIG instances. GPUs of types in `by_node` come and go with all of their node. `limits` say of how many
    GPUs of a type there is no more. `prices` are per hour by type, where they are given, and `spot` says how GPUs of
    types are lost that a spot market takes away. `slowdowns` is what batches of a program take over their profile.
    `reserved_ids` belong to processes beside the plan. `terms` say what a change has to gain. Without them the plan
    with the fewest changes is sought: of at most `most_changes` gpu-lets that start or load. It promises each model
    what the policy's plan from nothing does, what the running one does, or the larger.
    """

    plan: Plan
    traffic: Traffic
    terms: ChangeTerms | None = None
    most_changes: int | None = None
    promises: Literal["anew", "running", "larger"] = "anew"
    growth: tuple[str, ...] = ()
    cut: frozenset[str] = frozenset()
    by_node: frozenset[str] = frozenset()
    limits: Mapping[str, int] = field(default_factory=dict)
    prices: Mapping[str, float] = field(default_factory=dict)
    spot: Mapping[str, SpotTerms] = field(default_factory=dict)
    slowdowns: Mapping[str, float] = field(default_factory=dict)
    attainment: float = ATTAINED
    reserved_ids: frozenset[str] = frozenset()


@dataclass(frozen=True)
class PlanTask:
    """One question to the planner.

    `policy` decides for all models of `workload` on the GPUs of `cluster`, which cost what `profiles` say. `trial`
    tries the plan after each loss that models must survive; without it, formulas expect the result. The plan takes the
    place of `running`, if there is one. On an elastic cluster it is to promise the part `attainment` of the `traffic`,
    by default of the declared rates. The default of `attainment` is above what is promised of models near the limit.
    """

    policy: Policy
    workload: Workload
    cluster: Cluster
    profiles: Profiles
    trial: Trial | None = None
    running: RunningPlan | None = None
    traffic: Traffic | None = None
    attainment: float = ATTAINED + 2.0 * NOTHING

    @property
    def replaced(self) -> RunningPlan:
        """The running plan whose place the new one takes; raises `ValueError` when nothing runs."""
        if self.running is None:
            raise ValueError("The task has no running plan.")
        return self.running

    def on(self, cluster: Cluster) -> PlanTask:
        """Return the same task on another cluster."""
        return replace(self, cluster=cluster)


@dataclass(frozen=True)
class PlanRequest:
    """A task on its way to the planner's process, which loads the policy and has the profiles.

    `standby_pct` asks for standby processes with so much more of a GPU, `standby_gpus` for twins on so many GPUs.
    `only_standby`: no other plan is wanted.
    """

    workload: Workload
    gpus: tuple[Gpu, ...]
    policy: PolicyUsed
    running: RunningPlan
    standby_pct: float | None = None
    standby_gpus: int = 0
    only_standby: bool = False

    def task(self, profiles: Profiles) -> PlanTask:
        """Return the task on the GPUs that are present.

        Raises:
            InvalidInputError: there is no such policy.
        """
        policy = load_policy(self.policy.name, self.policy.options)
        return PlanTask(policy, self.workload, Cluster.of(self.gpus), profiles, running=self.running)
