import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tenuto.cli import main
from tenuto.profiles import ModelProfile, Profile, ProfilePoint
from tenuto_lab.estimator import training
from tenuto_lab.estimator.trace import Trace, trace_model
from tests.instruments.small_networks import SMALL


@functools.cache
def _of_text(source: str, batch_sizes: tuple[int, ...], options: str) -> tuple[Trace, ...]:
    return trace_model(source, batch_sizes, json.loads(options))


def _traced(source: str, batch_sizes: Sequence[int], options: Mapping[str, Any] | None = None) -> tuple[Trace, ...]:
    """Trace a network once for all tests: a trace depends on nothing else."""
    return _of_text(source, tuple(batch_sizes), json.dumps(dict(options or {}), sort_keys=True))


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(training, "trace_model", _traced)
    models = {
        name: ModelProfile(
            points=tuple(ProfilePoint(batch_size=b, latency_ms=scale * (b + 1), memory_mib=10 + b) for b in (1, 4)),
            network=name,
            options=SMALL[name],
        )
        for name, scale in (("bert", 1.0), ("gpt2", 1.2), ("mobilenet_v2", 2.0))
    }
    Path("known.yaml").write_text(Profile(name="known", gpu_type="cpu", source="a test", models=models).dump())

    def call(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as caught:
            main(["estimate", *arguments])
        out, err = capsys.readouterr()
        return int(caught.value.code or 0), out, err

    return call


KNOWN = ("--gpu", "cpu", "--profiles", "known.yaml")


def test_a_model_that_was_never_measured(run: Any) -> None:
    options = [f"--option=config={json.dumps(SMALL['t5']['config'])}", "--option=sequence_length=8"]
    code, out, err = run("t5", *KNOWN, *options, "--batch-sizes", "2,8", "-o", "t5.yaml")
    assert code == 0, err
    assert out.startswith("t5 on cpu, ESTIMATED from 3 other models")
    assert "USHER claims 99.98 %" in out
    profile = Profile.load("t5.yaml")
    assert profile.models["t5"].batch_sizes() == (2, 8)
    assert profile.models["t5"].doubts[0].startswith("estimated, not measured")
    assert {"latency_ms", "memory_mib"} <= {*profile.models["t5"].estimated}  # which a plan repeats in its notes


def test_a_measured_model_is_not_learnt_from(run: Any) -> None:
    code, out, _ = run("bert", *KNOWN, "--batch-sizes", "1,4", "--json")
    assert code == 0
    data = json.loads(out)
    assert data["learnt_from"] == ["gpt2", "mobilenet_v2"]
    assert [e["batch_size"] for e in data["estimates"]] == [1, 4]
    assert data["estimates"][0]["creq_pct"] is None
    assert data["leave_one_model_out"]["models"] == 3
    code, out, _ = run("bert", *KNOWN, "--no-errors")
    assert code == 0
    assert "Mean error" not in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("resnet51", *KNOWN), "not in the catalogue"),
        (("net.onnx", *KNOWN), "is an exported file"),
        (("tests.instruments.own_models:raising", *KNOWN), "raised KeyError while it was traced ('no such row')"),
        (("tests.instruments.own_models:idle", *KNOWN), "runs no operator that takes time"),
        (("bert", *KNOWN, "--batch-sizes", "0"), "at least 1"),
        (("bert", "--gpu", "h200"), "no profile of this type"),
        (("bert", "--gpu", "cpu", "--profiles", "none.yaml"), "neither a file nor a shipped profile"),
    ],
)
def test_wrong_arguments(run: Any, arguments: tuple[str, ...], message: str) -> None:
    code, _, err = run(*arguments)
    assert code == 2
    assert message in err
