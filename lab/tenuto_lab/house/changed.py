"""Imports a module of the machine with one of its numbers changed, so that what follows from the number follows.

It works for every number that `tenuto_lab.house.constants` finds: constants, attributes, defaults and literals.
"""

from __future__ import annotations

import ast
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from pathlib import Path
from types import CodeType, ModuleType

from tenuto_lab.house.constants import NumericConstant


def changed_source(text: str, constant: NumericConstant, factor: float) -> ast.Module:
    """Return a module with a number times `factor`, as a syntax tree.

    Of a ratio from 1 to 2 the part above 1 is changed, and of a part from 0.9 to 1 what it lacks to 1: the other
    halves and doubles would be no ratios and no parts. Whole numbers stay whole, and change by 1 at least.

    Raises:
        LookupError: the number is not there.
    """
    tree, line = ast.parse(text), int(constant.place.rpartition(":")[2])
    for node in ast.walk(tree):
        if isinstance(node, ast.stmt | ast.arg) and node.lineno <= line <= (node.end_lineno or node.lineno):
            values = [each for each in ast.walk(node) if isinstance(each, ast.expr) and each.lineno >= line]
            found = next((each for each in values if ast.unparse(each) == constant.value), None)
            if found is not None:
                numbers = [each for each in ast.walk(found) if isinstance(each, ast.Constant)]
                for number in numbers if _is_collection(found) else numbers[:1]:
                    if type(number.value) in (int, float):
                        number.value = _times(ast.literal_eval(number), factor)
                return tree
    raise LookupError(f"{constant.name} is not at {constant.place}")


def import_changed(root: Path, constant: NumericConstant, factor: float) -> None:
    """Have this process import the constant's module with the number times `factor`; call it before the import."""
    path = (root / constant.place.rpartition(":")[0]).resolve()
    sys.meta_path.insert(0, _Finder(path, constant, factor))


def _is_collection(value: ast.expr) -> bool:
    return isinstance(value, ast.Tuple | ast.List | ast.Set | ast.Dict)


def _times(value: float, factor: float) -> float:
    if isinstance(value, int):
        times = round(value * factor)
        return times if times != value else value + (1 if factor > 1.0 else -1)
    if 1.0 < value < 2.0:
        return 1.0 + factor * (value - 1.0)
    return 1.0 - factor * (1.0 - value) if 0.9 <= value < 1.0 else factor * value


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, path: Path, constant: NumericConstant, factor: float) -> None:
        self._path, self._constant, self._factor = path, constant, factor

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.origin is None or Path(spec.origin).resolve() != self._path:
            return None
        spec.loader = _Loader(fullname, spec.origin, self._constant, self._factor)
        return spec


class _Loader(importlib.machinery.SourceFileLoader):
    def __init__(self, fullname: str, path: str, constant: NumericConstant, factor: float) -> None:
        super().__init__(fullname, path)
        self._constant, self._factor = constant, factor

    def get_code(self, fullname: str) -> CodeType:  # noqa: ARG002
        """Compile the changed source, never what Python compiled before."""
        text = Path(self.path).read_text(encoding="utf-8")
        return compile(changed_source(text, self._constant, self._factor), self.path, "exec")
