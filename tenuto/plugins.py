"""Plug-ins: policies, schedulers, arrival processes and verbs that other packages add by entry points. One such package
is the laboratory, `tenuto-lab`. Its names are listed here, so that the error for a missing one says how to install
it."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from tenuto.errors import one_of, refused

POLICIES = "tenuto.policies"
SCHEDULERS = "tenuto.schedulers"
ARRIVALS = "tenuto.arrivals"
VERBS = "tenuto.verbs"

LABORATORY: dict[str, frozenset[str]] = {
    POLICIES: frozenset(
        {
            *("ffd", "ffd+", "ffd++", "gpulets+", "gslice", "ideal", "mps-default", "muxserve", "sbp", "self-tuning"),
            *("ao-milp", "igniter", "usher", "wao-usher", "wsm-milp"),
        }
    ),
    SCHEDULERS: frozenset(
        {
            *("clockwork", "nexus", "shepherd", "thesis-router", "timeout"),
            *("decode-first", "least-slack", "prefill-first", "round-robin"),
        }
    ),
    ARRIVALS: frozenset({"azure_2019", "azure_2021", "servegen"}),
    VERBS: frozenset(
        {
            *("advice", "compare", "estimate", "experiment", "fit-requests"),
            *("interference", "kernels", "lab", "partition"),
        }
    ),
}
"""The names that `tenuto-lab` registers, by group; a test of the laboratory compares both lists."""


def registered(group: str) -> dict[str, EntryPoint]:
    """Return the entry points of a group by name, in order of names."""
    return {point.name: point for point in sorted(entry_points(group=group), key=lambda point: point.name)}


@functools.cache  # reading the installed packages takes longer than many plans, and the controller plans often
def load_plugin(group: str, name: str) -> Any:
    """Return what a name is registered for.

    Raises:
        KeyError: no installed package has it, or its module is not there, as after half an upgrade.
        InvalidInputError: importing it failed, as where something that it needs is not installed.
    """
    point = registered(group)[name]
    try:
        return point.load()
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and f"{point.module}.".startswith(f"{error.name}."):
            raise KeyError(name) from error
        rule = f"importing {point.value} failed: {type(error).__name__}: {error}"
        raise refused(group, name, rule, "Install what it needs, or uninstall its package.") from error


def cure_of_unknown(group: str, name: str, known: Iterable[str]) -> str:
    """Return, as sentences, what to do about an unknown name."""
    if name in LABORATORY[group]:
        return f"'{name}' is part of the laboratory. Run: pip install tenuto-lab"
    return one_of(name, known)
