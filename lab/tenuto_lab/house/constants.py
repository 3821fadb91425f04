"""Finds numeric constants of modules, and the source of each value.

A number that steers has one of three sources, named in the comment on its line, in the lines above it or in the text
below it: *derived* (from what), *paper* (which section), *fitted* (on what). The comment of a number that steers
nothing begins with its kind: a `unit`, a `format` (of a protocol, a file or a driver) or a `limit` (beyond it something
is refused, given up or done again, and any other value of that order would do).
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from tenuto_lab.house.sources import Source

Origin = Literal["derived", "paper", "fitted", "steers nothing", "unsourced"]
ORIGINS: tuple[Origin, ...] = ("derived", "paper", "fitted", "steers nothing", "unsourced")

_WORDS: tuple[tuple[Origin, re.Pattern[str]], ...] = (
    ("steers nothing", re.compile(r"^(unit|format|limit)\b", re.I)),
    ("fitted", re.compile(r"\bfitted\b", re.I)),
    ("derived", re.compile(r"\bderived\b", re.I)),
    ("paper", re.compile(r"\bpapers?\b|§|\barXiv\b|\bappendix [A-Z]\b", re.I)),
    ("paper", re.compile(r"\b(section|eq\.|equation|theorem|algorithm|table|figure) \(?[A-Z]?\.?\d", re.I)),
)


@dataclass(frozen=True)
class NumericConstant:
    """A constant of a module: where it stands, its value as written, and its comment."""

    place: str
    room: str
    name: str
    value: str
    said: str

    @property
    def origin(self) -> Origin:
        """Where the value comes from, according to the comment."""
        return next((origin for origin, words in _WORDS if words.search(self.said)), "unsourced")


def find_constants(sources: Iterable[Source]) -> Iterator[NumericConstant]:
    """Yield the numeric constants of modules: names in capitals whose values are numbers, or collections of numbers."""
    for source in sources:
        tree = ast.parse(source.text)
        comments = _comments(source.text)
        known: set[str] = set()
        for position, node in enumerate(tree.body):
            after = tree.body[position + 1] if position + 1 < len(tree.body) else None
            said = " ".join(part for part in (_beside(node, comments), _above(node, comments), _text(after)) if part)
            for name, value in _assigned(node):
                if re.fullmatch(r"_?[A-Z][A-Z0-9_]*", name) and _is_numeric(value, known):
                    known.add(name)
                    place = f"{source.path}:{node.lineno}"
                    yield NumericConstant(place, source.room, name, ast.unparse(value), said)


def _assigned(node: ast.stmt) -> list[tuple[str, ast.expr]]:
    """Return the names that a statement assigns to, with their values; `A, B = 1, 2` has two."""
    if isinstance(node, ast.Assign) and len(node.targets) == 1:
        target, value = node.targets[0], node.value
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
            pairs = list(zip(target.elts, value.elts, strict=True))
        else:
            pairs = [(target, value)]
    elif isinstance(node, ast.AnnAssign) and node.value is not None:
        pairs = [(node.target, node.value)]
    else:
        pairs = []
    return [(target.id, value) for target, value in pairs if isinstance(target, ast.Name)]


def _is_numeric(value: ast.expr, known: set[str]) -> bool:
    """Return whether a value consists of numbers and of numeric constants of the same module."""
    if isinstance(value, ast.Constant):
        return isinstance(value.value, int | float) and not isinstance(value.value, bool)
    if isinstance(value, ast.Name):
        return value.id in known
    if isinstance(value, ast.UnaryOp):
        return _is_numeric(value.operand, known)
    if isinstance(value, ast.BinOp):
        return _is_numeric(value.left, known) and _is_numeric(value.right, known)
    if isinstance(value, ast.Tuple | ast.List | ast.Set):
        return bool(value.elts) and all(_is_numeric(each, known) for each in value.elts)
    if isinstance(value, ast.Dict):
        return bool(value.values) and all(_is_numeric(each, known) for each in value.values)
    return False


def _comments(text: str) -> dict[int, tuple[str, bool]]:
    """Return, for each line with a comment, the comment and whether the line has nothing else."""
    return {
        token.start[0]: (token.string.lstrip("# ").rstrip(), not token.line[: token.start[1]].strip())
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type == tokenize.COMMENT
    }


def _beside(node: ast.stmt, comments: dict[int, tuple[str, bool]]) -> str:
    lines = range(node.lineno, (node.end_lineno or node.lineno) + 1)
    return " ".join(comments[line][0] for line in lines if line in comments)


def _above(node: ast.stmt, comments: dict[int, tuple[str, bool]]) -> str:
    """Return the comment of one or more lines that ends on the line above."""
    found: list[str] = []
    line = node.lineno - 1
    while line in comments and comments[line][1]:
        found.insert(0, comments[line][0])
        line -= 1
    return " ".join(found)


def _text(node: ast.stmt | None) -> str:
    """Return the docstring below an assignment."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
        return " ".join(node.value.value.split())
    return ""
