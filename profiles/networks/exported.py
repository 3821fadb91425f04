"""Networks that come as a file: a program of `torch.export` (`.pt2`), or an ONNX model (`.onnx`)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tenuto.errors import EnvironmentFaultError, InvalidInputError, first_line, refused
from tenuto.profiles.networks.catalogue import LoadedModel, ModelSignature, TensorSignature
from tenuto.profiles.networks.import_factory import check_path
from tenuto.profiles.networks.runtimes import ONNX_TYPES


def load_exported(source: str) -> LoadedModel:
    """Return the network of a file, with the signature in the file. Its first dimension must be the batch.

    Raises:
        InvalidInputError: there is no such file, its place is not allowed, it is of another kind, or it only takes one
            batch size.
        EnvironmentFaultError: ONNX Runtime is not installed.
    """
    check_path(source, "source")
    path = Path(source)
    if not path.is_file():
        raise refused("source", source, "no such file", "Give a local .pt2 or .onnx file.")
    return _onnx(path) if path.suffix == ".onnx" else _exported_program(path)


def _exported_program(path: Path) -> LoadedModel:
    import torch

    try:
        program = torch.export.load(path)
    except Exception as error:  # there are many kinds: a damaged archive, another version, a compiled package
        raise _unusable(path, error, "Write it with torch.export.save(torch.export.export(…), path).") from error
    nodes = {node.name: node for node in program.graph.nodes}
    names = program.graph_signature.user_inputs, program.graph_signature.user_outputs
    inputs, outputs = (
        tuple(
            _tensor(path, str(name), nodes[str(name)].meta["val"].dtype, nodes[str(name)].meta["val"].shape)
            for name in some
        )
        for some in names
    )
    return LoadedModel(program.module(), ModelSignature("tensor", inputs, outputs, platform="torch.export"))


def _onnx(path: Path) -> LoadedModel:
    import torch

    try:
        import onnxruntime
    except ModuleNotFoundError as error:
        raise EnvironmentFaultError(
            f"{path} needs the package 'onnxruntime'. Run: pip install 'tenuto[onnx]' (for a GPU onnxruntime-gpu)."
        ) from error
    try:
        session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    except Exception as error:  # the library's own errors have no other common base
        raise _unusable(path, error, "Give a complete ONNX model.") from error
    inputs, outputs = (
        tuple(_tensor(path, one.name, ONNX_TYPES.get(one.type, one.type), one.shape) for one in some)
        for some in (session.get_inputs(), session.get_outputs())
    )
    signature = ModelSignature("tensor", inputs, outputs, platform="onnx")
    return LoadedModel(torch.nn.Module().eval(), signature, onnx_file=str(path.resolve()))


def _tensor(path: Path, name: str, dtype: Any, shape: Sequence[Any]) -> TensorSignature:
    word = str(dtype).removeprefix("torch.")
    if word not in ONNX_TYPES.values():
        cure = f"Convert it in the network. Served: {', '.join(sorted(set(ONNX_TYPES.values())))}."
        raise refused(f"{path}: {name}", word, "is no type served here", cure)
    if not shape or isinstance(shape[0], int):
        raise refused(
            f"{path}: {name}",
            list(map(str, shape)),
            "has no batch dimension of any size in front",
            "Export it with a dynamic first dimension.",
        )
    if not all(isinstance(size, int) for size in shape[1:]):
        raise refused(
            f"{path}: {name}",
            list(map(str, shape)),
            "has more than one dimension of any size",
            "Export it with all but the first dimension fixed.",
        )
    return TensorSignature(name, "float32" if word == "bfloat16" else word, tuple(shape[1:]))


def _unusable(path: Path, error: Exception, cure: str) -> InvalidInputError:
    return refused("source", str(path), f"cannot be read ({first_line(error)})", cure)
