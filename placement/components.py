"""Components: gpu-lets that share models, directly or through others. Load can shift inside a component only."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import TypeVar

from tenuto.placement.program import Gpulet

T = TypeVar("T", bound=Hashable)


def connected_components(groups: Iterable[Iterable[T]]) -> list[set[T]]:
    """Return the components of some groups, each as the set of its members. Groups with a common member are in one
    component."""
    component_of: dict[T, set[T]] = {}
    for group in groups:
        members = tuple(group)
        joined = sorted({id(c): c for c in map(component_of.get, members) if c is not None}.values(), key=len)
        largest = joined.pop() if joined else set[T]()
        for others in (*joined, members):  # the smaller ones change, so that no member does often
            largest.update(others)
            component_of.update(dict.fromkeys(others, largest))
    return [*{id(component): component for component in component_of.values()}.values()]


def members_of(gpulet: Gpulet) -> tuple[Hashable, ...]:
    """Return what connects a gpu-let with others: its GPUs, each as a tuple, and its models by name."""
    return (*((gpu,) for gpu in gpulet.gpus), *(replica.name for replica in gpulet.models))


def connected_with(changed: Iterable[Gpulet], gpulets: Iterable[Gpulet]) -> tuple[Gpulet, ...]:
    """Return those gpu-lets that share GPUs or models with changed ones, directly or through others. What the rest
    serves does not depend on the change."""
    apart, members = [(g, members_of(g)) for g in gpulets], {m for gpulet in changed for m in members_of(gpulet)}
    order, connected = [g for g, _ in apart], set[int]()
    while near := [(g, own) for g, own in apart if not members.isdisjoint(own)]:
        members.update(*(own for _, own in near))
        connected.update(id(g) for g, _ in near)
        apart = [(g, own) for g, own in apart if id(g) not in connected]
    return tuple(g for g in order if id(g) in connected)
