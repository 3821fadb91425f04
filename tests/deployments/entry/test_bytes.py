"""Tensors of BYTES over every way in, to a model of a user's own on a real gpu-let in this process. Whatever the
strings are, they come back as they went."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator
from typing import Any

import httpx
import numpy as np
import pytest

from tenuto.batching.core.build import from_plan
from tenuto.batching.registry import make_scheduler
from tenuto.deployments.dispatch.dispatcher import Dispatcher
from tenuto.deployments.dispatch.dispatcher_process import BundleServer
from tenuto.deployments.entry.gateway import Entry
from tenuto.deployments.entry.service.dispatcher_client import DispatcherClient
from tenuto.deployments.entry.service.python_handle import TenutoHandle
from tenuto.deployments.serve.launcher import unused_port
from tenuto.deployments.serve.user_config import read_gateway_config
from tenuto.deployments.wire.peer import Endpoint
from tenuto.deployments.wire.tensors import pack_elements, read_elements
from tenuto.errors import InvalidInputError
from tenuto.loadgen.senders.payloads import make_bodies
from tenuto.placement import Plan
from tenuto.profiles.networks.catalogue import LoadedModel, ModelSignature, TensorSignature
from tenuto.profiles.networks.hooks import load_hooks
from tenuto.profiles.networks.inputs import as_blocks, blank_inputs
from tenuto.profiles.networks.model_options import RunOptions
from tenuto.profiles.networks.programs import Member, lone_program, prepare_program
from tests.deployments.gpulet.test_streaming_gpulet import OWN, make_plan, start
from tests.instruments.asking import http_client, until_ready
from tests.instruments.live import PATIENCE_S

torch = pytest.importorskip("torch")
grpc = pytest.importorskip("grpc")
pytest.importorskip("h2")
messages = pytest.importorskip("tenuto.deployments.entry.protocols.grpc_messages")

MOST_BYTES = 100_000  # of a sample of the model that returns what it is given
SHAPE = (2, 2)
COUNT = 4
STRINGS = (
    b"",
    b"\0",
    b"a\0",
    b"\0\0b",
    b"text",
    "ü水".encode(),
    b"\xff\xfe",
    b"\x80" * 7,
    b"\x03\0\0\0abc",
    b"x" * 20_000,
)
TEXTS = tuple(each for each in STRINGS if each.isascii() or each.startswith(b"\xc3"))
Sample = list[bytes]


class Served:
    """A gateway over one gpu-let, with its ports for HTTP and gRPC."""

    def __init__(self) -> None:
        self.port, self.grpc_port = unused_port(), unused_port()
        self.client = http_client(self.port)
        self.channel = grpc.aio.insecure_channel(f"127.0.0.1:{self.grpc_port}")
        self.server: BundleServer | None = None

    async def start(self, plan: Plan, executor: str = "torch", *, is_beside: bool = True) -> None:
        self.gpulet = await start(plan, executor)
        more: dict[str, Any] = {"scheduler": {"name": "eager"}}
        endpoint: Endpoint | None = None
        if not is_beside:
            more = {"sub_clusters": {"0": ["m"]}}
            dispatcher = Dispatcher(
                lambda plan, network: make_scheduler("eager", from_plan(plan, network), {}),
                lambda _: self.gpulet.endpoint,
                on_change=lambda: None if self.server is None else self.server.announce(),
            )
            self.server = BundleServer(dispatcher)
            endpoint = await self.server.listen()
            dispatcher.apply(plan)

        async def find() -> Endpoint:
            assert endpoint is not None
            return endpoint

        self.entry = Entry(lambda _: self.gpulet.endpoint, lambda _name: find)
        sockets = {
            "listen": {"host": "127.0.0.1", "port": self.port},
            "grpc": {"host": "127.0.0.1", "port": self.grpc_port},
        }
        await self.entry.follow(read_gateway_config({"plan": plan.to_data(), **sockets, **more}))
        await until_ready(self.client)

    async def close(self) -> None:
        await self.client.aclose()
        await self.channel.close()
        await self.entry.close()
        if self.server is not None:
            await self.server.close(0.0)
        await self.gpulet.close()

    async def binary(self, document: Any, data: bytes) -> httpx.Response:
        text = json.dumps(document).encode()
        headers = {"inference-header-content-length": str(len(text))}
        return await self.client.post("/v2/models/m/infer", content=text + data, headers=headers)

    async def call(self, asked: Any) -> Any:
        call = self.channel.unary_unary(f"/{messages.SERVICE}/ModelInfer")
        return messages.InferResponse.FromString(
            await call(asked.SerializeToString(), timeout=PATIENCE_S, wait_for_ready=True)
        )


def own(factory: str, *, streaming: bool = True, **options: Any) -> Plan:
    plan = make_plan("cpu", source=f"{OWN}:{factory}", options=options)
    return Plan.from_data({**plan.to_data(), "streaming": streaming})


@pytest.fixture(params=["beside", "elsewhere"])
async def served(request: pytest.FixtureRequest) -> AsyncIterator[Served]:
    """The scheduler is in the gateway's process and the gpu-let streams, or neither."""
    is_beside, made = request.param == "beside", Served()
    await made.start(own("same_bytes", streaming=is_beside, most_bytes=MOST_BYTES), is_beside=is_beside)
    yield made
    await made.close()


def described(samples: int, **more: Any) -> list[dict[str, Any]]:
    """The inputs of a request."""
    text = {"name": "x", "datatype": "BYTES", "shape": [samples, *SHAPE], **more}
    return [text, {"name": "n", "datatype": "INT32", "shape": [samples, 1], "data": list(range(samples))}]


async def by_json(served: Served, samples: list[Sample]) -> bytes:
    flat = [each.decode() for sample in samples for each in sample]
    nested = np.array(flat, object).reshape(len(samples), *SHAPE).tolist()
    data = flat if len(samples) % 2 else nested
    answer = await served.client.post("/v2/models/m/infer", json={"inputs": described(len(samples), data=data)})
    assert answer.status_code == 200, answer.text
    texts, numbers = answer.json()["outputs"]
    assert (texts["datatype"], texts["shape"]) == ("BYTES", [len(samples), *SHAPE])
    assert numbers["data"] == list(range(len(samples)))
    return pack_elements(each.encode() for each in texts["data"])


async def by_binary(served: Served, samples: list[Sample]) -> bytes:
    data = pack_elements(each for sample in samples for each in sample)
    inputs = described(len(samples), parameters={"binary_data_size": len(data)})
    answer = await served.binary({"inputs": inputs, "parameters": {"binary_data_output": True}}, data)
    assert answer.status_code == 200, answer.text
    length = int(answer.headers["inference-header-content-length"])
    size = json.loads(answer.content[:length])["outputs"][0]["parameters"]["binary_data_size"]
    return answer.content[length : length + size]


async def by_grpc(served: Served, samples: list[Sample], *, raw: bool) -> bytes:
    asked = messages.InferRequest(model_name="m")
    text = asked.inputs.add(name="x", datatype="BYTES", shape=[len(samples), *SHAPE])
    number = asked.inputs.add(name="n", datatype="INT32", shape=[len(samples), 1])
    flat = [each for sample in samples for each in sample]
    if raw:
        asked.raw_input_contents.extend([pack_elements(flat), np.arange(len(samples), dtype=np.int32).tobytes()])
    else:
        text.contents.bytes_contents.extend(flat)
        number.contents.int_contents.extend(range(len(samples)))
    answer = await served.call(asked)
    assert (answer.outputs[0].datatype, list(answer.outputs[0].shape)) == ("BYTES", [len(samples), *SHAPE])
    assert np.frombuffer(answer.raw_output_contents[1], np.int32).tolist() == list(range(len(samples)))
    found: bytes = answer.raw_output_contents[0]
    return found


@pytest.mark.parametrize("seed", range(3))
async def test_every_string_comes_back_over_every_way_in_whatever_shares_its_batch(served: Served, seed: int) -> None:
    draw = random.Random(seed)
    asked, expected = [], []
    for _ in range(24):
        way = draw.choice(("json", "binary", "raw", "contents"))
        known = TEXTS if way == "json" else STRINGS
        samples = [[draw.choice(known) for _ in range(COUNT)] for _ in range(draw.choice((1, 1, 2, 5)))]
        if way == "json":
            asked.append(by_json(served, samples))
        elif way == "binary":
            asked.append(by_binary(served, samples))
        else:
            few = samples[:1] if way == "contents" else samples  # what is not raw is short
            samples = few
            asked.append(by_grpc(served, samples, raw=way == "raw"))
        expected.append([each for sample in samples for each in sample])
    for found, right in zip(await asyncio.gather(*asked), expected, strict=True):
        assert read_elements(found, len(right)) == right


async def test_the_handle_gives_and_gets_arrays_of_bytes() -> None:
    made = Served()
    await made.start(own("same_bytes", most_bytes=MOST_BYTES), is_beside=False)
    try:
        dispatchers = made.entry.service.dispatching
        assert isinstance(dispatchers, DispatcherClient)
        handle = TenutoHandle(dispatchers)
        for strings in (STRINGS[:4], STRINGS[-4:]):
            x = np.array(strings, object).reshape(SHAPE)
            found = await handle.infer("m", {"x": x, "n": [1]})
            assert found["y"].tolist() == x.tolist()
        for wrong, words in ((["a"] * 4, r"must be bytes \["), ([[b"a"] * 2, [b"x" * MOST_BYTES] * 2], "at most")):
            with pytest.raises(InvalidInputError, match=words):
                await handle.infer("m", {"x": wrong, "n": [1]})
    finally:
        await made.close()


async def test_many_numbers_in_typed_contents_are_those_that_were_sent() -> None:
    """A long message lies in memory that the gpu-let reads; its typed contents lie elsewhere, as strings do."""
    made, width = Served(), 10_000
    await made.start(own("scale", width=width))
    try:
        asked = messages.InferRequest(model_name="m")
        x = asked.inputs.add(name="x", datatype="FP32", shape=[1, width])
        x.contents.fp32_contents.extend(range(width))
        (doubled, _) = (await made.call(asked)).raw_output_contents
        assert np.array_equal(np.frombuffer(doubled, np.float32), 2.0 * np.arange(width))
    finally:
        await made.close()


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (pack_elements([b"a"] * 3), "do not hold 4 elements"),
        (pack_elements([b"a"] * 5), "do not hold 4 elements"),
        (pack_elements([b"a"] * 4) + b"\0", "do not hold 4 elements"),
        (pack_elements([b"a"] * 4)[:-1], "do not hold 4 elements"),
        (b"\xff\xff\xff\xff" * 4, "do not hold 4 elements"),
        (b"", "do not hold 4 elements"),
        (pack_elements([b"", b"", b"", b"x" * (MOST_BYTES - 15)]), f"the model takes {MOST_BYTES}"),
    ],
)
async def test_a_tensor_that_is_none_is_refused_on_every_binary_way(served: Served, data: bytes, words: str) -> None:
    answer = await served.binary({"inputs": described(1, parameters={"binary_data_size": len(data)})}, data)
    assert (answer.status_code, words in answer.json()["error"]) == (400, True)
    asked = messages.InferRequest(model_name="m", raw_input_contents=[data, bytes(4)])
    asked.inputs.add(name="x", datatype="BYTES", shape=[1, *SHAPE])
    asked.inputs.add(name="n", datatype="INT32", shape=[1, 1])
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await served.call(asked)
    assert caught.value.code().name == "INVALID_ARGUMENT"
    assert words in caught.value.details()


async def test_the_longest_sample_that_is_allowed_is_answered(served: Served) -> None:
    longest = [b"", b"", b"", b"x" * (MOST_BYTES - 16)]
    found = await by_binary(served, [longest, [b""] * 4, longest])
    assert read_elements(found, 12) == [*longest, *[b""] * 4, *longest]


async def test_what_json_cannot_say_is_refused_and_why(served: Served) -> None:
    for data, words in (
        ([1, 2, 3, 4], "not all BYTES values"),
        (["a", "b", "c", None], "not all BYTES values"),
        ([["a", "b"], ["c"]], "not all BYTES values"),
        (["a", "b", "c"], "has 3 values"),
        ([["a"], ["b"], ["c"], ["d"]], "not nested"),
        ("abcd", "has 1 values"),
        ({"a": 1}, "not all BYTES values"),
    ):
        answer = await served.client.post("/v2/models/m/infer", json={"inputs": described(1, data=data)})
        assert (answer.status_code, words in answer.json()["error"]) == (400, True), (data, answer.text)
    good = described(1, data=["a"] * 4)
    for document, words in (
        ({"inputs": []}, "missing input"),
        ({"inputs": good, "outputs": [{"name": "y", "parameters": {"classification": 1}}]}, "have no classes"),
    ):
        answer = await served.client.post("/v2/models/m/infer", json=document)
        assert (answer.status_code, words in answer.json()["error"]) == (400, True), answer.text
    data = pack_elements([b"\xff"] * 4)
    answer = await served.binary({"inputs": described(1, parameters={"binary_data_size": len(data)})}, data)
    assert (answer.status_code, "no text in UTF-8" in answer.json()["error"]) == (406, True)


async def test_the_model_says_that_it_takes_strings_and_what_is_made_up_for_it_runs(served: Served) -> None:
    metadata = (await served.client.get("/v2/models/m")).json()
    assert metadata["inputs"][0] == {"name": "x", "datatype": "BYTES", "shape": [-1, *SHAPE]}
    config = (await served.client.get("/v2/models/m/config")).json()
    assert config["input"][0]["data_type"] == "TYPE_STRING"
    for binary in (True, False):
        body = make_bodies(metadata, np.random.default_rng(0), binary=binary)[0]
        headers = {} if body.json_length is None else {"inference-header-content-length": str(body.json_length)}
        answer = await served.client.post("/v2/models/m/infer", content=body.data, headers=headers)
        assert answer.status_code == 200, answer.text


async def test_tritons_clients_add_numbers_written_as_text() -> None:
    """What simple_http_string_infer_client and simple_grpc_string_infer_client of Triton's examples do."""
    made = Served()
    await made.start(own("add_texts"))
    try:
        await asyncio.to_thread(add_by_http, made.port)
        await asyncio.to_thread(add_by_grpc, made.grpc_port)
    finally:
        await made.close()


def strings() -> tuple[np.ndarray, np.ndarray]:
    left = np.array([str(number).encode() for number in range(16)], object).reshape(1, 16)
    return left, np.full((1, 16), b"1", object)


def check(answer: Any) -> None:
    for name, by in (("OUTPUT0", 1), ("OUTPUT1", -1)):
        found = answer.as_numpy(name)
        assert found.shape == (1, 16)
        assert [int(each) for each in found[0]] == [number + by for number in range(16)]


def add_by_http(port: int) -> None:
    client = pytest.importorskip("tritonclient.http")
    with client.InferenceServerClient(f"127.0.0.1:{port}") as triton:
        for forms in ((True, False), (False, True), (True, True), (False, False)):
            inputs = [client.InferInput(f"INPUT{number}", [1, 16], "BYTES") for number in range(2)]
            for given, values, binary in zip(inputs, strings(), forms, strict=True):
                given.set_data_from_numpy(values, binary_data=binary)
            outputs = [
                client.InferRequestedOutput(f"OUTPUT{number}", binary_data=binary)
                for number, binary in enumerate(forms)
            ]
            check(triton.infer("m", inputs, outputs=outputs))


def add_by_grpc(port: int) -> None:
    client = pytest.importorskip("tritonclient.grpc")
    with client.InferenceServerClient(f"127.0.0.1:{port}") as triton:
        inputs = [client.InferInput(f"INPUT{number}", [1, 16], "BYTES") for number in range(2)]
        for given, values in zip(inputs, strings(), strict=True):
            given.set_data_from_numpy(values)
        check(triton.infer("m", inputs))


async def test_an_emulated_gpulet_answers_empty_strings() -> None:
    made = Served()
    tensors = [{"name": name, "dtype": "bytes", "shape": [2]} for name in ("x", "y")]
    await made.start(make_plan(options={"inputs": tensors[:1], "outputs": tensors[1:]}), "emulated")
    try:
        given = {"name": "x", "datatype": "BYTES", "shape": [1, 2], "data": ["a", "b"]}
        answer = await made.client.post("/v2/models/m/infer", json={"inputs": [given]})
        assert answer.json()["outputs"] == [{"name": "y", "datatype": "BYTES", "shape": [1, 2], "data": ["", ""]}]
        raw = await made.client.post(
            "/v2/models/m/infer", content=b"\0" * 8, headers={"inference-header-content-length": "0"}
        )
        assert (raw.status_code, "takes BYTES" in raw.json()["error"]) == (400, True)
    finally:
        await made.close()


BYTES_IN, BYTES_OUT = TensorSignature("x", "bytes", (1,)), TensorSignature("y", "bytes", (1,), most_bytes=8)


class Returns(torch.nn.Module):
    def __init__(self, output: Any) -> None:
        super().__init__()
        self.output = output

    def forward(self, _given: Any) -> Any:
        return self.output


@pytest.mark.parametrize(
    "output",
    [
        np.array([["a"]], object),
        np.array([[1]], object),
        np.array([b"a"], object),
        np.array([[b"a", b"b"]], object),
        np.array([[b"abcde"]], object),
        np.array([[1.0]]),
        [b"a"],
        torch.ones(1, 1),
    ],
)
def test_an_output_that_is_not_what_the_signature_says_fails_with_a_reason(output: Any) -> None:
    loaded = LoadedModel(Returns(output), ModelSignature("tensor", (BYTES_IN,), (BYTES_OUT,)))
    runner = lone_program("m", loaded, RunOptions())
    with pytest.raises(InvalidInputError, match="output y"):
        runner.run({"m": as_blocks(blank_inputs(loaded.signature, 1))}, {"m": 1})


def test_batches_are_padded_with_the_text_of_zero() -> None:
    loaded = LoadedModel(Returns(None), ModelSignature("tensor", (BYTES_IN,), (BYTES_OUT,)))
    seen = []
    loaded.module.forward = lambda given: seen.append(given.tolist()) or given
    runner = lone_program("m", loaded, RunOptions(pad_batches=True), [4])
    x = np.array([[b"a"], [b"\0"], [b""]], object)
    assert runner.run({"m": {"x": [x[:1], x[1:]]}}, {"m": 3})["m"]["y"].tolist() == x.tolist()
    assert seen == [[[b"a"], [b"\0"], [b""], [b"0"]]]


@pytest.mark.parametrize("options", [{"compile": True}, {"runtime": "onnxruntime"}])
def test_what_cannot_take_strings_is_refused_when_the_model_is_loaded(options: dict[str, Any]) -> None:
    signature = ModelSignature("tensor", (BYTES_IN,), (BYTES_OUT,))
    with pytest.raises(InvalidInputError, match="tensors of bytes"):
        lone_program("m", LoadedModel(Returns(None), signature), RunOptions(**options))
    with pytest.raises(InvalidInputError, match="some of bytes"):
        load_hooks("tests.instruments.own_hooks:Hooks", signature)
    with pytest.raises(InvalidInputError, match="merges with no other"):
        prepare_program([Member(name, f"{OWN}:add_texts") for name in "ab"], "/nowhere")
    with pytest.raises(InvalidInputError, match="tensor of bytes"):
        ModelSignature("image", (BYTES_IN,), (BYTES_OUT,))
    for more in ({"below": 3}, {"accepts": ("uint8",)}):
        with pytest.raises(InvalidInputError, match="only numbers have"):
            TensorSignature("x", "bytes", (1,), **more)
