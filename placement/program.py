"""What a gpu-let runs, as tables and pictures show it: models by themselves, and merged groups as one program each."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tenuto.placement.plan import Gpulet, Replica

__all__ = ["Program", "programs_of"]


@dataclass(frozen=True)
class Program:
    """One program of a gpu-let: a model by itself, or a merged group of several, called `a+b`.

    `batch_size` is the largest batch, of a group that of all members' requests together; `latency_ms` that of such a
    batch, neighbours included; `memory_mib` counts weights that are equal once where that was measured. None: unknown.
    """

    name: str
    members: tuple[Replica, ...]
    batch_size: int
    latency_ms: float | None
    memory_mib: float | None

    @property
    def is_merged(self) -> bool:
        """Whether it runs several models at once."""
        return len(self.members) > 1

    @property
    def rate_rps(self) -> float | None:
        """The load planned here, of all members together; None where one has none."""
        return _sum(replica.rate_rps for replica in self.members)


def programs_of(gpulet: Gpulet) -> tuple[Program, ...]:
    """Return the programs of a gpu-let in the order of its models; a group stands where its first member does."""
    replicas = {replica.name: replica for replica in gpulet.models}
    group_of = {name: group for group in gpulet.merged_groups() for name in group.models}
    found: dict[str, Program] = {}
    for replica in gpulet.models:
        group = group_of.get(replica.name)
        if group is None:
            found[replica.name] = Program(
                replica.name, (replica,), replica.batch_size, replica.latency_ms, replica.memory_mib
            )
        elif group.name not in found:
            members = tuple(replicas[name] for name in group.models)
            size = group.batch_size or 1
            slowdown = max(member.slowdown for member in members)
            latency_ms = None if group.latency is None else group.latency.at(size) * slowdown
            memory_mib = _sum(m.memory_mib for m in members) if group.memory_mib is None else group.memory_mib
            found[group.name] = Program(group.name, members, size, latency_ms, memory_mib)
    return tuple(found.values())


def _sum(values: Iterable[float | None]) -> float | None:
    known = list(values)
    return None if None in known else sum(value for value in known if value is not None)
