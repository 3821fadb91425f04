"""Texts of generative models: tokenizers, chat templates, and a text that grows token by token until it has a stop
string."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from jinja2 import TemplateSyntaxError

from tenuto.deployments.entry.protocols.tool_calls import ToolAnswer
from tenuto.errors import EnvironmentFaultError, first_line, refused
from tenuto.placement.workload import ModelSpec
from tenuto.profiles.networks.import_factory import check_path
from tenuto.profiles.networks.model_options import ModelOptions
from tenuto.profiles.networks.tokenizer_files import BYTE_TOKENIZER, TOKENIZER_FILE, tokenizer_file, tokenizer_place

TEXT_AT_ONCE_BYTES = 1 << 12  # limit: from here on it is read aside: a tokenizer takes up to 5 ms for this
MOST_TEXT_BYTES = 1 << 20  # limit: of the texts of a request: a tokenizer takes 0.6 s for them
TEXTS_TOO_LARGE = f"a prompt or the texts of a request may have {MOST_TEXT_BYTES >> 10} KiB. Send less of it."
TOO_MANY_TOKENS = "'{}' uses more tokens than its key allows. See Retry-After, or ask for less."
_BROKEN = "\ufffd"  # what a text ends with when its last character is not complete
_BYTE = re.compile("<0x[0-9A-F]{2}>")  # the name of a token that is one byte
_LONGEST_CHARACTER = 4  # format: bytes of the longest character in UTF-8
_MOST_READ_AGAIN = 64  # limit: tokens that are decoded again for each new one; a character has at most four with text


class TokenText(NamedTuple):
    """A token by itself: its text, in which bytes that are no character are replaced, and its bytes, if it has any."""

    text: str
    data: bytes | None


class Tokenizer(Protocol):
    """Makes tokens of texts, and texts of tokens. `reads_calls`: it says how answers call tools."""

    reads_calls: bool

    def encode(self, text: str, *, is_chat: bool = False) -> list[int]:
        """Return the tokens of a text. A chat's text has its special tokens already."""

    def decode(self, tokens: Sequence[int], *, with_special: bool = False) -> str:
        """Return the text of tokens, with or without special ones."""

    def has_text(self, token: int, *, with_special: bool = False) -> bool:
        """Whether a token is part of texts: not when it is not known, or special."""

    def token_text(self, token: int) -> TokenText:
        """Return what one token is by itself; special ones have their names."""

    def read_calls(self, prompt: str, tools: Sequence[Mapping[str, Any]]) -> ToolAnswer:
        """Return what reads the answer to a chat with tools."""

    def chat(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()) -> str:
        """Return a chat as one text, which ends where the model's answer begins.

        Raises:
            InvalidInputError: there is no template, or it fails for these messages.
        """


class ByteTokenizer:
    """One token a byte of UTF-8; a token beyond 255 is the byte of its number modulo 256. It needs no file, and belongs
    to no trained model: it is for emulated GPUs and random weights."""

    reads_calls = False

    def encode(self, text: str, *, is_chat: bool = False) -> list[int]:
        """Return the bytes of a text."""
        del is_chat
        return list(text.encode())

    def decode(self, tokens: Sequence[int], *, with_special: bool = False) -> str:
        """Return the text of bytes."""
        del with_special
        return bytes(token % 256 for token in tokens).decode(errors="replace")  # format: values of a byte

    def has_text(self, token: int, *, with_special: bool = False) -> bool:
        """Every token is a byte."""
        del token, with_special
        return True

    def token_text(self, token: int) -> TokenText:
        """Return the byte of a token."""
        return TokenText(self.decode([token]), bytes([token % 256]))  # format: values of a byte

    def read_calls(self, prompt: str, tools: Sequence[Mapping[str, Any]]) -> ToolAnswer:
        """Raise: bytes call nothing."""
        raise NotImplementedError

    def chat(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()) -> str:
        """Return one line for each message."""
        del tools
        return "".join(f"{message['role']}: {message.get('content', '')}\n" for message in messages) + "assistant: "


class FileTokenizer:
    """The tokenizer of a folder that `save_pretrained` wrote, or of one `tokenizer.json`, as transformers reads it."""

    def __init__(self, place: str) -> None:
        """Read it.

        Raises:
            InvalidInputError: it is not there, or cannot be read.
            EnvironmentFaultError: the package `transformers` is not installed.
        """
        try:
            # `AutoTokenizer` imports torch, which takes seconds and 200 MiB. It reads tokenizer.json in the same way,
            # and differs where tokenizer_config.json leaves special tokens to the defaults of a class.
            from transformers import PreTrainedTokenizerFast
            from transformers.utils.chat_template_utils import render_jinja_template
        except ImportError as error:
            raise EnvironmentFaultError(
                "texts need the package 'transformers'. Run: pip install transformers"
            ) from error
        check_path(place, "tokenizer")
        file = tokenizer_file(place)
        try:
            file.stat()
            if file.name == TOKENIZER_FILE:
                self._whole = PreTrainedTokenizerFast.from_pretrained(str(file.parent), local_files_only=True)
            else:
                self._whole = PreTrainedTokenizerFast(tokenizer_file=str(file))
            self._fast = self._whole.backend_tokenizer
            self._fast.no_truncation()
            self._fast.no_padding()
            added = self._fast.get_added_tokens_decoder()
            self._special = frozenset(number for number, token in added.items() if token.special)
        except Exception as error:  # the packages raise plain ones
            raise refused(
                "tokenizer",
                place,
                f"cannot be read ({first_line(error)})",
                "Give a folder or a tokenizer.json of the tokenizers library that exists on the gateways' node.",
            ) from error
        template = getattr(self._whole, "response_template", None)  # since transformers 5.13
        self._answers = template and self._read_answers(template, place)
        self.reads_calls = bool(template and "tool_calls" in template.get("fields", ()))
        sources = self._whole.chat_template or {}
        for source in sources.values() if isinstance(sources, dict) else [sources]:
            try:
                render_jinja_template([[]], chat_template=source)
            except TemplateSyntaxError as error:
                raise refused(
                    "chat_template",
                    place,
                    f"is no template ({first_line(error)})",
                    "Correct the template of the tokenizer.",
                ) from error
            except Exception:  # it wants messages
                continue

    @staticmethod
    def _read_answers(template: Any, place: str) -> Any:
        from transformers.utils.chat_parsing.response_templates import load_response_template

        try:
            return load_response_template(template)
        except ValueError as error:
            raise refused(
                "response_template",
                place,
                f"cannot be read ({first_line(error)})",
                "Correct it in the tokenizer's tokenizer_config.json.",
            ) from error

    def encode(self, text: str, *, is_chat: bool = False) -> list[int]:
        """Return the tokens of a text."""
        # Of the two, only this call lets go of the interpreter: a text of 1 MiB takes 0.6 s.
        found: list[int] = self._fast.encode_batch([text], add_special_tokens=not is_chat)[0].ids
        return found

    def decode(self, tokens: Sequence[int], *, with_special: bool = False) -> str:
        """Return the text of tokens."""
        found: str = self._fast.decode(list(tokens), skip_special_tokens=not with_special)
        return found

    def has_text(self, token: int, *, with_special: bool = False) -> bool:
        """Whether a token is part of texts."""
        return (with_special or token not in self._special) and self._fast.id_to_token(token) is not None

    def token_text(self, token: int) -> TokenText:
        """Return what a token adds to a text. Some decoders drop the blank before the first one, so that the text of
        the second of two equal ones is taken."""
        name = self._fast.id_to_token(token)
        if name is None:
            return TokenText("", None)
        first, both = (self._fast.decode([token] * times, skip_special_tokens=False) for times in (1, 2))
        text = both[len(first) :]
        return TokenText(text, _bytes(name) if _BROKEN in text else text.encode())

    def read_calls(self, prompt: str, tools: Sequence[Mapping[str, Any]]) -> ToolAnswer:
        """Return what reads the answer to a chat with tools, by the tokenizer's `response_template`."""
        parser = self._whole.get_response_parser(self._answers, prefix=prompt, tools=list(tools))
        return ToolAnswer(parser, self._whole.eos_token or "")

    def chat(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()) -> str:
        """Return a chat as the model's own template writes it."""
        if self._whole.chat_template is None:
            raise refused(
                "messages", len(messages), "need a chat template, and the model has none", "Ask /v1/completions."
            )
        try:
            return str(
                self._whole.apply_chat_template(
                    list(messages), tools=list(tools) or None, add_generation_prompt=True, tokenize=False
                )
            )
        except Exception as error:  # a template may do anything
            raise refused(
                "messages",
                len(messages),
                f"do not fit the model's chat template ({first_line(error)})",
                "Send the roles and the order that the template takes.",
            ) from error


def _bytes(name: str) -> bytes | None:
    """Return the bytes of a token by its name in the vocabulary, where its text has bytes that are no character."""
    if _BYTE.fullmatch(name):  # of tokenizers that fall back to bytes
        return bytes.fromhex(name[3:5])
    alphabet = _byte_alphabet()
    return bytes(alphabet[each] for each in name) if all(each in alphabet for each in name) else None


@functools.cache
def _byte_alphabet() -> dict[str, int]:
    """Return the bytes by the characters that stand for them in byte-level vocabularies."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return {character: byte for byte, character in bytes_to_unicode().items()}


def tokenizer_of(spec: ModelSpec) -> Tokenizer | None:
    """Return the tokenizer of a model: the one its options name, else that of its folder of weights, if it has one.

    Raises:
        InvalidInputError: it cannot be read.
        EnvironmentFaultError: the package `transformers` is not installed.
    """
    return open_tokenizer(_named(spec), spec.weights_path or spec.source)


def place_of(spec: ModelSpec) -> Path:
    """Return the file or folder in which the tokenizer of a model may be."""
    return Path(_named(spec) or spec.weights_path or spec.source or BYTE_TOKENIZER)


def _named(spec: ModelSpec) -> str | None:
    origin = f"options of {spec.name}"
    return ModelOptions.parse(spec.options, origin).checked_build(origin).tokenizer


def open_tokenizer(named: str | None, weights: str | None) -> Tokenizer | None:
    """Return the tokenizer with this name or at this place, else that of a folder of weights, if it has one."""
    if named == BYTE_TOKENIZER:
        return ByteTokenizer()
    place = tokenizer_place(named, weights)
    return None if place is None else FileTokenizer(place)


class GrowingText:
    """A text that grows token by token. Invariant: what was given out never changes, and has no part of a stop string.

    A token may end within a character, and a stop string may begin in one token and end in a later one: such an end is
    held back until it is known.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, stops: Sequence[str] = (), fewest: int = 0, *, with_special: bool = False
    ) -> None:
        """Begin without tokens; a stop string ends the text behind the `fewest` first ones only."""
        self._tokenizer = tokenizer
        self._with_special = with_special
        self._stops = stops
        self._early = fewest  # tokens that are still to come before a stop string ends the text
        self.length = 0  # characters that are complete, also of what is held back
        self._tokens: list[int] = []
        self._from = 0  # the next text is read from this token on: tokens before the new ones may change their text
        self._whole = 0  # so many tokens ended with a whole character
        self._written = 0  # characters of the text from `_from` on that are written
        self._broken = 0  # tokens since one ended with a whole character
        self._held = ""
        self.is_stopped = False

    def add(self, token: int) -> str:
        """Take a token, and return the text that it completes."""
        self._early -= 1
        if self.is_stopped or not self._has_text(token):
            return ""
        self._tokens.append(token)
        return self._cut(self._read(), is_last=False)

    def _has_text(self, token: int) -> bool:
        return self._tokenizer is not None and self._tokenizer.has_text(token, with_special=self._with_special)

    def _decode(self, tokens: Sequence[int]) -> str:
        return "" if self._tokenizer is None else self._tokenizer.decode(tokens, with_special=self._with_special)

    def end(self) -> str:
        """Return the text that was held back; no token comes any more."""
        return "" if self.is_stopped else self._cut(self._read(is_last=True), is_last=True)

    def _read(self, *, is_last: bool = False) -> str:
        """Return the text that is whole and not written yet.

        Tokenizers show the bytes of a character that is not complete in one of two ways: byte-level ones as one
        replacement character, those that fall back to bytes as one for each byte of all that stand in a row. A
        character has four bytes at most: what more tokens left broken is complete, or never will be, up to its last.
        """
        text = self._decode(self._tokens[self._from :])
        broken = len(text) - len(text.rstrip(_BROKEN))
        self._broken = self._broken + 1 if broken else 0
        if self._broken >= _LONGEST_CHARACTER:
            broken = 1
        end = len(text) if is_last else len(text) - broken
        new = text[self._written : end]
        self.length += len(new)
        self._written = max(self._written, end)
        if new and not broken:
            self._from, self._whole = self._whole, len(self._tokens)
            self._written = len(self._decode(self._tokens[self._from :]))
        elif len(self._tokens) - self._from > _MOST_READ_AGAIN:
            self._read_less(text)
        return new

    def _read_less(self, text: str) -> None:
        """Let the next text be read from a later token on, if that leaves the end of this one as it is: however long
        no token ends with a whole character, each costs the same."""
        later = len(self._tokens) - _MOST_READ_AGAIN // 2
        shorter = self._decode(self._tokens[later:])
        written = self._written - len(text) + len(shorter)
        if written > _LONGEST_CHARACTER and text.endswith(shorter[_LONGEST_CHARACTER:]):
            self._from = self._whole = later
            self._written = written

    def _cut(self, text: str, *, is_last: bool) -> str:
        """Return the text that can be given out: with a stop string, everything up to the first one."""
        text = self._held + text
        at = min((found for stop in self._stops if (found := text.find(stop)) >= 0), default=-1)
        if at >= 0 and self._early < 0:
            self.is_stopped, self._held = True, ""
            return text[:at]
        kept = 0 if is_last else max((_begun(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - kept :]
        return text[: len(text) - kept]


def _begun(text: str, stop: str) -> int:
    """Return how many characters at the end of a text may be the beginning of a stop string."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if stop.startswith(text[-n:])), 0)
