"""What bodies of OpenAI's interface and of the generate extension ask for, and how their answers look."""

from __future__ import annotations

import copy
import json
import math
import re
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, get_args

import msgspec
import pytest

from tenuto.deployments.entry.http.exchange import HttpError
from tenuto.deployments.entry.protocols.grpc_messages import InferMessage, InferReader, InferRequest
from tenuto.deployments.entry.protocols.openai import AskedChoice, GenerationRequest, read_generation
from tenuto.deployments.entry.protocols.openai_answers import Piece, ScoredToken, Usage
from tenuto.deployments.entry.protocols.openai_bodies import (
    ChatBody,
    CompletionBody,
    GenerateBody,
    TextPart,
    made_body,
    read_body,
)
from tenuto.deployments.entry.protocols.texts import ByteTokenizer, Tokenizer
from tenuto.profiles.networks.catalogue import GenerationLimits
from tenuto.profiles.networks.generating import Sampling, TokenScores

LIMITS = GenerationLimits(40, 256, "the model's positions")
BYTES = ByteTokenizer()
PLAIN = {"model": "m", "prompt": "hi"}
CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


def asked(kind: Any, document: Any, tokenizer: Tokenizer | None = BYTES) -> GenerationRequest:
    body = read_body(kind, json.dumps(document).encode())
    return read_generation(body, "m", tokenizer, LIMITS, draw_seed=lambda: 77)


def refused(kind: Any, document: Any, tokenizer: Tokenizer | None = BYTES) -> HttpError:
    with pytest.raises(HttpError) as caught:
        asked(kind, document, tokenizer)
    assert caught.value.status == 400
    return caught.value


def test_a_completion_has_openais_defaults() -> None:
    found = asked(CompletionBody, PLAIN)
    assert found.choices == [AskedChoice([104, 105], Sampling(16, 1.0, 1.0, 77))]
    assert (found.stops, found.is_streamed) == ((), False)


def test_all_that_can_be_asked_is_read() -> None:
    more = {"max_tokens": 5, "temperature": 0, "top_p": 0.5, "seed": 3, "stop": ["a", "b"], "stream": True, "n": 1}
    found = asked(CompletionBody, {**PLAIN, **more, "stream_options": {"include_usage": True}, "user": "u"})
    assert found.choices[0].sampling == Sampling(5, 0.0, 0.5, 3)
    assert (found.stops, found.is_streamed, found.writer.include_usage) == (("a", "b"), True, True)
    assert prompts(asked(CompletionBody, {"model": "m", "prompt": [[1, 2]]}, None)) == [[1, 2]]
    assert prompts(asked(CompletionBody, {"model": "m", "prompt": [1, 2]}, None)) == [[1, 2]]
    assert prompts(asked(CompletionBody, {"model": "m", "prompt": ["hi"]})) == [[104, 105]]


def prompts(wanted: GenerationRequest) -> list[list[int]]:
    return [choice.prompt for choice in wanted.choices]


def test_each_choice_of_each_prompt_is_a_generation_with_a_seed_of_its_own() -> None:
    found = asked(CompletionBody, {"model": "m", "prompt": ["a", [98], "c"], "n": 2, "best_of": 2, "seed": 5})
    assert (prompts(found), found.n) == ([[97], [97], [98], [98], [99], [99]], 2)
    assert [choice.sampling.seed for choice in found.choices] == [5, 6] * 3
    drawn = iter(range(10, 13))
    body = read_body(CompletionBody, json.dumps({"model": "m", "prompt": ["a", "a", "a"], "n": 2}).encode())
    found = read_generation(body, "m", BYTES, LIMITS, draw_seed=lambda: next(drawn) * 10)
    assert [choice.sampling.seed for choice in found.choices] == [100, 101, 110, 111, 120, 121]
    assert len(asked(CompletionBody, {"model": "m", "prompt": ["a"] * 128}).choices) == 128
    assert len(asked(ChatBody, {**CHAT, "n": 3}).choices) == 3


def test_every_field_of_openais_own_may_be_null_or_as_if_it_were_missing() -> None:
    chats = pytest.importorskip("openai.types.chat.completion_create_params").CompletionCreateParamsBase
    completions = pytest.importorskip("openai.types.completion_create_params").CompletionCreateParamsBase
    for kind, params, whole in ((ChatBody, chats, CHAT), (CompletionBody, completions, PLAIN)):
        for name in params.__annotations__.keys() - whole.keys():
            assert asked(kind, {**whole, name: None})[:4] == asked(kind, whole)[:4], name
    neutral: dict[str, Any] = {"tools": [], "tool_choice": "none", "parallel_tool_calls": True, "functions": []}
    neutral |= {"store": False, "service_tier": "auto", "modalities": ["text"], "metadata": {"a": "b"}, "n": 1}
    assert asked(ChatBody, {**CHAT, **neutral}).choices == asked(ChatBody, CHAT).choices
    silent = {"role": "assistant", "content": None, "refusal": None, "tool_calls": None}
    assert asked(ChatBody, {**CHAT, "messages": [silent]}).choices[0].prompt == list(b"assistant: \nassistant: ")


def test_a_chat_takes_what_room_there_is() -> None:
    found = asked(ChatBody, CHAT)
    ((prompt, sampling, *_),) = found.choices
    assert bytes(prompt) == b"user: hi\nassistant: "
    assert sampling.max_tokens == 40 - len(prompt)
    parts = {"model": "m", "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]}
    assert prompts(asked(ChatBody, parts)) == [prompt]
    found = asked(ChatBody, {**CHAT, "max_completion_tokens": 4, "max_tokens": 9})
    assert found.choices[0].sampling.max_tokens == 4


def test_the_generate_extension_is_greedy_by_itself() -> None:
    found = asked(GenerateBody, {"text_input": "hi", "parameters": {"max_tokens": 3, "stop": "x"}})
    assert (found.choices[0].sampling, found.stops) == (Sampling(3, 0.0, 1.0, 77), ("x",))


def test_tritons_clients_are_taken_as_they_ask() -> None:
    greedy = Sampling(16, 0.0, 1.0, 77)
    example = {"text_input": "hi", "parameters": {"stream": False, "temperature": 0}}
    assert asked(GenerateBody, example).choices[0].sampling == greedy
    example["parameters"] = {"exclude_input_in_output": True, "temperature": "0.5", "max_tokens": "3", "top_p": "0.95"}
    assert asked(GenerateBody, example).choices[0].sampling == Sampling(3, 0.5, 0.95, 77)
    assert asked(GenerateBody, {"text_input": "hi", "stream": False}).choices[0].sampling == greedy
    streamed = read_body(GenerateBody, b'{"text_input":"hi","stream":true,"parameters":{"stream":true}}')
    assert read_generation(streamed, "m", BYTES, LIMITS, is_streamed=True).is_streamed
    for where in ("", "parameters."):
        said = {"stream": True} if not where else {"parameters": {"stream": True}}
        assert refused(GenerateBody, {"text_input": "hi", **said}).param == f"{where}stream"
        with_prompt = {"exclude_input_in_output": False}
        said = {"parameters": with_prompt} if where else with_prompt
        assert refused(GenerateBody, {"text_input": "hi", **said}).param == f"{where}exclude_input_in_output"


@pytest.mark.parametrize(
    ("more", "param", "says"),
    [
        ({"top_k": 5}, "top_k", "not a field"),
        ({"stream_options": {"usage": True}, "stream": True}, "stream_options.usage", "not a field"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "stream: true"),
        ({"temperature": 3}, "temperature", "<= 2.0"),
        ({"temperature": "hot"}, "temperature", "expected `float"),
        ({"top_p": 0}, "top_p", "> 0.0"),
        ({"max_tokens": 39}, "max_tokens", "room for 38"),
        ({"n": 129}, "n", "<= 128"),
        ({"best_of": 4}, "best_of", "`n`, which is 1"),
        ({"prompt": ["a"] * 65, "n": 2}, "prompt", "65 prompts with 2 choices each"),
        ({"prompt": ["a", 1]}, "prompt", "mixes tokens and prompts"),
        ({"prompt": [1, "a"]}, "prompt", "mixes tokens and prompts"),
        ({"prompt": ["a", ""]}, "prompt[1]", "at least one"),
        ({"logprobs": 21}, "logprobs", "<= 20"),
        ({"max_tokens": 0}, "max_tokens", "`echo` alone"),
        ({"min_tokens": 17}, "min_tokens", "`max_tokens` is 16"),
        ({"min_tokens": 3, "response_format": {"type": "json_object"}}, "min_tokens", "JSON ends where it ends"),
        ({"ignore_eos": True, "response_format": {"type": "json_object"}}, "ignore_eos", "JSON ends where it ends"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "invalid value"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "is missing"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {}}},
            "response_format.json_schema.name",
            "missing",
        ),
        ({"presence_penalty": 0.5}, "presence_penalty", "can only be"),
        ({"logit_bias": {"256": 1.0}}, "logit_bias", "0 to 255"),
        ({"logit_bias": {"5": 101}}, "logit_bias", "<= 100"),
        ({"logit_bias": {"x": 1}}, "logit_bias", "token ids"),
        ({"logit_bias": [1]}, "logit_bias", "token ids"),
        ({"stop": [""]}, "stop", "not empty"),
        ({"stop": ["x"] * 17}, "stop", "at most 16"),
        ({"prompt": ""}, "prompt", "at least one"),
        ({"prompt": []}, "prompt", "at least one"),
        ({"prompt": "x" * 40}, "prompt", "the model's positions"),
        ({"prompt": [1, 256]}, "prompt", "token 256"),
        ({"prompt": [-1]}, "prompt", "token -1"),
    ],
)
def test_what_cannot_be_done_is_refused_with_its_field(more: dict[str, Any], param: str, says: str) -> None:
    error = refused(CompletionBody, {**PLAIN, **more})
    assert error.param == param
    assert says in error.message


# JSON of every kind, with numbers at and beyond every bound.
VALUES: list[Any] = [
    *(None, True, False, "", "x", "1", "NaN", "\x00", "text"),
    *(0, 1, -1, 2, 0.0, 1.0, 1.5, -0.5, 2.5, 5e-324, 1e300, 1 << 31, 1 << 63, -(1 << 63) - 1, 1 << 70, 10**400),
    *([], [1], [1.5], [-1], ["x"], [""], ["x"] * 17, [None], [True], [[1]], [["x"]], [1, "x"], [{}]),
    *({}, {"a": 1}, {"type": "text"}, {"type": "json_object"}, {"include_usage": False}, {"type": "text", "text": "x"}),
]


def is_whole(value: Any, low: float, high: float) -> bool:
    return value is None or (type(value) is int and low <= value <= high)


def is_number(value: Any, low: float, high: float) -> bool:
    return value is None or (type(value) in (int, float) and low <= value <= high)


def none_or(*kept: Any) -> Any:
    return lambda value: value is None or any(value == each and type(value) is type(each) for each in kept)


def is_string(value: Any) -> bool:
    return isinstance(value, str)


# What each field may hold; a field that is missing here fails the test.
SAMPLING: dict[str, Any] = {
    "max_tokens": lambda value: is_whole(value, 1, 16),
    "temperature": lambda value: is_number(value, 0, 2),
    "top_p": lambda value: is_number(value, 5e-324, 1),
    "seed": lambda value: is_whole(value, -(1 << 63), (1 << 63) - 1),
    "stop": lambda value: value in (None, "x", "1", "NaN", "\x00", "text", [], ["x"]),
    "min_tokens": lambda value: is_whole(value, 0, 16),
    "ignore_eos": none_or(False, True),
}
# The generate extension takes numbers as texts, and whole ones as 1.0.
TRITONS_OWN = {
    "stream": lambda value: value is None or value is False or (type(value) is int and value == 0),
    "exclude_input_in_output": lambda value: value in (None, True, "1") and type(value) is not float,
}


def as_number(value: Any) -> Any:
    """Return what a lax reader takes a value for."""
    return {"1": 1}.get(value, value) if isinstance(value, str) else value


def as_whole(value: Any) -> Any:
    return int(value) if type(value) is float and value.is_integer() else as_number(value)


AS_TEXTS: dict[str, Any] = SAMPLING | {
    "max_tokens": lambda value: SAMPLING["max_tokens"](as_whole(value)),
    "temperature": lambda value: SAMPLING["temperature"](as_number(value)),
    "top_p": lambda value: SAMPLING["top_p"](as_number(value)),
    "seed": lambda value: SAMPLING["seed"](as_whole(value)),
    "min_tokens": lambda value: SAMPLING["min_tokens"](as_whole(value)),
    "ignore_eos": none_or(False, True, 0, 1, "1"),
}
ASKED: dict[str, Any] = SAMPLING | {
    "model": is_string,
    "stream": none_or(False, True),
    "stream_options": none_or(),  # for streams only
    "n": lambda value: is_whole(value, 1, 128),
    "presence_penalty": lambda value: is_number(value, 0, 0),
    "frequency_penalty": lambda value: is_number(value, 0, 0),
    "logit_bias": none_or({}),
    "response_format": none_or({"type": "text"}, {"type": "json_object"}),
    "user": lambda value: value is None or is_string(value),
    "priority": none_or("offline"),
}
EMPTY = none_or([])
PROMPTS = [json.dumps(value) for value in ([1], ["x"], ["x"] * 17, [[1]])]
BODIES: list[tuple[Any, str, dict[str, Any]]] = [  # the body, where in it the fields are, and what they may hold
    (
        CompletionBody,
        "",
        ASKED
        | {
            "prompt": lambda value: (is_string(value) and value) or json.dumps(value) in PROMPTS,
            "best_of": lambda value: is_whole(value, 1, 1),
            "echo": none_or(False, True),
            "logprobs": lambda value: is_whole(value, 0, 20),
            "suffix": none_or(""),
        },
    ),
    (
        ChatBody,
        "",
        ASKED
        | {
            "messages": lambda value: False,
            "max_completion_tokens": lambda value: is_whole(value, 1, 16),
            "logprobs": none_or(False, True),
            "top_logprobs": none_or(0),
            **dict.fromkeys(
                ("prompt_cache_key", "prompt_cache_retention", "safety_identifier"),
                lambda value: value is None or is_string(value),
            ),
            "metadata": lambda value: value in (None, {}) or json.dumps(value).startswith('{"type"'),
            **dict.fromkeys(("audio", "moderation", "prediction", "prompt_cache_options"), none_or()),
            **dict.fromkeys(("reasoning_effort", "web_search_options"), none_or()),
            **dict.fromkeys(("function_call", "tool_choice"), none_or("none", "auto")),
            **dict.fromkeys(("functions", "tools"), none_or([])),
            "modalities": none_or(["text"]),
            "parallel_tool_calls": none_or(True),
            "service_tier": none_or("auto", "default"),
            "store": none_or(False),
            "verbosity": none_or("medium"),
        },
    ),
    (
        ChatBody,
        "messages[0]",
        {
            "role": is_string,
            "content": lambda value: is_string(value) or value == [],  # null in answers alone
            "name": lambda value: value is None or is_string(value),
            **dict.fromkeys(("tool_calls", "annotations"), EMPTY),
            **dict.fromkeys(("refusal", "audio", "function_call"), none_or()),
            **dict.fromkeys(
                ("reasoning", "reasoning_content", "tool_call_id"), lambda value: value is None or is_string(value)
            ),
        },
    ),
    (ChatBody, "messages[0].content[0]", {"text": is_string, "type": lambda value: value == "text"}),
    (
        CompletionBody,
        "stream_options",
        {
            **dict.fromkeys(("include_usage", "continuous_usage_stats"), none_or(False, True)),
            "include_obfuscation": none_or(False),
        },
    ),
    (
        GenerateBody,
        "",
        {
            "text_input": lambda value: is_string(value) and value,
            "id": is_string,
            "parameters": lambda value: value == {},
            **TRITONS_OWN,
        },
    ),
    (GenerateBody, "parameters", AS_TEXTS | TRITONS_OWN | {"priority": none_or("offline")}),
]
WHOLE: dict[Any, Any] = {
    CompletionBody: PLAIN,
    ChatBody: {"model": "m", "messages": [{"role": "u", "content": [{"type": "text", "text": "hi"}]}]},
    GenerateBody: {"text_input": "hi", "parameters": {}},
}


def body_with(kind: Any, place: str, name: str, value: Any) -> Any:
    """Return a body in which one field, at a place, is this value."""
    document = copy.deepcopy(WHOLE[kind])
    if place == "stream_options":
        document |= {"stream": True, "stream_options": {}}
    at = document
    for step in re.findall(r"\w+", place):
        at = at[int(step) if step.isdigit() else step]
    at[name] = value
    return document


def fields_of(kind: Any, place: str) -> set[str]:
    """Return the names of the fields of a body, at a place in it."""
    for step in re.findall(r"[a-z_]+", place):
        found = next(each.type for each in msgspec.structs.fields(kind) if each.name == step)
        kind = next(each for each in types_in(found) if issubclass(each, msgspec.Struct))
    return {each.name for each in msgspec.structs.fields(kind)} | ({"type"} if kind is TextPart else set())


def types_in(annotation: Any) -> Iterator[type]:
    """Return the classes in an annotation, however deep."""
    if isinstance(annotation, type) and not get_args(annotation):
        yield annotation
    for each in get_args(annotation):
        yield from types_in(each)


@pytest.mark.parametrize(("kind", "place", "rules"), BODIES)
def test_a_field_with_any_other_value_is_refused_with_its_name(kind: Any, place: str, rules: dict[str, Any]) -> None:
    assert set(rules) == fields_of(kind, place)
    for name, may_be in rules.items():
        full = f"{place}.{name}" if place else name
        for value in VALUES:
            document = body_with(kind, place, name, value)
            if may_be(value):
                asked(kind, document)
            else:
                param = refused(kind, document).param
                assert param is not None, (full, value)
                assert (param + ".").startswith((full + ".", full + "[")), (full, value, param)


@pytest.mark.parametrize(("kind", "place", "rules"), BODIES)
def test_a_field_that_is_not_known_is_refused_with_its_name(kind: Any, place: str, rules: dict[str, Any]) -> None:
    del rules
    for name in ("top_k", "min_p", "guided_json", "image_url"):
        for value in (None, [], 1, {"type": "function"}):
            error = refused(kind, body_with(kind, place, name, value))
            assert error.param == (f"{place}.{name}" if place else name)
            assert "Leave it out" in error.message


@pytest.mark.parametrize("name", SAMPLING)
def test_python_and_grpc_keep_the_same_rules(name: str) -> None:
    def made(value: Any) -> GenerationRequest:
        return read_generation(made_body(CompletionBody, model="m", prompt="hi", **{name: value}), "m", BYTES, LIMITS)

    def sent(value: Any) -> GenerationRequest:
        given = {"text_input": b"hi", "sampling_parameters": json.dumps({name: value}).encode()}
        body = read_message(**given).body
        return read_generation(read_body(GenerateBody, body), "m", BYTES, LIMITS)

    for ask in (made, sent):
        for value in VALUES:
            if ask is sent and value == 10**400:
                continue  # that is no JSON to the reader of gRPC's texts
            if (AS_TEXTS if ask is sent else SAMPLING)[name](value):
                ask(value)
            else:
                with pytest.raises(HttpError) as caught:
                    ask(value)
                assert (caught.value.status, name in str(caught.value.param)) == (400, True), value
    for value in (math.nan, math.inf, -math.inf):
        with pytest.raises(HttpError) as caught:
            made(value)
        assert caught.value.param == name
        with pytest.raises(HttpError, match=name):
            read_message(parameters={name: value}, text_input=b"hi")


def read_message(parameters: Mapping[str, float] = MappingProxyType({}), **texts: bytes) -> InferMessage:
    """Return what gRPC reads of a message with inputs of BYTES."""
    message = InferRequest(model_name="m")
    for name, text in texts.items():
        message.inputs.add(name=name, datatype="BYTES", shape=[1]).contents.bytes_contents.append(text)
    for name, value in parameters.items():
        message.parameters[name].double_param = value
    return read_bytes(message.SerializeToString())


def read_bytes(message: bytes) -> InferMessage:
    asked, _ = InferReader().read(memoryview(bytearray(message)))
    if asked.problem is not None:
        raise asked.problem
    return asked


def test_inputs_that_a_generation_has_not_are_refused_over_grpc() -> None:
    with pytest.raises(HttpError, match="'image' is no input"):
        read_message(text_input=b"hi", image=b"x")
    message = InferRequest(model_name="m")
    message.inputs.add(name="text_input", datatype="BYTES", shape=[1]).contents.bytes_contents.append(b"hi")
    for name, is_kept in (("stream", True), ("stream", False), ("exclude_input_in_output", True)):
        more = copy.deepcopy(message)
        more.inputs.add(name=name, datatype="BOOL", shape=[1]).contents.bool_contents.append(is_kept)
        assert InferReader().read(memoryview(bytearray(more.SerializeToString())))[0].generates
    message.inputs.add(name="exclude_input_in_output", datatype="BOOL", shape=[1]).contents.bool_contents.append(False)
    with pytest.raises(HttpError, match="never has the prompt"):
        read_bytes(message.SerializeToString())


def test_what_needs_a_tokenizer_says_so() -> None:
    for kind, document, param in (
        (CompletionBody, PLAIN, "prompt"),
        (ChatBody, CHAT, "messages"),
        (GenerateBody, {"text_input": "hi"}, "text_input"),
        (CompletionBody, {"model": "m", "prompt": [1], "stop": "x"}, "stop"),
    ):
        error = refused(kind, document, None)
        assert (error.param, "options.tokenizer" in error.message) == (param, True)


def test_what_is_no_body_is_refused() -> None:
    assert refused(CompletionBody, {"prompt": "x"}).param == "model"
    assert refused(ChatBody, {"model": "m", "messages": []}).param == "messages"
    for kind in ("image_url", "input_audio", "file"):
        parts = [{"type": "text", "text": "What is it?"}, {"type": kind, kind: {"url": "data:"}}]
        error = refused(ChatBody, {"model": "m", "messages": [{"role": "user", "content": parts}]})
        assert (error.param, f"is '{kind}'" in error.message) == ("messages[0].content[1]", True)
    with pytest.raises(HttpError, match="no JSON"):
        read_body(CompletionBody, b"{")


def test_an_error_has_openais_form_where_its_interface_was_asked() -> None:
    error = refused(CompletionBody, {**PLAIN, "top_k": 5})
    told = json.loads(error.payload(b"/v1/completions"))["error"]
    assert told == {"message": error.message, "type": "invalid_request_error", "param": "top_k", "code": None}
    assert json.loads(HttpError(429, "slow").payload(b"/v1/models"))["error"]["code"] == "rate_limit_exceeded"
    assert json.loads(error.payload(b"/v2/x"))["error"] == error.message


def events(data: bytes) -> list[Any]:
    lines = data.decode().removesuffix("\n\n").split("\n\n")
    return [line if line == "data: [DONE]" else json.loads(line.removeprefix("data: ")) for line in lines]


def test_answers_look_as_openais() -> None:
    usage = Usage(2, 3)
    chat = asked(ChatBody, {**CHAT, "stream": True, "stream_options": {"include_usage": True}}).writer
    pieces = chat.piece(0, Piece("ab")) + chat.piece(0, Piece("c", (), "length"))
    *parts, total, done = events(chat.first(1) + pieces + chat.last(usage))
    assert [part["choices"][0]["delta"] for part in parts] == [
        {"role": "assistant", "content": ""},
        {"content": "ab"},
        {"content": "c"},
    ]
    assert [part["choices"][0]["finish_reason"] for part in parts] == [None, None, "length"]
    assert all(part["usage"] is None for part in parts)
    assert (total["choices"], total["usage"]["total_tokens"], done) == ([], 5, "data: [DONE]")
    plain = json.loads(asked(CompletionBody, PLAIN).writer.whole([Piece("abc", [1], "stop")], usage))
    assert plain["choices"] == [{"text": "abc", "index": 0, "logprobs": None, "finish_reason": "stop"}]
    mute = asked(CompletionBody, {"model": "m", "prompt": [1]}, None).writer
    tokens = json.loads(mute.whole([Piece("", [4], "stop")], usage))
    assert tokens["choices"][0]["token_ids"] == [4]
    generate = asked(GenerateBody, {"text_input": "hi", "id": "one"}).writer
    pieces = generate.piece(0, Piece("a")) + generate.piece(0, Piece("", (), "stop"))
    assert events(generate.first(1) + pieces + generate.last(usage)) == [
        {"id": "one", "model_name": "m", "model_version": "1", "text_output": "a"},
        {
            "id": "one",
            "model_name": "m",
            "model_version": "1",
            "text_output": "",
            "parameters": {"finish_reason": "stop"},
        },
    ]


def test_what_shapes_a_text_is_read() -> None:
    bias = {"logit_bias": {"5": -100, "6": 0.5, "7": 0}, "min_tokens": 2, "ignore_eos": True}
    ((_, found, echo, _),) = asked(CompletionBody, {**PLAIN, **bias, "logprobs": 3, "echo": True}).choices
    assert found == Sampling(16, 1.0, 1.0, 77, 2, True, ((5, -100.0), (6, 0.5)), "", 3, True)
    assert echo == "hi"
    assert asked(ChatBody, {**CHAT, "logprobs": True}).choices[0].sampling.logprobs == 0
    assert asked(ChatBody, {**CHAT, "logprobs": True, "top_logprobs": 4}).choices[0].sampling.logprobs == 4
    named = {"name": "x", "schema": {"type": "array"}, "strict": True}
    for shape, schema in (
        ({"type": "json_object"}, '{"type":"object"}'),
        ({"type": "json_schema", "json_schema": named}, '{"type":"array"}'),
    ):
        assert asked(ChatBody, {**CHAT, "response_format": shape}).choices[0].sampling.schema == schema
    (choice,) = asked(CompletionBody, {**PLAIN, "max_tokens": 0, "echo": True}).choices
    assert (choice.is_echo_only, choice.sampling.max_tokens) == (True, 1)


def test_what_a_generator_refuses_is_refused_by_its_name() -> None:
    limits = GenerationLimits(40, 256, "", dict.fromkeys(("logprobs", "logit_bias", "response_format"), "is a lie"))
    for more, name in (
        ({"logprobs": 0}, "logprobs"),
        ({"logit_bias": {"1": 1}}, "logit_bias"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
    ):
        body = read_body(CompletionBody, json.dumps({**PLAIN, **more}).encode())
        with pytest.raises(HttpError, match=f"'{name}' is a lie") as caught:
            read_generation(body, "m", BYTES, limits)
        assert caught.value.param == name


def test_scores_and_schemas_have_a_bound() -> None:
    limits = GenerationLimits(1 << 17, 256, "")

    def refused_field(kind: Any, **fields: Any) -> str | None:
        with pytest.raises(HttpError) as caught:
            read_generation(read_body(kind, json.dumps({"model": "m", **fields}).encode()), "m", BYTES, limits)
        assert caught.value.status == 400
        return caught.value.param

    message = [{"role": "user", "content": "hi"}]
    assert refused_field(ChatBody, messages=message, logprobs=True, top_logprobs=20) == "logprobs"
    assert refused_field(CompletionBody, prompt="x" * 7000, echo=True, logprobs=20) == "logprobs"
    wide = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["x" * 70_000]}}}
    place = "response_format.json_schema.schema"
    assert refused_field(ChatBody, messages=message, response_format=wide) == place
    deep: Any = {}
    for _ in range(400):
        deep = {"items": deep}
    wide["json_schema"] = {"name": "x", "schema": deep}
    asked(ChatBody, {**CHAT, "response_format": wide})
    biases = {str(token): 1 for token in range(8000)}
    assert refused_field(CompletionBody, prompt="x", logit_bias=biases) == "logit_bias"


def test_log_probabilities_look_as_openais() -> None:
    whole = "é".encode()
    scored = [
        ScoredToken(97, 0, None),
        ScoredToken(98, 1, TokenScores(-1.0, [(99, -0.5), (99 + 256, -0.7)])),
        ScoredToken(whole[0], 2, TokenScores(-math.inf, [])),
    ]
    piece = Piece("abé", (), "stop", scored=scored)
    plain = json.loads(asked(CompletionBody, {**PLAIN, "logprobs": 2}).writer.whole([piece], Usage(1, 3)))
    assert plain["choices"][0]["logprobs"] == {
        "tokens": ["a", "b", "bytes:\\xc3"],
        "token_logprobs": [None, -1.0, -9999.0],
        "top_logprobs": [None, {"c": -0.5, "b": -1.0}, {"bytes:\\xc3": -9999.0}],
        "text_offset": [0, 1, 2],
    }
    (event,) = events(asked(ChatBody, {**CHAT, "logprobs": True}).writer.piece(0, piece))
    top = [{"token": "c", "logprob": logprob, "bytes": [99]} for logprob in (-0.5, -0.7)]
    assert event["choices"][0]["logprobs"] == {
        "content": [
            {"token": "b", "logprob": -1.0, "bytes": [98], "top_logprobs": top},
            {"token": "\ufffd", "logprob": -9999.0, "bytes": [0xC3], "top_logprobs": []},
        ],
        "refusal": None,
    }
    mute = asked(CompletionBody, {"model": "m", "prompt": [1], "logprobs": 0}, None).writer
    assert json.loads(mute.whole([piece], Usage(1, 3)))["choices"][0]["logprobs"]["tokens"][1] == "token_id:98"


@pytest.mark.parametrize(
    "body",
    [
        b'{"model": "m", "prom\x95t": [1]}',
        b'{"model": "m\xb5", "prompt": [1]}',
        b'{"model": "m", "messages": [{"role": "user", "content": "x", "more": ' + b"[" * 2000 + b"]" * 2000 + b"}]}",
        b'{"text_input": "x", "parameters": {"max_t\xe2kens": 4}}',
    ],
)
def test_what_is_no_text_or_too_deep_is_the_clients_fault(body: bytes) -> None:
    for kind in (CompletionBody, ChatBody, GenerateBody):
        with pytest.raises(HttpError) as caught:
            read_body(kind, body)
        assert caught.value.status == 400


def test_what_costs_each_token_is_small() -> None:
    assert refused(CompletionBody, {**PLAIN, "stop": "x" * 1001}).param == "stop"
    assert refused(GenerateBody, {"text_input": "x", "id": "y" * 129}).param == "id"
    assert refused(CompletionBody, {**PLAIN, "logit_bias": {str(n): 1 for n in range(100_000)}}).param == "logit_bias"
    assert "brackets" in refused(CompletionBody, {**PLAIN, "prompt": [[]] * 100_000}).message
    assert "1000 prompts" in refused(CompletionBody, {**PLAIN, "prompt": ["x"] * 1000}).message
    error = refused(CompletionBody, {**PLAIN, "prompt": [1] + ["x"] * 1000})  # not a token of it is looked at
    assert "1001 tokens" in error.message


def test_bodies_have_a_schema() -> None:
    (_, chat), types = msgspec.json.schema_components([CompletionBody, ChatBody])
    assert chat["$ref"].rsplit("/", 1)[1] in types
    assert "logit_bias" in types["CompletionBody"]["properties"]
