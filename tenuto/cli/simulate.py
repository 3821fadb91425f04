"""`tenuto simulate`: run a plan or a workload in virtual time and print what every model and gpu-let did."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tenuto.batching.core.scheduler_status import describe_schedulers
from tenuto.cli.common import Number, command_line, notice, output_option, printed_as_json, say, tell
from tenuto.cli.tables import offline_in_words, percent, print_run, print_table
from tenuto.cli.virtual import VirtualArguments, virtual_arguments
from tenuto.errors import Problem, raise_if_any, refused
from tenuto.loadgen.simulated import SimulatedRun, Simulation
from tenuto.outcome import OUTCOMES

if TYPE_CHECKING:
    from tenuto.deployments.control.virtual import ControlledRun

_DIGITS = 16  # limit: of a number of requests
PROGRESS_S = 5.0  # format: time between two lines of progress


@click.command("simulate", short_help="Run a plan or a workload in virtual time.")
@virtual_arguments
@click.option("--rate-scale", type=Number(), default=1.0, help="Multiply every rate by this.")
@output_option("Folder for report.html, result.json, requests.parquet.", is_folder=True)
@click.option("--force", is_flag=True, help="Replace a report that is already in DIR.")
@click.option(
    "--offline",
    multiple=True,
    metavar="MODEL[=N]",
    help="Beside all else, N offline requests of MODEL wait, or more than can run; repeatable.",
)
@click.option(
    "--control", "control_file", metavar="FILE", help="Let a controller with these settings change the plan meanwhile."
)
def command(
    arguments: VirtualArguments,
    rate_scale: float,
    folder: str | None,
    force: bool,
    offline: tuple[str, ...],
    control_file: str | None,
) -> int:
    """Run PLAN in virtual time; or WORKLOAD, on a cluster in which every GPU hosts every model.

    The exit code is 1 when no request is in time, as of a plan without gpu-lets.

    Example: tenuto simulate workload.yaml --gpus v100:4 --scheduler deferred --duration-s 60 --seed 0
    """
    if control_file is not None:
        given = {"--output": folder, "--warmup-s": arguments.warmup_s, "--offline": offline or None}
        raise_if_any(
            [
                Problem(option, value, "is not for runs with --control", "Leave one of them away.")
                for option, value in given.items()
                if value is not None
            ]
        )
        return _run_controlled(arguments, control_file, rate_scale)
    simulation = arguments.simulation().with_offline(_backlog(offline))
    out = _report_folder(folder, force=force)
    run = simulation.run(rate_scale)
    for note in run.schedule.notes:
        tell(note)
    summary = run.summary()
    if not printed_as_json(summary):
        print_run(summary)
        say(_in_words(summary, arguments.scheduler_name))
        offline_models = {*summary.get("offline", {"requests": ()})["requests"]}
        for line in simulation.system.without_gap(offline_models):
            say(f"note: {line}")
        for line in describe_schedulers([run.result.scheduler] if run.result.scheduler else []):
            say(f"scheduler: {line}")
    if out is not None:
        _write_report(out, run, simulation, rate_scale)
        notice(f"report: {out / 'report.html'}")
    return _code(summary)


def _backlog(given: Sequence[str]) -> dict[str, float]:
    """Return how many offline requests there are, by model; inf: without an end."""
    backlog: dict[str, float] = {}
    for text in given:
        name, sign, count = text.partition("=")
        if sign and not (count.isdecimal() and len(count) < _DIGITS):
            raise refused("--offline", text, "N is no number of requests", "Give MODEL or MODEL=1000.")
        backlog[name] = float(count) if sign else math.inf
    return backlog


def _code(summary: Mapping[str, Any]) -> int:
    """Return the exit code: 1 when requests came and none was in time."""
    return int(bool(summary["offered_rps"]) and not summary["goodput_rps"])


def _run_controlled(arguments: VirtualArguments, control_file: str, rate_scale: float) -> int:
    from tenuto.deployments.control.journal import Kind
    from tenuto.loadgen.controlled import controlled_summary

    simulation = arguments.controlled(control_file)
    told_s = since = time.perf_counter()

    def progress(now_s: float, run: ControlledRun) -> None:
        nonlocal told_s
        if time.perf_counter() - told_s > PROGRESS_S:
            told_s = time.perf_counter()
            tell(f"{now_s:,.0f} of {arguments.duration_s:,.0f} s, {run.count(Kind.CHANGED)} changes")

    run = simulation.run(rate_scale, progress)
    summary = controlled_summary(run, arguments.duration_s, since, simulation.workload.applications)
    if printed_as_json(summary):
        return _code(summary)
    for what in ("application", "model"):
        if f"{what}s" in summary:
            print_table(
                (what, "offered", *OUTCOMES, "in time"),
                (
                    (name, *(str(row[key]) for key in ("offered", *OUTCOMES)), percent(row["attainment"]))
                    for name, row in summary[f"{what}s"].items()
                ),
            )
    if "offline" in summary:
        say(offline_in_words(summary["offline"]))
    for entry in summary["control"]["log"]:
        say(f"{entry['at_s']:10.1f} s  {entry['kind']}: {entry['text']}")
    control = summary["control"]
    say(
        f"attainment {percent(summary['attainment'])}, {control['changes']} changes, {control['rolled_back']} rolled "
        f"back, {control['gpu_hours']:.2f} GPU-hours, {control['share_hours']:.2f} of them by share; "
        f"{summary['requests']:,} requests in {summary['wall_s']:.1f} s"
    )
    return _code(summary)


def _in_words(summary: Mapping[str, Any], scheduler_name: str) -> str:
    return (
        f"{scheduler_name}: goodput {summary['goodput_rps']:,.1f} of {summary['offered_rps']:,.1f} rps offered, "
        f"attainment {percent(summary['attainment'])}, GPUs busy {percent(summary['gpu_utilisation'])}, "
        f"{summary['requests']:,} requests measured in {summary['wall_s']:.2f} s"
    )


def _report_folder(folder: str | None, *, force: bool) -> Path | None:
    if folder is None:
        return None
    from tenuto.loadgen.run_files import prepare_report

    return prepare_report(Path(folder), force=force)


def _write_report(folder: Path, run: SimulatedRun, simulation: Simulation, rate_scale: float) -> None:
    """Write the files and the page of a simulated run, in the form of a measured run."""
    from tenuto.loadgen.report.run_page import write_report
    from tenuto.loadgen.run import Run
    from tenuto.loadgen.run_files import write_run_files

    settings = {
        "seed": simulation.seed,
        "rate_scale": rate_scale,
        "scheduler": simulation.scheduler_name,
        **simulation.options,
    }
    document, records = run.describe(simulation.plan, options=settings, command=command_line())
    write_run_files(folder, document, records, run.schedule)
    write_report(folder, Run(document, records, simulation.plan))
