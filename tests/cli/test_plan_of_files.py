"""`tenuto plan` and `tenuto model` read the networks' files that are on their machine: what a gpu-let would refuse is
refused when it is planned or changed, with the same cure."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tenuto.cli import main, model
from tenuto.documents import dump_yaml
from tenuto.errors import InvalidInputError
from tenuto.placement import Cluster, Workload
from tenuto.profiles import Profile, Profiles
from tenuto.profiles.networks.models import build, describe

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

PROFILE = """
name: own
gpu_type: cpu
source: made up
memory_mib: 8000
models:
  fixed: {points: [{batch_size: 1, latency_ms: 2.0}]}
  sized:
    points:
    - {batch_size: 1, sizes: {tokens: 8}, latency_ms: 1.0}
    - {batch_size: 1, sizes: {tokens: 64}, latency_ms: 4.0}
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("own.yaml").write_text(PROFILE)
    return tmp_path


def save(operator: str = "Relu", shape: tuple[Any, ...] = ("batch", "tokens"), change: Any = None) -> None:
    """Write net.onnx: one operator from x to y, or what `change` makes of it."""
    make, kind = onnx.helper, onnx.TensorProto.FLOAT
    x, y = (make.make_tensor_value_info(name, kind, shape) for name in "xy")
    graph = make.make_graph([make.make_node(operator, ["x"], ["y"])], "net", [x], [y])
    model = make.make_model(graph, opset_imports=[make.make_opsetid("", 17)], ir_version=9)
    if change is not None:
        change(model)
    onnx.save(model, "net.onnx")


def planned(capsys: pytest.CaptureFixture[str], code: int = 0, **entry: Any) -> str:
    """Plan a workload of one model; return what stands on stderr."""
    model = {"name": "net", "rate_rps": 10, "slo_ms": 100, "source": "net.onnx", "profile": "fixed", **entry}
    Path("w.yaml").write_text(dump_yaml({"models": [model]}))
    with pytest.raises(SystemExit) as left:
        main(["plan", "w.yaml", "--gpus", "cpu:1", "--profiles", "own.yaml", "--policy", "symphony"])
    shown = capsys.readouterr()
    assert left.value.code == code, shown.out + shown.err
    return shown.err


def opset(version: int) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        model.opset_import[0].version = version

    return change


def without_weights(model: Any) -> None:
    """Name a file with weights that does not exist."""
    weight = onnx.numpy_helper.from_array(np.ones(4, np.float32), "w")
    onnx.external_data_helper.set_external_data(weight, location="gone.bin", length=16)
    weight.ClearField("raw_data")
    model.graph.initializer.append(weight)
    model.graph.node.append(onnx.helper.make_node("Identity", ["w"], ["z"]))
    model.graph.output.append(onnx.helper.make_tensor_value_info("z", onnx.TensorProto.FLOAT, (4,)))


@pytest.mark.parametrize(
    ("file", "entry"),
    [
        ({"operator": "Frobnicate"}, {}),
        ({"change": opset(99)}, {}),
        ({"change": without_weights}, {}),
        ({}, {}),  # nothing says how large `tokens` may be
        ({}, {"options": {"sizes": {"words": 8}}}),
        ({}, {"options": {"sizes": {"tokens": 8}, "pad": {"z": 0}}}),
        ({}, {"options": {"sizes": {"tokens": 8}, "shapes": {"x": ["batch"]}}}),
        ({"shape": ("batch", 4)}, {"options": {"num_labels": 3}}),
        ({"shape": ("batch", 4)}, {"weights_path": "w.safetensors"}),
    ],
    ids=["operator", "opset", "weights", "no most", "sizes", "pad", "shapes", "options", "weights_path"],
)
def test_what_building_refuses_is_refused_with_the_same_words_when_it_is_planned(
    file: dict[str, Any], entry: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    save(**file)
    with pytest.raises(InvalidInputError) as refused:
        build("net.onnx", weights_path=entry.get("weights_path"), options=entry.get("options"))
    said = planned(capsys, 2, **entry)
    assert [p for p in refused.value.problems if p.rule not in said or p.cure not in said] == []
    assert "models.0" in said


CLASSIFIER = {"name": "net", "rate_rps": 10, "slo_ms": 100, "source": "good.onnx", "profile": "fixed"}
BROKEN = {"source": "net.onnx"}
IN_TRIAL = {**CLASSIFIER, **BROKEN, "name": "net:2", "share_pct": 5}


@pytest.fixture
def change(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, str]]:
    """Change a workload that is served by `tenuto model`; return the exit code and what stands on stderr. A command
    that the controller would be asked to carry out ends with 0."""

    def change(words: list[str], **declared: Any) -> tuple[int, str]:
        running = SimpleNamespace(
            controller=lambda: SimpleNamespace(workload=lambda: Workload.of_document(declared, "declared")),
            planner_inputs=lambda: (Profiles([Profile.load("own.yaml")]), Cluster.parse("cpu:1").gpus),
            edit=lambda make, *, waits: "",
        )
        monkeypatch.setattr(model, "operations", lambda _address: nullcontext(running))
        with pytest.raises(SystemExit) as left:
            main(["model", *words])
        return int(left.value.code or 0), capsys.readouterr().err

    return change


@pytest.mark.parametrize(
    ("words", "models"),
    [
        (["add", json.dumps({**CLASSIFIER, **BROKEN, "name": "other"})], [CLASSIFIER]),
        (["update", json.dumps({**CLASSIFIER, **BROKEN})], [CLASSIFIER]),
        (["canary", "net", "2", "--share", "5", "--entry", json.dumps(BROKEN)], [CLASSIFIER]),
        (["promote", "net", "2"], [CLASSIFIER, IN_TRIAL]),
    ],
    ids=["add", "update", "canary", "promote"],
)
def test_verbs_that_change_a_model_refuse_its_file_with_the_same_words(
    words: list[str], models: list[dict[str, Any]], change: Callable[..., tuple[int, str]]
) -> None:
    save(shape=("batch", 4))
    Path("net.onnx").rename("good.onnx")
    save("Frobnicate", ("batch", 4))
    with pytest.raises(InvalidInputError) as refused:
        build("net.onnx")
    code, said = change(words, models=models)
    assert code == 2
    assert [p for p in refused.value.problems if p.rule not in said or p.cure not in said] == []
    save(shape=("batch", 4))
    assert change(words, models=models) == (0, "")
    Path("net.onnx").unlink()
    code, said = change(words, models=models)
    assert code == 0
    assert "net.onnx was not compared with the plan: is not on this machine" in said


def test_a_network_is_refused_that_does_not_fit_into_the_graph_which_asks_it(
    change: Callable[..., tuple[int, str]],
) -> None:
    save(shape=("batch", 4))
    Path("net.onnx").rename("good.onnx")
    stages = [{"model": "net"}, {"model": "last", "inputs": {"x": "net.y"}}]
    models = [CLASSIFIER, {**CLASSIFIER, "name": "last"}]
    declared = {"models": models, "applications": [{"name": "both", "rate_rps": 1, "slo_ms": 900, "stages": stages}]}
    words = ["update", json.dumps({**CLASSIFIER, **BROKEN})]
    save(shape=("batch", 4))
    assert change(words, **declared) == (0, "")
    save(shape=("batch", 5))
    code, said = change(words, **declared)
    assert code == 2
    assert "'net.y': does not fit input 'x': its shape is [5], that of the input [4]" in said


def test_a_file_that_is_served_is_planned_and_torch_is_not_needed_for_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    save()
    for name in [name for name in sys.modules if name.partition(".")[0] == "torch"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torch", None)
    entry = {"profile": "sized", "sizes": {"tokens": {"quantiles": {0: 1, 100: 64}}}}
    assert "compared" not in planned(capsys, **entry)


@pytest.mark.parametrize(
    ("sizes", "options", "said"),
    [
        ({"quantiles": {0: 1, 100: 64}}, {"sizes": {"tokens": 32}}, "50 % of the requests are outside of the network"),
        (
            {"quantiles": {0: 1, 100: 64}},
            {"sizes": {"tokens": {"least": 33, "most": 64}}},
            "of the requests are outside of the network's 33 to 64",
        ),
        (
            {"tokens": 8},
            {"shapes": {"x": ["batch", "n"], "y": ["batch", "n"]}},
            "'tokens': is not in the file. It has: n",
        ),
    ],
)
def test_sizes_that_the_network_does_not_take_are_refused(
    sizes: Any, options: Any, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    save()
    assert said in planned(capsys, 2, profile="sized", sizes={"tokens": sizes}, options=options)


def test_a_model_imported_from_triton_keeps_its_labels(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("tritonclient")
    save(shape=("batch", 3))
    Path("repository/net/1").mkdir(parents=True)
    Path("net.onnx").rename("repository/net/1/model.onnx")
    Path("repository/net/labels.txt").write_text("a\nb\nc\n")
    output = 'output [{ name: "y" data_type: TYPE_FP32 dims: [3] label_filename: "labels.txt" }]'
    Path("repository/net/config.pbtxt").write_text(f'backend: "onnxruntime" max_batch_size: 8 {output}')
    with pytest.raises(SystemExit, match="0"):
        main(["import", "repository", "-o", "w.yaml"])
    (model,) = Workload.load("w.yaml").models
    assert (model.rate_rps, model.slo_ms) == (10.0, 100.0)
    signature = describe(str(model.source), options=model.options)
    assert signature is not None
    assert signature.labels == ("a", "b", "c")
    said = planned(capsys, 2, source=model.source, options={"labels": ["a", "b"]})
    assert "has 2 names, and a request's first output is [3]. Give one for each of its entries." in said


def test_a_file_that_is_elsewhere_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    said = planned(capsys, source="elsewhere/net.onnx")
    assert said.count("elsewhere/net.onnx was not compared with the plan: is not on this machine") == 1


def test_an_encoder_without_its_tokenizer_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    Path("encoder/pooling").mkdir(parents=True)
    modules = [
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
        {"idx": 1, "name": "1", "path": "pooling", "type": "sentence_transformers.models.Pooling"},
    ]
    Path("encoder/modules.json").write_text(json.dumps(modules))
    Path("encoder/config.json").write_text(json.dumps({"vocab_size": 50, "model_type": "bert"}))
    Path("encoder/pooling/config.json").write_text(json.dumps({"embedding_dimension": 8}))
    assert "has no tokenizer.json" in planned(capsys, 2, source="encoder")
