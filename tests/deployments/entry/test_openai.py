"""What bodies of OpenAI's interface and of the generate extension ask for, and how their answers look."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tenuto.deployments.entry.exchange import HttpError
from tenuto.deployments.entry.openai import ChatBody, CompletionBody, GenerateBody, Usage, Wanted, read_body, wanted
from tenuto.deployments.entry.texts import ByteTokenizer, Tokenizer
from tenuto.profiles.networks.catalogue import GenerationLimits
from tenuto.profiles.networks.generating import Sampling

LIMITS = GenerationLimits(40, 256, "the model's positions")
BYTES = ByteTokenizer()
PLAIN = {"model": "m", "prompt": "hi"}
CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


def asked(kind: Any, document: Any, tokenizer: Tokenizer | None = BYTES) -> Wanted:
    body = read_body(kind, json.dumps(document).encode())
    return wanted(body, "m", tokenizer, LIMITS, draw_seed=lambda: 77)


def refused(kind: Any, document: Any, tokenizer: Tokenizer | None = BYTES) -> HttpError:
    with pytest.raises(HttpError) as caught:
        asked(kind, document, tokenizer)
    assert caught.value.status == 400
    return caught.value


def test_a_completion_has_openais_defaults() -> None:
    found = asked(CompletionBody, PLAIN)
    assert found.prompt == [104, 105]
    assert found.sampling == Sampling(16, 1.0, 1.0, 77)
    assert (found.stops, found.is_streamed) == ((), False)


def test_all_that_can_be_asked_is_read() -> None:
    more = {"max_tokens": 5, "temperature": 0, "top_p": 0.5, "seed": 3, "stop": ["a", "b"], "stream": True, "n": 1}
    found = asked(CompletionBody, {**PLAIN, **more, "stream_options": {"include_usage": True}, "user": "u"})
    assert found.sampling == Sampling(5, 0.0, 0.5, 3)
    assert (found.stops, found.is_streamed, found.writer.include_usage) == (("a", "b"), True, True)
    assert asked(CompletionBody, {"model": "m", "prompt": [[1, 2]]}, None).prompt == [1, 2]
    assert asked(CompletionBody, {"model": "m", "prompt": [1, 2]}, None).prompt == [1, 2]
    assert asked(CompletionBody, {"model": "m", "prompt": ["hi"]}).prompt == [104, 105]


def test_a_chat_takes_what_room_there_is() -> None:
    found = asked(ChatBody, CHAT)
    assert bytes(found.prompt) == b"user: hi\nassistant: "
    assert found.sampling.max_tokens == 40 - len(found.prompt)
    parts = {"model": "m", "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]}
    assert asked(ChatBody, parts).prompt == found.prompt
    assert asked(ChatBody, {**CHAT, "max_completion_tokens": 4, "max_tokens": 9}).sampling.max_tokens == 4


def test_the_generate_extension_is_greedy_by_itself() -> None:
    found = asked(GenerateBody, {"text_input": "hi", "parameters": {"max_tokens": 3, "stop": "x"}})
    assert (found.sampling, found.stops) == (Sampling(3, 0.0, 1.0, 77), ("x",))


@pytest.mark.parametrize(
    ("more", "param", "says"),
    [
        ({"top_k": 5}, "top_k", "not a field"),
        ({"stream_options": {"usage": True}, "stream": True}, "stream_options.usage", "not a field"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "stream: true"),
        ({"temperature": 3}, "temperature", "<= 2.0"),
        ({"temperature": "hot"}, "temperature", "expected `float"),
        ({"top_p": 0}, "top_p", "> 0.0"),
        ({"max_tokens": 0}, "max_tokens", ">= 1"),
        ({"max_tokens": 39}, "max_tokens", "room for 38"),
        ({"n": 2}, "n", "only 1"),
        ({"best_of": 4}, "best_of", "only 1"),
        ({"logprobs": 5}, "logprobs", "only False"),
        ({"presence_penalty": 0.5}, "presence_penalty", "only 0.0"),
        ({"logit_bias": {"5": 1.0}}, "logit_bias", "only {}"),
        ({"stop": [""]}, "stop", "not empty"),
        ({"stop": ["x"] * 17}, "stop", "at most 16"),
        ({"prompt": ""}, "prompt", "at least one"),
        ({"prompt": []}, "prompt", "at least one"),
        ({"prompt": "x" * 40}, "prompt", "the model's positions"),
        ({"prompt": [1, 256]}, "prompt", "token 256"),
        ({"prompt": [-1]}, "prompt", "token -1"),
        ({"prompt": ["a", "b"]}, "prompt", "one request for each"),
    ],
)
def test_what_cannot_be_done_is_refused_with_its_field(more: dict[str, Any], param: str, says: str) -> None:
    error = refused(CompletionBody, {**PLAIN, **more})
    assert error.param == param
    assert says in error.message


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
    image = [{"role": "user", "content": [{"type": "image_url", "text": ""}]}]
    assert "no text" in refused(ChatBody, {"model": "m", "messages": image}).message
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
    *parts, total, done = events(chat.first() + chat.piece("ab", [1, 2]) + chat.last("c", [3], "length", usage))
    assert [part["choices"][0]["delta"] for part in parts] == [
        {"role": "assistant", "content": ""},
        {"content": "ab"},
        {"content": "c"},
    ]
    assert [part["choices"][0]["finish_reason"] for part in parts] == [None, None, "length"]
    assert all(part["usage"] is None for part in parts)
    assert (total["choices"], total["usage"]["total_tokens"], done) == ([], 5, "data: [DONE]")
    plain = json.loads(asked(CompletionBody, PLAIN).writer.whole("abc", [1], "stop", usage))
    assert plain["choices"] == [{"text": "abc", "index": 0, "logprobs": None, "finish_reason": "stop"}]
    tokens = json.loads(asked(CompletionBody, {"model": "m", "prompt": [1]}, None).writer.whole("", [4], "stop", usage))
    assert tokens["choices"][0]["token_ids"] == [4]
    generate = asked(GenerateBody, {"text_input": "hi", "id": "one"}).writer
    assert events(generate.first() + generate.piece("a", [1]) + generate.last("", [], "stop", usage)) == [
        {"id": "one", "model_name": "m", "model_version": "1", "text_output": "a"},
        {
            "id": "one",
            "model_name": "m",
            "model_version": "1",
            "text_output": "",
            "parameters": {"finish_reason": "stop"},
        },
    ]
