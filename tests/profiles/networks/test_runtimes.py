"""Networks by AOTInductor and ONNX Runtime, really compiled and converted on this CPU, behind the same runner."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tenuto.errors import EnvironmentFaultError, InvalidInputError
from tenuto.profiles.networks.inputs import as_blocks
from tenuto.profiles.networks.model_options import ModelOptions
from tenuto.profiles.networks.models import build
from tenuto.profiles.networks.programs import Member, load_program, lone_program
from tenuto.profiles.networks.runner import ProgramRunner
from tenuto.profiles.networks.runtimes import ONNX_NUMBERS, ONNX_TYPES

onnxruntime = pytest.importorskip("onnxruntime")
OWN = "tests.instruments.own_models:scale"


def load(runtime: str) -> ProgramRunner:
    return load_program([Member("m", OWN, options={"runtime": runtime})], [1, 2, 4])


def check(runner: ProgramRunner, rows: int) -> None:
    x = np.arange(rows * 4, dtype=np.float32).reshape(rows, 4)
    outputs: dict[str, Any] = runner.run({"m": as_blocks({"x": x})}, {"m": rows})["m"]
    np.testing.assert_allclose(outputs["y"], 2.0 * x)
    np.testing.assert_allclose(outputs["total"], x.sum(axis=1))


@pytest.mark.skipif(shutil.which("g++") is None, reason="AOTInductor needs a C++ compiler and there is none")
@pytest.mark.filterwarnings("ignore")  # Inductor leaves deprecated calls to be warned about
@pytest.mark.usefixtures("kernels_alone")
def test_a_program_compiled_ahead_of_time_answers_as_the_module_at_every_size(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch._inductor.config as inductor

    monkeypatch.setattr(inductor.aot_inductor, "compile_wrapper_opt_level", "O0")  # half of the time is C++
    runner = load("aot_inductor")
    assert [rows["m"] for rows in runner.network.warm_up_rows()] == [1, 2, 4]
    for rows in (1, 3, 4):
        check(runner, rows)


def test_onnx_runtime_answers_as_the_module_at_every_size() -> None:
    runner = load("onnxruntime")
    for rows in (1, 3):
        check(runner, rows)


def test_a_provider_that_is_not_there_is_named_with_those_that_are() -> None:
    with pytest.raises(EnvironmentFaultError, match=r"no TensorrtExecutionProvider here, only .*CPUExecutionProvider"):
        load("tensorrt")


def test_without_the_package_the_cure_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "onnxruntime", None)
    with pytest.raises(EnvironmentFaultError, match="pip install 'tenuto\\[onnx\\]'"):
        load("onnxruntime")


class Untraceable(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if bool(x.sum() > 0) else x


@pytest.mark.parametrize("runtime", ["aot_inductor", "onnxruntime"])
@pytest.mark.filterwarnings("ignore")
def test_a_network_that_cannot_be_exported_is_named_with_the_cure(runtime: str) -> None:
    loaded = build(OWN)
    wrong = type(loaded)(Untraceable().eval(), loaded.signature)
    with pytest.raises(EnvironmentFaultError, match=rf"'m' cannot be .*(`runtime: {runtime}`|`runtime`)"):
        lone_program("m", wrong, ModelOptions.parse({"runtime": runtime}, "m").run, [1, 2])


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One network as an exported program and as an ONNX model, each with a batch of any size."""
    import warnings

    folder = tmp_path_factory.mktemp("exported")
    module, x = build(OWN).module, torch.zeros(2, 4)
    shapes = ({0: torch.export.Dim("batch", min=1, max=64)},)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.export.save(torch.export.export(module, (x,), dynamic_shapes=shapes), folder / "scale.pt2")
        torch.onnx.export(
            module,
            (x,),
            str(folder / "scale.onnx"),
            input_names=["x"],
            output_names=["y", "total"],
            dynamic_shapes=shapes,
            dynamo=True,
            verbose=False,
        )
        torch.export.save(torch.export.export(module, (x,)), folder / "fixed.pt2")
    return folder


@pytest.mark.parametrize("kind", ["pt2", "onnx"])
def test_an_exported_file_is_a_source_with_the_signature_it_tells(kind: str, files: Path) -> None:
    runner = load_program([Member("m", str(files / f"scale.{kind}"))], [1, 4])
    (signature,) = runner.signatures.values()
    assert [(t.dtype, t.shape) for t in (*signature.inputs, *signature.outputs)] == [
        ("float32", (4,)),
        ("float32", (4,)),
        ("float32", ()),
    ]
    assert signature.platform == ("torch.export" if kind == "pt2" else "onnx")
    x = np.ones((3, 4), np.float32)
    first, total = runner.run({"m": {signature.inputs[0].name: (x,)}}, {"m": 3})["m"].values()
    np.testing.assert_allclose(first, 2.0 * x)
    np.testing.assert_allclose(total, [4.0] * 3)


def test_files_that_cannot_be_served_say_why(files: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """And nothing else: torch prints a traceback of its own of a damaged archive."""
    (tmp_path / "damaged.onnx").write_bytes(b"no model")
    (tmp_path / "damaged.pt2").write_bytes(b"no archive")
    wrong = {
        tmp_path / "none.onnx": "no such file",
        tmp_path / "damaged.onnx": "cannot be read",
        tmp_path / "damaged.pt2": "cannot be read",
    }
    for source, words in wrong.items():
        with pytest.raises(InvalidInputError, match=words):
            build(str(source))
    assert "Traceback" not in "".join(capfd.readouterr())
    with pytest.raises(InvalidInputError, match="takes no image_size"):
        build(str(files / "scale.onnx"), options={"image_size": 32})


@pytest.mark.parametrize("word", sorted(set(ONNX_TYPES.values())))
def test_onnx_files_of_every_type_are_served(word: str, tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    number = onnx.TensorProto.STRING if word == "bytes" else ONNX_NUMBERS[f"torch.{word}"]
    x, y = (onnx.helper.make_tensor_value_info(name, number, ["n", 4]) for name in "xy")
    same = onnx.helper.make_graph([onnx.helper.make_node("Identity", ["x"], ["y"])], "same", [x], [y])
    opset = onnx.helper.make_opsetid("", 17)
    onnx.save(onnx.helper.make_model(same, opset_imports=[opset], ir_version=9), tmp_path / "same.onnx")
    runner = load_program([Member("m", str(tmp_path / "same.onnx"))], [1, 2])
    if word == "bytes":
        given = np.array(
            [b"", "\u00fc\u6c34".encode(), b"a\0", *[b"%d" % number for number in range(5)]], object
        ).reshape(2, 4)
    else:
        given = np.arange(8).reshape(2, 4).astype(runner.network.signatures["m"].inputs[0].dtype)
    np.testing.assert_array_equal(runner.run({"m": as_blocks({"x": given})}, {"m": 2})["m"]["y"], given)
