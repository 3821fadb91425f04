"""Requests for models that left because nobody asked them: they wake these, and wait or are told when to come again."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator

import pytest

from tenuto.placement import Plan
from tenuto.placement.plan_edits import with_idle
from tests.deployments.entry.test_gateway import PLAN, TENSOR, Bench
from tests.instruments.asking import http_client, until

START_S = 7.0
STAGES = [{"model": "m", "shared": True}, {"model": "n", "after": ["m"], "shared": True}]
IDLE = with_idle(PLAN, [PLAN.model("n")], START_S)


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    made = Bench()
    await made.start(PLAN)
    await made.follow(IDLE)
    yield made
    await made.close()


async def arrived(bench: Bench) -> int:
    count: int = (await bench.status())["models"]["n"]["samples"]
    return count


async def test_a_request_without_the_time_to_wait_wakes_its_model_and_is_told_when_to_come_again(bench: Bench) -> None:
    for count in (1, 2, 3):
        answer = await bench.infer("n", X_SLO_Ms="500")
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "7")
        assert "nobody had asked n for a while" in answer.json()["error"]
        assert await arrived(bench) == count  # which the controller sees
    assert (await bench.infer("m")).status_code == 200
    assert (await bench.infer("m", X_SLO_Ms="500")).status_code == 200


async def test_a_look_at_an_idle_model_does_not_wake_it(bench: Bench) -> None:
    answer = await bench.client.get("/v2/models/n/ready")
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "7")
    assert (await bench.client.get("/v2/models/n")).status_code == 503
    assert (await bench.client.get("/v2/health/ready")).status_code == 200
    assert await arrived(bench) == 0


async def test_a_patient_request_waits_for_the_start(bench: Bench) -> None:
    waiting = [asyncio.create_task(bench.infer("n")) for _ in range(3)]
    while await arrived(bench) < 3:
        await asyncio.sleep(0)
    left = asyncio.create_task(bench.infer("n"))
    while await arrived(bench) < 4:
        await asyncio.sleep(0)
    left.cancel()
    bench.gpulets["b"].die()
    await bench.follow(PLAN)  # it starts now
    starting = asyncio.create_task(bench.infer("n"))
    hasty = await bench.infer("n", X_SLO_Ms="500")
    assert (hasty.status_code, hasty.headers["retry-after"]) == (503, "7")
    await bench.gpulets["b"].start()
    answers = await asyncio.gather(*waiting, starting)
    assert [(answer.status_code, answer.json()["outputs"][0]["data"]) for answer in answers] == [(200, [2.0, 4.0])] * 4


@pytest.mark.parametrize("length", ["9" * 5000, "-1", "x"])
async def test_a_length_that_is_none_is_refused_although_its_model_is_idle(bench: Bench, length: str) -> None:
    """Python reads no number of more than 4,300 digits, and that was an internal error."""
    answer = await bench.infer("n", inference_header_content_length=length)
    assert answer.status_code == 400
    assert "Give a number of bytes" in answer.json()["error"]


async def test_a_body_says_how_long_its_request_can_wait(bench: Bench) -> None:
    """By its header alone each of them would wait."""
    raw = b"\0" * 8
    tensor = {**{key: value for key, value in TENSOR.items() if key != "data"}, "parameters": {"binary_data_size": 8}}
    head = json.dumps({"inputs": [tensor], "parameters": {"timeout": 500_000}}).encode()
    length = {"inference-header-content-length": str(len(head))}
    for body, headers in (
        (json.dumps({"inputs": [TENSOR], "parameters": {"slo_ms": 500}}).encode(), {}),
        (head + raw, length),
    ):
        answer = await bench.client.post("/v2/models/n/infer", content=body, headers=headers)
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "7")
    patient = json.dumps({"inputs": [TENSOR], "parameters": {"slo_ms": 60_000}}).encode()
    waiting = asyncio.create_task(bench.client.post("/v2/models/n/infer", content=patient))
    while await arrived(bench) < 3:
        await asyncio.sleep(0)
    assert not waiting.done()
    waiting.cancel()
    deep = b'{"parameters": {"a": ' + b"[" * 30_000 + b"]" * 30_000 + b"}}"
    for wrong in (b"no json", b'{"parameters": {"slo_ms": "soon"}}', b"[]", b'{"parameters": {"a": "\xff"}}', deep):
        answer = await bench.client.post("/v2/models/n/infer", content=wrong, headers={"x-slo-ms": "500"})
        assert answer.status_code == 503


async def test_the_time_before_this_process_counts_once(bench: Bench) -> None:
    """A request begins anew when its model has started. Before, the time that it had waited counted twice."""
    began = f"t={time.time() - 5.0:.3f}"
    waiting = asyncio.create_task(bench.infer("n", X_SLO_Ms="60000", X_Request_Start=began))
    while await arrived(bench) < 1:
        await asyncio.sleep(0)
    await bench.follow(PLAN)
    assert (await waiting).status_code == 200
    assert sum(bench.entry.service.proxied["n"].buckets().counts) == 1


async def test_a_patient_request_expires_when_nothing_starts(bench: Bench) -> None:
    await bench.follow(with_idle(PLAN, [PLAN.model("n")], 0.1))
    answer = await bench.infer("n", X_SLO_Ms="300")
    assert answer.status_code == 504


async def test_texts_wake_the_model_that_their_body_names(bench: Bench) -> None:
    for text in ("a", "a" * 10_000):
        asked = {"model": "n", "input": text}
        answer = await bench.client.post("/v1/embeddings", json=asked, headers={"x-slo-ms": "500"})
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "7")
    assert await arrived(bench) == 2


async def test_an_application_wakes_the_models_of_its_stages(bench: Bench) -> None:
    data = PLAN.to_data()
    application = {"name": "app", "rate_rps": 1.0, "slo_ms": 60_000.0, "stages": STAGES}
    plan = Plan.from_data({**data, "applications": [application]}, origin="the plan", is_whole=False)
    await bench.follow(with_idle(plan, [plan.model("n")], START_S))
    answer = await bench.infer("app", X_SLO_Ms="500")
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "7")
    assert await arrived(bench) == 1
    waiting = asyncio.create_task(bench.infer("app"))
    while await arrived(bench) < 2:
        await asyncio.sleep(0)
    await bench.follow(plan)
    assert (await waiting).status_code in (200, 400)  # it is asked, whatever its tensors are


async def test_who_has_no_key_wakes_nothing(bench: Bench) -> None:
    await bench.follow(IDLE, keys=[{"name": "anna", "sha256": "0" * 64, "models": ["*"]}])
    assert (await bench.infer("n", X_SLO_Ms="500")).status_code == 401
    await bench.follow(IDLE, keys=[])
    assert await arrived(bench) == 0
    await until(lambda: bench.gpulets["a"].is_connected)
    async with http_client(bench.port) as client:
        answer = await client.post("/v2/models/n/infer", json={"inputs": [TENSOR]}, headers={"x-slo-ms": "500"})
    assert answer.status_code == 503
