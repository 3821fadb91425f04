"""Tools in chats: what a model is told of them, and its calls in whole and streamed answers."""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tenuto.deployments.entry.http.exchange import HttpError
from tenuto.deployments.entry.protocols.openai import read_generation
from tenuto.deployments.entry.protocols.openai_bodies import ChatBody, read_body
from tenuto.deployments.entry.protocols.texts import ByteTokenizer, FileTokenizer
from tenuto.errors import InvalidInputError
from tenuto.placement import Plan
from tenuto.profiles.generation import StepCost
from tenuto.profiles.networks.catalogue import GenerationLimits
from tenuto.profiles.networks.generating import Ending, Generator, StepRan
from tests.deployments.entry import test_generation
from tests.deployments.entry.test_generation import SLO, Bench
from tests.instruments.asking import openai_client
from tests.instruments.chat_templates import WHY_NONE, chat_templates, response_template
from tests.instruments.forking import ROOT

tokenizers = pytest.importorskip("tokenizers")
from transformers import PreTrainedTokenizerFast  # noqa: E402  # after the skip

if not chat_templates():
    pytest.skip(WHY_NONE, allow_module_level=True)
ANSWERS = {
    "qwen3": response_template("qwen3"),
    "llama3_1": response_template("llama3"),
    "gptoss": response_template("gptoss"),
}
ENDS = {"qwen3": "<|im_end|>", "llama3_1": "<|eot_id|>", "gptoss": "<|return|>"}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
TOOL = {"type": "function", "function": {"name": "weather", "description": "The weather.", "parameters": SCHEMA}}
LIMITS = GenerationLimits(4000, 256, "the model's positions")
STEPS = StepCost.line(1.0, 0.0, 0.0, 0.0, 0.0)
USER = {"role": "user", "content": "Will it rain?"}


def save(folder: Path, name: str) -> Path:
    """Write a tokenizer whose tokens are bytes, with a chat template and a response template."""
    bytes_to_letters = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    model = tokenizers.models.BPE({letter: n for n, letter in enumerate(sorted(bytes_to_letters))}, [])
    made = tokenizers.Tokenizer(model)
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(chat_templates()[name])
    # As text, the token that ends answers is bytes here; no answer has it.
    settings = {"response_template": ANSWERS[name], "bos_token": "", "eos_token": ENDS[name]}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return {name: str(save(tmp_path_factory.mktemp(name), name)) for name in ENDS}


LETTERS = st.text(st.sampled_from("ab €\n\"'{}\\<"), max_size=12)
ARGUMENTS = st.dictionaries(
    st.sampled_from(["city", "days", "x y"]),
    st.one_of(LETTERS, st.integers(-9, 9), st.booleans(), st.none(), st.lists(LETTERS)),
)


opened = functools.cache(FileTokenizer)


def read(tokenizer: FileTokenizer, prompt: str, text: str, cuts: list[int], *, is_whole: bool = True) -> dict[str, Any]:
    """Return what an answer says that comes in pieces, with all pieces put together."""
    answer = tokenizer.read_calls(prompt, [TOOL])
    at = sorted({min(cut, len(text)) for cut in [*cuts, 0, len(text)]})
    parts = [answer.add(text[begin:end]) for begin, end in itertools.pairwise(at)]
    whole: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": []}
    for part in [*parts, answer.end(is_whole=is_whole)]:
        for name, value in part.items():
            whole[name] += value
    assert [call["index"] for call in whole["tool_calls"]] == list(range(answer.calls))
    return whole


@pytest.mark.parametrize("name", sorted(ENDS))
@given(content=LETTERS, calls=st.lists(ARGUMENTS, max_size=3), cuts=st.lists(st.integers(0, 200), max_size=9))
def test_calls_that_a_chat_template_writes_are_read_back(
    folders: dict[str, str], name: str, content: str, calls: list[dict[str, Any]], cuts: list[int]
) -> None:
    tokenizer = opened(folders[name])
    theirs = PreTrainedTokenizerFast.from_pretrained(folders[name])
    if name != "qwen3":  # those templates have one call, and nothing else beside it
        calls, content = calls[:1], "" if calls else content.replace("{", "")
    made = [{"type": "function", "function": {"name": "weather", "arguments": each}} for each in calls]
    answer: dict[str, Any] = {"role": "assistant", "content": content, **({"tool_calls": made} if made else {})}
    prompt = tokenizer.chat([USER], [TOOL])
    text = str(theirs.apply_chat_template([USER, answer], tools=[TOOL], tokenize=False))
    assert text.startswith(prompt)
    text = text[len(prompt) :].removesuffix("\n")
    for end in (*ENDS.values(), "<|call|>"):
        text = text.removesuffix(end)
    said = read(tokenizer, prompt, text, cuts)
    assert [json.loads(call["function"]["arguments"]) for call in said["tool_calls"]] == calls
    assert said["content"] == content.strip()


CALL = '{"name": "weather", "arguments": {}}'
WRITTEN = ["<tool_call>", "</tool_call>", "<think>", "</think>", CALL, "{", "}", "y", " z", "<", "€ "]
QWEN = st.lists(st.sampled_from(WRITTEN), max_size=8).map("".join)


@given(text=QWEN, cuts=st.lists(st.integers(0, 90), max_size=9), is_whole=st.booleans())
def test_an_answer_says_the_same_however_it_comes_in_pieces_and_loses_no_letter(
    folders: dict[str, str], text: str, cuts: list[int], is_whole: bool
) -> None:
    tokenizer = opened(folders["qwen3"])
    said = read(tokenizer, "", text, cuts, is_whole=is_whole)
    at_once = read(tokenizer, "", text, [], is_whole=is_whole)
    for each in (*said["tool_calls"], *at_once["tool_calls"]):
        del each["id"]
    assert said == at_once
    for letter in "yz€":
        assert (said["content"] + said["reasoning_content"]).count(letter) == text.count(letter)


def test_a_call_that_is_cut_or_no_json_is_content(folders: dict[str, str]) -> None:
    tokenizer = opened(folders["qwen3"])
    call = '{"name": "weather", "arguments": {"days": 2}}'
    for text, is_whole, content, calls in (
        (f"So:<tool_call>{call}</tool_call>", True, "So:", 1),
        (f"So:<tool_call>{call}", True, "So:", 1),
        (f"So:<tool_call>{call}", False, f"So:{call}", 0),
        (f"<tool_call>{call[:-3]}</tool_call> it is.", True, f"{call[:-3]}it is.", 0),
        ("<tool_call>[1]</tool_call>", True, "[1]", 0),
    ):
        said = read(tokenizer, "", text, [], is_whole=is_whole)
        assert (said["content"], len(said["tool_calls"])) == (content, calls)


DEEP = "[" * 5000 + "]" * 5000
BAD_VALUES = [
    "NaN",
    "1e999",
    DEEP,
    f'{{"a": {DEEP}}}',
    '"\\ud800"',
    '{"city": "\\udfff"}',
    "[]",
    "null",
    '"x"',
    '{"": 1}',
]


@pytest.mark.parametrize("value", BAD_VALUES, ids=range(len(BAD_VALUES)))
@pytest.mark.parametrize("is_streamed", [False, True])
def test_whatever_a_model_writes_as_a_call_is_a_call_or_content(
    folders: dict[str, str], value: str, is_streamed: bool
) -> None:
    """Who reads it shares a connection with other requests: an error here ended them all."""
    tokenizer = opened(folders["qwen3"])
    for call in (value, f'{{"name": "weather", "arguments": {value}}}', f'{{"name": {value}, "arguments": {{}}}}'):
        for end in ("</tool_call>", ""):
            cuts = list(range(0, 90, 3)) if is_streamed else []
            said = read(tokenizer, "", f"So:<tool_call>{call}{end}", cuts)
            json.dumps(said, ensure_ascii=False).encode()
            assert said["content"].startswith("So:")


def test_the_response_template_of_the_page_reads_calls(folders: dict[str, str], tmp_path: Path) -> None:
    page = (ROOT / "docs" / "reference" / "asking.md").read_text()
    shown = json.loads("{" + page.partition("```json\n")[2].partition("```")[0] + "}")
    save(tmp_path, "qwen3")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(shown))
    for text in (
        f"So:<tool_call>\n{CALL}\n</tool_call>",
        f"<think>\ny\n</think>\n\nz\n<tool_call>{CALL}</tool_call>\n",
    ):
        ours, theirs = (read(opened(place), "", text, []) for place in (str(tmp_path), folders["qwen3"]))
        del ours["tool_calls"][0]["id"], theirs["tool_calls"][0]["id"]
        assert ours == theirs


def test_tools_that_nothing_can_keep_are_refused_by_their_name(folders: dict[str, str], tmp_path: Path) -> None:
    save(tmp_path, "llama3_1")
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}")
    deaf, strict = FileTokenizer(str(tmp_path)), {"type": "function", "function": {"name": "f", "strict": True}}
    called = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "[1]"}}
    asked: dict[str, Any] = {"model": "m", "messages": [USER], "tools": [TOOL]}
    for tokenizer, more, param in (
        (ByteTokenizer(), {}, "tools"),
        (deaf, {}, "tools"),
        (opened(folders["qwen3"]), {"tools": [TOOL, strict]}, "tools[1].function.strict"),
        (opened(folders["qwen3"]), {"tools": [{"type": "custom", "custom": {}}]}, "tools[0].type"),
        (opened(folders["qwen3"]), {"tools": [{"type": "function"}]}, "tools[0].function"),
        (opened(folders["qwen3"]), {"tool_choice": "required"}, "tool_choice"),
        (opened(folders["qwen3"]), {"parallel_tool_calls": False}, "parallel_tool_calls"),
        (
            opened(folders["qwen3"]),
            {"messages": [{"role": "assistant", "tool_calls": [called]}]},
            "messages[0].tool_calls[0].function.arguments",
        ),
    ):
        with pytest.raises(HttpError) as caught:
            read_generation(read_body(ChatBody, json.dumps(asked | more).encode()), "m", tokenizer, LIMITS)
        assert (caught.value.status, caught.value.param) == (400, param)
    assert read_generation(
        read_body(ChatBody, json.dumps({**asked, "tool_choice": "none"}).encode()), "m", deaf, LIMITS
    )
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"response_template": {"fields": {}}}))
    with pytest.raises(InvalidInputError, match="response_template"):
        FileTokenizer(str(tmp_path))


def plan(tokenizer: str) -> Plan:
    """One emulated model."""
    lengths = {"prompt_tokens": 20, "output_tokens": 20, "max_sequences": 8, "max_batch_tokens": 4096}
    replica = {"batch_size": 8, "kv_tokens": 1 << 16, "steps": STEPS.model_dump(mode="json")}
    model = {"name": "slow", "rate_rps": 10, "slo": SLO, "generates": lengths, "options": {"tokenizer": tokenizer}}
    return Plan.from_data(
        {
            "policy": {"name": "test"},
            "gpus": [{"id": "v", "type": "v100"}],
            "gpulets": [{"id": "b", "gpu": "v", "models": [{"name": "slow", **replica}]}],
            "models": [model],
        }
    )


def script(monkeypatch: pytest.MonkeyPatch, generator: Generator, tokens: list[int]) -> None:
    """Let every sequence of a generator write these tokens, and end."""
    step, written = generator.step, dict[int, int]()

    def scripted(chunks: Any) -> StepRan:
        ran: StepRan = step(chunks)
        for sequence in list(ran.tokens):
            at = written[sequence] = written.get(sequence, -1) + 1
            if at < len(tokens):
                ran.tokens[sequence] = tokens[at]
            else:
                del ran.tokens[sequence]
                generator.cancel(sequence)
                ran.ended[sequence] = Ending.STOP
                del written[sequence]
        return ran

    monkeypatch.setattr(generator, "step", scripted)


@pytest.fixture
async def bench(folders: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Bench]:
    monkeypatch.setattr(test_generation, "plan", lambda: plan(folders["qwen3"]))
    made = Bench()
    await made.start()
    yield made
    await made.close()


@pytest.fixture
def openai() -> Any:
    return pytest.importorskip("openai", reason="the package 'openai' is not installed")


async def test_openais_own_package_gets_calls_whole_and_streamed(
    openai: Any, bench: Bench, folders: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln", "days": 2}}\n</tool_call>'
    text = f"<think>\nLet me see.\n</think>\n\nI look.\n{call}\n{call}"
    script(monkeypatch, bench.generator("b", "slow"), opened(folders["qwen3"]).encode(text, is_chat=True))
    client = openai_client(f"{bench.url}/v1")
    asked = {"model": "slow", "messages": [USER], "tools": [TOOL], "tool_choice": "auto", "n": 2}
    whole = await client.chat.completions.create(**asked)
    choices: dict[int, dict[str, Any]] = {n: {"content": "", "reasoning_content": "", "calls": []} for n in range(2)}
    async for chunk in await client.chat.completions.create(**asked, stream=True):
        for choice in chunk.choices:
            kept, delta = choices[choice.index], choice.delta
            kept["content"] += delta.content or ""
            kept["reasoning_content"] += getattr(delta, "reasoning_content", None) or ""
            kept["calls"] += [(each.index, each.function) for each in delta.tool_calls or ()]
            kept["finish"] = choice.finish_reason
    for choice in whole.choices:
        message, kept = choice.message, choices[choice.index]
        assert (message.content, message.reasoning_content) == ("I look.", "Let me see.")
        assert [json.loads(each.function.arguments) for each in message.tool_calls] == [{"city": "Köln", "days": 2}] * 2
        assert len({each.id for each in message.tool_calls}) == 2
        assert (choice.finish_reason, kept["finish"]) == ("tool_calls", "tool_calls")
        assert (kept["content"], kept["reasoning_content"]) == (message.content, message.reasoning_content)
        assert [(n, each.arguments) for n, each in kept["calls"]] == [
            (n, each.function.arguments) for n, each in enumerate(message.tool_calls)
        ]
    # Its answer goes back with what the tools said; without tools, the text comes as it is.
    first = whole.choices[0].message
    results = [{"role": "tool", "tool_call_id": each.id, "content": "rain"} for each in first.tool_calls]
    again = await client.chat.completions.create(**{**asked, "messages": [USER, first, *results], "n": 1})
    assert again.usage.prompt_tokens > whole.usage.prompt_tokens
    plain = await client.chat.completions.create(**{**asked, "tool_choice": "none", "n": 1})
    assert (plain.choices[0].message.content, plain.choices[0].message.tool_calls) == (text, None)
    assert plain.usage.prompt_tokens < whole.usage.prompt_tokens
    for choice, more in (("required", {}), ({"type": "function", "function": {"name": "weather"}}, {})):
        with pytest.raises(openai.BadRequestError, match="tool_choice"):
            await client.chat.completions.create(**{**asked, "tool_choice": choice, **more})
    short = await client.chat.completions.create(**asked, max_tokens=len(text.encode()) - 20)
    assert [len(each.message.tool_calls) for each in short.choices] == [1, 1]
    assert [each.finish_reason for each in short.choices] == ["length", "length"]
    await client.close()
