"""The services of gpu-v2025 as demand of a fleet: live GPUs by minute, a day of them, and files that are none."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest

from tenuto.errors import InvalidInputError

FOLDER = Path(__file__).parents[1] / "benchmarks"
HEAD = (
    "instance_sn,role,app_name,cpu_request,cpu_limit,gpu_request,gpu_limit,rdma_request,rdma_limit,memory_request,"
    "memory_limit,disk_request,disk_limit,max_instance_per_node,creation_time,scheduled_time,deletion_time\n"
)


@pytest.fixture
def trace(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("gpu_v2025")


def row(service: str, begin: float | str = "", end: float | str = "", role: str = "HN", gpus: float | str = 1) -> str:
    return f"i,{role},{service},12,12,{gpus},{gpus},25,25,120.0,120.0,640.0,800.0,8,{begin},{begin},{end}\n"


def written(folder: Path, *rows: str, head: str = HEAD) -> Path:
    path = folder / "trace.csv"
    path.write_text(head + "".join(rows))
    return path


def test_instances_count_from_their_creation_to_their_deletion(trace: ModuleType, tmp_path: Path) -> None:
    rows = (
        row("a"),
        row("a", 90.0, 240.0),
        row("a", 30.0, ""),
        row("b", "", 60.0),
        row("c", 500.0),
        row("d", role="CN"),
    )
    live = trace.live_gpus(written(tmp_path, *rows), -1, 6)
    assert {name: counts.tolist() for name, counts in live.items()} == {
        "a": pytest.approx([1.0, 1.5, 2.5, 3.0, 3.0, 2.0]),
        "b": pytest.approx([1.0, 1.0, 0.0, 0.0, 0.0, 0.0]),
    }


def test_an_instance_that_ends_within_its_minute_counts_by_its_seconds(trace: ModuleType, tmp_path: Path) -> None:
    live = trace.live_gpus(written(tmp_path, row("a", 65.0, 80.0, gpus=2)), 0, 3)
    assert live["a"].tolist() == pytest.approx([0.0, 0.5, 0.0])


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("", "line 1: .*has no column role"),
        ("version https://git-lfs.github.com/spec/v1\n", "line 1: .*has no column role"),
        (HEAD, "no instance has a GPU in these minutes"),
        (HEAD + row("a", role="CN"), "no instance has a GPU in these minutes"),
        (HEAD + row("a") + row("a", 86_400.0)[:-30], "cut|is not a number"),
        (HEAD + row("a") + row("a", 5.0)[:-1], "its last line is cut"),
        (HEAD + row("a", "soon"), "line 2: .*is not a number"),
        (HEAD + row("a", gpus=""), "line 2: .*number"),
        (HEAD + row("a", gpus=-1), "line 2: .*less than no GPU"),
        (HEAD + row("a", 9.0, 8.0), "line 2: .*ends before it begins"),
        (HEAD + row("a", role="XN"), "line 2: .*a role other than CN and HN"),
        (HEAD + row(""), "line 2: .*no app_name"),
    ],
)
def test_a_file_that_is_none_says_why(trace: ModuleType, tmp_path: Path, text: str, part: str) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(text)
    with pytest.raises(InvalidInputError, match=part):
        trace.live_gpus(path, 0, 60)


def test_a_missing_file_is_said(trace: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match=r"absent\.csv"):
        trace.live_gpus(tmp_path / "absent.csv", 0, 60)


def test_a_service_that_comes_is_deployed_and_one_that_goes_is_dropped(
    trace: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [row("stays")] * 4 + [row("comes", 1200.0)] * 2 + [row("goes", "", 600.0)]
    bench = importlib.import_module("bench_fleet_day")
    options = "--day 1 --hours 0.5 --cells 1 --cell 8 --windows 0.15 --clairvoyant 0 --slower 20 --policy ffd"
    bench.main(["--services", str(written(tmp_path, *rows)), *options.split()])
    out = capsys.readouterr().out
    assert "3 services of day 1 on, 4 to 6 GPUs live; of 2 the number changes, 1 come, 1 go" in out
    assert "of 2 that come or go the worst 100.00%" in out
    assert "0 steps lacked room" in out
    with pytest.raises(SystemExit, match=r"--services: .*no column role"):
        bench.main(["--services", str(FOLDER / "gpu_v2025.py"), *options.split()])
