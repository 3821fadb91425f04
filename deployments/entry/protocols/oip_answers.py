"""Answers of the Open Inference Protocol v2: outputs as JSON, or as binary tensors behind it."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import orjson

from tenuto.deployments.entry.http.exchange import HttpError
from tenuto.deployments.entry.protocols.oip_requests import DTYPES, PROTOCOL_NAMES, InferHeader, RequestedOutput
from tenuto.deployments.wire.answers import Executed
from tenuto.deployments.wire.tensors import Buffer, OutputTensor, bytes_row, pack_elements, read_elements
from tenuto.profiles.networks.catalogue import BYTES
from tenuto.profiles.networks.preprocess import largest


class NotFiniteError(HttpError):
    """An answer holds NaN or infinite values, or bytes that are no text, which JSON cannot carry (406)."""

    def __init__(self, output: str, holds: str = "NaN or infinite values") -> None:
        super().__init__(
            406,
            f"output '{output}' holds {holds}, which JSON cannot carry. Ask for binary data "
            "(parameter binary_data_output), and look at the model.",
        )


def encode_response(
    named: bytes,
    header: InferHeader,
    samples: Sequence[Sequence[OutputTensor]],
    parameters: bytes,
    labels: Sequence[str] = (),
) -> tuple[bytes, list[Buffer]]:
    """Return the JSON part of the response and the binary tensors that follow it.

    Args:
        named: the model's name and version, as JSON.
        header: what was asked.
        samples: the outputs of each sample of the request.
        parameters: response parameters (times, batch size, gpu-let), as JSON.
        labels: class names for the classification extension.

    Raises:
        NotFiniteError: an output that is wanted as JSON holds NaN or infinite values.
    """
    binary: list[Buffer] = []
    described = []
    if header.outputs is None:
        into = binary if header.binary_output else None
        described = [_described(tensors, into) for tensors in zip(*samples, strict=True)]
    for output in header.outputs or ():
        tensors = [next(t for t in sample if t.name == output.name) for sample in samples]
        if output.classification:
            described.append(orjson.dumps(_classified(output, tensors, labels, binary)))
        else:
            described.append(_described(tensors, binary if output.binary else None))
    text = b'{%b,"outputs":[%b],"parameters":%b%b}' % (
        named,
        b",".join(described),
        parameters,
        b',"id":%b' % orjson.dumps(header.id) if header.id else b"",
    )
    return text, binary


def _described(tensors: Sequence[OutputTensor], binary: list[Buffer] | None) -> bytes:
    """Return one output as JSON; its values go into `binary`, where that is there."""
    first = tensors[0]
    if any(t.shape != first.shape for t in tensors):
        shapes = ", ".join(str(list(shape)) for shape in dict.fromkeys(t.shape for t in tensors))
        raise HttpError(400, f"output '{first.name}' has several shapes ({shapes}). Send samples one by one.")
    begin = _begin_output(first.name, first.dtype, _with_rows(first.shape, first.axis, len(tensors)))
    parts: Sequence[Buffer] = [t.data for t in tensors]
    if first.axis and len(tensors) > 1:
        parts = [np.stack([t.array for t in tensors], first.axis).tobytes()]
    if binary is not None:
        binary += parts
        return b'%b"parameters":{"binary_data_size":%d}}' % (begin, sum([memoryview(each).nbytes for each in parts]))
    values = parts[0] if len(parts) == 1 else b"".join(parts)
    if first.dtype == BYTES:
        return b'%b"data":%b}' % (begin, _texts(first.name, values, len(tensors) * math.prod(first.shape)))
    return b'%b"data":%b}' % (begin, _numbers(first.name, np.frombuffer(values, DTYPES[first.dtype])))


class JsonRows:
    """The outputs of one batch as JSON, row by row; the parts that rows have in common are made once."""

    def __init__(self, executed: Executed) -> None:
        self._outputs: list[tuple[str, bytes, Any, int]] = [
            (
                output.name,
                _begin_output(output.name, output.dtype, _with_rows(output.shape, output.axis, 1)),
                [bytes_row(data, row * output.row_bytes) for row in range(executed.rows)]
                if output.dtype == BYTES
                else np.frombuffer(data, DTYPES[output.dtype]).reshape(executed.rows, -1 if output.row_bytes else 0),
                math.prod(output.shape),
            )
            for output, data in zip(executed.outputs, executed.data, strict=True)
        ]

    def text(self, row: int) -> bytes:
        """Return one row, as all outputs of a request of one sample; raises `NotFiniteError`."""
        return b",".join(
            [
                b'%b"data":%b}'
                % (begin, _texts(name, values[row], count) if type(values) is list else _numbers(name, values[row]))
                for name, begin, values, count in self._outputs
            ]
        )


def _numbers(output: str, values: np.ndarray[Any, Any]) -> bytes:
    """Return an array as JSON; raises `NotFiniteError`."""
    numbers = orjson.dumps(values, option=orjson.OPT_SERIALIZE_NUMPY, default=_plain)
    if b"null" in numbers:  # a number that is not finite is written so
        raise NotFiniteError(output)
    return numbers


def _texts(output: str, values: Buffer, count: int) -> bytes:
    """Return a tensor of bytes as JSON; raises `NotFiniteError` if an element is no text in UTF-8."""
    try:
        return orjson.dumps([element.decode() for element in read_elements(values, count)])
    except UnicodeDecodeError:
        raise NotFiniteError(output, "bytes that are no text in UTF-8") from None


def _with_rows(shape: tuple[int, ...], axis: int | None, rows: int) -> tuple[int, ...]:
    """Return the shape of so many rows of an output."""
    if not axis:
        return shape if axis is None else (rows, *shape)
    return (*shape[:axis], rows, *shape[axis:])


@functools.lru_cache
def _begin_output(name: str, dtype: str, shape: tuple[int, ...]) -> bytes:
    """Return the JSON that precedes the values of an output, which is the same for all rows."""
    return orjson.dumps({"name": name, "datatype": PROTOCOL_NAMES[dtype], "shape": shape})[:-1] + b","


def check_finite(tensors: Sequence[OutputTensor]) -> None:
    """Raise `NotFiniteError` where a value of an output cannot be written as JSON."""
    for tensor in tensors:
        if tensor.dtype.startswith("float") and not np.isfinite(np.frombuffer(tensor.data, tensor.dtype)).all():
            raise NotFiniteError(tensor.name)


def plain_values(tensor: OutputTensor) -> Any:
    """Return the values of an output, nested, in a form that orjson can write; raises `NotFiniteError`."""
    check_finite([tensor])
    if tensor.dtype != BYTES:
        return tensor.array if tensor.dtype != "float16" else tensor.array.tolist()
    try:
        texts = np.empty(math.prod(tensor.shape), object)
        texts[:] = [element.decode() for element in read_elements(tensor.data, texts.size)]
    except UnicodeDecodeError:
        raise NotFiniteError(tensor.name, "bytes that are no text in UTF-8") from None
    return texts.reshape(tensor.shape).tolist()


def _plain(value: Any) -> Any:
    """Return half-precision arrays in a form that orjson can write."""
    if isinstance(value, np.ndarray):
        return value.tolist()
    raise TypeError(type(value).__name__)


def bytes_tensor(texts: Iterable[str]) -> bytes:
    """Return texts as the values of a BYTES tensor: each behind its length in four bytes."""
    return pack_elements([text.encode() for text in texts])


def _classified(
    output: RequestedOutput, tensors: Sequence[OutputTensor], labels: Sequence[str], binary: list[Buffer]
) -> dict[str, Any]:
    """Triton's classification extension: the k largest values as `score:index[:label]` strings."""
    rows = []
    for tensor in tensors:
        scores = np.frombuffer(tensor.data, dtype=tensor.dtype)
        best = largest(scores, output.classification)
        shown = "{:f}" if scores.dtype.kind == "f" else "{:d}"
        rows.append([f"{shown.format(scores[i])}:{i}" + (f":{labels[i]}" if i < len(labels) else "") for i in best])
    entry: dict[str, Any] = {"name": output.name, "datatype": "BYTES", "shape": [len(rows), len(rows[0])]}
    flat = [text for row in rows for text in row]
    if not output.binary:
        entry["data"] = flat
        return entry
    encoded = bytes_tensor(flat)
    entry["parameters"] = {"binary_data_size": len(encoded)}
    binary.append(encoded)
    return entry
