"""A simulation's result in the form of a measured run, so that the same report and comparison serve both."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tenuto.batching.result import SimulationResult
from tenuto.loadgen.output import provenance
from tenuto.loadgen.records import Records
from tenuto.loadgen.schedule import Schedule
from tenuto.loadgen.verdict import judge, summarise
from tenuto.placement import Plan

__all__ = ["describe_simulation", "simulated_records"]


def simulated_records(result: SimulationResult) -> Records:
    """Return one row per simulated request: sent when scheduled, status as a server would have answered."""
    ids = np.array([spec.id for spec in result.setup.gpulets] + [""], dtype=object)
    answered = ~np.isnan(result.answered_ms)
    status = np.where(answered, 200, 504).astype(np.int32)
    status[result.outcome == 3] = 429
    return Records(
        request=np.arange(len(result.arrival_ms), dtype=np.int64), model=result.model, scheduled_ms=result.arrival_ms,
        sent_ms=result.arrival_ms, answered_ms=result.answered_ms, status=status, outcome=result.outcome,
        batching_ms=result.dispatched_ms - result.arrival_ms, gpulet_queue_ms=result.start_ms - result.dispatched_ms,
        execution_ms=result.finish_ms - result.start_ms, batch_size=result.batch_size, gpulet=ids[result.gpulet],
    )  # fmt: skip


def describe_simulation(
    result: SimulationResult, schedule: Schedule, plan: Plan | None, *, options: dict[str, Any], command: Sequence[str]
) -> tuple[dict[str, Any], Records]:
    """Return the result document and the records of a simulated run.

    Args:
        result: what the simulator returned.
        schedule: its arrivals.
        plan: the simulated plan; None when every GPU hosts every model.
        options: settings worth keeping, such as seed, rate_scale and scheduler; the duration is added.
        command: the command line that made it.
    """
    records = simulated_records(result)
    names = [spec.name for spec in result.setup.requested]
    slos = {spec.name: spec.slo_ms for spec in result.setup.requested}
    summary = summarise(records, names, warmup_ms=1000.0 * result.warmup_s, duration_ms=1000.0 * result.duration_s)
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
