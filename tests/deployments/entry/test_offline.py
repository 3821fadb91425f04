"""Who may say that a request is offline, and how: in a body, in a header, by a key, or for a whole model."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from tenuto.placement import Plan
from tests.deployments.entry import test_applications, test_generation
from tests.deployments.entry.test_gateway import PLAN, TENSOR, Bench


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    made = Bench()
    await made.start(PLAN, scheduler="deferred")
    yield made
    await made.close()


async def counts(bench: Bench, model: str = "m") -> tuple[int, int]:
    """How many requests were asked for by their SLO, and how many offline."""
    status = (await bench.status())["models"][model]
    return status["submitted"], (status["offline"] or {"submitted": 0})["submitted"]


async def test_a_body_or_a_header_says_so_and_no_other_request_is(bench: Bench) -> None:
    document = {"inputs": [TENSOR], "parameters": {"priority": "offline"}}
    assert (await bench.infer(document=document)).status_code == 200
    assert (await bench.infer(X_Priority="offline")).status_code == 200
    assert (await bench.infer()).status_code == 200
    assert await counts(bench) == (1, 2)
    metrics = (await bench.client.get("/metrics")).text
    assert 'tenuto_offline_requests_total{model="m",outcome="ok"} 2' in metrics
    assert 'tenuto_requests_total{model="m",outcome="ok"} 1' in metrics
    assert (await bench.status())["models"]["m"]["offline"]["gpu_s"] > 0.0
    assert 'tenuto_offline_gpu_seconds_total{model="m"} 0.0' in metrics


@pytest.mark.parametrize("name", ["online", "OFFLINE", ""])
async def test_another_word_is_refused(bench: Bench, name: str) -> None:
    refused = await bench.infer(X_Priority=name)
    assert (refused.status_code, "can only be 'offline'" in refused.json()["error"]) == (400, True)
    document = {"inputs": [TENSOR], "parameters": {"priority": name}}
    assert (await bench.infer(document=document)).status_code == 400


async def test_it_has_no_slo_but_its_clients_own_patience(bench: Bench) -> None:
    bench.gpulets["a"].hold = True
    await bench.follow(Plan.from_data(_with(PLAN, slo_ms=30.0)), scheduler="deferred")
    asked = asyncio.create_task(bench.infer(X_Priority="offline"))
    assert (await bench.infer(X_Priority="offline", X_SLO_Ms="0")).status_code == 504
    assert (await bench.infer()).status_code == 504
    bench.gpulets["a"].hold = False
    bench.gpulets["a"].release()
    assert (await asked).status_code == 200


async def test_all_requests_of_an_offline_model_are(bench: Bench) -> None:
    await bench.follow(Plan.from_data(_with(PLAN, offline=True)), scheduler="deferred")
    assert (await bench.infer()).status_code == 200
    assert await counts(bench) == (0, 1)


async def test_all_requests_with_an_offline_key_are() -> None:
    made = Bench()
    keys: list[dict[str, Any]] = [{"name": "night", "offline": True}, {"name": "day"}]
    for entry in keys:
        entry["sha256"] = hashlib.sha256(entry["name"].encode()).hexdigest()
    await made.start(PLAN, scheduler="deferred", keys=keys)
    for name in ("night", "day"):
        assert (await made.infer(X_Api_Key=name)).status_code == 200
    await made.follow(PLAN, scheduler="deferred")  # nobody with a key is an operator
    assert await counts(made) == (1, 1)
    await made.close()


async def test_every_stage_of_an_offline_request_for_an_application_is() -> None:
    served = test_applications.Served()
    await served.start(test_applications.plan(*test_applications.CHAIN), scheduler="deferred")
    document = {"inputs": [TENSOR], "parameters": {"priority": "offline"}}
    for answer in (await served.infer("app", document), await served.infer("app", X_Priority="offline")):
        assert (answer.status_code, answer.json()["outputs"][0]["data"]) == (200, [4.0, 8.0])
    assert [await counts(served, model) for model in ("m", "n")] == [(0, 2), (0, 2)]
    assert (await served.infer("app")).status_code == 200
    assert [await counts(served, model) for model in ("m", "n")] == [(1, 2), (1, 2)]
    assert (await served.status())["applications"]["app"]["submitted"] == 1  # an offline one is its models' alone
    assert (await served.infer("app", X_Priority="offline", X_SLO_Ms="0.5")).status_code == 504
    await test_applications.nothing_is_left(served)
    await served.close()


async def test_all_requests_for_an_offline_application_are() -> None:
    served = test_applications.Served()
    await served.start(test_applications.plan(*test_applications.CHAIN, offline=True), scheduler="deferred")
    assert (await served.infer("app")).status_code == 200
    assert [await counts(served, model) for model in ("m", "n")] == [(0, 1), (0, 1)]
    counted = (await served.status())["applications"]["app"]
    assert (counted["submitted"], counted["ok"]) == (1, 1)
    assert (await served.infer("app", X_SLO_Ms="0.5")).status_code == 504
    await test_applications.nothing_is_left(served)
    await served.close()


async def test_an_offline_request_for_an_application_needs_a_scheduler_that_runs_some() -> None:
    served = test_applications.Served()
    await served.start(test_applications.plan(*test_applications.CHAIN))
    answer = await served.infer("app", X_Priority="offline")
    assert (answer.status_code, "Serve with 'deferred'" in answer.json()["error"]) == (503, True)
    await served.close()


def _with(plan: Plan, **fields: Any) -> dict[str, Any]:
    data = plan.to_data()
    return {**data, "models": [{**model, **fields} for model in data["models"]]}


async def test_generations_may_be_and_are_counted_apart() -> None:
    bench = test_generation.Bench()
    await bench.start()
    for url, document in (
        ("/v1/completions", {"model": "slow", "prompt": "x", "priority": "offline"}),
        (
            "/v1/chat/completions",
            {"model": "slow", "messages": [{"role": "user", "content": "x"}], "priority": "offline"},
        ),
        ("/v2/models/slow/generate", {"text_input": "x", "parameters": {"max_tokens": 3, "priority": "offline"}}),
    ):
        answer = await bench.post(url, **{"max_tokens": 3, **document} if url.startswith("/v1") else document)
        assert answer.status_code == 200, answer.text
    assert _error(await bench.post("/v1/completions", model="slow", prompt="x", priority="low")) == "priority"
    status = (await bench.client.get("/status")).json()["models"]["slow"]
    assert (status["submitted"], status["offline"]["ok"], status["offline"]["generated_tokens"]) == (0, 3, 9)
    await bench.close()


def _error(answer: httpx.Response) -> str:
    assert answer.status_code == 400
    return str(answer.json()["error"]["param"])
