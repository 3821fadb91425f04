import json
from pathlib import Path
from typing import Any

import pytest

from tenuto.cli import main
from tenuto.cli import profile as verb
from tenuto.errors import EnvironmentFaultError
from tenuto.profiles import Fit, ModelProfile, Profile, ProfilePoint
from tenuto.profiles.measure import Measurement, MeasureRequest, row_name


def measured(request: MeasureRequest, on_point: Any = None) -> Measurement:
    """Stand in for the profiler: 2b + 5 ms at every share, scaled by it."""
    points = tuple(
        ProfilePoint(batch_size=b, share_pct=s, latency_ms=(2 * b + 5) * 100 / s, latency_spread_ms=0.1, memory_mib=50)
        for s in sorted(request.shares, reverse=True) for b in request.batch_sizes
    )  # fmt: skip
    for point in points:
        on_point(point)
    fit = Fit(alpha_ms=2, beta_ms=5, r_squared=1, max_error_pct=0)
    return Measurement(row_name(request.source), ModelProfile(points=points, fit=fit), "cpu", "a processor, 2 cores",
                       16_000.0, {"torch": "2.13.0"})  # fmt: skip


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(verb, "measure_model", measured)

    def call(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as caught:
            main(["profile", *arguments])
        out, err = capsys.readouterr()
        return int(caught.value.code or 0), out, err

    return call


def test_a_profile_file_is_written_and_summarised(run: Any) -> None:
    code, out, err = run("resnet50", "transformers/bert", "--batch-sizes", "4,1", "--shares", "50,100", "-o", "p.yaml")
    assert code == 0
    profile = Profile.load("p.yaml")
    assert list(profile.models) == ["resnet50", "bert"]
    assert profile.models["bert"].latency_ms(4, 50.0) == 26
    assert profile.name == "p"
    assert "l(b) = 2.000 b + 5.000 ms" in out
    assert "a processor, 2 cores" in out
    assert "wrote p.yaml (2 of 2 models)" in err
    assert "batch 4 at 50 %" in err


def test_the_default_file_is_named_after_the_device(run: Any) -> None:
    code, _, err = run("resnet50")
    assert code == 0
    assert "profile-cpu.yaml" in err
    assert Profile.load("profile-cpu.yaml").models["resnet50"].batch_sizes() == (1, 2, 4, 8)


def test_json_is_the_profile(run: Any) -> None:
    code, out, _ = run("resnet50", "--batch-sizes", "1,2", "--json")
    assert code == 0
    data = json.loads(out)
    assert data["schema"] == 1
    assert data["models"]["resnet50"]["fit"]["alpha_ms"] == 2


def test_every_wrong_argument_is_named_at_once(run: Any) -> None:
    code, out, err = run("resnet5O", "bert", "bert", "--batch-sizes", "1,x", "--shares", "0", "--budget-s", "-1")
    assert code == 2
    assert out == ""
    for part in ("Did you mean 'resnet50'", "--batch-sizes: '1,x'", "--shares", "--budget-s"):
        assert part in err
    code, _, err = run("bert", "transformers/bert")
    assert code == 2
    assert "is named twice" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("resnet50", "-o", "nowhere/p.yaml"), "directory does not exist"),
        (("resnet50", "bert", "--weights", "w.pt"), "fits one model only"),
        (("resnet50", "--option", "image_size"), "key=value"),
        ((), "Missing argument"),
    ],
)
def test_wrong_arguments(run: Any, arguments: tuple[str, ...], message: str) -> None:
    code, _, err = run(*arguments)
    assert code == 2
    assert message in err


def failing_after_one(reason: BaseException) -> Any:
    def measure(request: MeasureRequest, on_point: Any) -> Measurement:
        if request.source != "resnet50":
            raise reason
        return measured(request, on_point)

    return measure


def test_ctrl_c_keeps_the_models_that_are_finished(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verb, "measure_model", failing_after_one(KeyboardInterrupt()))
    code, _, err = run("resnet50", "bert", "gpt2", "-o", "p.yaml")
    assert code == 130
    assert list(Profile.load("p.yaml").models) == ["resnet50"]
    assert "1 of 3 models" in err


def test_a_fault_keeps_the_models_that_are_finished(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fault = EnvironmentFaultError("'bert' could not be measured. Free memory.")
    monkeypatch.setattr(verb, "measure_model", failing_after_one(fault))
    code, _, err = run("resnet50", "bert", "-o", "p.yaml")
    assert code == 3
    assert list(Profile.load("p.yaml").models) == ["resnet50"]
    assert "Free memory" in err
    code, _, err = run("bert")
    assert code == 3
    assert "Traceback" not in err


def test_a_real_model_is_measured_end_to_end(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from tenuto.profiles.measure import measure_model

    monkeypatch.setattr(verb, "measure_model", measure_model)
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2]))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    options = ("--option", "width=16", "--budget-s", "0.1", "--batch-sizes", "1,2", "--device", "cpu", "--json")
    code, out, err = run("tests.profiles.own_models:scale", *options)
    assert code == 0, err
    (model,) = json.loads(out)["models"].values()
    assert [point["batch_size"] for point in model["points"]] == [1, 2]
    assert all(point["latency_ms"] > 0 for point in model["points"])
