"""What sequences ask of their tokens beside temperature and top_p, held to the model's own scores."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tenuto.errors import EnvironmentFaultError, InvalidInputError
from tenuto.profiles.networks.generating import Ending, Sampling, TokenScores

pytest.importorskip("transformers")
import torch

from tenuto.profiles.networks import language_model
from tenuto.profiles.networks.grammars import Grammars
from tenuto.profiles.networks.language_model import LanguageModel, load_language_model
from tenuto.profiles.networks.shaping import Shaping
from tests.profiles.networks.test_language_model import PROMPTS, TINY, generated

END = 7  # no token of texts: to the tokenizer of bytes it is the end, and none of JSON's bytes
BLOCKS = 40


def network(**config: Any) -> Any:
    return load_language_model("transformers/llama", seed=3, config={**TINY, **config})


@pytest.fixture(scope="module")
def model() -> Iterator[LanguageModel]:
    """A tiny model of bytes, whose text ends with token 7."""
    made = LanguageModel(
        network(eos_token_id=END), device="cpu", blocks=BLOCKS, block_tokens=16, max_batch_tokens=64, tokenizer="bytes"
    )
    yield made
    made.close()


class Written:
    """What came of one sequence."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.scores: list[TokenScores] = []
        self.ending: Ending | None = None
        self.failed = ""


def run(model: LanguageModel, asked: dict[int, tuple[list[int], Sampling]], chunk: int = 64) -> dict[int, Written]:
    """Add sequences, and run them to their ends."""
    for key, (prompt, sampling) in asked.items():
        model.add(key, prompt, sampling)
    left, found = {key: len(prompt) for key, (prompt, _) in asked.items()}, {key: Written() for key in asked}
    while left:
        budget, chunks = 64, []
        for key, rest in left.items():
            taken = min(chunk, rest or 1, budget)
            budget -= taken
            if taken:
                chunks.append((key, taken))
        ran = model.step(chunks)
        for key, taken in chunks:
            left[key] = max(0, left[key] - taken)
        for key, token in ran.tokens.items():
            found[key].tokens.append(token)
        for key, scores in ran.scores.items():
            found[key].scores += scores
        for key, why in ran.ended.items():
            found[key].ending = why
            del left[key]
        for key, reason in ran.failed.items():
            found[key].failed = reason
            left.pop(key, None)
    assert model.free_blocks == BLOCKS
    return found


def logprobs(network: Any, tokens: list[int]) -> torch.Tensor:
    """Return the log probabilities that the model gives after each of these tokens, directly."""
    with torch.no_grad():
        found: torch.Tensor = torch.log_softmax(network(torch.tensor([tokens])).logits[0].float(), dim=-1)
    return found


def check_scores(own: torch.Tensor, scores: list[TokenScores], tokens: list[int], likeliest: int) -> None:
    """Check scores against those of the model itself, by place."""
    assert len(scores) == len(tokens)
    for place, (told, token) in enumerate(zip(scores, tokens, strict=True)):
        assert told.logprob == pytest.approx(float(own[place][token]), abs=1e-4)
        values = [logprob for _, logprob in told.likeliest]
        assert values == sorted(values, reverse=True)
        assert values == pytest.approx(own[place].topk(likeliest).values.tolist(), abs=1e-4)
        assert all(own[place][name] == pytest.approx(logprob, abs=1e-4) for name, logprob in told.likeliest)
        assert sum(map(math.exp, values)) <= 1.0 + 1e-5


@pytest.mark.parametrize("chunk", [64, 7])
def test_scores_are_the_models_own_whatever_shapes_the_tokens(model: LanguageModel, chunk: int) -> None:
    own = network(eos_token_id=END)
    bias = ((5, 50.0), (9, -100.0))
    asked = {
        0: (PROMPTS[0], Sampling(6, logprobs=5, prompt_logprobs=True, ignores_end=True)),
        1: (PROMPTS[1], Sampling(6, 1.0, 0.9, 3, logprobs=0, prompt_logprobs=True, ignores_end=True)),
        2: (PROMPTS[2], Sampling(6, 1.5, 1.0, 4, logprobs=300, logit_bias=bias, ignores_end=True)),
        3: (PROMPTS[0], Sampling(6)),
        4: (PROMPTS[0][:1], Sampling(2, logprobs=1, prompt_logprobs=True, ignores_end=True)),
    }
    found = run(model, asked, chunk)
    for key, (prompt, sampling) in asked.items():
        each = found[key]
        if sampling.logprobs is None:
            assert each.scores == []
            continue
        scored = [*(prompt[1:] if sampling.prompt_logprobs else ()), *each.tokens]
        table = logprobs(own, prompt + each.tokens)[-len(scored) - 1 : -1]
        check_scores(table, each.scores, scored, sampling.logprobs)


def test_a_sequence_that_loses_its_memory_or_goes_on_elsewhere_tells_scores_once(model: LanguageModel) -> None:
    sampling = Sampling(6, 1.0, 1.0, 3, logprobs=2, prompt_logprobs=True, ignores_end=True)
    whole = run(model, {0: (PROMPTS[1], sampling)})[0]
    model.add(1, PROMPTS[1], sampling)
    model.step([(1, 20)])
    model.preempt(1)  # amid its prompt
    model.step([(1, 43)])
    model.cancel(1)
    model.add(2, PROMPTS[1], sampling)
    scores = model.step([(2, 43)]).scores[2]
    scores += model.step([(2, 1)]).scores[2]
    model.preempt(2)
    scores += model.step([(2, 45)]).scores[2]
    model.cancel(2)
    assert len(scores) == 42 + 3
    assert [each.logprob for each in scores] == pytest.approx([each.logprob for each in whole.scores[:45]], abs=1e-4)
    model.add(3, PROMPTS[1], sampling, whole.tokens[:3])
    rest = model.step([(3, 46)])
    assert (rest.tokens[3], len(rest.scores[3])) == (whole.tokens[3], 1)
    model.cancel(3)


def test_without_memory_for_scores_of_a_prompt_only_its_sequence_fails(
    model: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def scores(*_: Any) -> None:
        raise MemoryError("too little")

    monkeypatch.setattr(language_model, "scores_of", scores)
    asked = {0: (PROMPTS[0], Sampling(4, logprobs=1, prompt_logprobs=True)), 1: (PROMPTS[1], Sampling(4))}
    found = run(model, asked)
    assert "not enough memory" in found[0].failed
    assert found[1].tokens == generated(network(), PROMPTS[1], 4)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    banned=st.sets(st.integers(0, 299), max_size=290), temperature=st.sampled_from([0.0, 1.0, 2.0]), seed=st.integers(0)
)
def test_a_bias_forbids_and_forces(model: LanguageModel, banned: set[int], temperature: float, seed: int) -> None:
    forced = min(set(range(300)) - banned - {END})
    bans = tuple((token, -100.0) for token in banned)
    found = run(
        model,
        {
            0: (PROMPTS[0], Sampling(4, temperature, 1.0, seed % 2**63, ignores_end=True, logit_bias=bans)),
            1: (PROMPTS[0], Sampling(4, temperature, 1.0, seed % 2**63, logit_bias=((forced, 100.0),))),
        },
    )
    assert not banned & set(found[0].tokens)
    assert found[1].tokens == [forced] * 4


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(fewest=st.integers(0, 12), seed=st.integers(0, 2**63 - 1))
def test_the_end_waits_for_the_fewest_tokens_or_is_a_token_as_any_other(
    model: LanguageModel, fewest: int, seed: int
) -> None:
    likely = ((END, 100.0),)
    found = run(
        model,
        {
            0: (PROMPTS[0], Sampling(12, 1.0, 1.0, seed, min_tokens=fewest, logit_bias=likely)),
            1: (PROMPTS[0], Sampling(12, 1.0, 1.0, seed, ignores_end=True, logit_bias=likely)),
        },
    )
    assert (len(found[0].tokens), END in found[0].tokens) == (fewest, False)
    assert found[0].ending is (Ending.STOP if fewest < 12 else Ending.LENGTH)
    assert (found[1].tokens, found[1].ending) == ([END] * 12, Ending.LENGTH)


# Schemas that end: what a model writes that nobody trained is long.
ENDING = st.deferred(
    lambda: st.one_of(
        st.just({"type": "boolean"}),
        st.just({"type": "null"}),
        st.builds(lambda low, size: {"type": "integer", "minimum": low, "maximum": low + size}, INTS, SIZES),
        st.builds(lambda size: {"type": "string", "maxLength": size}, SIZES),
        st.just({"type": "string", "pattern": "^[a-c]{1,3}$"}),
        st.lists(st.sampled_from([None, True, 3, "x", [1], {"a": "é"}]), min_size=1, max_size=3).map(
            lambda values: {"enum": values}
        ),
        st.builds(lambda item, size: {"type": "array", "items": item, "maxItems": size}, ENDING, SIZES),
        st.builds(lambda these: {"anyOf": these}, st.lists(ENDING, min_size=1, max_size=3)),
        st.builds(
            lambda these, needed: {
                "type": "object",
                "properties": these,
                "required": [name for name in these if name in needed],
                "additionalProperties": False,
            },
            st.dictionaries(st.sampled_from(["a", "b", "né"]), ENDING, max_size=3),
            st.sets(st.sampled_from(["a", "b", "né"])),
        ),
    )
)
INTS, SIZES = st.integers(-50, 50), st.integers(0, 4)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=settings.default.max_examples // 3)
@given(schemas=st.lists(ENDING, min_size=1, max_size=6), seed=st.integers(0, 2**62), chance=st.randoms())
def test_a_text_by_a_schema_is_json_that_keeps_it_or_is_cut_by_its_length(
    model: LanguageModel, schemas: list[Any], seed: int, chance: Any
) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    pytest.importorskip("llguidance")
    # Without blanks, of which a model that nobody trained writes many.
    bias = tuple((blank, -100.0) for blank in b" \t\r\n")
    asked = {
        key: (
            PROMPTS[0],
            Sampling(60, chance.choice([0.0, 1.0, 2.0]), 1.0, seed + key, logit_bias=bias, schema=json.dumps(schema)),
        )
        for key, schema in enumerate(schemas)
    }
    found = run(model, {**asked, 9: (PROMPTS[0], Sampling(3, ignores_end=True))})
    assert found[9].tokens == generated(network(), PROMPTS[0], 3)
    for key, schema in enumerate(schemas):
        each = found[key]
        assert (each.failed, len(each.tokens) == 60 or each.ending is Ending.STOP) == ("", True)
        if each.ending is Ending.STOP:
            jsonschema.validate(json.loads(bytes(token % 256 for token in each.tokens)), schema)


def test_a_text_by_a_schema_goes_on_elsewhere(model: LanguageModel) -> None:
    pytest.importorskip("llguidance")
    sampling = Sampling(60, 1.0, 1.0, 5, schema='{"type": "array", "items": {"type": "integer"}, "minItems": 9}')
    whole = run(model, {0: (PROMPTS[0], sampling)})[0].tokens
    model.add(1, PROMPTS[0], sampling, whole[:10])
    tokens = [model.step([(1, len(PROMPTS[0]) + 10)]).tokens[1]]
    model.preempt(1)
    tokens.append(model.step([(1, len(PROMPTS[0]) + 11)]).tokens[1])
    model.cancel(1)
    assert whole[:10] + tokens == whole[:12]


def test_a_schema_that_costs_too_much_fails_its_sequence_alone(model: LanguageModel) -> None:
    pytest.importorskip("llguidance")
    hard = '{"allOf": [{"type": "string", "pattern": ".*a.{20}$"}, {"pattern": ".*b.{19}$"}, {"pattern": ".*c.{9}$"}]}'
    asked = {0: (PROMPTS[0], Sampling(40, schema=hard)), 1: (PROMPTS[0], Sampling(40, ignores_end=True))}
    found = run(model, asked)
    assert found[0].failed or found[0].ending
    assert len(found[1].tokens) == 40


def test_without_the_package_or_a_tokenizer_a_schema_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: Any) -> None:
        raise EnvironmentFaultError("needs the package 'llguidance'")

    monkeypatch.setattr(language_model, "Grammars", missing)
    for tokenizer, says in (("bytes", "'llguidance'"), (None, "options.tokenizer")):
        made = LanguageModel(
            network(), device="cpu", blocks=4, block_tokens=16, max_batch_tokens=64, tokenizer=tokenizer
        )
        assert says in made.refuses["response_format"]
        with pytest.raises(ValueError, match=says):
            made.add(0, [1], Sampling(3, schema="{}"))
        made.close()


def test_a_tokenizer_is_read_or_refused_with_what_is_to_be_changed(tmp_path: Path) -> None:
    pytest.importorskip("llguidance")
    tokenizers = pytest.importorskip("tokenizers")
    made, place = tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0}, [])), tmp_path / "tokenizer.json"
    with pytest.raises(InvalidInputError, match="exists on the gpu-let's node"):
        Grammars(str(place), 1, [0])
    made.decoder = tokenizers.decoders.Metaspace()
    made.save(str(place))
    with pytest.raises(InvalidInputError, match=r"llguidance knows .*Metaspace.* whose decoder is a ByteLevel"):
        Grammars(str(place), 1, [0])
    for decoder in (
        tokenizers.decoders.ByteLevel(),
        tokenizers.decoders.Sequence([tokenizers.decoders.ByteFallback(), tokenizers.decoders.Fuse()]),
    ):
        made.decoder = decoder
        made.save(str(place))
        Grammars(str(place), 1, [0]).close()


@pytest.mark.parametrize("end", ["\n", " ", "~"])
def test_an_end_that_is_also_a_text_ends_no_schema_early(end: str, tmp_path: Path) -> None:
    pytest.importorskip("llguidance")
    tokenizers = pytest.importorskip("tokenizers")
    letters = ["\n", *map(chr, range(32, 127))]
    made = tokenizers.Tokenizer(tokenizers.models.BPE({each: n for n, each in enumerate(letters)}, []))
    made.decoder = tokenizers.decoders.Sequence([tokenizers.decoders.ByteFallback(), tokenizers.decoders.Fuse()])
    made.save(str(tmp_path / "tokenizer.json"))
    properties = {"a": {"type": "boolean"}}
    schema = {"type": "object", "properties": properties, "required": ["a"], "additionalProperties": False}
    grammars, drawn = Grammars(str(tmp_path), len(letters), [letters.index(end)]), random.Random(0)
    for _ in range(20):
        grammar, written = grammars.begin(json.dumps(schema)), ""
        shaping = Shaping(Sampling(256, schema=json.dumps(schema)), grammars.ends, grammar)
        while not grammar.is_complete:
            may_come = torch.isfinite(shaping.shaped(torch.zeros(len(letters)), len(written))).nonzero()[:, 0].tolist()
            token = drawn.choice(may_come)
            if token in shaping.ends:
                break
            written += letters[token]
            grammar.take(token)
        assert isinstance(json.loads(written)["a"], bool)
    grammars.close()
