"""`tenuto import`: a model repository of Triton Inference Server becomes a workload."""

from __future__ import annotations

import click

from tenuto.cli.common import NumberRange, json_option, notice, output_option, printed_as_json, say, write_file


@click.command("import", short_help="Make a workload of a model repository of Triton Inference Server.")
@click.argument("repository", type=click.Path(file_okay=False))
@click.option(
    "--rate",
    "rate_rps",
    type=NumberRange(0, min_open=True),
    default=10.0,
    metavar="RPS",
    help="Requests per second to plan for each model; a repository does not say them.",
    show_default=True,
)
@click.option(
    "--slo-ms",
    type=NumberRange(0, min_open=True),
    default=100.0,
    metavar="MS",
    help="Time for an answer, for models whose queue policy names no timeout.",
    show_default=True,
)
@output_option("Write the workload here.")
@json_option
def command(repository: str, rate_rps: float, slo_ms: float, output: str | None) -> int:
    """Read config.pbtxt of every model, and write the models that can be served as a workload.

    ONNX files and exported programs are taken over with their versions and labels, ensembles as applications. Of every
    other model it says what would have to be done. Edit rates and SLOs in the file, and profile the models next.

    Example: tenuto import ./model_repository --rate 20 --slo-ms 100 -o workload.yaml
    """
    from tenuto.placement.triton_repository import read_repository

    imported = read_repository(repository, rate_rps=rate_rps, slo_ms=slo_ms)
    workload = imported.workload(repository)
    for note in imported.notes:
        notice(f"{note.model}: {'left out: ' if note.is_left_out else ''}{note.text}.")
    if output is not None:
        count = len(imported.models) + len(imported.applications)
        write_file(output, workload.dump(), what=f"{count} models and applications")
    data = {
        "models": imported.models,
        "applications": imported.applications,
        "notes": [note._asdict() for note in imported.notes],
    }
    if not printed_as_json(data) and output is None:
        say(workload.dump())
    return 0
