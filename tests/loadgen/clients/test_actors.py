"""Load clients as real Ray actors: they share one start, and one that is killed costs only its own part."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from tenuto.loadgen.bench import BenchOptions, run_bench
from tenuto.loadgen.clients.actors import RayClients
from tenuto.placement import Arrival, ModelSpec
from tests.instruments.fake_server import fake_server
from tests.instruments.live import LONG_MS, PATIENCE_S, until
from tests.instruments.local_ray import LocalRay

pytestmark = [
    pytest.mark.ray,
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

MODEL = ModelSpec(name="m", rate_rps=100, slo_ms=LONG_MS, arrival=Arrival(process="uniform"))


def options(url: str) -> BenchOptions:
    return BenchOptions(url, duration_s=2.0, clients=2, grace_s=PATIENCE_S)


@pytest.fixture(scope="module", autouse=True)
def cluster(local_ray: LocalRay) -> None:
    local_ray.connect()


def test_nothing_of_the_working_folder_comes_before_what_workers_import() -> None:
    import ray

    job = ray._private.worker.global_worker.core_worker.get_job_config()
    assert list(job.py_driver_sys_path) == []


def test_several_actors_send_one_schedule() -> None:
    lines: list[str] = []
    with fake_server() as server:
        result = run_bench([MODEL], options(server.url), lines.append)
    assert len(server.requests) == 200
    assert np.array_equal(np.sort(result.records.request), np.arange(200))
    assert result.summary["models"]["m"]["attainment"] == 1.0
    assert any("sent" in line for line in lines)


def test_a_killed_actor_makes_the_run_invalid_and_keeps_the_rest() -> None:
    import ray

    clients = RayClients(2)

    def kill() -> None:
        until(lambda: clients.progress().get("answered", 0) >= 40)
        ray.kill(clients.actors[1])

    with fake_server() as server:
        killer = threading.Thread(target=kill)
        killer.start()
        result = run_bench([MODEL], options(server.url), clients=clients)
        killer.join()
    assert result.verdict.result == "INVALID"
    assert result.verdict.reasons[0].startswith("client 1 was lost")
    model = result.summary["models"]["m"]
    assert model["offered"] == 190  # 5 % of the 200 are warm-up
    assert (model["ok"], model["failed"]) == (95, 95)
    assert np.array_equal(np.sort(result.records.request), np.arange(200))
