"""The packing that iGniter and the baselines of its paper share; they differ in which GPU they choose."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from tenuto.errors import InvalidInputError, Problem, raise_if_any
from tenuto.placement.cluster import Cluster, Gpu
from tenuto.placement.interference.igniter import Hardware, ModelConstants
from tenuto.placement.plan import Expected, ExpectedModel, Gpulet, Plan, PolicyUsed, Replica
from tenuto.placement.policies.igniter.shares import Demand, Shares, allocate, beside_ms
from tenuto.placement.policies.shared.gpu_pool import GpuPool, gpulet_id, planned_gpus
from tenuto.placement.workload import ModelSpec, Workload, profile_of
from tenuto.profiles import LatencyTable, ModelProfile, Profiles

__all__ = ["OpenGpu", "Packed", "Try", "demands_of", "igniter_plan", "memory_mib", "pack", "pack_cluster"]

MOST_REPLICAS = 1024
Try = Callable[["OpenGpu", Demand], Shares | None]


@dataclass
class OpenGpu:
    """A GPU in use with its residents and their shares in units."""

    gpu: Gpu
    demands: list[Demand] = field(default_factory=list)
    shares: Shares = ()

    @property
    def memory_mib(self) -> float:
        """What the residents need together."""
        return sum(demand.memory_mib for demand in self.demands)


@dataclass
class Packed:
    """A finished packing; `refused` says by model why not all of its replicas were placed."""

    gpus: list[OpenGpu]
    refused: dict[str, str]


def demands_of(spec: ModelSpec, gpu_type: str, profiles: Profiles) -> tuple[list[Demand], str | None]:
    """Return the replicas a model needs on a GPU type, and why they do not carry all of its rate, if so.

    They are as few as possible and of equal rate. None when no number will do, and never more than `MOST_REPLICAS`.

    Raises:
        InvalidInputError: the profile has no coefficients of iGniter's model.
    """
    profile = profile_of(spec, gpu_type, profiles)
    model = ModelConstants.of(profile.coefficients, spec.profile_row)
    hardware = Hardware.of(profiles.hardware(gpu_type), gpu_type)

    def one_of(count: int) -> Demand:
        return Demand(spec, spec.rate_rps / count, model, hardware)

    def fits(demand: Demand) -> bool:
        return demand.lower_units is not None and allocate([demand], [demand.lower_units]) is not None

    high = 1
    while not fits(one_of(high)):
        if one_of(high).batch_size == 1:
            return [], f"half its SLO of {spec.slo_ms:g} ms cannot be met even alone on a {gpu_type}"
        high *= 2
    # Fewer requests mean smaller batches, so the more replicas, the easier: the smallest number is found by halving.
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(one_of(middle)) else (middle, high)
    demand = one_of(high)
    demand.memory_mib = memory_mib(profile, demand.batch_size)
    few = f"it needs {high:,} replicas, more than the {MOST_REPLICAS:,} that are tried"
    return [replace(demand) for _ in range(min(high, MOST_REPLICAS))], few if high > MOST_REPLICAS else None


def memory_mib(profile: ModelProfile, batch_size: int) -> float:
    """Return the memory of a replica in MiB: that of the largest measured batch for larger ones, 0 if never measured.

    iGniter's latency model reaches beyond the measured batches, the profile's memory does not.
    """
    largest = max((point.batch_size for point in profile.points if point.memory_mib is not None), default=0)
    return profile.memory_mib(min(batch_size, largest)) or 0.0 if largest else 0.0


def pack_cluster(workload: Workload, cluster: Cluster, profiles: Profiles, attempt: Try, *, first: bool) -> Packed:
    """Place a workload on GPUs of the types that serve most and then cost least; see `pack` for the arguments.

    The paper provisions one GPU type, the one that serves all at the lowest price. Here every type is tried as the
    first one, and what it cannot serve (its SLOs are too tight for it, or a fixed cluster has no more of it) goes to
    the others, the cheapest first. The best of these plans is taken. GPUs without a price count as 1.

    Raises:
        InvalidInputError: a model has iGniter's coefficients on no GPU type of the cluster.
    """
    _check_coefficients(workload, cluster, profiles)
    prices = {gpu.type: 1.0 if gpu.price_per_hour is None else gpu.price_per_hour for gpu in cluster.gpus}
    by_price = sorted(cluster.gpu_types, key=lambda kind: prices[kind])
    best: tuple[float, float, Packed] | None = None
    for start in cluster.gpu_types:
        kinds = [start, *(kind for kind in by_price if kind != start)]
        packed, lost_rps = _pack_types(workload, kinds, GpuPool(cluster), profiles, attempt, first=first)
        cost = sum(prices[gpu.gpu.type] for gpu in packed.gpus)
        if best is None or (round(lost_rps, 6), cost) < best[:2]:
            best = (round(lost_rps, 6), cost, packed)
    if best is None:
        return Packed([], {spec.name: "the cluster has no GPU" for spec in workload.models})
    return best[2]


def _pack_types(
    workload: Workload, kinds: Sequence[str], pool: GpuPool, profiles: Profiles, attempt: Try, *, first: bool
) -> tuple[Packed, float]:
    """Place a workload on one GPU type after the other; return the packing and the rate that no replica carries."""
    left = {spec.name: spec for spec in workload.models}
    opened: list[OpenGpu] = []
    reasons: dict[str, list[str]] = {spec.name: [] for spec in workload.models}
    for kind in kinds:
        if left:
            packed = pack(list(left.values()), pool, profiles, kind, attempt, first=first)
            opened += packed.gpus
            for name, reason in packed.refused.items():
                reasons[name].append(f"{kind}: {reason}" if len(kinds) > 1 else reason)
            left = _left(left, packed)
    refused = {name: "; ".join(reasons[name]) for name in left}
    return Packed(opened, refused), sum(spec.rate_rps for spec in left.values())


def _left(asked: Mapping[str, ModelSpec], packed: Packed) -> dict[str, ModelSpec]:
    """Return the refused models with the rate that no replica carries yet."""
    carried: dict[str, float] = {}
    for gpu in packed.gpus:
        for demand in gpu.demands:
            carried[demand.spec.name] = carried.get(demand.spec.name, 0.0) + demand.rate_rps
    rates = {name: asked[name].rate_rps - carried.get(name, 0.0) for name in packed.refused}
    return {name: asked[name].model_copy(update={"rate_rps": rate}) for name, rate in rates.items() if rate > 1e-9}


def _check_coefficients(workload: Workload, cluster: Cluster, profiles: Profiles) -> None:
    problems: list[Problem] = []
    for spec in workload.models:
        missing: list[Problem] = []
        for kind in cluster.gpu_types:
            try:
                ModelConstants.of(profile_of(spec, kind, profiles).coefficients, spec.profile_row)
                Hardware.of(profiles.hardware(kind), kind)
                break
            except InvalidInputError as error:
                missing += error.problems
        else:
            problems += [problem for problem in missing if problem not in problems]
    raise_if_any(problems)


def pack(
    specs: Sequence[ModelSpec],
    pool: GpuPool,
    profiles: Profiles,
    gpu_type: str,
    attempt: Try,
    *,
    first: bool,
) -> Packed:
    """Place every replica, largest lower bound first, on GPUs of one type (Algorithm 1).

    Args:
        attempt: returns the shares of a GPU with one more resident, the new one last, or None when it does not fit.
        first: take the first GPU it fits; otherwise the one where the shares of all grow least beyond the lower bound.
    """
    refused: dict[str, str] = {}
    queue: list[Demand] = []
    for spec in specs:
        try:
            demands, reason = demands_of(spec, gpu_type, profiles)
        except InvalidInputError:
            refused[spec.name] = "it was not profiled with iGniter's coefficients there"
            continue
        queue += demands
        if reason is not None:
            refused[spec.name] = reason
    queue.sort(key=lambda demand: -(demand.lower_units or 0))
    opened: list[OpenGpu] = []
    for demand in queue:
        lower = demand.lower_units or 0
        best: tuple[int, OpenGpu, Shares] | None = None
        for gpu in opened:
            before = sum(gpu.shares)
            if before + lower > demand.most_units or gpu.memory_mib + demand.memory_mib > gpu.gpu.memory_mib:
                continue
            shares = attempt(gpu, demand)
            if shares is not None and (best is None or sum(shares) - before - lower < best[0]):
                best = (sum(shares) - before - lower, gpu, shares)
                if first or best[0] == 0:
                    break
        if best is None:
            gpu_or_none = pool.take(gpu_type) if demand.memory_mib <= pool.types[gpu_type].memory_mib else None
            if gpu_or_none is None:
                refused[demand.spec.name] = "no GPU has the share and the memory it needs beside the models before it"
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
    name: str,
    workload: Workload,
    cluster: Cluster,
    packed: Packed,
    notes: Sequence[str] = (),
) -> Plan:
    """Return the plan with the latencies that iGniter's model expects."""
    gpulets: list[Gpulet] = []
    rates: dict[str, float] = {}
    slowest: dict[str, float] = {}
    for opened in packed.gpus:
        times = beside_ms(opened.demands, opened.shares)
        for index, (demand, units, time_ms) in enumerate(zip(opened.demands, opened.shares, times, strict=True)):
            share = units * demand.hardware.share_unit_pct
            gpulets.append(
                Gpulet(
                    id=gpulet_id(opened.gpu.id, index),
                    gpu=opened.gpu.id,
                    share_pct=share,
                    models=(_replica(demand, share, time_ms),),
                )
            )
            model = demand.spec.name
            rates[model] = rates.get(model, 0.0) + demand.rate_rps
            slowest[model] = max(slowest.get(model, 0.0), round(time_ms, 6))
    names = [spec.name for spec in workload.models]
    partly = [
        f"{n}: {rates[n]:.4g} of {workload[n].rate_rps:g} rps carried; {packed.refused[n]}"
        for n in names
        if n in rates and n in packed.refused
    ]
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
        name=demand.spec.name,
        batch_size=demand.batch_size,
        rate_rps=round(demand.rate_rps, 6),
        latency_ms=round(beside, 6),
        slowdown=round(max(1.0, beside / points[demand.batch_size]), 6),
        memory_mib=demand.memory_mib or None,
        latency=LatencyTable(points=points),
    )
