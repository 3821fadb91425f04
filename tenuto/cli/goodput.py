"""`tenuto goodput`: the highest rate that a plan, a workload or an endpoint sustains within its SLOs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import click

from tenuto.batching.virtual.criterion import Criterion, Goal, Trial
from tenuto.batching.virtual.highest_rate import HighestRate, SearchLimits, find_highest_rate
from tenuto.cli.common import Number, ProgressLine, printed_as_json, say, tell
from tenuto.cli.tables import print_run
from tenuto.cli.virtual import VirtualArguments, virtual_arguments
from tenuto.loadgen.endpoint_trials import EndpointTrial, on_endpoint
from tenuto.placement.application import Application

Answer = HighestRate[Trial] | HighestRate[EndpointTrial]
_LIVE_SECONDS, _LIVE_RUNS = 10.0, 12  # default: defaults of a live search: seconds of a run, and number of runs


@click.command("goodput", short_help="Find the highest rate in time.")
@virtual_arguments
@click.option("--rate-scale", type=Number(), default=1.0, help="Factor on every rate at which the search begins.")
@click.option(
    "--criterion",
    type=click.Choice(["each", "all"]),
    default="each",
    help="Ask for 99 % in time of every model and application, or of all their requests together.",
)
@click.option("--tolerance", type=Number(), default=0.01, help="Relative width of the final bracket.")
@click.option("--runs", type=int, help=f"Most runs of the search. Default: 64; against an endpoint {_LIVE_RUNS}.")
@click.option("--clients", default=1, help="Against an endpoint: Ray actors that send; 0 sends from this process.")
@click.pass_context
def command(
    context: click.Context,
    arguments: VirtualArguments,
    rate_scale: float,
    criterion: Criterion,
    tolerance: float,
    runs: int | None,
    clients: int,
) -> int:
    """Search the highest rate scale at which every model and application keeps at least 99 % in time.

    Requests of an application count end to end; its stages are not judged by themselves.

    A file is run in virtual time. An endpoint (http://…) is loaded for a few seconds per rate, with the models of its
    plan. Ctrl-C prints the best answer so far. The exit code is 1 when no rate satisfies the criterion.

    Example: tenuto goodput workload.yaml --gpus v100:4 --scheduler deferred --duration-s 60
    """
    is_live = "://" in arguments.source
    limits = SearchLimits(tolerance, runs if runs is not None else _LIVE_RUNS if is_live else 64, rate_scale)
    limits.check()
    goal, line = Goal(criterion), ProgressLine()
    answer: Answer
    if is_live:
        is_given = context.get_parameter_source("duration_s") is click.core.ParameterSource.COMMANDLINE
        seconds = arguments.duration_s if is_given else _LIVE_SECONDS
        attempt, applications = _live(arguments, seconds, clients, goal)
        how = f"measured against {arguments.source}, {seconds:g} s a run"
        live = find_highest_rate(attempt, limits, lambda so_far: tell(_progress(so_far)))
        answer, summary = live, _summary(live, goal)
    else:
        simulation = arguments.simulation()
        applications = simulation.applications
        how = f"in virtual time with {arguments.scheduler_name}, {arguments.duration_s:g} s a run (emulated)"
        virtual = find_highest_rate(
            lambda scale: simulation.try_rate(scale, goal), limits, lambda so_far: line.show(_progress(so_far))
        )
        line.clear()
        best = virtual.best
        answer, summary = virtual, _summary(virtual, goal)
        summary["simulation"] = simulation.run(virtual.rate_scale).summary() if best else None
    summary |= {
        "source": arguments.source,
        "how": how,
        "settings": {"scheduler": None if is_live else arguments.scheduler_name, "seed": arguments.seed},
        "applications": [application.name for application in applications],
    }
    if not printed_as_json(summary):
        _print(summary)
    return 0 if answer.best is not None else 1


def _live(
    arguments: VirtualArguments, seconds: float, clients: int, goal: Goal
) -> tuple[Callable[[float], EndpointTrial], tuple[Application, ...]]:
    from tenuto.deployments.serve.endpoint import served_plan
    from tenuto.loadgen.bench import BenchOptions, asked_of
    from tenuto.placement import Plan

    url = arguments.source
    models, applications, notes = asked_of(Plan.from_data(served_plan(url), origin=url, is_whole=False))
    for note in notes:
        tell(note)
    options = BenchOptions(url.rstrip("/"), seconds, arguments.seed, warmup_s=arguments.warmup_s, clients=clients)
    return on_endpoint(models, applications, options, goal, tell), applications


def _progress(answer: Answer) -> str:
    scale, last = answer.tried[-1]
    upper = f"{answer.upper_scale:.4g}" if math.isfinite(answer.upper_scale) else "?"
    verdict = "in time" if last.is_in_time else "too late"
    worst = f", worst {last.worst_model} {100 * last.worst_attainment:.2f} %" if last.worst_model else ""
    bracket = f"between {answer.rate_scale:.4g} and {upper}"
    return f"scale {scale:.4g}: {last.offered_rps:,.0f} rps {verdict}{worst}; {bracket}"


def _summary(answer: Answer, goal: Goal) -> dict[str, Any]:
    best = answer.best
    return {
        "goodput_rps": best.goodput_rps if best else 0.0,
        "rate_scale": answer.rate_scale,
        "upper_scale": answer.upper_scale if math.isfinite(answer.upper_scale) else None,
        "offered_rps": best.offered_rps if best else 0.0,
        "bracket_pct": 100.0 * answer.bracket if math.isfinite(answer.bracket) else None,
        "criterion": goal.criterion,
        "required_attainment": goal.attainment,
        "interrupted": answer.is_interrupted,
        "ended": answer.ended,
        "trials": [
            {
                "rate_scale": scale,
                "passed": tried.is_in_time,
                "offered_rps": tried.offered_rps,
                "goodput_rps": tried.goodput_rps,
                "attainment": tried.attainment,
                "worst_model": tried.worst_model,
                "worst_attainment": tried.worst_attainment,
                "stopped_early": tried.stopped_early,
                "remark": tried.ends_search,
            }
            for scale, tried in answer.tried
        ],
        "simulation": None,
    }


def _print(summary: Mapping[str, Any]) -> None:
    if summary["simulation"] is not None:
        print_run(summary["simulation"])
    state = " (interrupted: best so far)" if summary["interrupted"] else f" ({summary['ended']})"
    each = "every model and application" if summary["applications"] else "every model"
    which = each if summary["criterion"] == "each" else "all requests together"
    if not summary["rate_scale"]:
        say(f"no rate tried keeps 99 % in time ({which}){state}")
    else:
        say(
            f"goodput: {summary['goodput_rps']:,.1f} rps at rate scale {summary['rate_scale']:.4g} "
            f"({summary['offered_rps']:,.1f} rps offered; criterion: {which}){state}"
        )
