"""Reads the CSV tables of NVIDIA's profilers: skips notices around them, converts units, names what is missing.

Both tools write notices before the table, and Nsight Compute also after it. They separate thousands with commas, and
put units into the header or into a second row, by their options.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from tenuto.errors import refused
from tenuto.files import read_text

_MOST_BYTES = 256 << 20  # limit: bytes of an export, which has some hundred for each kernel

# Factors to microseconds and bytes by the spellings of both tools and their versions.
MICROSECONDS: Mapping[str, float] = {
    "ns": 1e-3,
    "nsec": 1e-3,
    "nsecond": 1e-3,
    "us": 1.0,
    "usec": 1.0,
    "usecond": 1.0,
    "μs": 1.0,
    "ms": 1e3,
    "msec": 1e3,
    "msecond": 1e3,
    "s": 1e6,
    "sec": 1e6,
    "second": 1e6,
}
BYTES: Mapping[str, float] = {
    "byte": 1.0,
    "b": 1.0,
    "bytes": 1.0,
    "kbyte": 1e3,
    "kb": 1e3,
    "mbyte": 1e6,
    "mb": 1e6,
    "gb": 1e9,
    "gbyte": 1e9,
    "kib": 1024.0,
    "mib": 1048576.0,
}


def read_export(path: str | Path) -> str:
    """Return a file's text; raises `InvalidInputError` where it cannot be read."""
    return read_text(path, _MOST_BYTES)


def read_rows(text: str, first_columns: Sequence[str], *, origin: str, export: str) -> list[list[str]]:
    """Return the table that begins with the line that holds `first_columns`: its header, then its rows.

    Lines before it, empty lines and notices (`==PROF== …`) are left out.

    Raises:
        InvalidInputError: there is no such line (`export` says how to write one), or a row is cut off.
    """
    try:
        table = list(csv.reader(text.splitlines()))
    except csv.Error as error:
        raise refused(origin, None, f"is no CSV ({error})", f"Export it with `{export}`.") from error
    for index, line in enumerate(table):
        words = [re.sub(r"\s*[(:].*$", "", word).strip() for word in line]
        if all(column in words for column in first_columns):
            header = [word.strip() for word in line]
            rows = [row for row in table[index + 1 :] if "".join(row).strip() and not row[0].startswith("==")]
            for number_, row in enumerate(rows, start=1):
                if len(row) != len(header):
                    rule = f"has {len(row)} cells where the header has {len(header)}"
                    raise refused(f"{origin}: row {number_}", row[-1], rule, f"Export again with `{export}`.")
            return [header, *rows]
    raise refused(
        origin, "", f"has no header with the columns {', '.join(first_columns)}", f"Export it with `{export}`."
    )


def unit_factor(unit: str, factors: Mapping[str, float], *, path: str) -> float:
    """Return the factor of a unit; raises `InvalidInputError` for a unit that is not known."""
    found = factors.get(unit.strip().lower())
    if found is None:
        known = ", ".join(factors)
        raise refused(path, unit, "is not a unit known here", f"Known: {known}.")
    return found


def number(text: str, *, path: str) -> float | None:
    """Return a cell's number; None for an empty cell or one the tool could not measure (`n/a`, `nan`).

    Raises:
        InvalidInputError: anything else.
    """
    word = text.strip().replace(",", "")
    if word.lower() in ("", "n/a", "nan", "-", "(!) n/a", "inf"):
        return None
    try:
        return float(word)
    except ValueError:
        raise refused(path, text, "is not a number", "Export again; the file was edited or cut off.") from None


def dim3(text: str, *, path: str) -> tuple[int, int, int]:
    """Return `(128, 1, 1)` as three whole numbers of at least 1."""
    words = [int(word) for word in re.findall(r"\d+", text)]
    if len(words) != 3 or min(words) < 1:
        raise refused(path, text, "is not a launch size such as (128, 1, 1)", "Export again with the default columns.")
    return words[0], words[1], words[2]
