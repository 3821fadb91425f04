"""Components: gpu-lets that share models, directly or through others. Load can shift inside a component only."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import TypeVar

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
