import json
from typing import Any

import numpy as np
import pytest

from tenuto.deployments.entry.oip import (
    BadRequestError,
    InferRequest,
    KnownHeaders,
    RequestedOutput,
    TensorSpec,
    check_outputs,
    encode_response,
    parse_infer,
    parse_slo,
)
from tenuto.deployments.wire.tensors import OutputTensor

IMAGE = (TensorSpec("image", "float32", (2, 2)),)
TEXT = (TensorSpec("ids", "int64", (3,), below=10), TensorSpec("mask", "int64", (3,)))


def _body(inputs: list[dict[str, Any]], **extra: Any) -> bytes:
    return json.dumps({"inputs": inputs, **extra}).encode()


def _image(**changes: Any) -> dict[str, Any]:
    return {"name": "image", "shape": [1, 2, 2], "datatype": "FP32", "data": [1, 2, 3, 4], **changes}


def test_flat_and_nested_json_are_the_same_bytes() -> None:
    flat = parse_infer(_body([_image()]), None, IMAGE)
    nested = parse_infer(_body([_image(data=[[[1, 2], [3, 4]]])]), None, IMAGE)
    assert [bytes(p.data) for p in flat.parts[0]] == [bytes(p.data) for p in nested.parts[0]]
    assert bytes(flat.parts[0][0].data) == np.array([1, 2, 3, 4], np.float32).tobytes()


def test_a_shape_without_the_batch_dimension_is_one_sample() -> None:
    assert len(parse_infer(_body([_image(shape=[2, 2])]), None, IMAGE).parts) == 1


def test_several_samples_are_cut_apart() -> None:
    request = parse_infer(_body([_image(shape=[2, 2, 2], data=list(range(8)))]), None, IMAGE)
    samples = [np.frombuffer(part.data, np.float32).tolist() for (part,) in request.parts]
    assert samples == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_binary_tensors_follow_the_json() -> None:
    ids, mask = np.array([1, 2, 3]), np.array([1, 1, 0])
    header = _body(
        [
            {"name": "mask", "shape": [1, 3], "datatype": "INT64", "parameters": {"binary_data_size": 24}},
            {"name": "ids", "shape": [1, 3], "datatype": "INT64", "parameters": {"binary_data_size": 24}},
        ],
        id="7",
        parameters={"binary_data_output": True, "slo_ms": 12.5},
    )
    request = parse_infer(header + mask.tobytes() + ids.tobytes(), len(header), TEXT)
    assert [np.frombuffer(part.data, np.int64).tolist() for part in request.parts[0]] == [[1, 2, 3], [1, 1, 0]]
    assert (request.id, request.binary_output, request.slo_ms) == ("7", True, 12.5)


def test_triton_timeout_is_in_microseconds() -> None:
    assert parse_infer(_body([_image()], parameters={"timeout": 5000}), None, IMAGE).slo_ms == 5.0


@pytest.mark.parametrize(
    ("body", "length", "message"),
    [
        (b"{", None, "not valid JSON"),
        (b"[]", None, "'inputs'"),
        (b"{}", None, "'inputs'"),
        (_body([]), None, "missing input image"),
        (_body([_image(name="picture")]), None, "unknown input 'picture'. The model's inputs: image"),
        (_body([_image(), _image()]), None, "given twice"),
        (_body([_image(datatype="INT8")]), None, "the model takes FP32"),
        (_body([_image(shape=[1, 2, 3])]), None, r"the model takes \[n, 2, 2\]"),
        (_body([_image(shape="big")]), None, "whole numbers"),
        (_body([_image(shape=[0, 2, 2])]), None, "n from 1"),
        (_body([_image(data=[1, 2, 3])]), None, "has 3 values"),
        (_body([_image(data=[[1, 2], [3]])]), None, "ragged"),
        (_body([_image(data=["a", "b", "c", "d"])]), None, "not all FP32"),
        (_body([_image(data=[True, False, True, True])]), None, "not all FP32"),
        (_body([{"name": "image", "shape": [1, 2, 2], "datatype": "FP32"}]), None, "neither 'data' nor binary"),
        (_body([_image(parameters={"binary_data_size": 3})]), 0, "not valid JSON"),
        (_body([_image()]), 10_000, "Inference-Header-Content-Length is 10000"),
        (_body([_image()], parameters={"slo_ms": "soon"}), None, "slo_ms is 'soon'"),
        (_body([_image()], parameters=[]), None, "'parameters' must be an object"),
        (_body([_image()], outputs="all"), None, "'outputs' must be a list"),
        (_body([_image(data=[1e39, 0, 0, 0])]), None, "does not fit FP32"),
        (_body([_image(data=[10**400, 0, 0, 0])]), None, "not valid JSON|not all FP32|does not fit"),
        (_body([_image()], id=["a"]), None, "'id' is"),
        (_body([_image(parameters={"shared_memory_region": "r", "shared_memory_byte_size": 16})]), None, "no shared"),
        (_body([_image(parameters={"shared_memory_region": "r", "shared_memory_byte_size": 8})]), None, "needs 16"),
        (_body([_image(parameters={"shared_memory_region": "r"})]), None, "needs a region's name"),
    ],
)
def test_malformed_requests_say_what_is_wrong(body: bytes, length: int | None, message: str) -> None:
    with pytest.raises(BadRequestError, match=message):
        parse_infer(body, length, IMAGE)


def test_wrong_binary_sizes_are_refused() -> None:
    header = _body([{"name": "image", "shape": [1, 2, 2], "datatype": "FP32", "parameters": {"binary_data_size": 16}}])
    with pytest.raises(BadRequestError, match="ends 8 bytes before"):
        parse_infer(header + bytes(8), len(header), IMAGE)
    with pytest.raises(BadRequestError, match="4 bytes follow"):
        parse_infer(header + bytes(20), len(header), IMAGE)
    short = _body([{"name": "image", "shape": [1, 2, 2], "datatype": "FP32", "parameters": {"binary_data_size": 8}}])
    with pytest.raises(BadRequestError, match="its shape needs 16"):
        parse_infer(short + bytes(8), len(short), IMAGE)


def test_a_header_that_was_seen_before_is_filled_with_what_follows_it_now() -> None:
    known = KnownHeaders()
    header = _body([{"name": "image", "shape": [1, 2, 2], "datatype": "FP32", "parameters": {"binary_data_size": 16}}])
    bodies = [bytes([number] * 16) for number in range(3)]
    for place, body in enumerate(bodies):
        parsed = parse_infer(header + body, len(header), IMAGE, arena="a", offset=1000 * place, known=known)
        part = parsed.parts[0][0]
        assert (bytes(part.data), part.arena, part.offset) == (body, "a", 1000 * place + len(header))
    with pytest.raises(BadRequestError, match="4 bytes follow"):
        parse_infer(header + bytes(20), len(header), IMAGE, known=known)
    text = _body(
        [
            {"name": "ids", "shape": [1, 3], "datatype": "INT64", "parameters": {"binary_data_size": 24}},
            {"name": "mask", "shape": [1, 3], "datatype": "INT64", "data": [1, 1, 1]},
        ]
    )
    parse_infer(text + np.array([1, 2, 9]).tobytes(), len(text), TEXT, known=known)
    with pytest.raises(BadRequestError, match="outside 0 to 9"):  # values are looked at each time
        parse_infer(text + np.array([1, 2, 10]).tobytes(), len(text), TEXT, known=known)


@pytest.mark.parametrize(
    ("ids", "message"), [([1, 2, 10], "outside 0 to 9"), ([-1, 2, 3], "outside 0 to 9"), ([1.5, 2, 3], "not all INT64")]
)
def test_token_ids_outside_the_vocabulary_never_reach_the_model(ids: list[float], message: str) -> None:
    body = _body(
        [
            {"name": "ids", "shape": [1, 3], "datatype": "INT64", "data": ids},
            {"name": "mask", "shape": [1, 3], "datatype": "INT64", "data": [1, 1, 1]},
        ]
    )
    with pytest.raises(BadRequestError, match=message):
        parse_infer(body, None, TEXT)


def test_numbers_that_do_not_fit_the_type_are_refused() -> None:
    spec = (TensorSpec("x", "uint8", (2,)),)
    body = _body([{"name": "x", "shape": [1, 2], "datatype": "UINT8", "data": [0, 256]}])
    with pytest.raises(BadRequestError, match="does not fit UINT8"):
        parse_infer(body, None, spec)


def test_a_model_says_which_further_types_it_takes() -> None:
    spec = (TensorSpec("x", "float32", (2,), accepts=("uint8", "float16")),)
    for datatype, dtype in (("UINT8", "uint8"), ("FP16", "float16"), ("FP32", "")):
        body = _body([{"name": "x", "shape": [1, 2], "datatype": datatype, "data": [1, 255]}])
        ((part,),) = parse_infer(body, None, spec).parts
        assert (part.dtype, np.frombuffer(part.data, dtype or "float32").tolist()) == (dtype, [1, 255])
    with pytest.raises(BadRequestError, match="takes FP32 or UINT8 or FP16"):
        parse_infer(_body([{"name": "x", "shape": [1, 2], "datatype": "FP64", "data": [1, 2]}]), None, spec)


def test_binary_tensors_stay_where_the_body_lies() -> None:
    header = _body([{"name": "image", "shape": [2, 2, 2], "datatype": "FP32", "parameters": {"binary_data_size": 32}}])
    body = memoryview(bytearray(header + bytes(32)))
    request = parse_infer(body, len(header), IMAGE, arena="1:2:3", offset=1000)
    places = [(part.arena, part.offset, part.nbytes) for (part,) in request.parts]
    assert places == [("1:2:3", 1000 + len(header), 16), ("1:2:3", 1000 + len(header) + 16, 16)]
    assert request.parts[0][0].data.obj is body.obj


def test_inputs_must_agree_on_the_batch() -> None:
    body = _body(
        [
            {"name": "ids", "shape": [2, 3], "datatype": "INT64", "data": [1] * 6},
            {"name": "mask", "shape": [1, 3], "datatype": "INT64", "data": [1] * 3},
        ]
    )
    with pytest.raises(BadRequestError, match="disagree on the batch dimension"):
        parse_infer(body, None, TEXT)


def _tensor(values: list[float]) -> OutputTensor:
    return OutputTensor("logits", "float32", (len(values),), memoryview(np.array(values, np.float32).tobytes()))


def test_json_response_lists_the_samples() -> None:
    request = InferRequest("a", [], None, False, None)
    text, binary = encode_response("m", request, [[_tensor([1, 2])], [_tensor([3, 4])]], {"queue_ms": 1.0})
    assert binary == []
    assert json.loads(text) == {
        "model_name": "m", "model_version": "1", "id": "a", "parameters": {"queue_ms": 1.0},
        "outputs": [{"name": "logits", "datatype": "FP32", "shape": [2, 2], "data": [1, 2, 3, 4]}],
    }  # fmt: skip


def test_binary_response_follows_its_json() -> None:
    request = InferRequest("", [], None, True, None)
    text, (data,) = encode_response("m", request, [[_tensor([1, 2])]], {})
    assert json.loads(text)["outputs"][0]["parameters"] == {"binary_data_size": 8}
    assert np.frombuffer(data, np.float32).tolist() == [1, 2]


@pytest.mark.parametrize("binary", [False, True])
def test_classification_gives_the_best_labels(binary: bool) -> None:
    request = InferRequest("", [], [RequestedOutput("logits", binary, 2)], False, None)
    text, tensors = encode_response("m", request, [[_tensor([0.5, 3, 2])]], {}, labels=("cat", "dog", "cow"))
    entry = json.loads(text)["outputs"][0]
    assert (entry["datatype"], entry["shape"]) == ("BYTES", [1, 2])
    if binary:
        (payload,) = tensors
        first = int.from_bytes(payload[:4], "little")
        assert payload[4 : 4 + first] == b"3.000000:1:dog"
    else:
        assert entry["data"] == ["3.000000:1:dog", "2.000000:2:cow"]


def test_unknown_outputs_are_refused() -> None:
    with pytest.raises(BadRequestError, match=r"unknown output 'x'\. The model's outputs: image"):
        check_outputs([RequestedOutput("x", False)], IMAGE)


@pytest.mark.parametrize("value", ["nan", "inf", None, True, "later"])
def test_time_allowed_must_be_a_finite_number(value: Any) -> None:
    with pytest.raises(BadRequestError, match="Give a number of at most"):
        parse_slo(value, "header X-SLO-Ms")
