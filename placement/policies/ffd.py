"""First-fit decreasing on the needed share: the plain baseline every other policy must beat."""

from __future__ import annotations

from dataclasses import dataclass

from tenuto.errors import MissingProfileError
from tenuto.placement.cluster import Cluster, Gpu
from tenuto.placement.plan import Gpulet, Plan, PlannedGpu, PolicyUsed, Replica
from tenuto.placement.policy import Policy
from tenuto.placement.workload import ModelSpec, Workload, profile_of
from tenuto.profiles import ModelProfile, Profiles

__all__ = ["FirstFitDecreasing"]


@dataclass(frozen=True)
class _Need:
    """A gpu-let that one model needs: `share_pct` of a GPU, running batches of `batch_size`, carrying `rate_rps`."""

    spec: ModelSpec
    share_pct: float
    batch_size: int
    rate_rps: float
    memory_mib: float


class FirstFitDecreasing(Policy):
    """Gives each model the smallest share that carries its rate, largest need first, on the first GPU with room.

    Batch size: the smallest that carries the rate with l(b) <= SLO/2, so that one batch can form while another runs.
    A model that needs more than one GPU is split into whole-GPU replicas and a rest. Interference is not considered.
    The candidate shares are the measured ones below 100 % where a profile has several; else the busy fraction of the GPU
    rounded up to whole percent, which assumes that a model's latency on a share of s % is l(b)/(s/100).
    """

    name = "ffd"
    summary = "first-fit decreasing on the needed share; smallest batch that carries the rate within SLO/2"
    source = "textbook bin packing; batch rule as in Nexus (SOSP 2019, section 4)"

    def place(self, workload: Workload, cluster: Cluster, profiles: Profiles) -> Plan:
        """Return the plan; deterministic, ties broken by the order of the workload."""
        raise NotImplementedError
