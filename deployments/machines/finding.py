"""One line of `tenuto doctor`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """The result of one check: `ok`, `note` (works, with a limit) or `fail`; `cure` is a command or an instruction."""

    name: str
    state: str
    found: str
    cure: str = ""
