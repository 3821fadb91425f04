"""The parser of options, given as `key=value` on the command line or as plain data in a file. Policies, schedulers,
profilers and workloads use it. A leaf module that every folder may import.

The default of an option says which type it takes; when the default is None, the annotation does. All faults are
reported at once, with a list of the known options.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tenuto.errors import Problem, one_of, raise_if_any

_TRUE, _FALSE = ("true", "yes", "1", "on"), ("false", "no", "0", "off")
_WORDS: dict[type, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    tuple: "a list separated by commas",
    str: "a word",
}


@dataclass(frozen=True)
class Option:
    """One option. `kind` None: it takes any value, and reads it as a number if it looks like one.

    `is_optional`: None is a valid value. `choices`, `minimum`, `above`, `maximum` and `below` bound the values; for a
    tuple they bound every part. `finite` refuses inf.
    """

    name: str
    default: Any = None
    kind: type | None = None
    part_kind: type = str  # the type of a tuple's parts
    is_optional: bool = False
    choices: tuple[Any, ...] | None = None
    minimum: float | None = None
    above: float | None = None
    maximum: float | None = None
    below: float | None = None
    finite: bool = False

    def read(self, value: Any) -> Any:
        """Convert a value: a string from the command line, or plain data.

        Raises:
            ValueError: the value is not of the option's type; the message says what it must be.
        """
        if value is None and self.is_optional:
            return None
        converted = _converted(value, self.kind, self.part_kind)
        if self.choices is not None and converted not in self.choices:
            raise ValueError(f"must be one of {', '.join(map(str, self.choices))}")
        if self.finite and isinstance(converted, float) and not math.isfinite(converted):
            raise ValueError("must be finite")
        bounds = (
            ("at least", self.minimum, operator.ge),
            ("above", self.above, operator.gt),
            ("at most", self.maximum, operator.le),
            ("below", self.below, operator.lt),
        )
        parts = converted if isinstance(converted, tuple) else (converted,)
        if not all(bound is None or holds(part, bound) for part in parts for _, bound, holds in bounds):
            words = " and ".join(f"{word} {bound}" for word, bound, _ in bounds if bound is not None)
            raise ValueError(f"must be {words}")
        return converted

    @property
    def shown_default(self) -> str:
        """The default as one would type it."""
        if isinstance(self.default, tuple):
            return ",".join(map(str, self.default))
        return str(self.default).lower() if isinstance(self.default, bool) else str(self.default)


def option(default: Any, **bounds: Any) -> Any:
    """Return a dataclass field for an option with bounds; see `Option`."""
    return dataclasses.field(default=default, metadata=bounds)


def split_pairs(pairs: Iterable[str]) -> dict[str, str]:
    """Return repeated `key=value` texts by key, dashes in keys as underscores.

    Raises:
        InvalidInputError: a text has another form, or a key is given twice with different values; lists all.
    """
    values: dict[str, str] = {}
    problems = []
    for pair in pairs:
        key, separator, value = pair.partition("=")
        name = key.strip().replace("-", "_")
        if not separator or not name:
            problems.append(Problem("--option", pair, "must have the form key=value", "Write --option key=value."))
        elif values.setdefault(name, value) != value:
            rule = f"'{name}' was already given as {values[name]!r}"
            problems.append(Problem("--option", pair, rule, "Give it once."))
    raise_if_any(problems)
    return values


def options_of_dataclass(kind: type) -> tuple[Option, ...]:
    """Return the options of a dataclass, one per field; `metadata` may hold bounds, see `Option`."""
    return tuple(
        _option(field.name, field.default, field.type, finite=True, **dict(field.metadata))
        for field in dataclasses.fields(kind)
    )


def options_of_call(target: Callable[..., Any]) -> tuple[Option, ...]:
    """Return the options of a class or function: one for each parameter that can be given by name."""
    named = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return tuple(
        _option(parameter.name, parameter.default, parameter.annotation)
        for parameter in inspect.signature(target).parameters.values()
        if parameter.kind in named
    )


def read_options(owner: str, options: Sequence[Option], raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the given options, each converted to its type. Options that are not given are left out.

    Args:
        owner: the owner of the options, as errors name it: `policy 'usher'`.
        options: the known options.
        raw: the given names and values, strings or plain data.

    Raises:
        InvalidInputError: unknown options (lists the known ones) and unusable values, all at once.
    """
    known = {option.name: option for option in options}
    problems, values = [], {}
    for name, value in raw.items():
        option = known.get(name)
        if option is None:
            cure = one_of(name, known, "Known options:")
            problems.append(Problem(f"--option {name}", value, f"{owner} has no such option", cure))
            continue
        try:
            values[name] = option.read(value)
        except ValueError as error:
            problems.append(Problem(f"--option {name}", value, str(error), f"The default is {option.shown_default}."))
    raise_if_any(problems)
    return values


def _option(name: str, default: Any, annotation: Any, **bounds: Any) -> Option:
    names = {part.strip() for part in str(getattr(annotation, "__name__", annotation)).split("|")}
    is_optional = default is None or "None" in names
    if default is None or default in (inspect.Parameter.empty, dataclasses.MISSING):
        kind: type | None = next((k for k in (int, float) if names - {"None"} == {k.__name__}), None)
    else:
        kind = type(default)
    part_kind = type(default[0]) if kind is tuple and default else str
    return Option(name, default, kind, part_kind, is_optional, **bounds)


def _converted(value: Any, kind: type | None, part_kind: type) -> Any:
    if kind is None:
        return _guessed(value)
    try:
        if kind is bool:
            return _truth(value)
        if isinstance(value, bool) and kind is not bool:
            raise ValueError(value)
        if kind is int:
            return _whole(value)
        if kind is float:
            return _number(value)
        if kind is tuple:
            parts = value.split(",") if isinstance(value, str) else list(value)
            return tuple(_converted(part, part_kind, str) for part in parts)
        return value if isinstance(value, kind) else kind(value)
    except (TypeError, ValueError):
        raise ValueError(f"must be {_WORDS.get(kind, 'of another type')}") from None


def _truth(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    text = str(value).lower()
    if text not in _TRUE + _FALSE:
        raise ValueError(value)
    return text in _TRUE


def _whole(value: Any) -> int:
    if isinstance(value, float) and not value.is_integer():
        raise ValueError(value)
    return int(value)


def _number(value: Any) -> float:
    """Return a number. NaN is refused, because no bound would refuse it."""
    number = float(value)
    if math.isnan(number):
        raise ValueError(value)
    return number


def _guessed(value: Any) -> Any:
    if isinstance(value, str):
        for read in (int, _number):
            try:
                return read(value)
            except ValueError:
                continue
    return value
