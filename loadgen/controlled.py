"""A plan, or a workload, under the controller in virtual time: arrivals, the run, and its figures with the keys of any
other simulated run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tenuto.batching.core.build import NO_DELAY
from tenuto.batching.core.system import NetworkDelay
from tenuto.batching.registry import make_scheduler
from tenuto.deployments.control.settings import ControlSettings
from tenuto.deployments.control.virtual import ControlledRun, Load, World, run_controlled
from tenuto.errors import InvalidInputError, Problem
from tenuto.loadgen.schedule import make_schedule
from tenuto.loadgen.simulated import beside
from tenuto.outcome import OUTCOMES, Outcome
from tenuto.placement import Cluster, Plan, Workload
from tenuto.placement.cluster import Gpu
from tenuto.placement.policy import load_policy
from tenuto.placement.solve import solve
from tenuto.profiles import Profiles

__all__ = ["ControlledSimulation", "controlled_summary"]


@dataclass(frozen=True)
class ControlledSimulation:
    """What is run and how: everything but the rate."""

    workload: Workload
    plan: Plan
    gpus: tuple[Gpu, ...]
    profiles: Profiles
    settings: ControlSettings
    scheduler_name: str = "deferred"
    options: Mapping[str, Any] = field(default_factory=dict)
    duration_s: float = 60.0
    seed: int = 0
    network: NetworkDelay = NO_DELAY
    folder: Path = Path()  # of the workload's file, for traces beside it

    @classmethod
    def of_workload(
        cls, workload: Workload, cluster: Cluster, profiles: Profiles, settings: ControlSettings, **how: Any
    ) -> ControlledSimulation:
        """Return that of a workload; its first plan is made by the policy of the settings for the declared rates.

        Raises:
            InvalidInputError: the settings name no policy, or it finds no plan.
        """
        if settings.policy is None:
            rule = "a workload needs a policy for its first plan"
            raise InvalidInputError(Problem("policy", None, rule, "Name one, such as `policy: {name: gpulet}`."))
        policy = load_policy(settings.policy.name, settings.policy.options)
        return cls(workload, solve(policy, workload, cluster, profiles), cluster.gpus, profiles, settings, **how)

    def run(
        self, rate_scale: float = 1.0, progress: Callable[[float, ControlledRun], None] = lambda _now_s, _run: None,
        *, sample: float = 1.0,
    ) -> ControlledRun:  # fmt: skip
        """Serve all requests at a rate scale, from the first plan on; of quiet looks only a `sample`, one by one."""
        schedule = make_schedule(beside(self.workload.models, self.folder), self.duration_s, self.seed, rate_scale)
        growth = {gpu.type: gpu for gpu in reversed(self.gpus) if gpu.type in self.settings.gpus}
        return run_controlled(
            Load(schedule.names, schedule.times_ms, schedule.model_index, self.duration_s), self.workload, self.plan,
            self.gpus, self.profiles, self.settings,
            lambda system: make_scheduler(self.scheduler_name, system, self.options),
            world=World(network=self.network, seed=self.seed), growth=growth, window_s=self.settings.interval_s,
            sample=sample, progress=progress,
        )  # fmt: skip


def controlled_summary(run: ControlledRun, duration_s: float, since: float) -> dict[str, Any]:
    """Return the figures of a run: the keys of any simulated run, and `control` with the log and figures over time.

    Args:
        run: that ended.
        duration_s: of the load.
        since: when it began on the performance counter, for `wall_s`.
    """
    ended = run.ended()
    total = ended.sum(axis=0)
    attainments = run.attainments()
    return {
        "offered_rps": float(total.sum() / duration_s),
        "goodput_rps": float(total[Outcome.OK] / duration_s),
        "attainment": float(total[Outcome.OK] / total.sum()) if total.sum() else None,
        "requests": int(total.sum()),
        "wall_s": time.perf_counter() - since,
        "models": {
            name: {
                "offered": int(row.sum()),
                **dict(zip(OUTCOMES, row.tolist(), strict=True)),
                "attainment": attainments.get(name),
            }
            for name, row in zip(run.names, ended, strict=True)
        },
        "control": {
            "simulated": run.simulated,
            "changes": run.count("changed"),
            "rolled_back": run.count("rolled back"),
            "gpu_hours": run.gpu_s / 3600.0,
            "share_hours": run.share_s / 3600.0,
            "log": [{"at_s": e.at_s, "kind": e.kind, "text": e.text, "data": dict(e.data)} for e in run.entries],
            "windows": [
                {
                    "end_s": window.end_s,
                    "arrived": int(window.arrived.sum()),
                    "bad": int(window.ended.sum() - window.ended[:, Outcome.OK].sum()),
                    "gpu_s": window.gpu_s,
                    "share_s": window.share_s,
                }
                for window in run.windows
            ],
        },
    }
