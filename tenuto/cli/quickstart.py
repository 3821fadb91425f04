"""`tenuto quickstart`: the whole job on this machine."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tenuto.cli.common import Number, json_option, notice, output_option, printed_as_json, say
from tenuto.cli.tables import number, percent, print_table
from tenuto.outcome import WARM_UP

if TYPE_CHECKING:
    from tenuto.quickstart import RunSummary


@click.command(
    name="quickstart", short_help="Profile, plan, serve, load and judge real models on this machine; no GPU needed."
)
@output_option("Folder for profile, plans and reports.", is_folder=True)
@click.option("--seconds", type=Number(), default=15.0, help="Length of each of the two load runs.")
@click.option("--seed", default=1, help="Seed of the arrivals.")
@json_option
def command(folder: str | None, seconds: float, seed: int) -> int:
    """Do the whole job on this machine: profile three real networks, plan, serve over HTTP, load with Ray actors, judge
    by goodput.

    It runs once on the processor with real models and once on four emulated V100s. Nothing is left running.

    Example: tenuto quickstart
    """
    from tenuto.loadgen.run_files import prepare_report
    from tenuto.quickstart import Quickstart, default_folder

    started = time.monotonic()
    out = prepare_report(Path(folder) if folder is not None else default_folder(), force=False)

    def narrate(text: str) -> None:
        notice(f"[{time.monotonic() - started:5.1f} s] {text}")

    runs = Quickstart(out, seconds=seconds, seed=seed, say=narrate).run()
    code = 0 if all(run.result.verdict.result != "INVALID" for run in runs) else 1
    if printed_as_json({"runs": [{"run": run.title, "folder": str(run.folder), **run.document} for run in runs]}):
        return code
    print_table(
        ("run", "model", "SLO ms", "offered", "goodput", "in time", "p50 ms", "batch", "planned ms", "ran ms"),
        [_cells(run, spec.name) for run in runs for spec in run.plan.models],
        left=("model",),
        title="goodput: answers within the SLO per second",
    )
    say("planned: one full batch as the plan expects it; ran: median over the batches that ran")
    for run in runs:
        reasons = f" ({'; '.join(run.result.verdict.reasons)})" if run.result.verdict.reasons else ""
        say(f"verdict, {run.title}: {run.result.verdict.result}{reasons}")
    for run in runs:
        say(f"report, {run.title}: {run.folder / 'report.html'}")
    return code


def _cells(run: RunSummary, name: str) -> tuple[str, ...]:
    m, plan = run.document["models"][name], run.plan
    window_s = run.document["options"]["duration_s"] * (1.0 - WARM_UP)
    planned_ms = plan.expected.models[name].latency_ms
    return (
        run.title,
        name,
        f"{plan.model(name).slo_ms:g}",
        number(m["offered"] / window_s),
        number(m["ok"] / window_s),
        percent(m["attainment"]),
        *map(number, (m["p50_ms"], m["mean_batch"], planned_ms, m["execution_p50_ms"])),
    )
