"""Decides whether all gpu-lets of a GPU can keep their rates beside each other, interference included."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tenuto.placement.cluster import Gpu
from tenuto.placement.interference import Resident
from tenuto.placement.policies.gpulet.disturbance import Disturbance
from tenuto.placement.policies.gpulet.duty_cycle import Asked, Cycle, find_cycle
from tenuto.placement.policies.gpulet.share_costs import ShareCosts, Turn
from tenuto.placement.policies.shared.hosting import Hosted
from tenuto.placement.program import held_mib
from tenuto.profiles.share_latency import WHOLE_GPU_PCT

ROUNDS = 12  # limit: rounds of adapting batches to slowdowns and back

Tenants = tuple[tuple[ShareCosts, float], ...]  # the models that take turns in a gpu-let, with their rates there


@dataclass(frozen=True)
class Solved:
    """The duty cycle of a gpu-let, and the neighbours' slowdown of each batch."""

    cycle: Cycle
    slowdowns: tuple[float, ...]

    def hosted(self, gpu: Gpu, share_pct: float, tenants: Tenants) -> Hosted:
        """Return the gpu-let for the plan."""
        sizes = zip(tenants, self.cycle.batch_sizes, self.slowdowns, strict=True)
        replicas = [Turn(costs, size, rate, slowdown).replica(share_pct) for (costs, rate), size, slowdown in sizes]
        whole = share_pct >= WHOLE_GPU_PCT
        return Hosted(gpu, None if whole else share_pct, replicas, round(self.cycle.duty_ms, 6))


def solve_gpu(
    gpulets: Sequence[tuple[float, Tenants]], disturbance: Disturbance | None = None
) -> tuple[Solved | None, ...] | None:
    """Return the duty cycles of a GPU's gpu-lets (None for one without tenants), or None when they do not fit.

    Slowdowns depend on the neighbours' batches and batches on the slowdowns, so both are repeated until they agree.
    When they do not within `ROUNDS`, the gpu-lets count as not fitting.
    """
    solved = [_solve(share, tenants, ()) for share, tenants in gpulets]
    if any(one is None and tenants for one, (_, tenants) in zip(solved, gpulets, strict=True)):
        return None
    occupied = [index for index, (_, tenants) in enumerate(gpulets) if tenants]
    if disturbance is not None and not disturbance.none and len(occupied) > 1:
        for _ in range(ROUNDS):
            batches = [running(gpulet, one) for gpulet, one in zip(gpulets, solved, strict=True)]
            again: list[Solved | None] = [None] * len(gpulets)
            for index in occupied:
                share, tenants = gpulets[index]
                others = [batches[i] for i in occupied if i != index]
                again[index] = _solve(share, tenants, others, disturbance)
                if again[index] is None:
                    return None
            if again == solved:
                break
            solved = again
        else:
            return None
    for (share, tenants), one in zip(gpulets, solved, strict=True):
        if one is not None and not fits_memory(share, tenants, one.cycle.batch_sizes):
            return None
    return tuple(solved)


def fits_memory(share_pct: float, tenants: Tenants, batch_sizes: Sequence[int]) -> bool:
    """Say whether the tenants fit into the gpu-let's memory, which is its share of the GPU's."""
    needs = (costs.on.needs_mib(b) for (costs, _), b in zip(tenants, batch_sizes, strict=True))
    return not tenants or held_mib(needs) <= tenants[0][0].room_mib(share_pct) + 1e-6


def _solve(
    share: float, tenants: Tenants, others: Sequence[Sequence[Resident]], disturbance: Disturbance | None = None
) -> Solved | None:
    def factor(costs: ShareCosts, size: int) -> float:
        return disturbance.factor(Resident(costs.model, size, share), others) if disturbance is not None else 1.0

    demands = []
    for costs, rate in tenants:
        table = costs.latency_ms.get(share)
        if table is None:
            return None
        if others:
            table = (0.0, *(table[size] * factor(costs, size) for size in range(1, len(table))))
        demands.append(Asked(rate, costs.slo_ms, table))
    cycle = find_cycle(demands) if demands else None
    if cycle is None:
        return None
    factors = (factor(costs, size) for (costs, _), size in zip(tenants, cycle.batch_sizes, strict=True))
    return Solved(cycle, tuple(factors))


def running(gpulet: tuple[float, Tenants], solved: Solved | None) -> list[Resident]:
    """Return the batches of a gpu-let."""
    share, tenants = gpulet
    if solved is None:
        return []
    return [Resident(costs.model, b, share) for (costs, _), b in zip(tenants, solved.cycle.batch_sizes, strict=True)]
