"""`tenuto capacity`: how much a plan or a running endpoint carries, and how that depends on SLOs and burstiness."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import click

from tenuto.batching.virtual.highest_rate import Limits
from tenuto.cli.common import command_line, emit_json, stdout_console, tell
from tenuto.cli.virtual import VirtualArguments, virtual_arguments
from tenuto.errors import TenutoError, refused
from tenuto.loadgen.capacity import (
    AXES,
    Attempt,
    Capacity,
    Curve,
    check_axes,
    curves,
    find_capacity,
    in_virtual_time,
    on_endpoint,
    summary_of,
)
from tenuto.loadgen.result_folder import provenance
from tenuto.placement.applications import Application

_LIVE_SECONDS, _LIVE_RUNS = 10.0, 12


@click.command(
    "capacity", short_help="The highest rate scale that is in time, and attainment by SLO, rate and burstiness."
)
@virtual_arguments
@click.option("--rate-scale", type=float, default=1.0, show_default=True, help="Where the search begins.")
@click.option("--tolerance", type=float, default=0.02, show_default=True, help="Relative width of the final bracket.")
@click.option("--runs", type=int, help=f"Most runs of the search. Default: 24, {_LIVE_RUNS} against an endpoint.")
@click.option(
    "--curve",
    "curve_texts",
    multiple=True,
    metavar="AXIS[=V,V,…]",
    help=f"Attainment along {', '.join(AXES)}; repeatable. Default with -o: all three in virtual time, none live.",
)
@click.option(
    "--curve-at",
    type=click.FloatRange(0, min_open=True),
    metavar="SCALE",
    help="Rate scale of the curves. Default: the capacity found.",
)
@click.option("--clients", default=1, show_default=True, help="Against an endpoint: Ray actors that send; 0: none.")
@click.option("-o", "--output", "folder", metavar="DIR", help="Folder for capacity.html and result.json.")
@click.option("--force", is_flag=True, help="Replace an answer that is already in DIR.")
@click.pass_context
def command(
    context: click.Context,
    asked: VirtualArguments,
    as_json: bool,
    rate_scale: float,
    tolerance: float,
    runs: int | None,
    curve_texts: tuple[str, ...],
    curve_at: float | None,
    clients: int,
    folder: str | None,
    force: bool,
) -> int:
    """Search the highest rate scale at which every model and application of PLAN, WORKLOAD or URL keeps 99 % in time.

    Requests of an application count end to end; its stages are not judged by themselves.

    A file is run in virtual time; an endpoint (http://…) is loaded for a few seconds per rate, with the plan it
    serves. Ctrl-C prints the best answer so far. Exit code 1 when no rate is in time.

    Example: tenuto capacity plan.yaml -o capacity
    """
    is_live = "://" in asked.source
    axes = _axes(curve_texts, by_default=folder is not None and not is_live)
    out = None
    if folder is not None:
        from tenuto.loadgen.report.capacity import prepare_capacity_folder

        out = prepare_capacity_folder(Path(folder), force=force)
    limits = Limits(tolerance, runs if runs is not None else _LIVE_RUNS if is_live else 24, rate_scale)
    limits.check()

    if is_live:
        is_given = context.get_parameter_source("duration_s") is click.core.ParameterSource.COMMANDLINE
        seconds = asked.duration_s if is_given else _LIVE_SECONDS
        attempt, applications = _live(asked, seconds, clients)
        how = f"measured against {asked.source}, {seconds:g} s a run"
    else:
        applications = asked.simulation().applications  # wrong input is an error here, not a point of a curve
        attempt = in_virtual_time(asked.simulation)
        how = f"in virtual time with {asked.scheduler_name}, {asked.duration_s:g} s a run (emulated)"
    found = find_capacity(attempt, limits, lambda so_far: tell(_progress(so_far)))
    base = curve_at if curve_at is not None else found.rate_scale or rate_scale
    drawn = {} if found.is_interrupted else _draw(attempt, axes, base)
    settings = {"scheduler": None if is_live else asked.scheduler_name, "seed": asked.seed}
    document = {
        "kind": "capacity",
        "source": asked.source,
        "how": how,
        "goodput_rps": found.best.goodput_rps if found.best else 0.0,
        "rate_scale": found.rate_scale,
        "capacity": summary_of(found),
        "curves_rate_scale": base,
        "curves": [curve.summary() for curve in drawn.values()],
        "settings": settings,
        "applications": [application.name for application in applications],
        **provenance(command_line()),
    }
    if as_json:
        emit_json(document)
    else:
        _print(found)
    if out is not None:
        from tenuto.loadgen.report.capacity import write_capacity

        tell(f"page: {write_capacity(out, document)}")
    return 0 if found.best is not None else 1


def _axes(texts: tuple[str, ...], *, by_default: bool) -> dict[str, tuple[float, ...]]:
    if not texts:
        return dict(AXES) if by_default else {}
    axes: dict[str, tuple[float, ...]] = {}
    for text in texts:
        axis, _, values = text.partition("=")
        try:
            axes[axis] = tuple(float(part) for part in values.split(",")) if values else AXES.get(axis, ())
        except ValueError:
            raise refused("--curve", text, "must list numbers behind '='", f"Write {axis}=0.5,1,2.") from None
    check_axes(axes)
    return axes


def _live(asked: VirtualArguments, seconds: float, clients: int) -> tuple[Attempt, tuple[Application, ...]]:
    from tenuto.deployments.serve.endpoint import served_plan
    from tenuto.loadgen.bench import BenchOptions, asked_of
    from tenuto.placement import Plan

    url = asked.source
    models, applications, notes = asked_of(Plan.from_data(served_plan(url), origin=url))
    for note in notes:
        tell(note)
    options = BenchOptions(url.rstrip("/"), seconds, asked.seed, warmup_s=asked.warmup_s, clients=clients)
    return on_endpoint(models, applications, options, tell), applications


def _draw(attempt: Attempt, axes: Mapping[str, tuple[float, ...]], base: float) -> dict[str, Curve]:
    drawn: dict[str, Curve] = {}
    try:
        for curve in curves(attempt, axes, base):
            drawn[curve.axis] = curve
            last = curve.points[-1]
            state = last.invalid or f"{100 * last.worst_attainment:.2f} % in time at worst"
            tell(f"{curve.axis} {getattr(last.load, curve.axis):g}: {state}")
    except KeyboardInterrupt:
        tell("interrupted; the points so far are kept")
    except TenutoError as error:
        if not drawn:
            raise
        tell(f"the curves end here: {error}")
    return drawn


def _progress(found: Capacity) -> str:
    scale, last = found.tried[-1]
    upper = f"{found.upper_scale:.4g}" if math.isfinite(found.upper_scale) else "?"
    worst = f"worst {last.worst_model} {100 * last.worst_attainment:.2f} %"
    return f"rate scale {scale:.4g}: {worst}; between {found.rate_scale:.4g} and {upper}"


def _print(found: Capacity) -> None:
    console = stdout_console()
    if found.best is None:
        console.print(f"no rate tried keeps 99 % of everything in time ({found.ended})", markup=False)
        return
    upper = "no rate failed" if math.isinf(found.upper_scale) else f"fails at {found.upper_scale:.4g}"
    line = f"capacity: rate scale {found.rate_scale:.4g} ({upper}; {found.ended}), "
    line += f"{found.best.goodput_rps:,.1f} rps in time of {found.best.offered_rps:,.1f} rps offered"
    console.print(line, markup=False)
