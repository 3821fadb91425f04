"""What iGniter's paper computes per model and per GPU: batch size, lower bound of the share (Theorem 1), and the shares
that keep every resident of a GPU within half its SLO (Algorithm 2)."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from tenuto.placement.interference.igniter_model import Hardware, Load, ModelConstants, inference_time_ms
from tenuto.placement.workload import ModelSpec

Shares = tuple[int, ...]  # of the residents of a GPU in order, in units of Hardware.share_unit_pct


@dataclass
class ShareDemand:
    """One replica to place on a GPU type: its part of the rate, its batch size, and its smallest share in units.

    Filling and running the batch each take at most half the SLO (eq. 16). On the smallest share the batch takes half
    the SLO without neighbours (Theorem 1, eq. 17).
    """

    spec: ModelSpec
    rate_rps: float
    model: ModelConstants
    hardware: Hardware
    memory_mib: float = 0.0  # of the replica with this batch size, 0 when not measured
    batch_size: int = field(init=False)
    lower_units: int | None = field(init=False)  # None: no share is enough
    _loads: dict[tuple[int, int], Load] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        rate_per_ms, pcie = self.rate_rps / 1000.0, self.hardware.pcie_bytes_per_ms
        model = self.model
        batch = self.spec.slo_ms * rate_per_ms * pcie / (2.0 * (pcie + rate_per_ms * model.load_bytes))
        self.batch_size = max(1, math.ceil(batch - 1e-9))
        copies_ms = (model.load_bytes + model.feedback_bytes) * self.batch_size / pcie
        budget_ms = self.spec.slo_ms / 2.0 - copies_ms - model.delay_alone_ms - model.k5
        self.lower_units = None
        if budget_ms > 0:
            share_pct = model.work(self.batch_size) / budget_ms - model.k4
            units = max(1, math.ceil(share_pct / self.hardware.share_unit_pct - 1e-9))
            self.lower_units = units if units <= self.most_units else None

    def copy(self) -> ShareDemand:
        """Return another replica like this one."""
        return copy.copy(self)

    @property
    def most_units(self) -> int:
        """The whole GPU in units."""
        return int(self.hardware.share_max_pct / self.hardware.share_unit_pct + 1e-9)

    @property
    def budget_ms(self) -> float:
        """Half the SLO: the other half is for filling the batch."""
        return self.spec.slo_ms / 2.0

    def load(self, units: int) -> Load:
        """Return the load on a share; computed once per batch size and share."""
        key = (self.batch_size, units)
        known = self._loads.get(key)
        if known is None:
            known = self._loads[key] = Load.of(self.model, self.batch_size, units * self.hardware.share_unit_pct)
        return known


def beside_ms(demands: Sequence[ShareDemand], shares: Sequence[int]) -> list[float]:
    """Return t_inf of every resident beside all others, in ms."""
    loads = [demand.load(units) for demand, units in zip(demands, shares, strict=True)]
    return [inference_time_ms(d.model, own, loads, d.hardware) for d, own in zip(demands, loads, strict=True)]


def throughput_rps(demand: ShareDemand, units: int) -> float:
    """Return what a resident carries alone on a share: b / (t_gpu + t_feedback), as loading overlaps with computing
    (eq. 2)."""
    time_ms = beside_ms([demand], [units])[0]
    load_ms = demand.batch_size * demand.model.load_bytes / demand.hardware.pcie_bytes_per_ms
    return 1000.0 * demand.batch_size / (time_ms - load_ms)


def allocate(demands: Sequence[ShareDemand], shares: Sequence[int]) -> Shares | None:
    """Return shares that keep every resident within half its SLO, or None when the GPU is too small (Algorithm 2).

    It starts from `shares` and adds one unit to each late resident until none is late. Within a round every resident
    sees the shares changed so far.
    """
    most = demands[0].most_units
    grown = list(shares)
    loads = [demand.load(units) for demand, units in zip(demands, grown, strict=True)]
    grew = True
    while grew and sum(grown) <= most:
        grew = False
        for index, demand in enumerate(demands):
            if inference_time_ms(demand.model, loads[index], loads, demand.hardware) > demand.budget_ms:
                grown[index] += 1
                if grown[index] > most:
                    return None
                loads[index] = demand.load(grown[index])
                grew = True
    return tuple(grown) if sum(grown) <= most else None
