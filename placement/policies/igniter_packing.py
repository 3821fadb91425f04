"""The packing that iGniter and the baselines of its paper share; they differ in which GPU they choose."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from tenuto.errors import InvalidInputError
from tenuto.placement.cluster import Cluster, Gpu
from tenuto.placement.interference.igniter import Hardware, ModelConstants
from tenuto.placement.plan import Expected, ExpectedModel, Gpulet, Plan, PolicyUsed, Replica
from tenuto.placement.policies.gpu_pool import GpuPool, gpulet_id, planned_gpus
from tenuto.placement.policies.igniter_shares import Demand, Shares, allocate, beside_ms
from tenuto.placement.workload import ModelSpec, Workload, profile_of
from tenuto.profiles import LatencyTable, Profiles

__all__ = ["OpenGpu", "Packed", "Try", "demands_of", "igniter_plan", "pack"]

MOST_REPLICAS = 1024
Try = Callable[["OpenGpu", Demand], Shares | None]


@dataclass
class OpenGpu:
    """A GPU in use with its residents and their shares in units."""

    gpu: Gpu
    demands: list[Demand] = field(default_factory=list)
    shares: Shares = ()


@dataclass
class Packed:
    """A finished packing; `refused` says by model why not all of its replicas were placed."""

    gpus: list[OpenGpu]
    refused: dict[str, str]


def demands_of(spec: ModelSpec, gpu_type: str, profiles: Profiles) -> list[Demand]:
    """Return the replicas a model needs on a GPU type: as few as possible, of equal rate; none when no number will do.

    Raises:
        InvalidInputError: the profile has no coefficients of iGniter's model.
    """
    model = ModelConstants.of(profile_of(spec, gpu_type, profiles).coefficients, spec.profile_row)
    hardware = Hardware.of(profiles.hardware(gpu_type), gpu_type)
    for count in range(1, MOST_REPLICAS + 1):
        demand = Demand(spec, spec.rate_rps / count, model, hardware)
        if demand.lower_units is not None and allocate([demand], [demand.lower_units]) is not None:
            return [demand] + [Demand(spec, demand.rate_rps, model, hardware) for _ in range(count - 1)]
        if demand.batch_size == 1:
            break
    return []


def pack(
    workload: Workload, cluster: Cluster, profiles: Profiles, gpu_type: str, attempt: Try, *, first: bool,
) -> Packed:
    """Place every replica, largest lower bound first, on GPUs of one type (Algorithm 1).

    Args:
        attempt: returns the shares of a GPU with one more resident, the new one last, or None when it does not fit.
        first: take the first GPU it fits; otherwise the one where the shares of all grow least beyond the lower bound.
    """
    refused: dict[str, str] = {}
    queue: list[Demand] = []
    for spec in workload.models:
        demands = demands_of(spec, gpu_type, profiles)
        queue += demands
        if not demands:
            refused[spec.name] = f"half its SLO of {spec.slo_ms:g} ms cannot be met even alone on a {gpu_type}"
    queue.sort(key=lambda demand: -(demand.lower_units or 0))
    pool, opened = GpuPool(cluster), list[OpenGpu]()
    for demand in queue:
        lower = demand.lower_units or 0
        best: tuple[int, OpenGpu, Shares] | None = None
        for gpu in opened:
            before = sum(gpu.shares)
            if before + lower > demand.most_units:
                continue
            shares = attempt(gpu, demand)
            if shares is not None and (best is None or sum(shares) - before - lower < best[0]):
                best = (sum(shares) - before - lower, gpu, shares)
                if first or best[0] == 0:
                    break
        if best is None:
            gpu_or_none = pool.take(gpu_type)
            if gpu_or_none is None:
                refused[demand.spec.name] = "no GPU has the share it needs beside the models placed before it"
                continue
            fresh = OpenGpu(gpu_or_none)
            alone = attempt(fresh, demand)
            opened.append(fresh)
            best = (0, fresh, alone or (demand.most_units,))
        _, chosen, shares_now = best
        chosen.shares = shares_now
        chosen.demands.append(demand)
    return Packed(opened, refused)


def igniter_plan(
    name: str, workload: Workload, cluster: Cluster, packed: Packed, notes: Sequence[str] = (),
) -> Plan:
    """Return the plan with the latencies that iGniter's model expects."""
    gpulets: list[Gpulet] = []
    rates: dict[str, float] = {}
    slowest: dict[str, float] = {}
    for opened in packed.gpus:
        times = beside_ms(opened.demands, opened.shares)
        for index, (demand, units, time_ms) in enumerate(zip(opened.demands, opened.shares, times, strict=True)):
            share = units * demand.hardware.share_unit_pct
            gpulets.append(Gpulet(id=gpulet_id(opened.gpu.id, index), gpu=opened.gpu.id, share_pct=share,
                                  models=(_replica(demand, share, time_ms),)))
            model = demand.spec.name
            rates[model] = rates.get(model, 0.0) + demand.rate_rps
            slowest[model] = max(slowest.get(model, 0.0), round(time_ms, 6))
    names = [spec.name for spec in workload.models]
    partly = [f"{n}: {rates[n]:.4g} of {workload[n].rate_rps:g} rps carried; {packed.refused[n]}"
              for n in names if n in rates and n in packed.refused]
    models = {n: ExpectedModel(goodput_rps=round(rates[n], 6), latency_ms=slowest[n]) for n in names if n in rates}
    return Plan(
        policy=PolicyUsed(name=name),
        gpus=planned_gpus(cluster, (opened.gpu for opened in packed.gpus)),
        gpulets=tuple(gpulets),
        expected=Expected(goodput_rps=round(sum(m.goodput_rps for m in models.values()), 6), models=models),
        unserved=tuple(n for n in names if n not in rates),
        unserved_reasons={n: packed.refused.get(n, "not placed") for n in names if n not in rates},
        notes=(*notes, *partly),
    )


def _replica(demand: Demand, share_pct: float, beside: float) -> Replica:
    points = {
        size: round(demand.model.alone_ms(size, share_pct, demand.hardware), 6)
        for size in range(1, demand.batch_size + 1)
    }
    return Replica(
        name=demand.spec.name, batch_size=demand.batch_size, rate_rps=round(demand.rate_rps, 6),
        latency_ms=round(beside, 6), slowdown=round(max(1.0, beside / points[demand.batch_size]), 6),
        latency=LatencyTable(points=points),
    )


def best_type(cluster: Cluster, pack_on: Callable[[str], Packed], rates: Mapping[str, float]) -> Packed:
    """Return the packing of the GPU type that serves most and, among equals, costs least (GPUs without price count 1).

    Raises:
        InvalidInputError: no type of the cluster has iGniter's coefficients for all models.
    """
    prices = {gpu.type: gpu.price_per_hour if gpu.price_per_hour is not None else 1.0 for gpu in cluster.gpus}
    found: list[tuple[float, float, Packed]] = []
    errors = []
    for kind in cluster.gpu_types:
        try:
            packed = pack_on(kind)
        except InvalidInputError as error:
            errors.append(error)
            continue
        lost = sum(rates.values()) - sum(d.rate_rps for gpu in packed.gpus for d in gpu.demands)
        found.append((round(lost, 6), prices[kind] * len(packed.gpus), packed))
    if not found and errors:
        raise errors[0]
    return min(found, key=lambda item: item[:2])[2] if found else Packed([], {})
