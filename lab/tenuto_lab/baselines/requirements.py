"""The requirements of a replica in percent of a GPU, for USHER and the MILPs: compute (Creq) and memory (Mreq).

They are by batch size. Only batches measured on the whole GPU count. A batch whose metric the profile lacks is left
out, not guessed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tenuto.errors import Problem, raise_if_any
from tenuto.placement.cluster import Cluster, Gpu
from tenuto.placement.costs import ModelOnGpu, context_mib_of, costs_of
from tenuto.placement.policies.shared.hosting import Hosted
from tenuto.placement.program import Replica
from tenuto.placement.workload import Workload
from tenuto.profiles import Profiles
from tenuto.profiles.share_latency import WHOLE_GPU_PCT

MEMORY = "memory"  # name of the memory requirement; any profile metric may replace it


@dataclass(frozen=True)
class Requirement:
    """One replica of a model with one batch size on one GPU type, alone on the GPU."""

    batch_size: int
    compute_pct: float
    memory_pct: float
    throughput_rps: float
    latency_ms: float
    memory_mib: float | None
    resident_pct: float  # its bytes in percent of the GPU's memory; 0 when not measured

    @property
    def total_pct(self) -> float:
        """Rreq = Creq + Mreq (USHER, section 3.3)."""
        return self.compute_pct + self.memory_pct

    def held_pct(self, context_pct: float) -> float:
        """Return the memory a replica takes: its requirement, or its bytes plus its process's context."""
        return max(self.memory_pct, self.resident_pct + context_pct)


@dataclass(frozen=True)
class Requirements:
    """A model on one GPU type: `within_slo` are the usable batches, `measured` all, for averages."""

    within_slo: tuple[Requirement, ...]
    measured: tuple[Requirement, ...]
    why_not: str  # why `within_slo` is empty


def requirements_of(
    workload: Workload, cluster: Cluster, profiles: Profiles, compute_metric: str, memory_metric: str
) -> dict[str, dict[str, Requirements]]:
    """Return the requirements of every model on every GPU type of the cluster where it was measured.

    Raises:
        InvalidInputError: a model's profile has the metric on none of the types; one problem per model.
    """
    requirements: dict[str, dict[str, Requirements]] = {}
    problems: list[Problem] = []
    measured: dict[int, tuple[Requirement, ...]] = {}
    for index, (name, by_type) in enumerate(costs_of(workload, cluster, profiles).items()):
        requirements[name] = {}
        for kind, on in by_type.items():
            if id(on.profile) not in measured:
                measured[id(on.profile)] = tuple(_measured(on, compute_metric, memory_metric))
            requirements[name][kind] = _requirements(on, measured[id(on.profile)])
        if by_type and not any(r.measured for r in requirements[name].values()):
            rule = f"no whole-GPU measurement has both '{compute_metric}' and '{memory_metric}'"
            cure = (
                f"This policy needs both. Metrics there: {_known_metrics(by_type.values())}. "
                "Choose others with --option, another profile with --profiles, or another policy."
            )
            problems.append(Problem(f"models.{index}.profile", workload.models[index].profile_row, rule, cure))
    raise_if_any(problems)
    return requirements


def _known_metrics(costs: Iterable[ModelOnGpu]) -> str:
    points = [point for on in costs for point in on.profile.points if point.share_pct == WHOLE_GPU_PCT]
    names = {name for point in points for name in point.metrics}
    names |= {MEMORY for point in points if point.memory_mib is not None}
    return ", ".join(sorted(names)) or "none"


def _measured(on: ModelOnGpu, compute_metric: str, memory_metric: str) -> Iterable[Requirement]:
    profile = on.profile
    for size in profile.batch_sizes():
        compute, memory = _percent(on, size, compute_metric), _percent(on, size, memory_metric)
        if compute is not None and memory is not None and compute > 0:
            latency_ms, rate_rps = profile.latency_ms(size), profile.throughput_rps(size)
            memory_mib = on.memory_mib(size)
            resident_pct = WHOLE_GPU_PCT * (memory_mib or 0.0) / on.gpu.memory_mib
            yield Requirement(size, compute, memory, rate_rps, latency_ms, memory_mib, resident_pct)


def _percent(on: ModelOnGpu, batch_size: int, metric: str) -> float | None:
    """Return a requirement in percent of the GPU; None when not measured."""
    point = on.profile.point(batch_size)
    if metric == MEMORY:
        return None if point.memory_mib is None else 100.0 * point.memory_mib / on.gpu.memory_mib
    return point.metrics.get(metric)


def _requirements(on: ModelOnGpu, measured: tuple[Requirement, ...]) -> Requirements:
    in_time = tuple(r for r in measured if r.latency_ms <= on.slo_ms)
    usable = tuple(
        r
        for r in in_time
        if r.compute_pct <= 100.0 and r.memory_pct <= 100.0 and (r.memory_mib or 0.0) <= on.gpu.memory_mib
    )
    if usable:
        return Requirements(usable, measured, "")
    kind, fastest = on.gpu.type, min(measured, key=lambda r: r.latency_ms, default=None)
    if fastest is None:
        return Requirements((), (), f"the profile of {kind} lacks the metrics this policy needs")
    if not in_time:
        why = (
            f"SLO below its fastest measured batch: {fastest.batch_size} takes {fastest.latency_ms:.4g} ms of "
            f"{on.slo_ms:g} ms on {kind}"
        )
    elif all(r.memory_pct > 100.0 or (r.memory_mib or 0.0) > on.gpu.memory_mib for r in in_time):
        why = f"memory: no batch within the SLO fits the {on.gpu.memory_mib:.0f} MiB of a {kind}"
    else:
        why = f"compute: every batch within the SLO asks for more than a whole {kind}"
    return Requirements((), measured, why)


def context_pct_of(cluster: Cluster, profiles: Profiles) -> dict[str, float]:
    """Return a process context's part of the GPU's memory in percent, by GPU type."""
    gpus = cluster.one_of_each
    return {kind: WHOLE_GPU_PCT * context_mib_of(kind, profiles) / gpu.memory_mib for kind, gpu in gpus.items()}


Placed = Sequence[tuple[Gpu, Sequence[tuple[str, Requirement]]]]
"""GPUs with the replicas on them: model and what it requires there."""


def hosted_requirements(workload: Workload, placed: Placed, *, shares: bool) -> list[Hosted]:
    """Return one gpu-let per replica. A model's rate is spread over its replicas in proportion to throughput.

    Args:
        workload: gives the rates.
        placed: the replicas.
        shares: limit each gpu-let to its compute requirement; otherwise a GPU's gpu-lets compete freely.
    """
    capacity: dict[str, float] = {}
    for _, replicas in placed:
        for model, need in replicas:
            capacity[model] = capacity.get(model, 0.0) + need.throughput_rps
    rates = {spec.name: spec.rate_rps for spec in workload.models}
    part = {model: min(1.0, rates[model] / carries) for model, carries in capacity.items()}
    hosted = []
    for gpu, replicas in placed:
        for model, need in replicas:
            rate_rps = need.throughput_rps * part[model]
            believed = Replica.believed(model, need.batch_size, rate_rps, need.latency_ms)  # the whole GPU's latency
            hosted.append(Hosted(gpu, need.compute_pct if shares else None, [believed]))
    return hosted
