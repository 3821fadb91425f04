"""When requests arrive: one function per file key `arrival.process`."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tenuto.errors import InvalidInputError, Problem, refused
from tenuto.placement.arrivals.arrival import Arrival
from tenuto.placement.arrivals.azure import AZURE_PROCESSES, azure_times

Times = NDArray[np.float64]
Process = Callable[[float, float, Arrival, np.random.Generator], Times]


def _poisson(rate_rps: float, duration_s: float, _arrival: Arrival, generator: np.random.Generator) -> Times:
    return _renewal(lambda count: generator.exponential(1.0 / rate_rps, count), rate_rps, duration_s)


def _uniform(rate_rps: float, duration_s: float, _arrival: Arrival, generator: np.random.Generator) -> Times:
    """Equal gaps; the first arrival at a random point of the first gap, so that several models do not march in step."""
    return np.arange(generator.random() / rate_rps, duration_s, 1.0 / rate_rps)


def _gamma(rate_rps: float, duration_s: float, arrival: Arrival, generator: np.random.Generator) -> Times:
    """Gamma-distributed gaps: shape k, scale 1/(k*rate); the coefficient of variation is k**-0.5."""
    shape = arrival.shape if arrival.shape is not None else (arrival.cv or 1.0) ** -2
    return _renewal(lambda count: generator.gamma(shape, 1.0 / (shape * rate_rps), count), rate_rps, duration_s)


def _on_off(rate_rps: float, duration_s: float, arrival: Arrival, generator: np.random.Generator) -> Times:
    """Poisson bursts: `on_s` with requests, `off_s` without, in turn; the mean over a period is the rate."""
    on_s, off_s = float(arrival.options.get("on_s", 1.0)), float(arrival.options.get("off_s", 1.0))
    period = on_s + off_s
    busy = _renewal(
        lambda n: generator.exponential(on_s / (rate_rps * period), n),
        rate_rps * period / on_s,
        duration_s * on_s / period + on_s,
    )
    times = np.floor(busy / on_s) * period + busy % on_s
    return times[times < duration_s]


def _diurnal(rate_rps: float, duration_s: float, arrival: Arrival, generator: np.random.Generator) -> Times:
    """Poisson with rate(t) = rate * (1 + amplitude * sin(2*pi*t / period_s)), by thinning; the mean is the rate."""
    period = float(arrival.options.get("period_s", duration_s))
    amplitude = float(arrival.options.get("amplitude", 0.5))
    peak = rate_rps * (1.0 + amplitude)
    times = _renewal(lambda count: generator.exponential(1.0 / peak, count), peak, duration_s)
    accepted = generator.random(times.size) * (1.0 + amplitude) < 1.0 + amplitude * np.sin(2 * math.pi * times / period)
    return times[accepted]


def _steps(rate_rps: float, duration_s: float, arrival: Arrival, generator: np.random.Generator) -> Times:
    """Poisson with stepwise rates: `factors` of the rate, each for an equal part of the duration, in order."""
    factors = [float(factor) for factor in arrival.options.get("factors", [1.0])]
    length = duration_s / len(factors)
    parts = []
    for index, factor in enumerate(factors):
        if factor > 0:
            rate = rate_rps * factor
            part = _renewal(lambda count, rate=rate: generator.exponential(1.0 / rate, count), rate, length)  # type: ignore[misc]
            parts.append(part + index * length)
    return np.concatenate(parts) if parts else np.empty(0)


def _renewal(gaps: Callable[[int], Times], rate_rps: float, duration_s: float) -> Times:
    """Sum independent gaps until the duration is passed."""
    expected = rate_rps * duration_s
    chunk = int(expected + 6 * math.sqrt(expected) + 16)
    times = np.cumsum(gaps(chunk))
    while times[-1] < duration_s:
        times = np.concatenate([times, times[-1] + np.cumsum(gaps(chunk))])
    return times[times < duration_s]


PROCESSES: Mapping[str, Process] = {
    "poisson": _poisson,
    "uniform": _uniform,
    "gamma": _gamma,
    "on_off": _on_off,
    "diurnal": _diurnal,
    "steps": _steps,
}

# limit: options each process reads, and a lower bound for each number
_OPTIONS: dict[str, dict[str, float]] = {
    "on_off": {"on_s": 1e-6, "off_s": 0.0},
    "diurnal": {"period_s": 1e-6, "amplitude": 0.0},
    "steps": {"factors": 0.0},
}


def arrival_times(
    model: str, rate_rps: float, duration_s: float, arrival: Arrival, generator: np.random.Generator
) -> Times:
    """Return arrival times in seconds, ascending, within [0, duration_s).

    Args:
        model: name of the model, which selects its rows of a trace.
        rate_rps: mean rate; a trace is rescaled in time to have it only with `options: {rescale: true}`.
        duration_s: length of the schedule.
        arrival: the process.
        generator: source of randomness for this model alone.

    Raises:
        InvalidInputError: unknown process or option, or an unusable trace; the message names line and cure.
    """
    _check(model, arrival)
    if arrival.process in AZURE_PROCESSES:
        return azure_times(model, rate_rps, duration_s, arrival, generator)
    if arrival.process == "trace":
        return _trace_times(model, rate_rps, duration_s, arrival)
    return PROCESSES[arrival.process](rate_rps, duration_s, arrival, generator)


def _check(model: str, arrival: Arrival) -> None:
    where = f"models.{model}.arrival"
    known = [*PROCESSES, "trace", *AZURE_PROCESSES]
    if arrival.process not in known:
        raise refused(f"{where}.process", arrival.process, "unknown arrival process", f"Use one of {', '.join(known)}.")
    problems = []
    allowed: dict[str, Any] = {"rescale": 0.0} if arrival.process == "trace" else _OPTIONS.get(arrival.process, {})
    for key, value in arrival.options.items():
        if arrival.process in AZURE_PROCESSES:
            break  # checked with the trace
        if key not in allowed:
            problems.append(
                Problem(
                    f"{where}.options.{key}",
                    value,
                    f"process '{arrival.process}' has no such option",
                    f"Its options: {', '.join(allowed) or 'none'}.",
                )
            )
            continue
        numbers = value if isinstance(value, list) else [value]
        if not numbers or not all(
            isinstance(n, (int, float)) and math.isfinite(n) and n >= allowed[key] for n in numbers
        ):
            problems.append(
                Problem(
                    f"{where}.options.{key}",
                    value,
                    f"must be finite and at least {allowed[key]:g}",
                    "Correct the value.",
                )
            )
    for key in ("shape", "cv"):
        if getattr(arrival, key) is not None and arrival.process != "gamma":
            problems.append(
                Problem(
                    f"{where}.{key}",
                    getattr(arrival, key),
                    "only the gamma process has it",
                    "Remove it, or use process: gamma.",
                )
            )
    if arrival.shape is not None and arrival.cv is not None:
        problems.append(Problem(where, arrival.cv, "gives both shape and cv", "Keep one: cv = shape**-0.5."))
    if arrival.process == "gamma" and arrival.shape is None and arrival.cv is None:
        problems.append(Problem(where, None, "gamma needs shape or cv", "Give shape: 0.5, for example."))
    if (arrival.path is not None) != (arrival.process == "trace" or arrival.process in AZURE_PROCESSES):
        problems.append(
            Problem(
                f"{where}.path",
                arrival.path,
                "a path belongs to process: trace, and a trace needs one",
                "Give both or neither.",
            )
        )
    if arrival.process == "diurnal" and float(arrival.options.get("amplitude", 0.5)) > 1.0:
        problems.append(
            Problem(
                f"{where}.options.amplitude",
                arrival.options["amplitude"],
                "above 1 the rate would be negative",
                "Give at most 1.",
            )
        )
    factors = arrival.options.get("factors")
    if arrival.process == "steps" and isinstance(factors, list) and not problems and not any(factors):
        problems.append(
            Problem(
                f"{where}.options.factors", factors, "all are 0, so there are no requests", "Give at least one above 0."
            )
        )
    if problems:
        raise InvalidInputError(problems)


def read_trace(path: str | Path) -> tuple[Times, list[str] | None]:
    """Read a CSV with the column `time_ms` and optionally `model`; return times in seconds and the models, if given.

    Raises:
        InvalidInputError: no such file, missing column, not a number, unsorted or empty; the message names the line.
    """
    file = Path(path)

    def fail(line: int, value: Any, rule: str, cure: str) -> InvalidInputError:
        return InvalidInputError(Problem(f"{file}: line {line}", value, rule, cure))

    try:
        with file.open(newline="", encoding="utf-8") as stream:
            reader = csv.DictReader(stream)
            columns = reader.fieldnames or []
            if "time_ms" not in columns:
                raise fail(
                    1, ",".join(columns), "has no column 'time_ms'", "Start the file with time_ms or time_ms,model."
                )
            times: list[float] = []
            models: list[str] = []
            for row in reader:
                line = reader.line_num
                try:
                    value = float(row["time_ms"])
                except (TypeError, ValueError):
                    raise fail(
                        line, row["time_ms"], "is not a number", "Give milliseconds from the start of the trace."
                    ) from None
                if not math.isfinite(value) or value < 0:
                    raise fail(
                        line,
                        row["time_ms"],
                        "is not a time of at least 0",
                        "Give milliseconds from the start of the trace.",
                    )
                if times and value < times[-1]:
                    raise fail(line, row["time_ms"], "is earlier than the line before", "Sort the file by time_ms.")
                if "model" in columns and not row["model"]:
                    raise fail(line, row["model"], "names no model", "Fill the model column in every line.")
                times.append(value)
                models.append(row.get("model") or "")
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise refused(str(file), str(path), f"cannot be read ({error})", "Give a readable CSV file.") from error
    if not times:
        raise fail(2, "", "the trace is empty", "Give at least one arrival.")
    return np.asarray(times) / 1000.0, models if "model" in columns else None


def _trace_times(model: str, rate_rps: float, duration_s: float, arrival: Arrival) -> Times:
    times, models = read_trace(str(arrival.path))
    if models is not None:
        times = times[np.asarray(models) == model]
        if times.size == 0:
            raise refused(
                f"models.{model}.arrival.path",
                arrival.path,
                f"the trace has no arrival for '{model}'",
                "Correct the model column, or use another trace.",
            )
    if arrival.options.get("rescale"):
        span = float(times[-1]) or 1.0
        times = times * (times.size / span / rate_rps)
    return times[times < duration_s]
