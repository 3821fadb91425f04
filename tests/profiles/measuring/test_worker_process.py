"""A worker process: how it is ended, and what its silence and its death mean."""

from pathlib import Path

import pytest

from tenuto.errors import EnvironmentFaultError
from tenuto.profiles.measuring.events import Doubt
from tenuto.profiles.measuring.worker_process import LostWorkerError, WorkerProcess

BUSY = """
import json, signal, sys, time
from pathlib import Path
journal = Path(sys.argv[1])
def note(number, _frame):
    with journal.open("a") as file:
        file.write(signal.Signals(number).name + "\\n")
    if number == signal.{leaves_at}:
        sys.exit(130)
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, note)
print(json.dumps(dict(event="doubt", text="busy")), flush=True)
while True:
    time.sleep(0.01)
"""


def start(tmp_path: Path, text: str) -> tuple[WorkerProcess, Path]:
    script, journal = tmp_path / "fake.py", tmp_path / "journal"
    script.write_text(text)
    journal.write_text("")
    return WorkerProcess([str(script), str(journal)], {}, "m"), journal


@pytest.mark.parametrize(("leaves_at", "signals"), [("SIGINT", ["SIGINT"]), ("SIGTERM", ["SIGINT", "SIGTERM"])])
def test_a_busy_worker_is_interrupted_before_it_is_stopped(leaves_at: str, signals: list[str], tmp_path: Path) -> None:
    worker, journal = start(tmp_path, BUSY.replace("{leaves_at}", leaves_at).replace("\\\\n", "\\n"))
    assert worker.next_event(20.0) == Doubt("busy")
    worker.end(settle_s=10.0 if leaves_at == "SIGINT" else 0.2)
    assert journal.read_text().split() == signals


def test_a_worker_that_leaves_when_its_input_ends_gets_no_signal(tmp_path: Path) -> None:
    worker, journal = start(tmp_path, "import sys; sys.stdin.read()")
    worker.end(patience_s=20.0)
    assert journal.read_text() == ""


def test_silence_and_death_are_told_apart(tmp_path: Path) -> None:
    worker, _ = start(tmp_path, "import sys; sys.stdin.read()")
    with pytest.raises(EnvironmentFaultError, match=r"said nothing for 0\.1 s"):
        worker.next_event(0.1)
    worker.end(20.0)
    worker, _ = start(tmp_path, "import sys; sys.exit('torn apart')")
    with pytest.raises(LostWorkerError, match="'m' ended with code 1: torn apart") as caught:
        worker.next_event(20.0)
    assert caught.value.code == 1
    worker.end()
