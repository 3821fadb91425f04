"""Logs that are read on while they grow: every whole line comes once, in order."""

import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tenuto.deployments.serve import states
from tenuto.deployments.serve.process_logs import process_logs, read_lines

LINE = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\n"), max_size=8)


@given(lines=st.lists(LINE, max_size=12), cuts=st.lists(st.integers(0, 200), max_size=4), last=st.integers(0, 5))
def test_whole_lines_come_once_and_in_order(lines: list[str], cuts: list[int], last: int) -> None:
    text = "".join(f"{line}\n" for line in lines).encode()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "a.log")
        file.write_bytes(b"old\nolder\n")
        ((found, offset),) = read_lines([("/a.log", None)], last, folder)
        assert found == ["old", "older"][max(0, 2 - last) :]
        came: list[str] = []
        for end in (*sorted(cuts), len(text)):
            file.write_bytes(b"old\nolder\n" + text[:end])
            ((found, offset),) = read_lines([("/a.log", offset)], last, folder)
            came += found
    assert came == lines


def test_a_line_that_is_longer_than_what_is_read_at_once_stops_nothing(tmp_path: Path) -> None:
    long = "x" * (3 << 20)
    (tmp_path / "a.log").write_text(f"one\n{long}\nlast\n")
    came, offset = list[str](), 0
    for _ in range(6):
        ((found, offset),) = read_lines([("/a.log", offset)], 5, str(tmp_path))
        came += found
    assert (came[0], came[-1], "".join(came)) == ("one", "last", f"one{long}last")


def test_a_process_that_still_waits_for_a_node_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Serve says of it only that it is starting."""
    ready = {"node_id": "n", "log_file_path": "/a.log", "state": "RUNNING"}
    replicas = [ready, {"node_id": "n", "state": "STARTING"}, {"state": "STARTING"}]
    details = {"applications": {"tenuto": {"deployments": {"gateway": {"replicas": replicas}}}}}
    monkeypatch.setattr(states, "serve_client", lambda: SimpleNamespace(get_serve_details=lambda: details))
    assert [each.log for each in states.serve_processes()] == ["/a.log", ""]
    assert [each.log for each in process_logs()] == ["/a.log"]


def test_a_log_that_is_begun_anew_is_read_from_its_start(tmp_path: Path) -> None:
    (tmp_path / "a.log").write_text("one\n")
    assert read_lines([("/a.log", 1000)], 5, str(tmp_path)) == [(["one"], 4)]
