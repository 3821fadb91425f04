"""Arrival processes: rate, variation, bounds, options, and trace files with everything wrong in them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tenuto.errors import InvalidInputError
from tenuto.placement import Arrival
from tenuto.placement.arrivals.arrival_processes import arrival_times

RATE, DURATION = 200.0, 500.0


def times_of(process: str, seed: int = 1, **keys: Any) -> np.ndarray[Any, Any]:
    arrival = Arrival(process=process, **keys)
    return arrival_times("m", RATE, DURATION, arrival, np.random.default_rng(seed))


CASES: list[tuple[str, dict[str, Any], float]] = [
    ("poisson", {}, 1.0),
    ("uniform", {}, 0.0),
    ("gamma", {"shape": 0.25}, 2.0),
    ("gamma", {"cv": 0.5}, 0.5),
    ("gamma", {"cv": 3.0}, 3.0),
]


@pytest.mark.parametrize(("process", "keys", "cv"), CASES)
def test_rate_and_variation(process: str, keys: dict[str, Any], cv: float) -> None:
    times = times_of(process, **keys)
    gaps = np.diff(times)
    # The number of renewals in T has standard deviation cv*sqrt(rate*T): five of them.
    assert abs(times.size - RATE * DURATION) <= 5 * cv * np.sqrt(RATE * DURATION) + 1
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.08, abs=1e-9)


@pytest.mark.parametrize(
    ("process", "keys"),
    [
        *((process, keys) for process, keys, _ in CASES),
        ("on_off", {"options": {"on_s": 0.5, "off_s": 1.5}}),
        ("diurnal", {"options": {"period_s": 50.0, "amplitude": 0.8}}),
        ("steps", {"options": {"factors": [1, 0, 2, 1]}}),
    ],
)
def test_sorted_inside_the_duration_at_the_mean_rate_and_repeatable(process: str, keys: dict[str, Any]) -> None:
    times = times_of(process, **keys)
    assert np.all(np.diff(times) >= 0)
    assert times[0] >= 0
    assert times[-1] < DURATION
    assert times.size == pytest.approx(RATE * DURATION, rel=0.05)
    assert np.array_equal(times, times_of(process, **keys))
    assert not np.array_equal(times, times_of(process, seed=2, **keys))


def test_bursts_leave_the_off_time_empty() -> None:
    times = times_of("on_off", options={"on_s": 0.5, "off_s": 1.5})
    assert np.all(times % 2.0 < 0.5)


def test_diurnal_follows_its_curve() -> None:
    times = times_of("diurnal", options={"period_s": DURATION, "amplitude": 0.9})
    first, second = (times < DURATION / 2).sum(), (times >= DURATION / 2).sum()
    # The mean of 1 + 0.9 sin over the first half period is 1 + 0.9 * 2 / pi.
    assert first / (first + second) == pytest.approx((1 + 0.9 * 2 / np.pi) / 2, rel=0.02)


def test_steps_have_their_rates() -> None:
    counts = np.histogram(times_of("steps", options={"factors": [1, 0, 2]}), bins=3, range=(0, DURATION))[0]
    assert counts[1] == 0
    assert counts[2] / counts[0] == pytest.approx(2.0, rel=0.05)


@pytest.mark.parametrize(
    ("keys", "part"),
    [
        ({"process": "pareto"}, "unknown arrival process"),
        ({"process": "gamma"}, "needs shape or cv"),
        ({"process": "gamma", "shape": 1, "cv": 1}, "both shape and cv"),
        ({"process": "poisson", "cv": 2}, "only the gamma process"),
        ({"process": "trace"}, "a trace needs one"),
        ({"process": "poisson", "path": "x.csv"}, "a path belongs to"),
        ({"process": "poisson", "options": {"on_s": 1}}, r"options: on_s.*unknown key"),
        ({"process": "diurnal", "options": {"amplitude": 1.5}}, "less than or equal to 1"),
        ({"process": "steps", "options": {"factors": []}}, "at least 1 item"),
        ({"process": "steps", "options": {"factors": [0, 0]}}, "no requests"),
        ({"process": "on_off", "options": {"on_s": "long"}}, "valid number"),
        ({"process": "on_off", "options": {"off_s": float("inf")}}, "finite"),
        ({"process": "trace", "path": "absent.csv"}, "no such file"),
    ],
)
def test_wrong_processes_and_options(keys: dict[str, Any], part: str) -> None:
    with pytest.raises(InvalidInputError, match=part):
        arrival_times("m", RATE, 1.0, Arrival(**keys), np.random.default_rng(0))


def trace(path: Path, text: str, model: str = "m", **options: Any) -> np.ndarray[Any, Any]:
    file = path / "trace.csv"
    file.write_text(text)
    arrival = Arrival(process="trace", path=str(file), options=options)
    return arrival_times(model, RATE, 10.0, arrival, np.random.default_rng(0))


def test_a_trace_gives_its_times(tmp_path: Path) -> None:
    assert trace(tmp_path, "time_ms\n0\n1.5\n1.5\n9999\n10000\n").tolist() == [0, 0.0015, 0.0015, 9.999]


def test_a_trace_with_models_gives_each_its_rows(tmp_path: Path) -> None:
    text = "time_ms,model\n1000,m\n2000,other\n3000,m\n"
    assert trace(tmp_path, text).tolist() == [1.0, 3.0]
    assert trace(tmp_path, text, model="other").tolist() == [2.0]
    with pytest.raises(InvalidInputError, match="no arrival for 'third'"):
        trace(tmp_path, text, model="third")


def test_a_rescaled_trace_has_the_rate(tmp_path: Path) -> None:
    times = trace(tmp_path, "time_ms\n" + "".join(f"{i}\n" for i in range(4000)), rescale=True)
    assert times.size == pytest.approx(RATE * 10.0, rel=0.01)


@pytest.mark.parametrize(
    ("text", "line", "part"),
    [
        ("time\n1\n", 1, "no column time_ms"),
        ("", 1, "no column time_ms"),
        ("time_ms\n", 2, "empty"),
        ("time_ms\n1\nx\n", 3, "not a number"),
        ("time_ms\n1\n5\n4\n", 4, "earlier"),
        ("time_ms\n-1\n", 2, "at least 0"),
        ("time_ms\n1\nnan\n", 3, "at least 0"),
        ("time_ms,model\n1,m\n2,\n", 3, "names no model"),
        ("time_ms,model\n1,m\n2\n", 3, "names no model"),
    ],
)
def test_malformed_traces_name_the_line(tmp_path: Path, text: str, line: int, part: str) -> None:
    with pytest.raises(InvalidInputError, match=part) as caught:
        trace(tmp_path, text)
    assert f"line {line}:" in str(caught.value)


def test_a_trace_that_is_not_text(tmp_path: Path) -> None:
    file = tmp_path / "t.csv"
    file.write_bytes(b"\xff\xfe\x00time_ms")
    with pytest.raises(InvalidInputError, match="cannot be read"):
        arrival_times("m", 1.0, 1.0, Arrival(process="trace", path=str(file)), np.random.default_rng(0))
