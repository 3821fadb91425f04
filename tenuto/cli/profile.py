"""`tenuto profile`: measure models on this machine into a profile file."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Any

import click
import yaml
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from tenuto.cli.common import emit_json, parse_options, progress_console, stdout_console
from tenuto.errors import InvalidInputError, Problem, TenutoError
from tenuto.profiles.measure import Measurement, MeasureRequest, assemble, measure_model, row_name
from tenuto.profiles.profile import ModelProfile, Profile, ProfilePoint

__all__ = ["command"]


@click.command("profile")
@click.argument("models", nargs=-1, required=True, metavar="MODEL…")
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True,
              help="Where to measure; auto is CUDA where there is one.")
@click.option("--batch-sizes", default="1,2,4,8", show_default=True, metavar="N,N…", help="Batch sizes to measure.")
@click.option("--shares", default="100", show_default=True, metavar="PCT,PCT…",
              help="Shares of the device in percent; threads on a CPU, CUDA MPS on a GPU.")
@click.option("--budget-s", type=float, default=20.0, show_default=True,
              help="Seconds of repeated timing per model, building it excluded.")
@click.option("--weights", "weights_path", metavar="FILE|DIR", help="Local weights of the model (only with one MODEL).")
@click.option("--option", "options", multiple=True, metavar="K=V",
              help="Model option such as sequence_length=512, image_size=224 or dtype=bf16; repeatable.")
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of random weights and inputs.")
@click.option("-o", "--output", type=click.Path(dir_okay=False), metavar="FILE",
              help="Profile file; default profile-TYPE.yaml, such as profile-cpu.yaml.")
@click.option("--json", "as_json", is_flag=True, help="Print the profile as JSON.")
def command(
    models: tuple[str, ...], device: str, batch_sizes: str, shares: str, budget_s: float, weights_path: str | None,
    options: tuple[str, ...], seed: int, output: str | None, as_json: bool,
) -> int:
    """Measure MODELs: latency, spread and peak memory per batch size and share, and the line alpha*b + beta.

    MODEL is a name of the catalogue (resnet50), a source (transformers/bert), your own package.module:factory, or a
    local transformers directory. Ctrl-C keeps the models that are finished.

    Example: tenuto profile resnet50 mobilenet_v2 bert --batch-sizes 1,2,4,8 -o cpu.yaml
    """
    requests = _requests(models, device, batch_sizes, shares, budget_s, weights_path, options, seed)
    if output is not None:
        _check_writable(Path(output))
    finished, fault = _measure(requests)
    if not finished:
        raise fault or KeyboardInterrupt
    profile = assemble(finished, name="measured", command=shlex.join(["tenuto", *sys.argv[1:]]))
    path = Path(output or f"profile-{profile.gpu_type}.yaml")
    profile = profile.model_copy(update={"name": path.stem})
    _write(path, profile.dump())
    if as_json:
        emit_json(profile.model_dump(mode="json", by_alias=True, exclude_none=True))
    else:
        _print(profile)
    console = progress_console()
    console.print(f"wrote {escape(str(path))} ({len(finished)} of {len(requests)} models)")
    if isinstance(fault, TenutoError):
        console.print(f"error: {escape(str(fault))}")
        return fault.exit_code
    return 130 if fault is not None else 0


def _requests(
    models: tuple[str, ...], device: str, batch_sizes: str, shares: str, budget_s: float, weights_path: str | None,
    options: tuple[str, ...], seed: int,
) -> list[MeasureRequest]:
    """Turn arguments into requests; raises `InvalidInputError` with the problems of all of them."""
    problems: list[Problem] = []
    sizes = _numbers("--batch-sizes", batch_sizes, int, problems)
    percents = _numbers("--shares", shares, float, problems)
    values = {key: yaml.safe_load(text) for key, text in parse_options(options).items()}
    if weights_path is not None and len(models) > 1:
        problems.append(Problem("--weights", weights_path, "fits one model only", "Name one model with --weights."))
    requests, rows = [], set()
    for model in models:
        request = MeasureRequest(
            source=model, device=device, batch_sizes=tuple(sizes) or (1,), shares=tuple(percents) or (100.0,),
            budget_s=budget_s, weights_path=weights_path, seed=seed, options=values,
        )
        try:
            request.check()
            row = row_name(model)
        except InvalidInputError as error:
            problems += error.problems
            continue
        if row in rows:
            problems.append(Problem("MODEL", model, "is named twice", "Name each model once."))
        rows.add(row)
        requests.append(request)
    if problems:
        raise InvalidInputError(list({str(problem): problem for problem in problems}.values()))
    return requests


def _numbers(option: str, text: str, kind: Any, problems: list[Problem]) -> list[Any]:
    try:
        return sorted({kind(part) for part in text.split(",") if part.strip()})
    except ValueError:
        problems.append(Problem(option, text, "must be numbers separated by commas", "Write for example 1,2,4."))
        return []


def _measure(requests: list[MeasureRequest]) -> tuple[list[Measurement], BaseException | None]:
    """Measure one model after the other; on Ctrl-C or a fault return what is finished, and the reason."""
    finished: list[Measurement] = []
    points = sum(len(request.batch_sizes) * len(request.shares) for request in requests)
    console = progress_console()
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=24), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("starting", total=points)
        for index, request in enumerate(requests):
            name = row_name(request.source)
            progress.update(task, description=f"{name}: building")

            def on_point(point: ProfilePoint, name: str = name) -> None:
                text = f"{name}: batch {point.batch_size} at {point.share_pct:g} %: {point.latency_ms:.1f} ms"
                progress.update(task, advance=1, description=text)
                if not console.is_terminal:
                    console.print(text)

            try:
                finished.append(measure_model(request, on_point=on_point))
            except (KeyboardInterrupt, TenutoError) as fault:
                return finished, fault
            done = sum(len(r.batch_sizes) * len(r.shares) for r in requests[: index + 1])
            progress.update(task, completed=done)
    return finished, None


def _check_writable(path: Path) -> None:
    """Refuse a path before minutes are spent on measuring."""
    if not path.parent.is_dir():
        raise InvalidInputError(Problem("-o", str(path), "its directory does not exist", "Create it, or use another."))


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InvalidInputError(
            Problem("-o", str(path), f"cannot be written ({error.strerror})", "Give a writable path.")
        ) from error


def _print(profile: Profile) -> None:
    console = stdout_console()
    measured = profile.measured
    if measured is not None:
        console.print(f"[bold]{profile.gpu_type}[/bold]: {escape(measured.hardware)}, {measured.date}")
    table = Table(box=None, header_style="bold")
    table.add_column("model")
    for heading in ("share", "batch", "latency ms", "± ms", "requests/s", "memory MiB"):
        table.add_column(heading, justify="right")
    for name, model in profile.models.items():
        for index, point in enumerate(model.points):
            table.add_row(
                name if index == 0 else "", f"{point.share_pct:g} %", str(point.batch_size), f"{point.latency_ms:.2f}",
                "-" if point.latency_spread_ms is None else f"{point.latency_spread_ms:.2f}",
                f"{1000 * point.batch_size / point.latency_ms:.1f}",
                "-" if point.memory_mib is None else f"{point.memory_mib:.0f}",
            )
    console.print(table)
    for name, model in profile.models.items():
        console.print(_fit_text(name, model))
        for doubt in model.doubts:
            console.print(f"  {escape(doubt)}")


def _fit_text(name: str, model: ModelProfile) -> str:
    fit = model.fit
    if fit is None:
        return f"{name}: no line; it takes two batch sizes on the whole device"
    quality = "" if fit.r_squared is None else f"r² {fit.r_squared:.4f}, "
    return (f"{name}: l(b) = {fit.alpha_ms:.3f} b {'+' if fit.beta_ms >= 0 else '-'} {abs(fit.beta_ms):.3f} ms, "
            f"{quality}largest error {fit.max_error_pct or 0:.1f} %")
