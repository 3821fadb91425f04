"""The folder of a check: every file is written whole, as soon as there is a result."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from tenuto.documents import load_document
from tenuto.errors import InvalidInputError, TenutoError


def step_parser(step: str, description: str | None) -> argparse.ArgumentParser:
    """Return the arguments that steps with a model have in common."""
    parser = argparse.ArgumentParser(prog=f"python -m tenuto_lab.gpu_check.{step}", description=description)
    parser.add_argument("model", nargs="?", default="resnet50")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--option", action="append", default=[], metavar="K=V", help="of the model")
    parser.add_argument("-o", "--output", type=Path, required=True, help="folder of the results")
    return parser


def in_words(error: BaseException) -> str:
    """Return any error in one line. Steps catch every error, as an error of this machine is a result too."""
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    if isinstance(error, TenutoError):
        return first or type(error).__name__
    return f"{type(error).__name__}{f': {first}' if first else ''}"


class Results:
    """Files of one check by name. Invariant: a file that is there is complete."""

    def __init__(self, folder: str | Path) -> None:
        """Make the folder if it is not there."""
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)

    def path(self, name: str) -> Path:
        """Return where a file is, or would be."""
        return self.folder / name

    @classmethod
    def look(cls, folder: Path, name: str) -> dict[str, Any]:
        """Return a JSON file's mapping as `read` does, and make no folder."""
        return cls(folder).read(name) if folder.is_dir() else {}

    def read(self, name: str) -> dict[str, Any]:
        """Return a JSON file's mapping; empty if there is no file, or none that can be read."""
        try:
            found = load_document(self.path(name))
        except InvalidInputError:
            return {}
        return found if isinstance(found, dict) else {}

    def write(self, name: str, data: Mapping[str, Any]) -> None:
        """Write a JSON file. A number that is none becomes null."""
        text = msgspec.json.format(msgspec.json.encode(data, enc_hook=str), indent=2)
        self.write_text(name, text.decode() + "\n")

    def write_text(self, name: str, text: str) -> None:
        """Write a text file."""
        partial = self.path(f".{name}.new")
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, self.path(name))

    def log(self, line: str) -> None:
        """Append a line with the time."""
        with self.path("log.txt").open("a", encoding="utf-8") as file:
            file.write(f"{datetime.now(UTC).isoformat(timespec='seconds')} {line}\n")
