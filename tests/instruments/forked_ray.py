"""Workers of Ray that start in a fraction of a second: forked from one process that has imported Ray, Serve and Tenuto.

Every replica, and every application that Serve builds, is a process of its own, and nearly all of its start is imports.
A relay takes the place of Ray's `setup_worker.py` and `default_worker.py`. What is tested stays a process of its own
with its own environment, pipes and end, and what runs in it is Ray's own. Ray reads its environment while it is
imported, so that there is a server for each such environment: for each node, each program connected to it, and each
set of Ray's variables in a `runtime_env`.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import runpy
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.instruments.forked_workers import ROOT, relay, server_command

__all__ = ["forked_ray_workers"]

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
def forked_ray_workers() -> Iterator[None]:
    """Let every Ray that this process starts fork its workers."""
    from ray._private.parameter import RayParams

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
            update(self, **given)

        patch.setattr(RayParams, "update_if_absent", with_relay)
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
