"""`tenuto capacity`: how much a plan or a running endpoint carries, and how that depends on SLOs and burstiness."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import click

from tenuto.cli.common import emit_json, progress_console, stdout_console
from tenuto.cli.simulate import Scene, read_scene, scene_options
from tenuto.errors import InvalidInputError, Problem, TenutoError
from tenuto.loadgen.capacity import (
    AXES,
    Attempt,
    Capacity,
    Curve,
    Limits,
    Load,
    Outcome,
    check_axes,
    curves,
    find_capacity,
)
from tenuto.loadgen.verdict import judged_rows
from tenuto.placement import Arrival, ModelSpec
from tenuto.placement.applications import Application

__all__ = ["command"]

_LIVE_SECONDS, _LIVE_RUNS = 10.0, 12
_Arriving = TypeVar("_Arriving", ModelSpec, Application)


@click.command(
    "capacity", short_help="The highest rate scale that is in time, and attainment by SLO, rate and burstiness."
)
@scene_options
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
@click.option("--curve-at", type=float, metavar="SCALE", help="Rate scale of the curves. Default: the capacity found.")
@click.option("--clients", default=1, show_default=True, help="Against an endpoint: Ray actors that send; 0: none.")
@click.option("-o", "--output", "folder", metavar="DIR", help="Folder for capacity.html and result.json.")
@click.option("--force", is_flag=True, help="Replace an answer that is already in DIR.")
@click.pass_context
def command(
    context: click.Context,
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
    is_live = "://" in source
    axes = _axes(curve_texts, by_default=folder is not None and not is_live)
    out = None
    if folder is not None:
        from tenuto.loadgen.capacity_page import prepare_capacity_folder

        out = prepare_capacity_folder(Path(folder), force=force)
    limits = Limits(tolerance, runs if runs is not None else _LIVE_RUNS if is_live else 24, 0.99, rate_scale)
    limits.check()
    if curve_at is not None and not 0 < curve_at < float("inf"):
        raise InvalidInputError(Problem("--curve-at", curve_at, "must be a positive number", "Give for example 1."))
    console = progress_console()

    def say(line: str) -> None:
        console.print(f"tenuto: {line}", markup=False)

    if is_live:
        is_given = context.get_parameter_source("duration_s") is click.core.ParameterSource.COMMANDLINE
        seconds = duration_s if is_given else _LIVE_SECONDS
        attempt, applications = _live(source, seconds, warmup_s, seed, clients, say)
        how = f"measured against {source}, {seconds:g} s a run"
    else:

        def scene(slo_scale: float) -> Scene:
            return read_scene(
                source, gpus, cluster_file, elastic, profile_names, scheduler_name, duration_s, seed, warmup_s, options,
                network_ms, slo_scale,
            )  # fmt: skip

        # Wrong input is an error here, not a point of a curve.
        applications = scene(1.0).applications
        attempt = _virtual(scene)
        how = f"in virtual time with {scheduler_name}, {duration_s:g} s a run (emulated)"
    found = find_capacity(attempt, limits, lambda so_far: say(_progress(so_far)))
    base = curve_at if curve_at is not None else found.rate_scale or rate_scale
    drawn = {} if found.ended == "interrupted" else _draw(attempt, axes, base, say)
    document = _document(
        found, drawn, base, source, how, {"scheduler": None if is_live else scheduler_name, "seed": seed}, applications
    )
    if as_json:
        emit_json(document)
    else:
        _print(found)
    if out is not None:
        from tenuto.loadgen.capacity_page import write_capacity

        say(f"page: {write_capacity(out, document)}")
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
            raise InvalidInputError(
                Problem("--curve", text, "must list numbers behind '='", f"Write {axis}=0.5,1,2.")
            ) from None
    check_axes(axes)
    return axes


def _virtual(scene: Callable[[float], Scene]) -> Attempt:
    def attempt(load: Load) -> Outcome:
        try:
            at = scene(load.slo_scale)
        except InvalidInputError as error:  # an SLO that no batch can meet any more
            return Outcome(load, 0.0, 0.0, 0.0, 0.0, None, invalid=str(error).splitlines()[0])
        at = replace(at, models=_with_cv(at.models, load.cv), applications=_with_cv(at.applications, load.cv))
        return _outcome(load, at.run(load.rate_scale).summary())

    return attempt


def _live(
    url: str, duration_s: float, warmup_s: float | None, seed: int, clients: int, say: Callable[[str], None]
) -> tuple[Attempt, tuple[Application, ...]]:
    from tenuto.deployments.serve.endpoint import served_plan
    from tenuto.loadgen.bench import BenchOptions, asked_of, run_bench
    from tenuto.placement import Plan

    served, applications, notes = asked_of(Plan.from_data(served_plan(url), origin=url))
    for note in notes:
        say(note)
    settings = BenchOptions(url.rstrip("/"), duration_s, seed, warmup_s=warmup_s, clients=clients)

    def attempt(load: Load) -> Outcome:
        factors = f"rate {load.rate_scale:.4g}, SLO {load.slo_scale:.4g}, CV {load.cv or 'as planned'}"
        say(f"running {duration_s:g} s at {factors}")
        options = replace(settings, rate_scale=load.rate_scale, slo_scale=load.slo_scale)
        result = run_bench(_with_cv(served, load.cv), options, applications=_with_cv(applications, load.cv))
        if any("interrupted" in reason for reason in result.verdict.reasons):
            raise KeyboardInterrupt
        invalid = "; ".join(result.verdict.reasons) if result.verdict.result == "INVALID" else None
        return replace(_outcome(load, result.summary), invalid=invalid)

    return attempt, applications


def _with_cv(models: tuple[_Arriving, ...], cv: float | None) -> tuple[_Arriving, ...]:
    if cv is None:
        return models
    return tuple(spec.model_copy(update={"arrival": Arrival(process="gamma", cv=cv)}) for spec in models)


def _outcome(load: Load, summary: dict[str, Any]) -> Outcome:
    judged = [(row["attainment"], name) for name, row in judged_rows(summary).items() if row["attainment"] is not None]
    worst, name = min(judged, default=(0.0, None))
    invalid = None if judged else "no request was counted; lengthen the run or raise the rate"
    attainment = summary["attainment"] or 0.0
    return Outcome(load, summary["offered_rps"], summary["goodput_rps"], attainment, worst, name, invalid)


def _draw(
    attempt: Attempt, axes: dict[str, tuple[float, ...]], base: float, say: Callable[[str], None]
) -> dict[str, Curve]:
    drawn: dict[str, Curve] = {}
    try:
        for curve in curves(attempt, axes, base):
            drawn[curve.axis] = curve
            last = curve.outcomes[-1]
            state = last.invalid or f"{100 * last.worst_attainment:.2f} % in time at worst"
            say(f"{curve.axis} {getattr(last.load, curve.axis):g}: {state}")
    except KeyboardInterrupt:
        say("interrupted; the points so far are kept")
    except TenutoError as error:
        if not drawn:
            raise
        say(f"the curves end here: {error}")
    return drawn


def _document(
    found: Capacity,
    drawn: dict[str, Curve],
    base: float,
    source: str,
    how: str,
    settings: dict[str, Any],
    applications: tuple[Application, ...],
) -> dict[str, Any]:
    from tenuto.loadgen.output import provenance

    return {
        "kind": "capacity",
        "source": source,
        "how": how,
        "goodput_rps": found.best.goodput_rps if found.best else 0.0,
        "rate_scale": found.rate_scale,
        "capacity": found.summary(),
        "curves_rate_scale": base,
        "curves": [curve.summary() for curve in drawn.values()],
        "settings": settings,
        "applications": [application.name for application in applications],
        **provenance(["tenuto", *sys.argv[1:]]),
    }


def _progress(found: Capacity) -> str:
    last = found.outcomes[-1]
    upper = f"{found.upper_scale:.4g}" if found.upper_scale != float("inf") else "?"
    worst = f"worst {last.worst_model} {100 * last.worst_attainment:.2f} %"
    return f"rate scale {last.load.rate_scale:.4g}: {worst}; between {found.rate_scale:.4g} and {upper}"


def _print(found: Capacity) -> None:
    console = stdout_console()
    if found.best is None:
        console.print(f"no rate tried keeps 99 % of everything in time ({found.ended})", markup=False)
        return
    upper = "no rate failed" if found.upper_scale == float("inf") else f"fails at {found.upper_scale:.4g}"
    line = f"capacity: rate scale {found.rate_scale:.4g} ({upper}; {found.ended}), "
    line += f"{found.best.goodput_rps:,.1f} rps in time of {found.best.offered_rps:,.1f} rps offered"
    console.print(line, markup=False)
