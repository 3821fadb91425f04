"""The MILP with achieved occupancy as the compute requirement."""

from __future__ import annotations

from tenuto.placement.policies.milp.milp import MilpPolicy
from tenuto.placement.policies.shared.requirements import MEMORY

__all__ = ["AoMilp"]


class AoMilp(MilpPolicy):
    """Creq = achieved occupancy, the largest over sets of overlapping kernels: few models share a GPU.

    Invariant and options are those of `MilpPolicy`.
    """

    name = "ao-milp"
    summary = "highest goodput by integer programming; compute need = achieved occupancy"
    source = "Elvinger's thesis (ETH 2024), section 5.4.3 and chapter 6"

    def __init__(
        self, *, compute_metric: str = "achieved_occupancy_pct", memory_metric: str = MEMORY,
        max_replicas: int | None = None, one_batch_size: bool = True, time_limit_s: float = 10.0,
        pattern_limit: int = 4000, shares: bool = False,
    ) -> None:
        super().__init__(
            compute_metric=compute_metric, memory_metric=memory_metric, max_replicas=max_replicas,
            one_batch_size=one_batch_size, time_limit_s=time_limit_s, pattern_limit=pattern_limit, shares=shares,
        )
