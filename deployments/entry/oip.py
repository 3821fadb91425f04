"""The Open Inference Protocol v2 on the wire: JSON tensors and Triton's binary tensor extension, both ways.

Pure functions of bytes; nothing here knows HTTP frameworks, Ray or the dispatcher.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson

from tenuto.deployments.wire.answers import OutputTensor

__all__ = [
    "DATATYPES",
    "BadRequestError",
    "InferRequest",
    "RequestedOutput",
    "TensorSpec",
    "encode_response",
    "parse_infer",
]

# Protocol datatype names and numpy's. BYTES and BF16 have no fixed-width numpy type and are not accepted.
DATATYPES = {
    "BOOL": "bool", "UINT8": "uint8", "UINT16": "uint16", "UINT32": "uint32", "UINT64": "uint64",
    "INT8": "int8", "INT16": "int16", "INT32": "int32", "INT64": "int64",
    "FP16": "float16", "FP32": "float32", "FP64": "float64",
}  # fmt: skip
_PROTOCOL_NAMES = {numpy_name: name for name, numpy_name in DATATYPES.items()}
MAX_SAMPLES = 1024


class BadRequestError(Exception):
    """The client must change the request; the message says what."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One input or output: numpy dtype name and shape without the batch dimension.

    `below` bounds integer inputs: a token id outside the embedding table would cost a GPU its whole CUDA context.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    below: int | None = None

    @property
    def datatype(self) -> str:
        """The protocol's name of the dtype."""
        return _PROTOCOL_NAMES[self.dtype]

    @property
    def sample_bytes(self) -> int:
        """Bytes of one sample."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize

    def metadata(self) -> dict[str, Any]:
        """Return the tensor's entry in the model metadata; -1 is the batch dimension."""
        return {"name": self.name, "datatype": self.datatype, "shape": [-1, *self.shape]}


@dataclass(frozen=True, slots=True)
class RequestedOutput:
    """An output the client asked for, and in which form."""

    name: str
    binary: bool
    classification: int = 0


@dataclass(slots=True)
class InferRequest:
    """A parsed request: `parts[sample]` holds one raw buffer per input in signature order."""

    id: str
    parts: list[list[memoryview]]
    outputs: list[RequestedOutput] | None
    binary_output: bool
    slo_ms: float | None


def parse_infer(body: bytes, header_length: int | None, inputs: Sequence[TensorSpec]) -> InferRequest:
    """Parse the body of an infer request.

    Args:
        body: the whole HTTP body.
        header_length: value of `Inference-Header-Content-Length`, or None for a body that is all JSON.
        inputs: the model's inputs.

    Raises:
        BadRequestError: malformed JSON, or tensors that do not fit the signature.
    """
    if header_length is not None and not 0 <= header_length <= len(body):
        raise BadRequestError(
            f"Inference-Header-Content-Length is {header_length}, but the body has {len(body)} bytes. "
            "Send the length of the JSON part."
        )
    text = body if header_length is None else body[:header_length]
    try:
        request = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise BadRequestError(
            f"the body is not valid JSON: {error}. Send an Open Inference Protocol v2 request."
        ) from None
    if not isinstance(request, dict) or not isinstance(request.get("inputs"), list):
        raise BadRequestError("the request needs a list 'inputs'. Send an Open Inference Protocol v2 request.")
    parameters = _mapping(request.get("parameters"), "parameters")
    binary = memoryview(body)[len(text) :]
    tensors = _tensors(request["inputs"], binary, inputs)
    samples = {name: length for name, (_, length) in tensors.items()}
    if len(set(samples.values())) != 1:
        raise BadRequestError(f"inputs disagree on the batch dimension: {samples}. Give all the same first dimension.")
    count = next(iter(samples.values()))
    parts: list[list[memoryview]] = [[] for _ in range(count)]
    for spec in inputs:
        data = tensors[spec.name][0]
        _check_range(spec, data)
        size = spec.sample_bytes
        for sample in range(count):
            parts[sample].append(data[sample * size : (sample + 1) * size])
    return InferRequest(
        id=str(request.get("id", "")),
        parts=parts,
        outputs=_requested(request.get("outputs"), parameters),
        binary_output=bool(parameters.get("binary_data_output", False)),
        slo_ms=slo_from(parameters),
    )


def slo_from(parameters: Mapping[str, Any]) -> float | None:
    """Return the time allowed in ms: parameter `slo_ms`, else Triton's `timeout` in microseconds, else None."""
    if "slo_ms" in parameters:
        return parse_slo(parameters["slo_ms"], "parameter slo_ms")
    if "timeout" in parameters:
        return parse_slo(parameters["timeout"], "parameter timeout") / 1000.0
    return None


def parse_slo(value: Any, where: str) -> float:
    """Return a finite number; raises `BadRequestError` otherwise. Zero and negative are allowed: already expired."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number) or isinstance(value, bool):
        raise BadRequestError(f"{where} is {value!r}. Give a finite number.")
    return number


def _mapping(value: Any, where: str) -> Mapping[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise BadRequestError(f"'{where}' must be an object.")
    return value


def _tensors(raw: list[Any], binary: memoryview, inputs: Sequence[TensorSpec]) -> dict[str, tuple[memoryview, int]]:
    """Return each input's bytes and batch dimension by name."""
    known = {spec.name: spec for spec in inputs}
    found: dict[str, tuple[memoryview, int]] = {}
    offset = 0
    for tensor in raw:
        if not isinstance(tensor, dict) or not isinstance(tensor.get("name"), str):
            raise BadRequestError("every input must be an object with a 'name', 'shape', 'datatype' and 'data'.")
        name = tensor["name"]
        spec = known.get(name)
        if spec is None:
            raise BadRequestError(f"unknown input '{name}'. The model's inputs: {', '.join(known)}.")
        if name in found:
            raise BadRequestError(f"input '{name}' is given twice.")
        datatype = tensor.get("datatype")
        if datatype != spec.datatype:
            raise BadRequestError(f"input '{name}' has datatype {datatype!r}; the model takes {spec.datatype}.")
        count = _batch_dimension(tensor.get("shape"), spec)
        expected = count * spec.sample_bytes
        size = _mapping(tensor.get("parameters"), f"inputs.{name}.parameters").get("binary_data_size")
        if size is not None:
            if not isinstance(size, int) or size != expected:
                raise BadRequestError(f"input '{name}' announces {size!r} binary bytes; its shape needs {expected}.")
            if offset + size > len(binary):
                raise BadRequestError(f"the body ends within the binary data of input '{name}'.")
            found[name] = (binary[offset : offset + size], count)
            offset += size
        elif "data" in tensor:
            found[name] = (_json_data(tensor["data"], spec, count), count)
        else:
            raise BadRequestError(f"input '{name}' has neither 'data' nor binary data.")
    if offset != len(binary):
        raise BadRequestError(
            f"{len(binary) - offset} bytes follow the last binary tensor. Correct the binary_data_size values."
        )
    missing = [name for name in known if name not in found]
    if missing:
        raise BadRequestError(f"missing input {', '.join(missing)}.")
    return found


def _batch_dimension(shape: Any, spec: TensorSpec) -> int:
    """Return how many samples a shape holds: with or without the leading batch dimension."""
    wanted = f"[n, {', '.join(map(str, spec.shape))}]" if spec.shape else "[n]"
    if not isinstance(shape, list) or not all(isinstance(size, int) and not isinstance(size, bool) for size in shape):
        raise BadRequestError(f"input '{spec.name}' needs a 'shape' of whole numbers, {wanted}.")
    if tuple(shape) == spec.shape and spec.shape:
        return 1
    if len(shape) != len(spec.shape) + 1 or tuple(shape[1:]) != spec.shape or not 1 <= shape[0] <= MAX_SAMPLES:
        raise BadRequestError(
            f"input '{spec.name}' has shape {shape}; the model takes {wanted} with n from 1 to {MAX_SAMPLES}."
        )
    return int(shape[0])


def _json_data(data: Any, spec: TensorSpec, count: int) -> memoryview:
    """Convert nested or flat JSON numbers without silent rounding or wrapping."""
    try:
        array = np.array(data)
    except ValueError:
        raise BadRequestError(f"the data of input '{spec.name}' is ragged. Give all rows the same length.") from None
    dtype = np.dtype(spec.dtype)
    if array.dtype.kind not in {"b": "b", "f": "iuf"}.get(dtype.kind, "iu"):
        raise BadRequestError(f"the data of input '{spec.name}' is not all {spec.datatype} values.")
    if array.size != count * math.prod(spec.shape):
        raise BadRequestError(
            f"input '{spec.name}' has {array.size} values; "
            f"shape {[count, *spec.shape]} needs {count * math.prod(spec.shape)}."
        )
    if dtype.kind in "iu":
        limits = np.iinfo(dtype)
        if array.size and (int(array.min()) < limits.min or int(array.max()) > limits.max):
            raise BadRequestError(f"the data of input '{spec.name}' does not fit {spec.datatype}.")
    return np.ascontiguousarray(array, dtype=dtype).reshape(-1).view(np.uint8).data


def _check_range(spec: TensorSpec, data: memoryview) -> None:
    if spec.below is None:
        return
    values = np.frombuffer(data, dtype=spec.dtype)
    if values.size and not (int(values.min()) >= 0 and int(values.max()) < spec.below):
        raise BadRequestError(
            f"input '{spec.name}' has values outside 0 to {spec.below - 1}; the model knows no others."
        )


def _requested(raw: Any, parameters: Mapping[str, Any]) -> list[RequestedOutput] | None:
    if raw is None:
        return None
    if not isinstance(raw, list):
        raise BadRequestError("'outputs' must be a list.")
    default = bool(parameters.get("binary_data_output", False))
    found = []
    for output in raw:
        if not isinstance(output, dict) or not isinstance(output.get("name"), str):
            raise BadRequestError("every entry of 'outputs' must be an object with a 'name'.")
        options = _mapping(output.get("parameters"), "outputs.parameters")
        classes = options.get("classification", 0)
        if not isinstance(classes, int) or classes < 0:
            raise BadRequestError(f"output '{output['name']}': classification must be a number of classes.")
        found.append(RequestedOutput(output["name"], bool(options.get("binary_data", default)), classes))
    return found


def check_outputs(requested: Sequence[RequestedOutput] | None, outputs: Sequence[TensorSpec]) -> None:
    """Raise `BadRequestError` when a requested output does not exist."""
    known = [spec.name for spec in outputs]
    for output in requested or ():
        if output.name not in known:
            raise BadRequestError(f"unknown output '{output.name}'. The model's outputs: {', '.join(known)}.")


def encode_response(
    model: str,
    request: InferRequest,
    samples: Sequence[Sequence[OutputTensor]],
    parameters: Mapping[str, Any],
    labels: Sequence[str] = (),
) -> tuple[bytes, int | None]:
    """Return the response body and, when it carries binary tensors, the length of its JSON part.

    Args:
        model: the model's name.
        request: what was asked.
        samples: the outputs of each sample of the request.
        parameters: response parameters (times, batch size, gpu-let).
        labels: class names for the classification extension.
    """
    wanted = request.outputs
    if wanted is None:
        wanted = [RequestedOutput(tensor.name, request.binary_output) for tensor in samples[0]]
    described: list[dict[str, Any]] = []
    binary: list[memoryview | bytes] = []
    for output in wanted:
        tensors = [next(t for t in sample if t.name == output.name) for sample in samples]
        if output.classification:
            described.append(_classified(output, tensors, labels, binary))
            continue
        first = tensors[0]
        entry: dict[str, Any] = {
            "name": output.name, "datatype": _PROTOCOL_NAMES[first.dtype], "shape": [len(tensors), *first.shape]
        }  # fmt: skip
        if output.binary:
            entry["parameters"] = {"binary_data_size": sum(t.data.nbytes for t in tensors)}
            binary += [t.data for t in tensors]
        else:
            entry["data"] = np.concatenate([np.frombuffer(t.data, dtype=t.dtype) for t in tensors])
        described.append(entry)
    document: dict[str, Any] = {
        "model_name": model,
        "model_version": "1",
        "outputs": described,
        "parameters": dict(parameters),
    }
    if request.id:
        document["id"] = request.id
    text = orjson.dumps(document, option=orjson.OPT_SERIALIZE_NUMPY, default=_plain)
    if not binary:
        return text, None
    return b"".join([text, *binary]), len(text)


def _plain(value: Any) -> Any:
    """Let orjson write what it cannot itself: half-precision arrays."""
    if isinstance(value, np.ndarray):
        return value.tolist()
    raise TypeError(type(value).__name__)


def _classified(
    output: RequestedOutput, tensors: Sequence[OutputTensor], labels: Sequence[str], binary: list[memoryview | bytes]
) -> dict[str, Any]:
    """Triton's classification extension: the k largest values as `score:index[:label]` strings."""
    rows = []
    for tensor in tensors:
        scores = np.frombuffer(tensor.data, dtype=tensor.dtype)
        best = np.argsort(-scores, kind="stable")[: output.classification]
        rows.append([f"{scores[i]:f}:{i}" + (f":{labels[i]}" if i < len(labels) else "") for i in best])
    entry: dict[str, Any] = {"name": output.name, "datatype": "BYTES", "shape": [len(rows), len(rows[0])]}
    flat = [text for row in rows for text in row]
    if not output.binary:
        entry["data"] = flat
        return entry
    encoded = b"".join(len(text.encode()).to_bytes(4, "little") + text.encode() for text in flat)
    entry["parameters"] = {"binary_data_size": len(encoded)}
    binary.append(encoded)
    return entry
