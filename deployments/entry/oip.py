"""The Open Inference Protocol v2 on the wire: JSON tensors, Triton's binary tensor extension and its system shared
memory extension, both ways.

Pure functions of bytes; nothing here knows HTTP, Ray or the dispatcher.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec
import numpy as np
import orjson

from tenuto.deployments.wire.tensors import Array, Buffer, InputPart, OutputTensor

# Protocol datatype names and numpy's. BYTES and BF16 have no fixed-width numpy type and are not accepted.
DATATYPES = {
    "BOOL": "bool", "UINT8": "uint8", "UINT16": "uint16", "UINT32": "uint32", "UINT64": "uint64",
    "INT8": "int8", "INT16": "int16", "INT32": "int32", "INT64": "int64",
    "FP16": "float16", "FP32": "float32", "FP64": "float64",
}  # fmt: skip
_PROTOCOL_NAMES = {numpy_name: name for name, numpy_name in DATATYPES.items()}
_ITEM_BYTES = {numpy_name: np.dtype(numpy_name).itemsize for numpy_name in DATATYPES.values()}
MAX_SAMPLES = 1024


# A request that may wait longer is a mistake: it would hold its memory and its client's connection all the time.
LONGEST_SLO_MS = 3_600_000.0


class BadRequestError(Exception):
    """The client must change the request; the message says what."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One input or output: numpy dtype name and shape without the batch dimension.

    `below` bounds integer inputs: a token id outside the embedding table would cost a GPU its whole CUDA context.
    `accepts` are further dtypes that a client may send; the model converts them as its first step.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    below: int | None = None
    accepts: tuple[str, ...] = ()

    @property
    def datatype(self) -> str:
        """The protocol's name of the dtype."""
        return _PROTOCOL_NAMES[self.dtype]

    @property
    def elements(self) -> int:
        """Values of one sample."""
        return math.prod(self.shape)

    def sample_bytes(self, dtype: str) -> int:
        """Bytes of one sample in one of the dtypes."""
        return self.elements * _ITEM_BYTES[dtype]

    def dtype_of(self, datatype: Any) -> str:
        """Return the numpy dtype of a protocol datatype that this input takes.

        Raises:
            BadRequestError: it takes another.
        """
        dtype = DATATYPES.get(datatype) if isinstance(datatype, str) else None
        if dtype is None or (dtype != self.dtype and dtype not in self.accepts):
            taken = " or ".join(_PROTOCOL_NAMES[each] for each in (self.dtype, *self.accepts))
            raise BadRequestError(f"input '{self.name}' has datatype {datatype!r}; the model takes {taken}.")
        return dtype

    def metadata(self) -> dict[str, Any]:
        """Return the tensor's entry in the model metadata; -1 is the batch dimension."""
        return {"name": self.name, "datatype": self.datatype, "shape": [-1, *self.shape]}


@dataclass(frozen=True, slots=True)
class RequestedOutput:
    """An output the client asked for, and in which form; `region`: to be written there instead of being sent."""

    name: str
    binary: bool
    classification: int = 0
    region: Region | None = None


@dataclass(slots=True)
class InferRequest:
    """A parsed request: `parts[sample]` holds one tensor per input in signature order."""

    id: str
    parts: list[list[InputPart]]
    outputs: list[RequestedOutput] | None
    binary_output: bool
    slo_ms: float | None

    @property
    def is_plain(self) -> bool:
        """Whether all outputs are wanted as JSON."""
        return self.outputs is None and not self.binary_output


class Region(NamedTuple):
    """A part of a region of shared memory that the client has registered."""

    name: str
    offset: int
    size: int


# Brings a part of a region to where gpu-lets can read it; raises `BadRequestError` for one that is not there.
ReadRegion = Callable[[Region], InputPart]


# Puts bytes there; raises `BadRequestError` likewise.
WriteRegion = Callable[[Region, bytes], None]


def _no_regions(region: Region) -> InputPart:
    raise BadRequestError(f"no shared memory region '{region.name}' is registered.")


def _no_output_regions(region: Region, data: bytes) -> None:
    del data
    _no_regions(region)


@dataclass(frozen=True, slots=True)
class InferHeader:
    """The JSON part of a request. It says where tensors lie and not what they hold, so that one serves every request
    that begins with the same bytes."""

    id: str
    tensors: list[_Tensor]  # in signature order
    binary_bytes: int
    count: int  # samples
    outputs: list[RequestedOutput] | None
    binary_output: bool
    slo_ms: float | None

    def fill(
        self, binary: memoryview, *, arena: str = "", offset: int = 0, read_region: ReadRegion = _no_regions
    ) -> InferRequest:
        """Return the request with what follows the JSON part; `arena` and `offset` say where that lies.

        Raises:
            BadRequestError: it has another length than was announced, or values that the model does not know.
        """
        surplus = len(binary) - self.binary_bytes
        if surplus < 0:
            raise BadRequestError(f"the body ends {-surplus} bytes before the announced binary data does.")
        if surplus:
            raise BadRequestError(
                f"{surplus} bytes follow the last binary tensor. Correct the binary_data_size values."
            )
        whole = []
        for spec, dtype, source in self.tensors:
            if isinstance(source, range):
                part = InputPart(binary[source.start : source.stop], dtype, arena, offset + source.start)
            elif isinstance(source, Region):
                part = read_region(source)._replace(dtype=dtype)
            else:
                part = InputPart(source, dtype)
            if spec.below is not None:
                _check_range(spec, part)
            whole.append(part)
        parts = [whole] if self.count == 1 else _samples(whole, self.count)
        return InferRequest(self.id, parts, self.outputs, self.binary_output, self.slo_ms)


class _Tensor(NamedTuple):
    """One input: `source` is its values, or where they lie: in the binary part, or in the client's shared memory.
    `dtype` is "" for the signature's own."""

    spec: TensorSpec
    dtype: str
    source: bytes | range | Region


def parse_infer(
    body: Buffer,
    header_length: int | None,
    inputs: Sequence[TensorSpec],
    *,
    arena: str = "",
    offset: int = 0,
    read_region: ReadRegion = _no_regions,
    known: KnownHeaders | None = None,
) -> InferRequest:
    """Parse the body of an infer request.

    Args:
        body: the whole HTTP body.
        header_length: value of `Inference-Header-Content-Length`, or None for a body that is all JSON.
        inputs: the model's inputs.
        arena: the arena that the body lies in; binary tensors are then not copied.
        offset: of the body in the arena.
        read_region: brings tensors from shared memory of the client.
        known: headers for the same inputs that need not be parsed again.

    Raises:
        BadRequestError: malformed JSON, or tensors that do not fit the signature.
    """
    whole = memoryview(body)
    if header_length is not None and not 0 <= header_length <= len(whole):
        raise BadRequestError(
            f"Inference-Header-Content-Length is {header_length}, but the body has {len(whole)} bytes. "
            "Send the length of the JSON part."
        )
    end = len(whole) if header_length is None else header_length
    if known is None or header_length is None:
        header = _parse_header(whole[:end], inputs)
    else:
        header = known.find(whole[:end], inputs)
    return header.fill(whole[end:], arena=arena, offset=offset + end, read_region=read_region)


class KnownHeaders:
    """JSON parts that were parsed before: clients that send tensors as binary data send the same one again and
    again, and looking at it takes a tenth of the time."""

    _KEPT = 256
    _LONGEST_BYTES = 2048

    def __init__(self) -> None:
        self._headers: dict[bytes, InferHeader] = {}

    def find(self, text: memoryview, inputs: Sequence[TensorSpec]) -> InferHeader:
        """Return what a JSON part says; raises as `parse_infer`. Those with an id of their own do not come again."""
        if len(text) > self._LONGEST_BYTES:
            return _parse_header(text, inputs)
        key = bytes(text)
        header = self._headers.get(key)
        if header is None:
            header = _parse_header(text, inputs)
            if not header.id:
                if len(self._headers) >= self._KEPT:
                    self._headers.clear()
                self._headers[key] = header
        return header


def _parse_header(text: memoryview, inputs: Sequence[TensorSpec]) -> InferHeader:
    try:
        request = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise BadRequestError(
            f"the body is not valid JSON: {error}. Send an Open Inference Protocol v2 request."
        ) from None
    if not isinstance(request, dict) or not isinstance(request.get("inputs"), list):
        raise BadRequestError("the request needs a list 'inputs'. Send an Open Inference Protocol v2 request.")
    parameters = _mapping(request.get("parameters"), "parameters")
    if parameters.get("priority"):
        raise BadRequestError("parameter priority is not honoured: the plan gives priorities to models. Leave it out.")
    tensors, counts, binary_bytes = _tensors(request["inputs"], inputs)
    if len(set(counts.values())) > 1:
        raise BadRequestError(f"inputs disagree on the batch dimension: {counts}. Give all the same first dimension.")
    return InferHeader(
        id=_id_of(request),
        tensors=[tensors[spec.name] for spec in inputs],
        binary_bytes=binary_bytes,
        count=counts[inputs[0].name] if inputs else 0,
        outputs=_requested(request.get("outputs"), parameters),
        binary_output=bool(parameters.get("binary_data_output", False)),
        slo_ms=slo_from(parameters),
    )


def _id_of(request: Mapping[str, Any]) -> str:
    raw = request.get("id", "")
    if isinstance(raw, bool) or not isinstance(raw, str | int):
        raise BadRequestError(f"'id' is {raw!r}. Give a string.")
    return str(raw)


def _samples(whole: Sequence[InputPart], count: int) -> list[list[InputPart]]:
    """Cut every tensor into those of its samples."""
    parts: list[list[InputPart]] = [[] for _ in range(count)]
    for part in whole:
        data = memoryview(part.data)
        size = data.nbytes // count
        for sample in range(count):
            start = sample * size
            parts[sample].append(InputPart(data[start : start + size], part.dtype, part.arena, part.offset + start))
    return parts


class QuickReader:
    """Reads the plainest requests of one model at once: one sample, every input as a flat list of JSON numbers in the
    signature's order, no parameters. It knows nothing of what is wrong with others; `parse_infer` does.

    msgspec checks names and types of everything while it reads, which in Python costs several times as much.
    """

    def __init__(self, inputs: Sequence[TensorSpec]) -> None:
        """Prepare for a model's inputs."""
        kinds = {np.dtype(spec.dtype).kind for spec in inputs}
        large = any(spec.elements > _QUICK_ELEMENTS for spec in inputs)
        self._decode: Callable[[Buffer], Any] | None = None
        if len(kinds) == 1 and not large and (kind := _QUICK_KINDS.get(kinds.pop())) is not None:
            tensor = msgspec.defstruct(
                "Tensor", [("name", str), ("shape", list[int]), ("datatype", str), ("data", kind)],
                forbid_unknown_fields=True, gc=False,
            )  # fmt: skip
            request = msgspec.defstruct(
                "Request", [("inputs", list[tensor]), ("id", str, "")], forbid_unknown_fields=True  # type: ignore[valid-type]
            )
            self._decode = msgspec.json.Decoder(request).decode
        self._inputs = [
            (spec.name, spec.datatype, [1, *spec.shape], spec.below, _packer(spec) if not large else None)
            for spec in inputs
        ]

    def read(self, body: Buffer) -> tuple[str, list[InputPart]] | None:
        """Return id and tensors of a request, or None for one that has to be parsed, or has a fault."""
        if self._decode is None:
            return None
        try:
            request = self._decode(body)
            if len(request.inputs) != len(self._inputs):
                return None
            parts = []
            for (name, datatype, shape, below, pack), given in zip(self._inputs, request.inputs, strict=True):
                data = given.data
                if given.name != name or given.datatype != datatype or given.shape != shape or pack is None:
                    return None
                if below is not None and not (min(data) >= 0 and max(data) < below):
                    return None
                parts.append(InputPart(pack(*data)))
        except (msgspec.DecodeError, struct.error, OverflowError, ValueError):
            return None
        return request.id, parts


_QUICK_ELEMENTS = 1024
_QUICK_KINDS: dict[str, Any] = {"f": list[float], "i": list[int], "u": list[int], "b": list[bool]}


def _packer(spec: TensorSpec) -> Callable[..., bytes]:
    """Return what packs one sample's values; it refuses a wrong number of them, and values that do not fit."""
    return struct.Struct(f"<{spec.elements}{np.dtype(spec.dtype).char}").pack


def slo_from(parameters: Mapping[str, Any]) -> float | None:
    """Return the time allowed in ms: parameter `slo_ms`, else Triton's `timeout` in microseconds, else None."""
    if "slo_ms" in parameters:
        return parse_slo(parameters["slo_ms"], "parameter slo_ms")
    if "timeout" in parameters:
        return parse_slo(parameters["timeout"], "parameter timeout", 1000.0 * LONGEST_SLO_MS) / 1000.0
    return None


def parse_slo(value: Any, where: str, most: float = LONGEST_SLO_MS) -> float:
    """Return a number of at most an hour; raises `BadRequestError` otherwise. Zero and less are allowed: expired."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number) or isinstance(value, bool) or number > most:
        shown = repr(value)
        shown = shown if len(shown) <= 40 else shown[:37] + "..."
        raise BadRequestError(f"{where} is {shown}. Give a number of at most {most:.0f}.")
    return number


def _mapping(value: Any, where: str) -> Mapping[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise BadRequestError(f"'{where}' must be an object.")
    return value


def _tensors(raw: list[Any], inputs: Sequence[TensorSpec]) -> tuple[dict[str, _Tensor], dict[str, int], int]:
    """Return each input's tensor and its batch dimension by name, and how many bytes of binary data there must be."""
    known = {spec.name: spec for spec in inputs}
    found: dict[str, _Tensor] = {}
    counts: dict[str, int] = {}
    binary_bytes = 0
    for tensor in raw:
        if not isinstance(tensor, dict) or not isinstance(tensor.get("name"), str):
            raise BadRequestError("every input must be an object with a 'name', 'shape', 'datatype' and 'data'.")
        name = tensor["name"]
        spec = known.get(name)
        if spec is None:
            raise BadRequestError(f"unknown input '{name}'. The model's inputs: {', '.join(known)}.")
        if name in found:
            raise BadRequestError(f"input '{name}' is given twice.")
        dtype = spec.dtype_of(tensor.get("datatype"))
        counts[name] = _batch_dimension(tensor.get("shape"), spec)
        source = _source(tensor, spec, dtype, counts[name], binary_bytes)
        found[name] = _Tensor(spec, "" if dtype == spec.dtype else dtype, source)
        if isinstance(source, range):
            binary_bytes = source.stop
    missing = [name for name in known if name not in found]
    if missing:
        raise BadRequestError(f"missing input {', '.join(missing)}.")
    return found, counts, binary_bytes


def _source(tensor: Mapping[str, Any], spec: TensorSpec, dtype: str, count: int, at: int) -> bytes | range | Region:
    """Return one input's values, or where they lie; `at` is the end of the binary data of those before it."""
    parameters = _mapping(tensor.get("parameters"), f"inputs.{spec.name}.parameters")
    expected = count * spec.sample_bytes(dtype)
    if "shared_memory_region" in parameters:
        return _region(parameters, f"input '{spec.name}'", expected)
    size = parameters.get("binary_data_size")
    if size is None:
        if "data" not in tensor:
            raise BadRequestError(f"input '{spec.name}' has neither 'data' nor binary data.")
        return _json_data(tensor["data"], spec, dtype, count)
    if type(size) is not int or size != expected:
        raise BadRequestError(f"input '{spec.name}' announces {size!r} binary bytes; its shape needs {expected}.")
    return range(at, at + size)


def _region(parameters: Mapping[str, Any], where: str, expected: int | None) -> Region:
    """Return the part of a shared memory region that a tensor's parameters name."""
    name = parameters["shared_memory_region"]
    size = parameters.get("shared_memory_byte_size")
    offset = parameters.get("shared_memory_offset", 0)
    if not isinstance(name, str) or type(size) is not int or type(offset) is not int or size < 0 or offset < 0:
        raise BadRequestError(
            f"{where}: shared memory needs a region's name, a byte size and an offset of whole numbers."
        )
    if expected is not None and size != expected:
        raise BadRequestError(f"{where} has {size} bytes in shared memory; its shape needs {expected}.")
    return Region(name, offset, size)


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


def _json_data(data: Any, spec: TensorSpec, dtype_name: str, count: int) -> bytes:
    """Convert nested or flat JSON numbers without silent rounding or wrapping."""
    try:
        array = np.array(data)
    except (ValueError, OverflowError):
        raise BadRequestError(f"the data of input '{spec.name}' is ragged. Give all rows the same length.") from None
    dtype = np.dtype(dtype_name)
    if array.dtype.kind not in {"b": "b", "f": "iuf"}.get(dtype.kind, "iu"):
        raise BadRequestError(f"the data of input '{spec.name}' is not all {_PROTOCOL_NAMES[dtype_name]} values.")
    if array.size != count * spec.elements:
        raise BadRequestError(
            f"input '{spec.name}' has {array.size} values; "
            f"shape {[count, *spec.shape]} needs {count * spec.elements}."
        )
    if dtype.kind in "iu":
        limits = np.iinfo(dtype)
        if array.size and (int(array.min()) < limits.min or int(array.max()) > limits.max):
            raise BadRequestError(f"the data of input '{spec.name}' does not fit {_PROTOCOL_NAMES[dtype_name]}.")
    elif dtype.kind == "f" and array.size:
        with np.errstate(over="ignore"):
            converted = array.astype(dtype)
        if not np.isfinite(converted).all():
            raise BadRequestError(f"the data of input '{spec.name}' does not fit {_PROTOCOL_NAMES[dtype_name]}.")
        return converted.tobytes()
    return array.astype(dtype).tobytes()


def _check_range(spec: TensorSpec, part: InputPart) -> None:
    assert spec.below is not None
    values = np.frombuffer(part.data, dtype=part.dtype or spec.dtype)
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
        if type(classes) is not int or classes < 0:
            raise BadRequestError(f"output '{output['name']}': classification must be a number of classes.")
        region = None
        if "shared_memory_region" in options:
            region = _region(options, f"output '{output['name']}'", None)
        found.append(RequestedOutput(output["name"], bool(options.get("binary_data", default)), classes, region))
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
    write_region: WriteRegion = _no_output_regions,
) -> tuple[bytes, list[Buffer]]:
    """Return the JSON part of the response and the binary tensors that follow it.

    Args:
        model: the model's name.
        request: what was asked.
        samples: the outputs of each sample of the request.
        parameters: response parameters (times, batch size, gpu-let).
        labels: class names for the classification extension.
        write_region: puts outputs into shared memory of the client.

    Raises:
        BadRequestError: an output does not fit its region.
    """
    wanted = request.outputs
    if wanted is None:
        wanted = [RequestedOutput(tensor.name, request.binary_output) for tensor in samples[0]]
    described: list[dict[str, Any]] = []
    binary: list[Buffer] = []
    for output in wanted:
        tensors = [next(t for t in sample if t.name == output.name) for sample in samples]
        if output.classification:
            described.append(_classified(output, tensors, labels, binary))
            continue
        first = tensors[0]
        entry: dict[str, Any] = {
            "name": output.name, "datatype": _PROTOCOL_NAMES[first.dtype], "shape": [len(tensors), *first.shape]
        }  # fmt: skip
        if output.region is not None:
            entry["parameters"] = _written(output.region, tensors, write_region)
        elif output.binary:
            entry["parameters"] = {"binary_data_size": sum(t.data.nbytes for t in tensors)}
            binary += [t.data for t in tensors]
        elif len(tensors) == 1:
            entry["data"] = np.frombuffer(first.data, dtype=first.dtype)
        else:
            entry["data"] = np.concatenate([np.frombuffer(t.data, dtype=t.dtype) for t in tensors])
        described.append(entry)
    document: dict[str, Any] = {
        "model_name": model,
        "model_version": "1",
        "outputs": described,
        "parameters": parameters,
    }
    if request.id:
        document["id"] = request.id
    return orjson.dumps(document, option=orjson.OPT_SERIALIZE_NUMPY, default=_plain), binary


def _written(region: Region, tensors: Sequence[OutputTensor], write_region: WriteRegion) -> dict[str, Any]:
    """Write an output into its region, and return its parameters."""
    size = sum(t.data.nbytes for t in tensors)
    if size > region.size:
        raise BadRequestError(
            f"output '{tensors[0].name}' has {size} bytes; {region.size} of region '{region.name}' were given for it."
        )
    write_region(region, b"".join([t.data for t in tensors]))
    return {
        "shared_memory_region": region.name,
        "shared_memory_offset": region.offset,
        "shared_memory_byte_size": size,
    }


class QuickWriter:
    """Writes the plainest responses of one model: all outputs as JSON numbers, one sample; see `encode_response`."""

    def __init__(self, model: str, outputs: Sequence[TensorSpec]) -> None:
        """Prepare for a model's outputs."""
        self._begin = b'{"model_name":%b,"model_version":"1","outputs":[' % orjson.dumps(model)
        self._outputs = [(spec.name, spec.dtype, tuple(spec.shape)) for spec in outputs]
        self._heads = [
            b'%b{"name":%b,"datatype":"%b","shape":%b,"data":'
            % (b"," if place else b"", orjson.dumps(spec.name), spec.datatype.encode(), orjson.dumps([1, *spec.shape]))
            for place, spec in enumerate(outputs)
        ]
        self._knows_types = all(spec.dtype != "float16" for spec in outputs)  # orjson does not

    def knows(self, described: Sequence[tuple[str, str, tuple[int, ...], int]]) -> bool:
        """Whether these are the outputs it was made for."""
        return self._knows_types and [output[:3] for output in described] == self._outputs

    def write(self, arrays: Sequence[Array], row: int, parameters: bytes, request_id: str) -> bytes:
        """Return the response of one row of a batch; `parameters` is a JSON object."""
        parts = [self._begin]
        for head, array in zip(self._heads, arrays, strict=True):
            parts += (head, orjson.dumps(array[row], option=orjson.OPT_SERIALIZE_NUMPY), b"}")
        parts += (b'],"parameters":', parameters)
        parts.append(b',"id":%b}' % orjson.dumps(request_id) if request_id else b"}")
        return b"".join(parts)


def _plain(value: Any) -> Any:
    """Let orjson write what it cannot itself: half-precision arrays."""
    if isinstance(value, np.ndarray):
        return value.tolist()
    raise TypeError(type(value).__name__)


def _classified(
    output: RequestedOutput, tensors: Sequence[OutputTensor], labels: Sequence[str], binary: list[Buffer]
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
