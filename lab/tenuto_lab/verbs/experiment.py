"""`tenuto experiment`: run published experiments again, and say which of their observations come out again."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from tenuto.cli.common import (
    NumberRange,
    ProgressLine,
    command_line,
    json_option,
    notice,
    output_option,
    printed_as_json,
    say,
    tell,
    wants_json,
)
from tenuto.cli.tables import percent, print_table

if TYPE_CHECKING:
    from tenuto_lab.experiments.experiment import Experiment, Settings

_TUNED_S, _QUICK_S = 300.0, 60.0  # limit: virtual seconds of a tuner that serves; the published loops end within 300
_COLUMNS = ("policy", "model", "from s", "share %", "batch", "batch ms", "answered r/s", "in time")


@click.command("experiment", short_help="Run the thesis' experiments again; one page per experiment.")
@click.argument("names", metavar="LIST|NAME...", nargs=-1, required=True)
@output_option("Folder for the results; each experiment gets a folder in it.", is_folder=True)
@click.option("--force", is_flag=True, help="Replace experiments that are already in DIR.")
@click.option("--policy", "policies", multiple=True, metavar="NAME", help="Only this policy; repeatable.")
@click.option("--seed", type=click.IntRange(0), default=0, help="Seed of the arrivals.")
@click.option(
    "--duration-s", type=NumberRange(0.5, 3600), help="Length of each run. Default: the thesis' number of requests."
)
@click.option(
    "--clients",
    type=click.Choice(["thesis", "exact"]),
    default="thesis",
    help="Send the rates that the thesis' clients reached, or exactly the target rates.",
)
@click.option("--quick", is_flag=True, help="Run fewer points for a shorter time; keep the points of the observations.")
@click.option(
    "--live", is_flag=True, help="Run on Ray Serve with emulated GPUs the points that the page shows in detail."
)
@click.option(
    "--time-stretch",
    type=NumberRange(1, 1000),
    metavar="K",
    help="With --live: multiply all times by K and divide all rates by K. Default: 1, real time.",
)
@click.option(
    "--address", metavar="ADDRESS", help="With --live: the Ray cluster. Default: a running one, else a local one."
)
@click.option(
    "--jobs", type=click.IntRange(1), help="Number of processes. Default: 2, or 1 on a machine with one core."
)
@json_option
def command(
    names: tuple[str, ...],
    folder: str | None,
    force: bool,
    policies: tuple[str, ...],
    seed: int,
    duration_s: float | None,
    clients: Literal["thesis", "exact"],
    quick: bool,
    live: bool,
    time_stretch: float | None,
    address: str | None,
    jobs: int | None,
) -> int:
    """Run published experiments again, in virtual time or live on emulated GPUs.

    NAME is a figure of the thesis, such as 6.15, all of these (all), or igniter-15 or igniter-16: GSLICE+ tuning while
    it serves. `tenuto experiment list` shows what there is. Exit code 1 when the run was interrupted.

    Example: tenuto experiment 6.15 --quick -o experiments
    """
    from tenuto.placement import load_policy
    from tenuto_lab.experiments.experiment import Settings
    from tenuto_lab.experiments.registry import EXPERIMENTS, find_experiments
    from tenuto_lab.experiments.running_tuner import FIGURES

    if len(names) == 1 and names[0].lower() == "list":
        _print_list(EXPERIMENTS)
        return 0
    tuned = [name for name in FIGURES if name in map(str.lower, names)]
    if tuned and (policies or live or clients != "thesis"):
        raise click.UsageError(f"--policy, --clients and --live are for the thesis' figures, not for {tuned[0]}.")
    chosen = find_experiments(tuple(name for name in names if name.lower() not in FIGURES))
    for name in policies:
        load_policy(name)
    if time_stretch is not None and not live:
        raise click.UsageError("--time-stretch is for --live. Add --live, or leave it away.")
    settings = Settings(seed, clients, policies or None, duration_s, quick)
    out = Path(folder) if folder is not None else None
    if out is not None:
        from tenuto_lab.experiments.output import prepare_experiment_folder

        for experiment in chosen:
            prepare_experiment_folder(out / f"figure-{experiment.name}", force=force)
        for figure in tuned:
            prepare_experiment_folder(out / f"figure-{figure}", force=force)
    workers = jobs if jobs is not None else min(2, os.cpu_count() or 1)
    documents = [_tuned(figure, duration_s or (_QUICK_S if quick else _TUNED_S), seed, out) for figure in tuned]
    for experiment in chosen:
        document = _run(experiment, settings, out, workers, (time_stretch or 1.0, address) if live else None)
        documents.append(document)
        if not wants_json():
            _print(document)
        if not document["complete"]:
            break
    printed_as_json({"experiments": documents})
    return (
        0 if len(documents) == len(tuned) + len(chosen) and all(document["complete"] for document in documents) else 1
    )


def _run(
    experiment: Experiment, settings: Settings, out: Path | None, jobs: int, live: tuple[float, str | None] | None
) -> dict[str, Any]:
    from tenuto_lab.experiments.experiment import Results
    from tenuto_lab.experiments.output import describe_experiment, write_experiment
    from tenuto_lab.experiments.runner import run_cases

    started = time.perf_counter()
    line = ProgressLine(every_s=5.0)

    def progress(done: int, total: int, what: str) -> None:
        text = f"figure {experiment.name}: {done} of {total} points, {what.replace('|', ' ')}"
        line.show(text, is_last=done == total)

    how = "in virtual time"
    cases = experiment.cases(settings)
    if live is None:
        finished = run_cases(cases, experiment.schedulers, jobs=jobs, report=progress)
    else:
        from tenuto_lab.experiments.live import run_live

        stretch, address = live
        how = f"on Ray Serve with emulated GPUs, time stretched {stretch:g}-fold"
        finished = run_live(
            experiment.in_detail(cases),
            experiment.schedulers,
            stretch=stretch,
            report=progress,
            say=tell,
            address=address,
        )
    line.clear()
    results = Results(finished.rows)
    observations = experiment.check(results)
    document = describe_experiment(
        experiment,
        results,
        observations,
        settings,
        is_whole=finished.is_whole,
        wall_s=round(time.perf_counter() - started, 1),
        command=command_line(),
        how=how,
    )
    if out is not None:
        page = write_experiment(out / f"figure-{experiment.name}", experiment, results, observations, document)
        notice(f"page: {page}")
    return document


def _tuned(figure: str, duration_s: float, seed: int, out: Path | None) -> dict[str, Any]:
    """Run a figure of iGniter's paper, print a row for every setting of a model, and return the document."""
    from dataclasses import asdict

    from tenuto.loadgen.result_folder import provenance, write_files
    from tenuto_lab.experiments.running_tuner import SECTION, TITLES, render, run_figure

    line = ProgressLine(every_s=5.0)
    tuned = []
    for one in run_figure(figure, duration_s=duration_s, seed=seed):
        tuned.append(one)
        line.show(f"{figure}: {one.policy} has run")
    line.clear()
    rows = [
        (
            one.policy,
            name,
            f"{phase.moments[0].until_s - 1} to {phase.moments[-1].until_s}",
            f"{phase.moments[0].share_pct:g}",
            str(phase.moments[0].batch_size),
            "-" if phase.latency_ms is None else f"{phase.latency_ms:.2f}",
            f"{phase.answered_rps:,.1f}",
            percent(phase.attainment),
        )
        for one in tuned
        for name, phase in one.phases()
    ]
    document: dict[str, Any] = {
        "kind": "tuner",
        "name": figure,
        "section": SECTION,
        "title": TITLES[figure],
        "emulated": True,
        "complete": True,
        "settings": {"duration_s": duration_s, "seed": seed},
        **provenance(command_line()),
        "columns": list(_COLUMNS),
        "rows": rows,
        "series": [asdict(one) for one in tuned],
    }
    if out is not None:
        folder = out / f"figure-{figure}"
        page, text = render(figure, tuned, document), json.dumps(document, indent=1) + "\n"
        write_files(folder, {"result.json": text, "index.html": page})
        notice(f"page: {folder / 'index.html'}")
    if not wants_json():
        say(f"{figure}: {TITLES[figure]}, {duration_s:g} s")
        print_table(_COLUMNS, rows, left=("policy", "model", "from s"))
        say("  " + "; ".join(f"{one.policy}: {one.changes} changes" for one in tuned))
    return document


def _print_list(experiments: Sequence[Experiment]) -> None:
    from tenuto_lab.experiments.running_tuner import SECTION, TITLES

    told: list[dict[str, Any]] = [
        {"name": e.name, "figures": list(e.figures), "section": e.section, "title": e.title} for e in experiments
    ]
    told += [{"name": n, "figures": [n], "section": SECTION, "title": title} for n, title in TITLES.items()]
    if printed_as_json({"experiments": told}):
        return
    rows = [
        (e["name"], " to ".join(dict.fromkeys((e["figures"][0], e["figures"][-1]))), e["section"], e["title"])
        for e in told
    ]
    print_table(("name", "figures", "section", "what it shows"), rows, left=("figures", "section", "what it shows"))


def _derived(derived: dict[str, Any]) -> str:
    """Return in one sentence which policies planned with derived numbers, and the errors of these numbers."""
    errors = derived["errors_pct"]
    fits = ", ".join(f"{name} {mean:.1f} % (at most {most:.1f} %)" for name, (mean, most, _) in errors.items())
    plain, stand_in = derived["pair_errors_pct"]
    return (
        f"{', '.join(derived['policies'])} plan with derived coefficients, not published ones; latencies alone are off "
        f"by {fits}; slowdowns on measured pairs by {stand_in:.1f} % (with published coefficients {plain:.1f} %)"
    )


def _print(document: dict[str, Any]) -> None:
    """Print each observation with its verdict, then the count."""
    from tenuto_lab.experiments.page import reproduced_of

    say(f"figure {document['name']}: {document['title']}")
    for seen in document["observations"]:
        say(f"  {seen['status']}: {seen['statement']}")
        say(f"    published: {seen['published']}")
        say(f"    here: {seen['ours']}")
        if seen["why"]:
            say(f"    why: {seen['why']}")
    if document["derived"] is not None:
        say(f"  {_derived(document['derived'])}")
    for name, why in document["not_planned"].items():
        say(f"  {name} cannot plan from this profile: {why}")
    state = "" if document["complete"] else " (interrupted: partial)"
    say(
        f"  {reproduced_of(document['observations_summary'])}; {len(document['points'])} points in "
        f"{document['wall_s']:.1f} s{state}"
    )
