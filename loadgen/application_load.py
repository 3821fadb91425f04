"""The requests of a run: those that arrive by the schedule, and those of applications that follow on answers.

`ApplicationLoad` is data. `Joins` is the state of one run of it in virtual time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tenuto.batching.applications.application_graph import ApplicationGraph
from tenuto.batching.applications.application_run import ApplicationRun
from tenuto.batching.applications.stage_times import StageTimes
from tenuto.batching.core.system import TIME_TOLERANCE_MS, System
from tenuto.batching.virtual.virtual_steps import RequestTokens
from tenuto.errors import InvalidInputError
from tenuto.loadgen.schedule import Schedule, make_schedule, seed_for
from tenuto.outcome import OUTCOMES, Outcome
from tenuto.placement import ModelSpec
from tenuto.placement.application import Application, in_order
from tenuto.placement.generation_capacity import with_lengths
from tenuto.placement.workload import draw_sizes, own_demands


@dataclass(frozen=True)
class ApplicationLoad:
    """The requests of a run. With applications, requests of later stages stand behind all others, with the time NaN.

    A *call* is one request of an application; its number is its place among all calls of the run.
    `owner[r]` is the call of request r, -1 if it belongs to none; `stage[r]` is its stage. `calls` has the calls by
    number: (application, arrival in ms).
    """

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
    """Runs the applications of a load on the engine of virtual time (`tenuto.batching.virtual.engine.Follows`).

    By call, `outcome` is FAILED as long as it has not ended, `answered_ms` is NaN unless it got all answers, and
    `stage_ms` is how long each stage took from when it was due, NaN if it is not complete.
    """

    def __init__(
        self,
        load: ApplicationLoad,
        *,
        counted_from_ms: float = 0.0,
        response_ms: float = 0.0,
        make_run: Callable[[ApplicationGraph, float, float, StageTimes], ApplicationRun] = ApplicationRun,
    ) -> None:
        """Begin with the first request.

        Args:
            load: the requests.
            counted_from_ms: end of the warm-up; only calls that arrive from then on are counted.
            response_ms: the way of an answer back to the client.
            make_run: makes the run of a call.
        """
        self._load, self._make_run, self._times = load, make_run, StageTimes()
        self._counted_from_ms, self._response_ms = counted_from_ms, response_ms
        self._graphs = [ApplicationGraph.of(application) for application in load.applications]
        self._owner, self._stage, self._deadlines_ms = load.owner.tolist(), load.stage.tolist(), load.deadlines_ms
        self._rows: dict[tuple[int, int], list[int]] = {}
        for row, (call, stage) in enumerate(zip(self._owner, self._stage, strict=True)):
            self._rows.setdefault((call, stage), []).append(row)
        self._runs: dict[int, ApplicationRun] = {}  # those under way, by call
        self._sent: dict[int, set[int]] = {}  # their requests that have no answer, by call
        self._ended = [[0] * len(OUTCOMES) for _ in load.applications]
        self.outcome = np.full(len(load.calls), Outcome.FAILED, np.int8)
        self.answered_ms = np.full(len(load.calls), np.nan)
        self.stage_ms = np.full(
            (len(load.calls), max((len(graph.stages) for graph in self._graphs), default=0)), np.nan
        )
        for call in load.calls.keys() - {*self._owner}:  # those that make no request
            self._begin(call, load.calls[call][1])

    def follow(self, system: System) -> None:
        """Reckon with the latencies of this system from now on."""
        self._times.follow(system)

    def arrived(self, request: int, now_ms: float) -> float | None:
        """Return the deadline of a request; None: its call is given up or over. With its first request a call
        begins."""
        call = self._owner[request]
        if call < 0:
            return float(self._deadlines_ms[request])
        if call not in self._sent:
            self._begin(call, now_ms)
        run = self._runs.get(call)
        if run is None:
            return None
        self._sent[call].add(request)
        return run.deadline_ms(self._stage[request], now_ms)

    def whole_by_ms(self, request: int) -> float | None:
        """Return when a stage must have the whole answer of a request; None for a request that is no stage's."""
        run = self._runs.get(self._owner[request])
        return None if run is None else run.latest_end_ms(self._stage[request])

    def answered(self, requests: Iterable[int], now_ms: float) -> list[tuple[int, float | None]]:
        """Return the requests that are due because these were answered, each with its deadline in ms, and those that
        are withdrawn, with None."""
        changes: list[tuple[int, float | None]] = []
        for request in requests:
            run = self._runs.get(self._owner[request])
            if run is not None:
                self._sent[self._owner[request]].discard(request)
                changes += self._send_due(run, self._owner[request], run.answered(self._stage[request], now_ms), now_ms)
        return changes

    def given_up(self, requests: Iterable[int], outcome: Outcome, now_ms: float) -> list[tuple[int, float | None]]:
        """As `answered`, for requests that were expired, rejected or failed."""
        changes: list[tuple[int, float | None]] = []
        for request in requests:
            call = self._owner[request]
            run = self._runs.get(call)
            if run is not None:
                self._sent[call].discard(request)
                if run.lost(self._stage[request], now_ms):
                    changes += self._end(run, call, outcome)
                else:
                    changes += self._send_due(run, call, run.due(), now_ms)
        return changes

    def _begin(self, call: int, now: float) -> None:
        """Begin a call. Requests of stages that are due now arrive by the schedule."""
        application, at_ms = self._load.calls[call]
        graph = self._graphs[application]
        run = self._runs[call] = self._make_run(graph, at_ms, at_ms + graph.slo_ms, self._times)
        self._sent[call] = set()
        self._send_due(run, call, run.begin(now), now)
        self._sent[call] = set()

    def _send_due(self, run: ApplicationRun, call: int, due: list[int], now: float) -> list[tuple[int, float | None]]:
        """Return the requests of stages that are due. When the run cannot end in time, return those to withdraw."""
        changes: list[tuple[int, float | None]] = []
        for stage in due:  # it grows by those that are due behind stages without requests
            if run.cannot_end(stage, now):
                run.give_up(now)
                return self._end(run, call, Outcome.EXPIRED)
            rows = self._rows.get((call, stage), [])
            due += run.expand(stage, len(rows), now)
            if rows:
                deadline_ms = run.deadline_ms(stage, now)
                changes += [(row, deadline_ms) for row in rows]
        if run.is_complete:
            at_ms = self.answered_ms[call] = now + self._response_ms
            is_late = at_ms - run.arrived_ms > run.graph.slo_ms + TIME_TOLERANCE_MS
            self._end(run, call, Outcome.LATE if is_late else Outcome.OK)
        else:
            self._sent[call].update(row for row, _ in changes)
        return changes

    def _end(self, run: ApplicationRun, call: int, outcome: Outcome) -> list[tuple[int, float | None]]:
        """Return the requests of a call that is over, to withdraw them."""
        del self._runs[call]
        self.outcome[call] = outcome
        self.stage_ms[call, : len(run.stage_ms)] = run.stage_ms
        if run.arrived_ms >= self._counted_from_ms:
            self._ended[self._load.calls[call][0]][outcome] += 1
        sent, self._sent[call] = self._sent[call], set()
        return [(row, None) for row in sorted(sent)]

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
    clients make of models by themselves. How many requests a stage with `map` makes is drawn for every call.

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
    drawn = schedule.model_index
    blocks = []
    for place, spec in enumerate(alone):
        mine = np.flatnonzero(drawn == place)
        blocks.append(_Requests(mine, np.zeros(len(mine), dtype=bool), index[spec.name], 0, spec.slo_ms))
    for place, app in enumerate(applications, len(alone)):
        blocks += _stage_requests(app, np.flatnonzero(drawn == place), index, seed)
    if not blocks:
        blocks.append(_Requests(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=bool), 0, 0, 0.0))
    entry = np.concatenate([each.entry for each in blocks])
    stage = np.concatenate([np.full(len(each.entry), each.stage, dtype=np.int32) for each in blocks])
    is_later = np.concatenate([each.is_later for each in blocks])
    order = np.lexsort((stage, entry, is_later))
    entry = entry[order]
    at_ms = schedule.times_ms[entry]
    is_call = drawn >= len(alone)
    number_of_call = np.where(is_call, np.cumsum(is_call) - 1, -1)
    called = np.flatnonzero(is_call)
    model_index = np.concatenate([np.full(len(each.entry), each.model, dtype=np.int32) for each in blocks])[order]
    allowed_ms = np.concatenate([np.full(len(each.entry), each.allowed_ms) for each in blocks])[order]
    sizes_of_rows = None
    if any(spec.sizes for spec in models):
        sizes_of_rows = draw_sizes(models, model_index, lambda at, name: seed_for(seed, "sizes", models[at].name, name))
    return ApplicationLoad(
        times_ms=np.where(is_later[order], np.nan, at_ms),
        model_index=model_index,
        deadlines_ms=at_ms + allowed_ms,
        owner=number_of_call[entry],
        stage=stage[order],
        calls=dict(
            enumerate(zip((drawn[called] - len(alone)).tolist(), schedule.times_ms[called].tolist(), strict=True))
        ),
        applications=tuple(applications),
        schedule=schedule,
        tokens=_tokens(models, applications, schedule, entry, stage[order], seed),
        sizes=sizes_of_rows,
    )


def _tokens(
    models: Sequence[ModelSpec],
    applications: Sequence[Application],
    schedule: Schedule,
    entry: NDArray[np.int64],
    stage: NDArray[np.int32],
    seed: int,
) -> RequestTokens | None:
    """Return the tokens of each request, by its arrival and its stage; None where no model generates."""
    writing = {spec.name: with_lengths(spec).generates for spec in models if spec.generates is not None}
    if not writing:
        return None
    none = np.zeros(len(schedule.times_ms), np.int64)
    tokens = (schedule.tokens or RequestTokens(none, none)).of(entry)
    for number, app in enumerate(applications, len(schedule.names) - len(applications)):
        for place, each in enumerate(app.stages):
            generates = writing.get(app.model_name(each))
            if generates is not None and generates.prompt_tokens is not None and generates.output_tokens is not None:
                mine = np.flatnonzero((schedule.model_index[entry] == number) & (stage == place))
                lengths = (tokens.prompt, generates.prompt_tokens), (tokens.output, generates.output_tokens)
                for name, (column, drawn) in zip(("prompt_tokens", "output_tokens"), lengths, strict=True):
                    column[mine] = drawn.draw(len(mine), seed_for(seed, name, app.name, each.label))
                if each.parameters is not None and each.parameters.max_tokens is not None:
                    tokens.output[mine] = np.minimum(tokens.output[mine], each.parameters.max_tokens)
    return tokens


class _Requests(NamedTuple):
    """The requests to one model that arrivals of one name make, as one of their stages."""

    entry: NDArray[np.int64]  # of each request, the place of its arrival in the schedule
    is_later: NDArray[np.bool_]  # of each request, whether it waits for others
    model: int
    stage: int
    allowed_ms: float


def _stage_requests(
    application: Application, entries: NDArray[np.int64], index: Mapping[str, int], seed: int
) -> Iterator[_Requests]:
    """Yield the requests of every stage for the arrivals at these places of the schedule.

    Functions make Poisson numbers of requests, unless they make `count` at most. Those of a stage behind stages without
    requests do not wait.
    """
    is_open: dict[str, NDArray[np.bool_]] = {}  # by stage and arrival: whether stages that wait for it have to wait
    places = {stage.label: place for place, stage in enumerate(application.stages)}
    for stage in in_order(application.stages):
        counts = np.full(len(entries), int(stage.count), dtype=np.int64)
        if stage.most_requests > stage.count:
            drawn = seed_for(seed, "counts", application.name, stage.label).poisson(stage.count, len(entries))
            counts = np.minimum(drawn, stage.most_requests)
        waits = (
            np.any([is_open[label] for label in stage.after], axis=0) if stage.after else np.zeros(len(entries), bool)
        )
        is_open[stage.label] = waits | (counts > 0)
        yield _Requests(
            np.repeat(entries, counts),
            np.repeat(waits, counts),
            index[application.model_name(stage)],
            places[stage.label],
            application.complete_by_ms(stage),
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
