"""`tenuto simulate`: run a plan or a workload in virtual time and print what every model and gpu-let did."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import click

from tenuto.batching.core.autoscale import AutoscaleOptions
from tenuto.batching.core.build import everywhere, from_plan
from tenuto.batching.core.scheduler import Scheduler
from tenuto.batching.core.system import NetworkDelay, System
from tenuto.batching.registry import SCHEDULERS, make_scheduler, scheduler_class
from tenuto.batching.virtual.advice_series import advice_over_time
from tenuto.batching.virtual.goodput import Offer
from tenuto.batching.virtual.result import SimulationResult
from tenuto.batching.virtual.simulator import simulate
from tenuto.cli.common import (
    cluster_from,
    cluster_options,
    emit_json,
    profiles_from,
    progress_console,
)
from tenuto.cli.run_tables import print_advice, print_run
from tenuto.documents import load_document
from tenuto.errors import InvalidInputError, Problem, raise_if_any
from tenuto.loadgen.application_figures import label_stages
from tenuto.loadgen.applications import ApplicationLoad, make_application_load, scaled_slos
from tenuto.loadgen.schedule import Schedule, make_schedule
from tenuto.loadgen.simulated import offer_of, simulate_load, simulated_applications
from tenuto.options import split_pairs
from tenuto.placement import ModelSpec, Plan, Workload
from tenuto.placement.applications import Application

__all__ = ["Scene", "VirtualRun", "command", "read_scene", "scene_options"]

_Arriving = TypeVar("_Arriving", ModelSpec, Application)


@dataclass(frozen=True)
class Scene:
    """What simulate and goodput have in common: models, system, scheduler and arrivals by rate scale."""

    models: tuple[ModelSpec, ...]
    system: System
    scheduler_name: str
    options: dict[str, Any]
    duration_s: float
    warmup_s: float | None
    seed: int
    applications: tuple[Application, ...] = ()

    def scheduler(self) -> Scheduler:
        """Return a fresh scheduler."""
        return make_scheduler(self.scheduler_name, self.system, self.options)

    def offer(self, rate_scale: float) -> Offer:
        """Return the arrivals at a rate scale, for the search of goodput."""
        if self.applications:
            load = make_application_load(self.models, self.applications, self.duration_s, self.seed, rate_scale)
            return offer_of(load, [spec.name for spec in self.models], self.duration_s, self.warmup_s)
        schedule = make_schedule(self.models, self.duration_s, self.seed, rate_scale)
        return Offer(schedule.times_ms, schedule.model_index)

    def described(self, result: SimulationResult, rate_scale: float) -> dict[str, Any]:
        """Return the summary of a run at a rate scale, applications included."""
        load = make_application_load(self.models, self.applications, self.duration_s, self.seed, rate_scale)
        return VirtualRun(result, load.schedule, load).summary()

    def run(self, rate_scale: float) -> VirtualRun:
        """Run the models, and with them the applications, in virtual time."""
        if self.applications:
            load = make_application_load(self.models, self.applications, self.duration_s, self.seed, rate_scale)
            result = simulate_load(self.scheduler(), load, duration_s=self.duration_s, warmup_s=self.warmup_s)
            return VirtualRun(result, load.schedule, load)
        schedule = make_schedule(self.models, self.duration_s, self.seed, rate_scale)
        result = simulate(
            self.scheduler(), schedule.times_ms, schedule.model_index, duration_s=self.duration_s,
            warmup_s=self.warmup_s,
        )  # fmt: skip
        return VirtualRun(result, schedule, None)


@dataclass(frozen=True)
class VirtualRun:
    """A run in virtual time; `load` where it had applications."""

    result: SimulationResult
    schedule: Schedule
    load: ApplicationLoad | None

    def summary(self) -> dict[str, Any]:
        """Return the figures of `simulate --json`; those of applications are there where the run had some."""
        summary = self.result.summary()
        if self.load is not None:
            label_stages(summary["models"], self.load.applications)
            summary["applications"] = simulated_applications(self.result, self.load)
        return summary


def scene_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the arguments of simulate and goodput to a verb."""
    for decorate in (
        click.option("--json", "as_json", is_flag=True, help="Print JSON."),
        click.option(
            "--network-ms",
            metavar="CTRL,DATA,RESPONSE",
            help="Delays: sending a batch, its data per request, the answer. Default: none.",
        ),
        click.option("--option", "options", multiple=True, metavar="K=V", help="Option of the scheduler; repeatable."),
        click.option("--warmup-s", type=float, metavar="S", help="Not counted; default: the first 5 %."),
        click.option("--seed", type=int, default=0, show_default=True, help="Seed of the arrivals."),
        click.option(
            "--duration-s", type=float, default=60.0, show_default=True, help="Length of the run in virtual time."
        ),
        click.option(
            "--scheduler",
            "scheduler_name",
            default="deferred",
            show_default=True,
            metavar="NAME",
            help=f"One of {', '.join(SCHEDULERS)}.",
        ),
        cluster_options,
        click.argument("source", metavar="PLAN|WORKLOAD"),
    ):
        function = decorate(function)
    return function


def read_scene(
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
    slo_scale: float = 1.0,
) -> Scene:
    """Read files and arguments; every SLO is multiplied by `slo_scale`.

    Raises:
        InvalidInputError: with every problem found in the arguments; an SLO that no batch can meet is one.
    """
    problems = []
    if not (math.isfinite(duration_s) and duration_s > 0):
        problems.append(
            Problem("--duration-s", duration_s, "must be a positive number of seconds", "Give for example 60.")
        )
    elif warmup_s is not None and not 0 <= warmup_s < duration_s:
        problems.append(
            Problem("--warmup-s", warmup_s, "must be at least 0 and below the duration", "Give for example 3.")
        )
    if seed < 0:
        problems.append(Problem("--seed", seed, "must be at least 0", "Give 0 or a larger number."))
    network = NetworkDelay()
    if network_ms is not None:
        try:
            network = NetworkDelay(*(float(part) for part in network_ms.split(",")))
        except (ValueError, TypeError):
            problems.append(
                Problem("--network-ms", network_ms, "must be up to three numbers of ms", "Write 0.1,0.05,2.")
            )
    parsed: dict[str, Any] = {}
    try:
        parsed = split_pairs(options)
        scheduler_class(scheduler_name).options_type.parse(scheduler_name, parsed)
    except InvalidInputError as error:
        problems += error.problems
    if problems:
        raise InvalidInputError(problems)
    system, models, applications = _read_system(source, gpus, cluster_file, elastic, profile_names, network, slo_scale)
    return Scene(models, system, scheduler_name, parsed, duration_s, warmup_s, seed, applications)


def _read_system(
    source: str,
    gpus: str | None,
    cluster_file: str | None,
    elastic: bool,
    profile_names: tuple[str, ...],
    network: NetworkDelay,
    slo_scale: float,
) -> tuple[System, tuple[ModelSpec, ...], tuple[Application, ...]]:
    document = load_document(source)
    if _is_plan(document):
        if gpus is not None or cluster_file is not None:
            raise InvalidInputError(
                Problem(
                    "--gpus",
                    gpus or cluster_file,
                    "a plan brings its own GPUs",
                    "Leave the cluster away, or pass a workload.",
                )
            )
        plan = Plan.from_data(document, origin=source)
        plan = plan.model_copy(update={"models": _with_slos(plan.models, slo_scale)})
        return from_plan(plan, network), plan.models, scaled_slos(plan.applications, slo_scale)
    workload = Workload.load(source)
    if not workload.models:
        raise InvalidInputError(Problem(f"{source}: models", [], "the workload has no models", "Add at least one."))
    cluster = cluster_from(gpus, cluster_file, elastic)
    profiles = profiles_from(profile_names, cluster.gpu_types)
    workload = workload.model_copy(update={"models": _with_slos(workload.models, slo_scale)})
    if workload.merge != "off":
        text = "tenuto: `merge` is for plans: here every model runs by itself. Plan first, and simulate the plan"
        progress_console().print(text, markup=False)
    system = everywhere(workload, cluster, profiles, network)
    folder = Path(source).parent
    applications = scaled_slos(_beside(workload.applications, folder), slo_scale)
    return system, _beside(workload.models, folder), applications


def _with_slos(models: tuple[ModelSpec, ...], scale: float) -> tuple[ModelSpec, ...]:
    return tuple(spec.model_copy(update={"slo_ms": spec.slo_ms * scale}) for spec in models)


def _is_plan(document: Any) -> bool:
    """Return whether a document is a plan or the Serve config of one; a workload's applications have stages."""
    if not isinstance(document, dict):
        return False
    applications = document.get("applications")
    deployed = isinstance(applications, list) and any(isinstance(a, dict) and "import_path" in a for a in applications)
    return deployed or "gpulets" in document or "policy" in document


def _beside(models: tuple[_Arriving, ...], folder: Path) -> tuple[_Arriving, ...]:
    """Resolve relative trace paths against the workload's folder, where the file is there and not here."""
    resolved = []
    for spec in models:
        path = spec.arrival.path
        if path is not None and not Path(path).is_absolute() and not Path(path).exists() and (folder / path).exists():
            arrival = spec.arrival.model_copy(update={"path": str(folder / path)})
            resolved.append(spec.model_copy(update={"arrival": arrival}))
        else:
            resolved.append(spec)
    return tuple(resolved)


@click.command("simulate")
@scene_options
@click.option("--rate-scale", type=float, default=1.0, show_default=True, help="Multiply every rate by this.")
@click.option("-o", "--output", "folder", metavar="DIR", help="Folder for report.html, result.json, requests.parquet.")
@click.option("--force", is_flag=True, help="Replace a report that is already in DIR.")
@click.option("--advice", "advice_window_s", type=float, metavar="S", help="Scaling advice for every S seconds.")
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
    folder: str | None,
    force: bool,
    advice_window_s: float | None,
) -> None:
    """Run PLAN, or WORKLOAD on a cluster where every GPU hosts every model, in virtual time.

    Example: tenuto simulate workload.yaml --gpus v100:4 --scheduler deferred --duration-s 60 --seed 0
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
    advice_options = None if advice_window_s is None else AutoscaleOptions(window_s=advice_window_s)
    if advice_options is not None:
        raise_if_any(advice_options.problems())
    out = _report_folder(folder, force=force)
    run = scene.run(rate_scale)
    summary = run.summary()
    if advice_options is not None:
        summary["advice"] = [advice.as_dict() for advice in advice_over_time(run.result, advice_options)]
    if as_json:
        emit_json(summary)
    else:
        print_run(summary, scheduler_name)
        print_advice(summary.get("advice", []))
    if out is not None:
        settings = {"seed": seed, "rate_scale": rate_scale, "scheduler": scheduler_name, **scene.options}
        _write_report(out, run, source, settings)
        progress_console().print(f"report: {out / 'report.html'}", markup=False)


def _report_folder(folder: str | None, *, force: bool) -> Path | None:
    if folder is None:
        return None
    from tenuto.loadgen.output import prepare_folder

    return prepare_folder(Path(folder), force=force)


def _write_report(folder: Path, run: VirtualRun, source: str, settings: dict[str, Any]) -> None:
    """Write the files and the page of a simulated run, in the form of a measured one."""
    from tenuto.loadgen.output import write_files
    from tenuto.loadgen.report import Run, write_report
    from tenuto.loadgen.simulated import describe_simulation

    data = load_document(source)
    plan = Plan.from_data(data, origin=source) if _is_plan(data) else None
    command_line = ["tenuto", *sys.argv[1:]]
    document, records = describe_simulation(
        run.result, run.schedule, plan, options=settings, command=command_line, load=run.load
    )
    write_files(folder, document, records, run.schedule)
    write_report(folder, Run(document, records, plan))
