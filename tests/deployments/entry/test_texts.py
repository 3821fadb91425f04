"""Texts of generative models: tokens and back, templates, and texts that grow until a stop string."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tenuto.deployments.entry.protocols.texts import (
    ByteTokenizer,
    FileTokenizer,
    GrowingText,
    Tokenizer,
    open_tokenizer,
)
from tenuto.errors import InvalidInputError


def grown(text: str, stops: tuple[str, ...]) -> tuple[list[str], bool]:
    growing = GrowingText(ByteTokenizer(), stops)
    parts = [growing.add(token) for token in ByteTokenizer().encode(text)]
    return [*parts, growing.end()], growing.is_stopped


@given(st.text(max_size=60))
def test_a_text_without_stop_strings_comes_whole(text: str) -> None:
    assert "".join(grown(text, ())[0]) == text


@given(st.text("abé€", max_size=40), st.lists(st.text("abé€", min_size=1, max_size=4), min_size=1, max_size=3))
def test_a_text_ends_before_its_first_stop_string(text: str, stops: list[str]) -> None:
    parts, is_stopped = grown(text, tuple(stops))
    # The first moment at which one is complete counts; of several, the one that begins first.
    ends = [end for end in range(len(text) + 1) if any(text[:end].endswith(stop) for stop in stops)]
    assert is_stopped == bool(ends)
    if ends:
        whole = text[: ends[0]]
        assert "".join(parts) == whole[: min(whole.find(stop) for stop in stops if stop in whole)]
    else:
        assert "".join(parts) == text


def test_only_what_may_be_a_stop_string_is_held_back() -> None:
    parts, _ = grown("one two e", ("e t!",))
    assert parts == ["o", "n", "", "", "", "e tw", "o", " ", "", "e"]


def test_a_broken_character_is_shown_at_last() -> None:
    growing = GrowingText(ByteTokenizer())
    assert [growing.add(token) for token in (104, 0xE2, 0x82)] == ["h", "", ""]
    assert growing.end() == "�"


PIECES = [
    b"a",
    b" b",
    "\u00e9".encode(),
    "\u20ac".encode(),
    "\U0001f600".encode(),
    b"\xac\xe2\x82",
    b"\xa9\xf0\x9f\x98",
    b"\xff",
]


def saved(folder: Path, tokens: list[str], decoder: Any) -> FileTokenizer:
    """Return a tokenizer with these tokens, of which the first is special, and a decoder."""
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({each: n for n, each in enumerate(tokens)}, tokens[0]))
    made.decoder = decoder
    made.add_special_tokens(tokens[:1])
    made.save(str(folder / "tokenizer.json"))
    return FileTokenizer(str(folder))


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> FileTokenizer:
    """As those of GPT-2: tokens are bytes in a row, whole characters or not."""
    tokenizers = pytest.importorskip("tokenizers")
    letters = {byte: chr(byte) for byte in [*range(33, 127), *range(161, 173), *range(174, 256)]}
    letters |= {byte: chr(256 + n) for n, byte in enumerate(sorted(set(range(256)) - letters.keys()))}
    tokens = ["<s>", *("".join(letters[byte] for byte in piece) for piece in PIECES), *letters.values()]
    return saved(tmp_path_factory.mktemp("byte"), list(dict.fromkeys(tokens)), tokenizers.decoders.ByteLevel())


@pytest.fixture(scope="module")
def byte_fallback(tmp_path_factory: pytest.TempPathFactory) -> FileTokenizer:
    """As those of Llama 2: tokens are characters, and bytes of those that are none."""
    decoders = pytest.importorskip("tokenizers").decoders
    words = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokens = ["<s>", "\u2581", "\u2581b", "a", "\u00e9", *(f"<0x{byte:02X}>" for byte in range(256))]
    return saved(tmp_path_factory.mktemp("fallback"), tokens, decoders.Sequence(words))


# Few different tokens, so that many of them stand in a row; mostly broken ones, and one that the tokenizer has not.
IN_A_ROW = st.lists(st.one_of(st.integers(0, 8), st.integers(0, 270)), max_size=60)


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback", "bytes"])
@given(tokens=IN_A_ROW, seed=st.integers(0, 9))
def test_a_text_that_grows_is_the_text_of_all_its_tokens(
    kind: str, request: pytest.FixtureRequest, tokens: list[int], seed: int
) -> None:
    tokenizer: Tokenizer = ByteTokenizer() if kind == "bytes" else request.getfixturevalue(kind)
    if kind == "byte_fallback":  # bytes of characters, of which a few are another
        draws = random.Random(seed)
        for byte in draws.choice(["\u20ac\u00e9", "\U0001f600\u20ac\u20ac", "a\U0001f600"]).encode() * 3:
            tokens.append(5 + byte if draws.random() < 0.97 else draws.randrange(260))
    growing = GrowingText(tokenizer)
    text = "".join([*(growing.add(token) for token in tokens), growing.end()])
    whole = tokenizer.decode(tokens)
    if kind != "byte_fallback" or "\ufffd" not in whole:
        assert text == whole
    else:  # one byte that belongs to no character breaks all that it stands in a row with; characters before it stay
        assert is_within(whole, text)
        assert is_within(text, "".join(one_by_one(tokens)))


@pytest.mark.parametrize("kind", ["byte_level", "bytes"])
@given(
    tokens=IN_A_ROW,
    stops=st.lists(st.sampled_from(["a", " b", "\u20ac", "ba", "a b", "\u20ac\u20ac", "x"]), max_size=2),
)
def test_a_text_of_any_tokens_ends_before_its_first_stop_string(
    kind: str, request: pytest.FixtureRequest, tokens: list[int], stops: list[str]
) -> None:
    tokenizer: Tokenizer = ByteTokenizer() if kind == "bytes" else request.getfixturevalue(kind)
    growing = GrowingText(tokenizer, stops)
    text = "".join([*(growing.add(token) for token in tokens), growing.end()])
    whole = tokenizer.decode(tokens)
    assert not any(stop in text for stop in stops)
    assert whole.startswith(text)
    if growing.is_stopped:
        assert whole[len(text) :].startswith(tuple(stops))
    else:
        assert text == whole


def one_by_one(tokens: list[int]) -> Iterator[str]:
    """Return the characters that are whole in tokens of `byte_fallback`, whatever they stand in a row with."""
    for is_byte, row in itertools.groupby(tokens, lambda token: 5 <= token <= 260):
        if is_byte:
            yield bytes(token - 5 for token in row).decode(errors="replace")
        else:
            yield from (["", " ", " b", "a", "\u00e9"][token] if token < 5 else "" for token in row)


def is_within(part: str, whole: str) -> bool:
    """Whether the letters of a text come in this order in another one."""
    letters = iter(whole)
    return all(letter in letters for letter in part.replace("\ufffd", "").strip(" "))


@pytest.mark.parametrize("piece", [6, 7, 8])
def test_each_token_costs_the_same_however_long_none_ends_with_a_character(
    byte_level: FileTokenizer, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = [piece] * 500
    whole, decode = byte_level.decode(tokens), byte_level.decode
    lengths: list[int] = []

    def decoded(some: Sequence[int], *, with_special: bool = False) -> str:
        lengths.append(len(some))
        return decode(some, with_special=with_special)

    monkeypatch.setattr(byte_level, "decode", decoded)
    growing = GrowingText(byte_level)
    assert "".join([*(growing.add(token) for token in tokens), growing.end()]) == whole
    assert max(lengths) < 100


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tokenizers = pytest.importorskip("tokenizers")
    words = {word: number for number, word in enumerate(["<s>", "<unk>", "hello", "world", ":", "user", "assistant"])}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.add_special_tokens(["<s>", "<unk>"])
    made.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    made.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def settings(folder: Path, **given: object) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps(given))


TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    "{{ m.role }} : {{ m.content }} {% endfor %}{% if add_generation_prompt %}assistant : {% endif %}"
)


def test_a_folder_brings_its_tokenizer_and_its_template(folder: Path) -> None:
    settings(folder, chat_template=TEMPLATE, bos_token={"__type": "AddedToken", "content": "<s>"})
    tokenizer = open_tokenizer(None, str(folder))
    assert tokenizer is not None
    assert tokenizer.encode("hello world") == [0, 2, 3]
    assert tokenizer.decode([0, 2, 3]) == "hello world"
    chat = tokenizer.chat([{"role": "user", "content": "hello"}])
    assert chat == "<s>user : hello assistant : "
    assert tokenizer.encode(chat, is_chat=True) == [0, 5, 4, 2, 6, 4]
    with pytest.raises(InvalidInputError, match="no tools"):
        tokenizer.chat([{"role": "tool", "content": "x"}])


def test_a_growing_text_of_words_has_their_spaces(folder: Path) -> None:
    growing = GrowingText(FileTokenizer(str(folder)))
    assert [growing.add(token) for token in (2, 3, 2)] == ["hello", " world", " hello"]


def test_what_cannot_be_used_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="/v1/completions"):
        FileTokenizer(str(folder)).chat([])
    (folder / "chat_template.jinja").write_text("{% for %}")
    with pytest.raises(InvalidInputError, match="template"):
        FileTokenizer(str(folder))
    with pytest.raises(InvalidInputError, match="cannot be read"):
        FileTokenizer(str(tmp_path / "absent.json"))
    assert open_tokenizer(None, None) is None
    assert isinstance(open_tokenizer("bytes", None), ByteTokenizer)


def test_a_template_reaches_nothing_but_its_messages(folder: Path) -> None:
    settings(folder, chat_template="{{ messages.__class__.__mro__ }}")
    with pytest.raises(InvalidInputError, match="template"):
        FileTokenizer(str(folder)).chat([{"role": "user", "content": "x"}])
