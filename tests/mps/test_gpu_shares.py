"""Shares of a GPU for processes that are measured."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from tenuto.mps.gpu_shares import running_daemon, shares_of


def test_a_running_daemon_is_found_by_its_pid_file(tmp_path: Path) -> None:
    assert running_daemon({"CUDA_MPS_PIPE_DIRECTORY": str(tmp_path)}) is None
    (tmp_path / "nvidia-cuda-mps-control.pid").write_text("1")
    environment = running_daemon({"CUDA_MPS_PIPE_DIRECTORY": str(tmp_path)})
    assert environment is not None
    assert environment(37.5)["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "37.5"


def test_a_private_daemon_serves_shares_where_none_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    happened: list[str] = []

    class Daemon:
        def __init__(self, uuid: str) -> None:
            happened.append(uuid)

        def join(self) -> None:
            happened.append("join")

        def leave(self) -> None:
            happened.append("leave")

    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-7")
    monkeypatch.setattr("tenuto.mps.gpu_shares.PrivateDaemon", Daemon)
    gpu = SimpleNamespace(uuid="GPU-7", sm_count=132)
    monkeypatch.setattr("tenuto.mps.gpu_shares.read_inventory", lambda: (gpu,))
    for device, needed in (("cpu", True), ("auto", False)):
        with shares_of(device, needed=needed) as shares:
            assert shares is None
    assert happened == []
    with shares_of("auto", needed=True) as shares:
        assert shares is not None
        assert shares.sm_count == 132
        assert shares.environment(40.0)["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "40"
        assert shares.environment(40.0)["CUDA_VISIBLE_DEVICES"] == "GPU-7"
    assert happened == ["GPU-7", "join", "leave"]
