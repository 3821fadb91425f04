"""The whole serving stack on a real local Ray: HTTP in, batches over sockets, processes killed, plans changed."""

import json
import os
import signal
import urllib.request
from importlib import resources
from urllib.parse import quote

import numpy as np
import pytest

from tenuto.deployments.serve.endpoint import get_json
from tenuto.deployments.serve.process_logs import LogReader, process_logs
from tenuto.loadgen.bench import BenchOptions, run_bench
from tenuto.profiles.networks.catalogue import lookup
from tenuto.profiles.networks.preprocess import normalised
from tests.instruments.live import LONG_MS, asking, infer, pids, post, until, until_pids
from tests.instruments.shared_deployment import SharedDeployment

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::DeprecationWarning")]


@pytest.fixture
def url(shared_url: str) -> str:
    return shared_url


def test_health_and_metadata(url: str) -> None:
    assert get_json(f"{url}/v2/health/live") == {"live": True}
    assert get_json(f"{url}/v2/health/ready") == {"ready": True}
    assert get_json(f"{url}/v2")["name"] == "tenuto"
    metadata = get_json(f"{url}/v2/models/mobilenet_v2")
    assert metadata["inputs"] == [{"name": "image", "datatype": "FP32", "shape": [-1, 3, 224, 224]}]
    assert get_json(f"{url}/v2/models/synthetic/ready") == {"name": "synthetic", "ready": True}


def test_the_documentation_lists_the_infer_path(url: str) -> None:
    assert "/v2/models/{model}/infer" in get_json(f"{url}/openapi.json")["paths"]
    with urllib.request.urlopen(f"{url}/docs", timeout=None) as page:
        assert b"/v2/models/{model}/infer" in page.read()


def test_a_photograph_gets_the_label_of_a_direct_forward_pass(url: str) -> None:
    import torch

    from tenuto.profiles.networks.models import build
    from tenuto.profiles.networks.preprocess import preprocess

    photo = resources.files("tenuto.deployments").joinpath("data", "grace_hopper.jpg").read_bytes()
    status, answer = post(f"{url}/predict/mobilenet_v2", photo, Content_Type="image/jpeg")
    assert status == 200
    loaded = build("mobilenet_v2", weights_path=None, options={})
    with torch.inference_mode():
        logits = loaded.module(torch.from_numpy(preprocess(loaded.signature, photo)["image"][None]))[0]
    best = int(logits.argmax())
    assert answer["predictions"][0]["index"] == best
    assert answer["predictions"][0]["label"] == loaded.signature.labels[best]
    assert answer["predictions"][0]["logit"] == pytest.approx(float(logits[best]), rel=1e-4)
    assert answer["parameters"]["emulated"] is False


def test_answers_carry_times_and_say_that_they_are_emulated(url: str) -> None:
    status, answer = infer(url)
    parameters = answer["parameters"]
    assert (status, parameters["emulated"]) == (200, True)
    assert parameters["execution_ms"] >= 10.0
    assert parameters["batch_size"] == 1
    assert parameters["gpulet"] in ("n0/0/a", "n0/1/a")


def test_the_real_triton_client_works_unchanged(url: str) -> None:
    client_module = pytest.importorskip("tritonclient.http", reason="tritonclient[http] is not installed")
    client = client_module.InferenceServerClient(url.removeprefix("http://"))
    try:
        assert client.is_server_live()
        assert client.is_server_ready()
        assert client.is_model_ready("mobilenet_v2")
        assert client.get_model_metadata("synthetic")["inputs"][0]["name"] == "INPUT0"
        assert client.get_model_config("synthetic")["max_batch_size"] == 4
        assert {entry["name"] for entry in client.get_model_repository_index()} >= {"synthetic", "mobilenet_v2"}
        assert client.get_inference_statistics("synthetic")["model_stats"][0]["name"] == "synthetic"
        image = np.random.default_rng(0).standard_normal((1, 3, 224, 224), dtype=np.float32)
        results = []
        for binary in (True, False):
            tensor = client_module.InferInput("image", image.shape, "FP32")
            tensor.set_data_from_numpy(image, binary_data=binary)
            output = client_module.InferRequestedOutput("logits", binary_data=binary)
            status_of = client.infer("mobilenet_v2", [tensor], outputs=[output], request_id="r1", timeout=10_000_000)
            assert status_of.get_response()["id"] == "r1"
            results.append(status_of.as_numpy("logits"))
        assert results[0].shape == (1, 1000)
        np.testing.assert_allclose(results[0], results[1], rtol=1e-4, atol=1e-5)
        labels = client_module.InferRequestedOutput("logits", class_count=3)
        top = client.infer("mobilenet_v2", [tensor], outputs=[labels]).as_numpy("logits")
        assert int(top[0][0].decode().split(":")[1]) == int(results[0].argmax())

        pixels = np.random.default_rng(1).integers(0, 256, image.shape, dtype=np.uint8)
        picture = lookup("mobilenet_v2").signature.image
        assert picture is not None
        floats = normalised(pixels, picture)
        logits = {}
        for array, datatype in ((floats, "FP32"), (pixels, "UINT8"), (floats.astype(np.float16), "FP16")):
            tensor = client_module.InferInput("image", array.shape, datatype)
            tensor.set_data_from_numpy(array)
            logits[datatype] = client.infer("mobilenet_v2", [tensor]).as_numpy("logits")
        np.testing.assert_allclose(logits["UINT8"], logits["FP32"], rtol=1e-3, atol=1e-3)
        np.testing.assert_allclose(logits["FP16"], logits["FP32"], rtol=0.05, atol=0.05)
    finally:
        client.close()


def test_the_clients_id_is_echoed_and_found_with_its_times(url: str) -> None:
    body = {"id": "öf body", "inputs": [{"name": "INPUT0", "shape": [1, 1], "datatype": "FP32", "data": [1]}]}
    for raw, given, expected in (
        ({**body}, "of-header", "%C3%B6f%20body"),
        ({"inputs": body["inputs"]}, "of-header", "of-header"),
    ):
        request = urllib.request.Request(
            f"{url}/v2/models/synthetic/infer",
            json.dumps(raw).encode(),
            {"X-Request-Id": given, "X-SLO-Ms": f"{LONG_MS:g}"},
        )
        with urllib.request.urlopen(request) as response:
            assert response.headers["x-tenuto-request-id"] == expected
            started_ms = float(response.headers["x-tenuto-start-ms"])
            assert json.load(response).get("id") == raw.get("id")
        (found,) = get_json(f"{url}/requests?id={quote(expected)}")
        assert (found["outcome"], found["model"]) == ("ok", "synthetic")
        assert found["start_ms"] == pytest.approx(started_ms, abs=0.001)
        assert found["dispatched_ms"] <= found["start_ms"] + 0.1 <= found["end_ms"] <= found["answered_ms"] + 0.1


def test_metrics_are_served(url: str) -> None:
    with urllib.request.urlopen(f"{url}/metrics", timeout=None) as response:
        assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
        text = response.read().decode()
    assert 'tenuto_requests_total{model="synthetic",outcome="ok"} ' in text
    assert 'tenuto_gpulet_up{gpulet="n0/0/a",gpu="n0/0"} 1' in text
    assert set(get_json(f"{url}/status/queue")) >= {"synthetic", "mobilenet_v2"}


@pytest.mark.parametrize("slo_ms", ["0", "-3", "5"])
def test_a_deadline_that_cannot_be_met_is_answered_at_once(url: str, slo_ms: str) -> None:
    status, answer = infer(url, X_SLO_Ms=slo_ms)
    assert (status, answer["outcome"]) == (504, "expired")


def test_errors_are_json_and_say_what_to_do(url: str) -> None:
    status, answer = post(f"{url}/v2/models/nobody/infer", b"{}")
    unknown = "Request for unknown model: 'nobody' is not found. Models here: synthetic, right, mobilenet_v2, "
    assert (status, answer["error"].startswith(unknown)) == (404, True)
    status, answer = post(f"{url}/v2/models/synthetic/infer", b"{")
    assert status == 400
    assert "not valid JSON" in answer["error"]
    status, answer = post(f"{url}/predict/mobilenet_v2", b"not an image")
    assert status == 400
    assert "not an image" in answer["error"]
    status, answer = post(f"{url}/predict/mobilenet_v2", bytes(5 << 20))
    assert status == 413
    assert "4 MiB" in answer["error"]
    status, answer = infer(url, X_SLO_Ms="soon")
    assert status == 400
    status, answer = post(f"{url}/v2/nothing", b"")
    assert status == 404
    assert "/docs" in answer["error"]


def test_logs_are_those_of_the_processes_and_come_once(url: str) -> None:
    logs = process_logs()
    processes = ("gpulet-n0-0-a", "gpulet-n0-1-a", "gpulet-n0-2-a", "dispatcher-0", "dispatcher-1")
    assert {log.application for log in logs} >= {"tenuto", *processes}
    reader = LogReader(last=3)
    first = list(reader.read(logs))
    assert any("gpulet-n0-2-a" in line and "mobilenet_v2 is ready" in line for line in first)
    assert not set(first) & set(reader.read(logs))


def test_a_client_that_goes_away_does_not_disturb_others(url: str) -> None:
    import socket

    host, port = url.removeprefix("http://").split(":")
    body = json.dumps({"inputs": [{"name": "INPUT0", "shape": [1, 1], "datatype": "FP32", "data": [1]}]}).encode()
    head = f"POST /v2/models/synthetic/infer HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    for _ in range(8):
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(head + body)
    assert infer(url)[0] == 200


def test_load_by_a_ray_actor_is_judged(shared: SharedDeployment, shared_url: str) -> None:
    spec, url = shared.plan.model("synthetic"), shared_url
    result = run_bench([spec], BenchOptions(url, duration_s=2.0, seed=3, clients=1))
    model = result.summary["models"]["synthetic"]
    assert result.verdict.conditions["sent"] == len(result.schedule)
    assert sum(model[key] for key in ("ok", "late", "expired", "rejected", "failed")) == model["offered"]
    assert model["ok"] + model["late"] > 0
    assert model["mean_batch"] >= 1.0
    assert set(result.summary["gpulets"]) <= {"n0/0/a", "n0/1/a"}


def test_a_killed_gpulet_fails_alone_and_rejoins(url: str) -> None:
    before = pids(url)
    with asking(url, ["synthetic"] * 4) as answers:
        until(lambda: len(answers) > 20)
        os.kill(before["n0/0/a"], signal.SIGKILL)
        until(lambda: "n0/0/a" not in pids(url))
        served = len(answers)
        until(lambda: len(answers) > served + 20)
        until(lambda: pids(url).get("n0/0/a", before["n0/0/a"]) != before["n0/0/a"])
    outcomes = [status for status, _ in answers]
    after = pids(url)
    assert outcomes.count(200) > len(outcomes) / 2  # how many are lost depends on how soon the machine notices
    assert set(outcomes) <= {200, 503, 504}
    assert {key: value for key, value in after.items() if key != "n0/0/a"} == {
        key: value for key, value in before.items() if key != "n0/0/a"
    }


def test_a_changed_plan_restarts_only_what_changed(shared: SharedDeployment) -> None:
    url = shared.url
    before = pids(url)
    shared.apply(batch_size=2)
    until_pids(url, before)
    assert {g["id"]: g["models"] for g in get_json(f"{url}/status")["gpulets"]}["n0/0/a"] == {"synthetic": 2}
    shared.apply(share_pct=25.0)
    restarted = pids(url)
    assert restarted["n0/0/a"] != before["n0/0/a"]
    assert {k: v for k, v in restarted.items() if k != "n0/0/a"} == {k: v for k, v in before.items() if k != "n0/0/a"}
    shared.apply(has_mobilenet=False)
    status, answer = post(f"{url}/predict/mobilenet_v2", b"x")
    assert status == 503
    assert "unserved" in answer["error"]
    until_pids(url, {k: v for k, v in restarted.items() if k != "n0/2/a"})
