"""A causal language model that runs step by step: its tokens are those of `generate()`, and its blocks come back."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tenuto.errors import InvalidInputError
from tenuto.profiles.networks.generating import Ending, Sampling, StepRan, blocks_of, longest_sequence

pytest.importorskip("transformers")
import torch

from tenuto.profiles.networks.language_model import LanguageModel, load_language_model

TINY = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "eos_token_id": None,
    "bos_token_id": None,
}
PROMPTS = [[5, 7, 9, 200, 3], [8] * 40 + [1, 2, 3], [250, 251]]
BLOCKS = 24


def network(**config: Any) -> Any:
    return load_language_model("transformers/llama", seed=3, config={**TINY, **config})


def generated(network: Any, prompt: list[int], tokens: int) -> list[int]:
    """Return what transformers' own `generate` writes."""
    with torch.no_grad():
        asked = torch.tensor([prompt])
        out = network.generate(
            asked, attention_mask=torch.ones_like(asked), max_new_tokens=tokens, do_sample=False, pad_token_id=0
        )
    found: list[int] = out[0, len(prompt) :].tolist()
    return found


@pytest.fixture
def model() -> Iterator[LanguageModel]:
    made = LanguageModel(network(), device="cpu", blocks=BLOCKS, block_tokens=16, max_batch_tokens=64)
    yield made
    made.close()


def run(model: LanguageModel, prompts: dict[int, list[int]], chunk: int) -> tuple[dict[int, list[int]], dict[int, Any]]:
    """Run added sequences to their ends, prompts in chunks; return their tokens and why they ended."""
    left, tokens = {key: len(prompt) for key, prompt in prompts.items()}, {key: [] for key in prompts}
    ended: dict[int, Any] = {}
    while left:
        chunks = [(key, min(chunk, rest) or 1) for key, rest in left.items()]
        ran = model.step(chunks)
        assert isinstance(ran, StepRan)
        for key, taken in chunks:
            left[key] = max(0, left[key] - taken)
        for key, token in ran.tokens.items():
            tokens[key].append(token)
        for key, why in ran.ended.items():
            ended[key] = why
            del left[key]
    return tokens, ended


def test_tokens_are_those_of_generate(model: LanguageModel) -> None:
    own = network()
    prompts = dict(enumerate(PROMPTS))
    for key, prompt in prompts.items():
        model.add(key, prompt, Sampling(20))
    tokens, ended = run(model, prompts, chunk=10)
    assert tokens == {key: generated(own, prompt, 20) for key, prompt in prompts.items()}
    assert ended == dict.fromkeys(prompts, Ending.LENGTH)
    assert model.free_blocks == BLOCKS


def test_an_end_token_stops_and_is_not_written() -> None:
    own = network()
    written = generated(own, PROMPTS[0], 20)
    stop = written[5]
    model = LanguageModel(network(eos_token_id=stop), device="cpu", blocks=8, block_tokens=16, max_batch_tokens=64)
    model.add(0, PROMPTS[0], Sampling(20))
    tokens, ended = run(model, {0: PROMPTS[0]}, chunk=64)
    assert tokens[0] == written[: written.index(stop)]
    assert ended == {0: Ending.STOP}


def test_a_cancelled_sequence_frees_its_blocks_at_once(model: LanguageModel) -> None:
    model.add(7, PROMPTS[1], Sampling(200))
    model.step([(7, 43)])
    assert BLOCKS - model.free_blocks == blocks_of(43, 16) == 3
    model.cancel(7)
    assert model.free_blocks == BLOCKS
    model.cancel(7)  # has ended


@pytest.mark.parametrize("sampling", [Sampling(12), Sampling(12, temperature=1.0, top_p=0.9, seed=5)])
def test_a_preempted_sequence_frees_its_blocks_and_goes_on_as_if_it_had_not_been(
    model: LanguageModel, sampling: Sampling
) -> None:
    model.add(0, PROMPTS[0], sampling)
    undisturbed, _ = run(model, {0: PROMPTS[0]}, chunk=64)
    model.add(1, PROMPTS[0], sampling)
    tokens = [model.step(chunk).tokens[1] for chunk in ([(1, 5)], [(1, 1)], [(1, 1)])]
    model.preempt(1)
    assert model.free_blocks == BLOCKS
    rest, ended = run(model, {1: PROMPTS[0] + tokens}, chunk=6)
    assert tokens + rest[1] == undisturbed[0]
    assert ended == {1: Ending.LENGTH}


def test_draws_depend_on_the_seed_and_not_on_neighbours(model: LanguageModel) -> None:
    drawn = Sampling(12, temperature=1.0, top_p=0.9, seed=5)
    model.add(0, PROMPTS[0], drawn)
    alone, _ = run(model, {0: PROMPTS[0]}, chunk=64)
    model.add(1, PROMPTS[1], Sampling(12))
    model.add(2, PROMPTS[0], drawn)
    model.add(3, PROMPTS[0], drawn._replace(seed=6))
    together, _ = run(model, {1: PROMPTS[1], 2: PROMPTS[0], 3: PROMPTS[0]}, chunk=9)
    assert together[2] == alone[0]
    assert together[3] != alone[0]


def test_hardly_any_temperature_or_probability_is_greedy(model: LanguageModel) -> None:
    written = generated(network(), PROMPTS[0], 8)
    for key, sampling in enumerate((Sampling(8, 1e-4, 1.0, 1), Sampling(8, 5.0, 1e-9, 1))):
        model.add(key, PROMPTS[0], sampling)
    tokens, _ = run(model, {0: PROMPTS[0], 1: PROMPTS[0]}, chunk=64)
    assert tokens == {0: written, 1: written}


def test_after_a_failed_step_others_go_on(model: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    written = generated(network(), PROMPTS[0], 6)
    model.add(0, PROMPTS[0], Sampling(6))
    model.step([(0, 5)])
    model.add(1, PROMPTS[1], Sampling(6))
    with monkeypatch.context() as broken:
        broken.setattr(model.network, "forward", lambda **_: (_ for _ in ()).throw(RuntimeError("out of memory")))
        with pytest.raises(RuntimeError):
            model.step([(1, 43)])
    model.cancel(1)
    tokens, _ = run(model, {0: []}, chunk=1)
    assert written[1:] == tokens[0]
    assert model.free_blocks == BLOCKS


def test_a_step_beyond_the_memory_fails_and_is_survived(model: LanguageModel) -> None:
    model.add(0, [1] * 380, Sampling(6))
    model.add(1, [2] * 20, Sampling(6))
    for _ in range(6):
        model.step([(0, 60)])
    with pytest.raises(MemoryError):
        model.step([(0, 20), (1, 20)])
    model.cancel(0)
    model.cancel(1)
    assert model.free_blocks == BLOCKS


def test_a_saved_model_is_loaded_and_one_without_a_head_is_refused(tmp_path: Path) -> None:
    own = network()
    own.save_pretrained(tmp_path / "whole")
    loaded = load_language_model("any", weights_path=str(tmp_path / "whole"))
    assert generated(loaded, PROMPTS[2], 5) == generated(own, PROMPTS[2], 5)
    assert longest_sequence(loaded.config) == 512
    own.model.save_pretrained(tmp_path / "headless")
    with pytest.raises(InvalidInputError, match="head"):
        load_language_model(str(tmp_path / "headless"))


@pytest.mark.parametrize("source", ["resnet50", "transformers/no_such_type", "transformers/vit"])
def test_what_writes_no_tokens_is_refused(source: str) -> None:
    with pytest.raises(InvalidInputError, match=r"language|folder"):
        load_language_model(source)


def test_a_temperature_near_zero_is_greedy(model: LanguageModel) -> None:
    written = generated(network(), PROMPTS[0], 6)
    for temperature, top_p in ((5e-324, 1.0), (1e-40, 0.5), (1e-30, 1.0), (1.0, 5e-324)):
        model.add(0, PROMPTS[0], Sampling(6, temperature, top_p, 7))
        tokens, _ = run(model, {0: PROMPTS[0]}, chunk=16)
        assert tokens[0] == written
