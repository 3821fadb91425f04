"""Pools: what gpu-lets hold together, directly or through others. Load can be shifted inside a pool, and not beyond."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import TypeVar

T = TypeVar("T", bound=Hashable)


def joined(groups: Iterable[Iterable[T]]) -> list[set[T]]:
    """Return the members of all groups in as many sets as have none in common; groups with a common member are one."""
    parent: dict[T, T] = {}

    def root(member: T) -> T:
        while parent.setdefault(member, member) != member:
            parent[member] = parent[parent[member]]
            member = parent[member]
        return member

    for group in groups:
        members = list(group)
        for member in members:
            parent[root(member)] = root(members[0])
    found: dict[T, set[T]] = {}
    for member in parent:
        found.setdefault(root(member), set()).add(member)
    return list(found.values())
