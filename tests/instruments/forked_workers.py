"""Worker processes that start in milliseconds: forked from one process that has imported what they need already.

A relay takes the place of a worker's program: it hands its pipes, its environment and its arguments to a server, which
forks. What is tested stays a process of its own with its own pipes, environment and exit code; only the seconds in
which every one of them would import torch, or Ray, are spent once.
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

__all__ = ["OF_THE_PROFILER", "ROOT", "forked_workers", "relay", "server_command"]

ROOT = Path(__file__).parents[2]

_RELAY = """
import array, json, os, socket, sys
server = socket.socket(socket.AF_UNIX)
server.connect({address})
message = {{"module": {module!r}, "arguments": sys.argv[1:], "environment": dict(os.environ), "folder": os.getcwd()}}
message = json.dumps(message).encode()
pipes = array.array("i", [0, 1, 2])
server.sendmsg([len(message).to_bytes(8, "big")], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, pipes)])
server.sendall(message)
for kept in (0, 1, 2):
    os.close(kept)  # the worker alone holds them now, so that its end is seen
code = int.from_bytes(server.recv(4), "big", signed=True)
os.kill(os.getpid(), -code) if code < 0 else os._exit(code)
"""
_ENDS_WITH = "TENUTO_SERVER_ENDS_WITH"  # a process
_FORKED_BY = "TENUTO_FORKED_BY"  # where the server listens from which a process is forked
OF_THE_PROFILER = (
    "torch",
    "torch._dynamo",
    "tenuto.profiles.measuring.worker",
    "tenuto.profiles.measuring.corun_worker",
    "tests.instruments.own_models",
    "tests.instruments.virtual_gpu",
)


def relay(module: str, address: str) -> str:
    """Return a program that runs `module` (its `main`) or `module:function`, with the program's own arguments, in a
    process forked by the server at an address, which is an expression."""
    return _RELAY.format(module=module, address=address)


def server_command(address: str, loaded: Sequence[str]) -> list[str]:
    """Return what runs a server that has imported the modules `loaded`, or called `module:function`, and says so by one
    line; it has to begin in the root of the repository."""
    return [sys.executable, "-W", "ignore", "-m", __name__, address, *loaded]


@contextmanager
def forked_workers(
    loaded: Sequence[str] = OF_THE_PROFILER, variables: Mapping[str, str] | None = None
) -> Iterator[Callable[[str], list[str]]]:
    """Give a function from a module, of the profiler if nothing else is `loaded`, to the arguments that run it in a
    forked process; `variables` are of the environment in which the server loads. What is forked itself, as a process of
    pytest-xdist is, forks the profiler's from the same server."""
    with tempfile.TemporaryDirectory() as folder:

        def arguments(module: str) -> list[str]:
            program = Path(folder) / f"{module}.py"
            program.write_text(relay(module, repr(address)))
            return ["-S", "-E", str(program)]

        if loaded is OF_THE_PROFILER and _FORKED_BY in os.environ:
            address = os.environ[_FORKED_BY]
            yield arguments
            return
        address = str(Path(folder) / "s")
        path = os.pathsep.join(part for part in (str(ROOT), os.environ.get("PYTHONPATH")) if part)
        server = subprocess.Popen(
            server_command(address, loaded),
            stdout=subprocess.PIPE,
            cwd=ROOT,
            env={
                **os.environ, "PYTHONPATH": path, "OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0",
                _ENDS_WITH: str(os.getpid()), **(variables or {}),
            },
        )

        try:
            assert server.stdout is not None
            assert server.stdout.readline() == b"ready\n"
            yield arguments
        finally:
            server.terminate()
            server.wait(10.0)
            if server.stdout is not None:
                server.stdout.close()


def serve(address: str, loaded: Sequence[str]) -> None:
    """Fork one worker for every connection: until the process ends for which it was started, be it a Ray."""
    for each in loaded:
        module, _, function = each.partition(":")
        found = importlib.import_module(module)
        if function:
            getattr(found, function)()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    ends = [os.pidfd_open(int(os.environ[name])) for name in ("RAY_RAYLET_PID", _ENDS_WITH) if name in os.environ]
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen()
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    while select.select([listener, *ends], [], [])[0] == [listener]:
        connection, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            _attend(connection, address)
        connection.close()


def _attend(connection: socket.socket, address: str) -> None:
    """Fork the worker and tell the relay how it ended."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    head, pipes, _, _ = socket.recv_fds(connection, 8, 3)
    text = b""
    while len(text) < int.from_bytes(head, "big"):
        text += connection.recv(65536)
    request = json.loads(text)
    worker = os.fork()
    if worker == 0:
        os.setpgid(0, 0)  # Ray ends a worker with all of its group
        connection.close()
        for target, pipe in enumerate(pipes):
            os.dup2(pipe, target)
            os.close(pipe)
        os.environ.clear()
        os.environ.update(request["environment"])
        os.environ[_FORKED_BY] = address
        os.chdir(request["folder"])
        sys.argv = [sys.argv[0], *request["arguments"]]
        sys.stdin, sys.stdout, sys.stderr = map(_kept_open, (0, 1, 2), ("r", "w", "w"))
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


def _kept_open(pipe: int, how: str) -> TextIO:
    """Return a stream that does not close its pipe when it is replaced."""
    return open(pipe, how, closefd=False)


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
    serve(sys.argv[1], sys.argv[2:])
