"""The table of durations: what ran is renewed, what is gone goes, and a run that failed changes nothing."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.instruments.durations import DURATIONS, DurationRecorder, read_durations


def report(test: str, seconds: float) -> Any:
    return SimpleNamespace(nodeid=test, duration=seconds)


@pytest.mark.parametrize(
    ("status", "seconds"),
    [
        (pytest.ExitCode.OK, {"tests/b.py": 3.5, "tests/a.py": 2.0}),
        (pytest.ExitCode.TESTS_FAILED, {"tests/a.py": 2.0, "tests/gone.py": 1.0}),
    ],
)
def test_a_run_renews_what_it_ran(tmp_path: Path, status: int, seconds: dict[str, float]) -> None:
    (tmp_path / "tests").mkdir()
    for name in ("a", "b"):
        (tmp_path / f"tests/{name}.py").touch()
    (tmp_path / DURATIONS).write_text("2.0\ttests/a.py\n1.0\ttests/gone.py\n")
    recorder = DurationRecorder(tmp_path)
    for test, took in (("tests/b.py::one@ray", 1.0), ("tests/b.py::two[x::y]", 2.5)):
        recorder.pytest_runtest_logreport(report(test, took))
    recorder.pytest_sessionfinish(status)
    assert list(read_durations(tmp_path).items()) == list(seconds.items())
