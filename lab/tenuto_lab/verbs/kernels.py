"""`tenuto kernels`: kernels that profilers recorded, operators timed one by one, and models estimated from them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from tenuto.cli.common import (
    Number,
    Numbers,
    Target,
    json_option,
    output_option,
    printed_as_json,
    progress_console,
    say,
    write_file,
)
from tenuto.documents import parse_pairs

if TYPE_CHECKING:
    from tenuto_lab.kernels.by_kernels import ByKernels

USHER_ACCURACY_PCT = 99.98  # paper: USHER, OSDI 2024, table 4; on its own 20 models and per-kernel profiles

_options = click.option(
    "--option", "options", multiple=True, metavar="K=V", help="Model option such as sequence_length=512; repeatable."
)


@click.group("kernels", short_help="Time single kernels of models, and estimate models from them.")
def command() -> None:
    """Time the operators of models where they run, estimate other models from single kernels, and import what Nsight
    recorded.

    Example: tenuto kernels time resnet50 --profile cpu.yaml -o operators.yaml
    """


@command.command("time", short_help="Time every operator of models on the whole device.")
@click.argument("models", metavar="MODEL...", nargs=-1, required=True)
@click.option("--profile", "profile", required=True, metavar="FILE", help="A profile of this device, which names it.")
@click.option("--device", default="auto", help="cpu, cuda or auto.")
@click.option("--batch-sizes", "sizes", type=Numbers(int, 1), default="1,8", metavar="N,N…")
@_options
@click.option("--seed", type=click.IntRange(0), default=0, help="Seed of weights and inputs.")
@output_option("Operator times.", required=True)
def _time(
    models: tuple[str, ...],
    profile: str,
    device: str,
    sizes: tuple[int, ...],
    options: tuple[str, ...],
    seed: int,
    output: str,
) -> None:
    """Time every operator of MODEL... on the whole device into a file for `tenuto kernels estimate`.

    Example: tenuto kernels time resnet50 bert --profile cpu.yaml -o operators.yaml
    """
    from tenuto.profiles import Profile
    from tenuto.profiles.measuring.measure import MeasureRequest
    from tenuto_lab.kernels.by_kernels import operator_times

    given = parse_pairs(options)
    requests = [MeasureRequest(model, device, tuple(sizes), seed=seed, options=given) for model in models]
    write_file(output, operator_times(requests, Profile.load(profile)).dump())


@command.command("estimate", short_help="Estimate a model from single kernels of other models.")
@click.argument("model", metavar="MODEL")
@click.option("--gpu", "gpu_type", required=True, metavar="TYPE", help="GPU type of the operator times.")
@click.option(
    "--operator-times",
    "operator_files",
    metavar="FILE",
    multiple=True,
    required=True,
    help="Files of `tenuto kernels time`; USHER's method learns from several GPU types at once; repeatable.",
)
@click.option("--batch-sizes", "sizes", type=Numbers(int, 1), default="1,2,4,8,16,32", metavar="N,N…")
@_options
@click.option("--errors/--no-errors", default=True, help="Find the errors on models left out.")
@output_option("Write what USHER's estimator says as a profile, for `tenuto plan --profiles`.")
@json_option
def _estimate(
    model: str,
    gpu_type: str,
    operator_files: tuple[str, ...],
    sizes: tuple[int, ...],
    options: tuple[str, ...],
    errors: bool,
    output: str | None,
) -> None:
    """Estimate MODEL from single kernels of other models, by our method and by USHER's as published.

    With -o the estimates of USHER's become a profile of the GPU type: what a scheduler asks for each batch size. Policy
    `usher` needs the compute requirement too, which is known where kernels were timed on a GPU.

    Example: tenuto kernels estimate resnet50 --gpu v100 --operator-times operators.yaml -o resnet50.yaml
    """
    from tenuto.profiles.measuring.measure import row_name
    from tenuto_lab.estimator.training import tracer
    from tenuto_lab.kernels.by_kernels import estimate_by_kernels, load_operator_files

    timed = load_operator_files(operator_files, gpu_type)
    row = row_name(model)
    with progress_console().status("learning"):
        at_batch = tracer(model, parse_pairs(options))
        made = estimate_by_kernels(timed, gpu_type, row, [at_batch(size) for size in sizes], errors)
    if output:
        write_file(output, made.usher.as_profile(row, gpu_type).dump())
    if not printed_as_json({"model": row, "gpu_type": gpu_type, **made.as_data()}):
        _print_by_kernels(made)


@command.command("import", short_help="Merge kernels that Nsight or torch.profiler recorded into a profile.")
@click.argument("model", metavar="MODEL")
@click.option(
    "--profile", "profile", required=True, type=Target(), metavar="FILE", help="The profile; it has MODEL's point."
)
@click.option("--batch-size", type=int, required=True, metavar="N", help="Batch size of the point.")
@click.option("--share", type=Number(), default=100.0, metavar="PCT", help="Share of the point.")
@click.option("--ncu", metavar="FILE", help="Nsight Compute CSV (--csv --page raw) of one batch of MODEL.")
@click.option("--nsys", metavar="FILE", help="Nsight Systems CSV (-r cuda_gpu_trace) of the same batch.")
@click.option("--trace", metavar="FILE", help="torch.profiler trace of the same batch.")
@click.option("--batches", type=int, default=1, help="Batches those files recorded.")
def _import(
    model: str,
    profile: str,
    batch_size: int,
    share: float,
    ncu: str | None,
    nsys: str | None,
    trace: str | None,
    batches: int,
) -> None:
    """Merge the kernels that profilers recorded of one batch of MODEL into its point of a profile.

    Example: tenuto kernels import resnet50 --profile h200.yaml --batch-size 8 --ncu ncu.csv --nsys nsys.csv
    """
    from tenuto.profiles import Profile
    from tenuto.profiles.measuring.measure import row_name
    from tenuto_lab.kernels.nsight_import import ImportRequest, import_kernels

    row = row_name(model)
    merged = import_kernels(Profile.load(profile), ImportRequest(row, batch_size, share, ncu, nsys, trace, batches))
    write_file(profile, merged.dump(), option="--profile")
    for doubt in merged.models[row].doubts:
        say(doubt)


def _print_by_kernels(made: ByKernels) -> None:
    times = ", ".join(f"batch {batch}: {ms:.2f} ms" for batch, ms in made.latency_ms.items())
    say(f"From single kernels of {len(made.models)} other models, {made.estimate_ms:.1f} ms each: {times}")
    if made.creq_pct:
        say("  Creq " + ", ".join(f"batch {batch}: {pct:.0f} %" for batch, pct in made.creq_pct.items()))
    if (r := made.report) is not None:
        say(
            f"  on models left out ({r.models} models, {r.kernels} kernels): time {r.time_pct:.1f} %, plain roofline "
            f"{r.roofline_pct:.1f} %; single kernels {r.kernel_median_pct:.0f} % (median); USHER claims "
            f"{USHER_ACCURACY_PCT} % accuracy"
        )
    say(
        f"By USHER's estimator as published, from kernels of {', '.join(made.usher.types)}: "
        + "; ".join(
            f"batch {batch}: {need.time_ms:.2f} ms, {need.memory_bytes / 2**20:.0f} MiB"
            + ("" if need.creq_pct is None else f", Creq {need.creq_pct:.0f} %")
            for batch, need in made.usher.needs.items()
        )
    )
    if (e := made.usher.errors) is not None:
        say(f"  on models left out ({e.models} models, {e.runs} batches): time {e.time_pct:.1f} %")
