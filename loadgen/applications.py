"""Applications in virtual time: the arrivals of their first stages, what follows when, and how the whole ended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tenuto.batching.interface import TIME_TOLERANCE_MS
from tenuto.batching.result import SimulationResult
from tenuto.loadgen.schedule import make_schedule
from tenuto.placement import ModelSpec
from tenuto.placement.applications import Application

__all__ = ["ApplicationLoad", "make_application_load"]


@dataclass
class ApplicationLoad:
    """The requests of a run with applications. Those of later stages stand behind all others, their times NaN.

    `owner[r]` is the call of an application that request r belongs to, -1 for a request of its own; `stage[r]` its
    stage.
    """

    times_ms: NDArray[np.float64]
    model_index: NDArray[np.int32]
    deadlines_ms: NDArray[np.float64]
    owner: NDArray[np.int64]
    stage: NDArray[np.int32]
    calls: tuple[tuple[int, float], ...]  # application, arrival in ms
    applications: tuple[Application, ...]

    def __post_init__(self) -> None:
        """Derive what follows on what."""
        self._left: list[list[int]] = []  # by call and stage: requests not answered yet
        self._waits: list[list[int]] = []  # by call and stage: stages before it that are not complete
        self._rows: dict[tuple[int, int], list[int]] = {}
        self._later = [
            [[i for i, other in enumerate(app.stages) if stage.label in other.after] for stage in app.stages]
            for app in self.applications
        ]
        for index, _ in self.calls:
            stages = self.applications[index].stages
            self._left.append([stage.count for stage in stages])
            self._waits.append([len(stage.after) for stage in stages])
        for row in np.flatnonzero((self.owner >= 0) & np.isnan(self.times_ms)).tolist():
            self._rows.setdefault((int(self.owner[row]), int(self.stage[row])), []).append(row)

    def followers(self, requests: list[int], _now: float) -> list[tuple[int, float]]:
        """Return the requests that arrive because these have been answered, each with its deadline."""
        arriving: list[tuple[int, float]] = []
        for request in requests:
            call = int(self.owner[request])
            if call < 0:
                continue
            stage = int(self.stage[request])
            left = self._left[call]
            left[stage] -= 1
            if left[stage]:
                continue
            for later in self._later[self.calls[call][0]][stage]:
                self._waits[call][later] -= 1
                if not self._waits[call][later]:
                    arriving += [(row, float(self.deadlines_ms[row])) for row in self._rows.get((call, later), ())]
        return arriving

    def summary(self, result: SimulationResult) -> dict[str, dict[str, Any]]:
        """Return offered, ok, attainment, goodput and latency percentiles per application, of calls after the warm-up.

        A call is ok when every request of every stage was answered within the application's deadline.
        """
        answered = np.full(len(self.calls), -np.inf)
        mine = np.flatnonzero(self.owner >= 0)
        ended = np.where(np.isnan(result.answered_ms[mine]), np.inf, result.answered_ms[mine])
        np.maximum.at(answered, self.owner[mine], ended)
        found = {}
        window_s = result.duration_s - result.warmup_s
        for index, application in enumerate(self.applications):
            calls = np.array(
                [i for i, (app, at) in enumerate(self.calls) if app == index and at >= result.warmup_s * 1000.0],
                dtype=np.int64,
            )
            arrived = np.array([self.calls[i][1] for i in calls.tolist()])
            latency = answered[calls] - arrived
            ok = int((latency <= application.slo_ms + TIME_TOLERANCE_MS).sum())
            done = latency[np.isfinite(latency)]
            found[application.name] = {
                "offered": len(calls),
                "ok": ok,
                "attainment": ok / len(calls) if len(calls) else None,
                "goodput_rps": ok / window_s if window_s > 0 else 0.0,
                "slo_ms": application.slo_ms,
                "p50_ms": float(np.percentile(done, 50)) if done.size else None,
                "p99_ms": float(np.percentile(done, 99)) if done.size >= 459 else None,
            }
        return found


def make_application_load(
    models: Sequence[ModelSpec],
    applications: Sequence[Application],
    duration_s: float,
    seed: int,
    rate_scale: float = 1.0,
) -> ApplicationLoad:
    """Return the load of a plan or workload: applications arrive by their own process, their stages only through them.

    Args:
        models: of the plan, stages included; positions are the models' indices.
        applications: whose stages are among the models.
        duration_s: length of the run.
        seed: 0 or larger; each model and application draws from its own stream.
        rate_scale: factor on every rate.

    Raises:
        InvalidInputError: as `make_schedule`.
    """
    index = {spec.name: position for position, spec in enumerate(models)}
    staged = {app.model_name(stage) for app in applications for stage in app.stages}
    alone = [spec for spec in models if spec.name not in staged]
    callers = [
        ModelSpec(name=app.name, rate_rps=app.rate_rps, slo_ms=app.slo_ms, arrival=app.arrival) for app in applications
    ]
    schedule = make_schedule([*alone, *callers], duration_s, seed, rate_scale)
    rows: list[tuple[float, int, float, int, int]] = []  # time, model, deadline, call, stage
    later: list[tuple[float, int, float, int, int]] = []
    calls: list[tuple[int, float]] = []
    for at, drawn in zip(schedule.times_ms.tolist(), schedule.model_index.tolist(), strict=True):
        if drawn < len(alone):
            rows.append((at, index[alone[drawn].name], at + alone[drawn].slo_ms, -1, 0))
            continue
        number = drawn - len(alone)
        application = applications[number]
        for position, stage in enumerate(application.stages):
            model = index[application.model_name(stage)]
            row = (at, model, at + application.complete_by_ms(stage), len(calls), position)
            (later if stage.after else rows).extend([row] * stage.count)
        calls.append((number, at))
    every = [*rows, *later]
    times = np.array([row[0] for row in every])
    times[len(rows) :] = np.nan
    return ApplicationLoad(
        times, np.array([row[1] for row in every], dtype=np.int32), np.array([row[2] for row in every]),
        np.array([row[3] for row in every], dtype=np.int64), np.array([row[4] for row in every], dtype=np.int32),
        tuple(calls), tuple(applications),
    )  # fmt: skip
