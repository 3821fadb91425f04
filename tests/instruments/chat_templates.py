"""Chat templates of language models, and how answers are read, as the package TRL ships them.

`scripts/environment` installs it without what it needs to run: its files are read, and it is never imported.
"""

import ast
import functools
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

__all__ = ["WHY_NONE", "chat_templates", "response_template"]

WHY_NONE = "the package 'trl' is not installed (pip install --no-deps trl)"


@functools.cache
def chat_templates() -> dict[str, str]:
    """Return the templates by name; none where the package is not installed."""
    folder = _package()
    if folder is None:
        return {}
    return {file.stem: file.read_text(encoding="utf-8") for file in sorted(folder.glob("chat_templates/*.jinja"))}


def response_template(name: str) -> dict[str, Any]:
    """Return what transformers reads the answers of a model by; KeyError if the package has none of this name."""
    folder = _package()
    assert folder is not None
    for line in ast.parse((folder / "chat_template_utils.py").read_text(encoding="utf-8")).body:
        if isinstance(line, ast.Assign) and ast.unparse(line.targets[0]) == f"{name}_template":
            found: dict[str, Any] = ast.literal_eval(line.value)
            return found
    raise KeyError(name)


def _package() -> Path | None:
    try:
        return Path(str(distribution("trl").locate_file("trl")))
    except PackageNotFoundError:
        return None
