"""Texts in, vectors and scores out, at a gateway whose gpu-let computes simple ones."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest

from tenuto.deployments.wire.tensors import Blocks
from tenuto.profiles.networks.catalogue import ModelSignature, TensorSignature, TextInput, text_signature
from tests.deployments.entry.test_gateway import Bench
from tests.instruments.encoders import WORDS, save_tokenizer
from tests.instruments.fake_gpulet import FakeGpulet, make_plan
from tests.instruments.live import PATIENCE_S


def encoder(text: TextInput) -> ModelSignature:
    plain = text_signature(text, 1)
    outputs = (TensorSignature("embedding", "float32", (2,)),)
    return ModelSignature("text", plain.inputs, outputs, text=text, answers="embedding")


def ranker(text: TextInput) -> ModelSignature:
    plain = text_signature(text, 1, has_pairs=True)
    return ModelSignature("text", plain.inputs, plain.outputs, text=text, answers="logit")


class TextGpulet(FakeGpulet):
    """Model m makes the vector (number of tokens, sum of their ids) of a text, and r the logit of a pair: the number of
    tokens of its second text. A text with the word `away` has no numbers."""

    def __init__(self, folder: Path) -> None:
        super().__init__("a", ("m", "r"))
        save_tokenizer(folder)
        self.text = TextInput(8, len(WORDS), 0, tokenizer_path=str(folder / "tokenizer.json"), truncate=False)

    def signatures(self) -> dict[str, ModelSignature]:
        return {"m": encoder(self.text), "r": ranker(self.text)}

    def compute(self, model: str, blocks: Blocks) -> dict[str, np.ndarray]:
        ids, mask = np.concatenate(blocks["input_ids"]), np.concatenate(blocks["attention_mask"])
        broken = np.where((ids == WORDS.index("away")).any(axis=1), np.nan, 0.0)
        if model == "r":
            return {"logits": (np.concatenate(blocks["token_type_ids"]).sum(axis=1) + broken)[:, None]}
        return {"embedding": np.stack([mask.sum(axis=1), ids.sum(axis=1) + broken], axis=1)}


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    made = Bench()
    made.gpulets["a"] = TextGpulet(tmp_path)
    for gpulet in made.gpulets.values():
        await gpulet.start()
    await made.follow(make_plan(("a", ("m", "r")), ("b", ("n",)), slo_ms=60_000.0))
    async with asyncio.timeout(PATIENCE_S):
        while (await made.client.get("/v2/health/ready")).status_code != 200:
            await asyncio.sleep(0.005)
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
