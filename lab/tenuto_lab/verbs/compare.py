"""`tenuto compare`: differences between runs, with their spread."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from tenuto.cli.common import json_option, printed_as_json, say
from tenuto.cli.tables import print_table
from tenuto.errors import InvalidInputError

if TYPE_CHECKING:
    from tenuto_lab.comparison import Comparison, Difference


@click.command(name="compare", short_help="Compare runs that saw the same schedule: differences, spread, conclusion.")
@click.argument("folders", metavar="A B…", nargs=-1, required=True)
@click.option("--different-schedules", is_flag=True, help="Compare runs even if their schedules differ.")
@json_option
def command(folders: tuple[str, ...], different_schedules: bool) -> None:
    """Compare every further run with the first.

    A folder that contains run folders counts as repeats of one run.

    Example: tenuto compare runs/deferred runs/eager
    """
    from tenuto_lab.comparison import compare, load_side

    if len(folders) < 2:
        raise InvalidInputError("give at least two runs to compare, such as: tenuto compare runs/a runs/b")
    first, *others = [load_side(folder) for folder in folders]
    found = [compare(first, other, different_schedules=different_schedules) for other in others]
    if not printed_as_json({"comparisons": [_data(comparison) for comparison in found]}):
        _print(found)


def _data(comparison: Comparison) -> dict[str, Any]:
    return {
        "first": comparison.first.name,
        "second": comparison.second.name,
        "method": comparison.method,
        "warnings": list(comparison.warnings),
        "differences": [
            {
                "model": d.model,
                "metric": d.metric,
                "first": d.first,
                "second": d.second,
                "difference": d.difference,
                "half_width": d.half_width,
                "conclusion": d.conclusion,
            }
            for d in comparison.differences
        ],
    }


def _print(found: Sequence[Comparison]) -> None:
    for each in found:
        first, second = each.first, each.second
        print_table(
            ("model", "figure", first.name, second.name, "difference", "95 % interval", "conclusion"),
            ((entry.model or "all", entry.metric, *_numbers(entry), entry.conclusion) for entry in each.differences),
            left=("figure", "conclusion"),
        )
        say(f"{len(first.folders)} against {len(second.folders)} run(s); spread {each.method}")
        for warning in each.warnings:
            say(f"warning: {warning}")


def _numbers(entry: Difference) -> tuple[str, str, str, str]:
    def shown(value: float | None, sign: str = "") -> str:
        if value is None:
            return "-"
        return f"{100 * value:{sign}.2f} %" if entry.metric == "attainment" else f"{value:{sign}.2f}"

    interval = "-" if entry.half_width is None else f"± {shown(entry.half_width)}"
    return shown(entry.first), shown(entry.second), shown(entry.difference, "+"), interval
