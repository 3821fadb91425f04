"""What the bodies of the protocols of generation ask of a model, and whether it can do that."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Any, NamedTuple, cast

import msgspec
from msgspec import Meta

from tenuto.deployments.entry.http.exchange import HttpError
from tenuto.deployments.entry.protocols.openai_answers import ChatWriter, GenerateWriter, Writer
from tenuto.deployments.entry.protocols.openai_bodies import (
    MOST_CHOICES,
    AnyObject,
    AnyText,
    BySchema,
    Called,
    ChatBody,
    CompletionBody,
    GenerateBody,
    GenerateParameters,
    Message,
    OtherPart,
    Stop,
    TextPart,
    bad_field,
)
from tenuto.deployments.entry.protocols.texts import Tokenizer
from tenuto.deployments.entry.protocols.tool_calls import ToolAnswer
from tenuto.errors import InvalidInputError
from tenuto.profiles.networks.catalogue import GenerationLimits
from tenuto.profiles.networks.generating import Sampling
from tenuto.profiles.networks.grammars import ANY_OBJECT

_MOST_STOPS = 16  # limit: each is looked for in every piece of text
_LONGEST_STOP = 1000  # limit: characters; so much of a text is held back, and looked at again for each token
_MOST_SCORES = 1 << 20  # limit: log probabilities of an answer that is kept until it ends; each takes 110 bytes
_MOST_PROMPT_SCORES = 1 << 17  # limit: those of prompts, which travel in one message, in 15 bytes each
_MOST_BIASED_BYTES = 1 << 15  # limit: of `logit_bias`, about 2000 tokens
_MOST_BIAS = 100.0  # format: by OpenAI's reference
_MOST_SCHEMA_BYTES = 1 << 16  # limit: of a JSON schema; 500 properties take 14 KiB
_SEED_BITS = 63  # format: seeds are signed 64-bit integers to the clients' JSON readers and to torch
_DEFAULT_TOKENS = 16  # format: of /v1/completions without `max_tokens`, by OpenAI's reference

_Bias = Annotated[float, Meta(ge=-_MOST_BIAS, le=_MOST_BIAS)]


class AskedChoice(NamedTuple):
    """One of the generations that a request asks for: one choice of its answer. `echo` is the text of its prompt, if
    the choice begins with it."""

    prompt: list[int]
    sampling: Sampling
    echo: str | None = None
    is_echo_only: bool = False  # no token is wanted, and one is made: without one nothing runs


class GenerationRequest(NamedTuple):
    """A request for generations, from any of the protocols; `writer` writes its answer. With several prompts, the
    `choices` of the first come first; each prompt has `n` of them."""

    choices: list[AskedChoice]
    n: int
    stops: tuple[str, ...]
    is_streamed: bool
    writer: Writer
    answer: Callable[[], ToolAnswer] | None = None  # reads one that may call tools
    offline: bool = False


def read_generation(
    body: CompletionBody | ChatBody | GenerateBody,
    model: str,
    tokenizer: Tokenizer | None,
    limits: GenerationLimits,
    *,
    is_streamed: bool = False,
    draw_seed: Callable[[], int] = lambda: secrets.randbits(_SEED_BITS),
) -> GenerationRequest:
    """Return the generations that a body asks for.

    Args:
        body: what `read_body` returned.
        model: the client's name for the model.
        tokenizer: of the model, if it has one.
        limits: of the model on its gpu-lets.
        is_streamed: whether the path of the generate extension asks for a stream.
        draw_seed: draws the seed if the client gives none.

    Raises:
        HttpError: 400 if the model cannot do this, with what to change.
    """
    answer = None
    if isinstance(body, GenerateBody):
        for at, triton in (("", body), ("parameters.", body.parameters)):
            if triton.stream and not is_streamed:
                raise bad_field(f"{at}stream", "is for generate_stream. Ask that path, or leave it out")
            if triton.exclude_input_in_output is False:
                raise bad_field(f"{at}exclude_input_in_output", "can only be true: an answer never has the prompt")
        options: GenerateParameters = body.parameters
        name = "text_input"
        writer: Writer = GenerateWriter(model, body.id)
        prompts: Sequence[str | list[int]] = [body.text_input]
        most, temperature = body.parameters.max_tokens or _DEFAULT_TOKENS, 0.0
        asked_as = "parameters.max_tokens"
    elif isinstance(body, ChatBody):
        options, name = body, "messages"
        writer = ChatWriter(model, f"chatcmpl-{secrets.token_hex(12)}")
        chat, answer = _chat(body, tokenizer)
        prompts, temperature = [chat], 1.0
        most = body.max_completion_tokens or body.max_tokens or 0
        asked_as = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    else:
        options, name = body, "prompt"
        writer = Writer(model, f"cmpl-{secrets.token_hex(12)}")
        prompts, temperature = _prompts(body, limits), 1.0
        most, asked_as = _DEFAULT_TOKENS if body.max_tokens is None else body.max_tokens, "max_tokens"
    echoes = isinstance(body, CompletionBody) and bool(body.echo)
    is_echo_only = isinstance(body, CompletionBody) and not most
    if is_echo_only and not echoes:
        raise bad_field("max_tokens", "is 0, which is for `echo` alone. Ask for one at least")
    n = 1
    if not isinstance(body, GenerateBody):
        is_streamed, n = bool(body.stream), body.n or 1
        if body.stream_options is not None:
            if not is_streamed:
                raise bad_field("stream_options", "is for streams only. Leave it out, or set stream: true")
            writer.include_usage = bool(body.stream_options.include_usage)
            writer.has_usage_so_far = bool(body.stream_options.continuous_usage_stats)
    writer.tokenizer = tokenizer
    stops = _stops(options.stop, "parameters.stop" if isinstance(body, GenerateBody) else "stop", tokenizer)
    shared = _sampling(body, options, temperature, limits)
    if shared.schema and answer is not None:
        raise bad_field("response_format", "cannot be kept beside `tools`: calls are no such JSON. Leave one out")
    choices = []
    for number, text in enumerate(prompts):
        named = name if len(prompts) == 1 else f"{name}[{number}]"
        prompt = _tokens(text, named, tokenizer, is_chat=isinstance(body, ChatBody))
        seed = draw_seed() if options.seed is None else options.seed
        most = _checked(prompt, most or int(is_echo_only), named, asked_as, limits)
        if shared.min_tokens > most:
            fewest = "parameters.min_tokens" if isinstance(body, GenerateBody) else "min_tokens"
            raise bad_field(fewest, f"is {shared.min_tokens}, and `{asked_as}` is {most}. Ask for less")
        echo = text if isinstance(text, str) else "" if tokenizer is None else tokenizer.decode(text)
        for index in range(n):
            sampling = shared._replace(max_tokens=most, seed=seed + index)
            choices.append(AskedChoice(prompt, sampling, echo if echoes else None, is_echo_only))
    if shared.logprobs is not None:
        _check_scores(choices, 1 + shared.logprobs, is_streamed=is_streamed)
    offline = options.priority is not None
    return GenerationRequest(choices, n, stops, is_streamed, writer, answer, offline)


def _sampling(
    body: CompletionBody | ChatBody | GenerateBody,
    options: GenerateParameters,
    temperature: float,
    limits: GenerationLimits,
) -> Sampling:
    """Return how all choices are made, without what each has for itself.

    Args:
        body: what is asked.
        options: its options.
        temperature: if the body says none.
        limits: of the model.
    """
    bias: tuple[tuple[int, float], ...] = ()
    schema, logprobs = "", None
    if not isinstance(body, GenerateBody):
        bias = _logit_bias(bytes(body.logit_bias), limits)
        schema = _schema(body.response_format)
        if isinstance(body, CompletionBody):
            logprobs = body.logprobs
        elif body.logprobs:
            logprobs = body.top_logprobs or 0
        elif body.top_logprobs:
            raise bad_field("top_logprobs", "needs `logprobs: true`. Set that, or leave it out")
    used = {"logit_bias": bool(bias), "response_format": bool(schema), "logprobs": logprobs is not None}
    for name, is_asked in used.items():
        if is_asked and name in limits.refuses:
            raise bad_field(name, limits.refuses[name])
    for name in ("min_tokens", "ignore_eos"):
        if schema and getattr(options, name):
            raise bad_field(name, "cannot be kept beside `response_format`: JSON ends where it ends. Leave one out")
    return Sampling(
        0,
        temperature if options.temperature is None else options.temperature,
        1.0 if options.top_p is None else options.top_p,
        0,
        options.min_tokens or 0,
        bool(options.ignore_eos),
        bias,
        schema,
        logprobs,
        logprobs is not None and isinstance(body, CompletionBody) and bool(body.echo),
    )


def _logit_bias(sent: bytes, limits: GenerationLimits) -> tuple[tuple[int, float], ...]:
    if len(sent) > _MOST_BIASED_BYTES:
        raise bad_field("logit_bias", f"has {len(sent)} bytes, and may have {_MOST_BIASED_BYTES}. Name fewer tokens")
    try:
        biases = msgspec.json.decode(sent, type=dict[int, _Bias] | None) or {}
    except msgspec.DecodeError as error:
        reason = str(error).partition(" - at ")[0]
        raise bad_field(
            "logit_bias", f"is wrong: {reason[:1].lower()}{reason[1:]}. Give numbers by token ids"
        ) from None
    wrong = next((token for token in biases if not 0 <= token < limits.vocabulary), None)
    if wrong is not None:
        rule = f"names token {wrong}; the model knows 0 to {limits.vocabulary - 1}. Use its own tokenizer"
        raise bad_field("logit_bias", rule)
    return tuple((token, bias) for token, bias in biases.items() if bias)


def _schema(shape: AnyText | AnyObject | BySchema | None) -> str:
    """Return the JSON schema of an answer; "" where any text will do."""
    if isinstance(shape, AnyObject):
        return ANY_OBJECT
    if not isinstance(shape, BySchema):
        return ""
    try:
        schema = json.dumps(shape.json_schema.schema or {}, separators=(",", ":"))
    except RecursionError:
        schema = " " * (_MOST_SCHEMA_BYTES + 1)
    if len(schema) > _MOST_SCHEMA_BYTES:
        rule = f"is deeper or larger than the {_MOST_SCHEMA_BYTES >> 10} KiB that it may have. Send a simpler one"
        raise bad_field("response_format.json_schema.schema", rule)
    return schema


def _check_scores(choices: Sequence[AskedChoice], each: int, *, is_streamed: bool) -> None:
    """Check how many log probabilities are asked for, with so many for each token."""
    made = 0 if is_streamed else sum(choice.sampling.max_tokens for choice in choices) * each
    if made > _MOST_SCORES:
        rule = f"asks for up to {made} log probabilities, and a whole answer may have {_MOST_SCORES}"
        raise bad_field("logprobs", f"{rule}. Stream it, or ask for fewer tokens")
    read = sum(len(choice.prompt) for choice in choices if choice.sampling.prompt_logprobs) * each
    if read > _MOST_PROMPT_SCORES:
        rule = f"asks for {read} log probabilities of prompts, and a request may have {_MOST_PROMPT_SCORES}"
        raise bad_field("logprobs", f"{rule}. Send shorter or fewer prompts")


def _prompts(body: CompletionBody, limits: GenerationLimits) -> list[str | list[int]]:
    """Return the prompts of a completion. The elements of a prompt that is too long are not looked at."""
    given, n = body.prompt, body.n or 1
    if body.best_of not in (None, n):
        raise bad_field("best_of", f"must be `n`, which is {n}: all that is made is answered. Leave it out")
    if isinstance(given, str):
        return [given]
    if not given or isinstance(given[0], int):
        if len(given) <= limits.longest and not all(isinstance(token, int) for token in given):
            raise bad_field("prompt", "mixes tokens and prompts. Send a list of tokens for each prompt")
        return [cast(list[int], given)]
    if len(given) * n > MOST_CHOICES:
        rule = f"has {len(given)} prompts with {n} choices each, and a request may have {MOST_CHOICES} choices"
        raise bad_field("prompt", f"{rule}. Send several requests")
    if any(isinstance(prompt, int) for prompt in given):
        raise bad_field("prompt", "mixes tokens and prompts. Send a list of tokens for each prompt")
    return cast(list[str | list[int]], given)


def _chat(body: ChatBody, tokenizer: Tokenizer | None) -> tuple[str, Callable[[], ToolAnswer] | None]:
    """Return a chat as one text, and what makes a reader of an answer that may call tools."""
    if tokenizer is None:
        raise _no_tokenizer("messages")
    messages = [_message(message, f"messages[{number}]") for number, message in enumerate(body.messages)]
    tools = _tools(body, tokenizer)
    try:
        text = tokenizer.chat(messages, tools)
        is_same = bool(tools) and tokenizer.chat(messages) == text
    except InvalidInputError as error:
        (problem,) = error.problems
        raise HttpError(400, f"'messages' {problem.rule}. {problem.cure}", param="messages") from None
    if is_same:
        raise bad_field("tools", "have no place in the model's chat template. Leave them out")
    return text, partial(tokenizer.read_calls, text, tools) if tools else None


def _message(message: Message, at: str) -> dict[str, Any]:
    """Return a message as templates read it."""
    fields = {name: value for name, value in msgspec.structs.asdict(message).items() if value not in (None, [])}
    if isinstance(message.content, list):
        fields["content"] = "".join(_text(part, f"{at}.content[{n}]") for n, part in enumerate(message.content))
    elif message.content is None and message.role != "assistant":
        raise bad_field(f"{at}.content", "is missing. Give it")
    if message.tool_calls:
        fields["tool_calls"] = [_called(call, f"{at}.tool_calls[{n}]") for n, call in enumerate(message.tool_calls)]
    return fields


def _called(call: Called, at: str) -> dict[str, Any]:
    """Return a call as templates read it: its arguments are an object."""
    try:
        arguments = msgspec.json.decode(call.function.arguments, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError):
        raise bad_field(
            f"{at}.function.arguments", "is no JSON object. Send the arguments as the answer had them"
        ) from None
    named = {} if call.id is None else {"id": call.id}
    return {**named, "type": "function", "function": {"name": call.function.name, "arguments": arguments}}


def _tools(body: ChatBody, tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """Return the tools that the model is told of."""
    if body.tool_choice == "none" or not body.tools:
        return []
    if not tokenizer.reads_calls:
        rule = "need a `response_template` in the tokenizer's tokenizer_config.json, which says how answers call them"
        raise bad_field("tools", f"{rule}. Leave them out, or add it")
    for number, tool in enumerate(body.tools):
        if tool.function.strict:
            raise bad_field(f"tools[{number}].function.strict", "cannot be kept here. Leave it out")
    return [msgspec.to_builtins(tool) for tool in body.tools]


def _text(part: TextPart | OtherPart, name: str) -> str:
    if isinstance(part, TextPart):
        return part.text
    raise bad_field(name, f"is '{type(part).__struct_config__.tag}', and models here read texts only. Leave it out")


def _tokens(text: str | list[int], name: str, tokenizer: Tokenizer | None, *, is_chat: bool) -> list[int]:
    if not isinstance(text, str):
        return text
    if tokenizer is None:
        raise _no_tokenizer(name)
    return tokenizer.encode(text, is_chat=is_chat)


def _no_tokenizer(name: str) -> HttpError:
    return bad_field(
        name,
        "needs a tokenizer, and the model has none. Send token ids as `prompt` of /v1/completions, "
        "or serve the model with `options.tokenizer`",
    )


def _stops(stop: Stop, name: str, tokenizer: Tokenizer | None) -> tuple[str, ...]:
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if len(stops) > _MOST_STOPS or not all(0 < len(each) <= _LONGEST_STOP for each in stops):
        rule = f"must be at most {_MOST_STOPS} strings that are not empty, of at most {_LONGEST_STOP} characters"
        raise bad_field(name, rule)
    if stops and tokenizer is None:
        raise _no_tokenizer(name)
    return stops


def _checked(prompt: Sequence[int], most: int, name: str, asked_as: str, limits: GenerationLimits) -> int:
    """Return how many tokens are made at most; 0 asks for as many as there is room."""
    if not prompt:
        raise bad_field(name, "has no token. Send at least one")
    room = limits.longest - len(prompt)
    if room < 1:
        raise bad_field(
            name,
            f"has {len(prompt)} tokens; prompt and answer may have {limits.longest} here ({limits.why}). Shorten it",
        )
    wrong = next((token for token in prompt if not 0 <= token < limits.vocabulary), None)
    if wrong is not None:
        raise bad_field(name, f"has token {wrong}; the model knows 0 to {limits.vocabulary - 1}. Use its own tokenizer")
    if most > room:
        raise bad_field(
            asked_as,
            f"is {most}; beside a prompt of {len(prompt)} tokens there is room for {room} ({limits.why}). Ask for less",
        )
    return most or room
