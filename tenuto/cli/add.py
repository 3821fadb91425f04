"""`tenuto add`: tell what a network is and needs, run it once, and write its entry into a workload."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tenuto.cli.common import (
    NumberRange,
    Target,
    json_option,
    named_values,
    output_option,
    printed_as_json,
    say,
    wants_json,
    write_file,
)
from tenuto.cli.profile import parse_sizes
from tenuto.documents import dump_yaml, load_document, parse_document, parse_pairs
from tenuto.errors import refused
from tenuto.files import parse_json, parse_number, read_text
from tenuto.placement.workload import Workload
from tenuto.profiles.networks.catalogue import is_exported, refuse_foreign_file

if TYPE_CHECKING:
    from tenuto.profiles.measuring.measure import MeasureRequest
    from tenuto.profiles.networks.catalogue import ModelSignature

_SLO_FACTOR = 5.0  # default: of the time alone
_LEAST_SLO_MS = 20.0  # default: below, clients and the gateway take most of an answer's time
_BUDGET_S = 2.0  # limit: seconds of repeated runs; a profile measures for longer
_UNLIMITED = sys.maxsize
# Default: lengths and limits of a model that generates, to be replaced by those of its clients.
_GENERATES = {"prompt_tokens": 32, "output_tokens": 16, "max_sequences": 2, "max_batch_tokens": 64}


@click.command("add", short_help="Tell what a network is and needs, run it once, and write its entry into a workload.")
@click.argument("model", metavar="MODEL")
@click.option("--name", default="", metavar="NAME", help="Name for clients. Default: the file's own.")
@click.option("--rate", "rate_rps", type=NumberRange(0, min_open=True), default=10.0, help="Requests per second.")
@click.option(
    "--slo-ms",
    type=NumberRange(0, min_open=True),
    metavar="MS",
    help=f"Time for an answer. Default: {_SLO_FACTOR:g} times what one takes alone here, at least {_LEAST_SLO_MS:g}.",
)
@click.option(
    "--sizes",
    multiple=True,
    metavar="NAME=N,N…",
    help="Sizes to run, of a network whose inputs vary in shape; the largest is the most. Repeatable.",
)
@click.option("--pad", multiple=True, metavar="INPUT=X", help="Value to fill an input up with to a longer size.")
@click.option("--option", "options", multiple=True, metavar="K=V", help="Model option, as in the workload; repeatable.")
@click.option(
    "--folder",
    type=Target(is_folder=True),
    metavar="FOLDER",
    help="Of a .gguf file: where to unpack it; this folder is served.",
)
@output_option("Workload to write or complete; default: only tell.")
@json_option
def command(
    model: str,
    name: str,
    rate_rps: float,
    slo_ms: float | None,
    sizes: tuple[str, ...],
    pad: tuple[str, ...],
    options: tuple[str, ...],
    folder: str | None,
    output: str | None,
) -> int:
    """Tell what MODEL takes and gives, where its batch is, which sizes vary and what it needs to be served; run it with
    made-up inputs, and compare the rows of a batch with rows alone.

    MODEL is a file (net.onnx, net.pt2, net.gguf), a folder of transformers or sentence-transformers, a name of the
    catalogue, or your own package.module:factory.

    Example: tenuto add det.onnx --sizes height=320,640 --sizes width=320,640 -o workload.yaml
    """
    from tenuto.profiles.measuring.measure import MeasureRequest, row_name
    from tenuto.profiles.measuring.size_grid import largest, named_sizes

    if folder is not None and model.endswith(".gguf"):
        from tenuto.profiles.networks.gguf_files import unpack_gguf

        unpack_gguf(model, folder)
        model = folder
    refuse_foreign_file(model)
    files = sorted(Path(model).glob("*.onnx")) if not (Path(model) / "config.json").exists() else []
    if files:
        raise refused("MODEL", model, "is a folder of files", f"Give one: {', '.join(map(str, files))}.")
    source = os.path.abspath(model) if Path(model).exists() else model
    name = name or re.sub(r"[^A-Za-z0-9._-]", "-", row_name(source)).lstrip("._-")
    present = _present(output)
    entry: dict[str, Any] = {"name": name, "source": source, "rate_rps": rate_rps}
    if _generates(source):
        description, notes, more = [], ["a language model: it generates"], _steps(source)
    else:
        given, grid = parse_pairs(options), parse_sizes(sizes)
        if grid and is_exported(source):
            given["sizes"] = {key: largest(axis) for key, axis in grid.items()} | given.get("sizes", {})
        if pad:
            given["pad"] = {key: _pad(key, text) for key, text in named_values("--pad", pad, "image=0").items()}
        signature = _signature(source, given)
        has_batch = any(tensor.axis is not None for tensor in signature.inputs)
        description = [f"a network of {signature.platform}", *_described(signature)]
        if not wants_json():
            say("\n".join(description))
        _refuse_unlimited(source, signature)
        tops = {name: (allowed.most,) for name, allowed in signature.sizes.items()}
        fixed = {**tops, **{name: named_sizes(axis) for name, axis in grid.items()}}
        request = MeasureRequest(source, batch_sizes=(1, 2), budget_s=_BUDGET_S, options=given, sizes=fixed, name=name)
        alone_ms, notes = _run(request, has_batch=has_batch)
        more = {"slo_ms": slo_ms or max(_LEAST_SLO_MS, round(_SLO_FACTOR * alone_ms, 1))}
        if given:
            more["options"] = given
    entry |= more
    workload = _completed(present, output or "workload", entry)
    if not printed_as_json({"told": description + notes, "entry": entry}):
        say("\n".join(notes))
        say(dump_yaml({"models": [entry]}, is_part=True).rstrip())
    if output is not None:
        write_file(output, dump_yaml(workload))
    return 0


def _pad(name: str, text: str) -> float:
    try:
        return parse_number(text)
    except ValueError as error:
        raise refused(f"--pad {name}", text, str(error), "Write for example image=0.") from None


def _generates(source: str) -> bool:
    """Return whether a folder holds a language model, by the class of transformers that it names."""
    file = Path(source) / "config.json"
    if not file.is_file():
        return False
    config = parse_json(read_text(file), str(file))
    named = config.get("architectures") if isinstance(config, dict) else None
    return isinstance(named, list) and any(str(each).endswith(("ForCausalLM", "LMHeadModel")) for each in named)


def _signature(source: str, options: Mapping[str, Any]) -> ModelSignature:
    """Return the signature of a model; sizes without a known largest have `_UNLIMITED`."""
    from tenuto.profiles.networks.exported import describe_exported
    from tenuto.profiles.networks.model_options import ModelOptions, ShapeOptions
    from tenuto.profiles.networks.models import build

    origin = f"options of {source}"
    given = ModelOptions.parse(options, origin).build
    if is_exported(source):
        return describe_exported(source, parse_document(ShapeOptions, dict(given), origin=origin), _UNLIMITED)
    return build(source, options=given).signature


def _described(signature: ModelSignature) -> Iterator[str]:
    """Yield what it takes and gives, where its batch is, and what varies."""
    for way, tensors in (("takes", signature.inputs), ("gives", signature.outputs)):
        for tensor in tensors:
            dimensions: list[int | str] = list(tensor.shape)
            if tensor.axis is not None:
                dimensions.insert(tensor.axis, signature.batch or "batch")
            yield f"  {way} {tensor.name}: {tensor.dtype} [{', '.join(map(str, dimensions))}]"
    has_batch = any(tensor.axis is not None for tensor in signature.inputs)
    alone = "none; each request runs alone. If there is one, name dimensions by --option 'shapes={INPUT: [batch, …]}'"
    yield f"  batch: {signature.batch or 'any size' if has_batch else alone}"
    for size, allowed in signature.sizes.items():
        most = "any size" if allowed.most == _UNLIMITED else f"{allowed.least} to {allowed.most}"
        multiple = f", multiples of {allowed.multiple}" if allowed.multiple > 1 else ""
        way = "requests are padded" if size in signature.padded_sizes else "requests of equal shape share a run"
        yield f"  size {size}: {most}{multiple}{f'; {way}' if has_batch else ''}"


def _refuse_unlimited(source: str, signature: ModelSignature) -> None:
    """Raise `InvalidInputError` where nothing says how large a size may be."""
    unlimited = [size for size, allowed in signature.sizes.items() if allowed.most == _UNLIMITED]
    if unlimited:
        flags = " ".join(f"--sizes {size}=N,N" for size in unlimited)
        cure = f"Give the sizes that requests have, the largest last: {flags}"
        raise refused(source, ", ".join(unlimited), "can be of any size, and the file has no largest", cure)


def _run(request: MeasureRequest, *, has_batch: bool) -> tuple[float, list[str]]:
    """Run requests alone and two at once; return the time of the largest alone in ms, and what was noticed.

    Raises:
        InvalidInputError: it does not run, or its rows depend on each other or on padding.
    """
    from tenuto.profiles.measuring.measure import measure_model
    from tenuto.profiles.measuring.worker_process import LostWorkerError

    try:
        profile = measure_model(request).profile
    except LostWorkerError as error:
        cure = (
            "Where an input takes certain values only, give one: --option 'example={NAME: VALUE}'. Where sizes belong "
            "together, or must be multiples, give such: --sizes, --option 'sizes={NAME: {most: N, multiple: N}}'."
        )
        raise refused(request.source, None, f"does not run with made-up inputs ({error})", cure) from error
    alone = [point for point in profile.points if point.batch_size == 1]
    lines = []
    for point in profile.points:
        at = "".join(f" {size}={value}" for size, value in point.sizes.items())
        lines.append(
            f"  runs: {point.batch_size} request{'s' * (point.batch_size > 1)}{at} in {point.latency_ms:.2f} ms"
        )
    if has_batch and len(profile.points) > len(alone):
        lines.append("  rows of a batch: as rows alone")
    return max(point.latency_ms for point in alone), [*lines, *(f"  note: {doubt}" for doubt in profile.doubts)]


def _steps(source: str) -> dict[str, Any]:
    """Return what an entry says of a language model, with an SLO by the times of its steps here."""
    from tenuto.profiles.measuring.step_worker import StepRequest, measure_generation

    tokens, sequences = _GENERATES["max_batch_tokens"], _GENERATES["max_sequences"]
    _, (timed,) = measure_generation(StepRequest(source, sequences, tokens, budget_s=_BUDGET_S), shares=None)
    first_ms, next_ms = timed.steps.prefill_ms[-1][1], timed.steps.decode_ms[-1][1]
    slo = {"ttft_ms": round(_SLO_FACTOR * first_ms, 1), "tpot_ms": round(_SLO_FACTOR * next_ms, 1)}
    return {"slo": slo, "generates": dict(_GENERATES)}


def _present(path: str | None) -> dict[str, Any]:
    """Return the workload in a file, if there is one; raises `InvalidInputError` if the file is no workload."""
    if path is None or not Path(path).exists():
        return {}
    data: dict[str, Any] = load_document(path)
    Workload.of_document(data, path)
    return data


def _completed(data: dict[str, Any], origin: str, entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return a workload completed by an entry. Rate and SLO that it gives a model of this name stay.

    Raises:
        InvalidInputError: the entry does not fit it; `origin` is what the error calls the workload.
    """
    models = list(data.get("models", ()))
    place = next((at for at, model in enumerate(models) if model["name"] == entry["name"]), len(models))
    known = {key: entry[key] for key in ("source", "options") if key in entry}
    models[place:] = [{**models[place], **known} if place < len(models) else dict(entry), *models[place + 1 :]]
    data = {**data, "models": models}
    Workload.of_document(data, origin)
    return data
