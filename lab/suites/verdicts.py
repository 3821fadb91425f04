"""What became of a suite: its cases, the row that stands for them in a table, the exit status; and running one."""

from __future__ import annotations

import argparse
import contextlib
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from environments import UnavailableError
from served import Server, served

ENVIRONMENTS = Path(__file__).parents[2] / ".suites"
COLUMNS = ("suite", "version", "passed", "failed", "skipped", "figures")
PASSED, FAILED, UNAVAILABLE = 0, 1, 3  # exit statuses, as those of `tenuto`


@dataclass(frozen=True)
class Case:
    """One case of a suite. `said`: figures of one that passed, else why it did not."""

    name: str
    outcome: Literal["passed", "failed", "skipped"]
    said: str = ""


@dataclass(frozen=True)
class Row:
    """One suite in the table."""

    suite: str
    version: str
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    figures: str = ""

    @classmethod
    def of(cls, suite: str, version: str, cases: Iterable[Case]) -> Row:
        """Return the row that stands for these cases."""
        all_cases = list(cases)
        count = Counter(case.outcome for case in all_cases)
        figures = "; ".join(f"{case.name}: {case.said}" for case in all_cases if case.outcome == "passed" and case.said)
        return cls(suite, version, count["passed"], count["failed"], count["skipped"], figures)

    @property
    def status(self) -> int:
        """The exit status of a suite that ran."""
        return PASSED if self.passed and not self.failed else FAILED


def table(rows: Sequence[Row]) -> str:
    """Return the rows as a table of Markdown."""
    lines = [COLUMNS, ("---",) * len(COLUMNS)]
    lines += [tuple(str(getattr(row, column)).replace("|", "/") for column in COLUMNS) for row in rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def rows_of(text: str) -> list[Row]:
    """Return the rows of the tables that a text has among other lines."""
    rows = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        if len(cells) == len(COLUMNS) and all(cell.isdigit() for cell in cells[2:5]):
            rows.append(Row(cells[0], cells[1], int(cells[2]), int(cells[3]), int(cells[4]), cells[5]))
    return rows


def last_line(text: str) -> str:
    """Return the last line of an output that speaks of an error, else the last one, cut to 300 characters."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if re.search("error|exception|failed", line, re.IGNORECASE)]
    return (errors or lines or ["it printed nothing"])[-1][:300]


# Makes the environment in a folder, and returns the version of the suite and what runs its cases against a server.
Prepare = Callable[[argparse.Namespace, Path], tuple[str, Callable[[Server], Iterable[Case]]]]


def parser_of(suite: str, about: str | None) -> argparse.ArgumentParser:
    """Return the options that all suites have."""
    parser = argparse.ArgumentParser(
        suite, description=about, epilog="Exit status: 0 all passed, 1 some failed, 3 it cannot run here."
    )
    parser.add_argument(
        "--environments", type=Path, default=ENVIRONMENTS, metavar="DIR", help="where environments lie (%(default)s)"
    )
    parser.add_argument(
        "--server",
        metavar="HTTP,GRPC,OPERATOR,TOKENIZER",
        help="ports and tokenizer of a server of all_suites that runs already; without it, one is started",
    )
    return parser


def run_suite(
    suite: str, about: str | None, prepare: Prepare, *, checkout: str = "", writers: Sequence[str] = ()
) -> int:
    """Run a suite from the command line: print each case that says something, then the table; return the exit status.

    Args:
        checkout: whose sources the suite needs, when it takes the folder of a checkout.
        writers: names of models that generate which its server must have.
    """
    parser = parser_of(suite, about)
    if checkout:
        parser.add_argument("--checkout", type=Path, metavar="DIR", help=f"a checkout of {checkout}")
    arguments = parser.parse_args()
    try:
        version, cases = prepare(arguments, arguments.environments.resolve() / suite)
        with _server(arguments.server, writers) as server:
            ran = []
            for case in cases(server):
                if case.said or case.outcome != "passed":
                    print(f"{case.outcome:8}{case.name}: {case.said}", flush=True)
                ran.append(case)
    except UnavailableError as reason:
        print(f"{suite} cannot run here: {reason}")
        return UNAVAILABLE
    row = Row.of(suite, version, ran)
    print(f"\n{table([row])}")
    return row.status


def _server(described: str | None, writers: Sequence[str]) -> contextlib.AbstractContextManager[Server]:
    if described is None:
        return served(writers)
    http, grpc, operator, tokenizer = described.split(",")
    return contextlib.nullcontext(Server(int(http), int(grpc), int(operator), Path(tokenizer)))
