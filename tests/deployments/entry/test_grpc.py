"""The Open Inference Protocol over gRPC: asked by Triton's own client and by bytes that no client sends."""

from __future__ import annotations

import asyncio
import hashlib
import random
import time
from collections.abc import AsyncIterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tenuto.deployments.entry.http.exchange import HttpError
from tenuto.deployments.serve.launcher import unused_port
from tests.deployments.entry.test_access import certificate
from tests.instruments.fake_gpulet import make_plan
from tests.instruments.live import PATIENCE_S
from tests.instruments.served_grpc import Served, served

__all__ = ["served"]  # the fixture

grpc = pytest.importorskip("grpc")
pytest.importorskip("h2")
client = pytest.importorskip("tritonclient.grpc.aio")
messages = pytest.importorskip("tenuto.deployments.entry.protocols.grpc_messages")

VALUES = np.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], np.float32)


def tensor(values: np.ndarray = VALUES, datatype: str = "FP32") -> Any:
    given = client.InferInput("x", list(values.shape), datatype)
    given.set_data_from_numpy(values)
    return given


async def test_tritons_client_is_answered_unchanged(served: Served) -> None:
    triton = served.triton
    answer = await triton.infer("m", [tensor()], request_id="mine", outputs=[client.InferRequestedOutput("y")])
    assert answer.as_numpy("y").tolist() == (2.0 * VALUES).tolist()
    told = answer.get_response()
    assert told.id == "mine"
    assert told.parameters["gpulet"].string_param == "a"
    assert told.parameters["batch_size"].int64_param >= 1
    assert await triton.is_server_live()
    assert await triton.is_model_ready("m")
    assert await triton.is_model_ready("m", "1")
    assert (await triton.get_server_metadata()).name == "tenuto"
    (described,) = (await triton.get_model_metadata("m")).inputs
    assert (described.name, described.datatype, list(described.shape)) == ("x", "FP32", [-1, 2])
    (configured,) = (await triton.get_model_config("m")).config.input
    assert list(configured.dims) == [2]
    assert [model.name for model in (await triton.get_model_repository_index()).models] == ["m"]
    (counted,) = (await triton.get_inference_statistics("m")).model_stats
    assert counted.inference_count == len(VALUES)


async def test_a_version_is_named_or_chosen_by_the_split(served: Served) -> None:
    served.gpulet.load("m", "m:2")
    await served.follow(make_plan(("a", ("m", "m:2")), slo_ms=60_000.0, terms={"m:2": {"share_pct": 50}}))
    async with asyncio.timeout(PATIENCE_S):
        while not await served.triton.is_model_ready("m", "2"):
            await asyncio.sleep(0.005)
    answered = [(await served.triton.infer("m", [tensor()])).get_response().model_version for _ in range(40)]
    assert set(answered) == {"1", "2"}
    for version in ("1", "2"):
        named = await served.triton.infer("m", [tensor()], model_version=version)
        assert named.get_response().model_version == version
    assert list((await served.triton.get_model_metadata("m", "2")).versions) == ["1", "2"]
    stats = (await served.triton.get_inference_statistics("m")).model_stats
    assert [(each.name, each.version) for each in stats] == [("m", "1"), ("m", "2")]
    assert sum(each.inference_count for each in stats) == 42 * len(VALUES)


async def test_classes_are_asked_for_as_over_http(served: Served) -> None:
    answer = await served.triton.infer(
        "m", [tensor(VALUES[:1])], outputs=[client.InferRequestedOutput("y", class_count=1)]
    )
    assert answer.as_numpy("y").tolist() == [[b"4.000000:1"]]


async def test_typed_contents_mean_what_raw_ones_do(served: Served) -> None:
    asked = messages.InferRequest(model_name="m")
    asked.inputs.add(name="x", datatype="FP32", shape=[1, 2]).contents.fp32_contents.extend([1.0, 2.0])
    answer = messages.InferResponse.FromString(await served.send(asked.SerializeToString()))
    assert np.frombuffer(answer.raw_output_contents[0], np.float32).tolist() == [2.0, 4.0]


async def test_a_stream_answers_every_request_and_says_which_one_failed(served: Served) -> None:
    async def requests() -> AsyncIterator[dict[str, Any]]:
        for number in range(40):
            model = "m" if number != 7 else "nobody"
            yield {"model_name": model, "inputs": [tensor(VALUES[:1])], "request_id": str(number)}

    found: dict[str, str] = {}
    async for answer, error in served.triton.stream_infer(requests()):
        told = answer.get_response() if answer is not None else None
        found[told.id if told is not None else "?"] = "ok" if error is None else str(error)
        if error is None:
            assert answer.as_numpy("y").tolist() == [[2.0, 4.0]]
    assert sum(each == "ok" for each in found.values()) == 39
    assert any("Request for unknown model: 'nobody' is not found" in each for each in found.values())


@pytest.mark.parametrize(
    ("change", "code", "reason"),
    [
        ({"model_name": "nobody"}, "NOT_FOUND", "Request for unknown model: 'nobody' is not found"),
        ({"model_version": "7"}, "NOT_FOUND", "'m' has no version '7'. Versions here: 1."),
        ({"inputs": [], "raw_input_contents": []}, "INVALID_ARGUMENT", "missing input x"),
        ({"inputs": []}, "INVALID_ARGUMENT", "0 inputs and 1 raw_input_contents"),
        ({"raw_input_contents": [b"1234", b"5"]}, "INVALID_ARGUMENT", "1 inputs and 2 raw_input_contents"),
        ({"raw_input_contents": [b"1234"]}, "INVALID_ARGUMENT", "announces 4 binary bytes"),
        ({"raw_input_contents": []}, "INVALID_ARGUMENT", "announces 0 binary bytes"),
        ({"parameters": {"slo_ms": {"string_param": "soon"}}}, "INVALID_ARGUMENT", "parameter slo_ms is 'soon'"),
        ({"parameters": {"slo_ms": {"double_param": 0.0}}}, "DEADLINE_EXCEEDED", "the deadline could not be met"),
    ],
)
async def test_what_cannot_be_executed_is_said_and_why(
    served: Served, change: dict[str, Any], code: str, reason: str
) -> None:
    fields = {
        "model_name": "m",
        "inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 2]}],
        "raw_input_contents": [bytes(8)],
        **change,
    }
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await served.send(messages.InferRequest(**fields).SerializeToString())
    assert caught.value.code().name == code
    assert reason in caught.value.details()


async def test_the_time_that_a_client_waits_is_its_deadline(served: Served) -> None:
    """The gpu-let holds its batches: the request expires with its client, in spite of an SLO of a minute."""
    served.gpulet.hold = True
    with pytest.raises(client.InferenceServerException, match=r"(?i)deadline"):
        await served.triton.infer("m", [tensor()], client_timeout=0.05)
    served.gpulet.release()


async def test_clients_without_a_key_are_refused_before_their_message_is_read(served: Served) -> None:
    keys = [
        {"name": name, "sha256": hashlib.sha256(key).hexdigest(), "models": [model]}
        for name, key, model in (("ann", b"secret", "m"), ("bob", b"other", "n"))
    ]
    await served.follow(keys=keys)
    for metadata, code in (
        ({}, "UNAUTHENTICATED"),
        ({"authorization": "Bearer wrong"}, "UNAUTHENTICATED"),
        ({"authorization": "Bearer other"}, "PERMISSION_DENIED"),
        ({"authorization": "Bearer secret"}, "OK"),
    ):
        asked = messages.InferRequest(model_name="m", raw_input_contents=[bytes(8)])
        asked.inputs.add(name="x", datatype="FP32", shape=[1, 2])
        assert await served.code(asked.SerializeToString(), **metadata) == code
    call = served.channel.stream_unary("/inference.GRPCInferenceService/ModelInfer")()
    assert (await call.code()).name == "UNAUTHENTICATED"  # nothing was ever sent
    assert await served.triton.is_server_ready()  # load balancers have no key
    health = served.channel.unary_unary("/grpc.health.v1.Health/Check")
    assert await health(b"") == b"\x08\x01"


# Load balancers have no key: for the first two calls everybody's message is read.
@pytest.mark.parametrize("call", [*list(messages.MANAGEMENT)[2:], "ModelInfer", "ModelStreamInfer"])
async def test_every_call_keeps_a_guess_waiting_and_reads_nothing_of_it(served: Served, call: str) -> None:
    await served.follow(keys=[{"name": "ann", "sha256": hashlib.sha256(b"secret").hexdigest(), "models": ["m"]}])
    asked = served.channel.stream_stream(f"/{messages.SERVICE}/{call}")
    service = served.entry.service
    for _ in range(7):
        service.guesses.wait_s("127.0.0.1", service.now_ms / 1000.0)
    began_s = time.monotonic()
    code = (await asked(metadata=(("x-api-key", "wrong"),), timeout=PATIENCE_S).code()).name
    assert (code, service.guesses.total) == ("UNAUTHENTICATED", 8)
    assert time.monotonic() - began_s > 0.2


@pytest.mark.parametrize("call", [*messages.MANAGEMENT, "ModelInfer"])
@pytest.mark.parametrize("data", [b"\x0a\x05no", b"\xff" * 64, b"\x0a\x02\xff\xfe"], ids=["cut", "noise", "no text"])
async def test_a_message_that_is_none_is_the_clients_fault(served: Served, call: str, data: bytes) -> None:
    asked = served.channel.unary_unary(f"/{messages.SERVICE}/{call}")(data, timeout=PATIENCE_S)
    assert (await asked.code()).name in ("INVALID_ARGUMENT", "NOT_FOUND", "OK")
    assert "Error" not in await asked.details()


@pytest.mark.parametrize("version", ["", "2"])
@pytest.mark.parametrize("call", [name for name, route in messages.MANAGEMENT.items() if "{model}" in route.path])
def test_a_call_that_names_no_model_asks_for_no_other(call: str, version: str) -> None:
    """`/v2/models//config` without the empty name would be model `config`. Statistics may be those of all models."""
    route = messages.MANAGEMENT[call]
    request = messages.message(f"inference.{route.request}")(version=version)
    if call == "ModelStatistics" and not version:
        assert messages.management_head(route, request, {}).url == b"/v2/models/stats"
    else:
        with pytest.raises(HttpError, match="names no model"):
            messages.management_head(route, request, {})


async def test_what_breaks_inside_is_told_to_the_log_alone(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_exchange: Any) -> None:
        raise RuntimeError("a secret of ours")

    monkeypatch.setattr(served.entry.service, "handle", broken)
    for name, data in (("ModelInfer", messages.InferRequest(model_name="m").SerializeToString()), ("ServerLive", b"")):
        asked = served.channel.unary_unary(f"/{messages.SERVICE}/{name}")(data, timeout=PATIENCE_S)
        assert (await asked.code()).name == "INTERNAL"
        assert "secret" not in await asked.details()


async def test_a_port_that_is_left_soon_is_waited_for() -> None:
    """A gateway that is replaced still has its port for a moment, for gRPC as for HTTP."""
    before, after = Served(), Served()
    for each in (before, after):
        await each.gpulet.start()
    await before.follow()
    after.grpc_port = before.grpc_port
    following = asyncio.create_task(after.follow())
    await asyncio.sleep(0.1)
    assert not following.done()
    await before.close()
    await following
    async with client.InferenceServerClient(f"127.0.0.1:{after.grpc_port}") as triton:
        assert await triton.is_server_live()
    await after.close()


@pytest.mark.parametrize("character", ["x", "%", "ü", "水"])
async def test_a_reason_is_short_enough_for_clients_whatever_it_names(served: Served, character: str) -> None:
    for more in range(4):
        asked = messages.InferRequest(model_name="m")
        for name in ("text_input", "y" * more + character * 4000):
            asked.inputs.add(name=name, datatype="BYTES", shape=[1]).contents.bytes_contents.append(b"x")
        assert await served.code(asked.SerializeToString()) == "INVALID_ARGUMENT"


def read(asked: Any) -> Any:
    return messages.InferReader().read(memoryview(bytearray(asked.SerializeToString())))


def test_a_picture_or_a_text_is_asked_for_by_one_value_of_bytes() -> None:
    asked = messages.InferRequest(model_name="a/b", id="mine")
    asked.inputs.add(name="any", datatype="BYTES", shape=[1]).contents.bytes_contents.append(b"a text")
    asked.parameters["timeout"].int64_param = 70_000
    found, _ = read(asked)
    assert (found.path, found.id, found.described, found.body) == ("a%2Fb", "mine", None, b"a text")
    assert found.slo_ms == 70.0
    told = (
        b'{"model_name":"a/b","model_version":"1","predictions":[{"label":"cat","score":0.5}],'
        b'"parameters":{"emulated":true}}'
    )
    answer = messages.to_answer("mine", [told])
    assert [(each.name, each.datatype, list(each.shape)) for each in answer.outputs] == [
        ("label", "BYTES", [1]),
        ("score", "FP32", [1]),
    ]
    assert list(answer.raw_output_contents) == [b"\x03\0\0\0cat", np.float32(0.5).tobytes()]
    assert answer.parameters["emulated"].bool_param
    assert (answer.model_version, answer.id) == ("1", "mine")
    asked.inputs.add(name="more", datatype="BYTES", shape=[1]).contents.bytes_contents.append(b"another")
    problem = read(asked)[0].problem
    assert "one input of BYTES" in problem.message


def test_raw_tensors_lie_one_behind_the_other_whatever_stands_between() -> None:
    """A message may have its fields in any order; what describes the tensors is read once."""
    described = messages.InferRequest(model_name="m")
    for name in ("x", "z"):
        described.inputs.add(name=name, datatype="UINT8", shape=[1, 3])
    parts = [messages.InferRequest(raw_input_contents=[each]).SerializeToString() for each in (b"abc", b"def")]
    text, reader = described.SerializeToString(), messages.InferReader()
    for data in (text + parts[0] + parts[1], parts[0] + text + parts[1], parts[0] + parts[1] + text):
        found, tensors = reader.read(memoryview(bytearray(data)))
        assert bytes(tensors) == b"abcdef"
        assert [each.parameters["binary_data_size"] for each in found.described.request.inputs] == [3, 3]
    assert reader.read(memoryview(bytearray(data)))[0] is found


@pytest.mark.parametrize(
    ("patience", "slo_ms"), [({}, 60_000.0), ({"timeout": 30.0}, 30_000.0), ({"timeout": 90.0}, 60_000.0)]
)
async def test_the_shortest_of_slo_and_waiting_time_holds(
    served: Served, patience: dict[str, float], slo_ms: float
) -> None:
    asked = messages.InferRequest(model_name="m", raw_input_contents=[bytes(8)])
    asked.inputs.add(name="x", datatype="FP32", shape=[1, 2])
    dispatching, seen = served.entry.service.dispatching, []
    admit = dispatching.admit

    def watched(*given: Any, **options: Any) -> Any:
        seen.append(options["slo_ms"])
        return admit(*given, **options)

    dispatching.admit = watched  # type: ignore[method-assign]
    call = served.channel.unary_unary(f"/{messages.SERVICE}/ModelInfer")
    await call(asked.SerializeToString(), **patience)
    asked.parameters["slo_ms"].double_param = 1000.0
    await call(asked.SerializeToString(), **patience)
    assert slo_ms / 2.0 < seen[0] <= 1.01 * slo_ms  # a client tells how long it still waits, rounded up
    assert seen[1] == 1000.0


async def test_a_certificate_encrypts_what_is_said(served: Served, tmp_path: Path) -> None:
    cert, key = certificate(tmp_path)
    port = unused_port()
    await served.follow(grpc={"host": "127.0.0.1", "port": port, "tls_cert": str(cert), "tls_key": str(key)})
    async with client.InferenceServerClient(f"127.0.0.1:{port}", ssl=True, root_certificates=str(cert)) as triton:
        assert await triton.is_server_ready()
    assert served.entry.service.dispatching.is_ready()


async def test_bytes_that_no_client_sends_end_in_a_clear_refusal(served: Served) -> None:
    asked = messages.InferRequest(model_name="m", raw_input_contents=[bytes(8)])
    asked.inputs.add(name="x", datatype="FP32", shape=[1, 2])
    whole, draw = asked.SerializeToString(), random.Random(7)
    known = {"OK", "INVALID_ARGUMENT", "NOT_FOUND", "RESOURCE_EXHAUSTED", "DEADLINE_EXCEEDED"}
    for _ in range(300):
        data = bytearray(whole)
        for _ in range(draw.randint(1, 4)):
            data[draw.randrange(len(data))] = draw.randrange(256)
        assert await served.code(bytes(data[: draw.randint(0, 2 * len(data))])) in known
    await served.send(whole)


@pytest.mark.parametrize(
    "data",
    [
        b"\x2a\x00" * 5000,  # inputs that say nothing
        b"\x0a" + b"\xff\xff\x3f" + b"x" * 0xFFFFF,  # a name of 1 MiB
        b"\x2a\x80\x80\x40" + b"\x22\x00" * 0x80000,  # an input of half a million parameters
    ],
)
def test_a_message_is_looked_at_before_it_is_read(data: bytes) -> None:
    with pytest.raises(HttpError) as caught:
        messages.InferReader().read(memoryview(data))
    assert caught.value.status == 413


async def test_messages_beyond_the_limit_are_refused(served: Served) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await served.send(bytes((64 << 20) + 1))
    assert caught.value.code().name == "RESOURCE_EXHAUSTED"
    assert served.entry.server.arena.used_bytes == served.entry.server.unfinished_bytes == 0


async def test_the_server_describes_what_it_offers(served: Served) -> None:
    from grpc_reflection.v1alpha import reflection_pb2

    call = served.channel.stream_stream("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo")()
    asked = reflection_pb2.ServerReflectionRequest(file_containing_symbol="inference.GRPCInferenceService")
    await call.write(asked.SerializeToString())
    told = reflection_pb2.ServerReflectionResponse.FromString(await call.read())
    assert len(told.file_descriptor_response.file_descriptor_proto) == 1
    await call.done_writing()


def test_the_descriptors_are_those_of_the_text_beside_them() -> None:
    text = files("tenuto.deployments").joinpath("data/open_inference.proto").read_text()
    service = messages.POOL.FindServiceByName(messages.SERVICE)
    assert [each.name for each in service.methods] == [
        line.split()[1].partition("(")[0] for line in text.splitlines() if line.startswith("  rpc ")
    ]
