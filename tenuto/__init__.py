"""Tenuto: multi-model GPU serving with latency SLOs on Ray Serve.

The names below are loaded when they are first used. So `import tenuto` and `import tenuto.placement` load neither Ray
nor torch, nor any folder that is not needed.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tenuto.batching.core.scheduler import Scheduler
    from tenuto.batching.registry import make_scheduler
    from tenuto.batching.virtual.simulator import simulate
    from tenuto.deployments.entry.service.python_handle import TenutoHandle
    from tenuto.errors import EnvironmentFaultError, InvalidInputError, TenutoError, UnavailableError
    from tenuto.outcome import Outcome
    from tenuto.placement import Cluster, Plan, Policy, Workload, load_policy, policy_names, solve
    from tenuto.profiles import Profile, Profiles

__version__ = "0.1.0"

__all__ = [
    "Cluster",
    "EnvironmentFaultError",
    "InvalidInputError",
    "Outcome",
    "Plan",
    "Policy",
    "Profile",
    "Profiles",
    "Scheduler",
    "TenutoError",
    "TenutoHandle",
    "UnavailableError",
    "Workload",
    "load_policy",
    "make_scheduler",
    "policy_names",
    "simulate",
    "solve",
    "version",
]

_HOMES = {
    "tenuto.batching.core.scheduler": ("Scheduler",),
    "tenuto.batching.registry": ("make_scheduler",),
    "tenuto.batching.virtual.simulator": ("simulate",),
    "tenuto.deployments.entry.service.python_handle": ("TenutoHandle",),
    "tenuto.errors": ("EnvironmentFaultError", "InvalidInputError", "TenutoError", "UnavailableError"),
    "tenuto.outcome": ("Outcome",),
    "tenuto.placement": ("Cluster", "Plan", "Policy", "Workload", "load_policy", "policy_names", "solve"),
    "tenuto.profiles": ("Profile", "Profiles"),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'tenuto' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME_OF[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def version() -> str:
    """Return the version, with `(compiled)` where the scheduler is machine code (`scripts/wheel`)."""
    compiled = any(Path(__file__).parent.glob("batching/core/scheduler.*.so"))
    return f"{__version__} (compiled)" if compiled else __version__
