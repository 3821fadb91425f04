"""The Open Inference Protocol's gRPC messages, and the HTTP requests and responses that mean the same.

Every call becomes the HTTP request that asks for the same (`tenuto.deployments.entry.service` answers both), so that
admission, keys, deadlines, limits, traces and figures are the same by construction. Tensors travel as binary data on
either side. Pure functions of messages and bytes: no I/O, and nothing of `grpc` itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib.resources import files
from typing import Any, NamedTuple
from urllib.parse import quote

import numpy as np
import orjson
from google.protobuf import descriptor_pb2, descriptor_pool, json_format, message_factory
from google.protobuf.message import DecodeError

from tenuto.deployments.entry.exchange import Head, HttpError
from tenuto.deployments.entry.oip import DATATYPES, BadRequestError, bytes_tensor, slo_from

Message = Any  # a class made at run time; protobuf has no type for its fields

MOST_MESSAGE_BYTES = 16 << 20  # limit: gRPC's library copies a message on the loop, some ms of it
MOST_DESCRIBED_BYTES = 1 << 18  # limit: of a message beside raw tensors: protobuf reads it at once, 10 ms or less
_MOST_FIELDS = 1024  # limit: of a message, and of parameters of each of its parts
_RAW_INPUTS = 7  # format: the field number of raw_input_contents
_LENGTH_DELIMITED = 2  # format: the wire type of strings, bytes and messages
# What of a call's metadata goes on as a header; whatever else is there says nothing to this server.
_HEADERS = ("authorization", "x-api-key", "x-slo-ms", "x-request-start", "traceparent")
_CONTENTS = {
    "BOOL": "bool_contents",
    "INT8": "int_contents",
    "INT16": "int_contents",
    "INT32": "int_contents",
    "INT64": "int64_contents",
    "UINT8": "uint_contents",
    "UINT16": "uint_contents",
    "UINT32": "uint_contents",
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
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


class HttpRequest(NamedTuple):
    """What is asked, as HTTP says it."""

    head: Head
    body: bytes


def headers_of(metadata: Iterable[tuple[str, str | bytes]]) -> dict[bytes, bytes]:
    """Return the headers that a call's metadata says."""
    found = {}
    for key, value in metadata:
        if key in _HEADERS:
            found[key.encode()] = value if isinstance(value, bytes) else value.encode()
    return found


def infer_request(data: bytes) -> Message:
    """Return a `ModelInferRequest`, which is looked at first: what is read at once must be short.

    Raises:
        HttpError: 400 for what is no such message, 413 for one whose description is too long.
    """
    described, fields, at = len(data), 0, 0
    try:
        while at < len(data):
            fields += 1
            key, at = _varint(data, at)
            if key & 7 != _LENGTH_DELIMITED:
                raise ValueError
            length, at = _varint(data, at)
            at += length
            if key >> 3 == _RAW_INPUTS:
                described -= length
            if fields > _MOST_FIELDS:
                break
        if fields > _MOST_FIELDS or described > MOST_DESCRIBED_BYTES:
            limits = f"{MOST_DESCRIBED_BYTES >> 10} KiB or {_MOST_FIELDS} fields"
            raise HttpError(413, f"the message beside raw_input_contents exceeds {limits}. Send tensors in these.")
        return InferRequest.FromString(data)
    except (ValueError, IndexError, DecodeError):
        raise HttpError(400, "this is no ModelInferRequest. See open_inference.proto.") from None


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Return a number of protobuf's wire format, and where it ends."""
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
        if shift > 63:
            raise ValueError


def to_http(asked: Message, headers: Mapping[bytes, bytes], remaining_ms: float | None, slo_ms: float) -> HttpRequest:
    """Return the HTTP request of a `ModelInferRequest`.

    Args:
        asked: the message.
        headers: of the call.
        remaining_ms: of the time that the client waits (`grpc-timeout`); None: as long as it takes.
        slo_ms: that holds where the request names no other.

    Raises:
        HttpError: 400, it contradicts itself.
    """
    parameters = _plain(asked.parameters)
    said = dict(headers)
    if asked.id:
        said[b"x-request-id"] = asked.id.encode()
    if remaining_ms is not None and b"x-slo-ms" not in said:
        try:
            allowed = slo_from(parameters)
        except BadRequestError as error:
            raise HttpError(400, str(error)) from None
        if remaining_ms < (slo_ms if allowed is None else allowed):
            said[b"x-slo-ms"] = b"%.3f" % remaining_ms
    name = quote(asked.model_name, safe="")
    if asked.model_version:
        name += f"/versions/{quote(asked.model_version, safe='')}"
    if [given.datatype for given in asked.inputs] == ["BYTES"]:
        return HttpRequest(Head(b"POST", b"/predict/" + name.encode(), said), _one_value(asked))
    raw = list(asked.raw_input_contents)
    if raw and len(raw) != len(asked.inputs):
        raise HttpError(400, f"{len(asked.inputs)} inputs and {len(raw)} raw_input_contents. Give one of each.")
    binary = raw or [_packed(given) for given in asked.inputs]
    inputs = [
        {
            "name": given.name,
            "datatype": given.datatype,
            "shape": list(given.shape),
            "parameters": {**_plain(given.parameters), "binary_data_size": len(values)},
        }
        for given, values in zip(asked.inputs, binary, strict=True)
    ]
    document = {"inputs": inputs, "parameters": {**parameters, "binary_data_output": True}}
    if asked.outputs:
        document["outputs"] = [
            {"name": each.name, "parameters": {**_plain(each.parameters), "binary_data": True}}
            for each in asked.outputs
        ]
    text = orjson.dumps(document)
    said[b"inference-header-content-length"] = b"%d" % len(text)
    body = b"".join([text, *binary])
    return HttpRequest(Head(b"POST", f"/v2/models/{name}/infer".encode(), said, length=len(body)), body)


def _plain(given: Mapping[str, Message]) -> dict[str, Any]:
    """Return parameters as JSON has them."""
    if len(given) > _MOST_FIELDS:
        raise HttpError(400, f"{len(given)} parameters are more than {_MOST_FIELDS}.")
    return {key: getattr(value, value.WhichOneof("parameter_choice") or "string_param") for key, value in given.items()}


def _one_value(asked: Message) -> Any:
    """Return the picture or the text of a request whose one input is one BYTES value."""
    raw, contents = asked.raw_input_contents, asked.inputs[0].contents.bytes_contents
    if len(raw) == 1 and not contents and int.from_bytes(raw[0][:4], "little") == len(raw[0]) - 4:
        return raw[0][4:]
    if len(contents) != 1 or raw:
        raise HttpError(400, "a BYTES input holds one picture or text, in bytes_contents or raw_input_contents.")
    return contents[0]


def _packed(given: Message) -> bytes:
    """Return an input's typed values as binary data."""
    field = _CONTENTS.get(given.datatype)
    if field is None:
        raise HttpError(400, f"input '{given.name}' of {given.datatype or 'no datatype'} needs raw_input_contents.")
    if [name.name for name, _ in given.contents.ListFields()] not in ([field], []):
        raise HttpError(400, f"input '{given.name}' is {given.datatype}: give its values in {field} alone.")
    dtype = np.dtype(DATATYPES[given.datatype])
    values = np.array(getattr(given.contents, field), dtype=None if dtype.kind == "f" else np.int64)
    if dtype.kind in "iu" and dtype.itemsize < values.dtype.itemsize and len(values):
        known = np.iinfo(dtype)
        if values.min() < known.min or values.max() > known.max:
            raise HttpError(400, f"input '{given.name}' has values that do not fit {given.datatype}.")
    return values.astype(dtype).tobytes()


def to_answer(asked: Message, lines: bytes, payload: bytes) -> Message:
    """Return the `ModelInferResponse` of a request that was answered."""
    _, has_binary, length = lines.partition(b"inference-header-content-length: ")
    text_bytes = int(length.partition(b"\r")[0]) if has_binary else len(payload)
    document, rest = orjson.loads(payload[:text_bytes]), memoryview(payload)[text_bytes:]
    answer = InferResponse(
        model_name=document["model_name"],
        model_version=document["model_version"],
        id=asked.id,
        parameters={
            key: {_PARAMETERS.get(type(value), "string_param"): value} for key, value in document["parameters"].items()
        },
    )
    if "predictions" in document:
        found = document["predictions"]
        labels = bytes_tensor(each["label"] for each in found)
        scores = np.array([each["score"] for each in found], np.float32).tobytes()
        for name, datatype, values in (("label", "BYTES", labels), ("score", "FP32", scores)):
            answer.outputs.add(name=name, datatype=datatype, shape=[len(found)])
            answer.raw_output_contents.append(values)
    if "prediction" in document:  # of the model's own hooks: any JSON
        answer.outputs.add(name="prediction", datatype="BYTES", shape=[1])
        answer.raw_output_contents.append(bytes_tensor([orjson.dumps(document["prediction"]).decode()]))
    for output in document.get("outputs", ()):
        size = output["parameters"]["binary_data_size"]
        answer.outputs.add(name=output["name"], datatype=output["datatype"], shape=output["shape"])
        answer.raw_output_contents.append(bytes(rest[:size]))
        rest = rest[size:]
    return answer


class Cold(NamedTuple):
    """A call that carries no load: the route that answers it, and what of its response holds the JSON ("": all)."""

    method: bytes
    route: str
    answer: str
    under: str = ""


COLD = {
    "ServerLive": Cold(b"GET", "/v2/health/live", "ServerLiveResponse"),
    "ServerReady": Cold(b"GET", "/v2/health/ready", "ServerReadyResponse"),
    "ModelReady": Cold(b"GET", "/v2/models{model}/ready", "ModelReadyResponse"),
    "ServerMetadata": Cold(b"GET", "/v2", "ServerMetadataResponse"),
    "ModelMetadata": Cold(b"GET", "/v2/models{model}", "ModelMetadataResponse"),
    "ModelConfig": Cold(b"GET", "/v2/models{model}/config", "ModelConfigResponse", "config"),
    "ModelStatistics": Cold(b"GET", "/v2/models{model}/stats", "ModelStatisticsResponse"),
    "RepositoryIndex": Cold(b"POST", "/v2/repository/index", "RepositoryIndexResponse", "models"),
}


def cold_head(call: Cold, asked: Message, headers: Mapping[bytes, bytes]) -> Head:
    """Return the head of the HTTP request that asks for the same as a call that carries no load."""
    model = ""
    if "{model}" in call.route:
        model = f"/{quote(asked.name, safe='')}" if asked.name else ""
        model += f"/versions/{quote(asked.version, safe='')}" if asked.version else ""
    return Head(call.method, call.route.replace("{model}", model).encode(), dict(headers))


def cold_answer(call: Cold, payload: bytes) -> Message:
    """Return the response of a call that carries no load."""
    found = orjson.loads(payload)
    answer = message(f"inference.{call.answer}")()
    json_format.ParseDict({call.under: found} if call.under else found, answer, True, POOL)
    return answer
