"""Counts lines of code proper: lines that are not blank, a comment, a docstring or an import."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterable

from tenuto_lab.house.sources import Source

_WITH_DOCSTRINGS = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def proper_lines(text: str) -> int:
    """Return how many lines of a module are code proper. Blank lines of a text that is a value are code, too.

    Raises:
        SyntaxError: the text is not Python.
    """
    code = {line for line, words in enumerate(text.split("\n"), 1) if words.strip() and words.lstrip()[0] != "#"}
    beside: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Constant | ast.JoinedStr):
            code.update(_lines_of(node))
        elif isinstance(node, ast.Import | ast.ImportFrom):
            beside.update(_lines_of(node))
        elif isinstance(node, _WITH_DOCSTRINGS) and ast.get_docstring(node, clean=False) is not None:
            beside.update(_lines_of(node.body[0]))
    return len(code - beside)


def _lines_of(node: ast.expr | ast.stmt) -> range:
    return range(node.lineno, (node.end_lineno or node.lineno) + 1)


def lines_by_room(sources: Iterable[Source]) -> Counter[str]:
    """Return the lines of code proper of each room."""
    found: Counter[str] = Counter()
    for source in sources:
        found[source.room] += proper_lines(source.text)
    return found
