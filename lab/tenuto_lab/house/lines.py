"""Counts lines of code proper: lines that are not blank, a comment, a docstring or an import."""

from __future__ import annotations

import ast
import io
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator

from tenuto_lab.house.sources import Source

_LAYOUT = frozenset(
    {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
)


def proper_lines(text: str) -> int:
    """Return how many lines of a module are code proper.

    Raises:
        SyntaxError: the text is not Python.
    """
    code = {
        line
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type not in _LAYOUT
        for line in range(token.start[0], token.end[0] + 1)
    }
    return len(code - set(_beside(ast.parse(text))))


def _beside(tree: ast.Module) -> Iterator[int]:
    """Yield the lines of imports and docstrings."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from range(node.lineno, (node.end_lineno or node.lineno) + 1)
        elif isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if (
                isinstance(first, ast.Expr)
                and isinstance(first.value, ast.Constant)
                and isinstance(first.value.value, str)
            ):
                yield from range(first.lineno, (first.end_lineno or first.lineno) + 1)


def lines_by_room(sources: Iterable[Source]) -> Counter[str]:
    """Return the lines of code proper of each room."""
    found: Counter[str] = Counter()
    for source in sources:
        found[source.room] += proper_lines(source.text)
    return found
