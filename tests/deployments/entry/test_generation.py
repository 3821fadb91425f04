"""Generations over the gateway's own socket: a tiny language model on the CPU, and one on an emulated GPU."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import httpx
import numpy as np
import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from tenuto.deployments.dispatch.dispatcher import Dispatcher
from tenuto.deployments.entry import gateway
from tenuto.deployments.entry.gateway import Entry
from tenuto.deployments.entry.protocols.texts import GrowingText
from tenuto.deployments.entry.service import generation_call, planned_model, python_handle
from tenuto.deployments.entry.service.dispatcher_client import DispatcherClient
from tenuto.deployments.entry.service.python_handle import RequestFailedError, TenutoHandle
from tenuto.deployments.entry.service.traces import Traces
from tenuto.deployments.gpulet.replica import LocalReplica
from tenuto.deployments.security.keys import new_key
from tenuto.deployments.serve.deployment import Deployment
from tenuto.deployments.serve.launcher import unused_port
from tenuto.deployments.serve.user_config import read_gateway_config
from tenuto.deployments.wire.peer import Endpoint, Finder
from tenuto.errors import InvalidInputError
from tenuto.placement import Plan
from tenuto.profiles.generation import StepCost
from tenuto.profiles.networks.generating import Generator
from tests.instruments.asking import http_client, openai_client, until, until_ready
from tests.instruments.live import PATIENCE_S

pytest.importorskip("transformers")

TINY = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 320,
    "eos_token_id": None,
    "bos_token_id": None,
}
OPTIONS = {"config": TINY, "seed": 3, "tokenizer": "bytes"}
BLOCKS = 24
PROMPT = "The note is held "


SLO = {"ttft_ms": 60_000, "tpot_ms": 1000}
LENGTHS = {"prompt_tokens": 20, "output_tokens": 20, "max_sequences": 8, "max_batch_tokens": 64}
SLOW = StepCost.line(20.0, 0.0, 0.0, 0.0, 0.0)


def plan() -> Plan:
    """A real language model on the CPU, two on emulated GPUs, one of them on two GPUs together, and a network that does
    not generate."""
    generates = {"rate_rps": 10, "slo": SLO, "generates": LENGTHS}
    replica = {"batch_size": 8, "kv_tokens": BLOCKS * 16}
    emulated = replica | {"steps": SLOW.model_dump(mode="json")}
    latency = {"alpha_ms": 1.0, "beta_ms": 1.0}
    return Plan.from_data(
        {
            "policy": {"name": "test"},
            "gpus": [{"id": "c", "type": "cpu"}, {"id": "v", "type": "v100"}, {"id": "w", "type": "v100"}],
            "gpulets": [
                {"id": "a", "gpu": "c", "models": [{"name": "real", **replica}]},
                {"id": "b", "gpu": "v", "also_on": ["w"], "share_pct": 30, "models": [{"name": "slow", **emulated}]},
                {"id": "d", "gpu": "v", "share_pct": 30, "models": [{"name": "mute", **emulated}]},
                {
                    "id": "c",
                    "gpu": "v",
                    "share_pct": 30,
                    "models": [{"name": "plain", "batch_size": 1, "latency": latency, "latency_ms": 2.0}],
                },
            ],
            "models": [
                {"name": "real", "source": "transformers/llama", "options": OPTIONS, **generates},
                {"name": "slow", "options": {"tokenizer": "bytes"}, **generates},
                {"name": "mute", **generates},
                {"name": "plain", "rate_rps": 10, "slo_ms": 60_000, "latency": latency},
            ],
        }
    )


class Bench:
    """A gateway over a real language model, an emulated one, and a network that does not generate."""

    def __init__(self, planned: Plan | None = None) -> None:
        self.planned = planned or plan()
        self.port = unused_port()
        self.grpc_port = 0  # none
        self.unfinished_mib = 512
        self.url = f"http://127.0.0.1:{self.port}"
        self.client = http_client(self.url)

    async def start(self, **settings: Any) -> None:
        self.replicas = {
            each.spec.gpulet: await LocalReplica.start(each.spec, each.user_config)
            for each in Deployment(plan=self.planned).config().gpulets
            if each.spec is not None
        }
        finders = {name: self.way_to(each) for name, each in self.replicas.items()}
        self.entry = Entry(lambda name: finders[name], unfinished_mib=self.unfinished_mib)
        config = {**settings, "plan": self.planned.to_data(), "scheduler": {"name": "eager"}}
        config["listen"] = {"host": "127.0.0.1", "port": self.port}
        if self.grpc_port:
            config["grpc"] = {"host": "127.0.0.1", "port": self.grpc_port}
        await self.entry.follow(read_gateway_config(config))
        await until_ready(self.client)

    def way_to(self, replica: LocalReplica) -> Finder:
        return replica.endpoint

    async def close(self, *, is_client_open: bool = False) -> None:
        if not is_client_open:
            await self.client.aclose()
        await self.entry.close()
        for replica in self.replicas.values():
            await replica.close()

    async def post(self, url: str, **document: Any) -> httpx.Response:
        return await self.client.post(url, json=document)

    async def stream(self, url: str, **document: Any) -> list[Any]:
        """Return the events of a stream, the last of OpenAI's aside."""
        answer = await self.post(url, **document)
        assert answer.status_code == 200, answer.text
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = [line.removeprefix("data: ") for line in answer.text.removesuffix("\n\n").split("\n\n")]
        if url.startswith("/v1"):
            assert lines.pop() == "[DONE]"
        return [json.loads(line) for line in lines]

    def generator(self, name: str, model: str) -> Generator:
        return self.replicas[name].executor.generator(model)

    async def status(self) -> dict[str, Any]:
        found: dict[str, Any] = (await self.client.get("/status")).json()
        return found


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    made = Bench()
    await made.start()
    yield made
    await made.close()


TURNS = 20  # of a loop: more than it takes from a client that leaves to the process that writes for it


def counted_steps(
    monkeypatch: pytest.MonkeyPatch, generator: Generator, at_least_s: float = 0.0, turns: int = 0
) -> list[Any]:
    """Return a list to which every step of a generator is added; steps take at least so long, and so many turns of this
    loop. Then all that is told here is heard within a step, however busy the machine is."""
    steps: list[Any] = []
    step, loop = generator.step, asyncio.get_running_loop()

    async def turn() -> None:
        for _ in range(turns):
            await asyncio.sleep(0)

    def counted(chunks: Any) -> Any:
        steps.append(chunks)
        time.sleep(at_least_s)
        asyncio.run_coroutine_threadsafe(turn(), loop).result(PATIENCE_S)
        return step(chunks)

    monkeypatch.setattr(generator, "step", counted)
    return steps


def told_steps(monkeypatch: pytest.MonkeyPatch, steps: list[Any]) -> list[int]:
    """Return a list to which the number of steps is added whenever a dispatcher is told that a client left.

    Until then time passes that is nobody's turn: over HTTP a client that has ended its half of the connection looks as
    one that has left, until it refuses what is sent to it; over gRPC a thread of the client's library tells it.
    """
    heard: list[int] = []
    leave = Dispatcher.leave

    def left(self: Dispatcher, *of: Any, **how: Any) -> None:
        heard.append(len(steps))
        leave(self, *of, **how)

    monkeypatch.setattr(Dispatcher, "leave", left)
    return heard


def written(prompt: str, tokens: int) -> str:
    """Return what transformers' own `generate` writes."""
    import torch

    from tenuto.profiles.networks.language_model import load_language_model

    network = load_language_model("transformers/llama", seed=3, config=TINY)
    asked = torch.tensor([list(prompt.encode())])
    with torch.no_grad():
        out = network.generate(
            asked, attention_mask=torch.ones_like(asked), max_new_tokens=tokens, do_sample=False, pad_token_id=0
        )
    return bytes(token % 256 for token in out[0, asked.shape[1] :].tolist()).decode(errors="replace")


async def test_streamed_and_whole_answers_are_those_of_generate(bench: Bench) -> None:
    asked = {"model": "real", "prompt": PROMPT, "max_tokens": 24, "temperature": 0}
    expected = written(PROMPT, 24)
    whole = (await bench.post("/v1/completions", **asked)).json()
    assert whole["choices"][0]["text"] == expected
    assert whole["choices"][0]["finish_reason"] == "length"
    assert whole["usage"] == {"prompt_tokens": len(PROMPT), "completion_tokens": 24, "total_tokens": len(PROMPT) + 24}
    streams = [bench.stream("/v1/completions", **asked, stream=True) for _ in range(3)]
    for events in await asyncio.gather(*streams):
        assert "".join(event["choices"][0]["text"] for event in events) == expected
        assert len(events) > 5
    parameters = {"max_tokens": 24}
    parts = await bench.stream("/v2/models/real/generate_stream", text_input=PROMPT, parameters=parameters)
    assert "".join(part["text_output"] for part in parts) == expected
    answer = await bench.post("/v2/models/real/generate", text_input=PROMPT, id="mine", parameters=parameters)
    assert (answer.json()["text_output"], answer.json()["id"]) == (expected, "mine")
    status = await bench.status()
    assert status["models"]["real"]["written_tokens"] == 144
    model, gpulet = status["models"]["real"], next(each for each in status["gpulets"] if each["id"] == "a")
    assert (model["ok"], model["generated_tokens"], model["prompt_tokens"]) == (6, 144, 6 * len(PROMPT))
    assert (gpulet["generating"], gpulet["free_blocks"]) == (0, BLOCKS)
    assert gpulet["busy_s"] > 0.0
    ended = (await bench.client.get("/requests", params={"id": "mine"})).json()[0]
    assert (ended["outcome"], ended["tokens"]["generated"]) == ("ok", 24)
    metrics = (await bench.client.get("/metrics")).text
    assert 'tenuto_generation_tokens_total{model="real"} 144' in metrics
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "num_preemptions_total"):
        assert re.search(rf'^tenuto_{name}{{gpulet="a",gpu=".*"}} 0$', metrics, re.MULTILINE), name
    assert 'tenuto_time_to_first_token_seconds_count{model="real"} 6' in metrics


async def test_a_seed_makes_an_answer_again(bench: Bench) -> None:
    asked = {"model": "real", "max_tokens": 12, "messages": [{"role": "user", "content": "hi"}]}
    answers = [
        (await bench.post("/v1/chat/completions", **asked, seed=seed)).json()["choices"][0]["message"]["content"]
        for seed in (1, 1, 2)
    ]
    assert answers[0] == answers[1] != answers[2]


async def test_a_stop_string_ends_an_answer_and_frees_its_memory(bench: Bench) -> None:
    letters = (await bench.post("/v1/completions", model="slow", prompt="x", max_tokens=8)).json()["choices"][0]["text"]
    assert len(letters) == 8
    stop = letters[3:5]
    for is_streamed in (False, True):
        asked = {"model": "slow", "prompt": "x", "max_tokens": 250, "stop": stop, "stream": is_streamed}
        if is_streamed:
            events = await bench.stream("/v1/completions", **asked, stream_options={"include_usage": True})
            *parts, total = events
            text, usage = "".join(part["choices"][0]["text"] for part in parts), total["usage"]
            finish = parts[-1]["choices"][0]["finish_reason"]
        else:
            answer = (await bench.post("/v1/completions", **asked)).json()
            text, usage, finish = answer["choices"][0]["text"], answer["usage"], answer["choices"][0]["finish_reason"]
        assert (text, finish, usage["completion_tokens"]) == (letters[:3], "stop", 5)
    await until(lambda: bench.generator("b", "slow").free_blocks == BLOCKS)
    assert (await bench.status())["models"]["slow"]["ok"] == 3
    never = await bench.post("/v1/completions", model="slow", prompt="x", max_tokens=4, stop="never met")
    assert (never.json()["choices"][0]["text"], never.json()["choices"][0]["finish_reason"]) == (letters[:4], "length")


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize(("gpulet", "model", "choices"), [("a", "real", 1), ("b", "slow", 1), ("b", "slow", 4)])
async def test_a_client_that_leaves_frees_its_memory_within_two_steps(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, gpulet: str, model: str, choices: int, is_streamed: bool
) -> None:
    generator = bench.generator(gpulet, model)
    steps = counted_steps(monkeypatch, generator, turns=TURNS)
    request = {"model": model, "prompt": "x", "n": choices, "max_tokens": 250, "stream": is_streamed}
    reader, writer = await asyncio.open_connection("127.0.0.1", bench.port)
    body = json.dumps(request).encode()
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
    )
    if is_streamed:
        await reader.readuntil(b"data: ")
    await until(lambda: generator.free_blocks <= BLOCKS - choices)
    heard = told_steps(monkeypatch, steps)
    writer.transport.abort()
    await until(lambda: generator.free_blocks == BLOCKS)
    assert len(steps) - heard[0] <= 2
    assert (await bench.status())["models"][model]["cancelled"] == choices


async def test_tritons_client_gets_a_message_for_each_piece_and_frees_memory_when_it_leaves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("h2")
    triton = pytest.importorskip("tritonclient.grpc.aio")
    triton_refusal = pytest.importorskip("tritonclient.utils").InferenceServerException
    bench = Bench()
    bench.grpc_port = unused_port()
    await bench.start()

    def inputs(text: str, **options: Any) -> list[Any]:
        found = []
        for name, value in (("text_input", text), ("sampling_parameters", json.dumps(options))):
            found.append(triton.InferInput(name, [1], "BYTES"))
            found[-1].set_data_from_numpy(np.array([value.encode()], np.object_))
        return found

    async def requests() -> AsyncIterator[dict[str, Any]]:
        yield {"model_name": "real", "inputs": inputs(PROMPT, max_tokens=24), "request_id": "mine"}
        yield {"model_name": "real", "inputs": inputs(PROMPT, top_k=3), "request_id": "wrong"}
        yield {"model_name": "plain", "inputs": inputs(PROMPT), "request_id": "plain"}

    async with triton.InferenceServerClient(f"127.0.0.1:{bench.grpc_port}") as client:
        with pytest.raises(triton_refusal, match=r"10\.0 ms are allowed"):
            await client.infer("slow", inputs("x", max_tokens=3), headers={"x-slo-tpot-ms": "10"})
        texts, errors, finals = [], [], []
        async for answer, error in client.stream_infer(requests()):
            if error is not None:
                errors.append(str(error))
                continue
            told = answer.get_response()
            assert (told.id, told.model_name) == ("mine", "real")
            texts.append(answer.as_numpy("text_output")[0].decode())
            finals.append(told.parameters["triton_final_response"].bool_param)
        assert "".join(texts) == written(PROMPT, 24)
        assert len(texts) > 5
        assert finals == [False] * (len(texts) - 1) + [True]
        assert ["top_k" in each or "no language-modelling head" in each for each in errors] == [True, True]
        whole = await client.infer("real", inputs(PROMPT, max_tokens=24))
        assert whole.as_numpy("text_output")[0].decode() == "".join(texts)
        generator = bench.generator("b", "slow")
        steps = counted_steps(monkeypatch, generator, turns=TURNS)
        heard = told_steps(monkeypatch, steps)

        async def slow() -> AsyncIterator[dict[str, Any]]:
            yield {"model_name": "slow", "inputs": inputs("x", max_tokens=250)}
            await asyncio.sleep(PATIENCE_S)

        stream = client.stream_infer(slow())
        await anext(aiter(stream))
        assert generator.free_blocks < BLOCKS
        stream.cancel()
        await until(lambda: generator.free_blocks == BLOCKS)
        assert len(steps) - heard[0] <= 2
    await bench.close()


@pytest.mark.parametrize(
    ("url", "document", "status", "says"),
    [
        ("/v1/completions", {"model": "real", "prompt": "x" * 400}, 400, "the model's positions"),
        ("/v1/completions", {"model": "slow", "prompt": "x" * 400}, 400, "the memory for its keys and values"),
        ("/v1/completions", {"model": "real", "prompt": "x", "max_tokens": 320}, 400, "room for 319"),
        ("/v1/completions", {"model": "real", "prompt": "x", "top_k": 3}, 400, "top_k"),
        ("/v1/completions", {"model": "mute", "prompt": "x"}, 400, "options.tokenizer"),
        ("/v1/completions", {"model": "real", "prompt": [300]}, 400, "0 to 299"),
        ("/v1/completions", {"model": "plain", "prompt": "x"}, 400, "no language-modelling head"),
        ("/v1/chat/completions", {"model": "absent", "messages": [{"role": "user", "content": "x"}]}, 404, "absent"),
        ("/v2/models/plain/generate", {"text_input": "x"}, 400, "no language-modelling head"),
        ("/v2/models/real/infer", {"inputs": []}, 400, "/v1/completions"),
    ],
)
async def test_what_cannot_be_done_is_refused_before_anything_runs(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, url: str, document: dict[str, Any], status: int, says: str
) -> None:
    steps = [counted_steps(monkeypatch, bench.generator(*each)) for each in (("a", "real"), ("b", "slow"))]
    answer = await bench.post(url, **document)
    error = answer.json()["error"]
    assert answer.status_code == status
    assert says in (error["message"] if url.startswith("/v1") else error)
    assert steps == [[], []]


async def test_tokens_count_when_they_come_and_those_of_a_client_that_left_too(bench: Bench) -> None:
    request = {"model": "slow", "prompt": "x", "max_tokens": 250, "stream": True}
    assert re.search(
        r'^tenuto_num_requests_running{gpulet="b",.*} 0$', (await bench.client.get("/metrics")).text, re.MULTILINE
    )
    async with bench.client.stream("POST", "/v1/completions", json=request) as answer:
        assert await anext(answer.aiter_lines())
        model = (await bench.status())["models"]["slow"]
        assert 0 < model["written_tokens"] < 250
        assert (model["ok"], model["generated_tokens"]) == (0, 0)
        metrics = (await bench.client.get("/metrics")).text
        assert re.search(r'^tenuto_generation_tokens_total{model="slow"} [1-9]', metrics, re.MULTILINE)
        assert 'tenuto_time_to_first_token_seconds_count{model="slow"} 1\n' in metrics
    await until(lambda: bench.generator("b", "slow").free_blocks == BLOCKS)
    model = (await bench.status())["models"]["slow"]
    assert (model["cancelled"], model["generated_tokens"], model["written_tokens"] > 0) == (1, 0, True)


async def test_token_ids_need_no_tokenizer(bench: Bench) -> None:
    answer = (await bench.post("/v1/completions", model="mute", prompt=[1, 2], max_tokens=3)).json()["choices"][0]
    assert (answer["text"], len(answer["token_ids"])) == ("", 3)
    events = await bench.stream("/v1/completions", model="mute", prompt=[1, 2], max_tokens=3, stream=True)
    assert [token for event in events for token in event["choices"][0]["token_ids"]] == answer["token_ids"]


async def test_models_are_listed(bench: Bench) -> None:
    listed = (await bench.client.get("/v1/models")).json()
    assert [model["id"] for model in listed["data"]] == ["real", "slow", "mute"]
    assert (await bench.client.get("/v1/models/slow")).json()["id"] == "slow"
    assert (await bench.client.get("/v1/models/plain")).status_code == 404
    assert (await bench.client.get("/health")).status_code == 200


@pytest.mark.parametrize("method", ["GET", "POST", "PUT", "PATCH", "DELETE"])
async def test_what_openais_interface_has_not_is_refused_in_its_form(bench: Bench, method: str) -> None:
    for path in ("/v1/models/slow", "/v1/models", "/v1/audio/speech", "/v1/files/x", "/v1/", "/v1/chat/completions/y"):
        answer = await bench.client.request(method, path)
        if answer.status_code != 200:
            error = answer.json()["error"]
            assert answer.status_code in (404, 405)
            assert ("allow" in answer.headers) == (answer.status_code == 405)
            assert error.keys() == {"message", "type", "param", "code"}
            assert method in error["message"] or error["code"] == "model_not_found"


async def test_every_part_of_a_stream_has_the_usage_so_far_for_those_who_ask_for_it(bench: Bench) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    asked = {"model": "slow", "prompt": "hi", "max_tokens": 4, "stream": True, "stream_options": options}
    events = await bench.stream("/v1/completions", **asked)
    assert [event["usage"]["completion_tokens"] for event in events] == [1, 2, 3, 4, 4, 4]
    assert {event["usage"]["prompt_tokens"] for event in events} == {2}


async def test_a_step_that_fails_ends_its_sequences_and_not_the_gpulet(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = bench.generator("b", "slow")
    for error, says in ((ValueError("bug"), "a step failed"), (MemoryError(), "not enough memory")):
        with monkeypatch.context() as broken:

            def fail(chunks: Any, error: Exception = error) -> Any:
                raise error

            broken.setattr(generator, "step", fail)
            answer = await bench.post("/v1/completions", model="slow", prompt="x", max_tokens=3)
        assert answer.status_code == 500
        assert says in answer.json()["error"]["message"]
        assert generator.free_blocks == BLOCKS
    assert (await bench.post("/v1/completions", model="slow", prompt="x", max_tokens=3)).status_code == 200


async def test_what_is_too_late_is_refused(bench: Bench) -> None:
    document = {"model": "slow", "prompt": "x", "max_tokens": 3}
    answer = await bench.client.post("/v1/completions", json=document, headers={"x-slo-ms": "0.001"})
    assert answer.status_code == 504
    assert answer.json()["error"]["type"] == "timeout_error"


@pytest.mark.parametrize(
    ("headers", "status", "says"),
    [
        ({"x-slo-ttft-ms": "0.001"}, 504, "deadline"),
        ({"X-LLM-D-SLO-TTFT-Ms": "0.001"}, 504, "deadline"),
        ({"x-slo-tpot-ms": "10"}, 429, "with it a token would take 20.0 ms, and 10.0 ms are allowed"),
        ({"x-llm-d-slo-tpot-ms": "10"}, 429, "10.0 ms are allowed"),
        ({"x-slo-tpot-ms": "0"}, 400, "header x-slo-tpot-ms is 0. Give a number above 0, in ms."),
        ({"x-slo-ttft-ms": "60000", "x-slo-tpot-ms": "25.5"}, 200, ""),
        # What says most of a time goes first.
        ({"x-slo-ms": "0.001", "x-slo-ttft-ms": "60000"}, 200, ""),
        ({"x-slo-ms": "60000", "x-slo-ttft-ms": "0.001"}, 504, "deadline"),
        ({"x-slo-ttft-ms": "soon"}, 400, "header x-slo-ttft-ms is 'soon'. Give a number of at most 3600000."),
        ({"x-slo-tpot-ms": "nan"}, 400, "header x-slo-tpot-ms is 'nan'. Give a number"),
        ({"x-slo-tpot-ms": "3600001"}, 400, "Give a number of at most 3600000"),
    ],
)
async def test_a_request_may_bring_times_for_its_tokens(
    bench: Bench, headers: dict[str, str], status: int, says: str
) -> None:
    document = {"model": "slow", "prompt": "x", "max_tokens": 3}
    answer = await bench.client.post("/v1/completions", json=document, headers=headers)
    assert (answer.status_code, says in answer.text) == (status, True), answer.text
    triton = {"text_input": "x", "parameters": {"max_tokens": 3}}
    answer = await bench.client.post("/v2/models/slow/generate", json=triton, headers=headers)
    assert (answer.status_code, says in answer.text) == (status, True), answer.text


async def test_more_than_the_memory_waits_its_turn(bench: Bench) -> None:
    generator = bench.generator("a", "real")
    asked = {"model": "real", "prompt": "x" * 100, "max_tokens": 60, "temperature": 0}
    answers = await asyncio.gather(*(bench.post("/v1/completions", **asked) for _ in range(5)))
    texts = {answer.json()["choices"][0]["text"] for answer in answers}
    assert texts == {written("x" * 100, 60)}
    assert generator.free_blocks == BLOCKS


async def handle(bench: Bench) -> TenutoHandle:
    """Connect as a Python process does, through the sockets of the gateway's own dispatcher."""

    async def find() -> Endpoint:
        return await bench.entry.endpoint("")

    dispatchers = DispatcherClient(lambda _name: find)
    await dispatchers.apply(bench.planned, {"gateway": [spec.name for spec in bench.planned.models]})
    return TenutoHandle(dispatchers)


async def test_python_gives_out_a_text_part_by_part(bench: Bench) -> None:
    async with await handle(bench) as tenuto:
        parts = [part async for part in tenuto.generate("real", PROMPT, max_tokens=24)]
        assert "".join(parts) == written(PROMPT, 24)
        tokens = [token async for token in tenuto.generate_tokens("mute", [1, 2], max_tokens=3)]
        assert len(tokens) == 3
        letters = "".join([part async for part in tenuto.generate("slow", "x", max_tokens=6)])
        assert [part async for part in tenuto.generate("slow", "x", max_tokens=99, stop=[letters[2]])] == [*letters[:2]]
        generator = bench.generator("b", "slow")
        await until(lambda: generator.free_blocks == BLOCKS)
        for model, prompt, words in (
            ("plain", "x", "head|tokenizer"),
            ("mute", "x", "tokenizer"),
            ("real", "x" * 400, "positions"),
            ("absent", "x", "unknown model"),
        ):
            with pytest.raises(InvalidInputError, match=words):
                _ = [part async for part in tenuto.generate(model, prompt)]
        with pytest.raises(RequestFailedError, match="expired"):
            _ = [part async for part in tenuto.generate("slow", "x", slo_ms=0.001)]


async def test_a_python_handle_opens_the_tokenizer_of_a_model_once(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While its file is read, the loop of the process stands still."""
    opened = []
    tokenizer_of = planned_model.tokenizer_of
    monkeypatch.setattr(planned_model, "tokenizer_of", lambda spec: opened.append(spec.name) or tokenizer_of(spec))
    monkeypatch.setattr(python_handle, "tokenizer_of", planned_model.tokenizer_of)
    async with await handle(bench) as tenuto:
        for _ in range(3):
            assert "".join([part async for part in tenuto.generate("slow", "x", max_tokens=2)])
    assert opened == ["slow"]


async def test_what_python_asks_is_held_to_the_rules_of_http(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = counted_steps(monkeypatch, bench.generator("b", "slow"))
    async with await handle(bench) as tenuto:
        for options in (
            {"temperature": 3.0},
            {"temperature": float("nan")},
            {"top_p": 0.0},
            {"seed": 1 << 70},
            {"max_tokens": 0},
            {"max_tokens": 384},
            {"stop": [""]},
        ):
            (name,) = options
            with pytest.raises(InvalidInputError, match=f"'{name}"):
                _ = [part async for part in tenuto.generate("slow", "x", **options)]  # type: ignore[arg-type]
        for prompt in ([300], [-1], []):
            with pytest.raises(InvalidInputError, match="'prompt' has"):
                _ = [token async for token in tenuto.generate_tokens("real", prompt)]
        wrong: Any
        for wrong in ([1.5], "12", None, 3):
            with pytest.raises(InvalidInputError, match="prompt"):
                _ = [token async for token in tenuto.generate_tokens("real", wrong)]
        for wrong in (None, 3, b"x", {}):
            with pytest.raises(InvalidInputError, match="prompt"):
                _ = [part async for part in tenuto.generate("slow", wrong)]
        tensor = np.zeros(1, np.float32)
        for wrong in (float("nan"), float("inf"), "soon"):
            with pytest.raises(InvalidInputError, match="slo_ms"):
                _ = [part async for part in tenuto.generate("slow", "x", slo_ms=wrong)]
            with pytest.raises(InvalidInputError, match="slo_ms"):
                await tenuto.infer("plain", {"INPUT0": tensor}, slo_ms=wrong)
            with pytest.raises(InvalidInputError, match="tpot_ms"):
                _ = [part async for part in tenuto.generate("slow", "x", tpot_ms=wrong)]
        with pytest.raises(RequestFailedError, match=r"10\.0 ms are allowed"):
            _ = [part async for part in tenuto.generate("slow", "x", tpot_ms=10.0)]
        assert steps == []
        letters = "".join([part async for part in tenuto.generate("slow", "x", max_tokens=6)])
        stopped = tenuto.generate("slow", "x", max_tokens=6, stop=letters[2:4])  # one string, and not two letters
        assert "".join([part async for part in stopped]) == letters[:2]
        tokens = [t async for t in tenuto.generate_tokens("real", np.array([1, 2]), max_tokens=2)]  # type: ignore[arg-type]
        assert len(tokens) == 2


async def test_leaving_the_loop_ends_the_generation(bench: Bench) -> None:
    async with await handle(bench) as tenuto:
        parts = tenuto.generate("slow", "x", max_tokens=250)
        assert await anext(parts)
        generator = bench.generator("b", "slow")
        assert generator.free_blocks < BLOCKS
        await parts.aclose()  # type: ignore[attr-defined]
        await until(lambda: generator.free_blocks == BLOCKS)


async def test_a_dispatcher_that_is_gone_fails_what_it_generates(bench: Bench) -> None:
    async with await handle(bench) as tenuto:
        parts = tenuto.generate("slow", "x", max_tokens=250)
        assert await anext(parts)
        assert bench.entry.bundles is not None
        await bench.entry.bundles.close(0.0)
        with pytest.raises(RequestFailedError, match=r"shutting down|died"):
            _ = [part async for part in parts]
    generator = bench.generator("b", "slow")
    await until(lambda: generator.free_blocks == BLOCKS)


@pytest.fixture
def openai() -> Any:
    """OpenAI's package. Its import takes seconds, in which a loop that runs would stand still."""
    return pytest.importorskip("openai", reason="the package 'openai' is not installed")


async def test_openais_own_package_works_unchanged(openai: Any, bench: Bench) -> None:
    client = openai_client(f"{bench.url}/v1")
    assert [model.id async for model in client.models.list()] == ["real", "slow", "mute"]
    plain = await client.completions.create(model="real", prompt=PROMPT, max_tokens=24, temperature=0)
    assert plain.choices[0].text == written(PROMPT, 24)
    assert plain.usage is not None
    assert plain.usage.completion_tokens == 24
    messages = [{"role": "system", "content": "Write."}, {"role": "user", "content": "hi"}]
    asked = {"model": "real", "messages": messages, "max_completion_tokens": 20, "seed": 4, "temperature": 0.7}
    chat = await client.chat.completions.create(**asked)
    stream = await client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    chunks = [chunk async for chunk in stream]
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == chat.choices[0].message.content
    assert chunks[-1].usage.completion_tokens == 20
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "length"
    with pytest.raises(openai.BadRequestError) as caught:
        await client.completions.create(model="real", prompt="x", max_tokens=9999)
    assert (caught.value.param, caught.value.type) == ("max_tokens", "invalid_request_error")
    with pytest.raises(openai.NotFoundError):
        await client.completions.create(model="absent", prompt="x")
    with pytest.raises(openai.BadRequestError, match="top_k"):
        await client.completions.create(model="real", prompt="x", extra_body={"top_k": 3})
    left = await client.completions.create(model="slow", prompt="x", max_tokens=250, stream=True)
    async for _ in left:
        break
    await left.close()
    generator = bench.generator("b", "slow")
    await until(lambda: generator.free_blocks == BLOCKS)
    await client.close()


async def test_an_slo_that_cannot_be_kept_is_refused_before_it_costs_anything(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = counted_steps(monkeypatch, bench.generator("b", "slow"))
    document = {"model": "slow", "prompt": "x" * 200, "max_tokens": 3}  # four steps of 20 ms to the first token
    answer = await bench.client.post("/v1/completions", json=document, headers={"x-slo-ms": "60"})
    assert answer.status_code == 429
    assert "its first token would take 80 ms" in answer.json()["error"]["message"]
    assert steps == []
    answer = await bench.client.post("/v1/completions", json=document, headers={"x-slo-ms": "60000"})
    assert (answer.status_code, len(steps)) == (200, 6)
    told = (await bench.client.get("/requests")).json()
    assert [(each["outcome"], each["rule"]) for each in told] == [("ok", None), ("rejected", "time to first token")]


class FailingText(GrowingText):
    """A text that cannot be written where the request has stop strings."""

    def __init__(self, tokenizer: Any, stops: Any = (), *others: Any, **more: Any) -> None:
        super().__init__(tokenizer, stops, *others, **more)
        self.has_stops = bool(stops)

    def add(self, token: int) -> str:
        if self.has_stops:
            raise RuntimeError("it cannot be written")
        return super().add(token)


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_a_text_that_cannot_be_written_ends_its_request_alone(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, is_streamed: bool
) -> None:
    """An error amid the messages of a gpu-let would end the connection, which others share."""
    monkeypatch.setattr(generation_call, "GrowingText", FailingText)
    document: dict[str, Any] = {"model": "slow", "prompt": "x", "max_tokens": 8, "stream": is_streamed}
    failing = [bench.post("/v1/completions", **document, n=2, stop=["never"]) for _ in range(2)]
    *failed, whole = await asyncio.gather(*failing, bench.post("/v1/completions", **document))
    assert whole.status_code == 200
    assert [answer.status_code for answer in failed] == [500, 500]
    assert all("internal error" in answer.text for answer in failed)
    assert (await bench.post("/v1/completions", **document)).status_code == 200
    await until(lambda: not bench.entry.service.dispatching.is_generating)


async def test_a_request_whose_model_has_left_claims_no_tokens_of_its_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan may change between the reading of a body and the generation."""
    key, digest = new_key()
    made = Bench()
    await made.start(keys=[{"name": "a", "sha256": digest, "models": ["slow"], "tokens_per_s": 10}])
    made.client.headers["authorization"] = f"Bearer {key}"
    document: dict[str, Any] = {"model": "slow", "prompt": "x", "max_tokens": 250}
    whole, asked = Dispatcher.generate, []

    def generate(*arguments: Any, **how: Any) -> Any:
        asked.append(arguments)
        if len(asked) == 2:
            raise KeyError("slow")
        return whole(*arguments, **how)

    with monkeypatch.context() as patched:
        patched.setattr(Dispatcher, "generate", generate)
        refused = await made.post("/v1/completions", **document, n=2)
    assert (refused.status_code, len(asked)) == (404, 2)
    assert (await made.post("/v1/completions", **document | {"max_tokens": 5})).status_code == 200
    assert (await made.post("/v1/completions", **document, n=2, stream=True)).status_code == 200
    await made.close()


async def test_spans_say_the_outcome_and_the_rule_behind_it(bench: Bench) -> None:
    exporter = InMemorySpanExporter()
    bench.entry.service.traces = Traces(exporter, ratio=1.0)
    for slo_ms in ("60", "60000"):
        document = {"model": "slow", "prompt": "x" * 200, "max_tokens": 3}
        await bench.client.post("/v1/completions", json=document, headers={"x-slo-ms": slo_ms})
    bench.entry.service.traces.close()
    refused, answered = (span for span in exporter.get_finished_spans() if span.name == "infer slow")
    for span, outcome, rule, is_good in (
        (refused, "rejected", "time to first token", False),
        (answered, "ok", "", True),
    ):
        assert span.attributes is not None
        assert (span.attributes["tenuto.outcome"], span.attributes["tenuto.rule"]) == (outcome, rule)
        assert span.status.is_unset == is_good
    assert answered.attributes is not None
    assert answered.attributes["tenuto.finish_reason"] == "length"


async def test_networks_of_fixed_cost_are_served_beside(bench: Bench) -> None:
    tensor = {"name": "INPUT0", "shape": [1, 1], "datatype": "FP32", "data": [1]}
    answers = [await bench.post("/v2/models/plain/infer", inputs=[tensor]) for _ in range(2)]
    assert [answer.status_code for answer in answers] == [200, 200]
    assert answers[0].headers["x-tenuto-gpulet"] == "c"


async def test_streams_go_on_when_expectations_change_and_when_the_model_is_loaded_anew(bench: Bench) -> None:
    def config(kv_tokens: int, slowdown: float) -> dict[str, Any]:
        data = plan().to_data()
        replica = next(each for each in data["gpulets"] if each["id"] == "b")["models"][0]
        replica |= {"kv_tokens": kv_tokens, "slowdown": slowdown}
        changed = Deployment(plan=Plan.from_data(data)).config().gpulets
        return next(each.user_config for each in changed if each.spec is not None and each.spec.gpulet == "b").to_data()

    request = {"model": "slow", "prompt": "x", "max_tokens": 40, "stream": True}
    for blocks in (BLOCKS, BLOCKS // 2):
        async with bench.client.stream("POST", "/v1/completions", json=request) as answer:
            lines = answer.aiter_lines()
            assert "choices" in await anext(lines)
            await bench.replicas["b"].reconfigure(config(blocks * 16, 1.5))
            rest = [line async for line in lines if line]
        assert (len(rest), rest[-1]) == (41, "data: [DONE]")
    assert bench.generator("b", "slow").free_blocks == BLOCKS // 2


async def test_a_gateway_that_closes_lets_answers_end_and_tells_those_that_take_too_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gateway, "GENERATIONS_END_S", 3.0)
    made = Bench()
    await made.start()
    counted_steps(monkeypatch, made.generator("d", "mute"), at_least_s=0.5)
    short = {"model": "slow", "prompt": "x", "max_tokens": 30, "stream": True}
    long = {"model": "mute", "prompt": [1], "max_tokens": 250, "stream": True}
    post = partial(made.client.stream, "POST", "/v1/completions")
    async with post(json=short) as ends, post(json=long) as lasts:
        closing = asyncio.create_task(made.close(is_client_open=True))
        first = [line async for line in ends.aiter_lines() if line]
        second = [line async for line in lasts.aiter_lines() if line]
    await closing
    assert (len(first), first[-1]) == (32, "data: [DONE]")
    assert "the server is shutting down" in json.loads(second[-2].removeprefix("data: "))["error"]["message"]
    assert second[-1] == "data: [DONE]"
    await made.client.aclose()


async def test_a_key_has_its_models_and_its_rate_of_tokens() -> None:
    key, digest = new_key()
    made = Bench()
    entry = {"name": "a", "sha256": digest, "models": ["slow"], "tokens_per_s": 10}
    await made.start(keys=[entry])
    made.client.headers["authorization"] = f"Bearer {key}"
    listed = (await made.client.get("/v1/models")).json()
    assert [model["id"] for model in listed["data"]] == ["slow"]
    refused = await made.post("/v1/completions", model="real", prompt="x")
    assert (refused.status_code, "not for model 'real'" in refused.json()["error"]["message"]) == (403, True)
    assert (await made.post("/v1/completions", model="slow", prompt="x" * 300, max_tokens=2)).status_code == 200
    refused = await made.post("/v1/completions", model="slow", prompt="x")
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
    assert int(refused.headers["retry-after"]) >= 20
    made.client.headers["authorization"] = "Bearer wrong"
    refused = await made.post("/v1/completions", model="slow", prompt="x")
    assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_api_key")
    await made.close()


async def test_choices_of_a_request_are_generations_of_their_own(openai: Any, bench: Bench) -> None:
    client = openai_client(f"{bench.url}/v1")
    asked = {"model": "real", "max_tokens": 12, "temperature": 1.0, "seed": 7}
    prompts = [PROMPT, "Two"]
    alone = [
        (await client.completions.create(**asked | {"prompt": prompt, "seed": 7 + index})).choices[0].text
        for prompt in prompts
        for index in range(3)
    ]
    whole = await client.completions.create(**asked, prompt=prompts, n=3)
    assert [(choice.index, choice.text) for choice in whole.choices] == list(enumerate(alone))
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (len(PROMPT) + 3, 72)
    stream = await client.completions.create(
        **asked, prompt=prompts, n=3, stream=True, stream_options={"include_usage": True}
    )
    texts, ends, order = [""] * 6, [""] * 6, []
    async for chunk in stream:
        for choice in chunk.choices:
            order.append(choice.index)
            texts[choice.index] += choice.text
            ends[choice.index] += choice.finish_reason or ""
    assert (texts, ends) == (alone, ["length"] * 6)
    assert order != sorted(order)  # they are made side by side
    assert chunk.usage == whole.usage
    chat = {"model": "slow", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, "n": 2}
    said = await client.chat.completions.create(**chat)
    parts = [chunk async for chunk in await client.chat.completions.create(**chat, stream=True)]
    for index, choice in enumerate(said.choices):
        mine = [part.choices[0].delta for part in parts if part.choices[0].index == index]
        assert mine[0].role == "assistant"
        assert "".join(delta.content or "" for delta in mine) == choice.message.content
    await client.close()
    model = (await bench.status())["models"]["real"]
    assert (model["ok"], model["prompt_tokens"]) == (18, 9 * (len(PROMPT) + 3))


@pytest.fixture
def directly() -> Any:
    """What the model itself gives as log probabilities after each of some tokens."""
    import torch

    from tenuto.profiles.networks.language_model import load_language_model

    network = load_language_model("transformers/llama", seed=3, config=TINY)

    def logprobs(tokens: list[int]) -> Any:
        with torch.no_grad():
            return torch.log_softmax(network(torch.tensor([tokens])).logits[0].float(), dim=-1)

    return logprobs


async def test_log_probabilities_are_the_models_own_whole_and_streamed(
    openai: Any, directly: Any, bench: Bench
) -> None:
    client = openai_client(f"{bench.url}/v1")
    asked = {"model": "real", "prompt": PROMPT, "max_tokens": 8, "seed": 4, "logprobs": 3, "echo": True}
    whole = (await client.completions.create(**asked)).choices[0]
    told, prompt = whole.logprobs, list(PROMPT.encode())
    assert whole.text.startswith(PROMPT)
    assert (told.token_logprobs[0], told.top_logprobs[0], len(told.tokens)) == (None, None, len(PROMPT) + 8)
    assert "".join(told.tokens[: len(PROMPT)]) == PROMPT
    assert told.text_offset[: len(PROMPT) + 1] == list(range(len(PROMPT) + 1))
    own = directly(prompt)
    expected = [float(own[place][token]) for place, token in enumerate(prompt[1:])]
    assert told.token_logprobs[1 : len(prompt)] == pytest.approx(expected, abs=1e-4)
    for place, top in enumerate(told.top_logprobs[1 : len(prompt) + 1]):
        assert max(top.values()) == pytest.approx(float(own[place].max()), abs=1e-4)
        assert told.token_logprobs[place + 1] in top.values()
    stream = [part.choices[0] async for part in await client.completions.create(**asked, stream=True)]
    parts = [choice.logprobs for choice in stream if choice.logprobs]
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert [each for part in parts for each in getattr(part, name)] == getattr(told, name)
    assert "".join(choice.text for choice in stream) == whole.text
    alone = (await client.completions.create(**asked | {"max_tokens": 0})).choices[0]
    assert (alone.text, alone.finish_reason) == (PROMPT, "length")
    assert alone.logprobs.token_logprobs == told.token_logprobs[: len(PROMPT)]
    chat = {"model": "real", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 6, "seed": 4, "n": 2}
    said = (await client.chat.completions.create(**chat, logprobs=True, top_logprobs=2)).choices
    heard: list[list[Any]] = [[], []]
    async for part in await client.chat.completions.create(**chat, logprobs=True, top_logprobs=2, stream=True):
        heard[part.choices[0].index] += part.choices[0].logprobs.content if part.choices[0].logprobs else []
    for choice, parts in zip(said, heard, strict=True):
        assert [each.token for each in parts] == [each.token for each in choice.logprobs.content]
        # What else a step holds changes the last digits.
        numbers = [each.logprob for each in choice.logprobs.content]
        assert [each.logprob for each in parts] == pytest.approx(numbers, abs=1e-5)
    for choice in said:
        text = b"".join(bytes(each.bytes) for each in choice.logprobs.content).decode(errors="replace")
        assert (text, len(choice.logprobs.content)) == (choice.message.content, 6)
        assert all(each.top_logprobs[0].logprob >= each.top_logprobs[1].logprob for each in choice.logprobs.content)
    plain = (await client.chat.completions.create(**chat)).choices
    assert [choice.message.content for choice in plain] == [choice.message.content for choice in said]
    assert plain[0].logprobs is None
    await client.close()


async def test_a_bias_and_the_fewest_tokens_are_kept(openai: Any, bench: Bench) -> None:
    client = openai_client(f"{bench.url}/v1")
    asked = {"model": "real", "prompt": PROMPT, "max_tokens": 6}
    forced = await client.completions.create(**asked, logit_bias={"97": 100})
    assert forced.choices[0].text == "aaaaaa"
    free = (await client.completions.create(**asked, temperature=0)).choices[0].text
    other = await client.completions.create(**asked, temperature=0, logit_bias={str(byte): -100 for byte in range(128)})
    assert not set(free) & set(other.choices[0].text) & {chr(byte) for byte in range(128)}
    stop = {"logit_bias": {"97": 100}, "stop": "aa"}
    for fewest, text in ((0, ""), (1, ""), (2, "a"), (4, "aaa")):
        found = await client.completions.create(**asked, **stop, extra_body={"min_tokens": fewest})
        assert (found.choices[0].text, found.choices[0].finish_reason) == (text, "stop"), fewest
    for ignored in (False, True):  # inference-perf says it, whatever it is
        answer = await client.completions.create(**asked, extra_body={"ignore_eos": ignored, "min_tokens": 6})
        assert answer.usage.completion_tokens == 6
        emulated = await client.completions.create(
            model="slow", prompt="x", max_tokens=5, extra_body={"ignore_eos": ignored, "min_tokens": 5}
        )
        assert emulated.usage.completion_tokens == 5
    await client.close()


async def test_an_emulated_gpu_makes_up_no_probabilities(openai: Any, bench: Bench) -> None:
    client = openai_client(f"{bench.url}/v1")
    refused: tuple[dict[str, Any], ...] = (
        {"logprobs": 1},
        {"logit_bias": {"97": 1}},
        {"extra_body": {"response_format": {"type": "json_object"}}},
    )
    for more in refused:
        with pytest.raises(openai.BadRequestError, match="makes up its tokens"):
            await client.completions.create(model="slow", prompt="x", max_tokens=3, **more)
    echoed = await client.completions.create(model="slow", prompt=["x", "y"], max_tokens=3, n=2, echo=True)
    texts = [choice.text for choice in echoed.choices]
    assert [text[0] for text in texts] == ["x", "x", "y", "y"]
    parts = [""] * 4
    stream = await client.completions.create(model="slow", prompt=["x", "y"], max_tokens=3, n=2, echo=True, stream=True)
    async for chunk in stream:
        parts[chunk.choices[0].index] += chunk.choices[0].text
    assert parts == texts
    mute = (await bench.post("/v1/completions", model="mute", prompt=[5, 6], max_tokens=3, echo=True)).json()
    assert (mute["choices"][0]["token_ids"][:2], len(mute["choices"][0]["token_ids"])) == ([5, 6], 5)
    await client.close()


SHOP = {
    "type": "object",
    "properties": {"open": {"type": "boolean"}, "seats": {"type": "integer", "minimum": 1, "maximum": 99}},
    "required": ["open", "seats"],
    "additionalProperties": False,
}


async def test_an_answer_keeps_its_schema(openai: Any, bench: Bench) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    pytest.importorskip("llguidance")
    client = openai_client(f"{bench.url}/v1")
    messages = [{"role": "user", "content": "Is it open?"}]
    blanks = {str(blank): -100 for blank in b" \t\r\n"}  # of which a model that nobody trained writes many
    asked: dict[str, Any] = {"model": "real", "messages": messages, "max_tokens": 200, "logit_bias": blanks}

    def by(schema: Any) -> dict[str, Any]:
        return {"response_format": {"type": "json_schema", "json_schema": {"name": "shop", "schema": schema}}}

    answers = await client.chat.completions.create(**asked, **by(SHOP), n=4, temperature=2)
    for choice in answers.choices:
        assert choice.finish_reason == "stop"
        jsonschema.validate(json.loads(choice.message.content), SHOP)
    stream = await client.chat.completions.create(**asked, **by(SHOP), stream=True, logprobs=True)
    told = [part.choices[0] async for part in stream]
    jsonschema.validate(json.loads("".join(each.delta.content or "" for each in told)), SHOP)
    cut = await client.chat.completions.create(**asked | {"max_tokens": 4}, **by(SHOP))
    assert (cut.choices[0].finish_reason, len(cut.choices[0].message.content)) == ("length", 4)
    anything = await client.chat.completions.create(
        **asked | {"max_tokens": 20}, response_format={"type": "json_object"}
    )
    assert anything.choices[0].message.content.startswith("{")
    for schema, says in (
        ({"not": {}}, "not"),
        ({"type": "strin"}, "strin"),
        ({"enum": []}, "cannot be kept"),
        ({"type": "integer", "multipleOf": 100_000_007}, "more than 1 s"),  # it would take an hour
    ):
        with pytest.raises(openai.BadRequestError, match=says) as caught:
            await client.chat.completions.create(**asked, **by(schema))
        assert caught.value.param == "response_format"
    await client.chat.completions.create(**asked, **by(SHOP))
    await client.close()


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_one_choice_that_fails_ends_its_request_and_the_other_choices(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, is_streamed: bool
) -> None:
    generator = bench.generator("b", "slow")
    step = generator.step

    def failing(chunks: Any) -> Any:
        """Fail the sequence that came second, when it decodes beside the others."""
        ran = step(chunks)
        if len(ran.tokens) > 1:
            number = sorted(ran.tokens)[1]
            ran.failed[number] = "it is Sunday"
        return ran

    monkeypatch.setattr(generator, "step", failing)
    asked = {"model": "slow", "prompt": ["x", "y", "z"], "max_tokens": 100, "stream": is_streamed}
    answer = await bench.post("/v1/completions", **asked)
    if is_streamed:
        *_, last, done = [line for line in answer.text.split("\n\n") if line]
        assert (answer.status_code, done) == (200, "data: [DONE]")
        error = json.loads(last.removeprefix("data: "))["error"]
    else:
        error = answer.json()["error"]
        assert answer.status_code == 500
    assert "it is Sunday" in error["message"]
    await until(lambda: generator.free_blocks == BLOCKS)
    model = (await bench.status())["models"]["slow"]
    assert (model["failed"], model["cancelled"], model["ok"]) == (1, 2, 0)
