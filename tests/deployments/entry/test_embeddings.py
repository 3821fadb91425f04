"""Texts in, vectors and scores out, at a gateway whose gpu-let computes simple ones."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from tenuto.deployments.security.keys import new_key
from tenuto.deployments.wire.tensors import Blocks
from tenuto.profiles.networks.catalogue import ModelSignature, TensorSignature, TextInput, text_signature
from tenuto.profiles.networks.preprocess import open_tokenizer
from tests.deployments.entry.test_gateway import Bench
from tests.instruments.asking import openai_client
from tests.instruments.encoders import WORDS, save_tokenizer
from tests.instruments.fake_gpulet import FakeGpulet, make_plan
from tests.instruments.live import PATIENCE_S


def encoder(text: TextInput, *, is_sized: bool) -> ModelSignature:
    outputs = (TensorSignature("embedding", "float32", (2,)),)
    return replace(text_signature(text, 1, is_sized=is_sized), outputs=outputs, labels=(), answers="embedding")


def ranker(text: TextInput, *, is_sized: bool) -> ModelSignature:
    return replace(text_signature(text, 1, has_pairs=True, is_sized=is_sized), answers="logit")


class TextGpulet(FakeGpulet):
    """Model m makes the vector (number of tokens, sum of their ids) of a text, and r the logit of a pair: the number of
    tokens of its second text. A text with the word `away` has no numbers."""

    def __init__(self, folder: Path, *, is_sized: bool) -> None:
        super().__init__("a", ("m", "r"))
        self.is_sized = is_sized
        save_tokenizer(folder)
        self.text = TextInput(8, len(WORDS), 0, tokenizer_path=str(folder / "tokenizer.json"), truncate=False)

    def signatures(self) -> dict[str, ModelSignature]:
        return {name: made(self.text, is_sized=self.is_sized) for name, made in (("m", encoder), ("r", ranker))}

    def compute(self, model: str, blocks: Blocks) -> dict[str, np.ndarray]:
        rows = [row for block in zip(*blocks.values(), strict=True) for row in zip(*block, strict=True)]
        found = [self._of_row(model, *row) for row in rows]
        return {"logits" if model == "r" else "embedding": np.array(found)}

    def _of_row(self, model: str, ids: np.ndarray, mask: np.ndarray, *types: np.ndarray) -> list[float]:
        broken = np.nan if (ids == WORDS.index("away")).any() else 0.0
        return [types[0].sum() + broken] if model == "r" else [mask.sum(), ids.sum() + broken]


PLAN = make_plan(("a", ("m", "r")), ("b", ("n",)), slo_ms=60_000.0)


@pytest.fixture(params=[False, True], ids=["padded to one length", "each of its own length"])
async def bench(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Bench]:
    made = Bench()
    made.gpulets["a"] = TextGpulet(tmp_path, is_sized=request.param)
    await made.start(PLAN)
    yield made
    await made.close()


async def test_predict_answers_the_vector_or_the_score_of_a_text(bench: Bench) -> None:
    answer = await bench.client.post("/predict/m", content=b"the cat")
    assert answer.status_code == 200, answer.text
    assert answer.json()["prediction"] == {"embedding": [4.0, 14.0]}
    answer = await bench.client.post("/predict/r", content=b"the cat")
    assert answer.json()["prediction"] == {"score": 0.5}
    refused = await bench.client.post("/predict/m", content=b"cat " * 7)
    assert (refused.status_code, "has 9 tokens" in refused.json()["error"]) == (400, True)


async def ask(bench: Bench, path: str, **fields: Any) -> httpx.Response:
    model = "r" if path != "embeddings" and "model" not in fields else "m"
    return await bench.client.post(f"/v1/{path}", json={"model": model, **fields})


def vectors(answer: httpx.Response) -> list[list[float]]:
    assert answer.status_code == 200, answer.text
    found = answer.json()
    assert [each["index"] for each in found["data"]] == list(range(len(found["data"])))
    return [each["embedding"] for each in found["data"]]


async def test_every_form_of_input_becomes_vectors_in_its_order(bench: Bench) -> None:
    cat, dog = [4.0, 14.0], [3.0, 15.0]
    assert vectors(await ask(bench, "embeddings", input="the cat")) == [cat]
    assert vectors(await ask(bench, "embeddings", input=[2, 4, 5, 3])) == [cat]
    assert vectors(await ask(bench, "embeddings", input=["the cat", "dog"])) == [cat, dog]
    assert vectors(await ask(bench, "embeddings", input=[[2, 10, 3], "the cat", [4]])) == [dog, cat, [1.0, 4.0]]
    answer = await ask(bench, "embeddings", input=["dog", "the cat"], encoding_format="float", user="u", dimensions=2)
    found = answer.json()
    assert (found["object"], found["model"], found["data"][0]["object"]) == ("list", "m", "embedding")
    assert found["usage"] == {"prompt_tokens": 7, "total_tokens": 7}
    packed = (await ask(bench, "embeddings", input=["the cat", "dog"], encoding_format="base64")).json()["data"]
    assert [np.frombuffer(base64.b64decode(each["embedding"]), "<f4").tolist() for each in packed] == [cat, dog]
    assert "x-tenuto-gpulet" in answer.headers


async def test_many_texts_are_one_request_and_many_samples(bench: Bench) -> None:
    texts = ["the cat"] * 200 + ["dog"] * 200  # more than is read at once
    answer = await bench.client.post(
        "/v1/embeddings", json={"model": "m", "input": texts}, headers={"X-Request-Id": "mine"}
    )
    assert vectors(answer) == [[4.0, 14.0]] * 200 + [[3.0, 15.0]] * 200
    assert answer.headers["x-tenuto-request-id"] == "mine"
    counts = (await bench.status())["models"]["m"]
    assert (counts["ok"], counts["inferences"]) == (1, 400)


async def test_a_client_that_leaves_amid_many_texts_takes_them_all_along(bench: Bench) -> None:
    gpulet = bench.gpulets["a"]
    gpulet.hold = True
    leaving = asyncio.create_task(ask(bench, "embeddings", input=["the cat"] * 32))
    await asyncio.wait_for(gpulet.arrived.wait(), PATIENCE_S)
    leaving.cancel()
    while (await bench.status())["models"]["m"]["cancelled"] != 1:
        await asyncio.sleep(0)
    assert (await bench.client.get("/status/queue")).json()["m"] == 0
    gpulet.hold = False
    gpulet.release()
    assert vectors(await ask(bench, "embeddings", input="dog")) == [[3.0, 15.0]]
    assert sum(gpulet.sizes) < 32
    counts = (await bench.status())["models"]["m"]
    assert (counts["submitted"], counts["ok"], counts["failed"], counts["expired"]) == (2, 1, 0, 0)


async def test_documents_come_back_by_their_relevance(bench: Bench) -> None:
    documents = ["dog", "the cat sat on", {"text": "a mat"}]
    answer = await ask(bench, "rerank", query="cat", documents=documents, top_n=2, return_documents=True)
    assert answer.status_code == 200, answer.text
    found = answer.json()
    scores = [1 / (1 + np.exp(-tokens)) for tokens in (5, 3)]
    assert [each["index"] for each in found["results"]] == [1, 2]
    assert [each["relevance_score"] for each in found["results"]] == pytest.approx(scores)
    assert [each["document"]["text"] for each in found["results"]] == ["the cat sat on", "a mat"]
    assert found["usage"]["total_tokens"] == 5 + 8 + 6
    plain = await bench.client.post("/v2/rerank", json={"model": "r", "query": "cat", "documents": documents})
    assert plain.json()["results"][2] == {"index": 0, "relevance_score": pytest.approx(1 / (1 + np.exp(-2)))}


async def test_pairs_are_scored(bench: Bench) -> None:
    async def scores(one: Any, two: Any, **more: Any) -> Any:
        answer = await ask(bench, "score", text_1=one, text_2=two, **more)
        assert answer.status_code == 200, answer.text
        return [each["score"] for each in answer.json()["data"]]

    def sure(*tokens: int) -> Any:
        return pytest.approx([1 / (1 + np.exp(-each)) for each in tokens])

    assert await scores("cat", "dog") == sure(2)
    assert await scores("cat", ["dog", "a mat"]) == sure(2, 3)
    assert await scores(["cat", "the"], ["dog", "a mat"]) == sure(2, 3)
    cat, dog = np.array([3.0, 10.0]), np.array([3.0, 15.0])
    cosine = cat @ dog / np.linalg.norm(cat) / np.linalg.norm(dog)
    assert await scores("cat", ["dog", "cat"], model="m") == pytest.approx([cosine, 1.0])
    answer = await ask(bench, "rerank", query="cat", documents=["dog", "cat", "dog"], model="m")
    assert [each["index"] for each in answer.json()["results"]] == [1, 0, 2]
    assert answer.json()["usage"]["total_tokens"] == 6  # each text runs once


@pytest.mark.parametrize(
    ("path", "fields", "param", "message"),
    [
        ("embeddings", {}, "input", "is missing"),
        ("embeddings", {"input": []}, "input", "has 0 texts"),
        ("embeddings", {"input": ["a"] * 1025}, "input", "has 1025 texts, and a request may have 1 to 1024"),
        ("embeddings", {"input": [1, "a"]}, "input", "mixes tokens and texts"),
        ("embeddings", {"input": ["a", 1]}, "input[1]", "mixes tokens and texts"),
        ("embeddings", {"input": ["a", []]}, "input[1]", "holds no word"),
        ("embeddings", {"input": [[1, 14]]}, "input[0]", "has token 14; the model knows 0 to 13"),
        ("embeddings", {"input": [-1]}, "input", "has token -1"),
        ("embeddings", {"input": ["a", "a " * 9]}, "input[1]", "has 11 tokens, and the model takes 8"),
        ("embeddings", {"input": "a", "dimensions": 1}, "dimensions", "can only be 2 here"),
        ("embeddings", {"input": "a", "encoding_format": "int8"}, "encoding_format", "is wrong"),
        ("embeddings", {"input": "a", "speed": 9}, "speed", "is not a field of this request"),
        ("rerank", {"query": "a", "documents": []}, "documents", "has 0 texts"),
        ("rerank", {"query": "a", "documents": ["a"], "top_n": 0}, "top_n", "is wrong"),
        ("rerank", {"query": "a", "documents": ["a", "a " * 9]}, "documents[1]", "has 13 tokens"),
        ("rerank", {"query": "a " * 9, "documents": ["a"], "model": "m"}, "query", "has 11 tokens"),
        ("rerank", {"query": "a " * 9000, "documents": ["a"] * 1000}, "query", "is read with each of 1000 texts"),
        ("score", {"text_1": "a " * 9000, "text_2": ["a"] * 1000}, "text_1", "is read with each of 1000 texts"),
        ("score", {"text_1": ["a", "b"], "text_2": ["a"]}, "text_1", "has 2 texts, and `text_2` 1"),
        ("score", {"text_1": "a", "text_2": "a " * 9}, "text_2[0]", "has 13 tokens"),
    ],
)
async def test_what_cannot_be_asked_is_refused_by_its_name(
    bench: Bench, path: str, fields: dict[str, Any], param: str, message: str
) -> None:
    answer = await ask(bench, path, **fields)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["type"]) == (400, param, "invalid_request_error")
    assert message in error["message"]
    assert bench.gpulets["a"].sizes == []


async def test_models_that_make_other_things_are_refused(bench: Bench) -> None:
    for model, path, fields, message in (
        ("r", "embeddings", {"input": "a"}, "no embeddings. Ask /v1/score"),
        ("n", "embeddings", {"input": "a"}, "neither embeddings nor scores"),
        ("n", "score", {"text_1": "a", "text_2": "a"}, "neither embeddings nor scores"),
        ("m", "completions", {"prompt": "a"}, "no language-modelling head"),
    ):
        answer = await bench.client.post(f"/v1/{path}", json={"model": model, **fields})
        assert (answer.status_code, message in answer.json()["error"]["message"]) == (400, True), answer.text
    unknown = await bench.client.post("/v1/embeddings", json={"model": "nobody", "input": "a"})
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")
    listed = (await bench.client.get("/v1/models")).json()["data"]
    assert [(each["id"], each["max_model_len"], each["vocabulary"]) for each in listed] == [("m", 8, 14), ("r", 8, 14)]


async def test_a_long_text_is_cut_where_the_request_says_so(bench: Bench) -> None:
    assert vectors(await ask(bench, "embeddings", input="a " * 9, truncate=True)) == [[8.0, 2 + 6 * 8 + 3]]
    assert vectors(await ask(bench, "embeddings", input=[[6] * 9, [5]], truncate=True)) == [[8.0, 6.0 * 8], [1.0, 5.0]]
    assert (await ask(bench, "rerank", query="a", documents=["a " * 9], truncate=True)).status_code == 200


async def test_vectors_with_nan_are_an_error_of_their_own_request_alone(bench: Bench) -> None:
    broken, whole = await asyncio.gather(
        ask(bench, "embeddings", input=["dog", "far away"]), ask(bench, "embeddings", input=["dog"])
    )
    assert (broken.status_code, broken.json()["error"]["type"]) == (500, "server_error")
    assert "NaN or infinite values of text 1" in broken.json()["error"]["message"]
    assert vectors(whole) == [[3.0, 15.0]]
    score = await ask(bench, "score", text_1="dog", text_2="far away")
    assert score.status_code == 500


async def test_a_refusal_of_the_scheduler_has_openais_form(bench: Bench) -> None:
    body = {"model": "m", "input": ["a", "b"]}
    late = await bench.client.post("/v1/embeddings", json=body, headers={"X-SLO-Ms": "0"})
    assert (late.status_code, late.json()["error"]["code"]) == (504, "deadline_exceeded")
    assert late.json()["outcome"] == "expired"
    bench.gpulets["a"].error = "the network failed"
    failed = await bench.client.post("/v1/embeddings", json=body)
    assert (failed.status_code, failed.json()["error"]["type"]) == (500, "server_error")


async def test_a_tokenizer_that_the_gateway_has_not_is_the_servers_fault(bench: Bench, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").unlink()
    open_tokenizer.cache_clear()
    answer = await ask(bench, "embeddings", input="cat")
    assert (answer.status_code, answer.json()["error"]["type"]) == (503, "server_error")
    assert "Give a tokenizer.json that exists on this node" in answer.json()["error"]["message"]
    assert vectors(await ask(bench, "embeddings", input=[2, 5, 3])) == [[3.0, 10.0]]  # tokens need none


async def test_the_body_is_bounded_however_it_comes(bench: Bench) -> None:
    large = json.dumps({"model": "m", "input": "a" * (1 << 20)}).encode()

    async def parts() -> AsyncIterator[bytes]:
        yield large

    for content in (large, parts()):
        answer = await bench.client.post("/v1/embeddings", content=content)
        assert (answer.status_code, "1024 KiB" in answer.json()["error"]["message"]) == (413, True)


async def test_a_key_has_its_models_and_pays_for_the_tokens_of_texts(bench: Bench) -> None:
    key, digest = new_key()
    await bench.follow(PLAN, keys=[{"name": "a", "sha256": digest, "models": ["m"], "tokens_per_s": 10}])
    bench.client.headers["authorization"] = f"Bearer {key}"
    refused = await ask(bench, "score", text_1="a", text_2="a")
    assert (refused.status_code, "not for model 'r'" in refused.json()["error"]["message"]) == (403, True)
    assert (await ask(bench, "embeddings", input=["cat"] * 100)).status_code == 200
    refused = await ask(bench, "embeddings", input="cat")
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")


async def test_openais_own_client_gets_its_vectors(bench: Bench) -> None:
    openai = pytest.importorskip("openai")
    async with openai_client(f"http://127.0.0.1:{bench.port}/v1") as client:
        for encoding in ({}, {"encoding_format": "float"}):
            found = await client.embeddings.create(model="m", input=["the cat", "dog"], **encoding)
            assert [each.embedding for each in found.data] == [[4.0, 14.0], [3.0, 15.0]]
            assert found.usage.prompt_tokens == 7
        with pytest.raises(openai.BadRequestError, match="has 11 tokens"):
            await client.embeddings.create(model="m", input="a " * 9)
