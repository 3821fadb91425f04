"""The bodies of the protocols of generation: OpenAI's completions and chats, and the generate extension of the Open
Inference Protocol. This module reads them, and names the field that is wrong."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, TypeVar

import msgspec
import orjson
from msgspec import Meta

from tenuto.deployments.entry.http.exchange import HttpError

MOST_CHOICES = 128  # limit: generations that one request asks for; each is admitted, and has its memory, by itself
_MOST_CONTAINERS = 1 << 15  # limit: lists and objects of a body, those in texts too; 350,000 take 140 ms
_UNKNOWN = re.compile("Object contains unknown field `(.*)`")
_MISSING = re.compile("Object missing required field `(.*)`")
_MOST_LIKELIEST = 20  # format: of the likeliest tokens that are shown, by OpenAI's reference

_Count = Annotated[int, Meta(ge=1, le=2**31 - 1)]
_Choices = Annotated[int, Meta(ge=1, le=MOST_CHOICES)]
_Temperature = Annotated[float, Meta(ge=0.0, le=2.0)]
_Likeliest = Annotated[int, Meta(ge=0, le=_MOST_LIKELIEST)]
_TopP = Annotated[float, Meta(gt=0.0, le=1.0)]
_Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Stop = str | list[str] | None
Priority = Literal["offline"] | None
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
    stop: Stop = None
    min_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    ignore_eos: bool | None = None
    priority: Priority = None


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


class OtherPart(msgspec.Struct, tag_field="type"):
    """A part of a message that is no text. It is read so that it is refused by its name."""


class Picture(OtherPart, tag="image_url"):
    """A picture."""


class Sound(OtherPart, tag="input_audio"):
    """A sound."""


class File(OtherPart, tag="file"):
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


BodyT = TypeVar("BodyT", bound=msgspec.Struct)


def read_body(kind: type[BodyT], body: bytes | memoryview) -> BodyT:
    """Return a parsed body.

    Raises:
        HttpError: 400 for any other body, with the field that is wrong.
    """
    sent = bytes(body)
    if sent.count(b"[") + sent.count(b"{") > _MOST_CONTAINERS:
        raise HttpError(400, f"the body has more than {_MOST_CONTAINERS} brackets. Send less of it.")
    try:
        parsed = msgspec.json.decode(sent, type=kind, strict=kind is not GenerateBody)
    except msgspec.ValidationError as error:
        raise _wrong_field(error) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:  # of names, and of fields not asked for
        raise HttpError(400, f"the body is no JSON: {error}. Send an object, without NaN and Infinity.") from None
    if isinstance(parsed, _Asked):
        _check_neutral(parsed)
        if parsed.stream_options is not None:
            _check_neutral(parsed.stream_options, "stream_options.")
    return parsed


def _check_neutral(fields: msgspec.Struct, at: str = "") -> None:
    for name, neutral in _NEUTRAL.items():
        value = getattr(fields, name, None)
        if value is not None and not any(value == each and type(value) is type(each) for each in neutral):
            shown = " or ".join(orjson.dumps(each).decode() for each in neutral or (None,))
            raise bad_field(at + name, f"can only be {shown} here. Leave it out")


def made_body(kind: type[BodyT], **fields: Any) -> BodyT:
    """Return the same of fields that a caller in Python gave.

    Raises:
        HttpError: 400, with the field that is wrong.
    """
    try:
        return msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        raise _wrong_field(error) from None


def _wrong_field(error: msgspec.ValidationError) -> HttpError:
    """Return the refusal of the field that a body of another type has; msgspec names it in words alone."""
    said, _, place = str(error).partition(" - at `$")
    at = place.removeprefix(".").rstrip("`").partition("[...]")[0]
    dot = f"{at}." if at else ""
    if unknown := _UNKNOWN.fullmatch(said):
        return bad_field(dot + unknown[1], "is not a field of this request. Leave it out")
    if missing := _MISSING.fullmatch(said):
        return bad_field(dot + missing[1], "is missing. Give it")
    return bad_field(at, f"is wrong: {said[:1].lower()}{said[1:]}")


def bad_field(name: str, rule: str) -> HttpError:
    """Return the refusal of a field."""
    return HttpError(400, f"'{name}' {rule}." if name else f"the body {rule}.", param=name or None)
