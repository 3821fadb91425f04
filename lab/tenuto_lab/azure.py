"""The Azure Functions traces as arrivals: the per-minute counts of 2019 and the single invocations of 2021.

A stream is one function of one app, because function names are unique only within an app. Streams that have arrivals
in the slice are dealt to `parts` models. They are dealt striped (stream i to part i mod n) or in blocks (part
floor(n*i/streams), which AlpaServe calls round robin). Counts per minute have no times, so times within a minute are
drawn; see `_is_drawn`.

    arrival:
      process: azure_2019            # or azure_2021
      path: data/azure/              # one file, or for 2019 the folder of invocations_per_function_md.anon.dNN.csv
      options: {part: 0, parts: 20}  # this model's part; also mapping, start_s, rescale, cv, window_s, cv_scale
"""

from __future__ import annotations

import math
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, StrictBool, model_validator

from tenuto.documents import Fault, StrictModel
from tenuto.errors import InvalidInputError, Problem, refused
from tenuto.files import csv_rows, parse_number
from tenuto.placement.arrivals.arrival import Arrival
from tenuto.placement.arrivals.arrival_processes import ArrivalProcess

Times = NDArray[np.float64]
_MINUTE_S, _DAY_MIN = 60.0, 1440  # unit
# paper: AlpaServe (OSDI 2023). Its code finds rate and variation in windows of this length. When the rate from the gaps
# is this many times the counted rate, its code takes the counted one.
_WINDOW_2021_S, _WILD_RATE = 5400.0, 5.0
_CURE = "Give the trace as published."
_FEW_GAPS = 2  # limit: fewer gaps give no variation


class AzureOptions(StrictModel):
    """Options of both formats.

    `part` of `parts`: which share of the streams this model gets. `start_s`: where in the trace the slice begins.
    `rescale`: bring the slice to the workload's rate; otherwise the trace's own rate counts. 2019: `cv` is that of the
    gaps inside a minute (1: Poisson). 2021: with `rescale`, or a `cv_scale` other than 1, arrivals are drawn anew in
    windows of `window_s`, with the rate and variation of each window; otherwise they are the recorded ones."""

    part: Annotated[int, Field(ge=0, strict=True)] = 0
    parts: Annotated[int, Field(ge=1, strict=True)] = 1
    mapping: Literal["stripe", "block"] = "stripe"
    start_s: Annotated[float, Field(ge=0)] = 0.0
    rescale: StrictBool = False
    cv: Annotated[float, Field(ge=0.01)] = 1.0
    window_s: Annotated[float, Field(ge=1)] = _WINDOW_2021_S
    cv_scale: Annotated[float, Field(ge=0.01)] = 1.0

    @model_validator(mode="after")
    def _part_of_parts(self) -> AzureOptions:
        if self.part >= self.parts:
            raise Fault(f"there is no part {self.part} of {self.parts}", "Give part: 0, parts: 20, for example.")
        return self


def _is_drawn(arrival: Arrival) -> bool:
    """Whether times of an Azure process are drawn rather than recorded."""
    drawn_anew = bool(arrival.options.get("rescale")) or float(arrival.options.get("cv_scale", 1.0)) != 1.0
    return arrival.process == "azure_2019" or (arrival.process == "azure_2021" and drawn_anew)


def azure_times(
    model: str,
    rate_rps: float,
    duration_s: float,
    arrival: Arrival,
    options: AzureOptions,
    generator: np.random.Generator,
) -> Times:
    """Return a model's arrivals in seconds within [0, duration_s).

    Raises:
        InvalidInputError: a missing or malformed file (with its line), or no arrivals in the slice.
    """
    where = f"models.{model}.arrival"
    path = Path(str(arrival.path))
    if arrival.process == "azure_2019":
        times = _from_counts(path, rate_rps, duration_s, options, generator)
    else:
        times = _from_invocations(path, rate_rps, duration_s, options, generator)
    if not times.size:
        raise refused(
            where,
            str(path),
            f"part {options.part} of {options.parts} has no arrivals in the {duration_s:g} s from "
            f"{options.start_s:g} s",
            "Choose another start_s, fewer parts, or a longer duration.",
        )
    return times


def _mine(streams: list[Any], options: AzureOptions) -> list[Any]:
    if options.mapping == "stripe":
        return streams[options.part :: options.parts]
    return [stream for index, stream in enumerate(streams) if options.parts * index // len(streams) == options.part]


def _gamma(rate_rps: float, cv: float, length_s: float, generator: np.random.Generator) -> Times:
    """Gamma renewals: shape 1/cv², scale cv²/rate, started at a random point of a gap."""
    if rate_rps <= 0:
        return np.empty(0)
    shape, scale = cv**-2, cv**2 / rate_rps
    expected = rate_rps * length_s
    chunk = int(expected + 6 * max(1.0, cv) * math.sqrt(expected) + 8)
    times = np.cumsum(generator.gamma(shape, scale, chunk)) - generator.random() * generator.gamma(shape, scale)
    while times[-1] < length_s:
        times = np.concatenate([times, times[-1] + np.cumsum(generator.gamma(shape, scale, chunk))])
    return times[(times >= 0) & (times < length_s)]


# --- 2019: counts per minute --------------------------------------------------------------------------------------


def _from_counts(
    path: Path, rate_rps: float, duration_s: float, options: AzureOptions, generator: np.random.Generator
) -> Times:
    first = int(options.start_s // _MINUTE_S)
    last = math.ceil((options.start_s + duration_s) / _MINUTE_S)
    streams = [counts for counts in _counts(*_stamp(path), first, last) if counts.any()]
    mine = _mine(streams, options)
    if not mine:
        return np.empty(0)
    counts: NDArray[np.int64] = np.stack(mine).sum(axis=0, dtype=np.int64)
    offset = options.start_s - first * _MINUTE_S
    if options.rescale or options.cv != 1.0:
        factor = rate_rps / (counts.sum() / (len(counts) * _MINUTE_S)) if options.rescale else 1.0
        minutes = [_gamma(factor * count / _MINUTE_S, options.cv, _MINUTE_S, generator) for count in counts.tolist()]
    else:
        # The counted number of arrivals, at times as a Poisson process has them when their number is given.
        minutes = [np.sort(generator.random(count)) * _MINUTE_S for count in counts.tolist()]
    times = np.concatenate([part + index * _MINUTE_S for index, part in enumerate(minutes)]) - offset
    return times[(times >= 0) & (times < duration_s)]


@lru_cache(maxsize=4)
def _counts(path: Path, _changed: int, first_min: int, last_min: int) -> tuple[NDArray[np.int32], ...]:
    """Return counts by minute of every stream in order of first appearance; a stream missing on a day counts zero."""
    found: dict[tuple[str, str], NDArray[np.int32]] = {}
    for day in range(first_min // _DAY_MIN, (last_min - 1) // _DAY_MIN + 1):
        begin, end = max(first_min, day * _DAY_MIN), min(last_min, (day + 1) * _DAY_MIN)
        file = _day_file(path, day)
        with csv_rows(file, ("HashApp", "HashFunction", "1", "1440"), _CURE) as (header, rows):
            app, function, one = header["HashApp"], header["HashFunction"], header["1"]
            low, high = one + begin - day * _DAY_MIN, one + end - day * _DAY_MIN
            for line, row in rows:
                try:
                    counts = np.array(row[low:high], dtype=np.int32)
                except (ValueError, OverflowError):
                    if "" in row[low:high]:
                        raise _line_error(file, line, ",".join(row[:4]), "needs 1440 counts of at least 0") from None
                    raise _line_error(file, line, ",".join(row[low:high]), "counts must be whole numbers") from None
                if len(counts) != end - begin or counts.min(initial=0) < 0:
                    raise _line_error(file, line, f"{len(row)} columns", "needs 1440 counts of at least 0")
                key = (row[app], row[function])
                whole = found.setdefault(key, np.zeros(last_min - first_min, dtype=np.int32))
                whole[begin - first_min : end - first_min] += counts
    return tuple(found.values())


def _day_file(path: Path, day: int) -> Path:
    if path.is_dir():
        return path / f"invocations_per_function_md.anon.d{day + 1:02d}.csv"
    if day > 0:
        raise refused(
            str(path), f"day {day + 1}", "one file holds one day", "Give the folder with the files of all days as path."
        )
    return path


# --- 2021: single invocations ---------------------------------------------------------------------------------------


def _from_invocations(
    path: Path, rate_rps: float, duration_s: float, options: AzureOptions, generator: np.random.Generator
) -> Times:
    streams = []
    for times in _invocations(*_stamp(path)):
        inside = times[(times >= options.start_s) & (times < options.start_s + duration_s)]
        if inside.size:
            streams.append(inside - options.start_s)
    mine = _mine(streams, options)
    times = np.sort(np.concatenate(mine)) if mine else np.empty(0)
    if not times.size or not (options.rescale or options.cv_scale != 1.0):
        return times
    factor = rate_rps / (times.size / duration_s) if options.rescale else 1.0
    parts = []
    for begin in np.arange(0.0, duration_s, options.window_s).tolist():
        length = min(options.window_s, duration_s - begin)
        window = times[(times >= begin) & (times < begin + length)]
        parts.append(begin + _redrawn(window, length, factor, options.cv_scale, generator))
    return np.concatenate(parts)


def _redrawn(window: Times, length_s: float, factor: float, cv_scale: float, generator: np.random.Generator) -> Times:
    """Draw a window's arrivals anew from its own rate and variation, both scaled."""
    gaps = np.diff(window)
    if gaps.size < _FEW_GAPS or gaps.mean() <= 0:
        return _gamma(factor * window.size / length_s, cv_scale, length_s, generator)
    empirical, fitted = window.size / length_s, 1.0 / float(gaps.mean())
    rate = empirical if fitted > _WILD_RATE * empirical else fitted
    cv = max(0.01, float(gaps.std() / gaps.mean()))
    return _gamma(factor * rate, cv * cv_scale, length_s, generator)


@lru_cache(maxsize=2)
def _invocations(path: Path, _changed: int) -> tuple[Times, ...]:
    """Return the arrival times (s) of every stream in order of first appearance: end_timestamp - duration."""
    found: dict[tuple[str, str], list[float]] = {}
    with csv_rows(path, ("app", "func", "end_timestamp", "duration"), _CURE) as (header, rows):
        app, func, end, duration = (header[name] for name in ("app", "func", "end_timestamp", "duration"))
        for line, row in rows:
            try:
                at = parse_number(row[end]) - parse_number(row[duration])
            except ValueError:
                raise _line_error(path, line, ",".join(row), "end_timestamp and duration must be numbers") from None
            found.setdefault((row[app], row[func]), []).append(at)
    return tuple(np.sort(np.array(times)) for times in found.values())


# --- reading ----------------------------------------------------------------------------------------------------------


def _stamp(path: Path) -> tuple[Path, int]:
    """Return the path with its time of change, so that an edited file is read again."""
    try:
        return path, path.stat().st_mtime_ns
    except OSError as error:
        raise refused(str(path), str(path), f"cannot be read ({error.strerror})", "Give the trace's file.") from error


def _line_error(path: Path, line: int, value: str, rule: str) -> InvalidInputError:
    return InvalidInputError(Problem(f"{path}: line {line}", value, rule, _CURE))


AZURE_2019 = AZURE_2021 = ArrivalProcess(AzureOptions, azure_times, reads_file=True, is_drawn=_is_drawn)
