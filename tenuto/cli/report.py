"""`tenuto report`: rebuild the page of a run from its files."""

from __future__ import annotations

import click

from tenuto.cli.common import emit_json, stdout_console


@click.command(name="report", short_help="Rebuild report.html from a run's result.json and requests.parquet.")
@click.argument("folder", metavar="DIR")
@click.option("--json", "as_json", is_flag=True, help="Print the result document instead of the verdict.")
def command(folder: str, as_json: bool) -> None:
    """Rebuild the page of a run that `tenuto bench -o DIR` wrote; one file, readable without network.

    Example: tenuto report runs/monday
    """
    from tenuto.loadgen.report.page import write_report
    from tenuto.loadgen.run import load_run

    run = load_run(folder)
    path = write_report(folder, run)
    if as_json:
        emit_json(dict(run.document))
        return
    verdict = run.document["verdict"]
    for reason in verdict["reasons"]:
        stdout_console().print(f"  {reason}", markup=False)
    stdout_console().print(f"verdict: {verdict['result']} ({run.label})", markup=False)
    stdout_console().print(f"report: {path}", markup=False)
