"""What gpu-lets hold together, directly or through others. Load can be shifted inside such a component, not beyond."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import TypeVar

T = TypeVar("T", bound=Hashable)


def connected_components(groups: Iterable[Iterable[T]]) -> list[set[T]]:
    """Return the members of all groups in as many sets as have none in common; groups with a common member are one."""
    found: list[set[T]] = []
    for group in {frozenset(group): None for group in groups}:  # in their order; equal ones once
        connected = [component for component in found if not component.isdisjoint(group)]
        found = [component for component in found if component.isdisjoint(group)]
        found.append(set(group).union(*connected))
    return found
