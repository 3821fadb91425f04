"""The whole way through processes: a stand-in for the control program, which forks a daemon and answers from it."""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tenuto.mps.control import ControlError, Subprocesses
from tenuto.mps.daemon import PrivateDaemon
from tenuto.mps.folders import find_leftovers

UUID = "GPU-11111111-2222-3333-4444-555555555555"

PROGRAM = """#!{python}
import os, signal, subprocess, sys, time
from pathlib import Path

pipes = Path(os.environ["CUDA_MPS_PIPE_DIRECTORY"])
pid_file, clients = pipes / "nvidia-cuda-mps-control.pid", pipes / "clients"
if sys.argv[1:] == ["-d"]:
    sleeper = subprocess.Popen(["sleep", "60"], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                               stderr=subprocess.DEVNULL, start_new_session=True)
    pid_file.write_text(str(sleeper.pid))
    (Path(os.environ["CUDA_MPS_LOG_DIRECTORY"]) / "control.log").write_text(os.environ["CUDA_VISIBLE_DEVICES"])
    sys.exit(0)
if not pid_file.exists():
    sys.exit("Cannot find MPS control daemon process")
command = sys.stdin.readline().split()
attached = clients.read_text().split() if clients.exists() else []
if command[0] == "get_default_active_thread_percentage":
    print("100.0")
elif command[0] == "get_server_list":
    print("4242" if attached else "")
elif command[0] == "get_server_status":
    print("ACTIVE")
elif command[0] == "get_client_list":
    print("\\n".join(attached))
elif command[0] == "terminate_client":
    clients.write_text(" ".join(pid for pid in attached if pid != command[2]))
    print(0)
elif command[0] == "quit":
    os.kill(int(pid_file.read_text()), signal.SIGTERM)
else:
    print("Unknown command")
"""


@pytest.fixture
def root() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="m"))  # short enough for sockets
    program = folder / "nvidia-cuda-mps-control"
    program.write_text(PROGRAM.format(python=sys.executable), encoding="utf-8")
    program.chmod(0o755)
    yield folder
    for path in folder.glob("*/pipe/nvidia-cuda-mps-control.pid"):
        subprocess.run(["kill", path.read_text(encoding="utf-8")], check=False, capture_output=True)
    shutil.rmtree(folder)


def gpulet(root: Path, reapers: list[str]) -> PrivateDaemon:
    runner = Subprocesses(str(root / "nvidia-cuda-mps-control"))
    return PrivateDaemon(UUID, root=root, runner=runner, start_reaper=reapers.append)


def test_from_the_first_gpulet_to_the_end_of_the_daemon(root: Path) -> None:
    reapers: list[str] = []
    first, second = gpulet(root, reapers), gpulet(root, reapers)
    first.join()
    second.join()
    assert reapers == [UUID]
    assert (root / UUID[4:] / "log" / "control.log").read_text(encoding="utf-8") == UUID
    with first.admitted():
        (root / UUID[4:] / "pipe" / "clients").write_text("41 42", encoding="utf-8")
    assert (first.status(), first.clients()) == ("ACTIVE", (41, 42))
    first.terminate(41)
    assert first.clients() == (42,)
    first.leave()
    assert not second.stop_if_unused()
    second.terminate(42)
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
