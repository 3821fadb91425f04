"""`tenuto estimate`: what a model needs on a GPU type, from its operators and other models' profiles."""

from __future__ import annotations

import time
from typing import Any

import click

from tenuto.cli.common import (
    Numbers,
    json_option,
    output_option,
    printed_as_json,
    profiles_from,
    progress_console,
    say,
    write_file,
)
from tenuto.cli.tables import number, print_table
from tenuto.documents import parse_pairs
from tenuto.errors import refused

_USHER_ACCURACY_PCT = 99.98  # USHER, OSDI 2024, table 4; on its own 20 models and per-kernel profiles


@click.command("estimate", short_help="Estimate what a model needs on a GPU type, without running it.")
@click.argument("model", metavar="MODEL")
@click.option("--gpu", "gpu_type", required=True, metavar="TYPE", help="GPU type with profiles, such as v100 or cpu.")
@click.option(
    "--profiles",
    "profile_names",
    multiple=True,
    metavar="FILE|NAME",
    help="Profiles to learn from; repeatable. Default: those shipped for the type.",
)
@click.option(
    "--batch-sizes",
    "sizes",
    type=Numbers(int, 1),
    default="1,2,4,8,16,32",
    metavar="N,N…",
    help="Batch sizes to estimate.",
)
@click.option(
    "--option", "options", multiple=True, metavar="K=V", help="Model option such as sequence_length=512; repeatable."
)
@click.option(
    "--errors/--no-errors", default=True, help="Find the errors on models left out one by one (some seconds)."
)
@output_option("Write the estimates as a profile.")
@json_option
def command(
    model: str,
    gpu_type: str,
    profile_names: tuple[str, ...],
    sizes: tuple[int, ...],
    options: tuple[str, ...],
    errors: bool,
    output: str | None,
) -> None:
    """Estimate time, compute and memory requirement of MODEL on a GPU type without running it.

    Measurements of MODEL itself are not used, so that measured and estimated values can be compared.

    Example: tenuto estimate resnet50 --gpu v100 --batch-sizes 4,8,16
    """
    from tenuto.profiles.measuring.measure import row_name
    from tenuto_lab.estimator.estimated_profile import estimated_profile
    from tenuto_lab.estimator.estimator import GkEstimator, leave_one_model_out
    from tenuto_lab.estimator.training import collect_samples, conditions, is_same_network, tracer

    row = row_name(model)
    profiles = [p for p in profiles_from(profile_names, [gpu_type]) if p.gpu_type == gpu_type]
    if not profiles:
        raise refused(
            "--gpu",
            gpu_type,
            "no profile of this type to learn from",
            "Measure some models with `tenuto profile` on it and pass the file with --profiles.",
        )
    given = parse_pairs(options)
    with progress_console().status("tracing") as status:
        at_batch = tracer(model, given or conditions(profiles, row))
        samples = collect_samples(profiles, on_model=lambda name: status.update(f"tracing {name}"))
        others = [sample for sample in samples if not is_same_network(sample.model, row)]
        status.update("learning")
        on_gpu = gpu_type != "cpu"
        estimator = GkEstimator(others, launches_overlap=on_gpu)
        started = time.perf_counter()
        estimates = [estimator.estimate(at_batch(size)) for size in sizes]
        took_ms = (time.perf_counter() - started) * 1000.0 / len(sizes)
        if errors:
            status.update("leaving models out one by one")
        report = leave_one_model_out(samples, launches_overlap=on_gpu) if errors else None
    measured = {s.trace.batch_size: s for s in samples if is_same_network(s.model, row)}
    if output:
        source = f"estimated by `tenuto estimate` from {len(estimator.models)} other models"
        error_pct = report.time_pct if report is not None else None
        write_file(output, estimated_profile(row, gpu_type, estimates, source, error_pct).dump())
    if printed_as_json(
        {
            "model": row,
            "gpu_type": gpu_type,
            "learnt_from": list(estimator.models),
            "estimate_ms": round(took_ms, 3),
            "estimates": [vars(e) for e in estimates],
            "leave_one_model_out": vars(report) if report else None,
        }
    ):
        return
    _print(row, gpu_type, estimates, measured, estimator.models, took_ms, report)


def _print(
    row: str,
    gpu_type: str,
    estimates: list[Any],
    measured: dict[int, Any],
    models: tuple[str, ...],
    took_ms: float,
    report: Any,
) -> None:
    say(f"{row} on {gpu_type}, ESTIMATED from {len(models)} other models, {took_ms:.1f} ms each")
    rows = []
    for e in estimates:
        known = measured.get(e.batch_size)
        latency_ms, memory_mib, creq_pct = (
            (known.latency_ms, known.memory_mib, known.creq_pct) if known else (None, None, None)
        )
        rows.append(
            (
                str(e.batch_size),
                number(e.latency_ms, 2),
                number(e.roofline_ms, 2),
                number(latency_ms, 2),
                number(e.memory_mib, 0),
                number(memory_mib, 0),
                number(e.creq_pct),
                number(creq_pct),
            )
        )
    headings = "batch", "time ms", "roofline ms", "measured ms", "memory MiB", "measured MiB", "Creq %", "measured %"
    print_table(headings, rows)
    if report is None:
        return
    say(
        f"Mean error on models left out ({report.models} models, {report.points} points), in brackets the "
        f"plain baseline; USHER claims {_USHER_ACCURACY_PCT} % accuracy with kernel profiles:"
    )
    worst, wrong_pct = report.worst
    say(
        f"  time {report.time_pct:.1f} % ({report.time_baseline_pct:.1f} %); "
        f"median {report.time_median_pct:.1f} %, worst {worst} {wrong_pct:.0f} %"
    )
    if report.memory_pct is not None:
        say(f"  memory {report.memory_pct:.1f} % ({report.memory_baseline_pct:.1f} %)")
    if report.creq_points is not None:
        say(f"  Creq {report.creq_points:.1f} points ({report.creq_baseline_points:.1f} points)")
