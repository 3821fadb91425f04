"""What other packages add to Tenuto by entry points: policies, schedulers, arrivals, verbs. One of them is the
laboratory, `tenuto-lab`, whose names are known here: asking for one where it is not installed names the cure."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from importlib.metadata import EntryPoint, entry_points

from tenuto.errors import one_of

POLICIES = "tenuto.policies"
SCHEDULERS = "tenuto.schedulers"
ARRIVALS = "tenuto.arrivals"
VERBS = "tenuto.verbs"

LABORATORY: dict[str, frozenset[str]] = {
    POLICIES: frozenset({"ffd", "ffd+", "ffd++", "gpulets+", "gslice", "ideal", "mps-default", "sbp", "self-tuning"}),
    SCHEDULERS: frozenset({"clockwork", "nexus", "shepherd", "thesis-router", "timeout"}),
    ARRIVALS: frozenset({"azure_2019", "azure_2021"}),
    VERBS: frozenset({"advice", "compare", "estimate", "experiment", "interference", "kernels", "lab", "partition"}),
}
"""The names that `tenuto-lab` registers, by group; a test of the laboratory holds both to each other."""


def registered(group: str) -> dict[str, EntryPoint]:
    """Return the entry points of a group by name, in order of names."""
    return {point.name: point for point in sorted(entry_points(group=group), key=lambda point: point.name)}


@functools.cache  # reading what is installed takes longer than many a plan; the controller plans all day
def entry_point(group: str, name: str) -> EntryPoint:
    """Return the entry point of a name; KeyError where no installed package has it."""
    return registered(group)[name]


def cure_of_unknown(group: str, name: str, known: Iterable[str]) -> str:
    """Return what to do about a name that is not known, as sentences."""
    if name in LABORATORY[group]:
        return f"'{name}' is part of the laboratory. Run: pip install tenuto-lab"
    return one_of(name, known)
