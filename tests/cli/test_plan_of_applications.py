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
    ],
)
def test_what_does_not_fit_is_refused_with_its_cure(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, second: dict[str, Any], inputs: dict[str, str], words: str
) -> None:
    after = {"after": ["detect"]} if not inputs else {"inputs": inputs}
    assert words in planned(capsys, tmp_path, DETECT, second, code=2, **after)


def test_what_only_the_built_network_tells_is_left_to_the_gateway(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    own = {"name": "own", "source": "tests.instruments.own_models:scale", "latency": FAST}
    resized = {"name": "lenet", "latency": FAST, "options": {"image_size": 32}}
    for second in (own, resized):
        planned(capsys, tmp_path, DETECT, second, code=0, inputs={"anything": "detect.boxes"})
