"""Whichever way a request comes in, it needs a key, for this model, and is counted once against the key's rate."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from tenuto.deployments.security.keys import new_key
from tenuto.deployments.serve.launcher import unused_port
from tests.deployments.entry.test_generation import Bench
from tests.instruments.live import PATIENCE_S

grpc = pytest.importorskip("grpc")
pytest.importorskip("h2")
messages = pytest.importorskip("tenuto.deployments.entry.protocols.grpc_messages")

BURST = 3
# What clients are told: over HTTP, over gRPC, and amid a stream of gRPC, which has no codes for single messages.
OK, NO_KEY, ANOTHERS, TOO_OFTEN = (
    ("200", "OK", "answered"),
    ("401", "UNAUTHENTICATED"),
    ("403", "PERMISSION_DENIED", "is not for model"),
    ("429", "RESOURCE_EXHAUSTED", "more often"),
)
Way = Callable[[str, str | None, int], Awaitable[list[str]]]  # asks for a model so often with a key


def tensor(_model: str) -> dict[str, Any]:
    return {"inputs": [{"name": "INPUT0", "shape": [1, 1], "datatype": "FP32", "data": [1]}]}


def infer_message(model: str) -> bytes:
    asked = messages.InferRequest(model_name=model)
    if model.startswith("plain"):
        asked.inputs.add(name="INPUT0", datatype="FP32", shape=[1, 1]).contents.fp32_contents.append(1.0)
    else:
        asked.inputs.add(name="text_input", datatype="BYTES", shape=[1]).contents.bytes_contents.append(b"x")
        asked.parameters["max_tokens"].int64_param = 1
    data: bytes = asked.SerializeToString()
    return data


class Ways:
    """A gateway with all its ways in; of each kind of model there is one for the key and one for nobody."""

    def __init__(self) -> None:
        self.bench = Bench()
        self.bench.grpc_port = unused_port()
        self.keys: dict[str, str] = {}

    async def start(self, names: list[str]) -> None:
        entries = []
        for number, name in enumerate(names):
            self.keys[name], digest = new_key()
            models = ["slow", "plain"]
            entries.append(
                {"name": f"k{number}", "sha256": digest, "models": models, "rate_rps": 0.0001, "burst": BURST}
            )
        await self.bench.start(keys=entries)
        self.channel = grpc.aio.insecure_channel(f"127.0.0.1:{self.bench.grpc_port}")

    async def close(self) -> None:
        await self.channel.close()
        await self.bench.close()

    async def http(self, method: str, path: str, document: Any, key: str | None, count: int) -> list[str]:
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        asked = [
            self.bench.client.request(method, path, headers=headers, json=document if method == "POST" else None)
            for _ in range(count)
        ]
        return [str(answer.status_code) for answer in await asyncio.gather(*asked)]

    async def unary(self, call: str, data: bytes, key: str | None, count: int) -> list[str]:
        metadata = () if key is None else (("x-api-key", key),)
        made = self.channel.unary_unary(f"/{messages.SERVICE}/{call}")
        asked = [made(data, metadata=metadata, timeout=PATIENCE_S).code() for _ in range(count)]
        return [code.name for code in await asyncio.gather(*asked)]

    async def stream(self, data: bytes, key: str | None, count: int) -> list[str]:
        return await asyncio.to_thread(self._stream, data, () if key is None else (("x-api-key", key),), count)

    def _stream(self, data: bytes, metadata: tuple[tuple[str, str], ...], count: int) -> list[str]:
        told = messages.message("inference.ModelStreamInferResponse")
        found: list[str] = []
        with grpc.insecure_channel(f"127.0.0.1:{self.bench.grpc_port}") as channel:
            asked = channel.stream_stream(f"/{messages.SERVICE}/ModelStreamInfer")
            answers = asked(iter([data] * count), metadata=metadata, timeout=PATIENCE_S)
            try:
                for answer in answers:
                    said = told.FromString(answer)
                    if said.error_message or not is_piece(said.infer_response.parameters):
                        found.append(said.error_message or "answered")
            except grpc.RpcError:
                return [answers.code().name]
        return found


def is_piece(parameters: Any) -> bool:
    """Whether an answer is a part of a text, behind which others come."""
    return "triton_final_response" in parameters and not parameters["triton_final_response"].bool_param


def ways(at: Ways) -> dict[str, tuple[str, str, Way]]:
    """Every way in, with a model that the key is for, and one that it is not for."""

    def http(method: str, path: str, document: Callable[[str], Any] = tensor) -> Way:
        return lambda model, key, count: at.http(method, path.format(model), document(model), key, count)

    def completion(model: str, **more: Any) -> dict[str, Any]:
        return {"model": model, "prompt": "x", "max_tokens": 1, **more}

    def chat(model: str) -> dict[str, Any]:
        return {"model": model, "messages": [{"role": "user", "content": "x"}], "max_tokens": 1}

    def generate(_model: str) -> dict[str, Any]:
        return {"text_input": "x", "parameters": {"max_tokens": 1}}

    def management(call: str) -> Way:
        def ask(model: str, key: str | None, count: int) -> Awaitable[list[str]]:
            asked = messages.message(f"inference.{messages.MANAGEMENT[call].request}")(name=model)
            return at.unary(call, asked.SerializeToString(), key, count)

        return ask

    tensors, texts = ("plain", "other"), ("slow", "mute")
    return {
        "infer": (*tensors, http("POST", "/v2/models/{}/infer")),
        "infer, by version": (*tensors, http("POST", "/v2/models/{}/versions/1/infer")),
        "completions": (*texts, http("POST", "/v1/completions", completion)),
        "completions, streamed": (*texts, http("POST", "/v1/completions", lambda m: completion(m, stream=True))),
        "chats": (*texts, http("POST", "/v1/chat/completions", chat)),
        "generate": (*texts, http("POST", "/v2/models/{}/generate", generate)),
        "generate, streamed": (*texts, http("POST", "/v2/models/{}/generate_stream", generate)),
        "metadata": (*tensors, http("GET", "/v2/models/{}")),
        "readiness": (*tensors, http("GET", "/v2/models/{}/ready")),
        "configuration": (*tensors, http("GET", "/v2/models/{}/config")),
        "statistics": (*tensors, http("GET", "/v2/models/{}/stats")),
        "OpenAI's model": (*texts, http("GET", "/v1/models/{}")),
        "gRPC": (*tensors, lambda m, k, c: at.unary("ModelInfer", infer_message(m), k, c)),
        "gRPC, a text": (*texts, lambda m, k, c: at.unary("ModelInfer", infer_message(m), k, c)),
        "gRPC, a stream": (*tensors, lambda m, k, c: at.stream(infer_message(m), k, c)),
        "gRPC, a stream of texts": (*texts, lambda m, k, c: at.stream(infer_message(m), k, c)),
        "gRPC, metadata": (*tensors, management("ModelMetadata")),
        "gRPC, readiness": (*tensors, management("ModelReady")),
        "gRPC, configuration": (*tensors, management("ModelConfig")),
        "gRPC, statistics": (*tensors, management("ModelStatistics")),
    }


@pytest.fixture
async def at() -> AsyncIterator[Ways]:
    made = Ways()
    await made.start(list(ways(made)))
    yield made
    await made.close()


async def test_every_way_in_asks_for_a_key_of_this_model_and_counts_against_its_rate(at: Ways) -> None:
    wrong = {}
    found = ways(at)
    # All at once, as a gateway lets answers to wrong keys wait.
    guesses = await asyncio.gather(*(ask(model, "wrong", 1) for model, _, ask in found.values()))
    for (name, (model, anothers, ask)), guessed in zip(found.items(), guesses, strict=True):
        key = at.keys[name]
        told = {
            "no key": (await ask(model, None, 1), NO_KEY),
            "a wrong key": (guessed, NO_KEY),
            "for another's model": (await ask(anothers, key, 1), ANOTHERS),
        }
        wrong |= {f"{name}: {what}": said for what, (said, words) in told.items() if not is_one_of(said[0], words)}
        answers = await ask(model, key, BURST + 2)
        let_in = sum(is_one_of(answer, OK) for answer in answers)
        refused = sum(is_one_of(answer, TOO_OFTEN) for answer in answers)
        if let_in + refused != BURST + 2 or not BURST - 1 <= let_in <= BURST:  # the one before may be counted, or not
            wrong[f"{name}: the rate"] = answers
    assert wrong == {}


def is_one_of(said: str, words: tuple[str, ...]) -> bool:
    return any(word in said for word in words)
