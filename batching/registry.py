"""Schedulers by name. A scheduler's module is imported on its first use, so that no process imports the others.

Other packages add schedulers by entry points of the group `tenuto.schedulers`.
"""

from __future__ import annotations

import importlib
from collections.abc import Collection, Mapping
from typing import Any, cast

from tenuto.batching.core.scheduler import Scheduler
from tenuto.batching.core.system import System
from tenuto.errors import refused
from tenuto.plugins import SCHEDULERS as GROUP
from tenuto.plugins import cure_of_unknown, load_plugin, registered

SCHEDULERS: dict[str, str] = {
    "deferred": "tenuto.batching.core.deferred:DeferredScheduler",
    "symphony": "tenuto.batching.core.symphony:SymphonyScheduler",
    "eager": "tenuto.batching.core.eager:EagerScheduler",
}
"""The schedulers of Tenuto itself, as `module:class`."""


def scheduler_names() -> list[str]:
    """Return all schedulers: Tenuto's own, then those of other packages."""
    return [*SCHEDULERS, *(name for name in registered(GROUP) if name not in SCHEDULERS)]


def scheduler_class(name: str) -> type[Scheduler]:
    """Return the class of a scheduler.

    Raises:
        InvalidInputError: unknown name; lists the known ones.
    """
    target = SCHEDULERS.get(name)
    if target is not None:
        module, _, attribute = target.partition(":")
        own: type[Scheduler] = getattr(importlib.import_module(module), attribute)
        return own
    try:
        return cast(type[Scheduler], load_plugin(GROUP, name))
    except KeyError:
        cure = cure_of_unknown(GROUP, name, scheduler_names())
        raise refused("--scheduler", name, "unknown scheduler", cure) from None


def check_offline(name: str, waits: Collection[str]) -> None:
    """Refuse a scheduler that runs no offline work where models, or whoever is named, wait for that.

    Raises:
        InvalidInputError: somebody does, and it runs none.
    """
    if waits and not scheduler_class(name).takes_offline:
        rule = f"runs no offline work, and {', '.join(sorted(waits))} waits for that"
        raise refused("--scheduler", name, rule, "Take --scheduler deferred.")


def make_scheduler(name: str, system: System, options: Mapping[str, Any] | None = None) -> Scheduler:
    """Build a scheduler by name with options as given on the command line.

    Raises:
        InvalidInputError: unknown scheduler or option, or unusable value.
    """
    kind = scheduler_class(name)
    return kind(system, kind.options_type.parse(name, options or {}))
