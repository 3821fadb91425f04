"""Processes of the test session that start in milliseconds: forked from one that has imported what they need already.

What it saves, in processor time as measured on two busy cores: 3 s for each of the profiler's workers, of which the
tests of the profiler start 35; 1 s or more for each process of Ray, of which each of the 61 tests with Ray starts at
least three; and 9 s of collecting for each process of pytest-xdist but the first. That is about five minutes of one
core.

A relay takes the place of a worker's program: it hands its pipes, its environment and its arguments to a server, which
forks. What is tested stays a process of its own with its own pipes, environment and exit code. Three kinds are forked:
the profiler's workers (`forked_workers`), the processes of pytest-xdist (`forked_test_processes`), and those of Ray
(`forked_ray_workers`).
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import io
import json
import os
import runpy
import select
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO
from unittest import mock

__all__ = [
    "OF_THE_PROFILER",
    "ROOT",
    "forked_ray_workers",
    "forked_test_processes",
    "forked_workers",
    "keep_collected",
    "let_unfreeze",
]

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
    "tenuto.deployments.entry.service.hook_process",
    "torch",
    "torch._dynamo",
    "tenuto.profiles.measuring.profile_worker",
    "tenuto_lab.interference.co_run_worker",
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
                **os.environ,
                "PYTHONPATH": path,
                "OMP_WAIT_POLICY": "PASSIVE",
                "GOMP_SPINCOUNT": "0",
                _ENDS_WITH: str(os.getpid()),
                **(variables or {}),
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
    gc.collect()
    gc.freeze()  # else each worker's collector would look through all that is imported, and copy its pages
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
            try:
                _attend(connection, address)
            finally:  # at an interpreter's own exit, libraries wait for threads that a forked process does not have
                os._exit(1)
        connection.close()


def _attend(connection: socket.socket, address: str) -> None:
    """Fork the worker and tell the relay how it ended."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    head, pipes, _, _ = socket.recv_fds(connection, 8, 3)
    text = b""
    while len(text) < int.from_bytes(head, "big") and (part := connection.recv(65536)):
        text += part
    if not text or len(text) < int.from_bytes(head, "big"):
        os._exit(0)  # the relay was stopped
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


# Processes of pytest-xdist --------------------------------------------------------------------------------------------

_COLLECTED = "TENUTO_COLLECTED"
_UNFREEZE = gc.unfreeze


@contextmanager
def forked_test_processes(arguments: Sequence[str], specs: list[Any]) -> Iterator[None]:
    """Have the local processes of `specs` forked from one that has collected what `arguments` name."""
    import execnet

    loaded = [f"{__name__}:collect", *OF_THE_PROFILER]
    with forked_workers(loaded, {_COLLECTED: json.dumps(list(arguments))}) as program:
        words = shlex.join([sys.executable, *program(f"{__name__}:run_tests")])
        specs[:] = [execnet.XSpec(f"popen//python={words}") if spec.popen else spec for spec in specs]
        yield


def collect() -> None:
    """Import every test, with its assertions rewritten."""
    import pytest

    with contextlib.redirect_stdout(io.StringIO()):
        named = json.loads(os.environ[_COLLECTED])
        pytest.main(["--collect-only", "-q", "-p", "no:xdist", "-p", "no:cacheprovider", *named])


def run_tests() -> None:
    """Be a process of pytest-xdist: what it runs is in the last argument."""
    exec(sys.argv[-1], {"__name__": "__main__"})


def keep_collected() -> None:
    """Keep the collector from looking through modules and tests again at each of its full rounds: 0.8 s each. By
    Python's own measure the rounds take a twentieth of the time of most tests; they come as seldom as in our processes.
    """
    gc.set_threshold(5_000, 50, 100)
    gc.collect()
    gc.freeze()
    gc.unfreeze = _stay_frozen


def let_unfreeze() -> None:
    """Let the collector look at everything again when it is told to, in a process that was forked from tests."""
    gc.unfreeze = _UNFREEZE


def _stay_frozen() -> None:
    """Stand in for `gc.unfreeze`, by which a load client ends its run: it would unfreeze all that was collected."""


# Processes of Ray: every replica, and every application that Serve builds, is one; nearly all of its start is imports.
# A relay takes the place of Ray's `setup_worker.py` and `default_worker.py`; what runs is Ray's own. Ray reads its
# environment while it is imported, so that there is a server for each such environment: for each node, each program
# connected to it (a worker of an ended program's server would be taken for one of that program, and ended), and each
# set of Ray's variables in a `runtime_env`.

_LOADED = (
    "ray.serve._private.controller",
    "ray.serve._private.proxy",
    "ray.serve._private.haproxy",
    "ray.serve._private.replica",
    "ray._private.workers.setup_worker",
    "tenuto.deployments.serve.deployment",
)

_PR_SET_CHILD_SUBREAPER = 36

_FIND_SERVER = """
import fcntl, hashlib, json, os, subprocess, sys
for argument in sys.argv:
    if argument.startswith("--serialized-runtime-env-context="):
        asked = json.loads(argument.partition("=")[2]).get("env_vars") or {{}}
        os.environ.update({{key: value for key, value in asked.items() if key.startswith("RAY_")}})
known = sorted(f"{{key}}={{value}}" for key, value in os.environ.items() if key.startswith("RAY_"))
address = os.path.join({folder!r}, hashlib.sha256("\\n".join(known).encode()).hexdigest()[:8])
with open(address + ".lock", "w") as lock:
    fcntl.flock(lock, fcntl.LOCK_EX)
    if not os.path.exists(address):
        path = os.pathsep.join(part for part in ({root!r}, os.environ.get("PYTHONPATH")) if part)
        environment = {{**os.environ, "PYTHONPATH": path}}
        command = [*{command!r}, address, *{loaded!r}]
        server = subprocess.Popen(command, stdout=subprocess.PIPE, cwd={root!r}, env=environment,
                                  start_new_session=True)
        server.stdout.readline()
"""


@contextmanager
def forked_ray_workers(*, is_whole: bool = True) -> Iterator[None]:
    """Let every Ray that this process starts fork its workers. Unless `is_whole`, it lacks the autoscaler's monitor and
    the head's agent, which take 2 s of a core to start."""
    import pytest
    from ray._private.node import Node
    from ray._private.parameter import RayParams
    from ray._raylet import DASHBOARD_AGENT_LISTEN_PORT_NAME, persist_port

    from tenuto.deployments.serve.launcher import unused_port

    # A server outlives the relay that started it, and is to be found among the processes below this one.
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    with tempfile.TemporaryDirectory(prefix="f") as folder, pytest.MonkeyPatch.context() as patch:
        program = Path(folder) / "worker.py"
        command, loaded = server_command("", ())[:-1], [f"{__name__}:load"]
        find = _FIND_SERVER.format(folder=folder, root=str(ROOT), command=command, loaded=loaded)
        program.write_text(find + relay(f"{__name__}:work", "address"))
        update = RayParams.update_if_absent

        def with_relay(self: RayParams, **given: Any) -> None:
            if "setup_worker_path" in given:
                given |= {"worker_path": str(program), "setup_worker_path": str(program)}
                # Nobody asks it for lines, as `log_to_driver` is off; it takes as much of a core as the raylet.
                given["include_log_monitor"] = False
                self.no_monitor = not is_whole
            if "runtime_env_agent_port" in given:
                given = {name: port or unused_port() for name, port in given.items()}
            update(self, **given)

        start = Node.start_ray_processes

        def start_with_port(self: Node) -> None:
            # -1: none; the agent writes its own over it
            persist_port(self.get_session_dir_path(), self.node_id, DASHBOARD_AGENT_LISTEN_PORT_NAME, -1)
            start(self)

        # A raylet waits for the ports that its agents choose, and aborts after 15 s, by no setting. On a busy machine
        # agents need longer for what they import. So the ports are there before the agents are.
        patch.setattr(RayParams, "update_if_absent", with_relay)
        patch.setattr(Node, "start_ray_processes", start_with_port)
        if not is_whole:
            patch.setattr(Node, "start_api_server", lambda self, **_given: None)
        yield


def load() -> None:
    """Import what workers need without drawing a number of Ray's generator: workers forked later would draw the same.

    Importing an actor's class draws one, for the class.
    """
    from ray import actor

    ray_s = actor.ActorClassID

    class Drawn(ray_s):  # type: ignore[misc,valid-type]  # Ray has no types for it
        @classmethod
        def from_random(cls) -> Any:
            return ray_s(os.urandom(ray_s.size()))

    with mock.patch.object(actor, "ActorClassID", Drawn):
        for module in _LOADED:
            importlib.import_module(module)


def work() -> None:
    """Do what Ray's `setup_worker.py` does, where Ray asks for that, and then be its `default_worker.py`."""
    from ray._private.runtime_env.context import RuntimeEnvContext
    from ray._private.utils import get_visible_accelerator_ids, update_envs
    from ray._private.worker import global_worker
    from ray._private.workers import setup_worker

    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # Ray starts its processes deaf to a terminal's Ctrl-C
    known, arguments = setup_worker.parser.parse_known_args(sys.argv[1:])
    context = RuntimeEnvContext.deserialize(known.serialized_runtime_env_context or "{}")
    assert not context.command_prefix, "needs a process of its own"
    update_envs(context.env_vars)
    global_worker.original_visible_accelerator_ids = get_visible_accelerator_ids()  # Ray asked while it was imported
    program = str(Path(setup_worker.__file__).with_name("default_worker.py"))
    sys.argv = [program, *(argument for argument in arguments if argument.startswith("--"))]
    sys.path[0] = str(Path(program).parent)
    runpy.run_path(program, run_name="__main__")


if __name__ == "__main__":
    serve(sys.argv[1], sys.argv[2:])
