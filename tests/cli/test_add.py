"""`tenuto add`: what it tells of a file, what it asks for, and the entry that it writes."""

from pathlib import Path
from typing import Any

import pytest

from tenuto.cli import main
from tenuto.documents import load_document
from tenuto.placement import Workload

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quick_workers: None) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def added(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> tuple[str, str]:
    """What it prints on stdout and on stderr."""
    with pytest.raises(SystemExit) as left:
        main(["add", *words])
    shown = capsys.readouterr()
    assert left.value.code == code, shown.err
    return shown.out, shown.err


def save(operator: str, shape: list[Any], **attributes: Any) -> None:
    """Write net.onnx: one operator from x to y."""
    make, kind = onnx.helper, onnx.TensorProto.FLOAT
    x, y = (make.make_tensor_value_info(name, kind, shape) for name in "xy")
    graph = make.make_graph([make.make_node(operator, ["x"], ["y"], **attributes)], "net", [x], [y])
    onnx.save(make.make_model(graph, opset_imports=[make.make_opsetid("", 17)], ir_version=9), "net.onnx")


def test_a_file_is_told_asked_for_sizes_and_written(capsys: pytest.CaptureFixture[str]) -> None:
    save("Relu", ["batch", "tokens"])
    out, err = added(capsys, "net.onnx", code=2)
    assert "takes x: float32 [batch, tokens]" in out
    assert "size tokens: any size; requests of equal shape share a run" in out
    assert "--sizes tokens=N,N" in err
    Path("workload.yaml").write_text(
        "models: [{name: net, rate_rps: 3, slo_ms: 7}, {name: bert, rate_rps: 1, slo_ms: 9}]"
    )
    out, _ = added(capsys, "net.onnx", "--sizes", "tokens=4,16", "--pad", "x=0", "-o", "workload.yaml")
    assert "size tokens: 1 to 16; requests are padded" in out
    assert "runs: 2 requests tokens=16 in" in out
    assert "rows of a batch: as rows alone" in out
    net, bert = Workload.load("workload.yaml").models
    assert (net.rate_rps, net.slo_ms, bert.name) == (3, 7, "bert")
    assert (net.source, net.options) == (str(Path("net.onnx").resolve()), {"sizes": {"tokens": 16}, "pad": {"x": 0}})


def test_one_text_a_request_is_compared_as_numbers_are(capsys: pytest.CaptureFixture[str]) -> None:
    make, kind = onnx.helper, onnx.TensorProto.STRING
    x, y = (make.make_tensor_value_info(name, kind, ["batch"]) for name in "xy")
    graph = make.make_graph([make.make_node("StringConcat", ["x", "x"], ["y"])], "net", [x], [y])
    onnx.save(make.make_model(graph, opset_imports=[make.make_opsetid("", 20)], ir_version=9), "net.onnx")
    assert "rows of a batch: as rows alone" in added(capsys, "net.onnx")[0]


def test_rows_that_depend_on_each_other_are_told_the_option_that_works(capsys: pytest.CaptureFixture[str]) -> None:
    save("Softmax", ["batch", 4], axis=0)
    _, err = added(capsys, "net.onnx", code=2)
    option = '{"shapes": {"x": [1, 4]}}'
    assert option in err
    out, _ = added(capsys, "net.onnx", "--option", f"shapes={option[11:-1]}", "-o", "workload.yaml")
    assert "batch: none" in out
    (net,) = load_document("workload.yaml")["models"]
    assert (net["rate_rps"], net["slo_ms"]) == (10.0, 20.0)


def test_an_input_that_takes_certain_values_gets_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    make, kinds = onnx.helper, onnx.TensorProto
    x = make.make_tensor_value_info("x", kinds.FLOAT, ["batch", 4])
    shape = make.make_tensor_value_info("shape", kinds.INT64, [])
    y = make.make_tensor_value_info("y", kinds.FLOAT, ["batch", 4])
    table = make.make_tensor("table", kinds.FLOAT, [2], [0.0, 0.0])
    nodes = [
        make.make_node("Sub", ["shape", "hundred"], ["place"]),
        make.make_node("Gather", ["table", "place"], ["zero"]),
        make.make_node("Add", ["x", "zero"], ["y"]),
    ]
    hundred = make.make_tensor("hundred", kinds.INT64, [], [100])
    graph = make.make_graph(nodes, "net", [x, shape], [y], [table, hundred])
    onnx.save(make.make_model(graph, opset_imports=[make.make_opsetid("", 17)], ir_version=9), "net.onnx")
    _, err = added(capsys, "net.onnx", code=2)
    assert "does not run with made-up inputs" in err
    assert "--option 'example={NAME: VALUE}'" in err
    out, _ = added(capsys, "net.onnx", "--option", "example={shape: 101}")
    assert "runs: 2 requests in" in out


@pytest.mark.parametrize(
    ("name", "cure"),
    [
        ("net.gguf", "tenuto add net.gguf --folder FOLDER"),
        ("net.jit", "ends in .pt"),
        ("net.pth", "weights_path"),
        ("net.safetensors", "config.json"),
        ("net.tflite", "tf2onnx.convert --tflite net.tflite"),
        ("saved/saved_model.pb", "tf2onnx.convert --saved-model saved"),
        ("net.engine", "runtime=tensorrt"),
        ("net.mlpackage", "ONNX file"),
    ],
)
@pytest.mark.parametrize("verb", ["add", "profile"])
def test_files_of_other_kinds_get_their_cure(
    verb: str, name: str, cure: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([verb, name])
    assert cure in capsys.readouterr().err


def test_folders_are_told_apart(capsys: pytest.CaptureFixture[str]) -> None:
    save("Relu", ["batch", 4])
    assert "Give one: net.onnx" in added(capsys, ".", code=2)[1]
    Path("saved").mkdir()
    Path("saved", "saved_model.pb").touch()
    assert "--saved-model saved" in added(capsys, "saved", code=2)[1]


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("--pad x=abc", "--pad x: 'abc': is not a number"),
        ("--pad x", "must read NAME=VALUE"),
        ("--sizes n=9999999999", "must name a size once, with whole numbers"),
        ("--option {", "must have the form key=value"),
        ("--option shapes=5", "Give a mapping"),
    ],
)
def test_a_wrong_value_is_refused_in_one_line(option: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    save("Relu", ["batch", "n"])
    (line,) = added(capsys, "net.onnx", *option.split(), code=2)[1].splitlines()
    assert said in line
