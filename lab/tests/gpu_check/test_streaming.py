"""The measurement of streaming against plain batches, on a CPU and in what it says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tenuto.errors import InvalidInputError
from tenuto_lab.gpu_check import streaming as gpu_streaming


def test_both_ways_are_measured_and_agree() -> None:
    result = gpu_streaming.compare("tests.instruments.own_models:scale", {}, 4, device="cpu", seconds=0.05)
    assert result["device"] == "cpu"
    assert result["batches"] >= 25
    assert result["largest_relative_difference"] == 0.0
    for key in ("plain_ms", "streaming_ms", "execution_ms", "plain_rps", "streaming_rps"):
        assert result[key] > 0
    assert result["ratio"] == pytest.approx(result["plain_ms"] / result["streaming_ms"], rel=0.2)
    assert bool(result["reason"]) == (result["ratio"] < 1.15)


@pytest.mark.parametrize(
    ("times", "said"),
    [
        ((10.0, 8.0, 1.0, 7.9, 0.1), ""),
        ((10.0, 9.7, 0.2, 9.6, 0.1), "can bring 1.04 times at most"),
        ((10.0, 9.0, 1.0, 6.0, 0.1), "3.00 ms more pass between two batches"),
        ((10.0, 9.9, 9.8, 6.0, 0.1), "slowest part, copy in, is 9.80 ms"),
    ],
)
def test_the_reason_follows_from_what_was_measured(times: tuple[float, ...], said: str) -> None:
    keys = ("plain_ms", "streaming_ms", "copy_in_ms", "execution_ms", "copy_out_ms")
    result: dict[str, Any] = dict(zip(keys, times, strict=True))
    result["ratio"] = result["plain_ms"] / result["streaming_ms"]
    reason = gpu_streaming.reason_of(result)
    assert said in reason
    assert bool(reason) == bool(said)


def test_variants_that_fail_are_results_and_the_others_are_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def compare(source: str, options: dict[str, Any], size: int, **_: Any) -> dict[str, Any]:
        if options.get("compile"):
            raise InvalidInputError("kernels need an NVIDIA GPU. Remove the option.")
        return {"ratio": 1.5, "reason": "", "source": source, "size": size}

    monkeypatch.setattr(gpu_streaming, "compare", compare)
    assert gpu_streaming.main(["bert", "--batch-size", "4", "-o", str(tmp_path / "s.json")]) == 1
    written = json.loads((tmp_path / "s.json").read_text())
    assert written == json.loads(capsys.readouterr().out)
    assert written["plain"] == {"ratio": 1.5, "reason": "", "source": "bert", "size": 4}
    assert "need an NVIDIA GPU" in written["compile"]["failed"]
    assert gpu_streaming.main(["--variants", "fp8"]) == 2
    assert "no variant 'fp8'" in capsys.readouterr().err
