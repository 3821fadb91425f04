"""All of a gateway over its own socket, with gpu-lets from inside the test and without Ray."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from typing import Any

import httpx
import numpy as np
import pytest

from tenuto.deployments.entry.gateway import Entry
from tenuto.deployments.serve.launcher import unused_port
from tenuto.deployments.serve.user_config import read_gateway_config
from tenuto.errors import EnvironmentFaultError
from tenuto.placement import Plan
from tests.instruments.asking import http_client, until, until_ready
from tests.instruments.fake_gpulet import FakeGpulet, finder, make_plan
from tests.instruments.live import PATIENCE_S

TENSOR = {"name": "x", "shape": [1, 2], "datatype": "FP32", "data": [1, 2]}


class Bench:
    """A gateway over two gpu-lets, and a client."""

    def __init__(self, **options: Any) -> None:
        self.gpulets = {"a": FakeGpulet("a", ("m",)), "b": FakeGpulet("b", ("n",))}
        self.port = unused_port()
        self.is_closed = False
        self.entry = Entry(finder(self.gpulets), **options)
        self.client = http_client(self.port)

    async def follow(self, plan: Plan, *, port: int | None = None, scheduler: str = "eager", **options: Any) -> None:
        listen = {"host": "127.0.0.1", "port": port or self.port}
        chosen = {"scheduler": {"name": scheduler}, "listen": listen, **options}
        await self.entry.follow(read_gateway_config({"plan": plan.to_data(), **chosen}))

    async def start(self, plan: Plan, **options: Any) -> None:
        """Start the gpu-lets, and return once a plan is served."""
        for gpulet in self.gpulets.values():
            await gpulet.start()
        await self.follow(plan, **options)
        await until_ready(self.client)

    async def infer(self, model: str = "m", document: Any = None, **headers: str) -> httpx.Response:
        given = {name.replace("_", "-"): value for name, value in headers.items()}
        body = {"inputs": [TENSOR]} if document is None else document
        return await self.client.post(f"/v2/models/{model}/infer", json=body, headers=given)

    async def status(self) -> dict[str, Any]:
        found: dict[str, Any] = (await self.client.get("/status")).json()
        return found

    async def close(self) -> None:
        await self.client.aclose()
        if not self.is_closed:
            await self.entry.close()
        for gpulet in self.gpulets.values():
            if gpulet.is_connected:
                gpulet.die()


PLAN = make_plan(("a", ("m",)), ("b", ("n",)), slo_ms=60_000.0)


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    made = Bench()
    await made.start(PLAN)
    yield made
    await made.close()


async def test_an_answer_has_outputs_times_and_the_clients_id(bench: Bench) -> None:
    answer = await bench.infer(document={"id": "of body", "inputs": [TENSOR]}, X_Request_Id="of header")
    assert answer.status_code == 200
    found = answer.json()
    assert found["outputs"] == [{"name": "y", "datatype": "FP32", "shape": [1, 2], "data": [2.0, 4.0]}]
    assert (found["id"], found["model_name"]) == ("of body", "m")
    assert found["parameters"]["batch_size"] == 1
    assert found["parameters"]["gpulet"] == answer.headers["x-tenuto-gpulet"] == "a"
    assert answer.headers["x-tenuto-request-id"] == "of body"
    assert (await bench.infer(X_Request_Id="of header")).headers["x-tenuto-request-id"] == "of header"
    (ended,) = (await bench.client.get("/requests", params={"id": "of body"})).json()
    assert ended["outcome"] == "ok"


def binary(samples: int, *, padding: int = 0, **parameters: Any) -> tuple[bytes, dict[str, str]]:
    values = np.arange(2 * samples, dtype=np.float32)
    tensor = {**TENSOR, "shape": [samples, 2], "parameters": {"binary_data_size": values.nbytes}}
    del tensor["data"]
    text = json.dumps({"inputs": [tensor], "parameters": parameters}).encode() + b" " * padding
    return text + values.tobytes(), {"Inference-Header-Content-Length": str(len(text))}


@pytest.mark.parametrize("padding", [0, 1 << 15], ids=["small", "received into shared memory"])
@pytest.mark.parametrize("samples", [1, 3])
async def test_binary_tensors_of_several_samples_reach_the_gpulet_and_come_back(
    bench: Bench, samples: int, padding: int
) -> None:
    body, headers = binary(samples, padding=padding, binary_data_output=True)
    answer = await bench.client.post("/v2/models/m/infer", content=body, headers=headers)
    length = int(answer.headers["inference-header-content-length"])
    (output,) = json.loads(answer.content[:length])["outputs"]
    assert output["shape"] == [samples, 2]
    assert np.frombuffer(answer.content[length:], np.float32).tolist() == [2.0 * n for n in range(2 * samples)]
    assert bench.gpulets["a"].bodies == [0 if padding else 8] * samples


async def test_compressed_bodies_are_read(bench: Bench) -> None:
    import gzip

    plain = json.dumps({"inputs": [TENSOR], "parameters": {"note": "x" * 100_000}}).encode()
    answer = await bench.client.post(
        "/v2/models/m/infer", content=gzip.compress(plain), headers={"Content-Encoding": "gzip"}
    )
    assert answer.json()["outputs"][0]["data"] == [2.0, 4.0]


@pytest.mark.parametrize(
    ("model", "document", "headers", "status", "message"),
    [
        ("nobody", None, {}, 404, "Request for unknown model: 'nobody' is not found. Models here: m, n."),
        ("m", {}, {}, 400, "missing required field `inputs`"),
        ("m", {"inputs": [{**TENSOR, "datatype": "INT64"}]}, {}, 400, "datatype 'INT64'; the model takes FP32"),
        ("m", {"inputs": [{**TENSOR, "data": [1, 2, 3]}]}, {}, 400, "x"),
        ("m", None, {"X_SLO_Ms": "soon"}, 400, "header x-slo-ms is 'soon'"),
        ("m", {"inputs": [TENSOR], "parameters": {"slo_ms": "soon"}}, {}, 400, "parameter slo_ms is 'soon'"),
        ("m", None, {"X_SLO_Ms": "0"}, 504, "the deadline could not be met"),
        ("m", {"inputs": [TENSOR], "parameters": {"timeout": 10}}, {}, 504, "the deadline could not be met"),
    ],
)
async def test_what_cannot_be_executed_is_said_at_once_and_why(
    bench: Bench, model: str, document: Any, headers: dict[str, str], status: int, message: str
) -> None:
    for _ in range(2):  # the second head is known
        answer = await bench.infer(model, document, **headers)
        assert answer.status_code == status
        assert message in answer.json()["error"]
        assert "retry-after" not in answer.headers  # no empty GPU could keep these SLOs
    assert not bench.gpulets["a"].sizes


async def test_a_deadline_in_the_header_goes_before_the_bodys(bench: Bench) -> None:
    none = {"inputs": [TENSOR], "parameters": {"slo_ms": 0}}
    assert (await bench.infer(document=none)).status_code == 504
    assert (await bench.infer(document=none, X_SLO_Ms="60000")).status_code == 200


async def test_too_many_waiting_requests_are_turned_away_before_they_are_read(bench: Bench) -> None:
    await bench.follow(PLAN, max_queued=2)
    bench.gpulets["a"].hold = True
    waiting = [asyncio.create_task(bench.infer()) for _ in range(3)]
    queue = {}
    while queue.get("m") != 2:
        queue = (await bench.client.get("/status/queue")).json()
    answer = await bench.infer(document="not even a request")
    assert (answer.status_code, answer.json()["outcome"]) == (429, "rejected")
    bench.gpulets["a"].hold = False
    bench.gpulets["a"].release()
    assert [(await task).status_code for task in waiting] == [200, 200, 200]


async def test_a_client_that_leaves_frees_its_place(bench: Bench) -> None:
    bench.gpulets["a"].hold = True
    running, waiting = (asyncio.create_task(bench.infer()) for _ in range(2))
    await asyncio.wait_for(bench.gpulets["a"].arrived.wait(), PATIENCE_S)
    while (await bench.client.get("/status/queue")).json()["m"] != 1:
        await asyncio.sleep(0)
    waiting.cancel()
    while (await bench.client.get("/status/queue")).json()["m"]:
        await asyncio.sleep(0)
    assert (await bench.status())["models"]["m"]["cancelled"] == 1
    bench.gpulets["a"].release()
    assert (await running).status_code == 200


async def test_a_gpulet_that_dies_is_said_and_comes_back(bench: Bench) -> None:
    bench.gpulets["a"].die()
    while (await bench.client.get("/v2/health/ready")).status_code == 200:
        await asyncio.sleep(0.001)
    answer = await bench.infer()
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "2")
    assert "no gpu-let of 'm' is ready" in answer.json()["error"]
    assert (await bench.infer("n")).status_code == 200
    await bench.gpulets["a"].start()
    await until_ready(bench.client)
    assert (await bench.infer()).status_code == 200


async def test_a_new_plan_is_followed_by_connections_that_are_open(bench: Bench) -> None:
    assert (await bench.infer("n")).status_code == 200
    await bench.follow(make_plan(("a", ("m",)), slo_ms=60_000.0))
    assert (await bench.infer("n")).status_code == 404
    moved = unused_port()
    await bench.follow(PLAN, port=moved)
    async with http_client(moved) as client:
        assert (await client.get("/v2/health/live")).status_code == 200
    with pytest.raises(httpx.ConnectError):
        async with http_client(bench.port) as client:
            await client.get("/v2/health/live")


async def test_a_port_of_somebody_else_is_named() -> None:
    bench = Bench(taken_s=0.0)
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        with pytest.raises(EnvironmentFaultError, match="cannot be listened on"):
            await bench.follow(PLAN, port=other.getsockname()[1])
    await bench.close()


async def test_a_port_for_grpc_of_somebody_else_takes_http_from_nobody() -> None:
    pytest.importorskip("h2")
    bench = Bench(taken_s=0.0)
    await bench.start(PLAN)
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        await bench.follow(PLAN, grpc={"port": other.getsockname()[1]})
        assert (await bench.infer()).status_code == 200
    await bench.close()


async def test_operators_see_the_margin_and_what_it_costs(bench: Bench) -> None:
    assert (await bench.infer()).status_code == 200
    margin = (await bench.status())["margin"]
    assert margin["margin_ms"] > 0.0
    assert set(margin) >= {"margin_ms", "late_share", "refused_for_margin"}
    assert "tenuto_margin_seconds{gateway=" in (await bench.client.get("/metrics")).text


async def test_shared_memory_of_clients_is_not_offered(bench: Bench) -> None:
    assert not [name for name in (await bench.client.get("/v2")).json()["extensions"] if "memory" in name]
    for kind in ("system", "cuda"):
        begin = f"/v2/{kind}sharedmemory"
        for path in ("/status", "/region/r/status"):
            answer = await bench.client.get(begin + path)
            assert (answer.status_code, "binary data" in answer.json()["error"]) == (404, True), path
        for path in ("/region/r/register", "/region/r/unregister", "/unregister"):
            answer = await bench.client.post(begin + path, content=b'{"key": "/any", "offset": 0, "byte_size": 8}')
            assert (answer.status_code, "binary data" in answer.json()["error"]) == (404, True), path
    place = {"shared_memory_region": "r", "shared_memory_byte_size": 8}
    tensor = {"name": "x", "shape": [1, 2], "datatype": "FP32"}
    for document in (
        {"inputs": [{**tensor, "parameters": place}]},
        {"inputs": [{**tensor, "data": [1, 2]}], "outputs": [{"name": "y", "parameters": place}]},
    ):
        answer = await bench.infer(document=document)
        assert (answer.status_code, "not offered" in answer.json()["error"]) == (400, True)


@pytest.mark.filterwarnings("ignore:overflow")  # of the gpu-let of this test
@pytest.mark.parametrize("sent", [3e38, -3e38, np.nan])
async def test_numbers_that_json_cannot_carry_are_said(bench: Bench, sent: float) -> None:
    """The model doubles what it gets: 3e38 becomes infinite in FP32. (JSON has no NaN, so it is sent as bytes.)"""
    raw = np.array([sent, 1.0], np.float32).tobytes()
    tensor = {"name": "x", "shape": [1, 2], "datatype": "FP32", "parameters": {"binary_data_size": 8}}
    for wanted in ({}, {"outputs": [{"name": "y"}]}, {"parameters": {"slo_ms": 60_000}}):
        text = json.dumps({"inputs": [tensor], **wanted}).encode()
        headers = {"Inference-Header-Content-Length": str(len(text))}
        answer = await bench.client.post("/v2/models/m/infer", content=text + raw, headers=headers)
        assert (answer.status_code, "output 'y' holds NaN or infinite" in answer.json()["error"]) == (406, True)
    text = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
    headers = {"Inference-Header-Content-Length": str(len(text))}
    answer = await bench.client.post("/v2/models/m/infer", content=text + raw, headers=headers)
    assert answer.status_code == 200
    got = np.frombuffer(answer.content[int(answer.headers["inference-header-content-length"]) :], np.float32)
    np.testing.assert_array_equal(got, np.frombuffer(raw, np.float32) * np.float32(2.0))


async def test_what_nobody_expected_is_told_by_a_name_that_the_log_has(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_arguments: object) -> None:
        raise RuntimeError("secret of the model")

    monkeypatch.setattr("tenuto.deployments.entry.service.infer_call.JsonRows", fail)
    answer = await bench.infer()
    assert answer.status_code == 500
    assert "secret" not in answer.text
    incident = answer.json()["error"].rstrip(".").split()[-1]
    assert any(incident in line.message and "secret" in str(line.exc_info) for line in caplog.records)


async def test_operators_routes_answer_no_page_of_another_site(bench: Bench) -> None:
    own = f"127.0.0.1:{bench.port}"
    paths = ("/", "/live", "/status", "/status/queue", "/requests", "/metrics")
    for path in paths:
        for headers, expected in (
            ({}, 200),
            ({"host": "localhost"}, 200),
            ({"host": "evil.example"}, 403),
            ({"host": f"evil.example:{bench.port}"}, 403),
            ({"origin": f"http://{own}"}, 200),
            ({"origin": "http://evil.example"}, 403),
            ({"origin": "null"}, 403),
            ({"origin": "http://localhost:3000"}, 403),
            ({"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors"}, 403),
            ({"sec-fetch-site": "same-origin", "sec-fetch-mode": "cors"}, 200),
            ({"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}, 200),
        ):
            answer = await bench.client.get(path, headers=headers)
            assert answer.status_code == expected, (path, headers, answer.text)
    # Without keys, on loopback, a proxy's name has to be given with --host-name.
    assert (await bench.client.get("/v2", headers={"host": "api.example"})).status_code == 403


async def test_what_is_under_way_is_answered_before_the_gateway_ends(bench: Bench) -> None:
    bench.gpulets["a"].hold = True
    last = asyncio.create_task(bench.infer())
    await asyncio.wait_for(bench.gpulets["a"].arrived.wait(), PATIENCE_S)
    bench.is_closed = True
    closing = asyncio.create_task(bench.entry.close())
    await until(lambda: bench.entry.server.is_draining)
    bench.gpulets["a"].release()
    assert (await last).status_code == 200
    await closing


async def test_operators_see_what_the_scheduler_of_a_lone_gateway_rehearsed(bench: Bench) -> None:
    await bench.follow(PLAN, scheduler="deferred")
    (scheduler,) = (await bench.status())["schedulers"]
    assert (scheduler["rehearsals"], scheduler["defend"]) == (0, 1.0)
    assert 'tenuto_rehearsals_total{subcluster="0"} 0' in (await bench.client.get("/metrics")).text
    assert (await bench.client.get("/live")).json()["schedulers"] == [scheduler]
