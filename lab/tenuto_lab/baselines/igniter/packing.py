"""The packing shared by iGniter and the baselines of its paper; they differ in the GPU they choose."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from tenuto.errors import InvalidInputError, Problem, raise_if_any
from tenuto.placement.cluster import Cluster, Gpu
from tenuto.placement.costs import context_mib_of, memory_of
from tenuto.placement.interference.igniter_model import Hardware, ModelConstants
from tenuto.placement.plan import Plan
from tenuto.placement.policies.shared.gpu_pool import GpuPool
from tenuto.placement.policies.shared.hosting import Hosted, hosting_plan
from tenuto.placement.program import Replica
from tenuto.placement.workload import ModelSpec, Workload, profile_of
from tenuto.profiles import Profiles
from tenuto_lab.baselines.igniter.shares import ShareDemand, Shares, allocate, beside_ms, throughput_rps

MOST_REPLICAS = 1024  # limit: of a model
# paper: the code of iGniter; of a workload that fills GPUs by itself, and the part of what they carry that counts
LARGEST_WHOLE_BATCH, COUNTED = 32, 0.9
Try = Callable[["OpenGpu", ShareDemand], Shares | None]


@dataclass
class OpenGpu:
    """A GPU in use with its residents and their shares in units."""

    gpu: Gpu
    demands: list[ShareDemand] = field(default_factory=list)
    shares: Shares = ()

    @property
    def memory_mib(self) -> float:
        """The residents' memory together."""
        return sum(demand.memory_mib for demand in self.demands)


@dataclass
class Packed:
    """A finished packing; `refused` says why not all replicas of a model were placed."""

    gpus: list[OpenGpu]
    refused: dict[str, str]


def demands_of(spec: ModelSpec, gpu_type: str, profiles: Profiles) -> tuple[list[ShareDemand], str | None]:
    """Return the replicas a model needs on a GPU type, and why they do not carry all of its rate, if so.

    A model that needs more than one GPU gets whole ones at the largest batch up to 32 within half its SLO. Each counts
    0.9 of what it carries. The rest is planned like any other model (the authors' code; the paper does not say). There
    are at most `MOST_REPLICAS`, and none when not even one GPU will do.

    Raises:
        InvalidInputError: the profile has no coefficients of iGniter's model.
    """
    profile = profile_of(spec, gpu_type, profiles)
    model = ModelConstants.of(profile.coefficients, spec.profile_row)
    hardware = Hardware.of(profiles.hardware(gpu_type), gpu_type)
    context_mib = context_mib_of(gpu_type, profiles)

    def one_of(rate_rps: float) -> ShareDemand:
        demand = ShareDemand(spec, rate_rps, model, hardware)
        demand.memory_mib = (memory_of(profile, demand.batch_size) or 0.0) + context_mib
        return demand

    def fits(demand: ShareDemand) -> bool:
        return demand.lower_units is not None and allocate([demand], [demand.lower_units]) is not None

    rest = one_of(spec.rate_rps)
    if fits(rest):
        return [rest], None
    whole = one_of(spec.rate_rps)
    whole.lower_units = whole.most_units
    for size in range(LARGEST_WHOLE_BATCH, 0, -1):
        whole.batch_size = size
        if beside_ms([whole], [whole.most_units])[0] <= whole.budget_ms:
            break
    else:
        return [], f"SLO below batch 1: half its SLO of {spec.slo_ms:g} ms cannot be met even alone on a {gpu_type}"
    whole.memory_mib = (memory_of(profile, whole.batch_size) or 0.0) + context_mib
    whole.rate_rps = COUNTED * throughput_rps(whole, whole.most_units)
    count, left = 0, spec.rate_rps
    while left > 1e-9 and count < MOST_REPLICAS:
        rest = one_of(left)
        if count and fits(rest):
            return [*(whole.copy() for _ in range(count)), rest], None
        count, left = count + 1, left - whole.rate_rps
    wholes = [whole.copy() for _ in range(count)]
    if left > 1e-9:
        return wholes, f"it needs more than {MOST_REPLICAS:,} replicas, the most that are tried"
    wholes[-1].rate_rps += left
    return wholes, None


def pack_cluster(workload: Workload, cluster: Cluster, profiles: Profiles, attempt: Try, *, first: bool) -> Packed:
    """Place a workload on the GPU types that serve most and then cost least; see `pack` for the arguments.

    The paper uses one GPU type, the one that serves everything at the lowest price. Here every type is tried as the
    first one. What it cannot serve (SLOs too tight, or no GPUs left) goes to the others, the cheapest first. The best
    of these plans is taken.

    Raises:
        InvalidInputError: a model has iGniter's coefficients on no GPU type of the cluster.
    """
    _check_coefficients(workload.models, cluster, profiles)
    prices = cluster.prices
    by_price = sorted(prices, key=prices.__getitem__)
    best: tuple[float, float, Packed] | None = None
    for start in prices:
        kinds = [start, *(kind for kind in by_price if kind != start)]
        packed, lost_rps = _pack_types(workload.models, kinds, GpuPool(cluster), profiles, attempt, first=first)
        cost = sum(prices[gpu.gpu.type] for gpu in packed.gpus)
        if best is None or (round(lost_rps, 6), cost) < best[:2]:
            best = (round(lost_rps, 6), cost, packed)
    if best is None:
        return Packed([], {spec.name: "the cluster has no GPU" for spec in workload.models})
    return best[2]


def _pack_types(
    specs: Sequence[ModelSpec], kinds: Sequence[str], pool: GpuPool, profiles: Profiles, attempt: Try, *, first: bool
) -> tuple[Packed, float]:
    """Place models on one GPU type after the other; return the packing and the rate without a replica."""
    left = {spec.name: spec for spec in specs}
    gpus: list[OpenGpu] = []
    reasons: dict[str, str] = {}
    for kind in kinds:
        if left:
            packed = pack(list(left.values()), pool, profiles, kind, attempt, first=first)
            gpus += packed.gpus
            reasons |= {name: reason for name, reason in packed.refused.items() if name not in reasons}
            left = _left(left, packed)
    return Packed(gpus, {name: reasons[name] for name in left}), sum(spec.rate_rps for spec in left.values())


def _left(specs: Mapping[str, ModelSpec], packed: Packed) -> dict[str, ModelSpec]:
    """Return the refused models with the rate that has no replica yet."""
    carried: dict[str, float] = {}
    for gpu in packed.gpus:
        for demand in gpu.demands:
            carried[demand.spec.name] = carried.get(demand.spec.name, 0.0) + demand.rate_rps
    rates = {name: specs[name].rate_rps - carried.get(name, 0.0) for name in packed.refused}
    return {name: specs[name].model_copy(update={"rate_rps": rate}) for name, rate in rates.items() if rate > 1e-9}


def _check_coefficients(specs: Sequence[ModelSpec], cluster: Cluster, profiles: Profiles) -> None:
    problems: list[Problem] = []
    for spec in specs:
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
    specs: Sequence[ModelSpec], pool: GpuPool, profiles: Profiles, gpu_type: str, attempt: Try, *, first: bool
) -> Packed:
    """Place every replica, largest lower bound first, on GPUs of one type (Algorithm 1).

    Args:
        specs: the models to place.
        pool: opens GPUs.
        profiles: of the models.
        gpu_type: of the GPUs.
        attempt: returns the shares of a GPU with one more resident, the new one last, or None when it does not fit.
        first: take the first GPU that fits; otherwise the one where all shares grow least beyond the lower bound.
    """
    refused: dict[str, str] = {}
    queue: list[ShareDemand] = []
    for spec in specs:
        try:
            demands, reason = demands_of(spec, gpu_type, profiles)
        except InvalidInputError:
            refused[spec.name] = f"it was not profiled with iGniter's coefficients on a {gpu_type}"
            continue
        queue += demands
        if reason is not None:
            refused[spec.name] = reason
    queue.sort(key=lambda demand: -(demand.lower_units or 0))
    gpus: list[OpenGpu] = []
    for demand in queue:
        lower = demand.lower_units or 0
        best: tuple[int, OpenGpu, Shares] | None = None
        for gpu in gpus:
            before = sum(gpu.shares)
            if before + lower > demand.most_units or gpu.memory_mib + demand.memory_mib > gpu.gpu.memory_mib:
                continue
            grown = attempt(gpu, demand)
            if grown is not None and (best is None or sum(grown) - before - lower < best[0]):
                best = (sum(grown) - before - lower, gpu, grown)
                if first or best[0] == 0:
                    break
        if best is None:
            gpu_or_none = pool.next_gpu(gpu_type) if demand.memory_mib <= pool.types[gpu_type].memory_mib else None
            if gpu_or_none is None:
                reason = f"no GPU time left: no {gpu_type} has {lower * demand.hardware.share_unit_pct:g} % for it"
                if demand.memory_mib > pool.types[gpu_type].memory_mib:
                    reason = f"memory: its replica needs {demand.memory_mib:.0f} MiB with its process's context"
                refused[demand.spec.name] = reason
                continue
            fresh = OpenGpu(gpu_or_none)
            gpus.append(fresh)
            best = (0, fresh, attempt(fresh, demand) or (demand.most_units,))
        _, chosen, shares = best
        chosen.shares = shares
        chosen.demands.append(demand)
    return Packed(gpus, refused)


def igniter_plan(
    name: str,
    workload: Workload,
    cluster: Cluster,
    packed: Packed,
    notes: Sequence[str] = (),
    *,
    overcommits: bool = False,
) -> Plan:
    """Return the plan with iGniter's expected latencies."""
    hosted = []
    for opened in packed.gpus:
        times = beside_ms(opened.demands, opened.shares)
        for demand, units, time_ms in zip(opened.demands, opened.shares, times, strict=True):
            replica = Replica.believed(demand.spec.name, demand.batch_size, demand.rate_rps, time_ms)
            hosted.append(Hosted(opened.gpu, units * demand.hardware.share_unit_pct, [replica]))
    return hosting_plan(name, workload, cluster, hosted, packed.refused, notes, overcommits=overcommits)
