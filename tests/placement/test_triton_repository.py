"""A model repository of Triton becomes a workload, and of what does not a note says why."""

import contextlib
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from tenuto.cli import load_verb
from tenuto.errors import InvalidInputError
from tenuto.placement.triton_repository import ImportNote, read_repository
from tenuto.placement.workload import Workload

pytestmark = pytest.mark.unit
pytest.importorskip("tritonclient.grpc.model_config_pb2", reason="tritonclient with grpcio is not installed")

ONNX = 'backend: "onnxruntime"\nmax_batch_size: 8\n'


def add(root: Path, name: str, config: str | None, *files: str) -> None:
    """Write a model's configuration and empty files."""
    for file in files:
        place = root / name / file
        place.parent.mkdir(parents=True, exist_ok=True)
        place.touch()
    (root / name).mkdir(parents=True, exist_ok=True)
    if config is not None:
        (root / name / "config.pbtxt").write_text(config)


def notes(root: Path) -> dict[str, str]:
    return {r.model: r.text for r in read_repository(root, rate_rps=1.0, slo_ms=9.0).notes if r.is_left_out}


def test_an_onnx_model_becomes_a_model_with_labels_and_the_time_of_its_queue(tmp_path):
    config = (
        'platform: "onnxruntime_onnx"\nmax_batch_size: 8\n'
        'output [{ name: "y" data_type: TYPE_FP32 dims: [2] label_filename: "labels.txt" }]\n'
        "dynamic_batching { default_queue_policy { default_timeout_microseconds: 50000 } }\n"
    )
    add(tmp_path, "det", config, "1/model.onnx")
    (tmp_path / "det" / "labels.txt").write_text("up\ndown\n")
    (model,) = read_repository(tmp_path, rate_rps=3.0, slo_ms=9.0).workload("repository").models
    assert (model.name, model.rate_rps, model.slo_ms) == ("det", 3.0, 50.0)
    assert model.source == str(tmp_path / "det" / "1" / "model.onnx")
    assert model.options == {"labels": ["up", "down"]}


@pytest.mark.parametrize(
    ("policy", "names"),
    [
        ("", ["m:10"]),
        ("version_policy { latest { num_versions: 2 } }", ["m:2", "m:10"]),
        ("version_policy { all { } }", ["m", "m:2", "m:10"]),
        ("version_policy { specific { versions: [1] } }", ["m"]),
    ],
)
def test_the_versions_of_the_policy_are_taken_and_the_highest_takes_the_rest(tmp_path, policy, names):
    add(
        tmp_path,
        "m",
        ONNX + policy,
        "1/model.onnx",
        "2/model.onnx",
        "10/model.onnx",
        "010/model.onnx",
        "new/model.onnx",
    )
    models = read_repository(tmp_path, rate_rps=1.0, slo_ms=9.0).workload("repository").models
    assert [model.name for model in models] == names
    assert [model.share_pct for model in models] == [0.0] * (len(names) - 1) + [None]


def test_a_model_without_a_batch_says_its_whole_shape(tmp_path):
    config = (
        'backend: "onnxruntime"\n'
        'input [{ name: "x" data_type: TYPE_FP32 dims: [1, 3, -1] }]\n'
        'output [{ name: "y" data_type: TYPE_FP32 dims: [-1] }]\n'
    )
    add(tmp_path, "m", config, "1/model.onnx")
    repository = read_repository(tmp_path, rate_rps=1.0, slo_ms=9.0)
    assert repository.models[0]["options"] == {"shapes": {"x": [1, 3, "x_2"], "y": ["y_0"]}}
    assert any("sizes" in note.text for note in repository.notes)


def test_torchscript_has_the_shapes_and_types_of_its_configuration_inputs_first(tmp_path):
    config = (
        'platform: "pytorch_libtorch"\nmax_batch_size: 4\n'
        'input [{ name: "MASK__1" data_type: TYPE_INT64 dims: [-1] },\n'
        '{ name: "IN__0" data_type: TYPE_FP16 dims: [8] }]\n'
        'output [{ name: "OUT__0" data_type: TYPE_FP32 dims: [2] }]\n'
    )
    add(tmp_path, "m", config, "1/model.pt")
    options = read_repository(tmp_path, rate_rps=1.0, slo_ms=9.0).models[0]["options"]
    assert list(options["shapes"].items()) == [
        ("IN__0", ["batch", 8]),
        ("MASK__1", ["batch", "MASK__1_0"]),
        ("OUT__0", ["batch", 2]),
    ]
    assert options["types"] == {"IN__0": "float16", "MASK__1": "int64", "OUT__0": "float32"}


def test_a_model_without_configuration_is_taken_by_its_file(tmp_path):
    add(tmp_path, "plain", None, "1/model.onnx")
    add(tmp_path, "program", 'backend: "pytorch"', "1/model.pt2")
    add(tmp_path, "large", ONNX, "1/model.onnx/model.onnx", "1/model.onnx/weights.bin")  # with external data
    models = read_repository(tmp_path, rate_rps=1.0, slo_ms=9.0).workload("repository").models
    files = {model.name: Path(model.source or "").relative_to(tmp_path / model.name / "1") for model in models}
    assert {name: str(file) for name, file in files.items()} == {
        "plain": "model.onnx",
        "program": "model.pt2",
        "large": "model.onnx/model.onnx",
    }


@pytest.mark.parametrize(
    ("config", "file", "cure"),
    [
        ('backend: "python"', "model.py", "package.module:factory"),
        ('platform: "tensorflow_savedmodel"', "model.savedmodel/saved_model.pb", "tf2onnx"),
        ('platform: "pytorch_libtorch"', "model.pt", "config.pbtxt"),
        ('platform: "tensorrt_plan"', "model.plan", "runtime: tensorrt"),
        ('backend: "mine"', "model.bin", "backend 'mine'"),
        (ONNX + "sequence_batching { }", "model.onnx", "states as inputs and outputs"),
        (ONNX + "model_transaction_policy { decoupled: true }", "model.onnx", "generates"),
        (ONNX + 'input [{ name: "x" optional: true }]', "model.onnx", "optional"),
        (ONNX, "other.txt", "no file model.onnx"),
    ],
)
def test_what_is_not_served_is_left_out_with_its_cure(tmp_path, config, file, cure):
    add(tmp_path, "good", ONNX, "1/model.onnx")
    add(tmp_path, "bad", config, f"1/{file}")
    assert cure in notes(tmp_path)["bad"]
    assert [m.name for m in read_repository(tmp_path, rate_rps=1.0, slo_ms=9.0).workload("r").models] == ["good"]


def test_an_ensemble_becomes_an_application_in_the_order_of_its_tensors(tmp_path):
    for name in ("detect", "read"):
        add(tmp_path, name, ONNX, "1/model.onnx")
    step = 'step {{ model_name: "{}" input_map {{ key: "x" value: "{}" }} output_map {{ key: "y" value: "{}" }} }}\n'
    steps = (
        step.format("read", "boxes", "text")
        + step.format("detect", "image", "boxes")
        + step.format("read", "text", "z")
    )
    output = 'output { name: "z" data_type: TYPE_FP32 dims: [ 1 ] }'
    add(tmp_path, "ocr", f'platform: "ensemble"\n{output}\nensemble_scheduling {{ {steps} }}')
    add(tmp_path, "broken", f'platform: "ensemble"\nensemble_scheduling {{ {step.format("nobody", "a", "b")} }}')
    (application,) = read_repository(tmp_path, rate_rps=2.0, slo_ms=90.0).workload("repository").applications
    assert [
        (stage.label, application.model_name(stage), stage.after, stage.inputs) for stage in application.stages
    ] == [
        ("read", "read", ("detect",), {"x": "detect.y"}),
        ("detect", "detect", (), {"x": "image"}),
        ("read-2", "read", ("read",), {"x": "read.y"}),
    ]
    assert application.outputs == {"z": "read-2.y"}
    assert "nobody" in notes(tmp_path)["broken"]


@pytest.mark.parametrize("version", ["model_version: 3", "model_version: -1", "", "model_version: 1"])
def test_a_step_of_an_ensemble_that_names_an_older_version_is_left_out(tmp_path, version):
    """Before, it got the highest version, and nobody was told."""
    add(tmp_path, "m", ONNX + "version_policy { specific { versions: [1, 3] } }", "1/model.onnx", "3/model.onnx")
    step = f'step {{ model_name: "m" {version} input_map {{ key: "x" value: "a" }} }}'
    add(tmp_path, "all", f'platform: "ensemble"\nensemble_scheduling {{ {step} }}')
    applications = read_repository(tmp_path, rate_rps=2.0, slo_ms=90.0).workload("repository").applications
    if version == "model_version: 1":
        assert not applications
        assert "names version 1, and stages ask the highest, 3" in notes(tmp_path)["all"]
    else:
        assert [stage.model for stage in applications[0].stages] == ["m:3"]


def test_a_repository_without_a_model_that_can_be_served_is_refused_with_every_reason(tmp_path):
    add(tmp_path, "a", 'backend: "python"', "1/model.py")
    with pytest.raises(InvalidInputError, match=r"package\.module:factory[\s\S]*no model of it"):
        read_repository(tmp_path, rate_rps=1.0, slo_ms=9.0).workload(str(tmp_path))


@pytest.mark.parametrize("name", ["absent", "empty", "broken"])
def test_a_folder_that_is_no_repository_is_refused(tmp_path, name):
    (tmp_path / "empty").mkdir()
    add(tmp_path / "broken", "m", "no_such_field: 3", "1/model.onnx")
    result = CliRunner().invoke(load_verb("import"), [str(tmp_path / name), "--rate", "1", "--slo-ms", "9"])
    assert isinstance(result.exception, InvalidInputError)


@given(st.binary(max_size=60))
def test_no_configuration_ends_in_another_error(tmp_path_factory, data):
    root = tmp_path_factory.mktemp("repository")
    add(root, "m", "", "1/model.onnx")
    (root / "m" / "config.pbtxt").write_bytes(data)
    with contextlib.suppress(InvalidInputError):
        read_repository(root, rate_rps=1.0, slo_ms=9.0).workload("repository")


def test_the_command_writes_a_workload_that_loads_again(tmp_path):
    add(tmp_path / "repository", "m", ONNX, "1/model.onnx")
    file = tmp_path / "workload.yaml"
    arguments = [str(tmp_path / "repository"), "--rate", "5", "--slo-ms", "20", "-o", str(file)]
    result = CliRunner().invoke(load_verb("import"), arguments)
    assert result.exit_code == 0, result.output
    assert Workload.load(file).rate_rps == 5.0
    assert ImportNote("m", "profile it with batch sizes up to its max_batch_size, 8").text in result.stderr
