"""`tenuto goodput`: the highest rate a plan or workload sustains within its SLOs, searched in virtual time."""

from __future__ import annotations

import math
import sys
from typing import Any, Literal, cast

import click

from tenuto.batching.virtual.goodput import GoodputSearch, Trial, find_goodput
from tenuto.cli.common import emit_json, progress_console, stdout_console
from tenuto.cli.run_tables import print_run
from tenuto.cli.simulate import read_scene, scene_options

__all__ = ["command"]


@click.command("goodput")
@scene_options
@click.option("--rate-scale", type=float, default=1.0, show_default=True, help="Where the search begins.")
@click.option(
    "--criterion",
    type=click.Choice(["each", "all"]),
    default="each",
    show_default=True,
    help="Whether every model and application, or all their requests together, must attain 99 %.",
)
def command(
    source: str,
    gpus: str | None,
    cluster_file: str | None,
    elastic: bool,
    profile_names: tuple[str, ...],
    scheduler_name: str,
    duration_s: float,
    seed: int,
    warmup_s: float | None,
    options: tuple[str, ...],
    network_ms: str | None,
    as_json: bool,
    rate_scale: float,
    criterion: str,
) -> None:
    """Search the highest rate scale at which every model and application keeps at least 99 % in time.

    Requests of an application count end to end; its stages are not judged by themselves.

    Ctrl-C prints the best answer found so far. Exit code 1 when no rate satisfies the criterion.

    Example: tenuto goodput workload.yaml --gpus v100:4 --scheduler deferred --duration-s 60
    """
    scene = read_scene(
        source,
        gpus,
        cluster_file,
        elastic,
        profile_names,
        scheduler_name,
        duration_s,
        seed,
        warmup_s,
        options,
        network_ms,
    )
    console = progress_console()

    def progress(trial: Trial, search: GoodputSearch) -> None:
        upper = f"{search.upper_scale:.4g}" if math.isfinite(search.upper_scale) else "?"
        verdict = "in time" if trial.passed else "too late"
        worst = f", worst {trial.worst_model} {100 * trial.worst_attainment:.2f} %" if trial.worst_model else ""
        bracket = f"between {search.rate_scale:.4g} and {upper}"
        line = f"scale {trial.rate_scale:.4g}: {trial.offered_rps:,.0f} rps {verdict}{worst}; {bracket}"
        if console.is_terminal:
            sys.stderr.write(f"\r\x1b[2K{line}")
            sys.stderr.flush()
        else:
            print(line, file=sys.stderr)

    found = find_goodput(
        lambda _scale: scene.scheduler(),
        scene.offer,
        duration_s=duration_s,
        warmup_s=warmup_s,
        criterion=cast(Literal["each", "all"], criterion),
        start_scale=rate_scale,
        progress=progress,
    )
    if console.is_terminal:
        sys.stderr.write("\r\x1b[2K")
    summary = found.summary()
    if found.best is not None and scene.applications:
        summary["simulation"] = scene.described(found.best, found.rate_scale)
    if as_json:
        emit_json(summary)
    else:
        _print(summary, scheduler_name)
    if found.best is None:
        raise click.exceptions.Exit(1)


def _print(summary: dict[str, Any], scheduler_name: str) -> None:
    console = stdout_console()
    if summary["simulation"] is not None:
        print_run(summary["simulation"], scheduler_name)
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
