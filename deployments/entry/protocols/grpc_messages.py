"""The Open Inference Protocol's gRPC messages: what a request asks for, and the message of an answer.

The service that answers HTTP also answers calls. So admission, keys, deadlines, limits, traces and figures are the same
by construction. Raw tensors never become a protobuf message. This module does no I/O and uses nothing of `grpc` itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from importlib.resources import files
from typing import Any, NamedTuple
from urllib.parse import quote

import msgspec
import numpy as np
import orjson
from google.protobuf import descriptor_pb2, descriptor_pool, json_format, message_factory
from google.protobuf.message import DecodeError

from tenuto.deployments.entry.http.bounded_cache import BoundedCache
from tenuto.deployments.entry.http.exchange import Head, HttpError
from tenuto.deployments.entry.protocols.oip_answers import bytes_tensor
from tenuto.deployments.entry.protocols.oip_requests import (
    DescribedRequest,
    OutputJson,
    RequestJson,
    TensorJson,
    slo_from,
)
from tenuto.deployments.wire.tensors import DATATYPES, Buffer, pack_elements
from tenuto.profiles.networks.inputs import fitted

Message = Any  # a class made at run time; protobuf has no type for its fields

MOST_DESCRIBED_BYTES = 1 << 18  # limit: of a message beside raw tensors: protobuf reads it at once, 10 ms or less
_MOST_FIELDS = 1024  # limit: of a message, and of parameters of each of its parts
_LONGEST_NAME = 1024  # limit: characters of a model and its version: the URL that is made of them is kept
_RAW_INPUTS = 7  # format: the field number of raw_input_contents
_LENGTH_DELIMITED = 2  # format: the wire type of strings, bytes and messages
# format: of Triton's backend for vLLM; whether an answer is streamed, the call says.
_TEXT_INPUTS = ("text_input", "sampling_parameters", "stream", "exclude_input_in_output")
_NO_MESSAGE = "this is no ModelInferRequest. See open_inference.proto."
_CONTENTS = {
    "BOOL": "bool_contents",
    **dict.fromkeys(("INT8", "INT16", "INT32"), "int_contents"),
    "INT64": "int64_contents",
    **dict.fromkeys(("UINT8", "UINT16", "UINT32"), "uint_contents"),
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    "BYTES": "bytes_contents",
}
_PARAMETERS: dict[type, str] = {bool: "bool_param", int: "int64_param", float: "double_param"}

# A pool of its own: a process may hold another reading of the same protocol, such as Triton's client.
POOL = descriptor_pool.DescriptorPool()
for _file in descriptor_pb2.FileDescriptorSet.FromString(
    files("tenuto.deployments").joinpath("data/open_inference.binpb").read_bytes()
).file:
    POOL.Add(_file)
SERVICE, HEALTH = "inference.GRPCInferenceService", "grpc.health.v1.Health"


def message(name: str) -> Message:
    """Return the class of a message by its full name."""
    return message_factory.GetMessageClass(POOL.FindMessageTypeByName(name))


InferRequest = message("inference.ModelInferRequest")
InferResponse = message("inference.ModelInferResponse")


class InferMessage(NamedTuple):
    """What a `ModelInferRequest` asks of the model at `path`. `described`: it brings tensors, which are raw or in
    `packed`. Without it, `body` is a picture, a text, or a request of the generate extension (`generates`). `slo_ms`:
    the time that the parameters of a picture or text allow. `problem`: what is wrong with it, which says nothing of the
    model."""

    path: str
    id: str
    described: DescribedRequest | None
    packed: bytes | None = None
    body: bytes = b""
    generates: bool = False
    slo_ms: float | None = None
    problem: HttpError | None = None


class InferReader:
    """Reads `ModelInferRequest`. Protobuf reads the description of the tensors, and not the tensors. A description that
    clients send again and again is read once, unless what it means depends on the model."""

    _KEPT = 256  # limit: descriptions
    _LONGEST_KEPT_BYTES = 2048  # limit: of one

    def __init__(self, takes_bytes: Callable[[str, str], bool] = lambda _model, _version: False) -> None:
        """`takes_bytes`: whether a model, or a version of it, has inputs of bytes. BYTES for any other model is a
        picture, a text or a generation."""
        self._takes_bytes = takes_bytes
        self._known: BoundedCache[tuple[Any, ...], InferMessage] = BoundedCache(self._KEPT)

    def read(self, data: memoryview) -> tuple[InferMessage, Buffer]:
        """Return what is asked for, and the tensors one behind the other. Several tensors are moved to the front of
        `data`; a single one stays where it lies.

        Raises:
            HttpError: 400 when this is no such message; 413 when the description is too long.
        """
        described, raws = _split(data)
        key = described, *[end - begin for begin, end in raws]
        if (parsed := self._known.get(key)) is None:
            parsed = _asked(key, data, raws, self._takes_bytes)
            if (
                parsed.described is not None
                and len(described) <= self._LONGEST_KEPT_BYTES
                and not parsed.id
                and all(given.datatype != "BYTES" for given in parsed.described.request.inputs)
            ):
                self._known.add(key, parsed)
        if parsed.packed is not None:
            return parsed, parsed.packed
        return parsed, _moved(data, raws)


def _split(data: memoryview) -> tuple[bytes, list[tuple[int, int]]]:
    """Return a message without its raw tensors, and where these lie. Protobuf reads only what is left, which must be
    short."""
    fields, at, size, described, raws = 0, 0, len(data), [], []
    try:
        while at < size:
            begin, fields = at, fields + 1
            key, at = _varint(data, at)
            length, at = _varint(data, at)
            at += length
            if key & 7 != _LENGTH_DELIMITED or at > size:
                raise HttpError(400, _NO_MESSAGE)
            if key >> 3 == _RAW_INPUTS:
                raws.append((at - length, at))
            else:
                described.append(data[begin:at])
            if fields > _MOST_FIELDS:
                break
    except IndexError:
        raise HttpError(400, _NO_MESSAGE) from None
    if fields > _MOST_FIELDS or sum(map(len, described)) > MOST_DESCRIBED_BYTES:
        limits = f"{MOST_DESCRIBED_BYTES >> 10} KiB or {_MOST_FIELDS} fields"
        raise HttpError(413, f"the message beside raw_input_contents exceeds {limits}. Send tensors in these.")
    return b"".join(described), raws


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    """Return a number of protobuf's wire format, and where it ends."""
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:  # format: of protobuf
            return value, at
        shift += 7
        if shift > 63:  # format: of protobuf
            raise IndexError


def _moved(data: memoryview, raws: Sequence[tuple[int, int]]) -> memoryview:
    """Move raw tensors to the front of their memory, one behind the other, and return them."""
    to = 0
    for begin, end in raws:
        data[to : to + end - begin] = data[begin:end]
        to += end - begin
    return data[:to]


def _asked(
    key: tuple[Any, ...], data: memoryview, raws: Sequence[tuple[int, int]], takes_bytes: Callable[[str, str], bool]
) -> InferMessage:
    """Return what a message asks for, when the same was not read before. Raises `HttpError` 400 for one that names no
    model."""
    try:
        request = InferRequest.FromString(key[0])
    except DecodeError:
        raise HttpError(400, _NO_MESSAGE) from None
    parsed = InferMessage(_path(request.model_name, request.model_version), request.id, None)
    is_text = any(given.datatype == "BYTES" for given in request.inputs)
    is_text = is_text and not takes_bytes(request.model_name, request.model_version)
    try:
        if is_text:
            return _texts(parsed, request, [bytes(data[begin:end]) for begin, end in raws])
        return _tensors(parsed, request, key, len(raws))
    except HttpError as error:  # whether the model is known is judged first
        generates = is_text and any(given.name == "text_input" for given in request.inputs)
        return parsed._replace(generates=generates, problem=error.without_frames())


def _tensors(parsed: InferMessage, message: Message, key: tuple[Any, ...], raws: int) -> InferMessage:
    """Return what a request of tensors asks for. Raises `HttpError` 400."""
    parameters = _plain(message.parameters)
    if raws and raws != len(message.inputs):
        raise HttpError(400, f"{len(message.inputs)} inputs and {raws} raw_input_contents. Give one of each.")
    twice = next((given.name for given in message.inputs if raws and given.contents.ListFields()), None)
    if twice is not None:
        raise HttpError(400, f"input '{twice}' has contents and raw_input_contents. Give one of them.")
    packed = None if raws else [_packed(given) for given in message.inputs]
    sizes = key[1:] if packed is None else map(len, packed)
    inputs = [
        TensorJson[Any](
            given.name,
            list(given.shape),
            given.datatype,
            parameters={**_plain(given.parameters), "binary_data_size": size},
        )
        for given, size in zip(message.inputs, sizes, strict=True)
    ]
    outputs = [OutputJson(each.name, {**_plain(each.parameters), "binary_data": True}) for each in message.outputs]
    request = RequestJson[Any](inputs, message.id, {**parameters, "binary_data_output": True}, outputs or None)
    described = DescribedRequest(key, request)
    return parsed._replace(described=described, packed=None if packed is None else b"".join(packed))


def _path(model: str, version: str) -> str:
    """Return the part of a URL that names a model and its version. Raises `HttpError` 400."""
    if len(model) + len(version) > _LONGEST_NAME:
        raise HttpError(400, f"a model and its version have at most {_LONGEST_NAME} characters.")
    return quote(model, safe="") + (f"/versions/{quote(version, safe='')}" if version else "")


def _plain(given: Mapping[str, Message]) -> dict[str, Any]:
    """Return parameters as values of JSON."""
    if len(given) > _MOST_FIELDS:
        raise HttpError(400, f"{len(given)} parameters are more than {_MOST_FIELDS}.")
    return {key: getattr(value, value.WhichOneof("parameter_choice") or "string_param") for key, value in given.items()}


def _texts(parsed: InferMessage, message: Message, raws: Sequence[bytes]) -> InferMessage:
    """Return what a request of BYTES asks for: a picture, a text, or a generation as Triton's backend for vLLM takes
    it. Raises `HttpError` 400."""
    parameters, texts = _plain(message.parameters), {}
    for at, given in enumerate(message.inputs):
        values = list(given.contents.bytes_contents) or list(given.contents.bool_contents)
        if not values and at < len(raws):
            raw = raws[at]
            framed = given.datatype == "BYTES" and int.from_bytes(raw[:4], "little") == len(raw) - 4
            values = [raw[4:]] if framed else [raw == b"\1"] if given.datatype == "BOOL" else []
        if len(values) != 1 or (raws and len(raws) != len(message.inputs)):
            raise HttpError(400, "a BYTES input holds one picture or text, in bytes_contents or raw_input_contents.")
        texts[given.name] = values[0]
    if "text_input" not in texts:
        if len(texts) > 1:
            raise HttpError(400, "a picture or a text is one input of BYTES. Leave the others out.")
        return parsed._replace(body=next(iter(texts.values())), slo_ms=slo_from(parameters))
    unknown = next((name for name in texts if name not in _TEXT_INPUTS), None)
    if unknown is not None:
        raise HttpError(400, f"'{unknown}' is no input of a generation ({', '.join(_TEXT_INPUTS)}). Leave it out.")
    if texts.get("exclude_input_in_output", True) is not True:
        raise HttpError(400, "'exclude_input_in_output' can only be true: an answer never has the prompt.")
    for name, value in parameters.items():  # JSON would have null
        if isinstance(value, float) and not math.isfinite(value):
            raise HttpError(400, f"'parameters.{name}' is {value}. Give a finite number, or leave it out.")
    try:
        options = {**orjson.loads(texts.get("sampling_parameters", b"{}")), **parameters}
        body = orjson.dumps({"text_input": texts["text_input"].decode(), "id": parsed.id, "parameters": options})
    except (orjson.JSONDecodeError, TypeError, AttributeError, UnicodeDecodeError):
        raise HttpError(400, "text_input is a text in UTF-8, and sampling_parameters a JSON object.") from None
    return parsed._replace(body=body, generates=True)


def _packed(given: Message) -> bytes:
    """Return an input's typed values as binary data."""
    field = _CONTENTS.get(given.datatype)
    if field is None:
        raise HttpError(400, f"input '{given.name}' of {given.datatype or 'no datatype'} needs raw_input_contents.")
    if [name.name for name, _ in given.contents.ListFields()] not in ([field], []):
        raise HttpError(400, f"input '{given.name}' is {given.datatype}: give its values in {field} alone.")
    if given.datatype == "BYTES":
        return pack_elements(given.contents.bytes_contents)
    dtype = np.dtype(DATATYPES[given.datatype])
    wide = {"i": np.int64, "u": np.uint64}.get(dtype.kind, dtype)  # of fields: 32 or 64 bits
    try:
        return fitted(np.array(getattr(given.contents, field), wide), dtype.name).tobytes()
    except ValueError as error:
        raise HttpError(400, f"input '{given.name}' has values that do not fit {given.datatype}: {error}.") from None


class _Output(msgspec.Struct):
    name: str
    datatype: str
    shape: list[int]
    parameters: dict[str, int]


class _Class(msgspec.Struct):
    label: str
    score: float


class _Answer(msgspec.Struct):
    """The JSON of an answer of any kind."""

    model_name: str
    model_version: str
    parameters: dict[str, bool | int | float | str | dict[str, int]] = {}
    outputs: list[_Output] = []
    predictions: list[_Class] | None = None
    prediction: msgspec.Raw | None = None  # of the model's own hooks: any JSON
    text_output: str | None = None  # of a generation, whole or in part
    token_ids: list[int] | None = None  # of one without a tokenizer


_read_answer: Callable[[Buffer], _Answer] = msgspec.json.Decoder(_Answer).decode


def to_answer(id: str, payload: Sequence[Buffer]) -> Message:
    """Return the `ModelInferResponse` of an answer, which is JSON and the tensors that the JSON describes."""
    read = _read_answer(payload[0])
    answer = InferResponse(model_name=read.model_name, model_version=read.model_version, id=id)
    for key, value in read.parameters.items():
        if isinstance(value, dict):  # the usage of a generation
            value = orjson.dumps(value).decode()
        setattr(answer.parameters[key], _PARAMETERS.get(type(value), "string_param"), value)
    rest = payload[1] if len(payload) == 2 else b"".join(payload[1:])
    at = 0
    for output in read.outputs:
        end = at + output.parameters["binary_data_size"]
        _add(answer, output.name, output.datatype, output.shape, bytes(rest[at:end]))
        at = end
    if read.predictions is not None:
        count = len(read.predictions)
        _add(answer, "label", "BYTES", [count], bytes_tensor(each.label for each in read.predictions))
        _add(
            answer, "score", "FP32", [count], np.array([each.score for each in read.predictions], np.float32).tobytes()
        )
    if read.prediction is not None:
        _add(answer, "prediction", "BYTES", [1], bytes_tensor([bytes(read.prediction).decode()]))
    if read.text_output is not None:
        _add(answer, "text_output", "BYTES", [1], bytes_tensor([read.text_output]))
        if read.token_ids is not None:
            tokens = np.array(read.token_ids, np.int32)
            _add(answer, "token_ids", "INT32", [len(tokens)], tokens.tobytes())
        answer.parameters["triton_final_response"].bool_param = "finish_reason" in read.parameters
    return answer


def _add(answer: Message, name: str, datatype: str, shape: Sequence[int], values: bytes) -> None:
    answer.outputs.add(name=name, datatype=datatype, shape=shape)
    answer.raw_output_contents.append(values)


class ManagementRoute(NamedTuple):
    """A call that carries no load: the path of HTTP that answers it, its messages, and the field of its response that
    holds the JSON ("": the whole response)."""

    method: bytes
    path: str
    answer: str
    under: str = ""

    @property
    def request(self) -> str:
        """The name of the message that asks."""
        return self.answer.replace("Response", "Request")


MANAGEMENT = {
    "ServerLive": ManagementRoute(b"GET", "/v2/health/live", "ServerLiveResponse"),
    "ServerReady": ManagementRoute(b"GET", "/v2/health/ready", "ServerReadyResponse"),
    "ModelReady": ManagementRoute(b"GET", "/v2/models{model}/ready", "ModelReadyResponse"),
    "ServerMetadata": ManagementRoute(b"GET", "/v2", "ServerMetadataResponse"),
    "ModelMetadata": ManagementRoute(b"GET", "/v2/models{model}", "ModelMetadataResponse"),
    "ModelConfig": ManagementRoute(b"GET", "/v2/models{model}/config", "ModelConfigResponse", "config"),
    "ModelStatistics": ManagementRoute(b"GET", "/v2/models{model}/stats", "ModelStatisticsResponse"),
    "RepositoryIndex": ManagementRoute(b"POST", "/v2/repository/index", "RepositoryIndexResponse", "models"),
}


def management_head(call: ManagementRoute, request: Message, headers: Mapping[bytes, bytes]) -> Head:
    """Return the head of the HTTP request that asks for the same as this call. Raises `HttpError`."""
    model = ""
    if "{model}" in call.path:
        is_of_all = call.path.endswith("/stats") and not request.version
        if not request.name and not is_of_all:  # the path would name another model
            raise HttpError(400, "the request names no model. Give its name.")
        model = f"/{_path(request.name, request.version)}" if request.name else ""
    return Head(call.method, call.path.replace("{model}", model).encode(), dict(headers))


def management_answer(call: ManagementRoute, payload: bytes) -> Message:
    """Return the response of a call that carries no load."""
    content = orjson.loads(payload)
    answer = message(f"inference.{call.answer}")()
    json_format.ParseDict({call.under: content} if call.under else content, answer, True, POOL)
    return answer
