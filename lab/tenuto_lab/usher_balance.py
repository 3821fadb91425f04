"""Counts how full a plan makes each GPU by USHER's measure (section 3.3): the sums of Creq and Mreq of its replicas."""

from __future__ import annotations

from typing import NamedTuple

from tenuto.errors import refused
from tenuto.placement import Plan
from tenuto.placement.cluster import Cluster
from tenuto.profiles import Profiles


class GpuBalance(NamedTuple):
    """One GPU: the sums of its replicas' requirements in percent, and how many models it holds."""

    gpu: str
    cuti_pct: float
    muti_pct: float
    models: int

    @property
    def apart_pct(self) -> float:
        """|Cuti - Muti|, in points."""
        return abs(self.cuti_pct - self.muti_pct)


def balances(plan: Plan, profiles: Profiles, compute_metric: str = "achieved_occupancy_pct") -> list[GpuBalance]:
    """Return the balance of every GPU in use, by the profile's points of the planned batches on the whole GPU.

    Raises:
        InvalidInputError: a profile lacks a point, its compute metric or its memory.
    """
    found = []
    types = {gpu.id: gpu.type for gpu in plan.gpus}
    for gpu, gpulets in plan.by_gpu().items():
        replicas = [replica for gpulet in gpulets for replica in gpulet.models]
        if not replicas:
            continue
        size_mib = Cluster.parse(f"{types[gpu]}:1").gpus[0].memory_mib
        cuti, muti = 0.0, 0.0
        for replica in replicas:
            row = profiles.get(plan.model(replica.name).profile_row, types[gpu])
            point = row.point(replica.batch_size) if replica.batch_size in row.batch_sizes() else None
            if point is None or point.memory_mib is None or compute_metric not in point.metrics:
                rule = f"batch {replica.batch_size} on {types[gpu]} has no memory or no {compute_metric}"
                raise refused(f"profile of {replica.name}", None, rule, "Give a profile that has both.")
            cuti += point.metrics[compute_metric]
            muti += 100.0 * point.memory_mib / size_mib
        found.append(GpuBalance(gpu, cuti, muti, len({replica.name for replica in replicas})))
    return found
