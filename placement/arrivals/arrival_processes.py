"""When requests arrive: one function per file key `arrival.process`.

Other packages add theirs, an `ArrivalProcess` each, by entry points of the group `tenuto.arrivals`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, cast

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, StrictBool, model_validator

from tenuto.documents import Fault, StrictModel, parse_document
from tenuto.errors import InvalidInputError, Problem, refused
from tenuto.files import csv_rows, parse_number
from tenuto.placement.arrivals.arrival import Arrival
from tenuto.placement.generates import MOST_TOKENS, tokens_of
from tenuto.plugins import ARRIVALS, cure_of_unknown, load_plugin, registered

Times = NDArray[np.float64]
_MOST_MS = 1e12  # limit: time of a line in a trace; 31 years
NotNegative = Annotated[float, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]


class NoOptions(StrictModel):
    """A process without options."""


class OnOffOptions(StrictModel):
    """Seconds with requests and seconds without, in turn."""

    on_s: Positive = 1.0
    off_s: NotNegative = 1.0


class DiurnalOptions(StrictModel):
    """A sine around the rate; `period_s` None: one period. An amplitude above 1 would be a negative rate."""

    period_s: Positive | None = None
    amplitude: Annotated[float, Field(ge=0, le=1)] = 0.5


class StepsOptions(StrictModel):
    """`factors` of the rate, each for an equal part of the duration; at least one is above 0."""

    factors: Annotated[tuple[NotNegative, ...], Field(min_length=1)] = (1.0,)

    @model_validator(mode="after")
    def _some_requests(self) -> StepsOptions:
        if not any(self.factors):
            raise Fault("all factors are 0, so there are no requests", "Give at least one above 0.")
        return self


class TraceOptions(StrictModel):
    """`rescale`: stretch the trace to the workload's rate."""

    rescale: StrictBool = False


def _poisson(rate_rps: float, duration_s: float, _options: NoOptions, generator: np.random.Generator) -> Times:
    return _renewal(lambda count: generator.exponential(1.0 / rate_rps, count), rate_rps, duration_s)


def _uniform(rate_rps: float, duration_s: float, _options: NoOptions, generator: np.random.Generator) -> Times:
    """Equal gaps; the first arrival at a random point of the first gap, so that several models do not march in step."""
    return np.arange(generator.random() / rate_rps, duration_s, 1.0 / rate_rps)


def _gamma(
    _model: str,
    rate_rps: float,
    duration_s: float,
    arrival: Arrival,
    _options: NoOptions,
    generator: np.random.Generator,
) -> Times:
    """Gamma-distributed gaps: shape k, scale 1/(k*rate); the coefficient of variation is k**-0.5."""
    shape = arrival.shape or (arrival.cv or 1.0) ** -2
    return _renewal(lambda count: generator.gamma(shape, 1.0 / (shape * rate_rps), count), rate_rps, duration_s)


def _on_off(rate_rps: float, duration_s: float, options: OnOffOptions, generator: np.random.Generator) -> Times:
    """Poisson bursts: `on_s` with requests, `off_s` without, in turn; the mean over a period is the rate."""
    on_s, period = options.on_s, options.on_s + options.off_s
    busy = _renewal(
        lambda n: generator.exponential(on_s / (rate_rps * period), n),
        rate_rps * period / on_s,
        duration_s * on_s / period + on_s,
    )
    times = np.floor(busy / on_s) * period + busy % on_s
    return times[times < duration_s]


def _diurnal(rate_rps: float, duration_s: float, options: DiurnalOptions, generator: np.random.Generator) -> Times:
    """Poisson with rate(t) = rate * (1 + amplitude * sin(2*pi*t / period_s)), by thinning; the mean is the rate."""
    period, amplitude = options.period_s or duration_s, options.amplitude
    peak = rate_rps * (1.0 + amplitude)
    times = _renewal(lambda count: generator.exponential(1.0 / peak, count), peak, duration_s)
    accepted = generator.random(times.size) * (1.0 + amplitude) < 1.0 + amplitude * np.sin(2 * math.pi * times / period)
    return times[accepted]


def _steps(rate_rps: float, duration_s: float, options: StepsOptions, generator: np.random.Generator) -> Times:
    """Poisson with stepwise rates."""
    length = duration_s / len(options.factors)
    parts = []
    for index, factor in enumerate(options.factors):
        if factor > 0:
            rate = rate_rps * factor
            part = _renewal(lambda count, rate=rate: generator.exponential(1.0 / rate, count), rate, length)  # type: ignore[misc]
            parts.append(part + index * length)
    return np.concatenate(parts) if parts else np.empty(0)


def _renewal(gaps: Callable[[int], Times], rate_rps: float, duration_s: float) -> Times:
    """Sum independent gaps until the duration is passed."""
    expected = rate_rps * duration_s
    chunk = int(expected + 6 * math.sqrt(expected) + 16)  # derived: six standard deviations more than the mean
    times = np.cumsum(gaps(chunk))
    while times[-1] < duration_s:
        times = np.concatenate([times, times[-1] + np.cumsum(gaps(chunk))])
    return times[times < duration_s]


Tokens = tuple[NDArray[np.int64] | None, NDArray[np.int64] | None]  # of prompts and of outputs; None: not known


@dataclass(frozen=True)
class ArrivalProcess:
    """How the arrivals of a model come to be.

    Attributes:
        options: the schema of `arrival.options`.
        times: called with the model's name, its rate in requests per second, the duration in seconds, the arrival, its
            options and a generator; returns what `arrival_times` does.
        reads_file: whether `arrival.path` must name a file.
        is_drawn: whether the times of an arrival that reads a file are drawn, as from counts, rather than recorded.
        tokens: called as `times` is, with a generator in the same state, and a generator of lengths; returns the tokens
            of the same requests. None: the process knows no lengths.
        usual_tokens: called with the model's name, the arrival and its options; returns the tokens of many requests,
            for a plan. A process has both or none.
    """

    options: type[StrictModel]
    times: Callable[[str, float, float, Arrival, Any, np.random.Generator], Times]
    reads_file: bool = False
    is_drawn: Callable[[Arrival], bool] = lambda _arrival: False
    tokens: Callable[[str, float, float, Arrival, Any, np.random.Generator, np.random.Generator], Tokens] | None = None
    usual_tokens: Callable[[str, Arrival, Any], Tokens] | None = None


def process_of(name: str, where: str = "arrival") -> ArrivalProcess:
    """Return the process of that name. `where` names it in errors.

    Raises:
        InvalidInputError: no such process; the message lists the known ones.
    """
    if name in PROCESSES:
        return PROCESSES[name]
    try:
        return cast(ArrivalProcess, load_plugin(ARRIVALS, name))
    except KeyError:
        cure = cure_of_unknown(ARRIVALS, name, (*PROCESSES, *registered(ARRIVALS)))
        raise refused(f"{where}.process", name, "unknown arrival process", cure) from None


def arrival_times(
    model: str, rate_rps: float, duration_s: float, arrival: Arrival, generator: np.random.Generator
) -> Times:
    """Return arrival times in seconds, ascending, within [0, duration_s).

    Args:
        model: name of the model, which selects its rows of a trace.
        rate_rps: mean rate; a trace keeps its own unless `options: {rescale: true}`.
        duration_s: length of the schedule.
        arrival: the process.
        generator: randomness for this model alone.

    Raises:
        InvalidInputError: unknown process or option, or an unusable trace; the message names line and cure.
    """
    where = f"models.{model}.arrival"
    process = process_of(arrival.process, where)
    return process.times(model, rate_rps, duration_s, arrival, _checked(where, arrival, process), generator)


def _checked(where: str, arrival: Arrival, process: ArrivalProcess) -> StrictModel:
    """Return the options of the arrival's process; raise `InvalidInputError` with everything that is wrong."""
    problems: list[Problem] = []
    options = None
    try:
        options = parse_document(process.options, arrival.options, origin=f"{where}.options")
    except InvalidInputError as error:
        problems += error.problems
    given = [key for key in ("shape", "cv") if getattr(arrival, key) is not None]
    if given and arrival.process != "gamma":
        rule = "only the gamma process has it"
        problems += [Problem(f"{where}.{key}", None, rule, "Remove it, or use process: gamma.") for key in given]
    elif len(given) != 1 and arrival.process == "gamma":
        rule = "gives both shape and cv" if given else "gamma needs shape or cv"
        problems.append(Problem(where, None, rule, "Give one: cv = shape**-0.5."))
    if (arrival.path is not None) != process.reads_file:
        rule = "a path belongs to process: trace, and a trace needs one"
        problems.append(Problem(f"{where}.path", arrival.path, rule, "Give both or neither."))
    if problems or options is None:
        raise InvalidInputError(problems)
    return options


@dataclass(frozen=True)
class Trace:
    """The lines of a trace: times in seconds, and the other columns that it has."""

    times_s: Times
    models: list[str] | None
    prompt_tokens: NDArray[np.int64] | None
    output_tokens: NDArray[np.int64] | None


def read_trace(path: str | Path) -> Trace:
    """Read a CSV with the column `time_ms` and optionally `model`, `prompt_tokens` and `output_tokens`.

    Raises:
        InvalidInputError: no such file, missing column, not a number, unsorted or empty; the message names the line.
    """
    file = Path(path)

    def fail(line: int, value: Any, rule: str, cure: str) -> InvalidInputError:
        return InvalidInputError(Problem(f"{file}: line {line}", value, rule, cure))

    times: list[float] = []
    models: list[str] = []
    with csv_rows(file, ("time_ms",), "Start the file with time_ms or time_ms,model.") as (columns, rows):
        tokens: dict[str, list[int]] = {key: [] for key in ("prompt_tokens", "output_tokens") if key in columns}
        at, name_at = columns["time_ms"], columns.get("model")
        for line, row in rows:
            given = row[at]
            try:
                value = parse_number(given)
            except ValueError:
                value = math.nan
            if not 0 <= value <= _MOST_MS:
                cure = "Give milliseconds from the start of the trace."
                raise fail(line, given, f"is not a number of at least 0 and at most {_MOST_MS:g}", cure)
            if times and value < times[-1]:
                raise fail(line, given, "is earlier than the line before", "Sort the file by time_ms.")
            if name_at is not None and not row[name_at]:
                raise fail(line, row[name_at], "names no model", "Fill the model column in every line.")
            for key, known in tokens.items():
                cell = row[columns[key]]
                if (number := tokens_of(cell)) is None:
                    cure = f"Give a whole number from 1 to {MOST_TOKENS}."
                    raise fail(line, cell, f"{key} is no number of tokens", cure)
                known.append(number)
            times.append(float(value))
            models.append("" if name_at is None else row[name_at])
    if not times:
        raise fail(2, "", "the trace is empty", "Give at least one arrival.")
    columns_of = {key: np.array(known, dtype=np.int64) for key, known in tokens.items()}
    return Trace(
        np.asarray(times) / 1000.0,
        models if "model" in columns else None,
        columns_of.get("prompt_tokens"),
        columns_of.get("output_tokens"),
    )


def _rows(model: str, arrival: Arrival) -> Trace:
    """Return the lines of a trace for one model."""
    trace = read_trace(str(arrival.path))
    if trace.models is None:
        return trace
    mine = np.asarray(trace.models) == model
    if not mine.any():
        raise refused(
            f"models.{model}.arrival.path",
            arrival.path,
            f"the trace has no arrival for '{model}'",
            "Correct the model column, or use another trace.",
        )
    columns = (trace.prompt_tokens, trace.output_tokens)
    return Trace(trace.times_s[mine], None, *(None if column is None else column[mine] for column in columns))


def arrival_tokens(
    model: str,
    rate_rps: float,
    duration_s: float,
    arrival: Arrival,
    generator: np.random.Generator,
    of_lengths: np.random.Generator,
) -> Tokens:
    """Return the tokens of what `arrival_times` returns for the same arguments; for a trace those of all its lines.

    `generator` is in the state that it had there; `of_lengths` draws the lengths.
    """
    where = f"models.{model}.arrival"
    process = process_of(arrival.process, where)
    if process.tokens is None:
        return None, None
    options = _checked(where, arrival, process)
    return process.tokens(model, rate_rps, duration_s, arrival, options, generator, of_lengths)


def usual_lengths(model: str, arrival: Arrival) -> Tokens:
    """Return tokens as the arrivals of a process have them, for a plan; None where it knows no lengths."""
    where = f"models.{model}.arrival"
    process = process_of(arrival.process, where)
    if process.usual_tokens is None:
        return None, None
    return process.usual_tokens(model, arrival, _checked(where, arrival, process))


def _trace_tokens(model: str, arrival: Arrival) -> Tokens:
    """Return the tokens of prompts and outputs in a model's lines of a trace; None for a column it does not have.

    Raises:
        InvalidInputError: as `arrival_times`.
    """
    trace = _rows(model, arrival)
    return trace.prompt_tokens, trace.output_tokens


def _trace_times(
    model: str,
    rate_rps: float,
    duration_s: float,
    arrival: Arrival,
    options: TraceOptions,
    _generator: np.random.Generator,
) -> Times:
    times = _rows(model, arrival).times_s
    if options.rescale:
        span = float(times[-1]) or 1.0
        times = times * (times.size / span / rate_rps)
    return times[times < duration_s]


def _drawn(
    options: type[StrictModel], draw: Callable[[float, float, Any, np.random.Generator], Times]
) -> ArrivalProcess:
    """Return the process that draws times from a rate, a duration, its options and a generator."""
    return ArrivalProcess(
        options,
        lambda _model, rate_rps, duration_s, _arrival, given, generator: draw(rate_rps, duration_s, given, generator),
    )


PROCESSES: Mapping[str, ArrivalProcess] = {
    "poisson": _drawn(NoOptions, _poisson),
    "uniform": _drawn(NoOptions, _uniform),
    "gamma": ArrivalProcess(NoOptions, _gamma),
    "on_off": _drawn(OnOffOptions, _on_off),
    "diurnal": _drawn(DiurnalOptions, _diurnal),
    "steps": _drawn(StepsOptions, _steps),
    "trace": ArrivalProcess(
        TraceOptions,
        _trace_times,
        reads_file=True,
        tokens=lambda model, _rate_rps, _duration_s, arrival, *_: _trace_tokens(model, arrival),
        usual_tokens=lambda model, arrival, _options: _trace_tokens(model, arrival),
    ),
}
