"""`tenuto report`: rebuild the page of a run from its files."""

from __future__ import annotations

import click

from tenuto.cli.common import json_option, printed_as_json, say


@click.command(name="report", short_help="Rebuild report.html from a run's result.json and requests.parquet.")
@click.argument("folder", metavar="DIR")
@json_option
def command(folder: str) -> None:
    """Rebuild the page of a run that `tenuto bench -o DIR` wrote, as one file that opens without network.

    Example: tenuto report runs/monday
    """
    from tenuto.loadgen.report.run_page import write_report
    from tenuto.loadgen.run import load_run

    run = load_run(folder)
    path = write_report(folder, run)
    if printed_as_json(dict(run.document)):
        return
    verdict = run.document["verdict"]
    for reason in verdict["reasons"]:
        say(f"  {reason}")
    say(f"verdict: {verdict['result']} ({run.label})")
    say(f"report: {path}")
