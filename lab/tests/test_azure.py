"""The Azure Functions traces in their published formats: streams, mapping, slices, rescaling, and malformed files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tenuto.errors import InvalidInputError
from tenuto.loadgen.schedule import make_schedule
from tenuto.placement import Arrival, ModelSpec
from tenuto.placement.arrivals.arrival_processes import arrival_times

DAY = "invocations_per_function_md.anon.d{:02d}.csv"
HEAD = "HashOwner,HashApp,HashFunction,Trigger," + ",".join(str(minute) for minute in range(1, 1441))


def write_day(folder: Path, day: int, rows: dict[tuple[str, str], dict[int, int]]) -> Path:
    """Write one day; rows map (app, function) to counts by minute (0-based)."""
    lines = [HEAD]
    for (app, function), counts in rows.items():
        lines.append(f"o,{app},{function},http," + ",".join(str(counts.get(minute, 0)) for minute in range(1440)))
    file = folder / DAY.format(day)
    file.write_text("\n".join(lines) + "\n")
    return file


def times_of(
    path: Path, duration_s: float = 600.0, rate: float = 10.0, year: int = 2019, **options: Any
) -> np.ndarray[Any, Any]:
    arrival = Arrival(process=f"azure_{year}", path=str(path), options=options)
    return arrival_times("m", rate, duration_s, arrival, np.random.default_rng(0))


def per_minute(times: np.ndarray[Any, Any], minutes: int = 10) -> list[int]:
    return [int(n) for n in np.bincount((times // 60).astype(int), minlength=minutes)]


def test_counts_are_kept_minute_by_minute(tmp_path: Path) -> None:
    file = write_day(tmp_path, 1, {("a", "f"): {0: 5, 3: 7}, ("a", "g"): {3: 1}})
    times = times_of(file)
    assert per_minute(times) == [5, 0, 0, 8, 0, 0, 0, 0, 0, 0]
    assert np.all(np.diff(times) >= 0)


def test_a_stream_is_an_app_with_a_function(tmp_path: Path) -> None:
    file = write_day(tmp_path, 1, {("a", "f"): {0: 5}, ("b", "f"): {0: 7}})
    assert len(times_of(file, part=0, parts=2)) == 5
    assert len(times_of(file, part=1, parts=2)) == 7


def test_stripes_and_blocks_leave_empty_streams_out(tmp_path: Path) -> None:
    rows = {("a", f"f{i}"): {1: n} for i, n in enumerate([1, 0, 2, 4, 8])}
    file = write_day(tmp_path, 1, rows)
    assert [len(times_of(file, part=p, parts=2)) for p in (0, 1)] == [1 + 4, 2 + 8]
    assert [len(times_of(file, part=p, parts=2, mapping="block")) for p in (0, 1)] == [1 + 2, 4 + 8]


def test_a_slice_starts_inside_a_minute(tmp_path: Path) -> None:
    file = write_day(tmp_path, 1, {("a", "f"): {1: 1000, 2: 500}})
    times = times_of(file, duration_s=60.0, start_s=90.0)
    assert (times < 30).sum() == pytest.approx(500, abs=80)
    assert (times >= 30).sum() == pytest.approx(250, abs=60)


def test_a_folder_holds_the_days_and_a_missing_function_counts_zero(tmp_path: Path) -> None:
    write_day(tmp_path, 1, {("a", "f"): {1439: 3}, ("a", "gone"): {1439: 2}})
    write_day(tmp_path, 2, {("a", "f"): {0: 4}})
    start = 86_400.0 - 60.0
    assert per_minute(times_of(tmp_path, duration_s=120.0, start_s=start), 2) == [5, 4]
    with pytest.raises(InvalidInputError, match="one file holds one day"):
        times_of(tmp_path / DAY.format(1), duration_s=120.0, start_s=start)


def test_rescaled_to_the_rate_with_the_shape_of_the_trace(tmp_path: Path) -> None:
    file = write_day(tmp_path, 1, {("a", "f"): {minute: 10 if minute % 2 else 30 for minute in range(100)}})
    times = times_of(file, duration_s=6000.0, rate=50.0, rescale=True)
    counts = np.array(per_minute(times, 100))
    assert counts.mean() / 60.0 == pytest.approx(50.0, rel=0.02)
    assert counts[::2].mean() / counts[1::2].mean() == pytest.approx(3.0, rel=0.03)


def test_variation_inside_a_minute(tmp_path: Path) -> None:
    file = write_day(tmp_path, 1, {("a", "f"): dict.fromkeys(range(60), 6000)})
    gaps = np.diff(times_of(file, duration_s=3600.0, cv=3.0))
    assert gaps.std() / gaps.mean() == pytest.approx(3.0, rel=0.1)


TRACE = "app,func,end_timestamp,duration\na,f,10.5,0.5\nb,f,3.0,1.0\na,f,2.0,2.0\na,g,700.0,1.0\n"


def test_invocations_arrive_at_end_minus_duration(tmp_path: Path) -> None:
    file = tmp_path / "AzureFunctionsInvocationTraceForTwoWeeksJan2021.txt"
    file.write_text(TRACE)
    assert times_of(file, year=2021).tolist() == [0.0, 2.0, 10.0]
    assert times_of(file, year=2021, part=0, parts=2).tolist() == [0.0, 10.0]
    assert times_of(file, year=2021, part=1, parts=2).tolist() == [2.0]
    assert times_of(file, year=2021, start_s=600.0).tolist() == [99.0]


def test_an_edited_file_is_read_again(tmp_path: Path) -> None:
    import os

    file = tmp_path / "t.txt"
    file.write_text(TRACE)
    assert len(times_of(file, year=2021)) == 3
    file.write_text(TRACE + "a,f,20.0,0\n")
    os.utime(file, ns=(1, 1))
    assert len(times_of(file, year=2021)) == 4


def test_invocations_drawn_anew_keep_rate_and_scale_variation(tmp_path: Path) -> None:
    generator = np.random.default_rng(3)
    ends = np.cumsum(generator.exponential(0.1, 40_000))
    file = tmp_path / "t.txt"
    file.write_text("app,func,end_timestamp,duration\n" + "".join(f"a,f,{end:.6f},0\n" for end in ends))
    times = times_of(file, year=2021, duration_s=3600.0, rate=30.0, rescale=True, cv_scale=2.0, window_s=600.0)
    gaps = np.diff(times)
    assert times.size / 3600.0 == pytest.approx(30.0, rel=0.05)
    assert gaps.std() / gaps.mean() == pytest.approx(2.0, rel=0.1)


@pytest.mark.parametrize(
    ("text", "year", "part"),
    [
        ("app,func,duration\n", 2021, "line 1: .*no column end_timestamp"),
        ("app,func,end_timestamp,duration\na,f,x,1\n", 2021, "line 2: .*must be numbers"),
        ("app,func,end_timestamp,duration\na,f,1\n", 2021, "line 2: .*must be numbers"),
        ("app,func,end_timestamp,duration\n", 2021, "has no arrivals"),
        ("HashApp,HashFunction,1\na,f,1\n", 2019, "line 1: .*no column 1440"),
        (HEAD + "\no,a,f,http,1,2\n", 2019, "line 2: .*1440 counts"),
        (HEAD + "\no,a,f,http," + ",".join(["x"] * 1440) + "\n", 2019, "line 2: .*whole numbers"),
        (HEAD + "\no,a,f,http," + ",".join(["-1"] * 1440) + "\n", 2019, "line 2: .*at least 0"),
    ],
)
def test_malformed_files(tmp_path: Path, text: str, year: int, part: str) -> None:
    file = tmp_path / "t"
    file.write_text(text)
    with pytest.raises(InvalidInputError, match=part):
        times_of(file, year=year)


@pytest.mark.parametrize(
    "options",
    [
        {"part": 2, "parts": 2},
        {"part": -1},
        {"parts": 1.5},
        {"mapping": "zigzag"},
        {"start_s": -1},
        {"cv": 0},
        {"rescale": "yes"},
        {"window_s": "long"},
        {"speed": 2},
    ],
)
def test_wrong_options(tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(InvalidInputError, match="options"):
        times_of(write_day(tmp_path, 1, {("a", "f"): {0: 1}}), **options)


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="cannot be read"):
        times_of(tmp_path / "absent")


def test_synthetic_times_are_labelled_so(tmp_path: Path) -> None:
    file = write_day(tmp_path, 1, {("a", "f"): {0: 50}})
    spec = ModelSpec(name="m", rate_rps=1, slo_ms=10, arrival=Arrival(process="azure_2019", path=str(file)))
    schedule = make_schedule([spec], 60.0, 0)
    assert "m are synthetic" in schedule.notes[0]
    schedule.save(tmp_path / "s.npz")
    with np.load(tmp_path / "s.npz", allow_pickle=False) as saved:
        assert tuple(saved["notes"]) == schedule.notes
    assert make_schedule([spec.model_copy(update={"arrival": Arrival()})], 60.0, 0).notes == ()
