"""Components: gpu-lets that share models, directly or through others. Load can shift inside a component only."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import TypeVar

from tenuto.placement.program import Gpulet

T = TypeVar("T", bound=Hashable)


def connected_components(groups: Iterable[Iterable[T]]) -> list[set[T]]:
    """Return the components of some groups, each as the set of its members. Groups with a common member are in one
    component."""
    above: dict[T, T] = {}  # leads from each member to another of its set; one member of each set leads to itself

    def top(member: T) -> T:
        while above[member] != member:
            above[member] = member = above[above[member]]
        return member

    for group in groups:
        tops = [top(above.setdefault(member, member)) for member in group]
        above.update((other, tops[0]) for other in tops)
    components: dict[T, set[T]] = {}
    for member in above:
        components.setdefault(top(member), set()).add(member)
    return list(components.values())


def members_of(gpulet: Gpulet) -> tuple[Hashable, ...]:
    """Return what connects a gpu-let with others: its GPUs, each as a tuple, and its models by name."""
    return (*((gpu,) for gpu in gpulet.gpus), *(replica.name for replica in gpulet.models))


def connected_with(changed: Iterable[Gpulet], gpulets: Iterable[Gpulet]) -> tuple[Gpulet, ...]:
    """Return those gpu-lets that share GPUs or models with changed ones, directly or through others. What the rest
    serves does not depend on the change."""
    held, members = [(g, members_of(g)) for g in gpulets], {m for gpulet in changed for m in members_of(gpulet)}
    together = connected_components(own for _, own in held)
    connected = members.union(*(each for each in together if not members.isdisjoint(each)))
    return tuple(gpulet for gpulet, own in held if not connected.isdisjoint(own))
