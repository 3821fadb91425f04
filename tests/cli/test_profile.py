import json
from pathlib import Path
from typing import Any

import pytest

from tenuto.cli import main
from tenuto.cli import profile as verb
from tenuto.errors import EnvironmentFaultError
from tenuto.profiles import Fit, ModelProfile, Profile, ProfilePoint
from tenuto.profiles.measuring.events import Machine
from tenuto.profiles.measuring.measure import Measurement, MeasureRequest
from tenuto.profiles.networks.catalogue import SizeRange


def measured(request: MeasureRequest, on_point: Any = None, **_: Any) -> Measurement:
    """Stand in for the profiler: 2b + 5 ms at every share, scaled by it."""
    points = tuple(
        ProfilePoint(batch_size=b, share_pct=s, latency_ms=(2 * b + 5) * 100 / s, latency_spread_ms=0.1, memory_mib=50)
        for s in sorted(request.shares, reverse=True)
        for b in request.batch_sizes
    )
    for point in points:
        on_point(point)
    fit = Fit(alpha_ms=2, beta_ms=5, r_squared=1, max_error_pct=0)
    machine = Machine("cpu", "cpu", "a processor, 2 cores", 16_000.0, {"torch": "2.13.0"})
    return Measurement(request.row, ModelProfile(points=points, fit=fit), machine)


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


WORKLOAD = """
models:
  - name: detect
    source: net.onnx
    rate_rps: 1
    slo_ms: 9
    options: {pad: {x: 0}, sizes: {height: {most: 320, least: 32, multiple: 32}}}
    sizes: {height: {quantiles: {0: 100, 50: 150, 100: 500}}}
  - {name: words, source: net.onnx, rate_rps: 1, slo_ms: 9, sizes: {tokens: {lognormal: {median: 40, sigma: 0.8}}}}
  - {name: "words:2", source: net.onnx, rate_rps: 1, slo_ms: 9, share_pct: 5}
  - {name: plain, source: resnet50, rate_rps: 1, slo_ms: 9, profile: row, weights_path: w.pt}
  - {name: said, rate_rps: 1, slo_ms: 9, latency: {alpha_ms: 1, beta_ms: 1}}
  - name: writes
    source: folder
    rate_rps: 1
    slo: {ttft_ms: 9, tpot_ms: 9}
    generates: {prompt_tokens: 3, output_tokens: 3}
"""


def test_a_workload_is_measured_with_the_options_and_sizes_of_each_model(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, MeasureRequest] = {}

    def measure(request: MeasureRequest, on_point: Any = None, **_: Any) -> Measurement:
        asked[request.row] = request
        return measured(request, on_point)

    monkeypatch.setattr(verb, "measure_model", measure)
    Path("workload.yaml").write_text(WORKLOAD)
    code, _, err = run("workload.yaml", "--batch-sizes", "1,2", "--option", "dtype=bf16", "-o", "p.yaml")
    assert code == 0
    assert "writes generates: measure it by `tenuto profile --generates folder --name writes`" in err
    assert list(asked) == list(Profile.load("p.yaml").models) == ["detect", "words", "row"]
    assert asked["detect"].sizes == {"height": SizeRange(320, 128)}
    assert asked["words"].sizes == {"tokens": SizeRange(474, 11)}  # from 5 % to 99.9 %
    assert asked["detect"].options["pad"] == {"x": 0}
    assert asked["words"].options == {"dtype": "bf16"}
    assert (asked["row"].source, asked["row"].weights_path, asked["row"].sizes) == ("resnet50", "w.pt", {})
    assert {request.batch_sizes for request in asked.values()} == {(1, 2)}
    asked.clear()
    code, _, _ = run(
        "workload.yaml", "--name", "words", "--sizes", "tokens=8,16", "--sizes", "height=9", "-o", "q.yaml"
    )
    assert (code, {row: request.sizes for row, request in asked.items()}) == (0, {"words": {"tokens": (8, 16)}})


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["workload.yaml", "resnet50"], "is a workload, which is given alone"),
        (["workload.yaml", "--weights", "w.pt"], "is a workload, which is given alone"),
        (["workload.yaml", "--name", "word"], "Did you mean 'words'"),
        (["workload.yaml", "--name", "said"], "has no model to measure here"),
        (["other.yaml"], "other.yaml"),
    ],
)
def test_a_workload_that_cannot_be_measured_is_refused(run: Any, arguments: list[str], said: str) -> None:
    Path("workload.yaml").write_text(WORKLOAD)
    code, _, err = run(*arguments)
    assert (code, said in err) == (2, True), err


def test_factories_of_one_name_are_told_apart(run: Any) -> None:
    code, _, _ = run("own.mine:factory", "other.mine:factory", "--name", "a", "--name", "b", "-o", "own.yaml")
    assert (code, set(Profile.load("own.yaml").models)) == (0, {"a", "b"})


def test_every_wrong_argument_is_named_at_once(run: Any) -> None:
    code, out, err = run("resnet5O", "bert", "bert", "--batch-sizes", "0", "--shares", "0", "--budget-s", "-1")
    assert code == 2
    assert out == ""
    for part in ("Did you mean 'resnet50'", "--batch-sizes", "--shares", "--budget-s"):
        assert part in err
    code, _, err = run("bert", "transformers/bert")
    assert code == 2
    assert "is the second 'bert'. Name them apart" in err
    code, _, err = run("own.mine:factory", "other.mine:factory")
    assert (code, "is the second 'factory'. Name them apart: --name A --name B." in err) == (2, True)
    code, _, err = run("own.mine:factory", "other.mine:factory", "--name", "a")
    assert (code, "--name: 'a': names another number of MODELs" in err) == (2, True)
    for given in ("tokens", "tokens=", "tokens=16,x", "=16"):
        code, _, err = run("bert", "--sizes", given)
        assert code == 2
        assert f"--sizes: '{given}': must name a size once" in err
    code, _, err = run("bert", "--sizes", "n=0")
    assert "sizes are at least 1" in err
    code, _, err = run("bert", "--batch-sizes", "1,x")
    assert code == 2
    assert "'--batch-sizes': '1,x': must be whole numbers separated by commas" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("resnet50", "-o", "nowhere/p.yaml"), "cannot be written (No such file"),
        (("resnet50", "bert", "--weights", "w.pt"), "fits one model only"),
        (("resnet50", "--option", "image_size"), "key=value"),
        ((), "name at least one model"),
    ],
)
def test_wrong_arguments(run: Any, arguments: tuple[str, ...], message: str) -> None:
    code, _, err = run(*arguments)
    assert code == 2
    assert message in err


def failing_after_one(reason: BaseException) -> Any:
    def measure(request: MeasureRequest, on_point: Any, **_: Any) -> Measurement:
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
    from tenuto.profiles.measuring.measure import measure_model

    monkeypatch.setattr(verb, "measure_model", measure_model)
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2]))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    options = ("--option", "width=16", "--budget-s", "0.1", "--batch-sizes", "1,2", "--device", "cpu", "--json")
    code, out, err = run("tests.instruments.own_models:scale", *options)
    assert code == 0, err
    (model,) = json.loads(out)["models"].values()
    assert [point["batch_size"] for point in model["points"]] == [1, 2]
    assert all(point["latency_ms"] > 0 for point in model["points"])


OWN = "tests.instruments.own_models:scale"


@pytest.fixture
def real(run: Any, quick_workers: None, monkeypatch: pytest.MonkeyPatch) -> Any:
    from tenuto.profiles.measuring.measure import measure_model

    monkeypatch.setattr(verb, "measure_model", measure_model)
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2]))

    def call(*arguments: str) -> tuple[int, str, str]:
        common = ("--option", "width=8", "--budget-s", "0.1", "--device", "cpu", "-o", "p.yaml")
        result: tuple[int, str, str] = run(OWN, *common, *arguments)
        return result

    return call


def test_a_stopped_run_continues_from_the_file(real: Any) -> None:
    code, _, err = real("--batch-sizes", "1,2", "--time-limit-s", "1e-9")
    assert code == 3, err  # over before the first model
    assert "Give more seconds" in err
    code, _, err = real("--batch-sizes", "1,2", "--time-limit-s", "0.001")
    assert code == 3, err  # not even one point fits into this limit
    assert not Path("p.yaml").exists()
    code, _, err = real("--batch-sizes", "1")
    assert code == 0, err
    first = Profile.load("p.yaml").models["scale"].points
    code, _, err = real("--batch-sizes", "1,2", "--shares", "50,100", "--resume")
    assert code == 0, err
    profile = Profile.load("p.yaml")
    assert first[0] in profile.models["scale"].points
    assert len(profile.models["scale"].points) == 4
    code, _, err = real("--batch-sizes", "1,2", "--shares", "50,100", "--resume")
    assert code == 0, err
    assert Profile.load("p.yaml").models == profile.models
    assert "batch" not in err  # nothing was measured again


def test_a_file_of_other_options_or_another_device_is_not_continued(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    point = ProfilePoint(batch_size=1, latency_ms=1.0)
    row = ModelProfile(points=(point,), network="resnet50", options={"image_size": 64})
    Path("p.yaml").write_text(Profile(name="p", gpu_type="cpu", source="t", models={"resnet50": row}).dump())
    code, _, err = run("resnet50", "--resume", "-o", "p.yaml")
    assert code == 2
    assert "was measured otherwise" in err

    def elsewhere(request: MeasureRequest, on_machine: Any, **_: Any) -> Measurement:
        on_machine(Machine("cuda", "h200", "NVIDIA H200", 144_384, {}))
        raise AssertionError("went on")

    monkeypatch.setattr(verb, "measure_model", elsewhere)
    code, _, err = run("bert", "--resume", "-o", "p.yaml")
    assert code == 2
    assert "is of another device" in err
    assert Profile.load("p.yaml").models["resnet50"] == row


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("resnet50", "--resume"), "needs the file to continue"),
        (("resnet50", "--time-limit-s", "-1"), "--time-limit-s"),
    ],
)
def test_wrong_new_arguments(run: Any, arguments: tuple[str, ...], message: str) -> None:
    code, _, err = run(*arguments)
    assert code == 2
    assert message in err


def test_a_file_is_measured_at_the_sizes_that_are_named(
    quick_workers: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    monkeypatch.chdir(tmp_path)
    make, kind = onnx.helper, onnx.TensorProto.FLOAT
    x, y = (make.make_tensor_value_info(name, kind, ["batch", "tokens"]) for name in "xy")
    graph = make.make_graph([make.make_node("Identity", ["x"], ["y"])], "net", [x], [y])
    onnx.save(make.make_model(graph, opset_imports=[make.make_opsetid("", 17)], ir_version=9), "net.onnx")
    asked = ["profile", "net.onnx", "--device", "cpu", "--batch-sizes", "1,2", "--budget-s", "0.1", "-o", "cpu.yaml"]
    with pytest.raises(SystemExit, match="2"):
        main(asked)
    assert "'tokens': can be of any size" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="0"):
        main([*asked, "--sizes", "tokens=4,16"])
    assert "batch 2 tokens=16 at 100 %" in capsys.readouterr().err
    points = Profile.load("cpu.yaml").models["net"].points
    assert [(p.sizes, p.batch_size) for p in points] == [({"tokens": n}, batch) for n in (4, 16) for batch in (1, 2)]
    with pytest.raises(SystemExit, match="0"):
        main([*asked, "--sizes", "tokens=4,16", "--resume"])
    assert Profile.load("cpu.yaml").models["net"].points == points
    assert "between the measured sizes" not in capsys.readouterr().out
    with pytest.raises(SystemExit, match="0"):
        main([*asked, "--sizes", "tokens=4..16", "--resume"])
    net = Profile.load("cpu.yaml").models["net"]
    assert [sizes for sizes in net.measured_sizes if sizes in ((4,), (8,), (16,))] == [(4,), (8,), (16,)]
    assert net.size_fit == net.fit_sizes() is not None
    assert "net: between the measured sizes, as a measured size that is left out: off by" in capsys.readouterr().out
