"""Finds the numbers that modules are written with, and the source of each value.

Four places of a number are read:

* *module*: a constant of a module, named in capitals, whose value is a number or a collection of numbers;
* *class*: an attribute or a field of a class that has such a value;
* *default*: the default of a parameter, or of an option of the command line;
* *literal*: a number in an expression of a function, where it could be another one. A float counts anywhere. An integer
  counts where it is multiplied, divided, taken as a remainder, compared by order, assigned, the second choice of `or`,
  or an argument of `min`, `max`, `timeout`, or named `max…`, `timeout…` or `limit…`.

A field, a default or a literal does not count when it is 0, 0.5, 1, 2 or a factor of units (100, 60, 3600, 1024, a
thousand to any power), nor below a billionth, which is rounding. Nor does a literal that is an index, an exponent, a
shift, digits of `round`, a percentile, the length of a sequence, the pause of a `sleep` or a status code. Of the rooms
that draw pages, constants alone are read.

A number says its kind in the comment on its line, in the lines above it or in the text below it. A literal may lean on
the docstring of its function where that one names a paper. These kinds steer: *derived* (from what), *paper* (which
section), *fitted* (on what, and what is lost when it is halved or doubled) and *default* (a user sets it, or a
measurement replaces it; fields of schemas and options are this by themselves). These do not: a *unit*, a *format* (of a
protocol, a file, a driver or a page), a *pace* (how soon something is looked at or tried again, which costs a little
work or a little delay) and a *limit*, one number beyond which something is refused, raised or ended. Several values in
one constant are choices, so they cannot be a limit.
"""

from __future__ import annotations

import ast
import io
import math
import re
import tokenize
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from typing_extensions import TypeIs

from tenuto_lab.house.sources import Source

Origin = Literal["derived", "paper", "fitted", "default", "unit", "format", "pace", "limit", "unsourced"]
ORIGINS: tuple[Origin, ...] = ("derived", "paper", "fitted", "default", "unit", "format", "pace", "limit", "unsourced")
Place = Literal["module", "class", "default", "literal"]

_FIRST_WORDS = re.compile(r"^(unit|format|pace|limit|default)\b", re.I)
_WORDS: tuple[tuple[Origin, re.Pattern[str]], ...] = (
    ("fitted", re.compile(r"\bfitted\b", re.I)),
    ("derived", re.compile(r"\bderived\b", re.I)),
    ("paper", re.compile(r"\bpapers?\b|§|\barXiv\b|\bappendix [A-Z]\b", re.I)),
    ("paper", re.compile(r"\b(section|eq\.|equation|theorem|algorithm|table|figure) \(?[A-Z]?\.?\d", re.I)),
)
_PLAIN = frozenset({0, 0.5, 1, 2, 100, 0.01, 60, 3600, 1024})
_BOUNDING = re.compile(r"^(min|max|timeout|limit)")
_PAGES = ("loadgen/report", "tenuto/cli/live_picture.py", "placement/shown")


@dataclass(frozen=True)
class NumericConstant:
    """A number of the sources: where it stands, its name and its value as written, and its comment.

    `kind` is where the number was found; `is_set` says that it is the default of an option or of a schema's field.
    """

    place: str
    room: str
    name: str
    value: str
    said: str
    kind: Place = "module"
    is_set: bool = False
    is_several: bool = False

    @property
    def origin(self) -> Origin:
        """Where the value comes from, according to the comment."""
        first = _FIRST_WORDS.match(self.said)
        if first:
            told: Origin = first[1].lower()  # type: ignore[assignment]
            return "unsourced" if told == "limit" and self.is_several else told
        unsaid: Origin = "default" if self.is_set else "unsourced"
        return next((origin for origin, words in _WORDS if words.search(self.said)), unsaid)


def find_constants(sources: Iterable[Source]) -> Iterator[NumericConstant]:
    """Yield the numbers of modules, by the rules at the head of this module, in the order of their lines."""
    for source in sources:
        found = list(_Reader(source).read())
        yield from sorted(found, key=lambda each: int(each.place.rpartition(":")[2]))


class _Reader:
    """Reads one module: its statements with the comments beside them, and the parent of each node."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._tree = ast.parse(source.text)
        self._comments = _comments(source.text)
        self._parents = {child: node for node in ast.walk(self._tree) for child in ast.iter_child_nodes(node)}
        self._known: set[str] = set()

    def read(self) -> Iterator[NumericConstant]:
        """Yield the numbers of the module, of each class, of each function's head, and then the literals."""
        yield from self._assigned_in(self._tree.body, "module")
        if str(self._source.path).startswith(_PAGES):
            return
        for node in ast.walk(self._tree):
            if isinstance(node, ast.ClassDef) and "Enum" not in "".join(map(ast.unparse, node.bases)):
                schema = any("Model" in ast.unparse(base) or "Options" in ast.unparse(base) for base in node.bases)
                yield from self._assigned_in(node.body, "class", node.name, is_set=schema)
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
                yield from self._defaults(node)
            elif isinstance(node, ast.Constant) and _is_number(node) and self._is_literal(node):
                function, said = self._about(node)
                yield self._constant(node, function, ast.unparse(node), said, "literal")

    def _assigned_in(
        self, body: list[ast.stmt], kind: Place, owner: str = "", *, is_set: bool = False
    ) -> Iterator[NumericConstant]:
        for position, node in enumerate(body):
            said = self._said(node, body[position + 1] if position + 1 < len(body) else None)
            for name, given in _assigned(node):
                value = _default_of(given) if isinstance(given, ast.Call) else given
                is_capital = re.fullmatch(r"_?[A-Z][A-Z0-9_]*", name) is not None
                if value is None or not self._is_numeric(value) or not (is_capital or kind == "class"):
                    continue
                if kind == "module":
                    self._known.add(name)
                if is_capital or not self._is_plain(value):
                    full = f"{owner}.{name}" if owner else name
                    yield self._constant(
                        node, full, ast.unparse(value), said, kind, is_set or value is not given, _several(value)
                    )

    def _defaults(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) -> Iterator[NumericConstant]:
        head, owner = node.args, node.name if not isinstance(node, ast.Lambda) else "lambda"
        places = [*head.posonlyargs, *head.args]
        pairs = [
            *zip(places[len(places) - len(head.defaults) :], head.defaults, strict=True),
            *zip(head.kwonlyargs, head.kw_defaults, strict=True),
        ]
        for argument, value in pairs:
            if value is not None and self._is_numeric(value) and not self._is_plain(value):
                said = self._said(argument, None) or self._above(node.lineno)
                name = f"{owner}({argument.arg})"
                yield self._constant(argument, name, ast.unparse(value), said, "default", False, _several(value))
        for decorator in [] if isinstance(node, ast.Lambda) else node.decorator_list:
            value = _default_of(decorator) if isinstance(decorator, ast.Call) else None
            if isinstance(decorator, ast.Call) and value and self._is_numeric(value) and not self._is_plain(value):
                name = f"{owner}({ast.unparse(decorator.args[0]) if decorator.args else ''})"
                yield self._constant(decorator, name, ast.unparse(value), "", "default", True, False)

    def _constant(
        self,
        node: ast.stmt | ast.expr | ast.arg,
        name: str,
        value: str,
        said: str,
        kind: Place,
        is_set: bool = False,
        is_several: bool = False,
    ) -> NumericConstant:
        place = f"{self._source.path}:{node.lineno}"
        return NumericConstant(place, self._source.room, name, value, said, kind, is_set, is_several)

    def _is_literal(self, node: ast.Constant) -> bool:
        """Return whether a number is a literal of a function that could be another one."""
        if self._is_plain(node) or not self._is_in_body(node):
            return False
        inner: ast.AST = node
        outer = self._parents[inner]
        if isinstance(outer, ast.UnaryOp):
            inner, outer = outer, self._parents[outer]
        whole = isinstance(node.value, int)
        if isinstance(outer, ast.BinOp):
            if isinstance(outer.op, ast.LShift | ast.RShift | ast.BitAnd | ast.BitOr | ast.Pow):
                return False
            return not whole or isinstance(outer.op, ast.Mult | ast.Div | ast.FloorDiv | ast.Mod)
        if isinstance(outer, ast.Compare):
            ordered = all(isinstance(op, ast.Lt | ast.LtE | ast.Gt | ast.GtE) for op in outer.ops)
            sides = " ".join(ast.unparse(each) for each in (outer.left, *outer.comparators))
            return ordered and not (whole and re.search(r"\blen\(|\bdim\(|status|code", sides))
        if isinstance(outer, ast.keyword):
            return not whole or _BOUNDING.match(outer.arg or "") is not None
        if isinstance(outer, ast.Call):
            name = ast.unparse(outer.func).rpartition(".")[2]
            return not re.fullmatch("percentile|quantiles?|round|_?sleep", name) and (
                not whole or _BOUNDING.match(name) is not None
            )
        if isinstance(outer, ast.Tuple | ast.List) and isinstance(self._parents[outer], ast.Call):
            return not whole and "quantile" not in ast.unparse(self._parents[outer])
        return not whole or isinstance(outer, ast.BoolOp | ast.Assign | ast.AnnAssign)

    def _is_in_body(self, node: ast.AST) -> bool:
        """Return whether a node belongs to the body of a function, and to no index and no plain text."""
        while node in self._parents:
            outer = self._parents[node]
            if isinstance(outer, ast.Subscript) and node is outer.slice:
                return False
            if isinstance(outer, ast.FunctionDef | ast.AsyncFunctionDef):
                return node in outer.body
            if isinstance(outer, ast.ClassDef):
                return False
            node = outer
        return False

    def _is_plain(self, value: ast.expr) -> bool:
        """Return whether a value is of those that need no source."""
        if isinstance(value, ast.UnaryOp):
            return self._is_plain(value.operand)
        if isinstance(value, ast.Name):
            return True
        if isinstance(value, ast.Tuple):
            return all(map(self._is_plain, value.elts))
        if isinstance(value, ast.BinOp):
            return self._is_plain(value.left) and self._is_plain(value.right)
        if not _is_number(value):
            return False
        number = abs(float(ast.literal_eval(value)))
        return number in _PLAIN or number < 1e-8 or math.log10(number) % 3 == 0

    def _is_numeric(self, value: ast.expr) -> bool:
        """Return whether a value consists of numbers and of numeric constants of the same module."""
        if _is_number(value):
            return True
        if isinstance(value, ast.Name):
            return value.id in self._known
        if isinstance(value, ast.UnaryOp):
            return self._is_numeric(value.operand)
        if isinstance(value, ast.BinOp):
            return self._is_numeric(value.left) and self._is_numeric(value.right)
        if isinstance(value, ast.Tuple | ast.List | ast.Set):
            return bool(value.elts) and all(map(self._is_numeric, value.elts))
        if isinstance(value, ast.Dict):
            return bool(value.values) and all(map(self._is_numeric, value.values))
        return False

    def _said(self, node: ast.stmt | ast.arg, after: ast.stmt | None) -> str:
        """Return the comments of a statement: on its lines, above it, and the docstring below it."""
        lines = range(node.lineno, (node.end_lineno or node.lineno) + 1)
        beside = " ".join(self._comments[line][0] for line in lines if line in self._comments)
        return " ".join(part for part in (beside, self._above(node.lineno), _text(after)) if part)

    def _above(self, line: int) -> str:
        """Return the comment of one or more lines that ends above a line."""
        parts: list[str] = []
        while line - 1 in self._comments and self._comments[line - 1][1]:
            line -= 1
            parts.insert(0, self._comments[line][0])
        return " ".join(parts)

    def _about(self, node: ast.expr) -> tuple[str, str]:
        """Return the function of a literal, and the comment of its line or statement, or else the paper it cites."""
        outer: ast.AST = node
        while not isinstance(outer, ast.stmt):
            outer = self._parents[outer]
        line, above = self._comments.get(node.lineno, ("", True))[0], self._above(node.lineno)
        said = " ".join(part for part in (line, above or self._above(outer.lineno)) if part)
        while not isinstance(outer, ast.FunctionDef | ast.AsyncFunctionDef):
            outer = self._parents[outer]
        text = ast.get_docstring(outer) or ""
        cites = any(origin == "paper" and words.search(text) for origin, words in _WORDS)
        return outer.name, said or (" ".join(text.split()) if cites else "")


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


def _default_of(call: ast.Call) -> ast.expr | None:
    """Return the default that a call of `option`, `Field` or `click.option` gives."""
    named = [keyword.value for keyword in call.keywords if keyword.arg == "default"]
    is_first = ast.unparse(call.func) in ("option", "Field") and call.args
    return named[0] if named else (call.args[0] if is_first else None)


def _is_number(value: ast.expr) -> TypeIs[ast.Constant]:
    return isinstance(value, ast.Constant) and type(value.value) in (int, float)


def _several(value: ast.expr) -> bool:
    return isinstance(value, ast.Tuple | ast.List | ast.Set | ast.Dict)


def _comments(text: str) -> dict[int, tuple[str, bool]]:
    """Return, for each line with a comment, the comment and whether the line has nothing else."""
    return {
        token.start[0]: (token.string.lstrip("# ").rstrip(), not token.line[: token.start[1]].strip())
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type == tokenize.COMMENT
    }


def _text(node: ast.stmt | None) -> str:
    """Return the docstring below an assignment."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
        return " ".join(node.value.value.split())
    return ""
