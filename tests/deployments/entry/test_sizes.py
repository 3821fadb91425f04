"""Requests whose inputs vary in shape, over every way in, to an emulated gpu-let in this process."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tenuto.deployments.entry.http.exchange import BadRequestError
from tenuto.deployments.entry.protocols.oip_requests import RequestReader
from tenuto.deployments.entry.service.planned_model import ModelInterface
from tenuto.deployments.entry.service.python_handle import TenutoHandle
from tenuto.deployments.wire.tensors import most_row_bytes
from tenuto.errors import InvalidInputError
from tenuto.loadgen.senders.payloads import SizedBodies, make_bodies
from tenuto.placement import Plan
from tenuto.profiles.networks.catalogue import ModelSignature, SizeRange, TensorSignature
from tests.deployments.entry.test_bytes import Served
from tests.deployments.gpulet.test_streaming_gpulet import make_plan

pytest.importorskip("h2")
messages = pytest.importorskip("tenuto.deployments.entry.protocols.grpc_messages")
grpc = pytest.importorskip("grpc")

INPUTS = [
    {"name": "ids", "dtype": "int64", "shape": ["tokens"]},
    {"name": "state", "dtype": "float32", "shape": [2, 3], "axis": 1},
    {"name": "rate", "dtype": "int64", "shape": [], "axis": None},
]
OUTPUTS = [
    {"name": "hidden", "dtype": "float32", "shape": ["tokens", 2]},
    {"name": "after", "dtype": "float32", "shape": [2, 3], "axis": 1},
]
SIZES = {"tokens": {"most": 50, "least": 2}}
OPTIONS = {"inputs": INPUTS, "outputs": OUTPUTS, "sizes": SIZES}


def plan(*, streaming: bool) -> Plan:
    return Plan.from_data({**make_plan(options=OPTIONS).to_data(), "streaming": streaming})


@pytest.fixture(params=["beside", "elsewhere"])
async def served(request: pytest.FixtureRequest) -> AsyncIterator[Served]:
    """The scheduler is in the gateway's process and the gpu-let streams, or neither."""
    is_beside, made = request.param == "beside", Served()
    await made.start(plan(streaming=is_beside), "emulated", is_beside=is_beside)
    yield made
    await made.close()


def arrays(tokens: int, samples: int = 1, more: Sequence[str] = ()) -> dict[str, Any]:
    """The inputs of the model, and `more` ones of one number a token."""
    return {
        "ids": np.arange(samples * tokens, dtype=np.int64).reshape(samples, tokens),
        "state": np.zeros((2, samples, 3), np.float32),
        "rate": np.array(16000, np.int64),
        **{name: np.ones((samples, tokens), np.int64) for name in more},
    }


def described(given: dict[str, Any], *, binary: bool = False) -> list[dict[str, Any]]:
    names = {"int64": "INT64", "float32": "FP32"}
    return [
        {"name": name, "datatype": names[array.dtype.name], "shape": list(array.shape)}
        | ({"parameters": {"binary_data_size": array.nbytes}} if binary else {"data": array.ravel().tolist()})
        for name, array in given.items()
    ]


async def by_json(served: Served, tokens: int, samples: int, more: Sequence[str] = ()) -> list[list[int]]:
    answer = await served.client.post("/v2/models/m/infer", json={"inputs": described(arrays(tokens, samples, more))})
    assert answer.status_code == 200, answer.text
    return [each["shape"] for each in answer.json()["outputs"]]


async def by_binary(served: Served, tokens: int, samples: int, more: Sequence[str] = ()) -> list[list[int]]:
    given = arrays(tokens, samples, more)
    document = {"inputs": described(given, binary=True), "parameters": {"binary_data_output": True}}
    answer = await served.binary(document, b"".join(array.tobytes() for array in given.values()))
    assert answer.status_code == 200, answer.text
    found = json.loads(answer.content[: int(answer.headers["inference-header-content-length"])])["outputs"]
    assert [each["parameters"]["binary_data_size"] for each in found] == [
        4 * int(np.prod(each["shape"])) for each in found
    ]
    return [each["shape"] for each in found]


async def by_grpc(served: Served, tokens: int, samples: int, more: Sequence[str] = ()) -> list[list[int]]:
    asked = message_of(arrays(tokens, samples, more))
    return [list(each.shape) for each in (await served.call(asked)).outputs]


def message_of(given: dict[str, Any]) -> Any:
    """The request over gRPC."""
    asked = messages.InferRequest(model_name="m")
    for each in described(given):
        asked.inputs.add(name=each["name"], datatype=each["datatype"], shape=each["shape"])
        asked.raw_input_contents.append(given[each["name"]].tobytes())
    return asked


async def test_every_answer_has_the_size_of_its_own_request_however_sizes_are_mixed(served: Served) -> None:
    dice = random.Random(44)
    asked = [(dice.randint(2, 50), dice.choice((1, 1, 3))) for _ in range(60)]
    ways = [dice.choice((by_json, by_binary, by_grpc)) for _ in asked]
    answers = await asyncio.gather(*(way(served, *each) for way, each in zip(ways, asked, strict=True)))
    assert answers == [[[samples, tokens, 2], [2, samples, 3]] for tokens, samples in asked]
    (counted,) = (await served.client.get("/v2/models/m/stats")).json()["model_stats"]
    (row,) = counted["size_stats"]  # the plan has no size classes
    assert (row["sizes"], row["ok"] + row["late"]) == (None, len(asked))
    assert row["input_elements"] == row["computed_elements"] == sum(tokens * samples for tokens, samples in asked)


async def test_a_handle_takes_any_size_in_range(served: Served) -> None:
    if served.server is None:
        pytest.skip("a handle reaches dispatchers that are processes of their own")
    handle = TenutoHandle(served.entry.service.dispatching)  # type: ignore[arg-type]
    outputs = await handle.infer("m", {"ids": np.arange(7), "state": np.zeros((2, 3), np.float32), "rate": 8000})
    assert {name: array.shape for name, array in outputs.items()} == {"hidden": (7, 2), "after": (2, 3)}
    with pytest.raises(InvalidInputError, match=r"'tokens' is 51; the model takes 2 to 50"):
        await handle.infer("m", {"ids": np.arange(51), "state": np.zeros((2, 3), np.float32), "rate": 8000})


async def test_metadata_says_which_dimensions_vary(served: Served) -> None:
    said = (await served.client.get("/v2/models/m")).json()
    assert [each["shape"] for each in said["inputs"]] == [[-1, -1], [2, -1, 3], []]
    assert [each["shape"] for each in said["outputs"]] == [[-1, -1, 2], [2, -1, 3]]
    assert [each.get("dimensions") for each in said["inputs"]] == [[None, "tokens"], None, None]
    assert said["sizes"] == {"tokens": {"least": 2, "most": 50, "multiple": 1}}
    bodies = SizedBodies(said, {"tokens": 50}, np.random.default_rng(0), binary=False)
    for number, tokens in enumerate((2, 9, 50)):
        answer = await served.client.post("/v2/models/m/infer", content=bodies.body(number, tokens).data)
        assert answer.json()["outputs"][0]["shape"] == [1, tokens, 2]
    with pytest.raises(InvalidInputError, match=r"INT64 \[None, 'tokens'\]\) cannot be generated.*sizes"):
        make_bodies(said, np.random.default_rng(0))
    configured = (await served.client.get("/v2/models/m/config")).json()
    assert [each["dims"] for each in configured["input"]] == [[-1, -1], [2, -1, 3], []]
    assert configured["max_batch_size"] == 0


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"ids": np.zeros((1, 51), np.int64)}, "'tokens' is 51; the model takes 2 to 50"),
        ({"ids": np.zeros((1, 1), np.int64)}, "'tokens' is 1; the model takes 2 to 50"),
        ({"ids": np.zeros((1, 3, 1), np.int64)}, r"shape \[1, 3, 1\]; the model takes \[n, tokens\]"),
        ({"ids": np.zeros((2, 3), np.int64)}, "disagree on the batch dimension"),
        ({"state": np.zeros((2, 1, 4), np.float32)}, r"shape \[2, 4\]; the model takes \[2, 3\]"),
        ({"rate": np.zeros(2, np.int64)}, r"shape \[2\]; the model takes \[\]"),
    ],
)
def test_other_shapes_are_refused_by_the_name_of_what_is_wrong(changed: dict[str, Any], said: str) -> None:
    with pytest.raises(BadRequestError, match=said):
        reader().read(json.dumps({"inputs": described(arrays(5) | changed)}).encode())


def signature(**more: Any) -> ModelSignature:
    made = (tuple(TensorSignature(**{**each, "shape": tuple(each["shape"])}) for each in some) for some in SIDES)  # type: ignore[arg-type]
    inputs, outputs = made
    return ModelSignature("tensor", inputs, outputs, **{"sizes": {"tokens": SizeRange(50, 2)}, **more})


SIDES: tuple[list[dict[str, Any]], list[dict[str, Any]]] = (INPUTS, OUTPUTS)


def reader() -> RequestReader:
    interface = ModelInterface.of(signature())
    return RequestReader(interface.inputs, interface.signature)


def test_two_inputs_that_disagree_on_a_size_are_refused_by_its_name() -> None:
    mask = TensorSignature("mask", "int64", ("tokens",))
    made = signature()
    both = ModelInterface.of(ModelSignature("tensor", (*made.inputs, mask), made.outputs, sizes=made.sizes))
    given = arrays(5) | {"mask": np.ones((1, 6), np.int64)}
    with pytest.raises(BadRequestError, match="inputs disagree on 'tokens': 5 and 6"):
        RequestReader(both.inputs, both.signature).read(json.dumps({"inputs": described(given)}).encode())


@pytest.mark.parametrize("shape", [[1, 2**40], [2**40, 0], [2**20, 2**20], [-1, -3], [1, 3, 1], [1, 1, 2**62]])
@pytest.mark.parametrize("data", [[[1, 2, 3]], [1, 2, 3], [[]], []], ids=str)
def test_a_shape_that_its_values_do_not_have_costs_nothing(shape: list[int], data: list[Any]) -> None:
    inputs = [each | ({"shape": shape, "data": data} if each["name"] == "ids" else {}) for each in described(arrays(3))]
    with pytest.raises(BadRequestError, match=r"input 'ids'|'tokens'"):
        reader().read(json.dumps({"inputs": inputs}).encode())


@pytest.mark.parametrize("data", [[], [[]]], ids=str)
def test_an_empty_tensor_is_read_where_the_model_takes_it(data: list[Any]) -> None:
    made = ModelInterface.of(signature(sizes={"tokens": SizeRange(50, 0)}))
    inputs = [each | ({"data": data} if each["name"] == "ids" else {}) for each in described(arrays(0))]
    asked = RequestReader(made.inputs, made.signature).read(json.dumps({"inputs": inputs}).encode())
    assert (asked.header.sizes, bytes(asked.parts[0][0].data)) == ((0,), b"")


BAD: list[tuple[dict[str, Any], str]] = [
    (arrays(51) | {"mask": np.ones((1, 51), np.int64)}, "'tokens' is 51; the model takes 2 to 50"),
    (arrays(1) | {"mask": np.ones((1, 1), np.int64)}, "'tokens' is 1; the model takes 2 to 50"),
    (arrays(5) | {"mask": np.ones((1, 6), np.int64)}, "inputs disagree on 'tokens': 5 and 6. Send all of them with"),
    (arrays(5) | {"mask": np.ones((2, 5), np.int64)}, "disagree on the batch dimension"),
    (arrays(5) | {"mask": np.ones((1, 5, 1), np.int64)}, "input 'mask' has shape [1, 5, 1]"),
    (arrays(5), "missing input mask"),
]


async def test_bad_requests_are_refused_alike_by_every_way_and_harm_no_others(served: Served) -> None:
    mask = {"name": "mask", "dtype": "int64", "shape": ["tokens"]}
    options = {**OPTIONS, "inputs": [*INPUTS, mask]}
    masked = Served()
    await masked.start(
        Plan.from_data(make_plan(options=options).to_data()), "emulated", is_beside=served.server is None
    )

    async def good(tokens: int) -> None:
        for way in (by_json, by_binary, by_grpc):
            assert await way(masked, tokens, 1, ("mask",)) == [[1, tokens, 2], [2, 1, 3]]

    async def bad(given: dict[str, Any], said: str) -> None:
        data = b"".join(array.tobytes() for array in given.values())
        binary = await masked.binary({"inputs": described(given, binary=True)}, data)
        plain = await masked.client.post("/v2/models/m/infer", json={"inputs": described(given)})
        for answer in (binary, plain):
            assert (answer.status_code, said in answer.json()["error"]) == (400, True), answer.text
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await masked.call(message_of(given))
        assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert said in (error.value.details() or "")

    await asyncio.gather(*(bad(*each) for each in BAD), *map(good, range(2, 51, 8)))
    (counts,) = (await masked.client.get("/status")).json()["models"].values()
    assert (counts["ok"], counts["failed"], counts["expired"]) == (21, 0, 0)
    await masked.close()


def test_samples_are_cut_along_the_axis_of_their_batch_and_share_what_has_none() -> None:
    given = arrays(4, 3) | {"state": np.arange(18, dtype=np.float32).reshape(2, 3, 3)}
    asked = reader().read(json.dumps({"inputs": described(given)}).encode())
    assert asked.header.sizes == (4,)
    for sample, (ids, state, rate) in enumerate(asked.parts):
        assert np.frombuffer(ids.data, np.int64).tolist() == given["ids"][sample].tolist()
        assert np.frombuffer(state.data, np.float32).tolist() == given["state"][:, sample].ravel().tolist()
        assert np.frombuffer(rate.data, np.int64).tolist() == [16000]


def test_a_body_without_a_json_part_tells_no_shape() -> None:
    one = TensorSignature("x", "float32", ("n",))
    made = ModelInterface.of(ModelSignature("tensor", (one,), (), sizes={"n": SizeRange(8)}))
    with pytest.raises(BadRequestError, match="'x' takes tensors of several sizes"):
        RequestReader(made.inputs, made.signature).read(bytes(16), 0)


def test_a_size_that_cannot_be_padded_must_be_a_multiple() -> None:
    sizes = {"tokens": SizeRange(48, 0, 16)}
    with pytest.raises(ValueError, match="'tokens' is 5; the model takes multiples of 16"):
        signature(sizes=sizes).sizes_of([(5,), (2, 3), ()])
    ids = TensorSignature("ids", "int64", ("tokens",), pad=0)
    padded = signature(sizes=sizes)
    padded = ModelSignature("tensor", (ids, *padded.inputs[1:]), padded.outputs, sizes=sizes)
    assert padded.padded_sizes == {"tokens"}
    assert padded.sizes_of([(5,), (2, 3), ()]) == (5,)


@pytest.mark.parametrize("sizes", [{}, {"tokens": SizeRange(5), "more": SizeRange(5)}])
def test_a_signature_names_exactly_the_sizes_of_its_inputs(sizes: dict[str, SizeRange]) -> None:
    with pytest.raises(InvalidInputError, match="exactly the sizes that inputs name: tokens"):
        signature(sizes=sizes)


def test_bodies_may_be_as_large_as_the_largest_size_makes_them() -> None:
    made = signature()
    assert most_row_bytes(made.inputs, made.sizes) == 8 * (50 + 6 + 1)
    told = TensorSignature("boxes", "float32", ("found", 4))
    assert most_row_bytes([told], made.sizes) == 8 * 50 * 4


def indexed(folder: Path) -> str:
    """An ONNX model that takes elements of `x` at places, and fails where there is no such place."""
    onnx = pytest.importorskip("onnx")
    make, number = onnx.helper, onnx.TensorProto
    nodes = [make.make_node("GatherElements", ["x", "places"], ["y"], axis=1)]
    shapes = {"x": (number.FLOAT, ["batch", "n"]), "places": (number.INT64, ["batch", "k"])}
    inputs = [make.make_tensor_value_info(name, *typed) for name, typed in shapes.items()]
    outputs = [make.make_tensor_value_info("y", number.FLOAT, ["batch", "k"])]
    opset = make.make_opsetid("", 17)
    made = make.make_model(make.make_graph(nodes, "net", inputs, outputs), opset_imports=[opset], ir_version=9)
    onnx.save(made, folder / "net.onnx")
    return str(folder / "net.onnx")


@pytest.mark.parametrize("streaming", [True, False])
async def test_a_file_answers_mixed_sizes_and_one_bad_request_never_harms_its_batch(
    streaming: bool, tmp_path: Path
) -> None:
    pytest.importorskip("onnxruntime")
    served, dice = Served(), np.random.default_rng(44)
    options = {"sizes": {"n": 40, "k": 5}, "pad": {"x": 0, "places": 0}}
    made = make_plan("cpu", source=indexed(tmp_path), options=options)
    await served.start(Plan.from_data({**made.to_data(), "streaming": streaming}))

    async def ask(number: int) -> None:
        n, k = int(dice.integers(1, 41)), int(dice.integers(1, 6))
        x, places = dice.random((1, n), np.float32), dice.integers(0, n, (1, k))
        is_bad = number % 7 == 3
        given = {"x": x, "places": places + 1000 * is_bad}
        answer = await served.client.post("/v2/models/m/infer", json={"inputs": described(given)})
        if is_bad:
            assert answer.status_code == 500
            assert "running 'm' failed" in answer.json()["error"]
            return
        (output,) = answer.json()["outputs"]
        assert output["shape"] == [1, k]
        np.testing.assert_array_equal(np.float32(output["data"]), x[0, places[0]])

    await asyncio.gather(*map(ask, range(40)))
    await served.close()


async def test_more_outputs_than_the_sizes_allow_fail_that_request_alone(tmp_path: Path) -> None:
    """A network whose outputs no size bounds could otherwise send more than a connection takes."""
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    make, number = onnx.helper, onnx.TensorProto
    x, y = (make.make_tensor_value_info(name, number.INT64, shape) for name, shape in (("x", [1]), ("y", ["made"])))
    graph = make.make_graph([make.make_node("ConstantOfShape", ["x"], ["y"], value=ones(onnx))], "net", [x], [y])
    made = make.make_model(graph, opset_imports=[make.make_opsetid("", 17)], ir_version=9)
    onnx.save(made, tmp_path / "net.onnx")
    served = Served()
    await served.start(make_plan("cpu", source=str(tmp_path / "net.onnx")))
    asked = [{"name": "x", "datatype": "INT64", "shape": [1], "data": [count]} for count in (3, 100_000, 4096)]
    answers = await asyncio.gather(*(served.client.post("/v2/models/m/infer", json={"inputs": [a]}) for a in asked))
    assert [answer.status_code for answer in answers] == [200, 500, 200]
    assert [len(answer.json()["outputs"][0]["data"]) for answer in answers[::2]] == [3, 4096]
    await served.close()


def ones(onnx: Any) -> Any:
    return onnx.helper.make_tensor("value", onnx.TensorProto.INT64, [1], [1])
