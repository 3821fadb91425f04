"""What a gateway or dispatcher process is told in its `user_config`, read once for both."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tenuto.batching.core.build import from_plan
from tenuto.batching.core.scheduler import Scheduler
from tenuto.batching.core.system import NetworkDelay
from tenuto.batching.registry import make_scheduler
from tenuto.errors import InvalidInputError
from tenuto.placement import Plan

__all__ = ["ServingSettings"]


@dataclass(frozen=True)
class ServingSettings:
    """The plan, how its requests are scheduled, and the limits.

    `sub_clusters`: names and models of the dispatchers in other processes; empty when the gateway schedules itself.
    """

    plan: Plan
    scheduler: str
    scheduler_options: Mapping[str, Any]
    max_queued: int
    max_body_bytes: int
    response_ms: float
    sub_clusters: Mapping[str, tuple[str, ...]]

    @classmethod
    def from_user_config(cls, raw: Mapping[str, Any]) -> ServingSettings:
        """Read a `user_config`; raises ValueError, which Serve shows, for a plan that cannot be read."""
        try:
            plan = Plan.from_data(raw["plan"], origin="user_config.plan")
        except InvalidInputError as error:
            raise ValueError(str(error)) from None
        chosen = raw.get("scheduler", {"name": "deferred", "options": {}})
        return cls(
            plan,
            str(chosen["name"]),
            chosen.get("options", {}),
            int(raw.get("max_queued", 10_000)),
            int(raw.get("max_body_mib", 64)) << 20,
            float(raw.get("response_ms", 3.0)),
            {str(name): tuple(models) for name, models in raw.get("sub_clusters", {}).items()},
        )

    def build_scheduler(self, plan: Plan, network: NetworkDelay) -> Scheduler:
        """Return the scheduler core of a plan."""
        return make_scheduler(self.scheduler, from_plan(plan, network), self.scheduler_options)
