"""Two gateways and two sub-clusters on a real local Ray: processes killed under load, one outcome per request."""

import json
import os
import signal
import threading
from typing import Any

import pytest

from tenuto.deployments.serve.endpoint import get_json
from tenuto.loadgen.bench import BenchOptions, BenchResult, run_bench
from tenuto.placement import Plan
from tests.instruments.live import pids, post, until, until_pids
from tests.instruments.replica_processes import replicas
from tests.instruments.shared_deployment import SharedDeployment
from tests.instruments.sockets import check_sockets

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::DeprecationWarning")]

BODY = json.dumps(
    {"id": "mine", "inputs": [{"name": "INPUT0", "shape": [2, 1], "datatype": "FP32", "data": [1, 2]}]}
).encode()


ASKED = ("synthetic", "right")  # one of each sub-cluster


@pytest.fixture
def url(shared_url: str) -> str:
    until(lambda: met(shared_url))
    return shared_url


def met(url: str) -> bool:
    """Both gateways have heard of each other (they tell once a second), and know all dispatchers."""
    return [each["dispatchers"] for each in get_json(f"{url}/status")["gateways"]] == [{"0": 2, "1": 2}] * 2


def load_and_kill(shared: SharedDeployment, application: str) -> tuple[BenchResult, dict[str, Any]]:
    """Send 4 s of requests to both models, kill one process of an application amid them; each has one outcome."""
    victim = replicas(application)[0]  # of dispatchers the one that schedules
    timer = threading.Timer(1.5, os.kill, (victim, signal.SIGKILL))
    timer.start()
    try:
        models = [shared.plan.model(name) for name in ASKED]
        result = run_bench(models, BenchOptions(shared.url, duration_s=4.0, warmup_s=0.0, seed=5, clients=0))
    finally:
        timer.cancel()
    models = result.summary["models"]
    for model in models.values():
        outcomes = sum(model[key] for key in ("ok", "late", "expired", "rejected", "failed"))
        assert outcomes == model["offered"] > 0
    assert result.verdict.conditions["sent"] == len(result.schedule)
    return result, models


def test_two_gateways_and_their_dispatchers_listen_where_they_are_known_to(url: str) -> None:
    assert post(f"{url}/v2/models/right/infer", BODY)[0] == 200
    kinds = {each.kind for each in check_sockets()}
    assert {"ray::ServeReplica:tenuto:gateway", "ray::ServeReplica:dispatcher"} <= kinds
    status = get_json(f"{url}/status")
    assert len(status["gateways"]) == 2


def test_both_models_answer_through_either_gateway_and_the_id_is_found(shared: SharedDeployment, url: str) -> None:
    assert len(replicas("tenuto")) == 2
    for name in ASKED:
        for _ in range(4):
            status, answer = post(f"{url}/v2/models/{name}/infer", BODY, Connection="close")
            assert (status, answer["id"], answer["parameters"]["emulated"]) == (200, "mine", True)
    found = get_json(f"{url}/requests?id=mine&limit=3")
    assert [entry["id"] for entry in found] == ["mine"] * 3
    assert all(entry["dispatched_ms"] <= entry["end_ms"] <= entry["answered_ms"] + 0.1 for entry in found)
    assert post(f"{url}/v2/models/right/infer", BODY, X_SLO_Ms="5")[0] == 504
    status = get_json(f"{url}/status")
    assert status["models"]["right"]["expired"] == 1
    assert set(get_json(f"{url}/status/queue").values()) == {0}
    assert pids(url).keys() == {gpulet.id for gpulet in shared.plan.gpulets}
    assert Plan.from_data(status["plan"]) == shared.plan


def test_a_killed_gateway_loses_only_what_it_held(shared: SharedDeployment) -> None:
    before = pids(shared.url)
    _, models = load_and_kill(shared, "tenuto")
    assert sum(model["failed"] for model in models.values()) < sum(model["offered"] for model in models.values()) / 2
    until(lambda: len(replicas("tenuto")) == 2)
    until_pids(shared.url, before)


def test_the_dispatcher_that_waits_takes_over_from_a_killed_one(shared: SharedDeployment) -> None:
    until(lambda: met(shared.url))
    before = pids(shared.url)
    _, models = load_and_kill(shared, "dispatcher-0")
    assert [model["failed"] for model in models.values()] == [0, 0]
    until_pids(shared.url, before)
    until(lambda: len(replicas("dispatcher-0")) == 2)
