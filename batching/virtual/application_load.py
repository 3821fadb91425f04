"""The requests of a run: those that arrive by the schedule, and those of applications that follow on answers.

`ApplicationLoad` is data. `Joins` is the state of one run of it in virtual time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tenuto.batching.applications.application_graph import ApplicationGraph
from tenuto.batching.applications.application_run import ApplicationRun
from tenuto.batching.applications.stage_times import StageTimes
from tenuto.batching.core.system import INF, TIME_TOLERANCE_MS, System
from tenuto.batching.virtual.virtual_steps import RequestTokens
from tenuto.outcome import OUTCOMES, Outcome
from tenuto.placement import ModelSpec
from tenuto.placement.application import Application, Stage, in_order
from tenuto.placement.generates import TokenSlo
from tenuto.placement.generation_capacity import with_lengths


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
    tokens: RequestTokens | None = None  # of each request, when a model generates
    sizes: NDArray[np.int64] | None = None  # a row for each request, when requests of a model vary in size
    slos: tuple[TokenSlo | None, ...] = ()  # of each application that streams

    @property
    def planned(self) -> int:
        """How many requests arrive at a time that is known before the run; these are the first ones."""
        return int(np.isfinite(self.times_ms).sum())


class Joins:
    """Runs the applications of a load on the engine of virtual time (`tenuto.batching.virtual.engine.Follows`).

    By call, `outcome` is FAILED as long as it has not ended, `answered_ms` is NaN unless it got all answers, and
    `stage_ms` is how long each stage took from when it was due, NaN if it is not complete. `first_ms` is when the first
    token of a stream came, and `tokens` how many it has; NaN and 0 for others. By model, `lost_alone` counts the
    requests that belong to no call, arrived after the warm-up and were lost.
    """

    def __init__(
        self,
        load: ApplicationLoad,
        *,
        counted_from_ms: float = 0.0,
        make_run: Callable[[ApplicationGraph, float, float, StageTimes], ApplicationRun] = ApplicationRun,
    ) -> None:
        """Begin with the first request.

        Args:
            load: the requests.
            counted_from_ms: end of the warm-up; only what arrives from then on is counted.
            make_run: makes the run of a call.
        """
        self._load, self._make_run, self._times = load, make_run, StageTimes()
        self._counted_from_ms = counted_from_ms
        self._graphs = [ApplicationGraph.of(application) for application in load.applications]
        self._owner, self._stage, self._deadlines_ms = load.owner.tolist(), load.stage.tolist(), load.deadlines_ms
        self._rows: dict[tuple[int, int], list[int]] = {}
        for row, (call, stage) in enumerate(zip(self._owner, self._stage, strict=True)):
            self._rows.setdefault((call, stage), []).append(row)
        self._runs: dict[int, ApplicationRun] = {}  # those under way, by call
        self._sent: dict[int, set[int]] = {}  # their requests that have no answer, by call
        # Deadlines of the first requests of the call that began last: these stand one behind the other in the schedule.
        self._first_ms: dict[int, float | None] = {}
        self._ended = [[0] * len(OUTCOMES) for _ in load.applications]
        self.lost_alone: Counter[int] = Counter()
        self.outcome = np.full(len(load.calls), Outcome.FAILED, np.int8)
        self.answered_ms, self.first_ms = (np.full(len(load.calls), np.nan) for _ in range(2))
        self.tokens = np.zeros(len(load.calls), np.int64)
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
        return self._first_ms[request]

    def whole_by_ms(self, request: int) -> float | None:
        """Return when a stage must have the whole answer of a request, INF where it is streamed; None for a request
        that is no stage's."""
        run, stage = self._runs.get(self._owner[request]), self._stage[request]
        if run is None:
            return None
        return INF if run.graph.stages[stage].is_streamed else run.latest_end_ms(stage)

    def answered(
        self, requests: Iterable[int], now_ms: float, first_ms: Mapping[int, float] | None = None
    ) -> list[tuple[int, float | None]]:
        """Return the requests that are due because these were answered, each with its deadline in ms, and those that
        are withdrawn, with None. `first_ms`: when their first tokens came, of those that were generated."""
        changes: list[tuple[int, float | None]] = []
        for request in requests:
            call, stage = self._owner[request], self._stage[request]
            run = self._runs.get(call)
            if run is not None:
                self._sent[call].discard(request)
                at_ms = now_ms
                if run.graph.stages[stage].is_streamed and self._load.tokens is not None:
                    at_ms = (first_ms or {}).get(request, now_ms)
                    self.first_ms[call], self.tokens[call] = at_ms, self._load.tokens.output[request]
                changes += self._send_due(run, call, run.answered(stage, at_ms), now_ms)
        return changes

    def given_up(self, requests: Iterable[int], outcome: Outcome, now_ms: float) -> list[tuple[int, float | None]]:
        """As `answered`, for requests that were expired, rejected or failed."""
        changes: list[tuple[int, float | None]] = []
        for request in requests:
            call = self._owner[request]
            if call < 0 and self._load.times_ms[request] >= self._counted_from_ms:
                self.lost_alone[int(self._load.model_index[request])] += 1
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
        self._first_ms = dict(self._send_due(run, call, run.begin(now), now))
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
            self.answered_ms[call] = now
            self._end(run, call, Outcome.LATE if self._is_late(run, call) else Outcome.OK)
        else:
            self._sent[call].update(row for row, _ in changes)
        return changes

    def _is_late(self, run: ApplicationRun, call: int) -> bool:
        """Say whether an answer missed its deadline: of a stream, the first token, or the mean time of further ones."""
        last_ms, first_ms, tokens = self.answered_ms[call], self.first_ms[call], self.tokens[call]
        slo = self._load.slos[self._load.calls[call][0]] if tokens else None
        if slo is None:
            return bool(last_ms - run.arrived_ms > run.graph.slo_ms + TIME_TOLERANCE_MS)
        return not slo.is_met_by(first_ms - run.arrived_ms, last_ms - first_ms, tokens, TIME_TOLERANCE_MS)

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


def make_application_load(
    models: Sequence[ModelSpec],
    applications: Sequence[Application],
    targets: Sequence[ModelSpec],
    times_ms: NDArray[np.float64],
    target_index: NDArray[np.int32],
    draws: Callable[..., np.random.Generator],
    *,
    sizes: NDArray[np.int64] | None = None,
    tokens: RequestTokens | None = None,
) -> ApplicationLoad:
    """Return the requests to models that what clients send makes. How many requests a stage with `map` makes is drawn
    for every call, and how large requests are that clients do not send themselves.

    Args:
        models: the models of the plan, with those that are stages; positions are the models' indices.
        applications: applications whose stages are among the models.
        targets: what clients ask: some of the models, and behind them the applications.
        times_ms: when clients send, ascending.
        target_index: what they send then, by its place among the targets.
        draws: returns the source of randomness for a purpose, which is some words.
        sizes: of what they send, a row each, in the order of the target's sizes.
        tokens: of what they send, when a model generates.
    """
    index = {spec.name: position for position, spec in enumerate(models)}
    alone = targets[: len(targets) - len(applications)]
    blocks = []
    for place, spec in enumerate(alone):
        mine = np.flatnonzero(target_index == place)
        given = None if sizes is None else sizes[mine]
        blocks.append(_Requests(mine, np.zeros(len(mine), dtype=bool), index[spec.name], 0, spec.slo_ms, given))
    for place, app in enumerate(applications, len(alone)):
        mine = np.flatnonzero(target_index == place)
        for stage, entry, waits in _stage_requests(app, mine, draws):
            model = index[app.model_name(stage)]
            drawn = _stage_sizes(models[model], stage, targets[place], entry, sizes, partial(draws, "sizes", app.name))
            blocks.append(_Requests(entry, waits, model, app.stages.index(stage), app.slo_ms, drawn))
    if not blocks:
        blocks.append(_Requests(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=bool), 0, 0, 0.0))
    entry = np.concatenate([each.entry for each in blocks])
    stage_index = np.concatenate([np.full(len(each.entry), each.stage, dtype=np.int32) for each in blocks])
    is_later = np.concatenate([each.is_later for each in blocks])
    order = np.lexsort((stage_index, entry, is_later))
    entry = entry[order]
    at_ms = times_ms[entry]
    is_call = target_index >= len(alone)
    number_of_call = np.where(is_call, np.cumsum(is_call) - 1, -1)
    called = np.flatnonzero(is_call)
    allowed_ms = np.concatenate([np.full(len(each.entry), each.allowed_ms) for each in blocks])[order]
    none = np.zeros(len(times_ms), np.int64)
    sent = (tokens or RequestTokens(none, none)).of(entry)
    return ApplicationLoad(
        times_ms=np.where(is_later[order], np.nan, at_ms),
        model_index=np.concatenate([np.full(len(each.entry), each.model, dtype=np.int32) for each in blocks])[order],
        deadlines_ms=at_ms + allowed_ms,
        owner=number_of_call[entry],
        stage=stage_index[order],
        calls=dict(
            enumerate(zip((target_index[called] - len(alone)).tolist(), times_ms[called].tolist(), strict=True))
        ),
        applications=tuple(applications),
        tokens=_tokens(models, applications, target_index[entry] - len(alone), stage_index[order], sent, draws),
        sizes=_sizes_of(models, blocks)[order] if any(spec.sizes for spec in models) else None,
        slos=tuple(spec.slo for spec in targets[len(alone) :]),
    )


def _tokens(
    models: Sequence[ModelSpec],
    applications: Sequence[Application],
    application: NDArray[np.integer[Any]],
    stage: NDArray[np.int32],
    sent: RequestTokens,
    draws: Callable[..., np.random.Generator],
) -> RequestTokens | None:
    """Return the tokens of each request, which clients sent or which are drawn for its stage; None where no model
    generates.

    Args:
        models, applications, draws: as in `make_application_load`.
        application: of each request, by its place; negative if it belongs to none.
        stage: of each request, by its place in the application.
        sent: of each request, what the client sent with it.
    """
    writing = {spec.name: with_lengths(spec).generates for spec in models if spec.generates is not None}
    if not writing:
        return None
    for number, app in enumerate(applications):
        for place, each in enumerate(app.stages):
            generates = writing.get(app.model_name(each))
            if generates is not None and generates.prompt_tokens is not None and generates.output_tokens is not None:
                mine = np.flatnonzero((application == number) & (stage == place))
                lengths = (sent.prompt, generates.prompt_tokens), (sent.output, generates.output_tokens)
                for name, (column, drawn) in zip(("prompt_tokens", "output_tokens"), lengths, strict=True):
                    column[mine] = drawn.draw(len(mine), draws(name, app.name, each.label))
                if each.parameters is not None and each.parameters.max_tokens is not None:
                    sent.output[mine] = np.minimum(sent.output[mine], each.parameters.max_tokens)
    return sent


class _Requests(NamedTuple):
    """The requests to one model that arrivals of one name make, as one of their stages."""

    entry: NDArray[np.int64]  # of each request, the place of its arrival in the schedule
    is_later: NDArray[np.bool_]  # of each request, whether it waits for others
    model: int
    stage: int
    allowed_ms: float
    sizes: NDArray[np.int64] | None = None  # a row for each request, in the order of the model's sizes


def _stage_requests(
    application: Application, entries: NDArray[np.int64], draws: Callable[..., np.random.Generator]
) -> Iterator[tuple[Stage, NDArray[np.int64], NDArray[np.bool_]]]:
    """Yield every stage with its requests for the arrivals at these places of the schedule, and which of them wait for
    others. Those of a stage behind stages without requests do not wait.
    """
    is_open: dict[str, NDArray[np.bool_]] = {}  # by stage and arrival: whether stages that wait for it have to wait
    for stage in in_order(application.stages):
        counts = stage.draw_counts(len(entries), draws("counts", application.name, stage.label))
        waits = (
            np.any([is_open[label] for label in stage.after], axis=0) if stage.after else np.zeros(len(entries), bool)
        )
        is_open[stage.label] = waits | (counts > 0)
        yield stage, np.repeat(entries, counts), np.repeat(waits, counts)


def _stage_sizes(
    model: ModelSpec,
    stage: Stage,
    target: ModelSpec,
    entry: NDArray[np.int64],
    sent: NDArray[np.int64] | None,
    draws: Callable[..., np.random.Generator],
) -> NDArray[np.int64]:
    """Return the sizes of a stage's requests: those that the client sent where the stage takes the application's
    inputs, or else drawn ones."""
    sizes = np.zeros((len(entry), len(model.sizes)), dtype=np.int64)
    for column, (name, lengths) in enumerate(model.sizes.items()):
        if sent is None or stage.after or stage.map:
            sizes[:, column] = lengths.draw(len(entry), draws(stage.label, name))
        else:
            sizes[:, column] = sent[entry, [*target.sizes].index(name)]
    return sizes


def _sizes_of(models: Sequence[ModelSpec], blocks: Sequence[_Requests]) -> NDArray[np.int64]:
    """Return the sizes of all requests, as wide as those of the model with the most; the rest of a row is 0."""
    widest = max(len(spec.sizes) for spec in models)
    rows = np.zeros((sum(len(each.entry) for each in blocks), widest), dtype=np.int64)
    begin = 0
    for each in blocks:
        width, end = len(models[each.model].sizes), begin + len(each.entry)
        if each.sizes is not None:
            rows[begin:end, :width] = each.sizes[:, :width]
        begin = end
    return rows
