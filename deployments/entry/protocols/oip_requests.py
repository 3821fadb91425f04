"""Requests of the Open Inference Protocol v2: JSON tensors, and Triton's binary tensor extension.

Pure functions of bytes, whose errors have the status of HTTP; nothing here knows Ray or the dispatcher.
"""

from __future__ import annotations

import math
import operator
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec
import numpy as np

from tenuto.deployments.entry.http.bounded_cache import BoundedCache
from tenuto.deployments.entry.http.exchange import BadRequestError
from tenuto.deployments.entry.protocols.json_values import (
    CODES,
    VALUE_TYPES,
    check_count,
    count_byte,
    pack_numbers,
    pack_texts,
    short_repr,
)
from tenuto.deployments.wire.arena import Slot
from tenuto.deployments.wire.tensors import DATATYPES, Buffer, InputPart, element_ends
from tenuto.files import parse_number
from tenuto.profiles.networks.catalogue import BYTES, ModelSignature, TensorSignature

PROTOCOL_NAMES = {BYTES: "BYTES", **{numpy_name: name for name, numpy_name in DATATYPES.items()}}
_BFLOAT = "bfloat16"  # no type of numpy: its values are widened to float32 when they come
_KNOWN_DATATYPES = {"BF16": _BFLOAT, **{name: numpy_name for numpy_name, name in PROTOCOL_NAMES.items()}}
DTYPES = {numpy_name: np.dtype(numpy_name) for numpy_name in DATATYPES.values()}
_BFLOAT_BYTES = 2  # format: of a value of BF16
MAX_SAMPLES = 1024  # limit: of one request
# limit: a picture of 3 x 224 x 224 floats takes 1.5 to 3 MiB; binary tensors have no such limit
MOST_JSON_BYTES = 4 << 20
JSON_AT_ONCE_BYTES = 1 << 16  # limit: from here on it is read aside: 5 ms or less
_MOST_JSON_VALUES = 1 << 18  # limit: numbers of a body
_MOST_QUOTES = 1 << 12  # limit: quotation marks of a body

JSON_TOO_LARGE = (
    f"the JSON exceeds {MOST_JSON_BYTES >> 20} MiB or {_MOST_JSON_VALUES:,} values. Send large tensors as binary data "
    "(Inference-Header-Content-Length), which also takes a fraction of the time."
)

Values = TypeVar("Values")
Scalar = str | int | float | bool | None


OFFLINE = "offline"  # format: the priority of requests that wait for time which no other needs

# A request that may wait longer is a mistake: it would hold its memory and its client's connection all the time.
LONGEST_SLO_MS = 3_600_000.0  # limit: an hour


NO_SHARED_MEMORY = "shared memory of clients is not offered. Send tensors in the body as binary data."


class TensorSpec(TensorSignature):
    """One input or output of a model, in the protocol's terms."""

    @property
    def datatype(self) -> str:
        """The protocol's name of the dtype."""
        return PROTOCOL_NAMES[self.dtype]

    @property
    def elements(self) -> int:
        """Values of one sample, where its shape is fixed."""
        return math.prod(self.fixed_shape)

    def sample_bytes(self, dtype: str) -> int:
        """Bytes of one sample in one of the dtypes of numbers."""
        return self.elements * (_BFLOAT_BYTES if dtype == _BFLOAT else DTYPES[dtype].itemsize)

    def dtype_of(self, datatype: Any) -> str:
        """Return the numpy dtype of a protocol datatype that this input takes.

        Raises:
            BadRequestError: it takes another.
        """
        dtype = _KNOWN_DATATYPES.get(datatype) if isinstance(datatype, str) else None
        if dtype == _BFLOAT and self.dtype == "float32":
            return dtype
        if dtype is None or (dtype != self.dtype and dtype not in self.accepts):
            taken = " or ".join(PROTOCOL_NAMES[each] for each in (self.dtype, *self.accepts))
            raise BadRequestError(f"input '{self.name}' has datatype {datatype!r}; the model takes {taken}.")
        return dtype

    @property
    def wire_shape(self) -> list[int]:
        """Its shape as clients are told it: -1 is the batch dimension, or a size that varies."""
        return [-1 if isinstance(each, str) else each for each in self.whole_shape("n")]

    def metadata(self) -> dict[str, Any]:
        """Return the tensor's entry in the model metadata. Where sizes vary, `dimensions` has their names, and null for
        the batch; `below` bounds whole numbers, and `example` is a value with which the model runs."""
        said: dict[str, Any] = {"name": self.name, "datatype": self.datatype, "shape": self.wire_shape}
        if self.below is not None:
            said["below"] = self.below
        if self.example is not None:
            said["example"] = self.example
        if not any(isinstance(each, str) for each in self.shape):
            return said
        named: list[int | str | None] = [*self.shape]
        if self.axis is not None:
            named.insert(self.axis, None)
        return {**said, "dimensions": named}

    def sample_shape(self, shape: Sequence[int]) -> tuple[int | None, tuple[int, ...]]:
        """Return how many samples a shape of any size holds (None: the tensor has no batch dimension), and the shape of
        each."""
        axis, rank = self.axis, len(self.shape)
        if axis is None or len(shape) == rank:
            whole = () if not rank and tuple(shape) == (1,) else tuple(shape)  # Triton's clients send scalars so
            return (None if axis is None else 1), whole
        if len(shape) != rank + 1 or not 1 <= shape[axis] <= MAX_SAMPLES:
            expected = f"[{', '.join(map(str, self.whole_shape('n')))}]"
            raise BadRequestError(
                f"input '{self.name}' has shape {short_repr(shape)}; the model takes {expected} with n from 1 to "
                f"{MAX_SAMPLES}."
            )
        return shape[axis], (*shape[:axis], *shape[axis + 1 :])


class RequestedOutput(NamedTuple):
    """An output the client asked for, and in which form."""

    name: str
    binary: bool
    classification: int = 0


@dataclass(slots=True)
class InferHeader:
    """The JSON part of a request. It says where tensors lie, and not their values. So one object serves every request
    that begins with the same bytes."""

    id: str
    tensors: list[_Tensor]  # in signature order
    binary_bytes: int
    count: int  # samples
    outputs: list[RequestedOutput] | None
    binary_output: bool
    slo_ms: float | None
    yields: bool = False  # other requests of its model go first
    offline: bool = False  # it may cost no other request its deadline
    sizes: tuple[int, ...] = ()  # of each sample, as the signature names them

    def fill(self, binary: memoryview, slot: Slot | None = None, at: int = 0) -> InferRequest:
        """Return the request with the bytes that follow the JSON part; they lie in `slot`, from `at` on.

        Raises:
            BadRequestError: the bytes have another length than announced, or hold values that the model does not know.
        """
        surplus = len(binary) - self.binary_bytes
        if surplus < 0:
            raise BadRequestError(f"the body ends {-surplus} bytes before the announced binary data does.")
        if surplus:
            raise BadRequestError(
                f"{surplus} bytes follow the last binary tensor. Correct the binary_data_size values."
            )
        whole: list[InputPart] = []
        ends: dict[int, list[int]] = {}  # of the samples of inputs of bytes
        arena, offset = ("", 0) if slot is None else (slot.arena, slot.offset + at)
        for spec, dtype, source in self.tensors:
            if isinstance(source, range):
                data = binary[source.start : source.stop]
                part = InputPart(data, dtype, arena, offset + source.start)
                if dtype == _BFLOAT:
                    part = InputPart((np.frombuffer(data, np.uint16).astype(np.uint32) << 16).tobytes())
            else:
                part = InputPart(source, dtype)
            if dtype == BYTES:
                ends[len(whole)] = _sample_ends(spec, part.data, 1 if spec.axis is None else self.count)
            if spec.below is not None:
                _check_range(spec, part)
            whole.append(part)
        if self.count == 1:
            return InferRequest(self, [whole])
        return InferRequest(self, _samples(whole, [tensor.spec for tensor in self.tensors], self.count, ends))


class InferRequest(msgspec.Struct):
    """A parsed request: `parts[sample]` holds one tensor per input in signature order."""

    header: InferHeader
    parts: list[list[InputPart]]


class _Tensor(NamedTuple):
    """One input: `source` is its values, or where they lie in the binary part. `dtype`: "" for the signature's own,
    unless that is `bytes`."""

    spec: TensorSpec
    dtype: str
    source: bytes | range


class TensorJson(msgspec.Struct, Generic[Values], gc=False):
    """One entry of `inputs` as it comes."""

    name: str
    shape: list[int]
    datatype: str
    data: Values | msgspec.UnsetType = msgspec.UNSET
    parameters: dict[str, Scalar] | None = None


class OutputJson(msgspec.Struct, gc=False):
    """One entry of `outputs`."""

    name: str
    parameters: dict[str, Scalar] | None = None


class RequestJson(msgspec.Struct, Generic[Values], gc=False):
    """The JSON part of a request."""

    inputs: list[TensorJson[Values]]
    id: str | int = ""
    parameters: dict[str, Scalar] | None = None
    outputs: list[OutputJson] | None = None


class DescribedRequest(NamedTuple):
    """A request as gRPC gives it, without its tensors, which are binary data. Requests with the same `key` are
    equal. `is_streamed`: its answer may come in several parts."""

    key: tuple[Any, ...]
    request: RequestJson[Any]
    is_streamed: bool = False

    @property
    def slo_ms(self) -> float | None:
        """The time that its parameters allow, if they do."""
        return _named_slo_ms(self.request)


class _Parameters(msgspec.Struct, gc=False):
    """The parameters of a request, whose tensors nobody knows."""

    parameters: dict[str, Scalar] | None = None


def named_slo_ms(body: Buffer, json_length: int | None) -> float | None:
    """Return the time that the parameters of a body allow whose model nobody knows yet. None where there are none,
    where its JSON is no request, and where it is too long to be read at once."""
    length = len(body) if json_length is None else json_length
    try:
        short = body[:length] if length <= JSON_AT_ONCE_BYTES else b"{}"
        return _named_slo_ms(msgspec.json.decode(short, type=_Parameters))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def _named_slo_ms(request: RequestJson[Any] | _Parameters) -> float | None:
    try:
        return slo_from(request.parameters or {})
    except BadRequestError:
        return None  # whoever reads all of it says why


class RequestReader:
    """Reads the requests of one model.

    msgspec checks names and types of everything while it reads. Values in flat lists are read with the rest; almost all
    requests have these. Mixed types, nested lists and long lists stay text at first.
    """

    _KEPT = 256  # limit: descriptions that are kept
    _LONGEST_KEPT_BYTES = 2048  # limit: of one of them

    def __init__(self, inputs: Sequence[TensorSpec], signature: ModelSignature | None = None) -> None:
        """Prepare for a model's inputs; `signature`: of the model, if sizes or the place of its batch vary."""
        self.inputs = inputs
        self._signature = None if signature is None or signature.is_plain else signature
        self.is_sized = signature is not None and bool(signature.sizes)
        self._known = {spec.name: spec for spec in inputs}
        self.takes_bytes = any(spec.dtype == BYTES for spec in inputs)
        kinds = {np.dtype(dtype).kind for spec in inputs for dtype in (spec.dtype, *spec.accepts)}
        self._decode = _DECODERS[kinds.pop()] if len(kinds) == 1 else _decode_as_text
        # How each tensor of a plain request is named and packed; none if values have to be checked, or are of bytes.
        self._plain = [
            ((spec.name, spec.datatype, [1, *spec.shape]), struct.Struct(f"<{spec.elements}{CODES[spec.dtype]}").pack)
            for spec in inputs
            if self._signature is None and all(each.below is None and each.dtype != BYTES for each in inputs)
        ]
        # JSON parts in front of binary tensors: clients send the same one again and again.
        self._headers: BoundedCache[bytes | tuple[Any, ...], InferHeader] = BoundedCache(self._KEPT)

    def read(self, body: Buffer, header_length: int | None = None, slot: Slot | None = None) -> InferRequest:
        """Return what a request asks for.

        Args:
            body: the whole HTTP body.
            header_length: value of `Inference-Header-Content-Length`, or None for a body that is all JSON.
            slot: what the body lies in; binary tensors are then not copied.

        Raises:
            BadRequestError: malformed JSON, or tensors that do not fit the signature.
        """
        if header_length is None:
            given = self._decoded(body)
            return self._read_plain(given) or self._header(given).fill(_NOTHING)
        whole = memoryview(body)
        if not 0 <= header_length <= len(whole):
            raise BadRequestError(
                f"Inference-Header-Content-Length is {header_length}, but the body has {len(whole)} bytes. "
                "Send the length of the JSON part."
            )
        if not header_length:
            return self._raw(len(whole)).fill(whole, slot)
        text = whole[:header_length]
        if len(text) > self._LONGEST_KEPT_BYTES:
            header = self._header(self._decoded(text))
        else:
            key = bytes(text)
            header = self._cached(key, lambda: self._decoded(key))
        return header.fill(whole[header_length:], slot, header_length)

    def read_described(self, described: DescribedRequest, binary: Buffer, slot: Slot | None = None) -> InferRequest:
        """Return what a request over gRPC asks for; `binary`: its tensors one behind the other, at the beginning of
        `slot` where they lie in one.

        Raises:
            BadRequestError: the tensors do not fit the signature.
        """
        return self._cached(described.key, lambda: described.request).fill(memoryview(binary), slot)

    def _raw(self, size: int) -> InferHeader:
        """Return the request whose body is the one tensor of the model, in as many samples as it has room for."""
        if len(self.inputs) != 1:
            raise BadRequestError(
                f"a body without a JSON part holds one input; the model has {len(self.inputs)}. Send the length of the "
                "JSON part as Inference-Header-Content-Length."
            )
        spec = self.inputs[0]
        if spec.dtype == BYTES or self.is_sized:
            takes = "BYTES" if spec.dtype == BYTES else "tensors of several sizes"
            raise BadRequestError(
                f"a body without a JSON part holds numbers of one shape; input '{spec.name}' takes {takes}. Send the "
                "length of the JSON part as Inference-Header-Content-Length."
            )
        each = spec.sample_bytes(spec.dtype)
        count, rest = divmod(size, each or 1)
        if rest or not 1 <= count <= (1 if spec.axis is None else MAX_SAMPLES):
            raise BadRequestError(
                f"the body has {size} bytes; input '{spec.name}' takes {each} bytes of {spec.datatype} for each of "
                f"1 to {MAX_SAMPLES} samples."
            )
        return InferHeader("", [_Tensor(spec, "", range(size))], size, count, None, False, None)

    def _cached(self, key: bytes | tuple[Any, ...], read: Callable[[], RequestJson[Any]]) -> InferHeader:
        """Return a request that was read before; requests with an id of their own do not come again."""
        header = self._headers.get(key)
        if header is None:
            header = self._header(read())
            if not header.id:
                self._headers.add(key, header)
        return header

    def _read_plain(self, given: RequestJson[Any]) -> InferRequest | None:
        """Return a request that has only one sample's values, in flat lists of the signature's order and types. Most
        requests are like this. None for others, and for any with a fault."""
        if given.id or given.parameters or given.outputs is not None or len(given.inputs) != len(self.inputs):
            return None
        if not self._plain:
            return None
        parts = []
        for tensor, (said, pack) in zip(given.inputs, self._plain, strict=True):
            if (
                (tensor.name, tensor.datatype, tensor.shape) != said
                or tensor.parameters
                or type(tensor.data) is not list
            ):
                return None
            try:
                parts.append(InputPart(pack(*tensor.data)))
            except (struct.error, OverflowError):
                return None
        return InferRequest(PLAIN, [parts])

    def _header(self, given: RequestJson[Any]) -> InferHeader:
        parameters = given.parameters
        count, tensors, binary_bytes, sizes = self._tensors(given.inputs)
        header = InferHeader(str(given.id), tensors, binary_bytes, count, None, False, None, sizes=sizes)
        if parameters:
            header.yields, header.offline = priority_from(parameters)
            header.binary_output = bool(parameters.get("binary_data_output", False))
            header.slo_ms = slo_from(parameters)
        if given.outputs is not None:
            header.outputs = _requested(given.outputs, binary=header.binary_output)
        return header

    def _decoded(self, text: Buffer) -> RequestJson[Any]:
        try:
            if len(text) <= JSON_AT_ONCE_BYTES:
                try:
                    return self._decode(text)
                except msgspec.ValidationError:
                    pass  # nested values, or something wrong
            else:
                _check_size(text, _MOST_QUOTES + (2 * _MOST_JSON_VALUES if self.takes_bytes else 0))
            return _decode_as_text(text)
        except msgspec.ValidationError as error:
            raise BadRequestError(f"this is no Open Inference Protocol v2 request: {error}.") from None
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise BadRequestError(
                f"the body is not valid JSON: {error}. Send an Open Inference Protocol v2 request."
            ) from None

    def _tensors(self, given: list[TensorJson[Any]]) -> tuple[int, list[_Tensor], int, tuple[int, ...]]:
        """Return how many samples there are, every input's tensor, how many bytes of binary data there must be, and the
        sizes of a sample."""
        tensors: dict[str, _Tensor] = {}
        signature = self._signature
        counts: dict[str, int] = {}
        binary_bytes = 0
        for tensor in given:
            name = tensor.name
            spec = self._known.get(name)
            if spec is None:
                raise BadRequestError(f"unknown input '{name}'. The model's inputs: {', '.join(self._known)}.")
            if name in tensors:
                raise BadRequestError(f"input '{name}' is given twice.")
            dtype = spec.dtype_of(tensor.datatype)
            if signature is None:
                count = counts[name] = _batch_dimension(tensor.shape, spec)
            else:
                rows, shape = spec.sample_shape(tensor.shape)
                spec, count = replace(spec, shape=shape), 1 if rows is None else rows
                if rows is not None:
                    counts[name] = rows
            source = _source(tensor, spec, dtype, count, binary_bytes)
            tensors[name] = _Tensor(spec, "" if dtype == spec.dtype != BYTES else dtype, source)
            if isinstance(source, range):
                binary_bytes = source.stop
        if len(tensors) < len(self._known):
            missing = [name for name in self._known if name not in tensors]
            raise BadRequestError(f"missing input {', '.join(missing)}.")
        sizes: tuple[int, ...] = ()
        if signature is not None:
            try:
                sizes = signature.sizes_of([tensors[spec.name].spec.fixed_shape for spec in self.inputs])
            except ValueError as error:
                raise BadRequestError(str(error)) from None
        if len(tensors) == 1:
            return count, [tensors[name]], binary_bytes, sizes
        if len(set(counts.values())) > 1:
            raise BadRequestError(
                f"inputs disagree on the batch dimension: {counts}. Give all the same first dimension."
            )
        count = max(counts.values(), default=1 if tensors else 0)
        return count, [tensors[spec.name] for spec in self.inputs], binary_bytes, sizes


def _check_size(text: Buffer, most_quotes: int) -> None:
    """Refuse JSON that would take long to read, before reading it."""
    if len(text) > MOST_JSON_BYTES or count_byte(text, b",") > _MOST_JSON_VALUES:
        raise BadRequestError(JSON_TOO_LARGE)
    if count_byte(text, b'"') > most_quotes:
        raise BadRequestError("the JSON has more names than a request needs.")


def _sample_ends(spec: TensorSpec, data: Buffer, count: int) -> list[int]:
    """Return where each sample of an input of bytes ends.

    Raises:
        BadRequestError: the tensor has other elements than its shape says, or a sample is too long.
    """
    try:
        all_ends = element_ends(data, count * spec.elements)
    except ValueError as error:
        raise BadRequestError(f"input '{spec.name}': {error}.") from None
    ends = all_ends[spec.elements - 1 :: spec.elements] if spec.elements else [0] * count
    longest = max(map(operator.sub, ends, [0, *ends]))
    if longest > spec.most_bytes:
        raise BadRequestError(
            f"input '{spec.name}' has a sample of {longest} bytes, the lengths of its elements included; the model "
            f"takes {spec.most_bytes}. Send less."
        )
    return ends


def _samples(
    whole: Sequence[InputPart], specs: Sequence[TensorSpec], count: int, ends: Mapping[int, Sequence[int]]
) -> list[list[InputPart]]:
    """Cut every tensor into those of its samples; `ends`: where these end in tensors of bytes, by their places. Samples
    that do not lie one behind the other are copied, and a tensor without a batch dimension is one of each sample."""
    parts: list[list[InputPart]] = [[] for _ in range(count)]
    for at, (part, spec) in enumerate(zip(whole, specs, strict=True)):
        data = memoryview(part.data)
        if spec.axis is None:
            for mine in parts:
                mine.append(part)
            continue
        if spec.axis:
            before = math.prod(spec.fixed_shape[: spec.axis])
            rows = np.frombuffer(data, np.uint8).reshape(before, count, -1)
            for sample, mine in enumerate(parts):
                mine.append(InputPart(rows[:, sample].tobytes(), part.dtype))
            continue
        if at in ends:
            start = 0
            for mine, end in zip(parts, ends[at], strict=True):
                mine.append(InputPart(data[start:end], part.dtype, part.arena, part.offset + start))
                start = end
            continue
        size = data.nbytes // count
        for sample in range(count):
            start = sample * size
            parts[sample].append(InputPart(data[start : start + size], part.dtype, part.arena, part.offset + start))
    return parts


def slo_from(parameters: Mapping[str, Any]) -> float | None:
    """Return the time allowed in ms: parameter `slo_ms`, else Triton's `timeout` in microseconds, of which 0 is no
    limit; else None."""
    if "slo_ms" in parameters:
        return parse_slo(parameters["slo_ms"], "parameter slo_ms")
    if "timeout" in parameters:
        timeout_us = parse_slo(parameters["timeout"], "parameter timeout", 1000.0 * LONGEST_SLO_MS)
        return timeout_us / 1000.0 if timeout_us else None
    return None


def priority_from(parameters: Mapping[str, Any]) -> tuple[bool, bool]:
    """Return whether `priority` ranks a request below the others of its model, and whether it is offline. Of Triton's
    numbers 0 (none) and 1 (the highest) are the rank by the plan; values above 1 are lower.

    Raises:
        BadRequestError: it is neither a whole number of at least 0 nor "offline".
    """
    given = parameters.get("priority", 0)
    if given != OFFLINE and (type(given) is not int or given < 0):
        rule = "must be a whole number: 0 or 1, or above 1 to go behind others"
        raise BadRequestError(f"parameter priority {rule}; or '{OFFLINE}'.")
    return given != OFFLINE and given > 1, given == OFFLINE


def parse_slo(value: Any, where: str, most: float = LONGEST_SLO_MS) -> float:
    """Return a number of at most an hour; raises `BadRequestError` otherwise. Zero and less are allowed: expired."""
    try:
        number = float(parse_number(value) if isinstance(value, str) else value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number) or isinstance(value, bool) or number > most:
        raise BadRequestError(f"{where} is {short_repr(value)}. Give a number of at most {most:.0f}.")
    return number


def _source(tensor: TensorJson[Any], spec: TensorSpec, dtype: str, count: int, at: int) -> bytes | range:
    """Return one input's values, or where they lie; `at` is the end of the binary data of those before it."""
    parameters = tensor.parameters
    if parameters:
        _refuse_shared_memory(parameters, f"input '{spec.name}'")
        size = parameters.get("binary_data_size")
        if size is not None:
            if tensor.data is not msgspec.UNSET:
                raise BadRequestError(f"input '{spec.name}' has 'data' and binary data. Give one of them.")
            if dtype == BYTES and type(size) is int and size >= 0:
                return range(at, at + size)
            expected = "some" if dtype == BYTES else count * spec.sample_bytes(dtype)
            if type(size) is not int or size != expected:
                raise BadRequestError(
                    f"input '{spec.name}' announces {size!r} binary bytes; its shape needs {expected}."
                )
            return range(at, at + size)
    data = tensor.data
    if data is msgspec.UNSET:
        raise BadRequestError(f"input '{spec.name}' has neither 'data' nor binary data.")
    if dtype == _BFLOAT:
        raise BadRequestError(f"input '{spec.name}' is BF16, which is sent as binary data. Send it so, or FP32.")
    if dtype == BYTES:
        return pack_texts(data, spec, tensor.shape)
    try:
        if type(data) is not list:
            return pack_numbers(bytes(data), spec, dtype, tensor.shape)
        check_count(len(data), count * spec.elements, spec, tensor.shape)
        return struct.pack(f"<{len(data)}{CODES[dtype]}", *data)
    except msgspec.DecodeError:
        raise BadRequestError(f"the data of input '{spec.name}' is not all {PROTOCOL_NAMES[dtype]} values.") from None
    except (struct.error, OverflowError):
        raise BadRequestError(f"the data of input '{spec.name}' does not fit {PROTOCOL_NAMES[dtype]}.") from None


def _refuse_shared_memory(parameters: Mapping[str, Any], where: str) -> None:
    """Say that the protocol's shared memory extensions are not offered."""
    if "shared_memory_region" in parameters:
        raise BadRequestError(f"{where}: {NO_SHARED_MEMORY}")


def _batch_dimension(shape: list[int], spec: TensorSpec) -> int:
    """Return how many samples a shape holds: with or without the leading batch dimension."""
    if tuple(shape) == spec.shape and spec.shape:
        return 1
    if len(shape) != len(spec.shape) + 1 or tuple(shape[1:]) != spec.shape or not 1 <= shape[0] <= MAX_SAMPLES:
        expected = f"[n, {', '.join(map(str, spec.shape))}]" if spec.shape else "[n]"
        raise BadRequestError(
            f"input '{spec.name}' has shape {short_repr(shape)}; the model takes {expected} with n from 1 to "
            f"{MAX_SAMPLES}."
        )
    return shape[0]


# Readers of whole requests of models whose inputs are all of one kind.
_DECODERS: dict[str, Callable[[Buffer], RequestJson[Any]]] = {
    kind: msgspec.json.Decoder(RequestJson[values]).decode  # type: ignore[valid-type]
    for kind, values in VALUE_TYPES.items()
}
_decode_as_text: Callable[[Buffer], RequestJson[Any]] = msgspec.json.Decoder(RequestJson[msgspec.Raw]).decode
_NOTHING = memoryview(b"")
PLAIN = InferHeader("", [], 0, 1, None, False, None)  # one sample, and all outputs as JSON


def _check_range(spec: TensorSpec, part: InputPart) -> None:
    assert spec.below is not None
    values = np.frombuffer(part.data, dtype=part.dtype or spec.dtype)
    if values.size and not (int(values.min()) >= 0 and int(values.max()) < spec.below):
        raise BadRequestError(
            f"input '{spec.name}' has values outside 0 to {spec.below - 1}; the model knows no others."
        )


def _requested(given: list[OutputJson], *, binary: bool) -> list[RequestedOutput]:
    """Return the outputs that a client asks for; `binary`: the form of those for which it gives none."""
    outputs = []
    for output in given:
        options = output.parameters or {}
        _refuse_shared_memory(options, f"output '{output.name}'")
        classes = options.get("classification", 0)
        if type(classes) is not int or classes < 0:
            raise BadRequestError(f"output '{output.name}': classification must be a number of classes.")
        outputs.append(RequestedOutput(output.name, bool(options.get("binary_data", binary)), classes))
    return outputs


def check_outputs(requested: Sequence[RequestedOutput], outputs: Sequence[TensorSpec]) -> None:
    """Raise `BadRequestError` when a requested output does not exist."""
    known = {spec.name: spec for spec in outputs}
    for output in requested:
        if output.name not in known:
            raise BadRequestError(f"unknown output '{output.name}'. The model's outputs: {', '.join(known)}.")
        if output.classification and known[output.name].dtype == BYTES:
            raise BadRequestError(f"output '{output.name}' is of BYTES, which have no classes. Ask for it as it is.")
