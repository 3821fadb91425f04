"""Asking a running Tenuto over HTTP, and waiting for what comes as soon as the machine lets it."""

import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tenuto.deployments.serve.building import deploy_applications
from tenuto.deployments.serve.config import ServeConfig
from tenuto.deployments.serve.endpoint import get_json
from tenuto.deployments.serve.launcher import Launcher
from tenuto.deployments.serve.states import application_states
from tenuto.errors import EnvironmentFaultError

__all__ = ["LONG_MS", "PATIENCE_S", "asking", "bring_up", "infer", "pids", "post", "until", "until_pids", "with_mark"]

PATIENCE_S = 300.0  # a bound for what never comes; nothing is judged by how long it took
LONG_MS = 60_000.0  # a deadline that a busy machine meets too


def bring_up(launcher: Launcher, config: ServeConfig) -> None:
    """Make Serve run a config as `serve deploy` does, whatever ran before, and wait until all of it does."""
    launcher.start_serve(config)
    deploy_applications(config)
    names = {application.name for application in config.applications}

    def is_up() -> bool:
        states = {name: state for name, state in application_states().items() if name in names}
        broken = [
            f"application {name} did not start:\n{each.essence}" for name, each in states.items() if each.is_broken
        ]
        if broken:
            raise EnvironmentFaultError("\n".join(broken))
        if not all(name in states and states[name].is_running for name in names):
            return False
        try:
            return bool(get_json(f"{launcher.operator_url}/v2/health/ready", 2.0).get("ready"))
        except EnvironmentFaultError:
            return False

    until(is_up)


def post(url: str, body: bytes, **headers: str) -> tuple[int, dict[str, Any]]:
    """Return status and answer. Header names have underscores; with no X_SLO_Ms a request may take a minute.

    Serve with scheduler `eager`: another one may hold a request for as long as its deadline allows.
    """
    given = {"X_SLO_Ms": f"{LONG_MS:g}", **headers}
    request = urllib.request.Request(url, body, {key.replace("_", "-"): value for key, value in given.items()})
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


def infer(url: str, model: str = "synthetic", **headers: str) -> tuple[int, dict[str, Any]]:
    """Ask an emulated model for one sample."""
    body = {"inputs": [{"name": "INPUT0", "shape": [1, 1], "datatype": "FP32", "data": [1]}]}
    return post(f"{url}/v2/models/{model}/infer", json.dumps(body).encode(), **headers)


@contextmanager
def asking(url: str, models: Sequence[str], **headers: str) -> Iterator[list[tuple[int, dict[str, Any]]]]:
    """Ask again and again until the block ends, from one thread for each entry of `models`; gives status and answer of
    every request so far."""
    answers: list[tuple[int, dict[str, Any]]] = []
    stop = threading.Event()

    def ask(model: str) -> None:
        while not stop.wait(0.1):  # more would take the processor from what starts
            answers.append(infer(url, model, **headers))

    threads = [threading.Thread(target=ask, args=(model,)) for model in models]
    for thread in threads:
        thread.start()
    try:
        yield answers
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def pids(url: str) -> dict[str, int]:
    """Return the process of every gpu-let that is up; none while the gateway does not answer."""
    try:
        gpulets = get_json(f"{url}/status", PATIENCE_S)["gpulets"]
    except EnvironmentFaultError:
        return {}
    return {gpulet["id"]: gpulet["pid"] for gpulet in gpulets if gpulet["up"]}


def until_pids(url: str, expected: Mapping[str, int]) -> None:
    """Wait until these gpu-lets are up, each as this process: a gateway that has just started knows none at first."""
    end = time.monotonic() + PATIENCE_S
    while (present := pids(url)) != expected and time.monotonic() < end:
        time.sleep(0.1)
    assert present == expected


def until(claim: Callable[[], bool], timeout_s: float = PATIENCE_S) -> None:
    """Wait until a claim holds."""
    end = time.monotonic() + timeout_s
    while not claim():
        assert time.monotonic() < end, f"it never came; Serve has {_shown_states()}"
        time.sleep(0.1)


def _shown_states() -> dict[str, str]:
    """Return what Serve says of every application, where this process is connected to one."""
    import ray

    if not ray.is_initialized():
        return {}
    return {name: f"{state.status} {state.message}".strip() for name, state in application_states().items()}


def with_mark(mark: str) -> list[int]:
    """Return the processes that inherited a mark in their environment."""
    marked = []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if f"TENUTO_TEST_MARK={mark}".encode() in (entry / "environ").read_bytes():
                marked.append(int(entry.name))
    return marked
