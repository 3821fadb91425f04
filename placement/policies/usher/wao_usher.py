"""USHER with the time-weighted mean of achieved occupancy as the compute requirement."""

from __future__ import annotations

from tenuto.placement.policies.shared.requirements import MEMORY
from tenuto.placement.policies.usher.usher import Usher

__all__ = ["WaoUsher"]


class WaoUsher(Usher):
    """USHER as it is, with Creq = weighted achieved occupancy: smaller needs, denser packing (thesis, chapter 6).

    Invariant and options are those of `Usher`.
    """

    name = "wao-usher"
    summary = "usher with time-weighted achieved occupancy as compute need: packs more densely"
    source = "Elvinger's thesis (ETH 2024), chapter 6; USHER (OSDI 2024)"

    def __init__(
        self, *, compute_metric: str = "wavg_ach_occ_pct", memory_metric: str = MEMORY, heavy_ratio: float = 1.2,
        max_group_size: int = 4, groups: str = "", shares: bool = True, grouping: bool = True, replication: bool = True,
        batch_choice: bool = True, balance: bool = True,
    ) -> None:
        super().__init__(
            compute_metric=compute_metric, memory_metric=memory_metric, heavy_ratio=heavy_ratio,
            max_group_size=max_group_size, groups=groups, shares=shares, grouping=grouping, replication=replication,
            batch_choice=batch_choice, balance=balance,
        )
