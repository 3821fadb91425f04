"""vLLM as the runtime of a model that generates, on a fake of its engine: no GPU has run it."""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path
from typing import Any

import pytest

from tenuto.deployments.gpulet.executors.torch_executor import TorchExecutor
from tenuto.deployments.serve.user_config import GeneratesEntry, MemberEntry, ProgramEntry
from tenuto.errors import EnvironmentFaultError, InvalidInputError
from tenuto.profiles.networks.generating import Ending, Generator, Sampling
from tenuto.profiles.networks.text_networks import prepare_transformers
from tests.instruments import fake_vllm
from tests.instruments.fake_vllm import ENGINES, written

pytest.importorskip("transformers")

BLOCKS = 12
END = 49


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The folder of a tiny model, beside a fake of vLLM."""
    prepare_transformers()
    import transformers

    fake_vllm.installed(monkeypatch)
    config = transformers.LlamaConfig(
        vocab_size=fake_vllm.VOCABULARY,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=150,
        eos_token_id=END,
        dtype="float32",
    )
    config.save_pretrained(tmp_path)
    return str(tmp_path)


def program(folder: str, **options: Any) -> ProgramEntry:
    generates = GeneratesEntry(kv_tokens=BLOCKS * 16, max_sequences=4, max_batch_tokens=32)
    member = MemberEntry(name="m", source=folder, options={"runtime": "vllm", **options})
    return ProgramEntry(name="m", batch_size=4, members=(member,), generates=generates)


@pytest.fixture
def model(folder: str) -> Generator:
    executor = TorchExecutor("cpu")
    executor.load(program(folder), ())
    assert executor.ways() == {"m": "vllm"}
    limits = executor.signature("m").generates
    assert limits is not None
    assert (limits.longest, limits.vocabulary) == (150, fake_vllm.VOCABULARY)
    return executor.generator("m")


def test_the_engine_runs_in_this_process_with_the_memory_of_the_plan(model: Generator) -> None:
    (engine,) = ENGINES
    assert os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert engine.args.kv_cache_memory_bytes == (BLOCKS + 1) * 16 * fake_vllm.FakeEngine.bytes_per_token
    assert (engine.args.block_size, engine.args.max_num_seqs, engine.args.max_num_batched_tokens) == (16, 4, 32)
    assert engine.args.max_model_len == 150
    assert model.free_blocks == BLOCKS


def test_steps_bring_what_the_engine_writes_however_they_are_chosen(model: Generator) -> None:
    """Chunks as a scheduler chooses them: also decoding that waits for a prompt, which the engine does not wait for."""
    draws = random.Random(4)
    asked = {n: ([draws.randrange(48) for _ in range(draws.randint(1, 60))], draws.randint(1, 30)) for n in range(4)}
    unread = {n: len(prompt) for n, (prompt, _) in asked.items()}
    made: dict[int, list[int]] = {n: [] for n in asked}
    ended: dict[int, Ending] = {}
    for number, (prompt, most) in asked.items():
        model.add(number, prompt, Sampling(most))
    while len(ended) < len(asked):
        chunks = []
        for number in asked.keys() - ended.keys():
            if draws.random() < 0.6:
                chunks.append((number, min(unread[number], draws.randint(1, 32)) or 1))
        if not chunks:
            continue
        ran = model.step(chunks)
        for number, tokens in chunks:
            was_unread, unread[number] = unread[number], max(0, unread[number] - tokens)
            has_read = not was_unread or not unread[number]
            assert ((number in ran.tokens) or (number in ran.ended)) == has_read
        for number, token in ran.tokens.items():
            made[number].append(token)
        ended |= ran.ended
    for number, (prompt, most) in asked.items():
        assert made[number] == written(prompt, most, (END,))
        assert (ended[number] is Ending.LENGTH) == (len(made[number]) == most)
    assert model.free_blocks == BLOCKS
    assert ENGINES[0].open == {}


def test_a_sequence_that_leaves_or_loses_its_memory_is_taken_back(model: Generator) -> None:
    prompt = [3] * 40
    for number in range(2):
        model.add(number, prompt, Sampling(20))
        assert model.step([(number, 32)]).tokens == {}
        assert list(model.step([(number, 8)]).tokens) == [number]
    assert model.free_blocks == BLOCKS - 6
    model.cancel(0)
    assert model.free_blocks == BLOCKS - 3
    tokens = [written(prompt, 20, (END,))[0]]
    model.preempt(1)
    assert (model.free_blocks, ENGINES[0].open) == (BLOCKS, {})
    model.step([(1, 32)])
    tokens += model.step([(1, 9)]).tokens.values()
    while not (ran := model.step([(1, 1)])).ended:
        tokens += ran.tokens.values()
    tokens += ran.tokens.values()
    assert tokens == written(prompt, 20, (END,))


def test_what_was_written_elsewhere_is_read_and_counted(model: Generator) -> None:
    whole = written([5, 6], 10, (END,))
    model.add(0, [5, 6], Sampling(10), whole[:4])
    tokens = list(model.step([(0, 6)]).tokens.values())
    while len(tokens) < len(whole) - 4:
        ran = model.step([(0, 1)])
        tokens += ran.tokens.values()
    assert tokens == whole[4:]


def test_a_step_that_fails_costs_its_sequences_and_not_the_engine(model: Generator) -> None:
    model.add(0, [1, 2], Sampling(5))
    ENGINES[0].fails = RuntimeError("out of luck")
    with pytest.raises(RuntimeError, match="out of luck"):
        model.step([(0, 2)])
    model.cancel(0)
    assert ENGINES[0].aborted == ["1"]
    model.add(1, [1, 2], Sampling(5))
    assert list(model.step([(1, 2)]).tokens) == [1]


def run_alone(model: Generator, prompt: list[int], sampling: Sampling, chunk: int) -> tuple[list[int], list[Any], Any]:
    """Return the tokens of one sequence, its scores, and why it ended."""
    model.add(7, prompt, sampling)
    tokens, scores, left = [], list[Any](), len(prompt)
    while True:
        taken = min(chunk, left) or 1
        ran = model.step([(7, taken)])
        left -= min(taken, left)
        tokens += ran.tokens.values()
        scores += ran.scores.get(7, [])
        if ran.ended or ran.failed:
            assert model.free_blocks == BLOCKS
            return tokens, scores, ran.ended.get(7) or ran.failed[7]


@pytest.mark.parametrize("chunk", [2, 32])
def test_scores_are_handed_on_with_their_tokens(model: Generator, chunk: int) -> None:
    sampling = Sampling(3, logprobs=2, prompt_logprobs=True)
    tokens, scores, _ = run_alone(model, [5, 6, 0, 1], sampling, chunk)
    assert tokens == written([5, 6, 0, 1], 3)
    expected = [-0.1 * (token + 1) for token in [6, 0, 1, *tokens]]
    assert [each.logprob for each in scores] == expected
    assert {tuple(each.likeliest) for each in scores} == {((0, -0.1), (1, -0.2))}
    assert run_alone(model, [5], Sampling(2), chunk)[1] == []


def test_what_shapes_a_text_is_vllms(model: Generator) -> None:
    likely = ((END, 100.0),)
    assert run_alone(model, [1], Sampling(5, logit_bias=likely), 8) == ([], [], Ending.STOP)
    tokens, _, ending = run_alone(model, [1], Sampling(5, min_tokens=2, logit_bias=likely), 8)
    assert (len(tokens), ending) == (2, Ending.STOP)
    found = run_alone(model, [1], Sampling(5, ignores_end=True, logit_bias=likely), 8)
    assert found == ([END] * 5, [], Ending.LENGTH)


def test_a_schema_is_vllms_where_it_has_a_tokenizer(folder: str, tmp_path: Path) -> None:
    tokenizers, transformers = pytest.importorskip("tokenizers"), pytest.importorskip("transformers")
    schema = Sampling(4, schema='{"type":"object"}')
    executor = TorchExecutor("cpu")
    executor.load(program(folder), ())
    limits = executor.signature("m").generates
    assert limits is not None
    assert "tokenizer" in limits.refuses["response_format"]
    with pytest.raises(ValueError, match="tokenizer"):
        executor.generator("m").add(0, [1], schema)
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1}, unk_token="b"))
    transformers.PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(tmp_path)
    executor.load(program(folder), ())
    limits, engine = executor.signature("m").generates, ENGINES[-1]
    assert limits is not None
    assert (limits.refuses, engine.args.tokenizer, engine.args.skip_tokenizer_init) == ({}, folder, False)
    assert engine.args.structured_outputs_config.backend == "guidance"
    model = executor.generator("m")
    model.add(0, [1, 2], schema)
    model.step([(0, 1)])
    (sent,) = engine.open.values()
    assert sent.params.structured_outputs.json == schema.schema
    model.step([(0, 1)])
    model.preempt(0)  # vLLM would begin the schema anew
    assert "amid" in model.step([(0, 3)]).failed[0]
    tokens, _, why = run_alone(model, [1], schema._replace(schema='{"not": {}}'), 8)
    assert (tokens, "Unimplemented" in why) == ([], True)
    assert run_alone(model, [1], Sampling(3), 8)[0] == written([1], 3)


def test_what_vllm_cannot_run_is_refused_with_the_cure(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    executor = TorchExecutor("cpu")
    with pytest.raises(InvalidInputError, match="folder of weights"):
        executor.load(program("transformers/llama"), ())
    with pytest.raises(InvalidInputError, match="vllm or torch"):
        executor.load(program(folder, runtime="onnxruntime"), ())
    monkeypatch.setattr(fake_vllm.FakeEngine, "bytes_per_token", 10_000)
    with pytest.raises(EnvironmentFaultError, match="and the plan needs 12"):
        executor.load(program(folder), ())


def test_without_vllm_the_message_says_how_to_get_it(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(EnvironmentFaultError, match=r"pip install .tenuto\[vllm\]"):
        TorchExecutor("cpu").load(program(folder), ())
