"""A stand-in for `nvidia-cuda-mps-control`: a program that forks a daemon and answers from files in its pipe directory.

`clients/PID`: a process that CUDA attached; one that has ended is none any more. `fault`: the clients that a fault hit;
the server is in FAULT until the last of them has ended, as the real one is. `commands`: what was asked, one a line.
"""

import sys
from pathlib import Path

PROGRAM = """#!{python} -SE
import os, signal, subprocess, sys

pipes = os.environ["CUDA_MPS_PIPE_DIRECTORY"]
pid_file, folder, fault = pipes + "/nvidia-cuda-mps-control.pid", pipes + "/clients", pipes + "/fault"


def lives(pid):
    try:
        with open("/proc/" + pid + "/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


if sys.argv[1:] == ["-d"]:
    sleeper = subprocess.Popen(["sleep", "600"], stdin=subprocess.DEVNULL, start_new_session=True)  # keeps its output
    os.makedirs(folder, exist_ok=True)
    with open(pid_file, "w") as file:
        file.write(str(sleeper.pid))
    with open(os.environ["CUDA_MPS_LOG_DIRECTORY"] + "/control.log", "w") as file:
        file.write(os.environ["CUDA_VISIBLE_DEVICES"])
    sys.exit(0)
if not os.path.exists(pid_file):
    sys.exit("Cannot find MPS control daemon process")

everyone = os.listdir(folder)
attached = sorted((pid for pid in everyone if lives(pid)), key=int)


def answer(command):
    with open(pipes + "/commands", "a") as file:
        file.write(" ".join(command) + "\\n")
    if command[0] == "get_default_active_thread_percentage":
        print("100.0")
    elif command[0] == "get_server_list":
        print("4242" if everyone else "")
    elif command[0] == "get_server_status":
        if os.path.exists(fault):
            with open(fault) as file:
                print("FAULT" if any(lives(pid) for pid in file.read().split()) else "ACTIVE")
        else:
            print("ACTIVE")
    elif command[0] == "get_client_list":
        print("\\n".join(attached))
    elif command[0] == "ps":
        print("PID       ID    SERVER   DEVICE             NAMESPACE   COMMAND")
        for number, pid in enumerate(attached):
            namespace = os.readlink("/proc/" + pid + "/ns/pid")[5:-1]
            print(pid, number, 4242, os.environ["CUDA_VISIBLE_DEVICES"][:17], namespace, "python -m x")
    elif command[0] == "terminate_client":
        os.remove(folder + "/" + command[2])
        print(0)
    elif command[0] == "quit":
        with open(pid_file) as file:
            os.kill(int(file.read()), signal.SIGTERM)
    else:
        print("Unknown command")


for line in sys.stdin.read().splitlines():
    answer(line.split())
"""


def install(folder: Path) -> Path:
    """Write the program into a folder and return its path."""
    program = folder / "nvidia-cuda-mps-control"
    program.write_text(PROGRAM.format(python=sys.executable), encoding="utf-8")
    program.chmod(0o755)
    return program


def attach(pipes: Path, pid: int) -> None:
    """Do what CUDA does in a process that finds the daemon."""
    (pipes / "clients" / str(pid)).touch()


def fail(pipes: Path) -> None:
    """Let a client cause a fatal fault: it hits all there are."""
    hit = " ".join(path.name for path in (pipes / "clients").iterdir())
    (pipes / "fault.part").write_text(hit, encoding="utf-8")
    (pipes / "fault.part").replace(pipes / "fault")
