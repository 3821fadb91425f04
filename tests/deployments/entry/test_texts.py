"""Texts of generative models: tokens and back, templates, and texts that grow until a stop string."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tenuto.deployments.entry.texts import ByteTokenizer, FileTokenizer, GrowingText, open_tokenizer
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
    settings(folder, chat_template=TEMPLATE, bos_token={"content": "<s>"})
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
