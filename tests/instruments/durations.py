"""How long the test files take: a kept table, by which what takes longest begins first.

A row is a file's seconds of wall time, all its tests and their fixtures together. `--record-durations` renews the rows
of the files that it runs.
"""

from collections import Counter
from pathlib import Path

import pytest

__all__ = ["DURATIONS", "DurationRecorder", "read_durations"]

ROOT = Path(__file__).parents[2]
DURATIONS = "tests/durations.tsv"


class DurationRecorder:
    """A plugin of the process that hears of every test; it renews the table when the run ends without a failure."""

    def __init__(self, root: Path = ROOT) -> None:
        self._root = root
        self._seconds: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count one phase of one test."""
        self._seconds[report.nodeid.split("::")[0]] += report.duration

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        """Write the table, longest first."""
        if exitstatus == pytest.ExitCode.OK:
            known = {**read_durations(self._root), **self._seconds}
            rows = sorted((-seconds, file) for file, seconds in known.items() if (self._root / file).exists())
            (self._root / DURATIONS).write_text("".join(f"{-seconds:.1f}\t{file}\n" for seconds, file in rows))


def read_durations(root: Path = ROOT) -> dict[str, float]:
    """Return the seconds by file; nothing where no table is."""
    path = root / DURATIONS
    rows = (line.split("\t") for line in path.read_text().splitlines()) if path.exists() else ()
    return {file: float(seconds) for seconds, file in rows}
