"""Every answer of the control daemon is parsed strictly, and the real program is run with the right environment."""

from __future__ import annotations

import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from tenuto.mps.control import Control, ControlError, MpsClient, Subprocesses

from .fakes import UUID, Bench


@pytest.fixture
def asked(bench: Bench) -> Bench:
    """A node whose daemon has one server, 701, with one client, 41."""
    bench.gpulet().join()
    bench.daemon.connect(41)
    return bench


@pytest.mark.parametrize(
    ("command", "answer"),
    [
        ("get_default_active_thread_percentage", "0.0"),
        ("get_default_active_thread_percentage", "101"),
        ("get_default_active_thread_percentage", "100.0\n100.0"),
        ("get_default_active_thread_percentage", ""),
        ("get_server_list", "701 702"),
        ("get_server_list", "Failed"),
        ("get_server_list", "-3"),
        ("get_server_status 701", "active"),
        ("get_server_status 701", ""),
        ("get_server_status 701", "Server not found"),
        ("get_client_list 701", "41\n0"),
        ("get_client_list 701", "41x"),
        ("terminate_client 701 41", "1"),
        ("terminate_client 701 41", ""),
    ],
)
def test_anything_unexpected_is_an_error_that_shows_it(asked: Bench, command: str, answer: str) -> None:
    asked.daemon.answers[command] = answer
    control = asked.gpulet().control
    calls: dict[str, Callable[[], object]] = {
        "get_default_active_thread_percentage": control.default_share_pct,
        "get_server_list": control.servers,
        "get_server_status": lambda: control.server_status(701),
        "get_client_list": lambda: control.clients(701),
        "terminate_client": lambda: control.terminate_client(701, 41),
    }

    with pytest.raises(ControlError, match=r"answered '.*control\.log"):
        calls[command.split()[0]]()


def test_documented_answers_are_read(asked: Bench) -> None:
    control = asked.gpulet().control

    assert control.default_share_pct() == 100.0
    assert control.servers() == (701,)
    assert control.server_status(701) == "ACTIVE"
    assert control.clients(701) == (41,)


def test_a_missing_program_is_named() -> None:
    with pytest.raises(ControlError, match="nvidia-nothing is not installed"):
        Subprocesses("nvidia-nothing")([], "quit", {}, 1.0)


def program(folder: Path, body: str) -> str:
    path = folder / "control"
    path.write_text(f"#!/bin/sh\n{body}\n", encoding="utf-8")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def test_a_program_that_fails_or_hangs_is_reported_with_its_words(tmp_path: Path) -> None:
    environment = {"PATH": "/bin:/usr/bin"}
    failing = Subprocesses(program(tmp_path, "echo 'Cannot find MPS control daemon process' >&2; exit 1"))
    with pytest.raises(ControlError, match="with code 1 and said: Cannot find"):
        failing([], "quit\n", environment, 5.0)

    hanging = Subprocesses(program(tmp_path, "exec sleep 30"))
    with pytest.raises(ControlError, match=r"did not answer 'get_server_list' within 0\.2 s"):
        hanging([], "get_server_list\n", environment, 0.2)


def test_the_program_gets_the_command_on_its_input_and_the_daemons_environment(tmp_path: Path) -> None:
    seen_text = '"$command $CUDA_VISIBLE_DEVICES $CUDA_MPS_PIPE_DIRECTORY"'
    script = f'read command; echo {seen_text} > "$CUDA_MPS_LOG_DIRECTORY/seen"; echo 100.0'
    control = Control(tmp_path / "p", tmp_path, UUID, Subprocesses(program(tmp_path, script)))

    assert control.default_share_pct() == 100.0
    seen = (tmp_path / "seen").read_text(encoding="utf-8")
    assert seen == f"get_default_active_thread_percentage {UUID} {tmp_path / 'p'}\n"


def test_clients_are_described_with_their_namespaces(asked: Bench) -> None:
    assert asked.gpulet().described_clients() == ()  # a program that does not know `ps`
    asked.daemon.namespaces = {41: 4026531836}
    assert asked.gpulet().control.described_clients() == (MpsClient(41, 4026531836),)


@pytest.mark.parametrize("answer", ["", "PID ID", "PID ID SERVER DEVICE NAMESPACE COMMAND\n41 0 701 GPU-1 here x"])
def test_a_table_of_clients_that_is_not_as_documented_is_an_error(asked: Bench, answer: str) -> None:
    asked.daemon.answers["ps"] = answer
    with pytest.raises(ControlError, match="answered 'ps' with"):
        asked.gpulet().control.described_clients()
