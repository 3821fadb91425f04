"""The queues of models that run as one merged program, and what their joint batches cost: a plan's groups for a set-up.

The members' requests wait in one queue, in the order of their own deadlines, because the merged program runs what the
members have in common once for all rows of a batch, whosever they are.
"""

from __future__ import annotations

from dataclasses import dataclass

from tenuto.batching.core.interface import Host, SchedulerModel
from tenuto.placement import Gpulet, Plan
from tenuto.profiles import Latency, LatencyTable

__all__ = ["MergedQueues", "latency_steps", "merged_hosts", "merged_queues"]


@dataclass(frozen=True)
class MergedQueues:
    """The groups of a plan as the last models of a set-up: by name, and their members by index."""

    models: tuple[SchedulerModel, ...] = ()
    groups: tuple[tuple[int, ...], ...] = ()
    first: int = 0  # index of the first of them

    @property
    def names(self) -> frozenset[str]:
        """The names of all groups."""
        return frozenset(model.name for model in self.models)

    def index(self, name: str) -> int:
        """Return the index of a group's queue among the set-up's models."""
        return self.first + next(place for place, model in enumerate(self.models) if model.name == name)


def merged_queues(plan: Plan) -> MergedQueues:
    """Return the queues of a plan's groups, every group once; its SLO is the shortest of its members'."""
    index = {spec.name: position for position, spec in enumerate(plan.models)}
    found = {
        group.name: group.models
        for gpulet in plan.gpulets
        for group in gpulet.merge
        if index.keys() >= set(group.models)
    }
    models = []
    for name, members in found.items():
        specs = [plan.model(member) for member in members]
        rate_rps, slo_ms = sum(spec.rate_rps for spec in specs), min(spec.slo_ms for spec in specs)
        models.append(SchedulerModel(name, slo_ms, rate_rps, max(spec.weight for spec in specs)))
    groups = tuple(tuple(index[member] for member in members) for members in found.values())
    return MergedQueues(tuple(models), groups, len(plan.models))


def merged_hosts(gpulet: Gpulet, queues: MergedQueues) -> dict[int, Host]:
    """Return what joint batches cost on a gpu-let, by the group's queue; none for a group without a latency."""
    return {
        queues.index(program.name): Host(latency_steps(program.latency, 0.0, program.batch_size), program.slowdown)
        for program in gpulet.programs
        if program.is_merged and program.latency is not None and program.name in queues.names
    }


def latency_steps(latency: Latency, slo_ms: float, max_batch: int | None = None) -> tuple[float, ...]:
    """Return l(0..b) in ms, where b is the largest batch that can run within the SLO, or `max_batch`; at least 1.

    A table measured from a larger batch on is used downwards as an upper bound; latencies never fall as b grows.
    """
    largest = latency.largest_batch(slo_ms) if max_batch is None else max_batch
    if isinstance(latency, LatencyTable):
        largest = min(largest, latency.largest)
    steps = [0.0]
    for size in range(1, max(1, largest) + 1):
        steps.append(max(steps[-1], latency.at(size)))
    return tuple(steps)
