"""Tests keep to public faces: none reads, sets, replaces or imports what a module or a class of the product keeps to
itself."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PRODUCT = ("profiles", "mps", "placement", "batching", "deployments", "loadgen", "tenuto", "lab/tenuto_lab")
TESTS = ("tests", "lab/tests", "lab/benchmarks", "lab/suites")
REPLACES = ("setattr", "delattr", "getattr", "hasattr", "patch", "object")


def _is_private(name: str) -> bool:
    return name.isidentifier() and name.startswith("_") and not name.startswith("__")


def _defined(tree: ast.AST) -> Iterator[str]:
    """The private names that a file gives to something: functions, classes, constants, fields, attributes of self."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_self(node.value):
            yield node.attr


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


@cache
def _kept_by_the_product() -> frozenset[str]:
    files = [file for folder in PRODUCT for file in (ROOT / folder).rglob("*.py")]
    return frozenset(name for file in files for name in _defined(ast.parse(file.read_text())) if _is_private(name))


def _reaches(tree: ast.AST) -> Iterator[str]:
    """What a test reaches of the product's private names, as it is written there."""
    own = set(_defined(tree))
    kept = _kept_by_the_product()
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Attribute) and not (node.attr in own and not _is_super(node.value)):
            names = [node.attr]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tenuto"):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.Call) and _called(node) in REPLACES:
            names = [_end_of(each).split(".")[-1] for each in node.args]
        if any(_is_private(name) and name in kept for name in names):
            yield f"line {getattr(node, 'lineno', 0)}: {ast.unparse(node)[:100]}"


def _end_of(node: ast.expr) -> str:
    """The end of a text, as far as it is written there."""
    last = node.values[-1] if isinstance(node, ast.JoinedStr) and node.values else node
    return last.value if isinstance(last, ast.Constant) and isinstance(last.value, str) else ""


def _is_super(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and _called(node) == "super"


def _called(node: ast.Call) -> str:
    function = node.func
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _names_any(text: str) -> bool:
    """Whether a private name of the product is anywhere in a text, which is found sooner than the text is parsed."""
    return not _kept_by_the_product().isdisjoint(re.findall(r"\b_\w+", text))


def test_no_test_reaches_into_private_state() -> None:
    files = [ROOT / "conftest.py", *(file for folder in TESTS for file in sorted((ROOT / folder).rglob("*.py")))]
    found = {
        str(file.relative_to(ROOT)): reaches
        for file in files
        if _names_any(text := file.read_text(encoding="utf-8")) and (reaches := list(_reaches(ast.parse(text))))
    }
    assert found == {}


@pytest.mark.parametrize(
    "text",
    [
        "server._peers.clear()",
        "class Mine(Theirs):\n    def _send(self): super()._send()",
        "class Mine(Theirs):\n    def go(self): self._send()",
        "from tenuto.deployments.wire.frames import _PREFIX",
        "patch.setattr(frames, '_PREFIX', 1)",
        "patch.setattr('tenuto.deployments.wire.frames._PREFIX', 1)",
        "patch.setattr(f'{WIRE}.frames._PREFIX', 1)",
    ],
)
def test_every_way_of_reaching_there_is_found(text: str) -> None:
    assert {"_peers", "_send", "_PREFIX"} <= _kept_by_the_product()
    assert _names_any(text)
    assert list(_reaches(ast.parse(text)))


def test_what_a_test_or_a_library_keeps_is_theirs() -> None:
    text = "class Mine:\n    def __init__(self): self._send = 1\n    def go(self): return self._send\nrow._replace(a=1)"
    assert not list(_reaches(ast.parse(text)))
