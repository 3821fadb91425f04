"""A small sentence encoder with real weights behind a gateway: its vectors over HTTP are those of the network."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from tenuto.profiles.networks.models import build
from tests.deployments.entry.test_bytes import Served
from tests.deployments.gpulet.test_streaming_gpulet import make_plan
from tests.instruments.encoders import WORDS, save_encoder

TEXTS = ["the cat sat on a mat", "dog", "a dog ran far", "far away"]


@pytest.mark.parametrize("is_beside", [True, False], ids=["beside", "elsewhere"])
@pytest.mark.parametrize("options", [{}, {"sequence_length": 9}], ids=["own lengths", "one length"])
async def test_vectors_over_http_are_those_of_the_network(
    tmp_path: Path, options: dict[str, int], *, is_beside: bool
) -> None:
    folder = save_encoder(tmp_path)
    served = Served()
    await served.start(make_plan("cpu", source=folder, options=options), is_beside=is_beside)
    answer = await served.client.post("/v1/embeddings", json={"model": "m", "input": TEXTS})
    assert answer.status_code == 200, answer.text
    long = await served.client.post("/v1/embeddings", json={"model": "m", "input": [*TEXTS, "cat " * 30]})
    assert (long.status_code, long.json()["error"]["param"]) == (400, "input[4]")
    await served.close()
    module = build(folder).module
    for text, each in zip(TEXTS, answer.json()["data"], strict=True):
        ids = torch.tensor([[2, *(WORDS.index(word) for word in text.split()), 3]])
        with torch.inference_mode():
            alone = module(ids, torch.ones_like(ids))[0]
        np.testing.assert_allclose(each["embedding"], alone, atol=2e-6)
