"""What a placement policy is, how it is found by name, and the one path from policy to validated plan."""

from __future__ import annotations

import difflib
import importlib.util
import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, ClassVar

from tenuto.errors import InvalidInputError, Problem
from tenuto.placement.cluster import Cluster
from tenuto.placement.plan import Plan
from tenuto.placement.workload import Workload
from tenuto.profiles import Profiles

__all__ = ["Policy", "load_policy", "policy_names"]

ENTRY_POINTS = "tenuto.policies"


class Policy(ABC):
    """Turns workload, cluster and profiles into a plan. It only decides; completing and validating happen in `solve`.

    A policy never changes its arguments and gives the same plan for the same arguments. Options are keyword-only
    parameters of `__init__` with defaults; `--option k=v` reaches them by name.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    source: ClassVar[str]

    @abstractmethod
    def place(self, workload: Workload, cluster: Cluster, profiles: Profiles) -> Plan:
        """Return the plan. A model that fits nowhere goes to `unserved` with its reason, it is never dropped."""

    @property
    def options(self) -> dict[str, Any]:
        """The options this instance was made with, for the plan's record."""
        parameters = inspect.signature(type(self).__init__).parameters
        return {
            name: getattr(self, name)
            for name, parameter in parameters.items()
            if parameter.kind is inspect.Parameter.KEYWORD_ONLY and getattr(self, name) != parameter.default
        }


def policy_names() -> dict[str, type[Policy]]:
    """Return every policy by name: the entry points of all installed packages, Tenuto's own among them."""
    return {point.name: point.load() for point in sorted(entry_points(group=ENTRY_POINTS), key=lambda p: p.name)}


def load_policy(name: str, options: Mapping[str, Any] | None = None) -> Policy:
    """Return a policy by entry-point name, or from a file as `path.py:Class`.

    Raises:
        InvalidInputError: unknown name, file, class or option; the message lists the known ones.
    """
    kind = _from_file(name) if ":" in name else _from_entry_point(name)
    return _configured(kind, name, dict(options or {}))


def _from_entry_point(name: str) -> type[Policy]:
    for point in entry_points(group=ENTRY_POINTS):
        if point.name == name:
            kind: type[Policy] = point.load()
            return kind
    known = sorted({point.name for point in entry_points(group=ENTRY_POINTS)})
    close = difflib.get_close_matches(name, known, n=1)
    hint = f"Did you mean '{close[0]}'? " if close else ""
    raise InvalidInputError(Problem("--policy", name, "unknown policy", f"{hint}Known policies: {', '.join(known)}."))


def _from_file(name: str) -> type[Policy]:
    path, _, attribute = name.rpartition(":")
    file = Path(path)
    if not file.is_file():
        raise InvalidInputError(Problem("--policy", name, "no such file", "Give it as path/to/file.py:ClassName."))
    spec = importlib.util.spec_from_file_location(file.stem, file)
    if spec is None or spec.loader is None:
        raise InvalidInputError(
            Problem("--policy", name, "is not a Python file", "Give it as path/to/file.py:ClassName.")
        )
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise InvalidInputError(
            Problem("--policy", name, f"importing the file failed: {type(error).__name__}: {error}", "Repair the file.")
        ) from error
    kind: type[Policy] | None = getattr(module, attribute, None)
    if not kind or not (inspect.isclass(kind) and callable(getattr(kind, "place", None))):
        raise InvalidInputError(
            Problem(
                "--policy",
                name,
                f"'{attribute}' is not a class with a place() method in {file.name}",
                "Derive it from tenuto.placement.Policy.",
            )
        )
    return kind


def _configured(kind: type[Policy], name: str, options: dict[str, Any]) -> Policy:
    parameters = {
        key: parameter
        for key, parameter in inspect.signature(kind).parameters.items()
        if parameter.kind in (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    }
    problems = []
    values: dict[str, Any] = {}
    for key, value in options.items():
        if key not in parameters:
            known = ", ".join(parameters) or "none"
            problems.append(
                Problem(f"--option {key}", value, f"policy '{name}' has no such option", f"Its options: {known}.")
            )
        else:
            default = parameters[key].default
            try:
                values[key] = _coerced(value, default, str(parameters[key].annotation))
            except ValueError:
                expected = _KINDS.get(_kind(default, str(parameters[key].annotation)), "of another type")
                problems.append(
                    Problem(f"--option {key}", value, f"must be {expected}", f"The default is {_shown(default)}.")
                )
    if problems:
        raise InvalidInputError(problems)
    return kind(**values)


_KINDS = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    tuple: "a list separated by commas",
}


def _kind(default: Any, annotation: str) -> type:
    """Return the type an option takes: that of its default, and where that is None the one its annotation names."""
    if default is not None:
        return type(default)
    names = {part.strip() for part in annotation.split("|")} - {"None"}
    return next((kind for kind in (int, float) if names == {kind.__name__}), type(None))


def _shown(default: Any) -> str:
    return ",".join(str(part) for part in default) if isinstance(default, tuple) else repr(default)


def _coerced(value: Any, default: Any, annotation: str) -> Any:
    """Convert a command-line string to the type of the option's default; other values pass unchanged.

    Raises:
        ValueError: it is not of that type, or not a number (nan), which no comparison of a policy would notice.
    """
    if not isinstance(value, str) or default is inspect.Parameter.empty:
        return value
    kind = _kind(default, annotation)
    if kind is bool:
        if value.lower() in ("true", "yes", "1", "on"):
            return True
        if value.lower() in ("false", "no", "0", "off"):
            return False
        raise ValueError(value)
    if kind is int:
        return int(value)
    if kind is float:
        return _number(value)
    if kind is tuple:
        part_kind = type(default[0]) if default else str
        return tuple(_number(part) if part_kind is float else part_kind(part) for part in value.split(","))
    if default is None:
        for parse in (int, _number):
            try:
                return parse(value)
            except ValueError:
                continue
    return value


def _number(text: str) -> float:
    value = float(text)
    if math.isnan(value):
        raise ValueError(text)
    return value
