"""The modules of a checkout, each once, with its folder and its room."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import tenuto

APART = frozenset({"tests", "lab", "docs", "examples", "scripts", "."})
"""Folders that are not a part of the machine; `.` is the root itself."""


@dataclass(frozen=True)
class Source:
    """One module: its path below the root, and its text."""

    path: Path
    text: str

    @property
    def folder(self) -> str:
        """The top folder of the module; `.` if the module lies in the root."""
        return self.path.parts[0] if len(self.path.parts) > 1 else "."

    @property
    def room(self) -> str:
        """The folder of the second level, such as `placement/policies`, or the top folder if the module lies there."""
        return "/".join(self.path.parts[:2]) if len(self.path.parts) > 2 else self.folder

    @property
    def is_machine(self) -> bool:
        """Whether the module is a part of the machine, the code that serves."""
        return self.folder not in APART


def checkout() -> Path:
    """Return the root of the checkout that Tenuto was imported from."""
    return Path(tenuto.__file__).resolve().parents[1]


def read_sources(root: Path) -> Iterator[Source]:
    """Yield every module below a root, without those of packages that an example has installed. Links are not followed,
    so that each module counts once."""
    for file in sorted(root.rglob("*.py")):
        path = file.relative_to(root)
        is_hidden = any(part.startswith(".") or part in ("build", "packages") for part in path.parts)
        is_linked = any((root / Path(*path.parts[:depth])).is_symlink() for depth in range(1, len(path.parts)))
        if not is_hidden and not is_linked:
            yield Source(path, file.read_text(encoding="utf-8"))
