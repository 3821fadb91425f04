"""What the protocols say in words of their own, asked over the sockets: methods, encodings, raw bodies, compressed
messages, and which of two faults is told."""

from __future__ import annotations

import asyncio
import gzip
import struct
import zlib
from collections.abc import AsyncIterator
from typing import Any

import httpx
import numpy as np
import pytest

from tests.instruments.asking import http_client
from tests.instruments.live import PATIENCE_S
from tests.instruments.served_grpc import Served, served

__all__ = ["served"]  # the fixture

grpc = pytest.importorskip("grpc")
messages = pytest.importorskip("tenuto.deployments.entry.protocols.grpc_messages")

BODY = b'{"inputs":[{"name":"x","shape":[1,2],"datatype":"FP32","data":[1,2]}]}'
INFER = "/inference.GRPCInferenceService/ModelInfer"


@pytest.fixture
async def client(served: Served) -> AsyncIterator[httpx.AsyncClient]:
    async with http_client(served.port) as made:
        yield made


async def test_head_is_answered_wherever_get_is_and_as_get_is(client: httpx.AsyncClient) -> None:
    paths = (await client.get("/openapi.json")).json()["paths"]
    gets = [path.replace("{model}", "m") for path, methods in paths.items() if "get" in methods]
    assert len(gets) > 8
    for path in [*gets, "/metrics", "/v2/models/nobody", "/nowhere"]:
        got, head = await client.get(path), await client.head(path)
        assert (head.status_code, head.content) == (got.status_code, b""), path
        assert head.headers["content-type"] == got.headers["content-type"]


@pytest.mark.parametrize(
    "path", ["/v2/models/m/infer", "/v2/models/m/versions/1/infer", "/predict/m", "/v2/models/m/generate"]
)
async def test_paths_that_take_post_alone_say_so(client: httpx.AsyncClient, path: str) -> None:
    for method in ("GET", "HEAD", "PUT", "DELETE"):
        answer = await client.request(method, path)
        assert (answer.status_code, answer.headers["allow"]) == (405, "POST"), method


@pytest.mark.parametrize(
    ("name", "made"),
    [
        ("gzip", gzip.compress),
        ("GZIP", gzip.compress),
        ("x-gzip", gzip.compress),
        ("X-GZip", gzip.compress),
        ("Deflate", zlib.compress),
        ("Identity", bytes),
        ("", bytes),
    ],
)
async def test_names_of_encodings_have_no_case(client: httpx.AsyncClient, name: str, made: Any) -> None:
    answer = await client.post("/v2/models/m/infer", content=made(BODY), headers={"content-encoding": name})
    assert answer.json()["outputs"][0]["data"] == [2.0, 4.0]


async def test_a_body_without_a_json_part_is_the_one_tensor_of_the_model(client: httpx.AsyncClient) -> None:
    for samples in (1, 5, 3000):
        values = np.arange(2 * samples, dtype=np.float32)
        answer = await client.post(
            "/v2/models/m/infer", content=values.tobytes(), headers={"inference-header-content-length": "0"}
        )
        if samples > 1024:
            assert (answer.status_code, "1 to 1024 samples" in answer.json()["error"]) == (400, True)
        else:
            assert answer.json()["outputs"][0]["shape"] == [samples, 2]
            assert answer.json()["outputs"][0]["data"] == (2 * values).tolist()


async def test_a_timeout_of_zero_is_no_limit(client: httpx.AsyncClient) -> None:
    for parameters, status in ((b'{"timeout":0}', 200), (b'{"slo_ms":0}', 504), (b'{"timeout":1}', 504)):
        answer = await client.post("/v2/models/m/infer", content=BODY[:-1] + b',"parameters":' + parameters + b"}")
        assert answer.status_code == status, parameters


@pytest.mark.parametrize("flag", [0, 1])
@pytest.mark.parametrize("encoding", ["gzip", "identity", "snappy"])
async def test_compressed_messages_are_read_and_what_is_read_is_said(served: Served, encoding: str, flag: int) -> None:
    asked = messages.InferRequest(model_name="m")
    asked.inputs.add(name="x", datatype="FP32", shape=[1, 2]).contents.fp32_contents.extend([1, 2])
    data = asked.SerializeToString()
    code, accepted, answer = await raw_call(served, gzip.compress(data) if flag else data, encoding, flag)
    wanted = {("snappy", 0): 12, ("snappy", 1): 12, ("identity", 1): 3}.get((encoding, flag), 0)
    assert (code, accepted) == (wanted, "identity,gzip")
    if not wanted:
        assert np.frombuffer(answer.raw_output_contents[0], np.float32).tolist() == [2.0, 4.0]


async def test_what_inflates_to_too_much_is_refused_and_leaves_nothing(served: Served) -> None:
    bomb = gzip.compress(bytes(64 << 20))
    assert (await raw_call(served, bomb, "gzip", 1))[0] == 8
    assert (await raw_call(served, b"no gzip", "gzip", 1))[0] == 3
    assert served.entry.server.status().unfinished_bytes == 0


async def raw_call(served: Served, data: bytes, encoding: str, flag: int) -> tuple[int, str, Any]:
    """Send a message with a flag of one's own; returns code, accepted encodings and the answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", served.grpc_port)
    found = await asyncio.wait_for(exchange_frames(reader, writer, data, encoding, flag), PATIENCE_S)
    writer.close()
    return found


async def exchange_frames(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, data: bytes, encoding: str, flag: int
) -> tuple[int, str, Any]:
    hpack = pytest.importorskip("hpack")
    headers = hpack.Encoder().encode(
        [
            (":method", "POST"),
            (":scheme", "http"),
            (":path", INFER),
            (":authority", "localhost"),
            ("te", "trailers"),
            ("content-type", "application/grpc"),
            ("grpc-encoding", encoding),
        ]
    )
    framed = struct.pack(">BL", flag, len(data)) + data
    writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(4, 0, 0, b"") + frame(1, 4, 1, headers))
    for at in range(0, len(framed), 1 << 14):
        writer.write(frame(0, int(at + (1 << 14) >= len(framed)), 1, framed[at : at + (1 << 14)]))
    decoder, said, body = hpack.Decoder(), {}, b""
    while "grpc-status" not in said:
        size, kind, _, _ = struct.unpack(">I", b"\0" + await reader.readexactly(3)) + tuple(
            struct.unpack(">BBL", await reader.readexactly(6))
        )
        payload = await reader.readexactly(size)
        if kind == 1:
            said |= dict(decoder.decode(payload))
        elif kind == 0:
            body += payload
    answer = messages.InferResponse.FromString(body[5:]) if body else None
    return int(said["grpc-status"]), said["grpc-accept-encoding"], answer


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBL", kind, flags, stream) + payload


def faulty(kind: str) -> Any:
    """A message whose inputs are wrong, in one of the ways there are."""
    asked = messages.InferRequest(model_name="m")
    given = asked.inputs.add(name="x", shape=[1, 2], datatype="BYTES" if "BYTES" in kind else "FP32")
    if kind == "no BYTES":
        pass
    elif kind == "two BYTES":
        given.contents.bytes_contents.extend([b"a", b"b"])
    elif kind == "BYTES not JSON":
        given.name = "text_input"
        given.contents.bytes_contents.append(b"\xff")
    elif kind == "contents and raw":
        given.contents.fp32_contents.extend([1, 2])
        asked.raw_input_contents.append(bytes(8))
    elif kind == "too few raw":
        asked.raw_input_contents.extend([bytes(8), bytes(8)])
    elif kind == "contents of another type":
        given.contents.int_contents.extend([1, 2])
    else:
        given.datatype, given.name = "NONE", "x"
    return asked


@pytest.mark.parametrize(
    "kind",
    [
        "no BYTES",
        "two BYTES",
        "BYTES not JSON",
        "contents and raw",
        "too few raw",
        "contents of another type",
        "no type",
    ],
)
async def test_whether_the_model_is_known_is_told_before_what_is_wrong_with_its_inputs(
    served: Served, kind: str
) -> None:
    asked = faulty(kind)
    assert await served.code(asked.SerializeToString()) == "INVALID_ARGUMENT"
    asked.model_name = "nobody"
    assert await served.code(asked.SerializeToString()) == "NOT_FOUND"


async def test_unknown_models_are_told_in_tritons_words(served: Served, client: httpx.AsyncClient) -> None:
    said = (await client.post("/v2/models/nobody/infer", content=BODY)).json()["error"]
    assert said.startswith("Request for unknown model: 'nobody' is not found")
    assert await served.code(messages.InferRequest(model_name="nobody").SerializeToString()) == "NOT_FOUND"


async def test_the_openapi_document_says_where_it_is_served_and_who_may_ask(client: httpx.AsyncClient) -> None:
    document = (await client.get("/openapi.json")).json()
    assert document["servers"][0]["url"] == "/"
    assert {"bearer", "key"} == set(document["components"]["securitySchemes"])
    for path, methods in document["paths"].items():
        for operation in methods.values():
            needs_key = not path.startswith(("/v2/health/", "/health"))
            assert (operation.get("security") != []) == needs_key
            assert ({"401", "403"} <= set(operation["responses"])) == needs_key
