"""`tenuto goodput`: the highest rate a plan or workload sustains within its SLOs, searched in virtual time."""

from __future__ import annotations

import math
from typing import Any

import click

from tenuto.batching.virtual.goodput import Criterion, Goal, Trial
from tenuto.batching.virtual.highest_rate import HighestRate, Limits, find_highest_rate
from tenuto.cli.common import ProgressLine, emit_json, stdout_console
from tenuto.cli.tables import print_run
from tenuto.cli.virtual import VirtualArguments, virtual_arguments
from tenuto.loadgen.simulated import Simulation


@click.command("goodput", short_help="The highest rate scale of a plan or workload in virtual time.")
@virtual_arguments
@click.option("--rate-scale", type=float, default=1.0, show_default=True, help="Where the search begins.")
@click.option(
    "--criterion",
    type=click.Choice(["each", "all"]),
    default="each",
    show_default=True,
    help="Whether every model and application, or all their requests together, must attain 99 %.",
)
def command(asked: VirtualArguments, as_json: bool, rate_scale: float, criterion: Criterion) -> int:
    """Search the highest rate scale at which every model and application keeps at least 99 % in time.

    Requests of an application count end to end; its stages are not judged by themselves.

    Ctrl-C prints the best answer found so far. Exit code 1 when no rate satisfies the criterion.

    Example: tenuto goodput workload.yaml --gpus v100:4 --scheduler deferred --duration-s 60
    """
    simulation, goal, line = asked.simulation(), Goal(criterion), ProgressLine()
    found = find_highest_rate(
        lambda scale: simulation.try_rate(scale, goal),
        Limits(start_scale=rate_scale),
        lambda so_far: line.show(_progress(so_far)),
    )
    line.clear()
    summary = _summary(found, simulation, goal)
    if as_json:
        emit_json(summary)
    else:
        _print(summary)
    return 0 if found.best is not None else 1


def _progress(found: HighestRate[Trial]) -> str:
    scale, trial = found.tried[-1]
    upper = f"{found.upper_scale:.4g}" if math.isfinite(found.upper_scale) else "?"
    verdict = "in time" if trial.is_in_time else "too late"
    worst = f", worst {trial.worst_model} {100 * trial.worst_attainment:.2f} %" if trial.worst_model else ""
    bracket = f"between {found.rate_scale:.4g} and {upper}"
    return f"scale {scale:.4g}: {trial.offered_rps:,.0f} rps {verdict}{worst}; {bracket}"


def _summary(found: HighestRate[Trial], simulation: Simulation, goal: Goal) -> dict[str, Any]:
    best = found.best
    return {
        "goodput_rps": best.goodput_rps if best else 0.0,
        "rate_scale": found.rate_scale,
        "offered_rps": best.offered_rps if best else 0.0,
        "bracket_pct": 100.0 * found.bracket if math.isfinite(found.bracket) else None,
        "criterion": goal.criterion,
        "required_attainment": goal.attainment,
        "interrupted": found.is_interrupted,
        "ended": found.ended,
        "trials": [
            {
                "rate_scale": scale,
                "passed": trial.is_in_time,
                "offered_rps": trial.offered_rps,
                "attainment": trial.attainment,
                "worst_model": trial.worst_model,
                "worst_attainment": trial.worst_attainment,
                "stopped_early": trial.stopped_early,
            }
            for scale, trial in found.tried
        ],
        "simulation": simulation.finished(best.result, found.rate_scale).summary() if best else None,
    }


def _print(summary: dict[str, Any]) -> None:
    console = stdout_console()
    if summary["simulation"] is not None:
        print_run(summary["simulation"])
    state = " (interrupted: best so far)" if summary["interrupted"] else ""
    has_applications = summary["simulation"] is not None and summary["simulation"].get("applications")
    each = "every model and application" if has_applications else "every model"
    which = each if summary["criterion"] == "each" else "all requests together"
    if summary["simulation"] is None:
        console.print(f"no rate tried keeps 99 % in time ({which}){state}")
    else:
        console.print(
            f"goodput: {summary['goodput_rps']:,.1f} rps at rate scale {summary['rate_scale']:.4g} "
            f"({summary['offered_rps']:,.1f} rps offered; criterion: {which}){state}"
        )
