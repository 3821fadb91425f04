"""Worker processes that start in milliseconds: forked from one process that has torch imported already.

A relay takes the place of `python -m tenuto.profiles.measuring.worker`: it hands its pipes, its environment and the
module's name to a server, which forks. What is tested stays a process of its own with its own pipes, environment and
exit code; only the three seconds in which every one of them would import torch are spent once.
"""

from __future__ import annotations

import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

_ROOT = Path(__file__).parents[2]

_RELAY = """
import array, json, os, socket, sys
server = socket.socket(socket.AF_UNIX)
server.connect(sys.argv[1])
message = json.dumps({"module": sys.argv[2], "environment": dict(os.environ), "folder": os.getcwd()}).encode()
pipes = array.array("i", [0, 1, 2])
server.sendmsg([len(message).to_bytes(8, "big")], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, pipes)])
server.sendall(message)
for kept in (0, 1, 2):
    os.close(kept)  # the worker alone holds them now, so that its end is seen
code = int.from_bytes(server.recv(4), "big", signed=True)
os.kill(os.getpid(), -code) if code < 0 else os._exit(code)
"""


@contextmanager
def forked_workers() -> Iterator[Callable[[str], list[str]]]:
    """Give a function from `module` (its `main`) or `module:function` to the arguments that run it in such one."""
    with tempfile.TemporaryDirectory() as folder:
        relay, address = Path(folder) / "relay.py", str(Path(folder) / "s")
        relay.write_text(_RELAY)
        path = os.pathsep.join(part for part in (str(_ROOT), os.environ.get("PYTHONPATH")) if part)
        server = subprocess.Popen(
            [sys.executable, "-m", "tests.instruments.forked_workers", address],
            stdout=subprocess.PIPE,
            cwd=_ROOT,
            env={**os.environ, "PYTHONPATH": path, "OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0"},
        )
        try:
            assert server.stdout is not None
            assert server.stdout.readline() == b"ready\n"
            yield lambda module: ["-S", "-E", str(relay), address, module]
        finally:
            server.terminate()
            server.wait(10.0)
            if server.stdout is not None:
                server.stdout.close()


def serve(address: str) -> None:
    """Fork one worker for every connection, for ever."""
    for module in (
        "torch",
        "torch._dynamo",
        "tenuto.profiles.measuring.worker",
        "tenuto.profiles.measuring.corun_worker",
        "tests.instruments.own_models",
        "tests.instruments.virtual_gpu",
    ):
        importlib.import_module(module)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen()
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    while True:
        connection, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            _attend(connection)
        connection.close()


def _attend(connection: socket.socket) -> None:
    """Fork the worker and tell the relay how it ended."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    head, pipes, _, _ = socket.recv_fds(connection, 8, 3)
    text = b""
    while len(text) < int.from_bytes(head, "big"):
        text += connection.recv(65536)
    request = json.loads(text)
    worker = os.fork()
    if worker == 0:
        connection.close()
        for target, pipe in enumerate(pipes):
            os.dup2(pipe, target)
            os.close(pipe)
        os.environ.clear()
        os.environ.update(request["environment"])
        os.chdir(request["folder"])
        sys.stdin, sys.stdout, sys.stderr = os.fdopen(0), os.fdopen(1, "w"), os.fdopen(2, "w")
        _run(request["module"])
    for pipe in pipes:
        os.close(pipe)
    ended = os.pidfd_open(worker)
    if ended not in select.select([ended, connection.fileno()], [], [])[0]:
        os.kill(worker, signal.SIGKILL)  # the relay was stopped, and with it what it stands for
        os._exit(0)
    _, status = os.waitpid(worker, 0)
    connection.sendall(os.waitstatus_to_exitcode(status).to_bytes(4, "big", signed=True))
    os._exit(0)


def _run(module: str) -> None:
    code = 1
    try:
        name, _, function = module.partition(":")
        getattr(importlib.import_module(name), function or "main")()
        code = 0
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else 1
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code)


if __name__ == "__main__":
    serve(sys.argv[1])
