import contextlib
import json
import tracemalloc
from typing import Any

import numpy as np
import pytest

from tenuto.deployments.entry.http.exchange import BadRequestError
from tenuto.deployments.entry.protocols.oip_answers import JsonRows, NotFiniteError, encode_response
from tenuto.deployments.entry.protocols.oip_requests import (
    JSON_AT_ONCE_BYTES,
    MOST_JSON_BYTES,
    PLAIN,
    InferHeader,
    RequestedOutput,
    RequestReader,
    TensorSpec,
    check_outputs,
    parse_slo,
    priority_from,
)
from tenuto.deployments.wire.answers import Executed
from tenuto.deployments.wire.arena import Arena
from tenuto.deployments.wire.tensors import DATATYPES, OutputTensor, pack_outputs

IMAGE = (TensorSpec("image", "float32", (2, 2)),)
TEXT = (TensorSpec("ids", "int64", (3,), below=10), TensorSpec("mask", "int64", (3,)))


NAMED = b'"model_name":"m","model_version":"1"'
_REGION = {"shared_memory_region": "r", "shared_memory_byte_size": 16}


def _body(inputs: list[dict[str, Any]], **extra: Any) -> bytes:
    return json.dumps({"inputs": inputs, **extra}).encode()


def _image(**changes: Any) -> dict[str, Any]:
    return {"name": "image", "shape": [1, 2, 2], "datatype": "FP32", "data": [1, 2, 3, 4], **changes}


def test_flat_and_nested_json_are_the_same_bytes() -> None:
    flat = RequestReader(IMAGE).read(_body([_image()]))
    nested = RequestReader(IMAGE).read(_body([_image(data=[[[1, 2], [3, 4]]])]))
    assert [bytes(p.data) for p in flat.parts[0]] == [bytes(p.data) for p in nested.parts[0]]
    assert bytes(flat.parts[0][0].data) == np.array([1, 2, 3, 4], np.float32).tobytes()


def test_a_shape_without_the_batch_dimension_is_one_sample() -> None:
    assert len(RequestReader(IMAGE).read(_body([_image(shape=[2, 2])])).parts) == 1


def test_several_samples_are_cut_apart() -> None:
    request = RequestReader(IMAGE).read(_body([_image(shape=[2, 2, 2], data=list(range(8)))]))
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
    request = RequestReader(TEXT).read(header + mask.tobytes() + ids.tobytes(), len(header))
    assert [np.frombuffer(part.data, np.int64).tolist() for part in request.parts[0]] == [[1, 2, 3], [1, 1, 0]]
    assert (request.header.id, request.header.binary_output, request.header.slo_ms) == ("7", True, 12.5)


def test_triton_timeout_is_in_microseconds() -> None:
    assert RequestReader(IMAGE).read(_body([_image()], parameters={"timeout": 5000})).header.slo_ms == 5.0


@pytest.mark.parametrize(
    ("body", "length", "message"),
    [
        (b"{", None, "not valid JSON"),
        (b"[]", None, "Expected `object`"),
        (b"{}", None, "`inputs`"),
        (_body([]), None, "missing input image"),
        (_body([_image(name="picture")]), None, "unknown input 'picture'. The model's inputs: image"),
        (_body([_image(), _image()]), None, "given twice"),
        (_body([_image(datatype="INT8")]), None, "the model takes FP32"),
        (_body([_image(shape=[1, 2, 3])]), None, r"the model takes \[n, 2, 2\]"),
        (_body([_image(shape="big")]), None, r"Expected `array`.*inputs.*shape"),
        (_body([_image(shape=[0, 2, 2])]), None, "n from 1"),
        (_body([_image(data=[1, 2, 3])]), None, "has 3 values"),
        (_body([_image(data=[[1, 2, 3], [4]])]), None, "ragged"),
        (_body([_image(data=["a", "b", "c", "d"])]), None, "not all FP32"),
        (_body([_image(data=[True, False, True, True])]), None, "not all FP32"),
        (_body([{"name": "image", "shape": [1, 2, 2], "datatype": "FP32"}]), None, "neither 'data' nor binary"),
        (_body([_image(parameters={"binary_data_size": 16})]), None, "'data' and binary data. Give one"),
        (_body([{**_image(), "data": [1], "parameters": {"binary_data_size": 16}}]), None, "'data' and binary data"),
        (b"\0" * 15, 0, "has 15 bytes; input 'image' takes 16 bytes of FP32"),
        (b"", 0, "has 0 bytes"),
        (_body([_image()]), 10_000, "Inference-Header-Content-Length is 10000"),
        (_body([_image()], parameters={"slo_ms": "soon"}), None, "slo_ms is 'soon'"),
        (_body([{**_image(), "shape": [1] * 5000}]), None, r"has shape \[1, 1, 1, .{,30}\.\.\.; the model takes"),
        (_body([_image()], parameters=[]), None, r"Expected `object .*parameters"),
        (_body([_image()], outputs="all"), None, r"Expected `array.*outputs"),
        (_body([_image(data=[1e39, 0, 0, 0])]), None, "does not fit FP32"),
        (_body([_image(data=[10**400, 0, 0, 0])]), None, "not valid JSON|not all FP32|does not fit"),
        (_body([_image()], id=["a"]), None, r"Expected `int.*id"),
        (_body([_image(parameters=_REGION)]), None, "input 'image': shared memory .* not offered"),
        (_body([_image()], outputs=[{"name": "y", "parameters": _REGION}]), None, "'y': shared memory .* not off"),
    ],
)
def test_malformed_requests_say_what_is_wrong(body: bytes, length: int | None, message: str) -> None:
    with pytest.raises(BadRequestError, match=message):
        RequestReader(IMAGE).read(body, length)


def test_wrong_binary_sizes_are_refused() -> None:
    header = _body([{"name": "image", "shape": [1, 2, 2], "datatype": "FP32", "parameters": {"binary_data_size": 16}}])
    with pytest.raises(BadRequestError, match="ends 8 bytes before"):
        RequestReader(IMAGE).read(header + bytes(8), len(header))
    with pytest.raises(BadRequestError, match="4 bytes follow"):
        RequestReader(IMAGE).read(header + bytes(20), len(header))
    short = _body([{"name": "image", "shape": [1, 2, 2], "datatype": "FP32", "parameters": {"binary_data_size": 8}}])
    with pytest.raises(BadRequestError, match="its shape needs 16"):
        RequestReader(IMAGE).read(short + bytes(8), len(short))


def test_a_header_that_was_seen_before_is_filled_with_what_follows_it_now() -> None:
    known, texts = RequestReader(IMAGE), RequestReader(TEXT)
    header = _body([{"name": "image", "shape": [1, 2, 2], "datatype": "FP32", "parameters": {"binary_data_size": 16}}])
    arena = Arena(1 << 20)
    for body in [bytes([number] * 16) for number in range(3)]:
        slot = arena.take(100)
        assert slot is not None
        parsed = known.read(header + body, len(header), slot)
        part = parsed.parts[0][0]
        assert (bytes(part.data), part.arena, part.offset) == (body, arena.name, slot.offset + len(header))
    with pytest.raises(BadRequestError, match="4 bytes follow"):
        known.read(header + bytes(20), len(header))
    text = _body(
        [
            {"name": "ids", "shape": [1, 3], "datatype": "INT64", "parameters": {"binary_data_size": 24}},
            {"name": "mask", "shape": [1, 3], "datatype": "INT64", "data": [1, 1, 1]},
        ]
    )
    texts.read(text + np.array([1, 2, 9]).tobytes(), len(text))
    with pytest.raises(BadRequestError, match="outside 0 to 9"):  # values are looked at each time
        texts.read(text + np.array([1, 2, 10]).tobytes(), len(text))


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
        RequestReader(TEXT).read(body)


def test_numbers_that_do_not_fit_the_type_are_refused() -> None:
    spec = (TensorSpec("x", "uint8", (2,)),)
    body = _body([{"name": "x", "shape": [1, 2], "datatype": "UINT8", "data": [0, 256]}])
    with pytest.raises(BadRequestError, match="does not fit UINT8"):
        RequestReader(spec).read(body)


def test_a_model_says_which_further_types_it_takes() -> None:
    spec = (TensorSpec("x", "float32", (2,), accepts=("uint8", "float16")),)
    for datatype, dtype in (("UINT8", "uint8"), ("FP16", "float16"), ("FP32", "")):
        body = _body([{"name": "x", "shape": [1, 2], "datatype": datatype, "data": [1, 255]}])
        ((part,),) = RequestReader(spec).read(body).parts
        assert (part.dtype, np.frombuffer(part.data, dtype or "float32").tolist()) == (dtype, [1, 255])
    with pytest.raises(BadRequestError, match="takes FP32 or UINT8 or FP16"):
        RequestReader(spec).read(_body([{"name": "x", "shape": [1, 2], "datatype": "FP64", "data": [1, 2]}]))


def test_binary_tensors_stay_where_the_body_lies() -> None:
    header = _body([{"name": "image", "shape": [2, 2, 2], "datatype": "FP32", "parameters": {"binary_data_size": 32}}])
    body = memoryview(bytearray(header + bytes(32)))
    arena = Arena(1 << 20)
    arena.take(1)
    slot = arena.take(len(body))
    assert slot is not None
    request = RequestReader(IMAGE).read(body, len(header), slot)
    places = [(part.arena, part.offset, part.nbytes) for (part,) in request.parts]
    at = slot.offset + len(header)
    assert places == [(arena.name, at, 16), (arena.name, at + 16, 16)]
    assert slot.offset > 0
    assert request.parts[0][0].data.obj is body.obj


def test_inputs_must_agree_on_the_batch() -> None:
    body = _body(
        [
            {"name": "ids", "shape": [2, 3], "datatype": "INT64", "data": [1] * 6},
            {"name": "mask", "shape": [1, 3], "datatype": "INT64", "data": [1] * 3},
        ]
    )
    with pytest.raises(BadRequestError, match="disagree on the batch dimension"):
        RequestReader(TEXT).read(body)


def _tensor(values: list[float]) -> OutputTensor:
    return OutputTensor("logits", "float32", (len(values),), memoryview(np.array(values, np.float32).tobytes()))


def test_json_response_lists_the_samples() -> None:
    request = InferHeader("a", [], 0, 2, None, False, None)
    text, binary = encode_response(NAMED, request, [[_tensor([1, 2])], [_tensor([3, 4])]], b'{"queue_ms": 1.0}')
    assert binary == []
    assert json.loads(text) == {
        "model_name": "m",
        "model_version": "1",
        "id": "a",
        "parameters": {"queue_ms": 1.0},
        "outputs": [{"name": "logits", "datatype": "FP32", "shape": [2, 2], "data": [1, 2, 3, 4]}],
    }


@pytest.mark.parametrize("dtype", sorted(DATATYPES.values()))
def test_a_row_of_a_batch_reads_as_the_answer_to_its_request_does(dtype: str) -> None:
    dice, rows = np.random.default_rng(27), 3
    for shapes in [((),), ((2,), (3, 1)), ((0,), (2, 2)), ()]:
        arrays = {f"y{i}": dice.integers(0, 2, (rows, *shape)).astype(dtype) for i, shape in enumerate(shapes)}
        described, buffers = pack_outputs(arrays, rows)
        executed = Executed(rows, "g", True, 0.0, 0.0, 0.0, 1.0, rows, described, buffers)
        shown = JsonRows(executed)
        for row in range(rows):
            whole, binary = encode_response(NAMED, PLAIN, [executed.tensors(row)], b"{}")
            assert whole == b'{%b,"outputs":[%b],"parameters":{}}' % (NAMED, shown.text(row))
            assert [each["data"] for each in json.loads(whole)["outputs"]] == [
                array[row].ravel().tolist() for array in arrays.values()
            ]
            assert not binary


def test_a_row_that_is_not_finite_is_refused_and_the_others_are_not() -> None:
    described, buffers = pack_outputs({"y": np.array([[1.0, 2.0], [np.nan, 1.0], [np.inf, 0.0]])}, 3)
    shown = JsonRows(Executed(3, "g", True, 0.0, 0.0, 0.0, 1.0, 3, described, buffers))
    assert json.loads(shown.text(0))["data"] == [1.0, 2.0]
    for row in (1, 2):
        with pytest.raises(NotFiniteError, match="'y'"):
            shown.text(row)


def test_binary_response_follows_its_json() -> None:
    request = InferHeader("", [], 0, 1, None, True, None)
    text, (data,) = encode_response(NAMED, request, [[_tensor([1, 2])]], b"{}")
    assert json.loads(text)["outputs"][0]["parameters"] == {"binary_data_size": 8}
    assert np.frombuffer(data, np.float32).tolist() == [1, 2]


@pytest.mark.parametrize("binary", [False, True])
def test_classification_gives_the_best_labels(binary: bool) -> None:
    request = InferHeader("", [], 0, 1, [RequestedOutput("logits", binary, 2)], False, None)
    text, tensors = encode_response(NAMED, request, [[_tensor([0.5, 3, 2])]], b"{}", labels=("cat", "dog", "cow"))
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


@pytest.mark.parametrize("value", ["nan", "inf", None, True, "later", "1_0", "1e-320", "9" * 5000])
def test_time_allowed_must_be_a_finite_number(value: Any) -> None:
    with pytest.raises(BadRequestError, match="Give a number of at most"):
        parse_slo(value, "header X-SLO-Ms")


@pytest.mark.parametrize("dtype", sorted(DATATYPES.values()))
def test_values_are_numpys_whatever_their_type_number_and_nesting(dtype: str) -> None:
    dice = np.random.default_rng(26)
    for shape in ((2,), (3, 4), (), (2, 3, 4), (9000,)):
        spec = TensorSpec("x", dtype, shape)
        for count in (1, 2):
            whole = (count, *shape)
            if dtype == "bool":
                array = dice.integers(0, 2, whole).astype(bool)
            elif dtype.startswith("float"):
                array = dice.normal(size=whole).astype(dtype)
            else:
                limits = np.iinfo(dtype)
                array = dice.integers(limits.min, limits.max, whole, dtype=dtype, endpoint=True)
            for data in (array.tolist(), array.ravel().tolist()):
                body = _body([{"name": "x", "shape": list(whole), "datatype": spec.datatype, "data": data}])
                parts = RequestReader([spec]).read(body).parts
                assert b"".join(bytes(part.data) for (part,) in parts) == array.tobytes()


MIB = 1 << 20
ENDLESS = {
    "numbers": b"1,",
    "floats": b"1e5,",
    "lists": b"[1],",
    "empty lists": b"[],",
    "objects": b"{},",
    "names": b'{"a":1},',
    "texts": b'"",',
    "nulls": b"null,",
    "large numbers": b"99999999999999999999,",
}


@pytest.mark.parametrize("part", ENDLESS)
@pytest.mark.parametrize("where", ["data", "inputs", "outputs", "parameters", "shape", "more", "id"])
@pytest.mark.parametrize("size", [JSON_AT_ONCE_BYTES, MOST_JSON_BYTES])
def test_what_is_refused_was_not_built_before(part: str, where: str, size: int) -> None:
    """The work is counted by the memory it takes: as an object a value of two bytes takes up to 200."""
    values = b"[%b1]" % (ENDLESS[part] * ((size - 200) // len(ENDLESS[part])))
    fields = {b"name": b'"image"', b"datatype": b'"FP32"', b"shape": b"[1,2,2]", b"data": b"[1,2,3,4]"}
    if where in ("data", "shape"):
        fields[where.encode()] = values
    tensor = b"{%b}" % b",".join(b'"%b":%b' % field for field in fields.items())
    others = b"" if where in ("data", "shape", "inputs") else b',"%b":%b' % (where.encode(), values)
    body = b'{"inputs":%b%b}' % (values if where == "inputs" else b"[%b]" % tensor, others)
    reader = RequestReader(IMAGE)
    tracemalloc.start()
    try:
        with contextlib.suppress(BadRequestError):  # what nobody asks for is passed over
            reader.read(body)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < (MIB * 5 // 2 if size < MIB else 5 * size), peak


@pytest.mark.parametrize(("priority", "yields"), [(None, False), (0, False), (1, False), (2, True), (2**40, True)])
def test_a_priority_lowers_a_rank_and_never_raises_it(priority: int | None, yields: bool) -> None:
    assert priority_from({} if priority is None else {"priority": priority}) == (yields, False)


def test_a_priority_may_be_offline() -> None:
    assert priority_from({"priority": "offline"}) == (False, True)
