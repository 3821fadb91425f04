"""`tenuto plan` composes the tensors of applications where options, files or the catalogue state those of their models:
what the gateway would refuse is refused when it is planned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tenuto.cli import main
from tenuto.documents import dump_yaml

FAST = {"alpha_ms": 1.0, "beta_ms": 4.0}


def tensor(name: str, *shape: int, dtype: str = "float32") -> dict[str, Any]:
    return {"name": name, "dtype": dtype, "shape": list(shape)}


def model(name: str, taken: dict[str, Any], made: dict[str, Any], **more: Any) -> dict[str, Any]:
    """A model of which only the options state the tensors."""
    return {"name": name, "latency": FAST, "options": {"inputs": [taken], "outputs": [made]}, **more}


DETECT = model("detect", tensor("x", 3, 8, 8), tensor("boxes", 4))
READ = model("read", tensor("x", 4), tensor("text", 10))


def planned(capsys: pytest.CaptureFixture[str], folder: Path, *models: dict[str, Any], code: int, **second: Any) -> str:
    """Plan an application of two models, or fail to; return what stands on stderr."""
    stages = [{"model": models[0]["name"]}, {"model": models[1]["name"], **second}]
    app = {"name": "app", "rate_rps": 5, "slo_ms": 500, "stages": stages}
    (folder / "w.yaml").write_text(dump_yaml({"models": list(models), "applications": [app]}))
    with pytest.raises(SystemExit) as left:
        main(["plan", str(folder / "w.yaml"), "--gpus", "v100:1", "--policy", "symphony"])
    shown = capsys.readouterr()
    assert left.value.code == code, shown.out + shown.err
    return shown.err


def test_tensors_that_fit_are_planned(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    planned(capsys, tmp_path, DETECT, READ, code=0, inputs={"x": "detect.boxes"})


@pytest.mark.parametrize(
    ("second", "inputs", "words"),
    [
        (model("read", tensor("x", 5), tensor("text", 10)), {"x": "detect.boxes"}, "its shape is [4]"),
        (model("read", tensor("x", 4, dtype="int64"), tensor("text", 10)), {"x": "detect.boxes"}, "it is float32"),
        (READ, {"x": "detect.box"}, "is no output of stage 'detect'. Did you mean 'boxes'?"),
        (READ, {"y": "detect.boxes"}, "is no input of its model"),
        (READ, {}, "is an input of another stage as well, and does not fit"),
        ({"name": "lenet", "latency": FAST}, {"image": "detect.boxes"}, "does not fit input 'image'"),
        (
            model("read", tensor("x", 4, dtype="flaot32"), tensor("text", 10)),
            {"x": "detect.boxes"},
            "models.1: tensor x",
        ),
        (model("read", {"name": "x", "shape": [4]}, tensor("text", 10)), {"x": "detect.boxes"}, "say no signature"),
    ],
)
def test_what_does_not_fit_is_refused_with_its_cure(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, second: dict[str, Any], inputs: dict[str, str], words: str
) -> None:
    after = {"after": ["detect"]} if not inputs else {"inputs": inputs}
    assert words in planned(capsys, tmp_path, DETECT, second, code=2, **after)


TEXT = {"prompt_tokens": 80, "output_tokens": 40}
WRITE = {"name": "write", "profile": "llama-7b", "generates": TEXT, "slo": {"ttft_ms": 500, "tpot_ms": 40}}


def model_of_ids(dtype: str) -> dict[str, Any]:
    return model("read", tensor("x", 40, dtype=dtype), tensor("text", 10))


@pytest.mark.parametrize(
    ("second", "more", "words"),
    [
        (model_of_ids("int64"), {"inputs": {"x": "write.text_output"}}, "it is bytes, the input int64"),
        (model_of_ids("float32"), {"inputs": {"x": "write.token_ids"}}, "it is int64, the input float32"),
        (model_of_ids("int64"), {"inputs": {"x": "write.logits"}}, "is no output of stage 'write'"),
        (WRITE, {"name": "again", "inputs": {"prompt": "write.text_output"}}, "is no input of its model"),
        (WRITE, {"name": "again", "inputs": {"input_ids": "write.text_output"}}, "it is bytes, the input int64"),
    ],
)
def test_texts_and_tokens_are_compared_as_tensors_are(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, second: dict[str, Any], more: dict[str, Any], words: str
) -> None:
    llm = {**WRITE, "rate_rps": 1}
    stages = [{"model": "write"}, {"model": second["name"], **more}]
    app = {"name": "app", "rate_rps": 1, "slo_ms": 5000, "stages": stages}
    models = [llm] if second is WRITE else [llm, second]
    (tmp_path / "w.yaml").write_text(dump_yaml({"models": models, "applications": [app]}))
    with pytest.raises(SystemExit) as left:
        main(["plan", str(tmp_path / "w.yaml"), "--gpus", "a100-80gb:2"])
    shown = capsys.readouterr()
    assert (left.value.code, words in shown.err) == (2, True), shown.err


def test_an_application_that_generates_is_planned_where_its_tensors_fit(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    stages = [{"model": "read"}, {"model": "write", "after": ["read"], "inputs": {"text_input": "question"}}]
    app = {"name": "app", "rate_rps": 1, "slo_ms": 5000, "stages": stages, "streams": True}
    models = [{**WRITE, "rate_rps": 1}, model_of_ids("int64")]
    asked = ["plan", str(tmp_path / "w.yaml"), "--option", "requests=20"]
    (tmp_path / "w.yaml").write_text(dump_yaml({"models": models, "applications": [app]}))
    with pytest.raises(SystemExit) as left:
        main([*asked, "--gpus", "a100-80gb:2", "-o", str(tmp_path / "p.yaml")])
    assert left.value.code == 0, capsys.readouterr().err


def test_what_only_the_built_network_tells_is_left_to_the_gateway(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    own = {"name": "own", "source": "tests.instruments.own_models:scale", "latency": FAST}
    resized = {"name": "lenet", "latency": FAST, "options": {"image_size": 32}}
    with_arguments = {**own, "options": {"inputs": ["of", "its", "own"], "outputs": 2}}
    for second in (own, resized, with_arguments):
        planned(capsys, tmp_path, DETECT, second, code=0, inputs={"anything": "detect.boxes"})
