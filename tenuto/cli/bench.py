"""`tenuto bench`: load a running endpoint on a schedule and judge it by goodput."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from tenuto.cli.common import (
    Number,
    command_line,
    json_option,
    named_values,
    notice,
    output_option,
    printed_as_json,
    say,
    tell,
)
from tenuto.cli.deploying import address_option, deployment_at
from tenuto.cli.tables import number, print_run
from tenuto.errors import InvalidInputError, Problem, one_of, raise_if_any, refused
from tenuto.files import read_text


@click.command(
    name="bench", short_help="Load an endpoint on a seeded open-loop schedule; print the verdict, write the report."
)
@click.argument("target", metavar="PLAN|URL")
@address_option
@click.option("--duration-s", type=Number(), default=30.0, help="Length of the schedule.")
@click.option(
    "--warmup-s",
    default=None,
    type=Number(),
    help="Requests of the first S seconds are left out of the figures. Default: 5 % of the duration.",
)
@click.option("--seed", default=0, help="Seed of the schedule and the payloads.")
@click.option("--rate-scale", type=Number(), default=1.0, help="Factor on every rate of the plan.")
@click.option("--slo-scale", type=Number(), default=1.0, help="Factor on every SLO of the plan.")
@click.option("--clients", default=1, help="Ray actors that send; 0 sends from this process.")
@click.option("--grace-s", type=Number(), default=5.0, help="How long to wait for answers after the last request.")
@click.option(
    "--tensors",
    type=click.Choice(["binary", "json"]),
    default="binary",
    help="Send inputs as raw bytes behind a JSON header, or as JSON numbers.",
)
@click.option(
    "--body",
    "given",
    multiple=True,
    metavar="MODEL=PATH",
    help="Send this file, or the files of this folder in turn, as they are, for the model's hooks (repeatable).",
)
@output_option("Folder for report.html, result.json, requests.parquet, timeline.csv.", is_folder=True)
@click.option("--key-file", metavar="FILE", help="File with the API key to show; default: TENUTO_API_KEY.")
@click.option("--force", is_flag=True, help="Replace a report that is already in DIR.")
@json_option
def command(
    target: str,
    address: str | None,
    folder: str | None,
    key_file: str | None,
    force: bool,
    given: tuple[str, ...],
    **settings: Any,
) -> int:
    """Send a plan's load to a running endpoint, open-loop, and judge it by goodput.

    Applications are asked as models are, and judged end to end.

    Ctrl-C and SIGTERM end the run early and keep the figures so far. The exit code is 0 only when the verdict is PASS.

    Example: tenuto bench plan.yaml --duration-s 30 --seed 1 -o report
    """
    from tenuto.deployments.serve.endpoint import CLIENT_KEY, served_plan
    from tenuto.loadgen.bench import BenchOptions, asked_of, run_bench
    from tenuto.loadgen.report.run_page import write_report
    from tenuto.loadgen.run import Run
    from tenuto.loadgen.run_files import describe, prepare_report, write_run_files
    from tenuto.placement import Plan

    if key_file is not None:
        os.environ[CLIENT_KEY] = _read_key(key_file)
    deployment = deployment_at(address or (target if "://" in target else None))
    url = deployment.url
    plan = Plan.from_data(served_plan(url), origin=url, is_whole=False) if "://" in target else Plan.load(target)
    out = prepare_report(Path(folder), force=force) if folder is not None else None
    served, applications, notes = asked_of(plan)
    bodies = named_values("--body", given, "digits=pictures/")
    names = [*(spec.name for spec in served), *(application.name for application in applications)]
    unknown = (name for name in bodies if name not in names)
    raise_if_any(Problem("--body", name, "is no model that is asked", one_of(name, names)) for name in unknown)
    options = BenchOptions(url, bodies=bodies, **settings)  # the other options have the names of its fields
    result = run_bench(served, options, tell, applications=applications, cluster=deployment.address or "auto")
    for note in (*notes, *result.schedule.notes):
        tell(note)
    with _no_sigterm():  # to write the results takes a moment
        result.notes = notes
        document = describe(result, options, plan, command=command_line())
        # The report comes before the verdict, which stays the last line; a full disk must not cost the figures.
        try:
            if out is not None:
                write_run_files(out, document, result.records, result.schedule, result.queued)
                write_report(out, Run(document, result.records, plan))
                notice(f"report: {out / 'report.html'}")
        finally:
            if not printed_as_json(document):
                _print(document)
    return 0 if result.verdict.result == "PASS" else 1


@contextmanager
def _no_sigterm() -> Iterator[None]:
    """Let SIGTERM do nothing within the block."""
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _read_key(file: str) -> str:
    try:
        return read_text(file).strip()
    except InvalidInputError as error:
        raise refused(
            "--key-file", file, f"cannot be read ({error})", "Give a file with the key and nothing else."
        ) from error


def _print(document: dict[str, Any]) -> None:
    """Print the tables, then the conditions, then the verdict last."""
    print_run(document)
    verdict = document["verdict"]
    conditions = verdict["conditions"]
    later = f" and {conditions['followed']} of later stages" if "followed" in conditions else ""
    say(
        f"offered {document['offered_rps']:.1f} rps, goodput {document['goodput_rps']:.1f} rps; "
        f"sent {conditions['sent']} of {conditions['scheduled']}{later}, "
        f"p99 of the generator's lateness {number(conditions['lateness_p99_ms'])} ms"
    )
    for line in document.get("errors", []):
        say(f"failures: {line}")
    for reason in verdict["reasons"]:
        say(f"  {reason}")
    kinds = {True: " (emulated GPUs)", None: " (the address does not say whether its GPUs are emulated)"}
    say(f"verdict: {verdict['result']}{kinds.get(document.get('emulated'), '')}")
