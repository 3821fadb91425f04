"""The one tree of exceptions; a leaf module that every folder may import.

    TenutoError
    ├── InvalidInputError      the caller must change what was passed in      (exit code 2)
    │   └── MissingProfileError  a profile lacks the measurement asked for
    ├── UnavailableError       retry later, or reduce the load                 (exit code 3)
    └── EnvironmentFaultError  an operator must repair the machine or cluster  (exit code 3)

Expiry and rejection of requests are ordinary values on the request path (see `tenuto.batching`), never exceptions.
"""

from __future__ import annotations

import difflib
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Problem:
    """One fault of an input: where it is, which value was found (None: nothing to show), which rule it breaks, and how
    to cure it."""

    path: str
    value: Any
    rule: str
    cure: str

    def __str__(self) -> str:
        shown = "" if self.value is None else f"{self.value!r}: "
        if len(shown) > 82:
            shown = shown[:77] + "...: "
        return f"{self.path}: {shown}{self.rule}. {self.cure}"


class TenutoError(Exception):
    """Base class of every error Tenuto raises on purpose; its message says what to do next."""

    exit_code = 3  # format: codes of docs/reference/exit-codes.md


class InvalidInputError(TenutoError):
    """A file, argument or request body must be changed; `problems` lists everything found wrong, not only the first."""

    exit_code = 2

    def __init__(self, problems: Problem | str | Sequence[Problem | str]) -> None:
        """Take one problem or plain message, or several.

        The argument goes to the base class unchanged, so that the exception survives pickling between processes.
        """
        super().__init__(problems)
        reasons = (problems,) if isinstance(problems, Problem | str) else tuple(problems)
        self.problems = tuple(problem for problem in reasons if isinstance(problem, Problem))
        self._text = "\n".join(str(problem) for problem in reasons)

    def __str__(self) -> str:
        return self._text


def refused(path: str, value: Any, rule: str, cure: str) -> InvalidInputError:
    """Return an error with one problem; the caller raises it."""
    return InvalidInputError(Problem(path, value, rule, cure))


class MissingProfileError(InvalidInputError):
    """A profile has no measurement for the model, batch size, share or metric asked for."""


class UnavailableError(TenutoError):
    """Something is not ready or overloaded; the same call may succeed later."""


class EnvironmentFaultError(TenutoError):
    """The machine, the Ray cluster or a driver is not as required; the message names the repair."""


def one_of(name: object, known: Iterable[str], lead: str = "Use one of") -> str:
    """Return the cure for an unknown name: the nearest known name (upper and lower case count the same), and all
    names."""
    names = {each.lower(): each for each in known}
    close = difflib.get_close_matches(str(name).lower(), names, n=1)
    hint = f"Did you mean '{names[close[0]]}'? " if close else ""
    return f"{hint}{lead} {', '.join(names.values()) or '(none)'}."


def new_incident() -> str:
    """Return a name for one failure. Clients get the name; the log has the name with the text, which is not for
    them."""
    return secrets.token_hex(4)


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message without a full stop; for an empty message, the kind of the error."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__).rstrip(". ")


def printable(text: str, most: int | None = 200) -> str:  # format: characters of a line
    """Return a text that somebody else wrote as a terminal may show it: at most `most` characters, and nothing that
    moves the cursor but new lines and tabs, where the length is not bounded, or changes colours."""
    if text.isprintable():
        return text[:most]
    whole = "\n\t" if most is None else ""
    return "".join(sign if sign.isprintable() or sign in whole else "\ufffd" for sign in text[:most])


def is_lack_of_memory(error: BaseException) -> bool:
    """Return whether an error says that a device or the machine has too little memory. PyTorch has a type for that on
    GPUs only; on the processor it names its allocator. Nothing but what a person is told depends on it."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)


def raise_if_any(problems: Iterable[Problem | str]) -> None:
    """Raise one `InvalidInputError` with all problems, equal ones once, or return when there are none."""
    distinct = tuple({str(problem): problem for problem in problems}.values())
    if distinct:
        raise InvalidInputError(distinct)
