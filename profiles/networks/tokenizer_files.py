"""Where the tokenizer of a model is: in a file, in a folder that `save_pretrained` wrote, or beside the weights."""

from __future__ import annotations

from pathlib import Path

BYTE_TOKENIZER = "bytes"  # the name of the tokenizer that needs no file: one token a byte
TOKENIZER_FILE = "tokenizer.json"  # format: where the tokenizers library saves one


def tokenizer_place(named: str | None, weights: str | None) -> str | None:
    """Return where a model's tokenizer is.

    Args:
        named: the file or folder of the model's options, or `BYTE_TOKENIZER`; it comes first.
        weights: the file or folder of its weights. Only a folder that has a tokenizer counts.
    """
    if named is not None:
        return named
    return weights if weights is not None and (Path(weights) / TOKENIZER_FILE).exists() else None


def tokenizer_file(place: str) -> Path:
    """Return the file of a tokenizer at this place, which is that file or its folder."""
    path = Path(place)
    return path / TOKENIZER_FILE if path.is_dir() else path
