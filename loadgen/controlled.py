"""A plan or a workload under the controller in virtual time: arrivals, the run, and its figures. The figures have the
same keys as those of any simulated run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tenuto.batching.core.build import NO_DELAY
from tenuto.batching.core.system import NetworkDelay
from tenuto.batching.registry import make_scheduler
from tenuto.batching.virtual.application_load import Joins
from tenuto.deployments.control.journal import Kind
from tenuto.deployments.control.settings import ControlSettings
from tenuto.deployments.control.virtual import ControlledCluster, ControlledLoad, ControlledRun, Incident
from tenuto.errors import refused
from tenuto.loadgen.figures import outcome_figures
from tenuto.loadgen.schedule import make_client_schedule, make_load
from tenuto.loadgen.simulated import beside, make_backlog, offline_apart
from tenuto.outcome import Outcome
from tenuto.placement import Cluster, Plan, Workload, solve
from tenuto.placement.application import Application, online
from tenuto.placement.cluster import Gpu, whole_of
from tenuto.placement.policy import load_policy
from tenuto.placement.workload import client_targets, staged_models
from tenuto.profiles import Profiles


@dataclass(frozen=True)
class ControlledSimulation:
    """All settings of a run but the rate."""

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
    folder: Path = Path()  # the folder of the workload's file, for traces beside it
    losses: tuple[tuple[float, frozenset[str]], ...] = ()  # (seconds, ids of GPUs): when GPUs are lost for good

    @classmethod
    def of_workload(
        cls, workload: Workload, cluster: Cluster, profiles: Profiles, settings: ControlSettings, **how: Any
    ) -> ControlledSimulation:
        """Return the simulation of a workload. The policy in the settings makes the first plan, for the declared rates.

        Raises:
            InvalidInputError: the settings name no policy, or the policy finds no plan.
        """
        if settings.policy is None:
            rule = "a workload needs a policy for its first plan"
            raise refused("policy", None, rule, "Name one, such as `policy: {name: gpulet}`.")
        policy = load_policy(settings.policy.name, settings.policy.options)
        return cls(workload, solve(policy, workload, cluster, profiles), cluster.gpus, profiles, settings, **how)

    def run(
        self, rate_scale: float = 1.0, progress: Callable[[float, ControlledRun], None] = lambda _now_s, _run: None
    ) -> ControlledRun:
        """Serve all requests at a rate scale, from the first plan on."""
        growth = {gpu.whole_type: whole_of(gpu) for gpu in reversed(self.gpus) if gpu.whole_type in self.settings.gpus}
        load, joins = self._load(rate_scale)
        run = ControlledCluster(
            load,
            self.workload,
            self.plan,
            self.gpus,
            self.profiles,
            self.settings,
            lambda system: make_scheduler(self.scheduler_name, system, self.options),
            network=self.network,
            seed=self.seed,
            growth=growth,
            incidents=[Incident(at_s, lose=tuple(gpus)) for at_s, gpus in self.losses],
        ).run(self.settings.interval_s, progress)
        run.applications = joins.counts()
        return run

    def _load(self, rate_scale: float) -> tuple[ControlledLoad, Joins]:
        models = beside(self.workload.models, self.folder)
        applications = beside(self.plan.applications or self.workload.applications, self.folder)  # as it splits them
        targets = client_targets(models, applications)
        schedule = make_client_schedule(targets, applications, self.duration_s, self.seed, rate_scale)
        schedule, arriving = offline_apart(schedule, models)
        offline = make_backlog(models, arriving, self.seed, self.scheduler_name, {})
        load = make_load(models, schedule, self.seed)
        arrived = tuple(spec.name for spec in models), load.times_ms, load.model_index, self.duration_s
        joins = Joins(load)
        if not applications:
            return ControlledLoad(*arrived, tokens=load.tokens, sizes=load.sizes, offline=offline), joins
        return ControlledLoad(*arrived, load.deadlines_ms, joins, sizes=load.sizes, offline=offline), joins


def controlled_summary(
    run: ControlledRun, duration_s: float, since: float, applications: Sequence[Application] = ()
) -> dict[str, Any]:
    """Return the figures of a run: the keys of any simulated run, and `control` with the log and figures over time.

    Args:
        run: a run that has ended.
        duration_s: length of the load.
        since: when the run began on the performance counter, for `wall_s`.
        applications: the applications of the workload.
    """
    apart = staged_models(applications) | run.offline.get("requests", {}).keys()
    ended = {name: row for name, row in zip(run.names, run.ended().tolist(), strict=True) if name not in apart}
    total = np.sum([[0] * len(Outcome), *ended.values(), *run.applications.values()], axis=0)
    summary: dict[str, Any] = {
        "offered_rps": float(total.sum() / duration_s),
        "goodput_rps": float(total[Outcome.OK] / duration_s),
        "attainment": float(total[Outcome.OK] / total.sum()) if total.sum() else None,
        "requests": int(total.sum()),
        "wall_s": time.perf_counter() - since,
        "models": {name: outcome_figures(row) for name, row in ended.items()},
        "control": {
            "changes": run.count(Kind.CHANGED),
            "rolled_back": run.count(Kind.ROLLED_BACK),
            "gpu_hours": run.gpu_s / 3600.0,
            "share_hours": run.share_s / 3600.0,
            "log": [{"at_s": e.at_s, "kind": e.kind, "text": e.text, "data": e.data} for e in run.entries],
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
    if run.offline:
        summary["offline"] = run.offline
    if run.applications:
        summary["applications"] = {
            app.name: {**outcome_figures(counts), "goodput_rps": counts[Outcome.OK] / duration_s, "slo_ms": app.slo_ms}
            for app, counts in ((app, run.applications[app.name]) for app in online(applications))
        }
    return summary
