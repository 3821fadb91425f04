"""Logs of served requests, as CSV files."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np

from tenuto.errors import InvalidInputError, Problem, refused
from tenuto.files import csv_rows, parse_number
from tenuto.placement.generates import MOST_TOKENS
from tenuto_lab.generation.request_fit import ServedLog

COLUMNS = ("queued_s", "input_tokens", "output_tokens", "first_token_s", "last_token_s")
_TOKENS = COLUMNS[1:3]
_LEAST = 2  # limit: with one request nothing can be fitted


def read_requests(path: str | Path) -> ServedLog:
    """Read a CSV with the columns of `COLUMNS`, in any order; other columns are ignored. Times are seconds.

    Raises:
        InvalidInputError: no such file, a missing column, a value that cannot be, or too few lines; the message names
            the line.
    """
    file, rows = Path(path), list[tuple[float, ...]]()

    def fail(line: int, value: Any, rule: str, cure: str) -> InvalidInputError:
        return InvalidInputError(Problem(f"{file}: line {line}", value, rule, cure))

    with csv_rows(file, COLUMNS, f"Start the file with {','.join(COLUMNS)}.") as (columns, lines):
        for line, row in lines:
            values = list[float]()
            for key in COLUMNS:
                cell = row[columns[key]]
                try:
                    value = parse_number(cell)
                except ValueError:
                    value = math.nan
                if math.isnan(value) or (key in _TOKENS and not (1 <= value <= MOST_TOKENS and value == int(value))):
                    whole = f"a whole number from 1 to {MOST_TOKENS}" if key in _TOKENS else "a number of seconds"
                    cure = "Correct it, or leave out requests that did not end."
                    raise fail(line, cell, f"{key} is not {whole}", cure)
                values.append(value)
            queued, _, output, first, last = values
            if not queued < first <= last or (output > 1 and first == last):
                rule = "queued_s, first_token_s and last_token_s must follow each other in this order"
                raise fail(line, f"{queued:g}, {first:g}, {last:g}", rule, "All three count from one moment.")
            rows.append(tuple(values))
    if len(rows) < _LEAST:
        rule = f"has {len(rows)} requests, and a fit takes {_LEAST} at least"
        raise refused(str(file), len(rows), rule, "Log some hundred requests under a load that varies.")
    queued, prompts, outputs, first, last = np.array(sorted(rows, key=lambda row: row[0]), dtype=np.float64).T
    begin = queued[0]
    return ServedLog(
        1000.0 * (queued - begin),
        prompts.astype(np.int64),
        outputs.astype(np.int64),
        1000.0 * (first - begin),
        1000.0 * (last - begin),
    )
