"""The public Python surface: its page runs, and it changes only together with the changelog."""

from __future__ import annotations

import hashlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

from pydantic import BaseModel

import tenuto

ROOT = Path(__file__).parents[1]


def test_the_page_of_the_python_surface_runs_and_names_all_of_it() -> None:
    text = (ROOT / "docs" / "reference" / "python.md").read_text(encoding="utf-8")
    known: dict[str, object] = {}
    for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        exec(compile(block, "docs/reference/python.md", "exec"), known)
    assert [name for name in tenuto.__all__ if not re.search(rf"\b{name}\b", text)] == []


def surface() -> Iterator[str]:
    """Yield what the public names take and have, a line for each."""
    for name in tenuto.__all__:
        thing = getattr(tenuto, name)
        if not inspect.isclass(thing):
            yield f"{name}{inspect.signature(thing)}"
            continue
        if issubclass(thing, BaseModel):
            yield f"{name}({', '.join(sorted(thing.model_fields))})"
        else:
            begin = vars(thing).get("__init__")
            yield f"{name}{'' if begin is None else inspect.signature(begin)}"
        for part, made in sorted(vars(thing).items()):
            if not part.startswith(("_", "model_")) and part not in getattr(thing, "model_fields", {}):
                made = getattr(made, "__func__", made)
                yield f"{name}.{part}{inspect.signature(made) if inspect.isfunction(made) else ''}"


def test_the_surface_changes_only_together_with_the_changelog() -> None:
    """Say in the changelog what changes for users, and write the new digest there."""
    digest = hashlib.sha256(re.sub(" at 0x[0-9a-f]+", "", "\n".join(surface())).encode()).hexdigest()[:12]
    newest = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").split("\n## ")[1]
    assert f"`{digest}`" in newest
