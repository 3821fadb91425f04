"""`tenuto profile`: measure models on this machine into a profile file."""

from __future__ import annotations

import math
import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from tenuto.cli.common import (
    Number,
    Numbers,
    command_line,
    json_option,
    notice,
    output_option,
    printed_as_json,
    progress_console,
    say,
)
from tenuto.cli.profile_generation import measure_steps
from tenuto.cli.tables import number, print_table
from tenuto.documents import parse_document, parse_pairs
from tenuto.errors import EnvironmentFaultError, InvalidInputError, Problem, TenutoError, one_of, raise_if_any, refused
from tenuto.mps.gpu_shares import shares_of
from tenuto.placement.workload import ModelSpec, Workload
from tenuto.profiles.measuring.measure import STOPPED, MeasureRequest, Shares, measure_model
from tenuto.profiles.measuring.profile_writer import ProfileWriter
from tenuto.profiles.measuring.size_grid import Axis
from tenuto.profiles.networks.catalogue import SizeRange
from tenuto.profiles.networks.model_options import ShapeOptions
from tenuto.profiles.profile import ModelProfile, Profile, ProfilePoint

_FEW = 0.05  # default: of the requests of a workload, those that are smaller than the smallest measured size
_NEARLY_ALL = 0.999  # default: of sizes without an end


@click.command("profile", short_help="Measure what models cost on this machine: latency and memory by batch and share.")
@click.argument("models", nargs=-1, metavar="[MODEL…]")
@click.option(
    "--device",
    type=click.Choice(["auto", "cpu", "cuda"]),
    default="auto",
    help="Device to measure on; auto is CUDA if there is a GPU, else the CPU.",
)
@click.option("--batch-sizes", type=Numbers(int), default="1,2,4,8", metavar="N,N…", help="Batch sizes to measure.")
@click.option(
    "--shares",
    type=Numbers(float),
    default="100",
    metavar="PCT,PCT…",
    help="Shares of the device in percent: a number of threads on a CPU, a share of CUDA MPS on a GPU.",
)
@click.option(
    "--sizes",
    multiple=True,
    metavar="NAME=N,N…|N..M",
    help="Sizes of requests to measure, of a network whose inputs vary in shape, or a range of them; repeatable. "
    "Default: the range that the network takes, or that comes by the workload.",
)
@click.option(
    "--budget-s",
    type=Number(),
    default=20.0,
    help="Seconds of repeated timing per model, without the time to build it.",
)
@click.option(
    "--name",
    "names",
    multiple=True,
    metavar="NAME",
    help="Name of a MODEL in the profile; give one for each, in order. Default: the end of its source. Of a workload: "
    "the models to measure; default all.",
)
@click.option("--weights", "weights_path", metavar="FILE|DIR", help="Local weights of the model (only with one MODEL).")
@click.option(
    "--option",
    "options",
    multiple=True,
    metavar="K=V",
    help="Model option such as sequence_length=512, image_size=224 or dtype=bf16; repeatable.",
)
@click.option("--seed", type=int, default=0, help="Seed of random weights and inputs.")
@click.option(
    "--time-limit-s",
    type=Number(),
    metavar="S",
    help="Begin no measurement after S seconds; continue later with --resume.",
)
@click.option("--resume", is_flag=True, help="Keep what FILE holds and measure the rest.")
@click.option(
    "--generates", is_flag=True, help="MODEL writes text: time its steps, up to --max-sequences and --max-batch-tokens."
)
@click.option("--max-sequences", type=int, metavar="N", help="With --generates: sequences of a step. Default: 16.")
@click.option("--max-batch-tokens", type=int, metavar="N", help="With --generates: tokens of a step. Default: 512.")
@output_option("Profile file; default profile-TYPE.yaml, such as profile-cpu.yaml.")
@json_option
def command(
    models: tuple[str, ...],
    time_limit_s: float | None,
    resume: bool,
    output: str | None,
    generates: bool,
    max_sequences: int | None,
    max_batch_tokens: int | None,
    **settings: Any,
) -> int:
    """Measure MODELs: latency, spread and peak memory per batch size and share, and the line alpha*b + beta.

    MODEL is a name of the catalogue (resnet50), a source (transformers/bert), your own package.module:factory, a local
    transformers directory, or a file (net.onnx, net.pt2). The file is written after every measurement. Ctrl-C keeps it;
    --resume continues. A network whose rows depend on each other is refused: requests share batches.

    Where inputs vary in shape, --sizes tokens=16,64,256 measures every batch size at each of these sizes, by the file's
    own names. --sizes tokens=16..256 measures the two ends, and then sizes between them until the time of a batch is
    off by at most 10 % at a size that is left out.

    MODEL may be a workload (workload.yaml): each of its models is measured with its own options, weights and sizes.

    With --generates, what is measured is a step of a language model: a folder that save_pretrained wrote, or
    transformers/TYPE with random weights.

    What an engine served needs no measuring: `tenuto fit-requests` of the laboratory (pip install tenuto-lab) fits what
    steps cost to the log of its requests.

    Example: tenuto profile resnet50 mobilenet_v2 bert --batch-sizes 1,2,4,8 -o cpu.yaml
    """
    steps = {"max_sequences": max_sequences, "max_batch_tokens": max_batch_tokens}
    if generates:
        return measure_steps(models, output, {**settings, **steps, "resume": resume, "time_limit_s": time_limit_s})
    raise_if_any(
        Problem(f"--{key.replace('_', '-')}", value, "belongs to --generates", "Leave it out, or give --generates.")
        for key, value in steps.items()
        if value is not None
    )
    if not models:
        raise refused("MODEL", None, "name at least one model", "Write for example `tenuto profile resnet50`.")
    names = settings.pop("names")
    if any(model.endswith((".yaml", ".yml")) for model in models):
        requests = _of_workload(models, names, settings)
    else:
        requests = _requests(models, names, settings)
    if time_limit_s is not None and not time_limit_s > 0:
        raise refused("--time-limit-s", time_limit_s, "must be above 0", "Give seconds.")
    writer = ProfileWriter(None if output is None else Path(output), command=shlex.join(command_line()), resume=resume)
    until = None if time_limit_s is None else time.monotonic() + time_limit_s
    with shares_of(settings["device"], needed=any(share < 100 for share in settings["shares"])) as given:
        finished, fault = _measure(requests, writer, until, given)
    if writer.profile is None:
        raise fault or EnvironmentFaultError(
            "the time limit was over before anything was measured. Give more seconds with --time-limit-s."
        )
    profile = writer.profile
    if not printed_as_json(profile.model_dump(mode="json", by_alias=True, exclude_none=True)):
        _print(profile)
    notice(f"wrote {writer.path} ({finished} of {len(requests)} models)")
    if isinstance(fault, TenutoError):
        notice(f"error: {fault}")
        return fault.exit_code
    return 130 if fault is not None else 0


def _requests(models: tuple[str, ...], names: tuple[str, ...], settings: Mapping[str, Any]) -> list[MeasureRequest]:
    """Turn arguments into requests; the arguments have the names of a request's fields.

    Raises:
        InvalidInputError: lists the problems of all arguments.
    """
    problems: list[Problem] = []
    settings = {**settings, "options": parse_pairs(settings["options"]), "sizes": parse_sizes(settings["sizes"])}
    if settings["weights_path"] is not None and len(models) > 1:
        problems.append(
            Problem("--weights", settings["weights_path"], "fits one model only", "Name one model with --weights.")
        )
    if names and len(names) != len(models):
        problems.append(Problem("--name", " ".join(names), "names another number of MODELs", "Give one for each."))
    requests, rows = [], set()
    for model, name in zip(models, (*names, *("",) * len(models)), strict=False):
        request = MeasureRequest(model, **settings, name=name)
        try:
            request.check()
            row = request.row
        except InvalidInputError as error:
            problems += error.problems
            continue
        if row in rows:
            problems.append(Problem("MODEL", model, f"is the second '{row}'", "Name them apart: --name A --name B."))
        rows.add(row)
        requests.append(request)
    raise_if_any(problems)
    return requests


def _of_workload(models: tuple[str, ...], names: tuple[str, ...], settings: Mapping[str, Any]) -> list[MeasureRequest]:
    """Return what to measure of each model of a workload, once for each profile row. Options of the command go before
    those of the workload. What generates, or has its latency in the workload, is left out.

    Raises:
        InvalidInputError: the workload cannot be read, has no such models, or none to measure.
    """
    if len(models) > 1 or settings["weights_path"] is not None:
        rule, cure = "is a workload, which is given alone", "Leave other MODELs and --weights away."
        raise refused("MODEL", " ".join(models), rule, cure)
    workload = Workload.load(models[0])
    known = [spec.name for spec in workload.models]
    raise_if_any(
        Problem("--name", name, "is not in the workload", one_of(name, known, "It has:"))
        for name in names
        if name not in known
    )
    given, options = parse_sizes(settings["sizes"]), parse_pairs(settings["options"])
    requests: dict[str, MeasureRequest] = {}
    for spec in workload.models:
        if spec.latency is not None or spec.profile_row in requests or (names and spec.name not in names):
            continue
        if spec.generates is not None:
            notice(
                f"{spec.name} generates: measure it by `tenuto profile --generates {spec.network} --name {spec.name}`"
            )
            continue
        sizes = {**dict(_sizes_of(spec)), **{name: sizes for name, sizes in given.items() if name in spec.sizes}}
        own = {"options": {**spec.options, **options}, "sizes": sizes, "weights_path": spec.weights_path}
        request = MeasureRequest(spec.network, **{**settings, **own}, name=spec.profile_row)
        request.check()
        requests[request.row] = request
    if not requests:
        raise refused("MODEL", models[0], "has no model to measure here", "Name others, or give --generates.")
    return list(requests.values())


def _sizes_of(spec: ModelSpec) -> Iterator[tuple[str, Axis]]:
    """Yield the range of sizes in which to measure a model, by name: of those that come, as its options allow them."""
    ranges = parse_document(
        ShapeOptions, {"sizes": spec.options.get("sizes", {})}, origin=f"models.{spec.name}.options"
    ).sizes
    for name, lengths in spec.sizes.items():
        parts = (_FEW, 1.0 if lengths.most < math.inf else _NEARLY_ALL)
        least, most = (math.ceil(lengths.quantile(part)) for part in parts)
        if name in ranges:
            allowed = ranges[name]
            least, most = (
                min(allowed.most, -(-max(allowed.least, size) // allowed.multiple) * allowed.multiple)
                for size in (least, most)
            )
        yield name, (most,) if least == most else SizeRange(most, least)


def parse_sizes(given: Sequence[str]) -> dict[str, Axis]:
    """Return the sizes to measure by name, from NAME=N,N or NAME=N..M texts; raises `InvalidInputError`."""
    sizes: dict[str, Axis] = {}
    for text in given:
        name, _, numbers = text.partition("=")
        is_range = ".." in numbers
        values = [number.strip() for number in (numbers.split("..") if is_range else numbers.split(","))]
        if not name or name in sizes or not all(value.isdecimal() and len(value) < 10 for value in values):
            cure = "Write --sizes tokens=16,64,256, or a range: --sizes tokens=16..256."
            raise refused("--sizes", text, "must name a size once, with whole numbers", cure)
        ends = sorted({int(value) for value in values})
        is_range = is_range and len(values) == 2 and len(ends) == 2
        sizes[name] = SizeRange(ends[1], ends[0]) if is_range else tuple(ends)
    return sizes


def _measure(
    requests: list[MeasureRequest], writer: ProfileWriter, until: float | None, shares: Shares | None
) -> tuple[int, BaseException | None]:
    """Measure one model after another; after Ctrl-C or a fault, return how many are finished, and the reason."""
    before = {request.row: writer.before(request.row, request) for request in requests}
    left = {
        request.row: replace(request, known=known.points if (known := before[request.row]) else ()).left()
        for request in requests
    }
    console = progress_console()
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=24), MofNCompleteColumn(), TimeElapsedColumn())
    finished = done = 0
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("starting", total=sum(left.values()))
        for request in requests:
            name = request.row
            if left[name] == 0:
                finished += 1
                continue
            remaining_s = None if until is None else until - time.monotonic()
            if remaining_s is not None and remaining_s <= 0:
                notice(f"time limit reached before {name}; continue with --resume")
                break
            progress.update(task, description=f"{name}: building")

            def on_point(point: ProfilePoint, name: str = name, request: MeasureRequest = request) -> None:
                writer.point(name, request, point)
                at = f"{_shown(point)} at {point.share_pct:g} %"
                text = f"{name}: batch {point.batch_size}{at}: {number(point.latency_ms, 2)} ms"
                progress.update(task, advance=1, description=text)
                if not console.is_terminal:
                    notice(text)

            try:
                measurement = measure_model(
                    replace(request, time_limit_s=remaining_s),
                    on_point=on_point,
                    on_machine=writer.machine,
                    before=before[name],
                    shares=shares,
                )
            except (KeyboardInterrupt, TenutoError) as fault:
                return finished, fault
            writer.finish(measurement)
            finished += STOPPED not in measurement.profile.doubts
            done += left[name]
            progress.update(task, completed=done)
    return finished, None


def _print(profile: Profile) -> None:
    measured = profile.measured
    if measured is not None:
        say(f"{profile.gpu_type}: {measured.hardware}, {measured.date}")
    print_table(
        ("model", "share", "batch", "latency ms", "± ms", "repeat %", "requests/s", "memory MiB"),
        (
            (
                name if index == 0 else "",
                f"{point.share_pct:g} %",
                f"{point.batch_size}{_shown(point)}",
                number(point.latency_ms, 2),
                number(point.latency_spread_ms, 2),
                number(point.metrics.get("repeat_pct")),
                number(1000 * point.batch_size / point.latency_ms),
                number(point.memory_mib, 0),
            )
            for name, model in profile.models.items()
            for index, point in enumerate(model.points)
        ),
    )
    for name, model in profile.models.items():
        say(_fit_text(name, model))
        if model.size_fit is not None:
            off = f"at most {model.size_fit.max_error_pct:.1f} %, mean {model.size_fit.mean_error_pct:.1f} %"
            say(f"{name}: between the measured sizes, as a measured size that is left out: off by {off}")
        for doubt in model.doubts:
            say(f"  {doubt}")


def _shown(point: ProfilePoint) -> str:
    return "".join(f" {name}={size}" for name, size in point.sizes.items())


def _fit_text(name: str, model: ModelProfile) -> str:
    fit = model.fit
    if fit is None:
        return f"{name}: no line; it takes two batch sizes on the whole device, and one size of requests"
    quality = "" if fit.r_squared is None else f"r² {fit.r_squared:.4f}, "
    return (
        f"{name}: l(b) = {fit.alpha_ms:.3f} b {'+' if fit.beta_ms >= 0 else '-'} {abs(fit.beta_ms):.3f} ms, "
        f"{quality}largest error {fit.max_error_pct or 0:.1f} %"
    )
