"""What a replica requires of a GPU in percent: compute (Creq) and memory (Mreq) by batch size, as USHER and the MILPs
see it.

Only measured batches of the whole GPU count; a batch whose metric is missing in the profile is left out, not guessed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tenuto.errors import InvalidInputError, Problem
from tenuto.placement.cluster import Cluster, Gpu
from tenuto.placement.workload import ModelSpec, Workload, profile_of
from tenuto.profiles import LatencyTable, ModelProfile, Profiles

__all__ = ["MEMORY", "Requirement", "Requirements", "requirements_of"]

MEMORY = "memory"  # the name under which the memory requirement is asked for; any profile metric may stand in


@dataclass(frozen=True)
class Requirement:
    """One replica of a model with one batch size on one GPU type, alone on the GPU."""

    batch_size: int
    compute_pct: float
    memory_pct: float
    throughput_rps: float
    latency_ms: float
    memory_mib: float | None
    latency: LatencyTable

    @property
    def total_pct(self) -> float:
        """Rreq = Creq + Mreq (USHER, section 4)."""
        return self.compute_pct + self.memory_pct


@dataclass(frozen=True)
class Requirements:
    """A model on one GPU type: `within_slo` are the batches that may be used, `measured` all, for averages."""

    within_slo: tuple[Requirement, ...]
    measured: tuple[Requirement, ...]
    why_not: str  # why `within_slo` is empty

    def average(self) -> tuple[float, float]:
        """Return the mean (Creq, Mreq) over all measured batches; (0, 0) without any.

        Averages over the batches within the SLO only would give other groups than the thesis prints in section 5.4.1.
        """
        count = len(self.measured)
        if not count:
            return 0.0, 0.0
        return sum(r.compute_pct for r in self.measured) / count, sum(r.memory_pct for r in self.measured) / count


def requirements_of(
    workload: Workload, cluster: Cluster, profiles: Profiles, compute_metric: str, memory_metric: str
) -> dict[str, dict[str, Requirements]]:
    """Return the requirements of every model on every GPU type of the cluster on which it was measured.

    Raises:
        InvalidInputError: a model's profile has the metric on none of the types; one problem per model.
    """
    gpus = {gpu.type: gpu for gpu in reversed(cluster.gpus)}
    found: dict[str, dict[str, Requirements]] = {}
    problems: list[Problem] = []
    for index, spec in enumerate(workload.models):
        by_type: dict[str, Requirements] = {}
        for gpu_type in cluster.gpu_types:
            try:
                model = profile_of(spec, gpu_type, profiles)
            except InvalidInputError:
                continue  # measured on another type; `solve` refuses a workload without any
            by_type[gpu_type] = _requirements(spec, model, gpus[gpu_type], compute_metric, memory_metric)
        if by_type and not any(r.measured for r in by_type.values()):
            problems.append(
                Problem(f"models.{index}.profile", spec.profile_row,
                        f"no whole-GPU measurement has both '{compute_metric}' and '{memory_metric}'",
                        f"This policy needs both. Metrics there: {_known_metrics(spec, cluster, profiles)}. "
                        "Choose others with --option, another profile with --profiles, or another policy.")
            )
        found[spec.name] = by_type
    if problems:
        raise InvalidInputError(problems)
    return found


def _known_metrics(spec: ModelSpec, cluster: Cluster, profiles: Profiles) -> str:
    names: set[str] = set()
    for gpu_type in cluster.gpu_types:
        try:
            points = profile_of(spec, gpu_type, profiles).points
        except InvalidInputError:
            continue
        names |= {name for point in points if point.share_pct == 100.0 for name in point.metrics}
        names |= {MEMORY for point in points if point.share_pct == 100.0 and point.memory_mib is not None}
    return ", ".join(sorted(names)) or "none"


def _requirements(
    spec: ModelSpec, model: ModelProfile, gpu: Gpu, compute_metric: str, memory_metric: str
) -> Requirements:
    measured: list[Requirement] = []
    sizes = model.batch_sizes()
    for size in sizes:
        compute = _percent(model, size, compute_metric, gpu)
        memory = _percent(model, size, memory_metric, gpu)
        if compute is None or memory is None or compute <= 0:
            continue
        latency = model.latency_ms(size)
        table = LatencyTable(points={b: round(model.latency_ms(b), 6) for b in sizes if b <= size})
        measured.append(
            Requirement(size, compute, memory, model.throughput_rps(size), latency, model.memory_mib(size), table)
        )
    usable = tuple(
        r for r in measured
        if r.latency_ms <= spec.slo_ms and r.compute_pct <= 100.0 and r.memory_pct <= 100.0
        and (r.memory_mib or 0.0) <= gpu.memory_mib
    )
    return Requirements(usable, tuple(measured), _why_not(spec, measured, gpu) if not usable else "")


def _percent(model: ModelProfile, batch_size: int, metric: str, gpu: Gpu) -> float | None:
    """Return a requirement in percent of the GPU, None where it was not measured."""
    point = model.point(batch_size)
    if metric == MEMORY:
        return None if point.memory_mib is None else 100.0 * point.memory_mib / gpu.memory_mib
    return point.metrics.get(metric)


def _why_not(spec: ModelSpec, measured: Iterable[Requirement], gpu: Gpu) -> str:
    fastest = min(measured, key=lambda r: r.latency_ms, default=None)
    if fastest is None:
        return f"{gpu.type}: the profile lacks the metrics this policy needs"
    if fastest.latency_ms > spec.slo_ms:
        return (
            f"{gpu.type}: its fastest measured batch ({fastest.batch_size}) takes {fastest.latency_ms:.4g} ms, "
            f"more than the SLO of {spec.slo_ms:g} ms"
        )
    return f"{gpu.type}: no batch within the SLO fits the GPU's compute and memory"
