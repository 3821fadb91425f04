"""The whole way through processes: a stand-in for the control program, which forks a daemon and answers from it."""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tenuto.mps.control import ControlError, Subprocesses
from tenuto.mps.daemon import PrivateDaemon
from tenuto.mps.folders import find_leftovers

from .control_program import attach, fail, install

UUID = "GPU-11111111-2222-3333-4444-555555555555"


@pytest.fixture
def root() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="m"))  # short enough for sockets
    install(folder)
    yield folder
    for path in folder.glob("*/pipe/nvidia-cuda-mps-control.pid"):
        subprocess.run(["kill", path.read_text(encoding="utf-8")], check=False, capture_output=True)
    shutil.rmtree(folder)


def gpulet(root: Path, reapers: list[str]) -> PrivateDaemon:
    runner = Subprocesses(str(root / "nvidia-cuda-mps-control"))
    return PrivateDaemon(UUID, root=root, runner=runner, start_reaper=reapers.append)


def test_from_the_first_gpulet_to_the_end_of_the_daemon(root: Path) -> None:
    reapers: list[str] = []
    pipes = root / UUID[4:] / "pipe"
    first, second = gpulet(root, reapers), gpulet(root, reapers)
    first.join()
    second.join()
    assert reapers == [UUID]
    assert (root / UUID[4:] / "log" / "control.log").read_text(encoding="utf-8") == UUID
    with first.admitted():
        clients = [subprocess.Popen(["sleep", "60"]) for _ in range(2)]
        for client in clients:
            attach(pipes, client.pid)
    one, other = sorted(client.pid for client in clients)
    assert (first.status(), first.clients()) == ("ACTIVE", (one, other))
    assert {client.namespace for client in first.described_clients()} == {first.processes.namespace()}
    fail(pipes)
    assert first.status() == "FAULT"
    first.terminate(one)
    assert first.clients() == (other,)
    first.leave()
    assert not second.stop_if_unused()
    for client in clients:
        client.kill()
        client.wait()
    assert (second.status(), second.clients()) == ("ACTIVE", ())
    second.leave()
    assert [(left.gpu_uuid, left.is_running) for left in find_leftovers(root)] == [(UUID, True)]
    assert second.stop_if_unused()
    assert not second.is_ours()
    assert find_leftovers(root) == ()


def test_a_foreign_daemon_in_our_folder_is_named_and_left_alone(root: Path) -> None:
    pipes = root / UUID[4:] / "pipe"
    pipes.mkdir(parents=True)
    pid_file = pipes / "nvidia-cuda-mps-control.pid"
    pid_file.write_text(str(os.getpid()), encoding="utf-8")
    with pytest.raises(ControlError, match=f"process {os.getpid()} runs a CUDA MPS daemon .* did not start"):
        gpulet(root, []).join()
    assert pid_file.exists()
    pid_file.unlink()  # it is this process's pid
