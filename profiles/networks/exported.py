"""Networks that come as a file: a program of `torch.export` (`.pt2`), an ONNX model (`.onnx`), or TorchScript (`.pt`).

A file names its inputs and outputs, their types and their dimensions; for TorchScript the options do. Which dimension
is the batch follows from these:

- The first dimension of every input varies, or one name stands in all inputs: a batch of any size.
- The first dimension of all inputs and outputs is the same number: a batch of this size.
- Otherwise the network has no batch, and each request runs alone.

Every other dimension that varies is a size (`ModelSignature.sizes`), by its name in the file, or, where the file has
none, by the names of its tensor and its place: `input_1`. Scalars have no batch.
"""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tenuto.errors import EnvironmentFaultError, InvalidInputError, first_line, one_of, refused
from tenuto.profiles.networks.catalogue import LoadedModel, ModelSignature, SizeRange, TensorSignature
from tenuto.profiles.networks.import_factory import check_path
from tenuto.profiles.networks.model_options import BATCH, ShapeOptions
from tenuto.profiles.networks.runtimes import ONNX_TYPES

Dimension = int | str | None
# format: what stands for a name where there is none: what tf2onnx makes up, and with a `?` the symbols of torch.export
_NO_NAME = re.compile(r"unk__\d+|\?\w+")
# The inputs of a transformer that looks only where `attention_mask` is 1, so that all of them may be padded.
_MASKED = frozenset({"input_ids", "attention_mask", "token_type_ids", "position_ids"})
# format: operators of ONNX that look up rows of a table: the places of indices and table among their inputs.
_LOOKUPS = {"Gather": ((1, 0),), "GatherBlockQuantized": ((1, 0),), "EmbedLayerNormalization": ((0, 2), (1, 4))}
_SAME_VALUES = frozenset({"Cast", "Identity", "Reshape", "Flatten", "Squeeze", "Unsqueeze", "Transpose", "Expand"})


@dataclass(frozen=True)
class _FileTensor:
    """An input or output as its file describes it; `below` as in `TensorSignature`."""

    name: str
    dtype: str
    shape: tuple[Dimension, ...]
    below: int | None = None


def load_exported(source: str, options: ShapeOptions, unlimited: int | None = None) -> LoadedModel:
    """Return the network of a file, with the signature in the file.

    Args:
        source: the file.
        options: what the file does not say.
        unlimited: the `most` of sizes of which nothing says how large they may be; None refuses them.

    Raises:
        InvalidInputError: there is no such file, its place is not allowed, it is of another kind, or nothing says how
            large its sizes may be.
        EnvironmentFaultError: ONNX Runtime is not installed.
    """
    path = _file(source)
    if path.suffix == ".onnx":
        import torch

        signature, data = _onnx(path, options, unlimited)
        return LoadedModel(torch.nn.Module().eval(), signature, onnx_file=str(path.resolve()), onnx_data=data)
    return (_torchscript if path.suffix == ".pt" else _exported_program)(path, options, unlimited)


def describe_exported(source: str, options: ShapeOptions, unlimited: int | None = None) -> ModelSignature:
    """Return the signature in a file as `load_exported` does, of an ONNX file without torch. ONNX Runtime reads the
    whole file for it, so operators that it lacks and weights that are missing are refused."""
    path = _file(source)
    if path.suffix == ".onnx":
        return _onnx(path, options, unlimited)[0]
    return load_exported(source, options, unlimited).signature


def _file(source: str) -> Path:
    check_path(source, "source")
    path = Path(source)
    if not path.is_file():
        raise refused("source", source, "no such file", "Give a local .pt2, .onnx or .pt file.")
    return path


def _exported_program(path: Path, options: ShapeOptions, unlimited: int | None) -> LoadedModel:
    import torch

    loader = logging.getLogger("torch.export")
    level = loader.level
    loader.setLevel(logging.ERROR)  # of a damaged archive it also prints a traceback
    try:
        program = torch.export.load(path)
    except Exception as error:  # there are many kinds: a damaged archive, another version, a compiled package
        raise _unusable(path, error, "Write it with torch.export.save(torch.export.export(…), path).") from error
    finally:
        loader.setLevel(level)
    if changed := sorted(_changed_buffers(program)):
        rule = "is written in every run, so that an answer depends on requests of other clients"
        raise refused(str(path), ", ".join(changed), rule, "Export it after `eval()`, and without what it remembers.")
    nodes = {node.name: node for node in program.graph.nodes}
    names = program.graph_signature.user_inputs, program.graph_signature.user_outputs
    inputs, outputs = (
        [
            _FileTensor(
                str(name),
                str(value.dtype).removeprefix("torch."),
                tuple(each if isinstance(each, int) else _symbol(each) for each in value.shape),
            )
            for name in some
            for value in [nodes[str(name)].meta["val"]]
        ]
        for some in names
    )
    ranges = {_symbol(symbol): _bounds(allowed) for symbol, allowed in program.range_constraints.items()}
    known = {name: each for name, each in ranges.items() if each is not None}
    signature = _signature(path, inputs, outputs, options, known, unlimited)
    return LoadedModel(program.module(), signature)


def _changed_buffers(program: Any) -> set[str]:
    """Return the buffers that a program of `torch.export` writes to, by its signature, or by the schemas of what it
    calls where it was not made functional."""
    buffers = program.graph_signature.inputs_to_buffers
    changed = set(program.graph_signature.buffers_to_mutate.values())
    for node in program.graph.nodes:
        schema = getattr(node.target, "_schema", None)
        for given, known in zip(node.args, schema.arguments if schema is not None else (), strict=False):
            if known.alias_info is not None and known.alias_info.is_write and str(given) in buffers:
                changed.add(buffers[str(given)])
    return changed


def _symbol(size: Any) -> str:
    """Return what stands for a dimension of `torch.export`, which keeps no names: a symbol, or a formula of some."""
    text = str(size)
    return f"?{text}" if text.isidentifier() else text


def _bounds(allowed: Any) -> SizeRange | None:
    """Return the range of a symbol of `torch.export`; None for one without an end."""
    try:
        return SizeRange(int(allowed.upper), int(allowed.lower))
    except (AttributeError, OverflowError, TypeError, ValueError):  # infinite, by the version of SymPy
        return None


def _torchscript(path: Path, options: ShapeOptions, unlimited: int | None) -> LoadedModel:
    import torch

    try:
        with warnings.catch_warnings(category=DeprecationWarning, action="ignore"):
            module = torch.jit.load(str(path), map_location="cpu").eval()  # type: ignore[no-untyped-call]
        schema = module.forward.schema
    except (RuntimeError, AttributeError, OSError) as error:
        cure = "Write it by torch.jit.save; weights alone are `weights_path` of a network."
        raise _unusable(path, error, cure) from error
    count = sum(not each.has_default_value() for each in schema.arguments) - 1  # the first one is the module
    if not 1 <= count < len(options.shapes):
        rule = f"TorchScript names no shapes, and its network takes {count} tensors"
        cure = "Say them in the options, its inputs first: {shapes: {x: [batch, 3, 224, 224], y: [batch, 1000]}}."
        raise refused(f"options of {path}: shapes", ", ".join(options.shapes) or None, rule, cure)
    tensors = [_FileTensor(name, options.types.get(name, "float32"), shape) for name, shape in options.shapes.items()]
    return LoadedModel(module, _signature(path, tensors[:count], tensors[count:], options, {}, unlimited))


def _onnx(path: Path, options: ShapeOptions, unlimited: int | None) -> tuple[ModelSignature, tuple[str, ...]]:
    """Return the signature of an ONNX file, and the files beside it with weights."""
    try:
        import onnxruntime
    except ModuleNotFoundError as error:
        raise EnvironmentFaultError(
            f"{path} needs the package 'onnxruntime'. Run: pip install 'tenuto[onnx]' (for a GPU onnxruntime-gpu)."
        ) from error
    try:
        session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    except Exception as error:  # the library's own errors have no other common base
        cure = next((cure for words, cure in _ONNX_CURES.items() if words in str(error)), "Give a complete ONNX model.")
        raise _unusable(path, error, cure) from error
    rows, data = _tables_and_data(path)
    inputs, outputs = (
        [_FileTensor(t.name, ONNX_TYPES.get(t.type, t.type), tuple(t.shape), rows.get(t.name)) for t in some]
        for some in (session.get_inputs(), session.get_outputs())
    )
    return _signature(path, inputs, outputs, options, {}, unlimited), data


def _tables_and_data(path: Path) -> tuple[dict[str, int], tuple[str, ...]]:
    """Return how many rows the smallest table has that an input of an ONNX file is an index of, and the files beside it
    with weights. Inputs of which nothing says so are left out; nothing is known without the package `onnx`."""
    try:
        import onnx
    except ModuleNotFoundError:
        return {}, ()
    graph = onnx.load(str(path), load_external_data=False).graph
    data = {one.value for weight in graph.initializer for one in weight.external_data if one.key == "location"}
    tables = {weight.name: weight.dims[0] for weight in graph.initializer if weight.dims}
    inputs = {value.name: value.name for value in graph.input}  # of which input a value has the elements
    rows: dict[str, int] = {}
    for node in graph.node:
        attributes = {attribute.name: attribute for attribute in node.attribute}
        if node.op_type == "Constant" and "value" in attributes and attributes["value"].t.dims:
            tables[node.output[0]] = attributes["value"].t.dims[0]
        elif node.op_type in ("Cast", "Identity", "DequantizeLinear") and node.input[0] in tables:
            tables[node.output[0]] = tables[node.input[0]]
        elif node.op_type in _SAME_VALUES and node.input[0] in inputs:
            inputs[node.output[0]] = inputs[node.input[0]]
        elif not any(attributes[name].i for name in ("axis", "gather_axis") if name in attributes):
            for at, table in _LOOKUPS.get(node.op_type, ()):
                if node.input[at] in inputs and node.input[table] in tables:
                    index = inputs[node.input[at]]
                    rows[index] = min(tables[node.input[table]], rows.get(index, tables[node.input[table]]))
    return rows, tuple(str(path.parent / name) for name in sorted(data))


_LACKS = "It has an operator that this ONNX Runtime lacks: install a build that has it, or export it without."
# What ONNX Runtime says, and what helps.
_ONNX_CURES = {
    "No Op registered": _LACKS,
    "is not a registered function/op": _LACKS,
    "guarantees* support": "Export it with an older opset, or install a newer onnxruntime.",
    "model IR version": "Export it with an older onnx, or install a newer onnxruntime.",
    "xternal data": "Its weights lie in files of their own: put them beside it, by the names that it knows them by.",
}


def _signature(
    path: Path,
    inputs: Sequence[_FileTensor],
    outputs: Sequence[_FileTensor],
    options: ShapeOptions,
    ranges: Mapping[str, SizeRange],
    unlimited: int | None,
) -> ModelSignature:
    """Return the signature of a file: where the batch is, which sizes vary and how far, and what may be padded."""
    for tensor in (*inputs, *outputs):
        if tensor.dtype not in ONNX_TYPES.values():
            cure = f"Convert it in the network. Served: {', '.join(sorted(set(ONNX_TYPES.values())))}."
            raise refused(f"{path}: {tensor.name}", tensor.dtype, "is no type served here", cure)
    _check_known(path, "shapes", options.shapes, [tensor.name for tensor in (*inputs, *outputs)])
    _check_known(path, "types", options.types, [tensor.name for tensor in (*inputs, *outputs)])
    _check_known(path, "pad", options.pad, [tensor.name for tensor in inputs])
    _check_known(path, "example", options.example, [tensor.name for tensor in inputs])
    names: dict[str, str] = {}
    shapes = {t.name: tuple(_named(t, options.shapes.get(t.name), names)) for t in (*inputs, *outputs)}
    axes, batch = _batch_axes(
        [shapes[t.name] for t in inputs], [shapes[t.name] for t in outputs], [t.name in options.shapes for t in inputs]
    )
    pad = _pads(inputs) | options.pad
    made = [
        TensorSignature(
            t.name,
            "float32" if t.dtype == "bfloat16" else t.dtype,
            tuple(d for at, d in enumerate(shapes[t.name]) if at != axis),
            below=t.below if t.dtype.startswith(("int", "uint")) else None,
            pad=pad.get(t.name),
            axis=axis,
            example=options.example.get(t.name),
        )
        for t, axis in zip((*inputs, *outputs), axes, strict=True)
    ]
    taken, given = made[: len(inputs)], made[len(inputs) :]
    known = {names.get(symbol, symbol): allowed for symbol, allowed in ranges.items()}
    sizes = _sizes(path, taken, options, known, unlimited)
    platform = {".onnx": "onnx", ".pt": "torchscript"}.get(path.suffix, "torch.export")
    if options.labels and (not given or given[0].shape != (len(options.labels),)):
        rule = (
            f"has {len(options.labels)} names, and a request's first output is {list(given[0].shape) if given else []}"
        )
        raise refused(f"options of {path}: labels", None, rule, "Give one for each of its entries.")
    signature = ModelSignature(
        "tensor", tuple(taken), tuple(given), labels=options.labels, platform=platform, sizes=sizes, batch=batch
    )
    if options.pad and sizes and not signature.padded_sizes:
        unknown = [
            f"{t.name} {list(t.shape)}" for t in given if any(isinstance(d, str) and d not in sizes for d in t.shape)
        ]
        rule = "leaves outputs that cannot be cut back" if unknown else "leaves inputs of these sizes that have none"
        cure = (
            "Name their dimensions after those of the inputs by the option `shapes`." if unknown else "Pad these, too."
        )
        raise refused(f"{path}: pad", "; ".join(unknown) or ", ".join(options.pad), rule, cure)
    return signature


def _check_known(path: Path, key: str, given: Mapping[str, Any], known: Sequence[str]) -> None:
    for name in given:
        if name not in known:
            raise refused(f"options of {path}: {key}", name, "is not in the file", one_of(name, known, "It has:"))


def _named(tensor: _FileTensor, given: Sequence[int | str] | None, names: dict[str, str]) -> Iterator[int | str]:
    """Yield the dimensions of a tensor, each with a name or a number; `names`: those given to symbols that say nothing,
    by symbol."""
    if given is not None:
        if len(given) != len(tensor.shape):
            raise refused(
                f"shapes: {tensor.name}", list(given), f"the file has {len(tensor.shape)} dimensions", "Name each."
            )
        yield from given
        return
    for place, dimension in enumerate(tensor.shape):
        own = f"{tensor.name}_{place}"
        if dimension is None or (isinstance(dimension, int) and dimension < 0) or dimension in ("", "?"):
            yield own
        elif isinstance(dimension, str) and _NO_NAME.fullmatch(dimension):
            yield names.setdefault(dimension, own)
        else:
            yield dimension


def _batch_axes(
    inputs: Sequence[tuple[int | str, ...]], outputs: Sequence[tuple[int | str, ...]], is_given: Sequence[bool]
) -> tuple[list[int | None], int | None]:
    """Return where each input and output has the batch, and the only size of the batch, if it has one. `is_given`: the
    inputs whose dimensions an option names; their batch is where it says so."""
    nowhere: list[int | None] = [None] * (len(inputs) + len(outputs))
    ranked = [(shape, given) for shape, given in zip(inputs, is_given, strict=True) if shape]
    if not ranked:
        return nowhere, None
    firsts = {shape[0] for shape, given in ranked if not given or shape[0] == BATCH}
    one = BATCH if any(BATCH in shape for shape in (*inputs, *outputs)) else ranked[0][0][0]
    if len(firsts) and all(isinstance(shape[0], str) and shape[0] in firsts for shape, _ in ranked):
        batches = firsts
    elif (
        isinstance(one, str)
        and all(shape.count(one) == 1 for shape, _ in ranked)
        and (one == BATCH or not ranked[0][1])
    ):
        batches = {one}
    elif isinstance(one, int) and not any(is_given) and {s[0] for s in (*inputs, *outputs) if s} == {one}:
        return [0 if shape else None for shape in (*inputs, *outputs)], one
    else:
        return nowhere, None
    axes: list[int | None] = [
        next((at for at, dimension in enumerate(shape) if dimension in batches), None) for shape in inputs
    ]
    sizes = {d for shape in inputs for d in shape if isinstance(d, str)} - batches
    for shape in outputs:
        at = next((at for at, dimension in enumerate(shape) if dimension in batches), None)
        if at is None and (not shape or isinstance(shape[0], int) or shape[0] in sizes):
            return nowhere, None
        axes.append(at or 0)
    return axes, None


def _pads(inputs: Sequence[_FileTensor]) -> dict[str, float]:
    """Return what inputs may be padded with as far as it is known: those of a transformer with an attention mask."""
    names = {tensor.name for tensor in inputs}
    return dict.fromkeys(names, 0.0) if "attention_mask" in names and names <= _MASKED else {}


def _sizes(
    path: Path,
    inputs: Sequence[TensorSignature],
    options: ShapeOptions,
    ranges: Mapping[str, SizeRange],
    unlimited: int | None,
) -> dict[str, SizeRange]:
    """Return the range of every size: of the options, else of the file."""
    named = list(dict.fromkeys(d for tensor in inputs for d in tensor.shape if isinstance(d, str)))
    _check_known(path, "sizes", options.sizes, named)
    otherwise = None if unlimited is None else SizeRange(unlimited)
    allowed = ((name, options.sizes.get(name) or ranges.get(name) or otherwise) for name in named)
    sizes = {name: each for name, each in allowed if each is not None}
    unknown = [name for name in named if name not in sizes]
    if unknown:
        shown = ", ".join(f"{name}: {{most: N}}" for name in unknown)
        flags = " ".join(f"--sizes {name}=N" for name in unknown)
        raise refused(
            f"{path}",
            ", ".join(unknown),
            "can be of any size, and the file has no largest",
            f"Say it in the model's options: {{sizes: {{{shown}}}}}, or to `tenuto profile`: {flags}. "
            "A plan knows it when the workload says which sizes come (`sizes` of the model).",
        )
    return sizes


def _unusable(path: Path, error: Exception, cure: str) -> InvalidInputError:
    return refused("source", str(path), f"cannot be read ({first_line(error)})", cure)
