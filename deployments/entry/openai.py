"""The protocols of generation: OpenAI's completions and chats, and the generate extension of the Open Inference
Protocol. This module reads bodies and writes answers; it decides nothing else."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, NamedTuple, TypeVar, cast, get_args, get_origin

import msgspec
import orjson
from msgspec import Meta

from tenuto.deployments.entry.exchange import HttpError
from tenuto.deployments.entry.texts import Tokenizer
from tenuto.deployments.entry.tool_calls import ToolAnswer, joined
from tenuto.errors import InvalidInputError
from tenuto.profiles.networks.catalogue import GenerationLimits
from tenuto.profiles.networks.generating import Sampling, TokenScores
from tenuto.profiles.networks.grammars import ANY_OBJECT

DONE = b"data: [DONE]\n\n"
_MOST_STOPS = 16  # limit: each is looked for in every piece of text
_LONGEST_STOP = 1000  # limit: characters; so much of a text is held back, and looked at again for each token
_MOST_CONTAINERS = 1 << 15  # limit: lists and objects of a body, those in texts too; 350,000 take 140 ms
_MOST_CHOICES = 128  # limit: generations that one request asks for; each is admitted, and has its memory, by itself
_MOST_LIKELIEST = 20  # format: of the likeliest tokens that are shown, by OpenAI's reference
_MOST_SCORES = 1 << 20  # limit: log probabilities of an answer that is kept until it ends; each takes 110 bytes
_MOST_PROMPT_SCORES = 1 << 17  # limit: those of prompts, which travel in one message, in 15 bytes each
_MOST_BIASED_BYTES = 1 << 15  # limit: of `logit_bias`, about 2000 tokens
_MOST_BIAS = 100.0  # format: by OpenAI's reference
_LEAST_LOGPROB = -9999.0  # format: OpenAI's for what JSON cannot hold
_MOST_SCHEMA_BYTES = 1 << 16  # limit: of a JSON schema; 500 properties take 14 KiB
_SEED_BITS = 63  # format: seeds are signed 64-bit integers to the clients' JSON readers and to torch
_DEFAULT_TOKENS = 16  # format: of /v1/completions without `max_tokens`, by OpenAI's reference

_Count = Annotated[int, Meta(ge=1, le=2**31 - 1)]
_Choices = Annotated[int, Meta(ge=1, le=_MOST_CHOICES)]
_Temperature = Annotated[float, Meta(ge=0.0, le=2.0)]
_Bias = Annotated[float, Meta(ge=-_MOST_BIAS, le=_MOST_BIAS)]
_Likeliest = Annotated[int, Meta(ge=0, le=_MOST_LIKELIEST)]
_TopP = Annotated[float, Meta(gt=0.0, le=1.0)]
_Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
_Stop = str | list[str] | None
_Empty = Annotated[list[Any], Meta(max_length=0)] | None


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """Options of a stream. `continuous_usage_stats` is vLLM's: every part has the usage so far."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class GenerateParameters(msgspec.Struct, forbid_unknown_fields=True):
    """What all protocols say of how a text goes on, and alone the parameters of the generate extension."""

    max_tokens: _Count | None = None
    temperature: _Temperature | None = None
    top_p: _TopP | None = None
    seed: _Seed | None = None
    stop: _Stop = None
    min_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    ignore_eos: bool | None = None


class AnyText(msgspec.Struct, tag_field="type", tag="text", forbid_unknown_fields=True):
    """The format of an answer that may be any text."""


class AnyObject(msgspec.Struct, tag_field="type", tag="json_object", forbid_unknown_fields=True):
    """The format of an answer that is a JSON object."""


class NamedSchema(msgspec.Struct, forbid_unknown_fields=True):
    """A JSON schema, which is always kept, whatever `strict` is."""

    name: str
    schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None


class BySchema(msgspec.Struct, tag_field="type", tag="json_schema", forbid_unknown_fields=True):
    """The format of an answer that is JSON by a schema."""

    json_schema: NamedSchema


class _Asked(GenerateParameters, kw_only=True, forbid_unknown_fields=True):
    """The fields that both of OpenAI's bodies have. Some may have only their neutral value, which clients send."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: _Choices | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    # 100,000 entries, which nobody wants, take 40 ms. A default that is no factory has no place in a schema.
    logit_bias: msgspec.Raw = msgspec.field(default_factory=lambda: msgspec.Raw(b"{}"))
    response_format: AnyText | AnyObject | BySchema | None = None
    user: str | None = None


class CompletionBody(_Asked, kw_only=True, forbid_unknown_fields=True):
    """The body of POST /v1/completions."""

    prompt: str | list[int | str | list[int]]
    max_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    best_of: int | None = None
    echo: bool | None = None
    logprobs: _Likeliest | None = None
    suffix: str | None = None


class TextPart(msgspec.Struct, tag_field="type", tag="text", forbid_unknown_fields=True):
    """A part of a message."""

    text: str


class _Other(msgspec.Struct, tag_field="type"):
    """A part of a message that is no text. It is read so that it is refused by its name."""


class Picture(_Other, tag="image_url"):
    """A picture."""


class Sound(_Other, tag="input_audio"):
    """A sound."""


class File(_Other, tag="file"):
    """A file."""


class Function(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """A function that a model may call. `parameters` is a JSON schema of them."""

    name: Annotated[str, Meta(min_length=1)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct, tag_field="type", tag="function", forbid_unknown_fields=True):
    """A tool that a model may call."""

    function: Function


class CalledFunction(msgspec.Struct, forbid_unknown_fields=True):
    """What was called, with arguments as JSON."""

    name: str
    arguments: str


class Called(msgspec.Struct, tag_field="type", tag="function", forbid_unknown_fields=True):
    """A call of an earlier answer."""

    function: CalledFunction
    id: str | None = None


class Message(msgspec.Struct, forbid_unknown_fields=True):
    """A message of a chat; the template decides which roles there are. The fields that can only be empty are those of
    answers, which clients send back."""

    role: str
    content: str | list[TextPart | Picture | Sound | File] | None = None
    name: str | None = None
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: _Empty = None
    tool_calls: list[Called] | None = None
    tool_call_id: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None


class ChatBody(_Asked, kw_only=True, forbid_unknown_fields=True):
    """The body of POST /v1/chat/completions."""

    messages: Annotated[list[Message], Meta(min_length=1)]
    max_completion_tokens: _Count | None = None
    logprobs: bool | None = None
    top_logprobs: _Likeliest | None = None
    # These change no answer.
    metadata: dict[str, str] | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None
    # These would, so that they may only have their neutral values.
    audio: Any = None
    function_call: Any = None
    functions: Any = None
    modalities: Any = None
    moderation: Any = None
    parallel_tool_calls: Any = None
    prediction: Any = None
    prompt_cache_options: Any = None
    reasoning_effort: Any = None
    service_tier: Any = None
    store: Any = None
    tool_choice: Any = None
    tools: list[Tool] | None = None
    verbosity: Any = None
    web_search_options: Any = None


class TritonParameters(GenerateParameters, forbid_unknown_fields=True):
    """The parameters of the generate extension. Two are Triton's: `stream`, which has to fit the path, and that the
    prompt is no part of the answer."""

    stream: bool | None = None
    exclude_input_in_output: bool | None = None


class GenerateBody(msgspec.Struct, forbid_unknown_fields=True):
    """The body of POST /v2/models/MODEL/generate and generate_stream. Numbers may be texts, as Triton's clients write
    them."""

    text_input: str
    id: Annotated[str, Meta(max_length=128)] = ""  # limit: every part of a stream has it
    parameters: TritonParameters = msgspec.field(default_factory=TritonParameters)
    stream: bool | None = None
    exclude_input_in_output: bool | None = None


# The only values that can be kept, besides null.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "presence_penalty": (0.0,),
    "frequency_penalty": (0.0,),
    "suffix": ("",),
    "include_obfuscation": (False,),
    "audio": (),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "modalities": (["text"],),
    "moderation": (),
    "parallel_tool_calls": (True,),
    "prediction": (),
    "prompt_cache_options": (),
    "reasoning_effort": (),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "tool_choice": ("none", "auto"),
    "verbosity": ("medium",),
    "web_search_options": (),
}


class AskedChoice(NamedTuple):
    """One of the generations that a request asks for: one choice of its answer. `echo` is the text of its prompt, if
    the choice begins with it."""

    prompt: list[int]
    sampling: Sampling
    echo: str | None = None
    is_echo_only: bool = False  # no token is wanted, and one is made: without one nothing runs


class Wanted(NamedTuple):
    """A request for generations, from any of the protocols; `writer` writes its answer. With several prompts, the
    `choices` of the first come first; each prompt has `n` of them."""

    choices: list[AskedChoice]
    n: int
    stops: tuple[str, ...]
    is_streamed: bool
    writer: Writer
    answer: Callable[[], ToolAnswer] | None = None  # reads one that may call tools


class ScoredToken(NamedTuple):
    """A token, where it begins in its choice's text, and its scores; the first of a prompt has none."""

    token: int
    offset: int
    scores: TokenScores | None


class Piece(NamedTuple):
    """A part of a choice, or a whole one: its text, the tokens that are shown where there is no text, and why it
    ends here. `scored` are its tokens with their scores, if these are asked for."""

    text: str
    tokens: Sequence[int] = ()
    finish: str | None = None
    scored: Sequence[ScoredToken] | None = None
    said: Mapping[str, Any] | None = None  # of a chat with tools, in place of the text

    def of(self, said: Sequence[Mapping[str, Any]], *, has_calls: bool) -> Piece:
        """Return the end of an answer that may call tools, which says this in place of the text."""
        finish = "tool_calls" if has_calls and self.finish == "stop" else self.finish
        return self._replace(text="", said=joined(said), finish=finish)


class Usage(NamedTuple):
    """The tokens of a request."""

    prompt_tokens: int
    completion_tokens: int

    def shown(self) -> dict[str, int]:
        """Return OpenAI's `usage`."""
        return {**self._asdict(), "total_tokens": sum(self)}


class Writer(msgspec.Struct):
    """Writes the answers of OpenAI's completions. `named` is the id of the answer."""

    model: str
    named: str
    include_usage: bool = False
    has_usage_so_far: bool = False  # in every part of a stream
    so_far: Usage = Usage(0, 0)
    tokenizer: Tokenizer | None = None  # None: the tokens themselves are shown
    created: int = msgspec.field(default_factory=lambda: int(time.time()))

    kind = "text_completion"
    chunk = "text_completion"

    def first(self, choices: int) -> bytes:
        """Return the first part of a stream of so many choices."""
        del choices
        return b""

    def piece(self, index: int, piece: Piece) -> bytes:
        """Return a part of a stream; the last one of a choice says why it ends."""
        return self._event([self._choice(index, self._part(piece), piece)])

    def last(self, usage: Usage) -> bytes:
        """Return the last part of a stream, behind the ends of its choices."""
        return (self._event([], usage=usage.shown()) if self.include_usage else b"") + DONE

    def failed(self, error: HttpError) -> bytes:
        """Return the last part of a stream that fails after it has begun."""
        return b"data: %b\n\n" % error.payload(b"/v1/") + DONE

    def whole(self, choices: Sequence[Piece], usage: Usage) -> bytes:
        """Return an answer that is not streamed."""
        told = [self._choice(index, self._answer(choice), choice) for index, choice in enumerate(choices)]
        return self._object(self.kind, told, usage=usage.shown())

    def _answer(self, piece: Piece) -> dict[str, Any]:
        return {"text": piece.text}

    def _part(self, piece: Piece) -> dict[str, Any]:
        return {"text": piece.text}

    def _choice(self, index: int, said: dict[str, Any], piece: Piece) -> dict[str, Any]:
        logprobs = None if piece.scored is None else self._logprobs(piece.scored)
        choice = {**said, "index": index, "logprobs": logprobs, "finish_reason": piece.finish}
        return self._with_tokens(choice, piece.tokens)

    def _with_tokens(self, choice: dict[str, Any], tokens: Sequence[int]) -> dict[str, Any]:
        return choice if self.tokenizer is not None else {**choice, "token_ids": list(tokens)}

    def _logprobs(self, scored: Sequence[ScoredToken]) -> dict[str, Any]:
        tokens, logprobs, tops = list[str](), list[float | None](), list[dict[str, float] | None]()
        for token, _, scores in scored:
            tokens.append(self._name(token))
            if scores is None:
                logprobs.append(None)
                tops.append(None)
                continue
            logprobs.append(_finite(scores.logprob))
            top: dict[str, float] = {}
            for likely, logprob in (*scores.likeliest, (token, scores.logprob)):
                top.setdefault(self._name(likely), _finite(logprob))  # tokens may look the same: the likeliest is shown
            tops.append(top)
        offsets = [each.offset for each in scored]
        return {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": tops, "text_offset": offsets}

    def _name(self, token: int) -> str:
        """Return a token as completions show it: bytes that are no character are named."""
        if self.tokenizer is None:
            return f"token_id:{token}"
        text, data = self.tokenizer.token_text(token)
        broken = data is not None and data != text.encode()
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data or b"") if broken else text

    def _event(self, choices: list[Any], **more: Any) -> bytes:
        if self.include_usage and not more:
            more = {"usage": self.so_far.shown() if self.has_usage_so_far else None}
        return b"data: %b\n\n" % self._object(self.chunk, choices, **more)

    def _object(self, kind: str, choices: list[Any], **more: Any) -> bytes:
        told = {"id": self.named, "object": kind, "created": self.created, "model": self.model}
        return orjson.dumps({**told, "choices": choices, **more})


class ChatWriter(Writer):
    """Writes the answers of OpenAI's chats."""

    kind = "chat.completion"
    chunk = "chat.completion.chunk"

    def first(self, choices: int) -> bytes:
        """Return the chunks that say who speaks."""
        said = {"delta": {"role": "assistant", "content": ""}}
        return b"".join(self._event([self._choice(index, said, Piece(""))]) for index in range(choices))

    def _logprobs(self, scored: Sequence[ScoredToken]) -> dict[str, Any]:
        content = []
        for token, _, scores in scored:
            if scores is not None:
                top = [self._shown(*each) for each in scores.likeliest]
                content.append({**self._shown(token, scores.logprob), "top_logprobs": top})
        return {"content": content, "refusal": None}

    def _shown(self, token: int, logprob: float) -> dict[str, Any]:
        assert self.tokenizer is not None  # there is no chat without
        text, data = self.tokenizer.token_text(token)
        return {"token": text, "logprob": _finite(logprob), "bytes": None if data is None else list(data)}

    def _answer(self, piece: Piece) -> dict[str, Any]:
        said: dict[str, Any] = {"content": piece.text} if piece.said is None else {"content": None, **piece.said}
        calls = said.pop("tool_calls", None)
        if calls:  # only parts of a stream number them
            said["tool_calls"] = [{name: call[name] for name in call if name != "index"} for call in calls]
        return {"message": {"role": "assistant", "refusal": None, **said}}

    def _part(self, piece: Piece) -> dict[str, Any]:
        if piece.said is not None:
            return {"delta": dict(piece.said)}
        return {"delta": {"content": piece.text} if piece.text else {}}


class GenerateWriter(Writer):
    """Writes the answers of the generate extension, which have one choice; every part has the same form."""

    def failed(self, error: HttpError) -> bytes:
        """Return the error as the last part."""
        return b"data: %b\n\n" % error.payload()

    def last(self, usage: Usage) -> bytes:
        """Return nothing: the last piece says that it is the last."""
        del usage
        return b""

    def piece(self, index: int, piece: Piece) -> bytes:
        """Return a part of a stream; the last one says why it is the last."""
        del index
        ends = {} if piece.finish is None else {"finish_reason": piece.finish}
        return b"data: %b\n\n" % self._form(piece, **ends)

    def whole(self, choices: Sequence[Piece], usage: Usage) -> bytes:
        """Return an answer that is not streamed."""
        (choice,) = choices
        return self._form(choice, finish_reason=choice.finish, usage=usage.shown())

    def _form(self, piece: Piece, **parameters: Any) -> bytes:
        told: dict[str, Any] = {"id": self.named, "model_name": self.model, "model_version": "1"}
        told["text_output"] = piece.text
        if parameters:
            told["parameters"] = parameters
        return orjson.dumps(self._with_tokens(told, piece.tokens))


BodyT = TypeVar("BodyT", bound=CompletionBody | ChatBody | GenerateBody)


def read_body(kind: type[BodyT], body: bytes | memoryview) -> BodyT:
    """Return a parsed body.

    Raises:
        HttpError: 400 for any other body, with the field that is wrong.
    """
    sent = bytes(body)
    if sent.count(b"[") + sent.count(b"{") > _MOST_CONTAINERS:
        raise HttpError(400, f"the body has more than {_MOST_CONTAINERS} brackets. Send less of it.")
    try:
        try:
            found = msgspec.json.decode(sent, type=kind, strict=kind is not GenerateBody)
        except msgspec.ValidationError as error:
            wrong = _wrong_field(msgspec.json.decode(sent), kind, strict=kind is not GenerateBody)
            raise wrong or bad_field("", f"is wrong: {error}") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:  # of names, and of fields not asked for
        raise HttpError(400, f"the body is no JSON: {error}. Send an object, without NaN and Infinity.") from None
    if isinstance(found, _Asked):
        _check_neutral(found)
        if found.stream_options is not None:
            _check_neutral(found.stream_options, "stream_options.")
    return found


def _check_neutral(fields: msgspec.Struct, at: str = "") -> None:
    for name, kept in _NEUTRAL.items():
        value = getattr(fields, name, None)
        if value is not None and not any(value == each and type(value) is type(each) for each in kept):
            shown = " or ".join(orjson.dumps(each).decode() for each in kept or (None,))
            raise bad_field(at + name, f"can only be {shown} here. Leave it out")


def made_body(kind: type[BodyT], **fields: Any) -> BodyT:
    """Return the same of fields that a caller in Python gave.

    Raises:
        HttpError: 400, with the field that is wrong.
    """
    try:
        return msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        raise _wrong_field(fields, kind) or bad_field("", f"is wrong: {error}") from None


def _wrong_field(value: Any, kind: Any, at: str = "", *, strict: bool = True) -> HttpError | None:
    """Return the refusal of the innermost field of a value that is not of its type; None if there is none. Without
    `strict`, numbers may be texts.

    msgspec says it in words alone, so that the types are gone through once more.
    """
    try:
        if kind is not msgspec.Raw:
            msgspec.convert(value, kind, strict=strict)
        return None
    except msgspec.ValidationError as error:
        said = str(error)
    dot = f"{at}." if at else ""
    for option in (kind, *get_args(kind)):
        if isinstance(value, list) and get_origin(option) is list:
            inner = (
                _wrong_field(each, get_args(option)[0], f"{at}[{n}]", strict=strict) for n, each in enumerate(value)
            )
        elif isinstance(value, dict) and isinstance(option, type) and issubclass(option, msgspec.Struct):
            tag_name, tag = option.__struct_config__.tag_field, option.__struct_config__.tag
            if tag_name is not None and value.get(tag_name) != tag:
                at = f"{dot}{tag_name}"
                continue
            fields = {each.encode_name: each for each in msgspec.structs.fields(option)}
            unknown = value.keys() - fields.keys() - {tag_name}
            if unknown:
                return bad_field(f"{dot}{min(unknown)}", "is not a field of this request. Leave it out")
            missing = next((name for name, each in fields.items() if each.required and name not in value), None)
            if missing is not None:
                return bad_field(f"{dot}{missing}", "is missing. Give it")
            inner = (
                _wrong_field(each, fields[name].type, f"{dot}{name}", strict=strict)
                for name, each in value.items()
                if name != tag_name
            )
        else:
            continue
        found = next((each for each in inner if each is not None), None)
        if found is not None:
            return found
    return bad_field(at, f"is wrong: {said[:1].lower()}{said[1:]}")


def bad_field(name: str, rule: str) -> HttpError:
    """Return the refusal of a field."""
    return HttpError(400, f"'{name}' {rule}." if name else f"the body {rule}.", param=name or None)


def wanted(
    body: CompletionBody | ChatBody | GenerateBody,
    model: str,
    tokenizer: Tokenizer | None,
    limits: GenerationLimits,
    *,
    is_streamed: bool = False,
    draw_seed: Callable[[], int] = lambda: secrets.randbits(_SEED_BITS),
) -> Wanted:
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
    return Wanted(choices, n, stops, is_streamed, writer, answer)


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
    asked = {"logit_bias": bool(bias), "response_format": bool(schema), "logprobs": logprobs is not None}
    for name, is_asked in asked.items():
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
        found = msgspec.json.decode(sent, type=dict[int, _Bias] | None) or {}
    except msgspec.DecodeError as error:
        told = str(error).partition(" - at ")[0]
        raise bad_field("logit_bias", f"is wrong: {told[:1].lower()}{told[1:]}. Give numbers by token ids") from None
    wrong = next((token for token in found if not 0 <= token < limits.vocabulary), None)
    if wrong is not None:
        rule = f"names token {wrong}; the model knows 0 to {limits.vocabulary - 1}. Use its own tokenizer"
        raise bad_field("logit_bias", rule)
    return tuple((token, bias) for token, bias in found.items() if bias)


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


def _finite(logprob: float) -> float:
    return max(logprob, _LEAST_LOGPROB)


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
    if len(given) * n > _MOST_CHOICES:
        rule = f"has {len(given)} prompts with {n} choices each, and a request may have {_MOST_CHOICES} choices"
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
    found = {name: value for name, value in msgspec.structs.asdict(message).items() if value not in (None, [])}
    if isinstance(message.content, list):
        found["content"] = "".join(_text(part, f"{at}.content[{n}]") for n, part in enumerate(message.content))
    elif message.content is None and message.role != "assistant":
        raise bad_field(f"{at}.content", "is missing. Give it")
    if message.tool_calls:
        found["tool_calls"] = [_called(call, f"{at}.tool_calls[{n}]") for n, call in enumerate(message.tool_calls)]
    return found


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


def _text(part: TextPart | _Other, name: str) -> str:
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


def _stops(stop: _Stop, name: str, tokenizer: Tokenizer | None) -> tuple[str, ...]:
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
