"""Schedulers by name. Modules are imported on first use, so that one scheduler does not pay for the others."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from tenuto.batching.core.scheduler import Scheduler
from tenuto.batching.core.system import System
from tenuto.errors import refused

SCHEDULERS: dict[str, str] = {
    "deferred": "tenuto.batching.core.deferred:DeferredScheduler",
    "symphony": "tenuto.batching.core.symphony:SymphonyScheduler",
    "eager": "tenuto.batching.rivals.eager:EagerScheduler",
    "timeout": "tenuto.batching.rivals.timeout:TimeoutScheduler",
    "clockwork": "tenuto.batching.rivals.clockwork:ClockworkScheduler",
    "nexus": "tenuto.batching.rivals.nexus:NexusScheduler",
    "shepherd": "tenuto.batching.rivals.shepherd:ShepherdScheduler",
    "thesis-router": "tenuto.batching.rivals.thesis_router:ThesisRouterScheduler",
}


def scheduler_class(name: str) -> type[Scheduler]:
    """Return the class of a scheduler.

    Raises:
        InvalidInputError: unknown name; lists the known ones.
    """
    target = SCHEDULERS.get(name)
    if target is None:
        known = ", ".join(SCHEDULERS)
        raise refused("--scheduler", name, "unknown scheduler", f"Use one of {known}.")
    module, _, attribute = target.partition(":")
    found: type[Scheduler] = getattr(importlib.import_module(module), attribute)
    return found


def make_scheduler(name: str, system: System, options: Mapping[str, Any] | None = None) -> Scheduler:
    """Build a scheduler by name with options as given on the command line.

    Raises:
        InvalidInputError: unknown scheduler or option, unusable value, or a system with impossible numbers.
    """
    kind = scheduler_class(name)
    return kind(system, kind.options_type.parse(name, options or {}))
