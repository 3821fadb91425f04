"""A simulation's result in the form of a measured run, so that the same report and comparison serve both."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from tenuto.batching.core.scheduler import Scheduler
from tenuto.batching.virtual.goodput import Offer
from tenuto.batching.virtual.result import SimulationResult
from tenuto.batching.virtual.simulator import simulate
from tenuto.loadgen.application_figures import application_figures
from tenuto.loadgen.applications import ApplicationLoad, Joins
from tenuto.loadgen.output import provenance
from tenuto.loadgen.records import Records, merge
from tenuto.loadgen.schedule import Schedule
from tenuto.loadgen.verdict import judge, summarise
from tenuto.placement import Plan

__all__ = [
    "JoinedLoad",
    "describe_simulation",
    "offer_of",
    "simulate_load",
    "simulated_applications",
    "simulated_records",
]


def simulated_records(result: SimulationResult, load: ApplicationLoad | None = None) -> Records:
    """Return one row per simulated request: sent when scheduled, status as a server would have answered.

    Args:
        result: what the simulator returned.
        load: where it had applications; their stages that were never due have no row.
    """
    ids = np.array([spec.id for spec in result.system.gpulets] + [""], dtype=object)
    answered = ~np.isnan(result.answered_ms)
    status = np.where(answered, 200, 504).astype(np.int32)
    status[result.outcome == 3] = 429
    records = Records(
        request=np.arange(len(result.arrival_ms), dtype=np.int64), model=result.model, scheduled_ms=result.arrival_ms,
        sent_ms=result.arrival_ms, answered_ms=result.answered_ms, status=status, outcome=result.outcome,
        batching_ms=result.dispatched_ms - result.arrival_ms, gpulet_queue_ms=result.start_ms - result.dispatched_ms,
        execution_ms=result.finish_ms - result.start_ms, batch_size=result.batch_size, gpulet=ids[result.gpulet],
    )  # fmt: skip
    if load is None:
        return records
    records.call, records.call_at_ms = load.owner, load.call_at_ms
    records = records.where(~np.isnan(records.scheduled_ms))
    return merge([records])


def simulate_load(
    scheduler: Scheduler, load: ApplicationLoad, *, duration_s: float, warmup_s: float | None = None
) -> SimulationResult:
    """Run a load with applications in virtual time."""
    joins = Joins(load)
    return simulate(
        scheduler, load.times_ms, load.model_index, duration_s=duration_s, warmup_s=warmup_s,
        followers=joins.answered, given_up=joins.given_up, deadlines_ms=load.deadlines_ms,
    )  # fmt: skip


class JoinedLoad:
    """One run of a load as the search of goodput needs it (`tenuto.batching.virtual.goodput.Joined`)."""

    def __init__(self, load: ApplicationLoad, names: Sequence[str], begin_ms: float) -> None:
        """`names`: models by index; `begin_ms`: end of the warm-up."""
        self._load, self._names, self._begin_ms = load, names, begin_ms
        self._joins = Joins(load, begin_ms)
        self.answered, self.given_up = self._joins.answered, self._joins.given_up

    def stages(self) -> dict[str, tuple[int, ...]]:
        """Return the models of each application's stages."""
        place = {name: index for index, name in enumerate(self._names)}
        return {
            app.name: tuple(place[app.model_name(stage)] for stage in app.stages) for app in self._load.applications
        }

    def offered(self) -> dict[str, int]:
        """Return how many requests of each application arrive after the warm-up."""
        counted = Counter(app for app, at_ms in self._load.calls.values() if at_ms >= self._begin_ms)
        return {app.name: counted[place] for place, app in enumerate(self._load.applications)}

    def lost_so_far(self) -> dict[str, int]:
        """Return how many of those have been given up."""
        return {app.name: lost for app, lost in zip(self._load.applications, self._joins.lost, strict=True)}

    def ended(self, result: SimulationResult) -> dict[str, tuple[int, int]]:
        """Return how many of those that arrived in a run were in time, and how many arrived."""
        figures = simulated_applications(result, self._load)
        return {name: (row["ok"], row["offered"]) for name, row in figures.items()}


def offer_of(load: ApplicationLoad, names: Sequence[str], duration_s: float, warmup_s: float | None) -> Offer:
    """Return a load as the search of goodput takes it."""
    begin_ms = 1000.0 * (0.05 * duration_s if warmup_s is None else warmup_s)
    return Offer(load.times_ms, load.model_index, load.deadlines_ms, JoinedLoad(load, names, begin_ms))


def simulated_applications(result: SimulationResult, load: ApplicationLoad) -> dict[str, dict[str, Any]]:
    """Return the figures of every application of a simulated run."""
    return application_figures(
        simulated_records(result, load), [spec.name for spec in result.system.models], load.applications,
        warmup_ms=1000.0 * result.warmup_s, duration_ms=1000.0 * result.duration_s,
    )  # fmt: skip


def describe_simulation(
    result: SimulationResult,
    schedule: Schedule,
    plan: Plan | None,
    *,
    options: dict[str, Any],
    command: Sequence[str],
    load: ApplicationLoad | None = None,
) -> tuple[dict[str, Any], Records]:
    """Return the result document and the records of a simulated run.

    Args:
        result: what the simulator returned.
        schedule: its arrivals.
        plan: the simulated plan; None when every GPU hosts every model.
        options: settings worth keeping, such as seed, rate_scale and scheduler; the duration is added.
        command: the command line that made it.
        load: its requests where it had applications.
    """
    records = simulated_records(result, load)
    names = [spec.name for spec in result.system.models]
    slos = {spec.name: spec.slo_ms for spec in result.system.models}
    summary = summarise(
        records, names, warmup_ms=1000.0 * result.warmup_s, duration_ms=1000.0 * result.duration_s,
        applications=load.applications if load is not None else (),
    )  # fmt: skip
    verdict = judge(records, summary, list(slos.values()))
    # The simulator's own figures where both have them: it saw every batch, not only the answered requests.
    seen = {key: value for key, value in result.summary().items() if key != "models"}
    document = {
        "kind": "simulation",
        "emulated": True,
        **summary,
        **seen,
        "verdict": {"result": verdict.result, "reasons": list(verdict.reasons), "conditions": verdict.conditions},
        "errors": [],
        "slos_ms": slos,
        "schedule_hash": schedule.hash,
        "schedule_notes": list(schedule.notes),
        "options": {**options, "duration_s": result.duration_s, "warmup_s": result.warmup_s},
        **provenance(command),
        "plan": None if plan is None else plan.to_data(),
    }
    return document, records
