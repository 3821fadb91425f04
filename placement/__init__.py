"""How a plan is made: the workload, the cluster, the plan, and one folder per policy."""

from tenuto.placement.arrivals.arrival import Arrival
from tenuto.placement.cluster import Cluster, Gpu, GpuGroup, Node
from tenuto.placement.plan import Expected, ExpectedModel, Plan, PlannedGpu, PolicyUsed
from tenuto.placement.planner import solve
from tenuto.placement.policy import Policy, load_policy, policy_names
from tenuto.placement.program import Gpulet, Replica
from tenuto.placement.workload import ModelSpec, Objective, Workload, profile_of

__all__ = [
    "Arrival",
    "Cluster",
    "Expected",
    "ExpectedModel",
    "Gpu",
    "GpuGroup",
    "Gpulet",
    "ModelSpec",
    "Node",
    "Objective",
    "Plan",
    "PlannedGpu",
    "Policy",
    "PolicyUsed",
    "Replica",
    "Workload",
    "load_policy",
    "policy_names",
    "profile_of",
    "solve",
]
