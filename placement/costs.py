"""What a model of the workload costs on a GPU type. All policies and expectations look it up here.

Latencies come from the profile; when a share was not measured, a rule of `tenuto.profiles.share_latency` gives them.
Memory is as measured, with the weights apart if they are known. Each table is made once per profile row and share,
however many models use the row.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Container, Mapping, Sequence

from tenuto.errors import InvalidInputError, MissingProfileError
from tenuto.placement.cluster import Cluster, Gpu
from tenuto.placement.program import SizedLatency
from tenuto.placement.workload import ModelSpec, Workload, profile_by_size, profile_of
from tenuto.profiles import Latency, LatencyTable, LinearLatency, ModelProfile, Profiles
from tenuto.profiles.share_latency import EVERY_RULE, WHOLE_GPU_PCT, ShareRule, latency_on_share

MOST_BATCH = 128  # limit: the largest batch considered unless a policy says otherwise
CONTEXT_MIB = 600.0  # default: memory kept free for a CUDA context that was not measured
SLACK = 1e-9  # derived: relative error of rounding; a budget is often exactly a latency
FULL_PCT = WHOLE_GPU_PCT + 1e-9  # limit: a sum of shares, with its error of rounding

Steps = tuple[float, ...]
"""l(0), l(1), …, l(b) in ms; l(0) is 0 and no latency is below the one before it."""


class _Row:
    """What is computed once per profile row: the latency by share, and l(b) as a sorted table to search in."""

    def __init__(self, profile: ModelProfile) -> None:
        self.profile = profile
        self._latency: dict[float, tuple[Latency, ShareRule] | MissingProfileError] = {}
        self._cut: dict[tuple[float, int], Latency] = {}
        self._steps: dict[tuple[float, int], Steps] = {}
        self._memory: dict[int, float | None] = {}

    def latency(self, share_pct: float) -> tuple[Latency, ShareRule]:
        if share_pct not in self._latency:
            try:
                self._latency[share_pct] = latency_on_share(self.profile, share_pct, EVERY_RULE)
            except MissingProfileError as error:
                self._latency[share_pct] = error
        latency = self._latency[share_pct]
        if isinstance(latency, MissingProfileError):
            raise latency
        return latency

    def cut(self, share_pct: float, batch_size: int) -> Latency:
        key = (share_pct, batch_size)
        if key not in self._cut:
            self._cut[key] = latency_up_to(self.latency(share_pct)[0], batch_size)
        return self._cut[key]

    def steps(self, share_pct: float, most: int) -> Steps:
        key = (share_pct, most)
        if key not in self._steps:
            latency, _ = self.latency(share_pct)
            steps = [0.0]
            for size in range(1, min(most, latency.largest or most) + 1):
                steps.append(max(steps[-1], latency.at(size)))
            self._steps[key] = tuple(steps)
        return self._steps[key]

    def memory_mib(self, batch_size: int) -> float | None:
        if batch_size not in self._memory:
            self._memory[batch_size] = memory_of(self.profile, batch_size)
        return self._memory[batch_size]


class ModelOnGpu:
    """One model of the workload on one GPU type, alone on the GPU. `gpu` is one GPU of the type."""

    __slots__ = ("_classes", "_row", "gpu", "name", "slo_ms", "spec")

    def __init__(
        self,
        spec: ModelSpec,
        gpu: Gpu,
        profile: ModelProfile,
        row: _Row | None = None,
        classes: Sequence[tuple[Mapping[str, int], bool, _Row]] = (),
    ) -> None:
        """`classes` has the sizes of each size class, smallest first, whether it is interpolated, and its row."""
        self.spec, self.gpu, self._classes = spec, gpu, classes
        self.name, self.slo_ms = spec.name, spec.slo_ms
        self._row = row or _Row(profile)

    @property
    def profile(self) -> ModelProfile:
        """The profile row that the model is planned with."""
        return self._row.profile

    def latency(self, share_pct: float = WHOLE_GPU_PCT) -> Latency:
        """Return l(b) on a share; raises `MissingProfileError` if no rule gives it."""
        return self._row.latency(share_pct)[0]

    def rule(self, share_pct: float) -> ShareRule:
        """Return the rule that gives the latency on a share; raises `MissingProfileError` if none does."""
        return self._row.latency(share_pct)[1]

    def knows(self, share_pct: float, allowed: Container[ShareRule]) -> bool:
        """Return whether an allowed rule gives the latency on a share."""
        try:
            return self._row.latency(share_pct)[1] in allowed
        except MissingProfileError:
            return False

    def steps(self, share_pct: float = WHOLE_GPU_PCT, most: int = MOST_BATCH) -> Steps:
        """Return l(0..b) on a share, where b is the largest measured batch or `most`; raises as `latency`."""
        return self._row.steps(share_pct, most)

    def largest_batch(self, budget_ms: float, share_pct: float = WHOLE_GPU_PCT, most: int = MOST_BATCH) -> int:
        """Return the largest batch size such that it and all smaller ones keep a budget on a share; 0 if none does."""
        return bisect_right(self.steps(share_pct, most), budget_ms * (1 + SLACK)) - 1

    def batches_in_memory(self, room_mib: float, most: int) -> int:
        """Return the largest batch up to `most` whose replica fits into this memory, or 0. Unknown memory always
        fits."""
        size = most
        while size and (self.memory_mib(size) or 0.0) > room_mib * (1 + SLACK):
            size -= 1
        return size

    def memory_mib(self, batch_size: int) -> float | None:
        """Return the memory of a replica with its weights; None if it was not measured.

        Batches above the largest measured one lie on the line through the two largest.
        """
        return self._row.memory_mib(batch_size)

    def needs_mib(self, batch_size: int) -> tuple[float, float | None]:
        """Return the memory of a replica (0 if not measured) and the part that its weights take (None if not known).

        `held_mib` uses both.
        """
        return self.memory_mib(batch_size) or 0.0, self.profile.weights_mib

    def has_room_for(self, processes: int, batch_size: int, context_mib: float) -> bool:
        """Return whether so many processes, each with a context and a replica, fit into its GPU's memory together.
        Replicas of unknown memory take none."""
        return processes * (self.needs_mib(batch_size)[0] + context_mib) <= self.gpu.memory_mib * (1 + SLACK)

    def cut(self, share_pct: float, batch_size: int) -> Latency:
        """Return l(b) on a share for the plan: a line stays as it is, a table keeps its points up to a batch size.

        Batches above the largest measured one lie on the line through the two largest.
        """
        return self._row.cut(share_pct, batch_size)

    def by_size(self, share_pct: float, batch_size: int) -> tuple[SizedLatency, ...]:
        """Return l(b) of each size class on a share for the plan: up to the planned batch, or up to the batch of small
        requests that takes no longer than the planned one."""
        latencies = []
        for sizes, interpolated, row in self._classes:
            latency = row.latency(share_pct)[0]
            most = max(batch_size, latency.largest_batch(self.latency(share_pct).at(batch_size)))
            if isinstance(latency, LatencyTable):
                most = min(most, latency.largest)
            up_to = latency_up_to(latency, most)
            latencies.append(SizedLatency(sizes=dict(sizes), interpolated=interpolated, latency=up_to))
        return tuple(latencies)


def latency_up_to(latency: Latency, batch_size: int) -> Latency:
    """Return l(b) up to a batch size: a line stays as it is; a table keeps its points up to that size and ends
    there."""
    if isinstance(latency, LinearLatency):
        return latency
    points = {size: ms for size, ms in latency.points.items() if size < batch_size}
    larger = batch_size > latency.largest
    points[batch_size] = _on_line(latency.points, batch_size) if larger else latency.at(batch_size)
    return LatencyTable(points={size: round(ms, 6) for size, ms in points.items()})


def _on_line(known: Mapping[int, float], batch_size: int) -> float:
    """Return the value of a batch above the largest known one: on the line through the two largest, never falling."""
    sizes = sorted(known)
    small, large = sizes[-2:] if len(sizes) > 1 else (sizes[0], sizes[0])
    per_request = max(0.0, (known[large] - known[small]) / max(1, large - small))
    return known[large] + per_request * (batch_size - large)


def memory_of(profile: ModelProfile, batch_size: int) -> float | None:
    """Return the memory of a replica in MiB; None if it was not measured.

    Batches above the largest measured one lie on the line through the two largest.
    """
    memory = profile.memory_mib(batch_size)
    if memory is None and (known := {p.batch_size: p.memory_mib or 0.0 for p in profile.measured_memory}):
        return _on_line(known, batch_size)
    return memory


def context_mib_of(gpu_type: str, profiles: Profiles) -> float:
    """Return the memory of a process's CUDA context: the coefficient `context_mib` of the type's profile, or a default.

    It is 0 on a CPU.
    """
    return 0.0 if gpu_type == "cpu" else profiles.hardware(gpu_type).get("context_mib", CONTEXT_MIB)


def costs_of(workload: Workload, cluster: Cluster, profiles: Profiles) -> dict[str, dict[str, ModelOnGpu]]:
    """Return what each model costs, by name and GPU type, in the order of the workload and of the cluster's types.

    A type on which a model was not measured is left out.
    """
    rows: dict[int, _Row] = {}
    costs: dict[str, dict[str, ModelOnGpu]] = {}
    one_of_each = cluster.one_of_each
    for spec in workload.models:
        costs[spec.name] = {}
        for kind, gpu in one_of_each.items():
            try:
                profile = profile_of(spec, kind, profiles)
            except InvalidInputError:
                continue
            row = rows.setdefault(id(profile), _Row(profile))
            sized = profile_by_size(spec, kind, profiles)
            classes = [
                (
                    dict(zip(sized.size_names, sizes, strict=True)),
                    sizes not in sized.measured_sizes,
                    rows.setdefault(id(padded), _Row(padded)),
                )
                for sizes, padded in sized.by_class.items()
            ]
            costs[spec.name][kind] = ModelOnGpu(spec, gpu, profile, row, classes)
    return costs
