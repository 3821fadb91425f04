"""Tables on the terminal, in one style for all verbs, and the tables of measured and simulated runs."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from rich.console import JustifyMethod
from rich.table import Table
from rich.text import Text

from tenuto.cli.common import say, stdout_console
from tenuto.errors import printable
from tenuto.outcome import OUTCOMES


def number(value: float | None, digits: int = 1) -> str:
    """Show a number, or a dash for None."""
    return "-" if value is None else f"{value:,.{digits}f}"


def percent(value: float | None) -> str:
    """Show a part of 1 as percent, or a dash for None."""
    return "-" if value is None else f"{100 * value:.2f} %"


def offline_in_words(figures: Mapping[str, Any]) -> str:
    """Return a line of the figures of offline requests."""
    done = [
        f"{count:,} of {name} answered" + (f" and {left:,} waiting" if (left := figures["waiting"][name]) else "")
        for name, count in figures["requests"].items()
    ]
    done += [f"{figures['tokens']:,} tokens"] if figures["tokens"] else []
    return (
        f"offline: {', '.join(done)}; {percent(figures['part_of_gpu_time'])} of the GPU time, and "
        f"{percent(figures['part_of_idle'])} of what others left idle"
    )


def print_table(
    headings: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    left: Collection[str] = (),
    whole: Collection[str] = (),
    title: str | None = None,
) -> None:
    """Print a table on stdout; cells are not formatted.

    Args:
        headings: headings of the columns.
        rows: a text for each column.
        left: headings of columns that are aligned left, as they contain words; the first column always is.
        whole: headings of columns that are not folded, so that cells can be copied; the first column never is.
        title: a title above the table.
    """
    table = Table(box=None, header_style="bold", title=title, title_justify="left")
    for place, heading in enumerate(headings):
        side: JustifyMethod = "left" if place == 0 or heading in left else "right"
        table.add_column(
            Text(printable(heading, None)), justify=side, overflow="fold", no_wrap=place == 0 or heading in whole
        )
    for row in rows:
        table.add_row(*(Text(printable(cell, None)) for cell in row))
    stdout_console().print(table)


TOKEN_FIGURES = {
    "mean_ttft_ms": "mean TTFT ms",
    "p99_ttft_ms": "p99 TTFT ms",
    "mean_tpot_ms": "mean TPOT ms",
    "p99_tpot_ms": "p99 TPOT ms",
    "tokens_per_s": "tokens/s",
}


def print_run(summary: Mapping[str, Any]) -> None:
    """Print the tables of models, of those that generate and of applications if there are any, and of gpu-lets."""
    latencies = ("p50_ms", "p90_ms", "p99_ms")
    if summary["models"]:
        print_table(
            ("model", "offered", *OUTCOMES, "in time", "p50 ms", "p90 ms", "p99 ms", "mean batch"),
            (
                (
                    name,
                    *(str(row[key]) for key in ("offered", *OUTCOMES)),
                    percent(row["attainment"]),
                    *(number(row[key]) for key in (*latencies, "mean_batch")),
                )
                for name, row in summary["models"].items()
            ),
        )
    rows = {**summary["models"], **(summary.get("applications") or {})}
    writing = {name: row for name, row in rows.items() if "mean_ttft_ms" in row}
    if writing:
        print_table(
            ("generates", *TOKEN_FIGURES.values()),
            ((name, *(number(row[key]) for key in TOKEN_FIGURES)) for name, row in writing.items()),
        )
    if summary.get("applications"):
        print_table(
            ("application", "offered", *OUTCOMES, "in time", "goodput rps", "SLO ms", "p50 ms", "p90 ms", "p99 ms"),
            (
                (
                    name,
                    *(str(row[key]) for key in ("offered", *OUTCOMES)),
                    percent(row["attainment"]),
                    number(row["goodput_rps"]),
                    f"{row['slo_ms']:g}",
                    *(number(row[key]) for key in latencies),
                )
                for name, row in summary["applications"].items()
            ),
        )
        print_table(
            ("application", "stage", "model", "p50 ms", "p90 ms", "p99 ms"),
            (
                (name, label, stage["model"], *(number(stage[key]) for key in latencies))
                for name, row in summary["applications"].items()
                for label, stage in row["stages"].items()
            ),
        )
    print_table(
        ("gpu-let", "utilisation", "batches", "mean batch"),
        (
            (name, percent(row["utilisation"]), str(row["batches"]), number(row["mean_batch"]))
            for name, row in summary["gpulets"].items()
        ),
    )
    if "offline" in summary:
        say(offline_in_words(summary["offline"]))
