"""Functions of applications at the gateway: they make requests and answers, and whatever they do hurts nobody else."""

from __future__ import annotations

import asyncio
import gzip
import json
import logging
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest

from tenuto.deployments.entry.gateway import Entry
from tenuto.deployments.entry.service import process_pool
from tenuto.deployments.serve.launcher import unused_port
from tenuto.deployments.wire.tensors import pack_elements
from tenuto.placement import Plan
from tests.deployments.entry.test_applications import (
    DIAMOND,
    WIDE,
    Served,
    ask_in_bytes,
    nothing_is_left,
    outputs,
    plan,
    post_in_bytes,
)
from tests.instruments.asking import http_client, until
from tests.instruments.fake_gpulet import finder
from tests.instruments.live import PATIENCE_S

pytestmark = pytest.mark.usefixtures("quick_workers")

FUNCTIONS = "tests.instruments.graph_functions"
GZIP = {"Content-Encoding": "gzip"}


def fan_out(*, most: int = 4, slo_ms: float = 60_000.0, name: str = "copies", **more: Any) -> Plan:
    """Stage m, then as many requests to n as the function makes."""
    stage = {"model": "n", "after": ["m"], "map": f"{FUNCTIONS}:{name}", "count": min(2, most), "most": most}
    return plan({"model": "m"}, stage, slo_ms=slo_ms, **more)


def with_hooks(plan: Plan) -> Plan:
    """The plan, with hooks of m's own."""
    data = plan.to_data()
    (spec,) = (each for each in data["models"] if each["name"] == "m")
    spec["options"] = {"hooks": "tests.instruments.own_hooks:Numbers", "hook_processes": 1}
    return Plan.from_data(data, origin="test")


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that ended are replaced at once."""
    monkeypatch.setattr(process_pool, "AGAIN_S", 0.01)


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    made = Served()
    await made.start(fan_out())
    yield made
    await nothing_is_left(made)  # also what a function that hangs sees
    await made.close()


async def ask(served: Served, *x: float, **headers: str) -> Any:
    tensor = {"name": "x", "shape": [1, 2], "datatype": "FP32", "data": x}
    return await served.infer("app", {"inputs": [tensor]}, **headers)


async def works_again(served: Served) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while (await ask(served, 1.0, 1.0)).status_code != 200:
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("count", [0, 1, 3])
async def test_a_function_makes_any_number_of_requests(served: Served, count: int) -> None:
    answer = await ask(served, 1.0, float(count))
    rows = [[2.0 * (2.0 + number), 2.0 * (2.0 * count + number)] for number in range(count)]
    assert outputs(answer) == {"y": ([1, count, 2], [each for row in rows for each in row])}
    assert answer.json()["parameters"]["n.requests"] == count


async def test_very_many_requests_are_sent_in_several_turns_of_the_loop(served: Served) -> None:
    await served.serve(fan_out(most=300))
    served.gpulets["n"].hold = True
    asked = asyncio.create_task(ask(served, 1.0, 300.0))
    seen = set[int]()
    async with asyncio.timeout(PATIENCE_S):
        while len(served.gpulets["n"].sizes) + (waiting := (await served.open_requests()).get("n", 0)) < 300:
            seen.add(waiting)
            await asyncio.sleep(0)
    served.gpulets["n"].hold = False
    served.gpulets["n"].release()
    assert outputs(await asked)["y"][0] == [1, 300, 2]
    assert len(seen) > 3  # others had turns in between


async def test_a_function_makes_one_request_of_several_inputs(served: Served) -> None:
    await served.serve(fan_out(most=1, name="first"))
    assert outputs(await ask(served, 1.0, 2.0)) == {"y": ([1, 2], [6.0, 12.0])}


async def test_a_function_makes_the_answer(served: Served) -> None:
    await served.serve(fan_out(outputs=f"{FUNCTIONS}:summary"))
    answer = await ask(served, 1.0, 2.0)
    assert answer.status_code == 406, answer.text  # bytes that are no text
    document = {
        "inputs": [{"name": "x", "shape": [2, 2], "datatype": "FP32", "data": [1.0, 2.0, 3.0, 2.0]}],
        "outputs": [{"name": name} for name in ("sums", "words", "text", "count", "missing")],
    }
    found = outputs(await served.infer("app", document))
    assert found["sums"] == ([2, 2], [12.0, 16.0, 20.0, 24.0])
    assert found["words"] == ([2, 2], ["4", "6", "12", "14"])
    assert (found["text"], found["count"]) == (([2, 1], ["ü", "ü"]), ([2], [2, 2]))
    assert found["missing"] == ([2, 2], [False] * 4)
    raw = [{"name": "raw", "parameters": {"binary_data": True}}]
    answer = await served.infer("app", {**document, "outputs": raw})
    length = int(answer.headers["inference-header-content-length"])
    assert answer.content[length:] == b"\3\0\0\0\0\xff\0" * 2
    unknown = await served.infer("app", {**document, "outputs": [{"name": "nothing"}]})
    assert (unknown.status_code, "'nothing'" in unknown.json()["error"]) == (400, True)


async def test_long_tensors_reach_functions_and_their_requests_in_shared_memory(served: Served) -> None:
    stage = {"model": "wider", "after": ["wide"], "map": f"{FUNCTIONS}:wide", "count": 2, "most": 2}
    await served.serve(plan({"model": "wide"}, stage))
    values = np.arange(WIDE, dtype=np.float32)
    _, found = await ask_in_bytes(served.client, values)
    assert np.array_equal(found, np.concatenate([4 * values, 6 * values]))
    assert [served.gpulets[name].bodies for name in ("wide", "wider")] == [[0], [0, 0]]


@pytest.mark.parametrize(
    ("x", "told", "logged"),
    [
        (-1.0, " failed.", "a secret"),
        (-3.0, "must be float32 [2]", "must be float32 [2]"),
        (-4.0, " made 10000 requests, `most` is 4.", "Raise `most` of the stage, or make fewer."),
        (-5.0, " failed.", "ended with 9"),
        (-7.0, " returned a int.", "Return the inputs of a request by name"),
        (-8.0, " failed.", "read-only"),
        (-9.0, " returned other inputs.", "Return exactly: x"),
    ],
)
async def test_a_fault_of_a_function_is_answered_by_its_name(
    served: Served, x: float, told: str, logged: str, caplog: pytest.LogCaptureFixture
) -> None:
    await works_again(served)
    with caplog.at_level(logging.ERROR, "ray.serve"):
        answer = await ask(served, x, 1.0)
    assert answer.status_code == 500, answer.text
    error = answer.json()["error"]
    assert error.startswith(f"function {FUNCTIONS}:copies of stage 'n'")
    assert (told in error, "secret" in error, logged in caplog.text) == (True, False, True), (error, caplog.text)
    assert error.split()[-1].rstrip(".") in caplog.text
    await works_again(served)


async def test_a_function_may_refuse_what_the_client_sent(served: Served) -> None:
    answer = await ask(served, -6.0, 1.0)
    assert (answer.status_code, "this picture has no text. Send another one." in answer.text) == (400, True)


async def test_a_function_that_hangs_is_answered_at_the_deadline_by_its_name(served: Served) -> None:
    await works_again(served)
    hung = asyncio.create_task(ask(served, -2.0, 1.0, X_SLO_Ms="300"))
    assert outputs(await ask(served, 1.0, 1.0))["y"][0] == [1, 1, 2]
    answer = await hung
    assert (answer.status_code, answer.json()["outcome"]) == (504, "expired")
    assert answer.json()["error"].startswith(f"function {FUNCTIONS}:copies of stage 'n' has not returned")


@pytest.mark.parametrize(("x", "status"), [(-10.0, 500), (-11.0, 500), (-12.0, 500)])
async def test_a_fault_of_the_function_that_makes_the_answer_is_answered_by_its_name(
    served: Served, x: float, status: int
) -> None:
    await served.serve(fan_out(outputs=f"{FUNCTIONS}:summary"))
    answer = await ask(served, x, 1.0)
    assert (answer.status_code, answer.json()["error"].split()[:2]) == (status, ["function", f"{FUNCTIONS}:summary"])


async def test_functions_that_cannot_be_imported_are_named(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR, "ray.serve"):
        await served.serve(fan_out(name="nowhere"))
        await until(lambda: "cannot be imported" in caplog.text)
        answer = await ask(served, 1.0, 1.0)
    assert (answer.status_code, "the functions of 'app' cannot be started" in answer.json()["error"]) == (503, True)


async def test_where_one_of_the_requests_fails_none_is_left(served: Served) -> None:
    served.gpulets["n"].hold = True
    asked = asyncio.create_task(ask(served, 1.0, 4.0))
    await asyncio.wait_for(served.gpulets["n"].arrived.wait(), PATIENCE_S)
    await served.until_open(n=3)
    served.gpulets["n"].error = "broken"
    served.gpulets["n"].release()
    answer = await asked
    assert (answer.status_code, answer.json()["error"]) == (500, "stage 'n': broken")
    assert await served.open_requests() == {}
    served.gpulets["n"].hold = False


async def test_a_raw_body_is_read_by_the_hooks_of_the_first_stage_and_seen_by_functions(served: Served) -> None:
    await served.serve(with_hooks(fan_out(outputs=f"{FUNCTIONS}:words")))
    async with asyncio.timeout(PATIENCE_S):
        while (answer := await served.client.post("/predict/app", content=b"[1, 2]")).status_code == 503:
            await asyncio.sleep(0.01)
    assert answer.status_code == 200, answer.text
    said = answer.json()
    assert said["prediction"] == {"words": ["4", "6"], "body": ["[1, 2]"], "sums": [12.0, 16.0]}
    assert (said["model_name"], said["parameters"]["n.requests"]) == ("app", 2)
    wrong = await served.client.post("/predict/app", content=b"no list")
    assert (wrong.status_code, wrong.json()) == (400, {"error": "the body is no list of 2 numbers. Send JSON."})
    late = await served.client.post("/predict/app", content=b"[1, 2]", headers={"X-SLO-Ms": "0"})
    assert late.status_code == 504


async def test_a_raw_body_goes_to_functions_where_no_stage_reads_it(served: Served) -> None:
    await served.serve(plan({"model": "m", "map": f"{FUNCTIONS}:length", "most": 1}))
    answer = await served.client.post("/predict/app", content=b"12345")
    assert (answer.status_code, answer.json()["prediction"]) == (200, {"y": [10.0, 10.0]})
    large = await served.client.post("/predict/app", content=gzip.compress(bytes(1 << 20)), headers=GZIP)
    assert large.json()["prediction"] == {"y": [2.0 * (1 << 20)] * 2}
    tensor = {"name": "body", "datatype": "BYTES", "shape": [1, 1], "data": ["seven b"]}
    assert outputs(await served.infer("app", {"inputs": [tensor]})) == {"y": ([1, 2], [14.0, 14.0])}
    packed = pack_elements([bytes(1 << 20)])
    described = {"name": "body", "datatype": "BYTES", "shape": [1, 1], "parameters": {"binary_data_size": len(packed)}}
    head = json.dumps({"inputs": [described]}).encode()
    headers = {"Inference-Header-Content-Length": str(len(head))}
    answer = await served.client.post("/v2/models/app/infer", content=head + packed, headers=headers)
    assert outputs(answer) == {"y": ([1, 2], [2.0 * (1 << 20)] * 2)}
    metadata = (await served.client.get("/v2/models/app")).json()
    assert metadata["inputs"] == [{"name": "body", "datatype": "BYTES", "shape": [-1, 1]}]


async def test_a_raw_body_is_refused_where_nothing_makes_all_inputs_of_it(served: Served) -> None:
    await served.serve(plan(*DIAMOND))
    answer = await served.client.post("/predict/app", content=b"[1, 2]")
    assert (answer.status_code, "Ask /v2/models/MODEL/infer" in answer.json()["error"]) == (400, True)


async def test_more_samples_than_calls_can_wait_are_refused_where_functions_begin(served: Served) -> None:
    """Waiting does not help them."""
    await served.serve(plan({"model": "m", "map": f"{FUNCTIONS}:length", "most": 1}))
    tensor = {"name": "body", "datatype": "BYTES", "shape": [65, 1], "data": ["x"] * 65}
    answer = await served.infer("app", {"inputs": [tensor]})
    assert (answer.status_code, "64 are the most. Send fewer" in answer.json()["error"]) == (400, True)
    few = await served.infer("app", {"inputs": [{**tensor, "shape": [64, 1], "data": ["x"] * 64}]})
    assert (few.status_code, outputs(few)["y"][0]) == (200, [64, 2])


async def test_what_stages_hand_on_has_a_bound_and_what_is_beyond_is_refused() -> None:
    """However much functions make of what a client sends."""
    served = Served()
    served.entry = Entry(finder(served.gpulets), unfinished_mib=1)
    stage = {"model": "wider", "after": ["wide"], "map": f"{FUNCTIONS}:wide", "count": 2, "most": 2}
    await served.start(plan({"model": "wide"}, stage))
    served.gpulets["wider"].hold = True
    values = np.arange(WIDE, dtype=np.float32)  # 64 KiB
    asked = []
    async with http_client(served.client.base_url) as client:
        async with asyncio.timeout(PATIENCE_S):
            while not any(each.done() for each in asked):
                asked.append(asyncio.create_task(post_in_bytes(client, values)))
                await asyncio.wait(asked[-1:], timeout=0.2)
        assert served.entry.service.arena.used_bytes <= 2 << 20  # type: ignore[union-attr]
        refused = next(each for each in asked if each.done()).result()
        assert (refused.status_code, "too many requests are unfinished" in refused.text) == (503, True), refused.text
        assert refused.json()["outcome"] == "failed"  # amid its graph, and not at the door
        served.gpulets["wider"].hold = False
        served.gpulets["wider"].release()
        statuses = {answer.status_code for answer in await asyncio.gather(*asked)}
    assert statuses == {200, 503}
    await nothing_is_left(served)
    assert (await post_in_bytes(served.client, values)).status_code == 200
    await served.close()


async def test_an_application_is_asked_over_grpc(served: Served) -> None:
    grpc, _ = pytest.importorskip("grpc"), pytest.importorskip("h2")
    messages = pytest.importorskip("tenuto.deployments.entry.protocols.grpc_messages")
    port = unused_port()
    await served.serve(fan_out(outputs=f"{FUNCTIONS}:summary"), grpc={"host": "127.0.0.1", "port": port})
    asked = messages.InferRequest(model_name="app", id="mine")
    asked.inputs.add(name="x", datatype="FP32", shape=[1, 2])
    asked.raw_input_contents.append(np.array([1.0, 2.0], np.float32).tobytes())
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        call = channel.unary_unary(f"/{messages.SERVICE}/ModelInfer")
        answer = messages.InferResponse.FromString(
            await call(asked.SerializeToString(), timeout=PATIENCE_S, wait_for_ready=True)
        )
        found = {each.name: raw for each, raw in zip(answer.outputs, answer.raw_output_contents, strict=True)}
        assert np.frombuffer(found["sums"], np.float32).tolist() == [12.0, 16.0]
        assert (found["raw"], answer.id) == (b"\3\0\0\0\0\xff\0", "mine")
        assert answer.parameters["n.requests"].int64_param == 2
        asked.raw_input_contents[0] = np.array([-4.0, 2.0], np.float32).tobytes()
        with pytest.raises(grpc.aio.AioRpcError, match="made 10000 requests, `most` is 4") as raised:
            await call(asked.SerializeToString(), timeout=PATIENCE_S)
        assert raised.value.code() is grpc.StatusCode.INTERNAL
