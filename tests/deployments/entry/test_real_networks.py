"""The networks of examples/real behind a gateway, several sizes at once, against direct runs in ONNX Runtime and
transformers.

A request that ran alone gets the direct run's answer to the bit. One that shared a run may differ by what ONNX Runtime
rounds otherwise in a batch: at most `IN_A_BATCH` of the largest value. Skipped until `examples/real/install` has run.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tenuto.loadgen.senders.payloads import SizedBodies
from tenuto.placement import Plan, Workload
from tests.deployments.entry.test_bytes import Served
from tests.deployments.gpulet.test_streaming_gpulet import make_plan

EXAMPLE = Path(__file__).parents[3] / "examples" / "real"
LANGUAGE = EXAMPLE / "networks" / "smollm"
WORKLOAD = Workload.load(EXAMPLE / "workload.yaml")
IN_A_BATCH = 0.01
TYPES = {"float32": "FP32", "int32": "INT32", "int64": "INT64"}
Arrays = dict[str, "np.ndarray[Any, Any]"]

onnxruntime = pytest.importorskip("onnxruntime")
pytestmark = pytest.mark.skipif(not (EXAMPLE / "networks").exists(), reason="examples/real/install has not run")


def noise(dice: random.Random, *shape: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(dice.randrange(2**32)).standard_normal(shape, dtype=np.float32)


# A request of each network, with a batch of one.
REQUESTS: Mapping[str, Callable[[random.Random], Arrays]] = {
    "detect": lambda dice: {"x": noise(dice, 1, 3, 32 * dice.randint(1, 4), 32 * dice.randint(1, 4))},
    "recognise": lambda dice: {"x": noise(dice, 1, 3, 48, dice.choice((16, 61, 120, 320)))},
    "turned": lambda dice: {"x": noise(dice, 1, 3, 48, 192)},
    "magika": lambda dice: {"bytes": np.array([[dice.randrange(257) for _ in range(2048)]], np.int32)},
    "pitch": lambda dice: {"serving_default_input_2:0": noise(dice, 1, 43844, 1)},
    "voice": lambda dice: {
        "input": noise(dice, 1, dice.choice((288, 576))),
        "state": noise(dice, 2, 1, 128),
        "sr": np.array(16000, np.int64),
    },
}

# The sizes of a request of `tenuto bench`.
MOST = {"detect": {"height": 64, "width": 96}, "recognise": {"width": 100}, "voice": {"samples": 576}}


def document(arrays: Arrays) -> bytes:
    inputs = [
        {"name": name, "datatype": TYPES[array.dtype.name], "shape": list(array.shape), "data": array.ravel().tolist()}
        for name, array in arrays.items()
    ]
    return json.dumps({"inputs": inputs}).encode()


def difference(expected: np.ndarray[Any, Any], output: Mapping[str, Any]) -> float:
    """The largest difference, as a part of the largest value; shapes are equal."""
    assert output["shape"] == list(expected.shape)
    found = np.float32(output["data"]).reshape(expected.shape)
    return float(np.abs(found - expected).max() / np.abs(expected).max())


@pytest.mark.parametrize("name", REQUESTS)
async def test_each_answer_is_that_of_a_direct_run(name: str) -> None:
    spec, dice = WORKLOAD[name], random.Random(44)
    file = str(EXAMPLE / str(spec.source))
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    names = [each.name for each in session.get_outputs()]
    asked = [REQUESTS[name](dice) for _ in range(10)]
    expected = [dict(zip(names, session.run(names, arrays), strict=True)) for arrays in asked]
    served = Served()
    await served.start(make_plan("cpu", source=file, options=spec.options))

    async def ask(arrays: Arrays) -> dict[str, Any]:
        answer = await served.client.post("/v2/models/m/infer", content=document(arrays))
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    alone = [await ask(arrays) for arrays in asked[:4]]
    together = await asyncio.gather(*map(ask, asked))
    if name in MOST:
        metadata = (await served.client.get("/v2/models/m")).json()
        bodies = SizedBodies(metadata, MOST[name], np.random.default_rng(0), binary=False)
        answer = await served.client.post("/v2/models/m/infer", content=bodies.body(1, *MOST[name].values()).data)
        assert answer.status_code == 200, answer.text
    await served.close()
    worst = {True: 0.0, False: 0.0}
    for direct, answer in zip([*expected[:4], *expected], [*alone, *together], strict=True):
        is_alone = answer["parameters"]["batch_size"] == 1
        for output in answer["outputs"]:
            worst[is_alone] = max(worst[is_alone], difference(direct[output["name"]], output))
    print(f"{name}: alone {worst[True]:.2g}, in a batch {worst[False]:.2g}")
    assert worst[True] == 0.0
    assert worst[False] <= IN_A_BATCH


async def test_texts_of_several_lengths_get_the_embeddings_of_transformers() -> None:
    torch = pytest.importorskip("torch")
    from tenuto.profiles.networks.text_networks import prepare_transformers

    prepare_transformers()
    import transformers

    folder = str(EXAMPLE / "networks" / "sentences")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    network = transformers.AutoModel.from_pretrained(folder).eval()
    texts = [" ".join(["a word of", "many"] * times) for times in (1, 2, 5, 9, 3, 1)]
    expected = []
    for text in texts:
        tokens = tokenizer(text, return_tensors="pt")
        with torch.inference_mode():
            hidden = network(**tokens).last_hidden_state[0].mean(0)
        expected.append(torch.nn.functional.normalize(hidden, dim=0).numpy())
    served = Served()
    plan = make_plan("cpu", source=folder, options={"sequence_length": 64})
    await served.start(Plan.from_data(plan.to_data()))
    answer = await served.client.post("/v1/embeddings", json={"model": "m", "input": texts})
    await served.close()
    assert answer.status_code == 200, answer.text
    found = np.float32([each["embedding"] for each in answer.json()["data"]])
    worst = float(np.abs(found - np.array(expected)).max())
    print(f"sentences: {worst:.2g}")
    assert worst <= 1e-5


@pytest.mark.skipif(not LANGUAGE.exists(), reason="networks/smollm is not unpacked, see examples/real/README.md")
async def test_the_language_model_writes_what_transformers_writes() -> None:
    torch = pytest.importorskip("torch")
    from tenuto.profiles.networks.text_networks import prepare_transformers

    prepare_transformers()
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(LANGUAGE)
    network = transformers.AutoModelForCausalLM.from_pretrained(LANGUAGE).eval()

    def written(prompt: str) -> str:
        tokens = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)
        with torch.inference_mode():
            made = network.generate(**tokens, max_new_tokens=10, do_sample=False)
        text: str = tokenizer.decode(made[0, tokens["input_ids"].shape[1] :], skip_special_tokens=True)
        return text

    lengths = {"prompt_tokens": 20, "output_tokens": 10, "max_sequences": 2, "max_batch_tokens": 64}
    replica = {"name": "m", "batch_size": 2, "kv_tokens": 1024}
    data = make_plan("cpu", source=str(LANGUAGE)).to_data()
    data["gpulets"][0]["models"] = [replica]
    slo = {"ttft_ms": 60_000, "tpot_ms": 60_000}
    data["streaming"] = False
    data["models"] = [{"name": "m", "source": str(LANGUAGE), "rate_rps": 1, "slo": slo, "generates": lengths}]
    served = Served()
    await served.start(Plan.from_data(data))
    prompts = ["The capital of France is", "Two notes that are held together make", "The"]
    asked = {"model": "m", "max_tokens": 10, "temperature": 0}
    completed = await asyncio.gather(
        *(served.client.post("/v1/completions", json={**asked, "prompt": prompt}) for prompt in prompts)
    )
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    answer = (await served.client.post("/v1/chat/completions", json={**asked, "messages": messages})).json()
    await served.close()
    assert [each.json()["choices"][0]["text"] for each in completed] == [written(prompt) for prompt in prompts]
    chat = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert answer["choices"][0]["message"]["content"] == written(chat)
    assert "Paris" in answer["choices"][0]["message"]["content"]
