"""Chats are written as transformers writes them: its own `AutoTokenizer` beside ours, over templates that packages ship
and over the ways in which folders hold them."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from tenuto.deployments.entry.protocols.texts import FileTokenizer
from tenuto.errors import InvalidInputError
from tenuto.profiles.networks.text_networks import prepare_transformers
from tests.instruments.chat_templates import WHY_NONE, chat_templates

tokenizers = pytest.importorskip("tokenizers")
prepare_transformers()
from transformers import AutoTokenizer  # noqa: E402  # torchvision is imported in our way first

TEMPLATES = dict(list(chat_templates().items())[::4])  # every fourth, as many are alike
if not TEMPLATES:
    pytest.skip(WHY_NONE, allow_module_level=True)
# Special tokens, as tokenizer_config.json writes them.
TOKENS: list[dict[str, Any]] = [
    {},
    {"bos_token": "<s>", "eos_token": "</s>", "pad_token": None},
    {"bos_token": {"__type": "AddedToken", "content": "<s>", "lstrip": False, "rstrip": False, "special": True}},
    {"eos_token": "</s>", "extra_special_tokens": {"image_token": "<image>"}, "add_bos_token": True},
    {"bos_token": "<s>", "additional_special_tokens": ["<|im_start|>", "<|im_end|>"], "image_token": "<image>"},
]
CLASSES = [None, "PreTrainedTokenizerFast", "TokenizersBackend", "SomebodysTokenizer"]
USER, SYSTEM = {"role": "user", "content": "What is it? <s>"}, {"role": "system", "content": "Be short."}
ANSWER = {"role": "assistant", "content": "\n An answer & more é "}
CHATS: list[list[dict[str, Any]]] = [
    [USER],
    [SYSTEM, USER],
    [SYSTEM, USER, ANSWER, USER],
    [USER, {"role": "assistant", "content": None}, USER],
    [USER, {**ANSWER, "reasoning_content": "So it is."}, {**USER, "name": "anna"}],
    [{"role": "nobody", "content": "x"}],
    [USER, USER],
    [ANSWER],
]


def save(folder: Path, place: str, template: str, settings: dict[str, Any]) -> None:
    """Write a tokenizer with a template at one of the places that transformers knows."""
    words = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>", "What", "is", "it", "?", "user", "assistant"]
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({word: n for n, word in enumerate(words)}, "<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.add_special_tokens(words[:3])
    made.enable_truncation(12)  # as of a model that was trained on short texts
    made.enable_padding(length=40)
    made.save(str(folder / "tokenizer.json"))
    if place == "settings":
        settings = {**settings, "chat_template": template}
    elif place == "names":
        named = {"default": template, "tool_use": "tools: {{ tools | tojson }} {{ messages[0].content }}"}
        settings = {**settings, "chat_template": [{"name": name, "template": text} for name, text in named.items()]}
    else:
        (folder / "chat_template.jinja").write_text(template)
    if place == "files":
        (folder / "additional_chat_templates").mkdir()
        (folder / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools | tojson }}")
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


class Clock(datetime):
    """A clock that stands still, as some templates write the date."""

    @classmethod
    def now(cls, tz: Any = None) -> datetime:
        return datetime(2026, 2, 3, 4, 5, tzinfo=tz)


PLACES = ["settings", "names", "file", "files"]


@pytest.mark.parametrize("number", range(2 * len(TEMPLATES)))
def test_chats_are_those_of_transformers(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name, place = sorted(TEMPLATES)[number // 2], PLACES[(number + number // 4) % len(PLACES)]
    monkeypatch.setattr("transformers.utils.chat_template_utils.datetime", Clock)
    settings = {**TOKENS[number % len(TOKENS)], "tokenizer_class": CLASSES[number % len(CLASSES)]}
    save(tmp_path, place, TEMPLATES[name], {key: value for key, value in settings.items() if key or value})
    ours, theirs = FileTokenizer(str(tmp_path)), AutoTokenizer.from_pretrained(str(tmp_path), local_files_only=True)
    written = 0
    for messages in CHATS:
        try:
            expected = theirs.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        except Exception:
            with pytest.raises(InvalidInputError, match="chat template"):
                ours.chat(messages)
            continue
        written += 1
        text = ours.chat(messages)
        assert text == expected
        tokens = theirs.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
        assert ours.encode(text, is_chat=True) == tokens
        assert ours.encode(text) == theirs(text)["input_ids"]
    assert written > 1 or "bos_token" not in settings  # some templates fail without it
