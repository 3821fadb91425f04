"""The requests of a run: those that arrive by the schedule, and those of applications that follow on answers.

`ApplicationLoad` is data, the same for the simulator and for load clients. `Joins` is the state of one run of a load.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from tenuto.batching.core.system import TIME_TOLERANCE_MS
from tenuto.batching.virtual.virtual_steps import RequestTokens
from tenuto.errors import InvalidInputError
from tenuto.loadgen.schedule import Schedule, make_schedule, seed_for
from tenuto.outcome import OUTCOMES, Outcome
from tenuto.placement import ModelSpec
from tenuto.placement.application import Application
from tenuto.placement.workload import draw_sizes, own_demands


@dataclass(frozen=True)
class ApplicationLoad:
    """The requests of a run. With applications, requests of later stages stand behind all others, with the time NaN.

    A *call* is one request of an application; its number is its place among all calls of the run. `number[r]` is the
    number of request r in the whole run. `owner[r]` is the call of r, -1 if it belongs to none; `stage[r]` is its
    stage. `calls` has the calls of this load by number: (application, arrival in ms).
    """

    number: NDArray[np.int64]
    times_ms: NDArray[np.float64]
    model_index: NDArray[np.int32]
    deadlines_ms: NDArray[np.float64]
    owner: NDArray[np.int64]
    stage: NDArray[np.int32]
    calls: dict[int, tuple[int, float]]
    applications: tuple[Application, ...]
    schedule: Schedule
    tokens: RequestTokens | None = None  # of each request, when a model generates
    sizes: NDArray[np.int64] | None = None  # a row for each request, when requests of a model vary in size

    @property
    def planned(self) -> int:
        """How many requests arrive at a time that is known before the run; these are the first ones."""
        return int(np.isfinite(self.times_ms).sum())


class Joins:
    """Which requests of one run were answered and which were given up, call by call, and how each call ended.

    When a request of a call gets no answer, the call ends: its later stages are not sent any more. By call, `outcome`
    is FAILED as long as it has not ended, `answered_ms` is NaN unless it got all answers, and `stage_ms` is how long
    each stage took from when it was due, NaN if it is not complete.
    """

    def __init__(self, load: ApplicationLoad, *, counted_from_ms: float = 0.0, response_ms: float = 0.0) -> None:
        """Begin with the first request.

        Args:
            load: the requests.
            counted_from_ms: end of the warm-up; only calls that arrive from then on are counted.
            response_ms: the way of an answer back to the client.
        """
        self._load = load
        self._counted_from_ms, self._response_ms = counted_from_ms, response_ms
        self._owner = load.owner.tolist()
        self._stage = load.stage.tolist()
        self._left = {
            call: [s.usual_requests for s in load.applications[app].stages] for call, (app, _) in load.calls.items()
        }
        self._waits = {
            call: [len(s.after) for s in load.applications[app].stages] for call, (app, _) in load.calls.items()
        }
        self._later = [
            [[i for i, other in enumerate(app.stages) if stage.label in other.after] for stage in app.stages]
            for app in load.applications
        ]
        self._rows: dict[tuple[int, int], list[int]] = {}
        for row in range(load.planned, len(self._owner)):
            self._rows.setdefault((self._owner[row], self._stage[row]), []).append(row)
        self._ended = [[0] * len(OUTCOMES) for _ in load.applications]
        stages = len(load.calls), max((len(app.stages) for app in load.applications), default=0)
        self.outcome = np.full(len(load.calls), Outcome.FAILED, np.int8)
        self.answered_ms, self.stage_ms = np.full(len(load.calls), np.nan), np.full(stages, np.nan)
        self._due_ms = np.full(stages, np.nan)
        for call, (application, at_ms) in load.calls.items():
            due_ms = [np.nan if stage.after else at_ms for stage in load.applications[application].stages]
            self._due_ms[call, : len(due_ms)] = due_ms

    def answered(self, requests: Iterable[int], now_ms: float = 0.0) -> list[tuple[int, float]]:
        """Return the requests that are due because these were answered, each with its deadline in ms."""
        due: list[tuple[int, float]] = []
        for request in requests:
            call = self._owner[request]
            if call not in self._left:
                continue
            stage = self._stage[request]
            left = self._left[call]
            left[stage] -= 1
            if left[stage]:
                continue
            self.stage_ms[call, stage] = now_ms - self._due_ms[call, stage]
            waits = self._waits[call]
            application, at_ms = self._load.calls[call]
            for later in self._later[application][stage]:
                waits[later] -= 1
                if not waits[later]:
                    self._due_ms[call, later] = now_ms
                    due += [(row, float(self._load.deadlines_ms[row])) for row in self._rows.get((call, later), ())]
            if not any(left):
                slo_ms = self._load.applications[application].slo_ms
                self.answered_ms[call] = now_ms + self._response_ms
                is_late = self.answered_ms[call] - at_ms > slo_ms + TIME_TOLERANCE_MS
                self._end(call, Outcome.LATE if is_late else Outcome.OK)
        return due

    def given_up(self, requests: Iterable[int], outcome: Outcome = Outcome.FAILED) -> None:
        """End the calls of these requests: they were expired, rejected or failed."""
        for request in requests:
            if self._owner[request] in self._left:
                self._end(self._owner[request], outcome)

    def _end(self, call: int, outcome: Outcome) -> None:
        del self._left[call]
        self.outcome[call] = outcome
        application, at_ms = self._load.calls[call]
        if at_ms >= self._counted_from_ms:
            self._ended[application][outcome] += 1

    def counts(self) -> dict[str, list[int]]:
        """Return the calls of every application that have ended, by outcome."""
        return {app.name: row for app, row in zip(self._load.applications, self._ended, strict=True)}

    def lost(self) -> dict[str, int]:
        """Return how many calls of every application have ended without all answers."""
        return {name: sum(row[Outcome.EXPIRED :]) for name, row in self.counts().items()}


def scaled_slos(applications: Iterable[Application], factor: float) -> tuple[Application, ...]:
    """Return applications with every SLO multiplied."""
    return tuple(app.model_copy(update={"slo_ms": app.slo_ms * factor}) for app in applications)


def make_application_load(
    models: Sequence[ModelSpec],
    applications: Sequence[Application],
    duration_s: float,
    seed: int,
    rate_scale: float = 1.0,
) -> ApplicationLoad:
    """Return the load of a plan or workload. Applications arrive by their own process, and so do the requests that
    clients make of models by themselves. A stage with `map` makes as many requests as it does in the mean, at least 1.

    Args:
        models: the models of the plan, with those that are stages; positions are the models' indices.
        applications: applications whose stages are among the models.
        duration_s: length of the run.
        seed: 0 or larger; each model and application draws from its own stream.
        rate_scale: factor on every rate.

    Raises:
        InvalidInputError: as in `make_schedule`.
    """
    index = {spec.name: position for position, spec in enumerate(models)}
    targets = client_targets(models, applications)
    alone = targets[: len(targets) - len(applications)]
    schedule = make_client_schedule(targets, applications, duration_s, seed, rate_scale)
    # The requests that one arrival of each name makes: (model, time allowed in ms, stage, whether it is sent later).
    shapes = [[(index[spec.name], spec.slo_ms, 0, False)] for spec in alone]
    shapes += [
        [
            (index[app.model_name(stage)], app.complete_by_ms(stage), position, bool(stage.after))
            for position, stage in enumerate(app.stages)
            for _ in range(stage.usual_requests)
        ]
        for app in applications
    ]
    drawn = schedule.model_index
    sizes = np.array([len(shape) for shape in shapes], dtype=np.int64)
    begins = np.cumsum(sizes) - sizes
    parts = [part for shape in shapes for part in shape]
    counts = sizes[drawn]
    entry = np.repeat(np.arange(len(schedule), dtype=np.int64), counts)
    within = np.arange(entry.size, dtype=np.int64) - np.repeat(np.cumsum(counts) - counts, counts)
    part = begins[drawn][entry] + within
    is_call = drawn >= len(alone)
    number_of_call = np.where(is_call, np.cumsum(is_call) - 1, -1)
    at_ms = schedule.times_ms[entry]
    is_later = np.array([p[3] for p in parts], dtype=bool)[part]
    order = np.concatenate((np.flatnonzero(~is_later), np.flatnonzero(is_later)))
    times = at_ms[order]
    times[int((~is_later).sum()) :] = np.nan
    called = np.flatnonzero(is_call)
    model_index = np.array([p[0] for p in parts], dtype=np.int32)[part][order]
    sizes_of_rows = None
    if any(spec.sizes for spec in models):
        sizes_of_rows = draw_sizes(models, model_index, lambda at, name: seed_for(seed, "sizes", models[at].name, name))
    return ApplicationLoad(
        number=np.arange(entry.size, dtype=np.int64),
        times_ms=times,
        model_index=model_index,
        deadlines_ms=(at_ms + np.array([p[1] for p in parts])[part])[order],
        owner=number_of_call[entry][order],
        stage=np.array([p[2] for p in parts], dtype=np.int32)[part][order],
        calls=dict(
            enumerate(zip((drawn[called] - len(alone)).tolist(), schedule.times_ms[called].tolist(), strict=True))
        ),
        applications=tuple(applications),
        schedule=schedule,
        tokens=None if schedule.tokens is None else schedule.tokens.of(entry[order]),
        sizes=sizes_of_rows,
    )


def client_targets(models: Sequence[ModelSpec], applications: Sequence[Application]) -> tuple[ModelSpec, ...]:
    """Return the models that clients ask by themselves, and behind them the applications, which clients ask as they ask
    models."""
    by_name = {spec.name: spec for spec in models}
    targets = own_demands(models, applications)
    for app in applications:
        first = [by_name[app.model_name(stage)] for stage in app.stages if not stage.after]
        sizes = {name: lengths for spec in first for name, lengths in spec.sizes.items()}
        targets.append(
            ModelSpec(name=app.name, rate_rps=app.rate_rps, slo_ms=app.slo_ms, arrival=app.arrival, sizes=sizes)
        )
    return tuple(targets)


def make_client_schedule(
    targets: Sequence[ModelSpec],
    applications: Sequence[Application],
    duration_s: float,
    seed: int,
    rate_scale: float = 1.0,
) -> Schedule:
    """Return when clients send what, and how large it is.

    Args:
        targets: what `client_targets` returns.
        applications: the last of them.
        duration_s: length of the run.
        seed: 0 or larger; each model and application draws from its own stream.
        rate_scale: factor on every rate.

    Raises:
        InvalidInputError: as in `make_schedule`. A problem of an application names it under `applications`.
    """
    try:
        schedule = replace(make_schedule(targets, duration_s, seed, rate_scale), applications=tuple(applications))
        names = {spec.name: tuple(spec.sizes) for spec in targets if spec.sizes}
        if not names:
            return schedule
        sizes = draw_sizes(
            targets, schedule.model_index, lambda at, name: seed_for(seed, "sizes", targets[at].name, name)
        )
        return replace(schedule, sizes=sizes, size_names=names)
    except InvalidInputError as error:
        problems = []
        for problem in error.problems:
            owner = next((a.name for a in applications if problem.path.startswith(f"models.{a.name}.")), None)
            path = problem.path if owner is None else f"applications{problem.path.removeprefix('models')}"
            problems.append(replace(problem, path=path))
        if not problems:
            raise
        raise InvalidInputError(problems) from error
