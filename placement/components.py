"""What gpu-lets hold together, directly or through others. Load can be shifted inside such a component, not beyond."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import TypeVar

T = TypeVar("T", bound=Hashable)


def connected_components(groups: Iterable[Iterable[T]]) -> list[set[T]]:
    """Return the members of all groups in as many sets as have none in common; groups with a common member are one."""
    above: dict[T, T] = {}  # of each member another one of its set; of one in each set itself

    def top(member: T) -> T:
        while above[member] != member:
            above[member] = member = above[above[member]]
        return member

    for group in groups:
        tops = [top(above.setdefault(member, member)) for member in group]
        above.update((other, tops[0]) for other in tops)
    found: dict[T, set[T]] = {}
    for member in above:
        found.setdefault(top(member), set()).add(member)
    return list(found.values())
