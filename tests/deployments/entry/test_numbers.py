"""What is done with numbers on their way, for every type that is served, against exact arithmetic: nothing wraps, no
digit is lost, and values are sorted by what they are."""

from __future__ import annotations

import json
import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from tenuto.deployments.entry.http.exchange import BadRequestError
from tenuto.deployments.entry.protocols.oip_answers import JsonRows, encode_response
from tenuto.deployments.entry.protocols.oip_requests import RequestReader, TensorSpec
from tenuto.deployments.wire.answers import Executed
from tenuto.deployments.wire.tensors import DATATYPES, OutputTensor, RowOutput
from tenuto.profiles.networks.catalogue import DTYPES, LoadedModel, ModelSignature, TensorSignature
from tenuto.profiles.networks.hooks import made_inputs
from tenuto.profiles.networks.inputs import as_blocks, fitted
from tenuto.profiles.networks.model_options import RunOptions
from tenuto.profiles.networks.preprocess import postprocess
from tenuto.profiles.networks.programs import lone_program

torch = pytest.importorskip("torch")
NAMES = {dtype: datatype for datatype, dtype in DATATYPES.items()}


def values_of(dtype: str) -> np.ndarray[Any, Any]:
    """Values of a type that arithmetic in another type, or in this one, would change."""
    kind = np.dtype(dtype).kind
    if kind == "b":
        return np.array([False, True, False, True])
    if kind in "iu":
        known = np.iinfo(dtype)
        some = (known.min, known.min + 1, 0, 1, 2, 100, known.max // 2, known.max - 2, known.max - 1, known.max)
        return np.array([some[at] for at in (3, 9, 0, 5, 7, 1, 8, 2, 4, 6, 9)], dtype)
    known_floats: Any = np.finfo(np.dtype(dtype))
    some_floats = (0.1, -0.1, 0.0, -0.0, 1 / 3, 1000.1, known_floats.max, known_floats.min, known_floats.tiny)
    return np.array(some_floats, dtype)


def exact(value: Any) -> Fraction:
    return Fraction(value.item())


def signature_of(dtype: str, size: int, given: str = "float32") -> ModelSignature:
    return ModelSignature("tensor", (TensorSignature("x", given, (size,)),), (TensorSignature("y", dtype, (size,)),))


@pytest.mark.parametrize("dtype", DTYPES)
def test_classes_are_sorted_by_their_own_values(dtype: str) -> None:
    values = values_of(dtype)
    best = sorted(range(len(values)), key=lambda at: (-exact(values[at]), at))
    tensor = OutputTensor("y", dtype, values.shape, memoryview(values.tobytes()))
    spec = TensorSpec("x", "float32", (1,))
    asked = json.dumps(
        {
            "inputs": [{"name": "x", "shape": [1, 1], "datatype": "FP32", "data": [1]}],
            "outputs": [{"name": "y", "parameters": {"classification": len(values)}}],
        }
    ).encode()
    header = RequestReader([spec]).read(asked).header
    text, _ = encode_response(b'"model_name":"m"', header, [[tensor]], b"{}")
    shown = [each.split(":") for each in json.loads(text)["outputs"][0]["data"]]
    assert [int(at) for _, at in shown] == best
    for written, at in shown:
        value = values[int(at)]
        assert Fraction(written) == exact(value) if value.dtype.kind != "f" else written == f"{value.item():f}"
    found = postprocess(signature_of(dtype, len(values)), {"y": values})
    assert [each["index"] for each in found] == best[:5]
    for each in found:
        assert each["logit"] == round(values[each["index"]].item(), 6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_json_and_typed_contents_have_every_digit(dtype: str) -> None:
    values = values_of(dtype)
    output = RowOutput("y", dtype, values.shape, values.nbytes)
    row = Executed(1, "g", False, 0.0, 0.0, 0.0, 1.0, 1, [output], [memoryview(values.tobytes())], 1.0)
    data = json.loads(JsonRows(row).text(0))["data"]
    assert np.array(data, dtype).tobytes() == values.tobytes()
    body = {"inputs": [{"name": "x", "shape": [1, len(values)], "datatype": NAMES[dtype], "data": values.tolist()}]}
    spec = TensorSpec("x", dtype, values.shape)
    read = RequestReader([spec]).read(json.dumps(body).encode())
    assert bytes(read.parts[0][0].data) == values.tobytes()


@pytest.mark.parametrize("dtype", [dtype for dtype in DTYPES if dtype != "float16"])  # gRPC has no field for it
def test_typed_contents_of_grpc_have_every_digit(dtype: str) -> None:
    messages = pytest.importorskip("tenuto.deployments.entry.protocols.grpc_messages")
    values = values_of(dtype)
    asked = messages.InferRequest(model_name="m")
    given = asked.inputs.add(name="x", datatype=NAMES[dtype], shape=[1, len(values)])
    kind, wide = np.dtype(dtype).kind, np.dtype(dtype).itemsize == 8
    field = {"b": "bool", "i": "int64" if wide else "int", "u": "uint64" if wide else "uint"}.get(kind)
    getattr(given.contents, f"{field or ('fp64' if wide else 'fp32')}_contents").extend(values.tolist())
    _, data = messages.InferReader().read(memoryview(bytearray(asked.SerializeToString())))
    assert bytes(data) == values.tobytes()


class Same(torch.nn.Module):
    """Returns what it is given."""

    def forward(self, tensor: Any) -> Any:
        return tensor


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_network_is_given_and_gives_every_digit(dtype: str) -> None:
    values = values_of(dtype)[None]
    runner = lone_program("m", LoadedModel(Same().eval(), signature_of(dtype, values.shape[1], dtype)), RunOptions())
    found = runner.run({"m": as_blocks({"x": values})}, {"m": 1})["m"]["y"]
    assert found.dtype == values.dtype
    assert found.tobytes() == values.tobytes()


@pytest.mark.parametrize("to", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_converted_keeps_its_values_or_is_refused(dtype: str, to: str) -> None:
    for value in values_of(dtype):
        one = np.array([value])
        try:
            made = fitted(one, to)[0]
        except ValueError:
            continue
        if np.dtype(to).kind == "f":
            nearest = float(value.item())
            assert math.isfinite(made)
            assert made == np.array(nearest).astype(to) or abs(exact(made) - exact(value)) <= abs(exact(value)) / 2**10
        else:
            assert exact(made) == exact(value)


def test_hooks_and_networks_that_give_another_type_do_not_wrap() -> None:
    signature = ModelSignature("tensor", (TensorSignature("x", "int8", (1,)),), (TensorSignature("y", "int8", (1,)),))
    assert made_inputs(signature, {"x": np.array([-128], np.int64)})[0].tolist() == [-128]
    with pytest.raises(Exception, match="128 does not fit int8"):
        made_inputs(signature, {"x": np.array([128], np.int64)})
    wide = ModelSignature("tensor", (TensorSignature("x", "int64", (1,)),), signature.outputs)
    runner = lone_program("m", LoadedModel(Same().eval(), wide), RunOptions())
    assert runner.run({"m": as_blocks({"x": np.array([[127]])})}, {"m": 1})["m"]["y"].tolist() == [[127]]
    with pytest.raises(Exception, match="128 does not fit int8"):
        runner.run({"m": as_blocks({"x": np.array([[128]])})}, {"m": 1})


def test_a_type_that_is_not_served_is_named_with_those_that_are() -> None:
    for dtype in ("str", "complex64", "FP32", "float8"):
        with pytest.raises(Exception, match=r"is not served.*float32"):
            TensorSignature("x", dtype, (1,))


def test_bf16_is_widened_without_a_change_and_only_as_binary_data() -> None:
    values = torch.tensor([0.1, -1 / 3, 3e38, float("inf"), 1e-40, -0.0]).to(torch.bfloat16)
    data = values.view(torch.int16).numpy().tobytes()
    reader = RequestReader([TensorSpec("x", "float32", (3,)), TensorSpec("n", "int64", (1,))])

    def described(**more: Any) -> list[dict[str, Any]]:
        x = {"name": "x", "shape": [2, 3], "datatype": "BF16", **more}
        return [x, {"name": "n", "shape": [2, 1], "datatype": "INT64", "data": [1, 2]}]

    head = json.dumps({"inputs": described(parameters={"binary_data_size": len(data)})}).encode()
    samples = reader.read(head + data, len(head)).parts
    read = np.concatenate([np.frombuffer(x.data, np.float32) for x, _ in samples])
    np.testing.assert_array_equal(read.view(np.uint32), values.float().numpy().view(np.uint32))
    with pytest.raises(BadRequestError, match="BF16, which is sent as binary data"):
        reader.read(json.dumps({"inputs": described(data=[0.5] * 6)}).encode())
    with pytest.raises(BadRequestError, match="announces 24 binary bytes; its shape needs 12"):
        reader.read(json.dumps({"inputs": described(parameters={"binary_data_size": 24})}).encode())
    whole = {"inputs": [{"name": "n", "shape": [1, 1], "datatype": "BF16", "data": [1]}]}
    with pytest.raises(BadRequestError, match="datatype 'BF16'; the model takes INT64"):
        reader.read(json.dumps(whole).encode())
