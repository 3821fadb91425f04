"""The MILP with weighted SM utilisation as the compute requirement."""

from __future__ import annotations

from tenuto.placement.policies.milp.milp import MilpPolicy
from tenuto.placement.policies.shared.requirements import MEMORY

__all__ = ["WsmMilp"]


class WsmMilp(MilpPolicy):
    """Creq = time-weighted SM utilisation: models whose kernels leave SMs idle share a GPU.

    Invariant and options are those of `MilpPolicy`.
    """

    name = "wsm-milp"
    summary = "highest goodput by integer programming; compute need = weighted SM utilisation"
    source = "Elvinger's thesis (ETH 2024), section 5.4.3 and chapter 6"

    def __init__(
        self, *, compute_metric: str = "wavg_sm_util_pct", memory_metric: str = MEMORY,
        max_replicas: int | None = None, one_batch_size: bool = True, time_limit_s: float = 10.0,
        pattern_limit: int = 4000, shares: bool = False,
    ) -> None:
        super().__init__(
            compute_metric=compute_metric, memory_metric=memory_metric, max_replicas=max_replicas,
            one_batch_size=one_batch_size, time_limit_s=time_limit_s, pattern_limit=pattern_limit, shares=shares,
        )
