"""`tenuto simulate --control`: the controller over a load in virtual time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tenuto.cli import main

WORKLOAD = """
models:
  - {name: vgg19, rate_rps: 40, slo_ms: 117, arrival: {process: steps, options: {factors: [0.5, 3]}}}
"""
CONTROL = "mode: %s\npolicy: {name: gpulet}\n"


def simulate(capsys: pytest.CaptureFixture[str], *more: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stop:
        main(
            [
                "simulate",
                "w.yaml",
                "--control",
                "c.yaml",
                "--gpus",
                "v100:2",
                "--profiles",
                "igniter-v100",
                "--duration-s",
                "80",
                *more,
            ]
        )
    output = capsys.readouterr()
    return int(stop.value.code or 0), output.out, output.err


@pytest.fixture(autouse=True)
def _files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "w.yaml").write_text(WORKLOAD)
    (tmp_path / "c.yaml").write_text(CONTROL % "act")


def test_a_rate_that_rises_is_followed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, out, _ = simulate(capsys, "--json")
    found = json.loads(out)
    assert code == 0
    assert found["control"]["changes"] >= 1
    assert found["requests"] == sum(window["arrived"] for window in found["control"]["windows"])
    (tmp_path / "c.yaml").write_text(CONTROL % "off")
    unchanged = json.loads(simulate(capsys, "--json")[1])
    assert unchanged["requests"] == found["requests"]
    assert unchanged["control"]["changes"] == 0
    assert unchanged["attainment"] < found["attainment"]


def test_what_does_not_go_together_is_said(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, _, err = simulate(capsys, "--output", "run", "--warmup-s", "3")
    assert code == 2
    assert "--output" in err
    assert "--warmup-s" in err
    (tmp_path / "c.yaml").write_text("mode: perhaps\nchange: {per_hour: 0, cool: 1}\n")
    code, _, err = simulate(capsys)
    assert code == 2
    for key in ("mode", "change.per_hour", "change.cool"):
        assert key in err
    (tmp_path / "c.yaml").write_text("mode: act\n")
    assert "a workload needs a policy" in simulate(capsys)[2]
