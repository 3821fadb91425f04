"""An application on a real local Ray, while what answers it is killed or changed amid its graph: two gateways and two
dispatchers, a gpu-let for each of two stages, and a function between them. The models note what they run."""

from __future__ import annotations

import itertools
import json
import os
import signal
import threading
import urllib.error
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tenuto.deployments.serve.config import dispatcher_name
from tenuto.deployments.serve.deployment import Deployment
from tenuto.deployments.serve.endpoint import get_json
from tenuto.deployments.serve.launcher import Launcher, unused_port
from tenuto.errors import EnvironmentFaultError
from tenuto.placement import Plan
from tests.instruments.live import bring_up, pids, post, until
from tests.instruments.replica_processes import dead_arenas, functions_of, replicas

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::DeprecationWarning")]

PORT = unused_port()
NUMBERS = itertools.count(1000)  # of samples; larger than what models are warmed up with
WIDE = 1 << 13  # numbers of a tensor that is handed on in shared memory
SOME = 6  # answers that show that requests are served
ASKING = 3  # clients; each has always one request under way
SLOW = {"alpha_ms": 5.0, "beta_ms": 60.0}  # most of the time a request is amid its graph
SHAPES = {"first": {"takes": 1, "makes": WIDE}, "second": {"takes": WIDE, "makes": 1}}
ENDED = {200, 404, 429, 500, 503, 504}
GATEWAY_GONE = 0


def make_plan(folder: Path, *, stages: int = 2, models: tuple[str, ...] = ("first", "second")) -> Plan:
    """An application of so many stages, over a gpu-let for each model."""
    replica = {"batch_size": 4, "latency": SLOW, "latency_ms": 80.0}
    second = {"model": "second", "after": ["first"], "map": "tests.instruments.graph_functions:halves", "most": 2}
    graph = [{"shared": True, **stage} for stage in ({"model": "first"}, {**second, "count": 2})[:stages]]
    app = {"name": "app", "rate_rps": 5, "slo_ms": 60_000, "stages": graph}
    return Plan.from_data(
        {
            "policy": {"name": "test"},
            "gpus": [{"id": f"n0/{place}", "type": "cpu"} for place in range(2)],
            "gpulets": [
                {"id": f"n0/{place}/a", "gpu": f"n0/{place}", "models": [{"name": name, **replica}]}
                for place, name in enumerate(models)
            ],
            "models": [
                {
                    "name": name,
                    "rate_rps": 10,
                    "slo_ms": 60_000,
                    "latency": SLOW,
                    "source": "tests.instruments.own_models:counting",
                    "options": {"path": str(folder / name), "takes_s": 0.06, **SHAPES[name]},
                }
                for name in models
            ],
            "applications": [app] if len(models) == 2 else [],
        }
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the models note what they run."""
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def url(launcher: Launcher, folder: Path) -> str:
    apply(launcher, make_plan(folder))
    return launcher.base_url


def apply(launcher: Launcher, plan: Plan) -> None:
    bring_up(launcher, Deployment(plan=plan, port=PORT, scheduler="eager", gateways=2).config())


def ask(url: str) -> tuple[int, dict[str, Any]]:
    """Ask the application with two samples, on a connection of its own."""
    tensor = {"name": "x", "shape": [2, 1], "datatype": "FP32", "data": [next(NUMBERS), next(NUMBERS)]}
    try:
        return post(
            f"{url}/v2/models/app/infer",
            json.dumps({"inputs": [tensor]}).encode(),
            Connection="close",
            X_SLO_Ms="20000",
        )
    except (OSError, urllib.error.URLError, json.JSONDecodeError):
        return GATEWAY_GONE, {"error": "the gateway is gone"}


@contextmanager
def asking(url: str) -> Iterator[Counter[int]]:
    """Ask the application again and again until the block ends; gives how many requests ended with each status."""
    statuses: Counter[int] = Counter()
    stop = threading.Event()

    def work() -> None:
        while not stop.wait(0.02):
            status, _ = ask(url)
            statuses[status] += 1

    threads = [threading.Thread(target=work) for _ in range(ASKING)]
    for thread in threads:
        thread.start()
    try:
        yield statuses
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def serves(statuses: Counter[int]) -> None:
    """Wait until some more requests are answered."""
    before = statuses[200]
    until(lambda: statuses[200] >= before + SOME)


def nothing_is_left(url: str) -> None:
    """No request waits, is counted as running or holds memory at any gateway."""

    def is_quiet() -> bool:
        try:
            status, waiting = get_json(f"{url}/status"), get_json(f"{url}/status/queue")
        except EnvironmentFaultError:
            return False
        counts = status["applications"]["app"]
        ended = sum(counts[word] for word in ("ok", "late", "expired", "rejected", "failed", "cancelled"))
        held = [gateway["front_door"]["unfinished_bytes"] for gateway in status["gateways"]]
        return counts["submitted"] == ended and held == [0, 0] and set(waiting.values()) == {0}

    until(is_quiet)


def most_runs(folder: Path) -> dict[str, int]:
    """How often each model ran the request that it ran most often."""
    runs = {path.name: Counter(map(float, path.read_text(encoding="ascii").split())) for path in folder.iterdir()}
    return {name: max(count for number, count in of.items() if number >= 1000) for name, of in runs.items()}


def victims(url: str, kind: str) -> list[int]:
    """The processes to kill."""
    if kind == "function":
        return [leader for gateway in replicas("tenuto") for leader in functions_of(gateway)]
    if kind in ("gateway", "dispatcher"):
        return replicas("tenuto" if kind == "gateway" else dispatcher_name("0"))[:1]
    name = {"first gpu-let": "n0/0/a", "second gpu-let": "n0/1/a"}[kind]
    return [pid for gpulet, pid in pids(url).items() if gpulet == name]


@pytest.mark.parametrize(
    "kind",
    ["function", "first gpu-let", pytest.param("second gpu-let", marks=pytest.mark.night), "gateway", "dispatcher"],
)
def test_what_is_killed_amid_graphs_ends_each_request_once_and_is_replaced(url: str, kind: str, folder: Path) -> None:
    """Of each sample no stage runs more than once more."""
    with asking(url) as statuses:
        serves(statuses)
        killed = victims(url, kind)
        assert killed
        for pid in killed:
            os.kill(pid, signal.SIGKILL)
        until(lambda: not set(killed) & set(victims(url, kind)) and len(victims(url, kind)) >= len(killed))
        serves(statuses)
    gone = {GATEWAY_GONE} if kind == "gateway" else set()
    assert set(statuses) <= ENDED | gone, statuses
    assert statuses[GATEWAY_GONE] <= ASKING * SOME, statuses  # what it held, and some that came before it was missed
    until(lambda: len(replicas("tenuto")) == 2)
    nothing_is_left(url)
    assert set(most_runs(folder).values()) <= {1, 2}
    with asking(url):  # a gpu-let forgets the memory of a gateway that is gone with the next one that it sees
        until(lambda: not dead_arenas())


def test_plans_that_change_amid_graphs_end_each_request_once(url: str, launcher: Launcher, folder: Path) -> None:
    """The graph changes, then a model of it and the application are removed, and come back."""
    with asking(url) as statuses:
        for plan in (make_plan(folder, stages=1), make_plan(folder, models=("first",)), make_plan(folder)):
            apply(launcher, plan)
            until(lambda: ask(url)[0] == (404 if not plan.applications else 200))  # noqa: B023
            if plan.applications:
                serves(statuses)
    assert set(statuses) <= {200, 404, 503}, statuses
    nothing_is_left(url)
    assert set(most_runs(folder).values()) <= {1, 2}
