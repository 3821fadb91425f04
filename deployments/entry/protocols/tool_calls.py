"""Answers of chats with tools: what a model says, thinks and calls, as its text grows."""

from __future__ import annotations

import copy
import json
import secrets
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import msgspec

# What the parser raises for a call that is no JSON, lacks its name, has another form or is nested too deep, and
# `_tool_call` for half a character.
_UNREADABLE = (ValueError, KeyError, TypeError, RecursionError)
_REASONING = ("reasoning_content", "reasoning", "thinking")  # format: names of templates for what a model thinks


class _Event(msgspec.Struct):
    """An event of the parser: a part of the answer begins, goes on with a text, or ends with a value."""

    type: str
    field: str
    text: str = ""
    value: Any = None


class _Function(msgspec.Struct):
    """A function that is called."""

    name: str
    arguments: Any = msgspec.field(default_factory=dict)


class _Call(msgspec.Struct):
    """A call, as templates read it."""

    function: _Function


class AnswerParser(Protocol):
    """transformers' `ResponseParser`: reads texts by the `response_template` of a tokenizer."""

    initial_events: list[dict[str, Any]]
    _buffer: str
    _pos: int

    def feed(self, text: str) -> list[dict[str, Any]]:
        """Return what a further part of the text begins, goes on with and ends; raises if that is not as it says."""

    def finalize(self) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """Return the message, and what the end of the text ends; raises likewise."""


class ToolAnswer:
    """An answer that may call tools, part by part. Invariant: a call that cannot be read, or is cut, is content. Spaces
    around content and reasoning are left out, as transformers does."""

    def __init__(self, parser: AnswerParser, last: str) -> None:
        """Begin.

        Args:
            parser: of the tokenizer, which has read the prompt.
            last: the text of the token that ends answers, which a call may need, and no text of ours has.
        """
        self._parser = parser
        self._last = last
        self._call = ""  # what is written of a call that is open
        self._space = ""  # at the end of a part that goes on, perhaps
        self._is_begun = False  # the part has more than spaces
        self._has_failed = False  # the parser takes no more
        self.calls = 0
        self._said(parser.initial_events)  # what the prompt has of the answer

    def add(self, text: str) -> dict[str, Any]:
        """Take text, and return what it completes: `content`, `reasoning_content` and `tool_calls`, each if there is
        any."""
        # The parser forgets the text in which it fails: so that is one character.
        return joined(self._fed(character) for character in text)

    def end(self, *, is_whole: bool) -> dict[str, Any]:
        """Return what the end completes. `is_whole`: the model ended the text; otherwise an open call is none."""
        if self._has_failed:
            return {}
        before = copy.copy(self._parser)
        try:
            return self._said(self._parser.finalize()[1], is_whole=is_whole)
        except _UNREADABLE:
            try:
                return self._said([*before.feed(self._last), *before.finalize()[1]], is_whole=is_whole)
            except _UNREADABLE:
                return self._failed()

    def _fed(self, text: str) -> dict[str, Any]:
        if self._has_failed:
            return {"content": text}
        try:
            return self._said(self._parser.feed(text))
        except _UNREADABLE:
            return self._failed()

    def _failed(self) -> dict[str, Any]:
        """Return the call that cannot be read, and what the parser has not looked at, which only it knows."""
        self._has_failed = True
        return {"content": self._call + self._parser._buffer[self._parser._pos :]}

    def _said(self, events: Iterable[Mapping[str, Any]], *, is_whole: bool = True) -> dict[str, Any]:
        return joined(self._of(msgspec.convert(event, _Event), is_whole=is_whole) for event in events)

    def _of(self, event: _Event, *, is_whole: bool) -> dict[str, Any]:
        """Return what one event of the parser says."""
        kind, field = event.type, event.field
        if kind == "region_open":
            self._call = self._space = ""
            self._is_begun = False
        elif kind == "region_chunk" and field == "tool_calls":
            self._call += event.text
        elif kind == "region_chunk":
            text = self._space + event.text
            if not self._is_begun:
                text = text.lstrip()
            self._is_begun = self._is_begun or bool(text)
            shown = text.rstrip()
            self._space = text[len(shown) :]
            name = "reasoning_content" if field in _REASONING else field
            return {name: shown} if name in ("content", "reasoning_content") else {}
        elif field == "tool_calls":
            calls = _functions(event.value) if is_whole else None
            if calls is None:
                return {"content": self._call}
            numbered = [_tool_call(self.calls + place, call) for place, call in enumerate(calls)]
            self.calls += len(calls)
            return {"tool_calls": numbered}
        return {}


def _functions(value: Any) -> list[_Function] | None:
    """Return the functions that a value of the parser calls; None if it is no call."""
    try:
        return [call.function for call in msgspec.convert(value if isinstance(value, list) else [value], list[_Call])]
    except msgspec.ValidationError:
        return None


def _tool_call(index: int, function: _Function) -> dict[str, Any]:
    """Return a call in OpenAI's form, in which arguments are a text; raises `ValueError` for one that is no UTF-8."""
    arguments = function.arguments
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    (function.name + arguments).encode()
    named = {"name": function.name, "arguments": arguments}
    return {"index": index, "id": f"call_{secrets.token_hex(12)}", "type": "function", "function": named}


def joined(parts: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return what several parts say together: texts and lists one behind the other."""
    by_name: dict[str, list[Any]] = {}
    for part in parts:
        for name, value in part.items():
            if value:
                by_name.setdefault(name, []).append(value)
    return {
        name: "".join(values) if isinstance(values[0], str) else [each for value in values for each in value]
        for name, values in by_name.items()
    }
