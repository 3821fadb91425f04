"""Stages of applications that generate: a tiny language model on the CPU, and one on an emulated GPU."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Mapping
from typing import Any

import httpx
import numpy as np
import pytest

from tenuto.deployments.dispatch.in_flight import OpenGeneration
from tenuto.deployments.entry.service.python_handle import RequestFailedError
from tenuto.deployments.gpulet.replica import LocalReplica
from tenuto.deployments.security.keys import new_key
from tenuto.deployments.serve.launcher import unused_port
from tenuto.deployments.wire.peer import Finder
from tenuto.errors import InvalidInputError
from tenuto.placement import Plan
from tests.deployments.dispatch.test_moved_generations import Line
from tests.deployments.entry import test_generation
from tests.deployments.entry.test_applications import outputs
from tests.deployments.entry.test_generation import BLOCKS, PROMPT, handle, written
from tests.instruments.asking import until
from tests.instruments.live import PATIENCE_S

pytest.importorskip("transformers")

FUNCTIONS = "tests.instruments.graph_functions"
MOST = {"max_tokens": 8}
REAL = {"model": "real", "name": "first", "parameters": MOST}
SLOW = {"model": "slow", "name": "first", "parameters": {"max_tokens": 200}}


def plan(*stages: Mapping[str, Any], slo_ms: float = 60_000.0, **more: Any) -> Plan:
    """The plan of models that generate, with an application `app` of these stages."""
    application = {"name": "app", "rate_rps": 1, "slo_ms": slo_ms, "stages": [{"shared": True, **s} for s in stages]}
    data = test_generation.plan().to_data()
    (plain,) = (each for each in data["models"] if each["name"] == "plain")
    tensors = ("inputs", "x"), ("outputs", "y")
    plain["options"] = {key: [{"name": name, "dtype": "float32", "shape": [2]}] for key, name in tensors}
    return Plan.from_data({**data, "applications": [{**application, **more}]})


class Bench(test_generation.Bench):
    """The same gateway, whose plan has an application; all ways to its gpu-lets can be cut."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[Line] = []

    def way_to(self, replica: LocalReplica) -> Finder:
        self.lines.append(Line(replica))
        return self.lines[-1].endpoint

    async def serve(self, *stages: Mapping[str, Any], **more: Any) -> None:
        self.planned = plan(*stages, **more)
        await self.start()

    async def ask(self, text: str, name: str = "text_input", **headers: str) -> httpx.Response:
        tensor = {"name": name, "datatype": "BYTES", "shape": [1, 1], "data": [text]}
        named = {key.replace("_", "-"): value for key, value in headers.items()}
        asked = self.client.post("/v2/models/app/infer", json={"inputs": [tensor]}, headers=named)
        return await asyncio.wait_for(asked, PATIENCE_S)

    async def nothing_is_left(self) -> None:
        """No text is written any more, and no memory held."""
        generators = [self.generator(*each) for each in (("a", "real"), ("b", "slow"))]
        await until(lambda: all(each.free_blocks == BLOCKS for each in generators))
        assert not self.entry.service.dispatching.is_generating
        counts = self.entry.service.application_counters.status()
        assert {name: each.under_way for name, each in counts.items()} == {"app": 0}


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    made = Bench()
    yield made
    await made.nothing_is_left()
    await made.close()


async def test_a_stage_writes_on_and_the_next_one_behind_that(bench: Bench) -> None:
    second = {"model": "real", "name": "second", "after": ["first"], "map": f"{FUNCTIONS}:again", "most": 1}
    await bench.serve(REAL, {**second, "parameters": MOST}, outputs={"a": "first.text_output", "b": "second.token_ids"})
    found = outputs(await bench.ask(PROMPT))
    begun = written(PROMPT, 8)
    assert found["a"] == ([1, 1], [begun])
    assert bytes(token % 256 for token in found["b"][1]).decode(errors="replace") == written(PROMPT + begun, 8)
    said = (await bench.client.get("/v2/models/app")).json()
    assert [(t["name"], t["datatype"], t["shape"]) for t in said["inputs"]] == [("text_input", "BYTES", [-1, 1])]
    assert [(t["name"], t["datatype"], t["shape"]) for t in said["outputs"]] == [
        ("a", "BYTES", [-1, 1]),
        ("b", "INT64", [-1, -1]),
    ]


async def test_tokens_are_taken_and_made(bench: Bench) -> None:
    stages = ({**REAL, "inputs": {"input_ids": "ids"}}, {"model": "real", "inputs": {"input_ids": "first.token_ids"}})
    await bench.serve(*stages, outputs={"ids": "first.token_ids", "why": "real.finish_reason"})
    tensor = {"name": "ids", "datatype": "INT64", "shape": [1, len(PROMPT)], "data": list(PROMPT.encode())}
    found = outputs(await bench.client.post("/v2/models/app/infer", json={"inputs": [tensor]}))
    assert bytes(token % 256 for token in found["ids"][1]).decode(errors="replace") == written(PROMPT, 8)
    assert (found["ids"][0], found["why"]) == ([1, 8], ([1, 1], ["length"]))
    tensor["data"] = [300] * len(PROMPT)
    assert (await bench.client.post("/v2/models/app/infer", json={"inputs": [tensor]})).status_code == 400


async def test_a_raw_text_is_the_prompt_and_stop_strings_end_the_answer(bench: Bench) -> None:
    whole = written(PROMPT, 8)
    await bench.serve({**REAL, "parameters": {**MOST, "stop": whole[3]}})
    answer = await bench.client.post("/predict/app", content=PROMPT.encode())
    assert answer.status_code == 200, answer.text
    made = answer.json()["prediction"]
    assert (made["text_output"], made["finish_reason"]) == ([whole[: whole.index(whole[3])]], ["stop"])
    assert answer.json()["parameters"]["emulated"] is False


async def test_tokens_of_a_text_go_into_a_network(bench: Bench) -> None:
    numbers = {"model": "plain", "after": ["first"], "map": f"{FUNCTIONS}:numbers", "most": 1}
    await bench.serve({**SLOW, "parameters": MOST}, numbers, outputs={"y": "plain.y", "text": "first.text_output"})
    answer = await bench.ask(PROMPT, X_Request_Id="mine")
    found = outputs(answer)
    assert (found["y"], found["text"][0]) == (([1, 2], [0.0, 0.0]), [1, 1])
    assert answer.json()["parameters"]["emulated"] is True
    ended = (await bench.client.get("/requests", params={"id": "mine"})).json()
    assert {each["model"]: each["outcome"] for each in ended} == {"slow": "ok", "plain": "ok", "app": "ok"}


async def test_a_function_makes_prompts_with_parameters_of_their_own(bench: Bench) -> None:
    stage = {**REAL, "map": f"{FUNCTIONS}:prompts", "count": 2, "most": 4}
    await bench.serve(stage, outputs={"text": "first.text_output"})
    assert outputs(await bench.ask("one two", "body")) == {"text": ([1, 2, 1], [written("one", 2), written("two", 3)])}


@pytest.mark.parametrize(
    ("said", "status", "reason"),
    [
        ("many", 500, "made 10000 requests, `most` is 4"),
        ("none", 500, "made no prompt"),
        ("number", 500, "made no prompt"),
        ("both", 500, "made no prompt"),
        ("parameters", 500, "'max_tokens'"),
        ("empty", 400, "stage 'first': 'prompt' has no token. Send at least one."),
        ("x" * 400, 400, "stage 'first': 'prompt' has 400 tokens; prompt and answer may have 320 here"),
        ("x" * (1 << 19), 400, "prompt and answer may have 320 here"),  # read by a thread
    ],
    ids=["many", "none", "number", "both", "parameters", "empty", "long", "very long"],
)
async def test_prompts_at_fault_are_answered_once_and_clearly(
    bench: Bench, said: str, status: int, reason: str
) -> None:
    await bench.serve({**REAL, "map": f"{FUNCTIONS}:prompts", "count": 2, "most": 4}, outputs={"t": "first.token_ids"})
    answer = await bench.ask(said, "body")
    assert (answer.status_code, reason in answer.json()["error"]) == (status, True), answer.text
    assert (await bench.ask("fine", "body")).status_code == 200


async def test_a_text_that_is_none_is_refused(bench: Bench) -> None:
    await bench.serve(REAL)
    answer = await bench.client.post("/predict/app", content=b"\xff")
    assert (answer.status_code, "is no text in UTF-8" in answer.json()["error"]) == (400, True)


async def test_a_generation_that_admission_refuses_is_told_with_its_stage(bench: Bench) -> None:
    """A step of the emulated model takes 20 ms, so that no further token is there in a tenth of that."""
    await bench.serve(SLOW, {"model": "plain", "map": f"{FUNCTIONS}:numbers", "after": ["first"], "most": 1})
    answer = await bench.ask("x", X_SLO_Ms="300")
    assert answer.status_code in (429, 504), answer.text
    assert answer.json()["error"].startswith("stage 'first': ")


async def test_a_text_that_does_not_end_in_time_is_given_up(bench: Bench) -> None:
    await bench.serve({**SLOW, "parameters": {"max_tokens": 300}})
    answer = await bench.ask("x", X_SLO_Ms="4000")
    assert (answer.status_code, answer.json()["outcome"]) == (504, "expired")
    assert "stage 'first': its text had" in answer.json()["error"]


async def test_a_client_that_leaves_takes_the_text_along(bench: Bench) -> None:
    await bench.serve(SLOW)
    generator = bench.generator("b", "slow")
    asked = asyncio.create_task(bench.ask(PROMPT))
    await until(lambda: generator.free_blocks < BLOCKS)
    asked.cancel()
    await until(lambda: generator.free_blocks == BLOCKS)


async def test_texts_of_a_stage_live_and_die_together(bench: Bench) -> None:
    """The second prompt has a fault, so the first text is not written on."""
    await bench.serve({**SLOW, "map": f"{FUNCTIONS}:prompts", "count": 2, "most": 4}, outputs={"t": "first.token_ids"})
    answer = await bench.ask(f"fine {'x' * 400}", "body")
    assert (answer.status_code, "has 400 tokens" in answer.json()["error"]) == (400, True)


async def test_a_stage_that_may_be_missing_leaves_out_what_was_not_written(bench: Bench) -> None:
    stage = {**REAL, "map": f"{FUNCTIONS}:prompts", "count": 2, "most": 4, "allow_missing": True}
    await bench.serve(stage, outputs={"text": "first.text_output"})
    assert outputs(await bench.ask(f"{'x' * 400} two", "body")) == {"text": ([1, 1, 1], [written("two", 3)])}


async def test_a_gpulet_that_dies_is_told_once_and_by_its_stage(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    await bench.serve(SLOW)
    generator = bench.generator("b", "slow")
    asked = asyncio.create_task(bench.ask(PROMPT))
    await until(lambda: generator.free_blocks < BLOCKS)
    with caplog.at_level(logging.CRITICAL):
        for line in bench.lines:
            line.cut()
        answer = await asked
    assert answer.status_code == 503, answer.text
    assert answer.json()["error"].startswith("stage 'first': ")


async def test_python_asks_an_application_that_generates(bench: Bench) -> None:
    await bench.serve(SLOW, {**REAL, "name": "second", "inputs": {"text_input": "first.text_output"}})
    async with await handle(bench) as tenuto:
        found = await tenuto.infer("app", {"text_input": np.array([PROMPT.encode()], object)})
        assert len(found["token_ids"]) == 8
        gone = asyncio.create_task(tenuto.infer("app", {"text_input": np.array([PROMPT.encode()], object)}))
        await until(lambda: bench.generator("b", "slow").free_blocks < BLOCKS)
        gone.cancel()
        await until(lambda: bench.generator("b", "slow").free_blocks == BLOCKS)
        with pytest.raises(RequestFailedError, match="stage 'first': 'prompt' has 400 tokens"):
            await tenuto.infer("app", {"text_input": np.array([b"x" * 400], object)})


async def test_grpc_asks_an_application_that_generates(bench: Bench) -> None:
    grpc = pytest.importorskip("tritonclient.grpc.aio")
    bench.grpc_port = unused_port()
    await bench.serve(REAL)
    tensor = grpc.InferInput("text_input", [1, 1], "BYTES")
    tensor.set_data_from_numpy(np.array([[PROMPT.encode()]], object))
    async with grpc.InferenceServerClient(f"127.0.0.1:{bench.grpc_port}") as client:
        answer = await client.infer("app", [tensor])
    assert answer.as_numpy("text_output").tolist() == [[written(PROMPT, 8).encode()]]
    assert answer.as_numpy("token_ids").shape == (1, 8)


# --- streams ----------------------------------------------------------------------------------------------------------


def question(text: str, samples: int = 1) -> dict[str, Any]:
    return {"inputs": [{"name": "text_input", "datatype": "BYTES", "shape": [samples, 1], "data": [text] * samples}]}


STREAM = "/v2/models/app/generate_stream"


@pytest.mark.parametrize("count", [1, 2])
async def test_the_text_of_the_last_stage_is_streamed(bench: Bench, count: int) -> None:
    first = {"model": "real", "name": "before", "inputs": {"text_input": "text_input"}, "parameters": MOST}
    last = {**REAL, "inputs": {"text_input": "before.text_output"}}
    await bench.serve(*((REAL,) if count == 1 else (first, last)), streams=True)
    events = await bench.stream(STREAM, **question(PROMPT))
    prompt = PROMPT if count == 1 else written(PROMPT, 8)
    assert "".join(each["text_output"] for each in events) == written(prompt, 8)
    usage = {"prompt_tokens": len(prompt.encode()), "completion_tokens": 8, "total_tokens": len(prompt.encode()) + 8}
    ends = {"finish_reason": "length", "usage": usage}
    assert [each.get("parameters") for each in events] == [None] * (len(events) - 1) + [ends]
    assert {(each["model_name"], each["id"]) for each in events} == {("app", events[0]["id"])}
    ended = (await bench.client.get("/requests", params={"id": events[0]["id"]})).json()
    assert {each["model"]: each["outcome"] for each in ended} == {"real": "ok", "app": "ok"}


async def test_the_deadline_of_a_stream_is_that_of_its_first_token(bench: Bench) -> None:
    """The whole text takes 4 s."""
    await bench.serve(SLOW, streams=True)
    answer = await bench.client.post(STREAM, json=question("x"), headers={"X-SLO-Ms": "3000"})
    assert answer.status_code == 200, answer.text
    assert answer.text.count("text_output") > 100
    counts = bench.entry.service.application_counters.status()["app"]
    assert (counts.ok, counts.late) == (1, 0)
    refused = await bench.client.post(STREAM, json=question("x"), headers={"X-SLO-TTFT-Ms": "1"})
    assert (refused.status_code, refused.json()["outcome"]) == (504, "expired")
    whole = await bench.ask("x", x_slo_ms="3000")  # the same, in one answer
    assert len(outputs(whole)["token_ids"][1]) == 200
    stage = whole.json()["parameters"]
    assert stage["first.end_ms"] < 3000.0
    counts = bench.entry.service.application_counters.status()["app"]
    assert (counts.ok, counts.late) == (2, 0)
    lines = answer.headers["x-tenuto-stages"]
    assert 0.0 < float(lines.split("end=")[1].split(";")[0]) < 3000.0


async def test_an_application_that_streams_is_late_when_its_further_tokens_are(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OpenGeneration, "measured_tpot_ms", 1e6)
    await bench.serve(REAL, streams=True)
    assert (await bench.client.post(STREAM, json=question(PROMPT))).status_code == 200
    counts = bench.entry.service.application_counters.status()["app"]
    assert (counts.ok, counts.late) == (0, 1)


async def test_a_client_that_leaves_amid_a_stream_takes_the_text_along(bench: Bench) -> None:
    await bench.serve(SLOW, streams=True)
    generator = bench.generator("b", "slow")
    async with bench.client.stream("POST", STREAM, json=question(PROMPT)) as answer:
        await anext(answer.aiter_lines())
        assert generator.free_blocks < BLOCKS
    await until(lambda: generator.free_blocks == BLOCKS)


async def test_a_gpulet_that_dies_amid_a_stream_is_told_as_its_last_event(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    await bench.serve(SLOW, streams=True)
    with caplog.at_level(logging.CRITICAL):
        async with bench.client.stream("POST", STREAM, json=question(PROMPT)) as answer:
            lines = answer.aiter_lines()
            await anext(lines)
            for line in bench.lines:
                line.cut()
            said = [line async for line in lines if line]
    assert "stage 'first': " in json.loads(said[-1].removeprefix("data: "))["error"]


async def test_grpc_and_python_read_the_text_of_an_application_as_it_comes(bench: Bench) -> None:
    grpc = pytest.importorskip("tritonclient.grpc.aio")
    bench.grpc_port = unused_port()
    await bench.serve(REAL, streams=True)
    prompt = np.array([[PROMPT.encode()]], object)
    tensor = grpc.InferInput("text_input", [1, 1], "BYTES")
    tensor.set_data_from_numpy(prompt)
    two = grpc.InferInput("text_input", [2, 1], "BYTES")
    two.set_data_from_numpy(np.repeat(prompt, 2, 0))

    async def requests() -> AsyncIterator[dict[str, Any]]:
        yield {"model_name": "app", "inputs": [tensor], "request_id": "one"}
        yield {"model_name": "app", "inputs": [two], "request_id": "two"}

    texts: dict[str, list[bytes]] = {}
    async with grpc.InferenceServerClient(f"127.0.0.1:{bench.grpc_port}") as client:
        async for answer, error in client.stream_infer(requests()):
            assert error is None
            texts.setdefault(answer.get_response().id, []).extend(answer.as_numpy("text_output").ravel().tolist())
    assert b"".join(texts["one"]).decode() == written(PROMPT, 8)
    assert len(texts["one"]) > 3
    assert texts["two"] == [written(PROMPT, 8).encode()] * 2  # two samples have one answer
    async with await handle(bench) as tenuto:
        parts = [part async for part in tenuto.stream("app", {"text_input": prompt[0]})]
        assert (len([*filter(None, parts)]) > 3, "".join(parts)) == (True, written(PROMPT, 8))
        with pytest.raises(RequestFailedError, match="expired"):
            _ = [part async for part in tenuto.stream("app", {"text_input": prompt[0]}, slo_ms=0.001)]
        with pytest.raises(InvalidInputError, match="has no stream"):
            await anext(tenuto.stream("plain", {"x": np.zeros(2, np.float32)}))


async def test_python_leaves_a_stream_and_takes_the_text_along(bench: Bench) -> None:
    await bench.serve(SLOW, streams=True)
    generator = bench.generator("b", "slow")
    async with await handle(bench) as tenuto:
        stream = tenuto.stream("app", {"text_input": np.array([PROMPT.encode()], object)})
        await anext(stream)
        assert generator.free_blocks < BLOCKS
        await stream.aclose()
        await until(lambda: generator.free_blocks == BLOCKS)


async def test_a_stream_is_of_one_sample(bench: Bench) -> None:
    await bench.serve(REAL, streams=True)
    answer = await bench.client.post(STREAM, json=question("x", 2))
    assert (answer.status_code, "a stream is of one sample" in answer.json()["error"]) == (400, True)


async def test_what_has_no_stream_is_refused(bench: Bench) -> None:
    await bench.serve({**SLOW, "parameters": MOST})
    answer = await bench.client.post(STREAM, json=question("x"))
    assert (answer.status_code, "does not say that it `streams`" in answer.json()["error"]) == (400, True)


async def test_a_key_counts_the_tokens_of_stages(bench: Bench) -> None:
    """Ten tokens a second: an answer of eight is begun, and the next request waits for them."""
    key, digest = new_key()
    bench.planned = plan(REAL)
    await bench.start(keys=[{"name": "a", "sha256": digest, "models": ["app"], "tokens_per_s": 10}])
    bench.client.headers["authorization"] = f"Bearer {key}"
    assert (await bench.ask(PROMPT)).status_code == 200
    answer = await bench.ask(PROMPT)
    assert (answer.status_code, answer.json()["outcome"]) == (429, "rejected")
    assert answer.json()["error"].startswith("stage 'first': 'a' uses more tokens than its key allows")
    assert float(answer.headers["retry-after"]) >= 1.0
