"""Operators timed by their kernels on a GPU of virtual time, and kernels found by the operator that launched them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lab.tests.kernels.test_kernel_training import made_runs
from lab.tests.kernels.test_usher import FAST, SLOW, file
from tenuto.cli import main
from tenuto.errors import InvalidInputError
from tenuto.profiles import Profile
from tenuto_lab.kernels.by_operator import RANGE_NAME, operator_kernels
from tenuto_lab.kernels.operator_times import OperatorFile, time_operators
from tests.cli.test_profile_on_gpu import OWN, SMS
from tests.instruments.virtual_gpu import ELEMENTS_PER_S, SHORTEST_KERNEL_S, VirtualGpu


def test_operators_are_timed_by_their_kernels() -> None:
    with VirtualGpu().installed():
        (run,) = time_operators(OWN, (4,), {"width": 4096}, device="cuda")
    assert [operator.name for operator in run.operators] == ["mul", "sum"]
    assert run.timed_by == "kernels"
    (multiplied,), (summed,) = (operator.kernels for operator in run.operators)
    # Not the launches around them: what the GPU takes for so many elements, and for a row's sum.
    assert multiplied.time_ms == pytest.approx((SHORTEST_KERNEL_S + 4 * 4096 / ELEMENTS_PER_S) * 1e3, rel=1e-6)
    assert summed.time_ms == pytest.approx((SHORTEST_KERNEL_S + 4 / ELEMENTS_PER_S) * 1e3, rel=1e-3)
    assert [operator.time_ms for operator in run.operators] == [multiplied.time_ms, summed.time_ms]
    wide, narrow = (operator.occupancy_pct for operator in run.operators)
    assert wide == pytest.approx(100 * (4 * 4096 / 256) / SMS * 8 / 64)  # 64 blocks of 8 warps on 80 SMs of 64 warps
    assert narrow == pytest.approx(100 * 1 / SMS * 8 / 64, abs=1e-3)


def test_without_cupti_operators_have_times_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_GPU_NO_CUPTI", "1")
    with VirtualGpu().installed():
        (run,) = time_operators(OWN, (4,), {"width": 4096}, device="cuda")
    assert [operator.occupancy_pct for operator in run.operators] == [None, None]
    assert run.timed_by == "events"
    assert run.operators[0].time_ms > run.operators[1].time_ms > 0


def traced(*launches: tuple[float, int], ranges: int = 3) -> dict[str, Any]:
    """Return a trace of operators of 10 µs each, with launches (at, correlation) and kernels that run much later."""
    kernel = {"ph": "X", "cat": "kernel", "dur": 5.0, "name": "k"}
    launch = {"registers per thread": 32, "shared memory": 0, "block": [256, 1, 1], "device": 0}
    return {
        "deviceProperties": [{"id": 0, "name": "V100", "computeMajor": 7, "computeMinor": 0, "numSms": 80}],
        "traceEvents": [
            *(
                {"ph": "X", "cat": "user_annotation", "name": RANGE_NAME, "ts": 10.0 * i, "dur": 9.0}
                for i in range(ranges)
            ),
            *(
                {
                    "ph": "X",
                    "cat": "cuda_runtime",
                    "name": "cudaLaunchKernel",
                    "ts": at,
                    "dur": 1.0,
                    "args": {"correlation": number},
                }
                for at, number in launches
            ),
            *(
                {
                    **kernel,
                    "ts": 500.0 + 10 * number,
                    "args": {**launch, "grid": [80 * number, 1, 1], "correlation": number},
                }
                for _, number in launches
            ),
        ],
    }


def test_kernels_find_the_operator_that_launched_them() -> None:
    # Operator 0 launches blocks for one and two per SM, operator 1 nothing, operator 2 four; one launch is outside.
    found = operator_kernels(traced((3.0, 2), (1.0, 1), (22.0, 4), (60.0, 8)))
    assert [[kernel.occupancy_pct for kernel in mine] for mine in found] == [
        pytest.approx([100 * 8 / 64, 100 * 2 * 8 / 64]),
        [],
        pytest.approx([100 * 4 * 8 / 64]),
    ]
    assert [kernel.time_ms for mine in found for kernel in mine] == pytest.approx([0.005] * 3)
    with pytest.raises(InvalidInputError, match="has no range named"):
        operator_kernels(traced((1.0, 1), ranges=0))


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[Any, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(["kernels", *words])
    said = capsys.readouterr()
    return ended.value.code, said.out, said.err


def test_kernels_are_learnt_from_timed_operators(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    small = ["--option", "image_size=32", "--option", "config={width_mult: 0.25}"]
    asked = ["estimate", "mobilenet_v2", "--gpu", "cpu", "--batch-sizes", "1,4", *small]
    Path("operators.yaml").write_text(OperatorFile(gpu_type="cpu", hardware="h", runs=tuple(made_runs(3))).dump())
    code, out, err = run(capsys, *asked, "--operator-times", "operators.yaml")
    assert code == 0, err
    assert "From single kernels of 3 other models" in out
    assert "plain roofline" in out
    assert "By USHER's estimator as published, from kernels of cpu: batch 1:" in out
    code, out, err = run(capsys, *asked, "--operator-times", "operators.yaml", "--no-errors", "--json")
    assert json.loads(out)["latency_ms"]["1"] > 0
    assert json.loads(out)["usher"]["estimates"]["1"]["memory_mib"] > 0
    Path("operators.yaml").write_text(OperatorFile(gpu_type="v100", hardware="h", runs=tuple(made_runs(3))).dump())
    code, _, err = run(capsys, *asked, "--operator-times", "operators.yaml", "--no-errors")
    assert code == 2
    assert "not of GPU type" in err


def test_what_ushers_estimator_says_is_a_profile_that_its_scheduler_plans_with(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    for kind, machine in (("v100", SLOW), ("t4", FAST)):
        Path(f"{kind}-operators.yaml").write_text(file(kind, machine, 3).dump())
    times = ["--operator-times", "v100-operators.yaml", "--operator-times", "t4-operators.yaml"]
    small = ["--option", "image_size=32", "--option", "config={width_mult: 0.25}", "--no-errors"]
    for kind in ("v100", "t4"):
        asked = ["estimate", "mobilenet_v2", "--gpu", kind, "--batch-sizes", "1,2,4", *small]
        code, _, err = run(capsys, *asked, *times, "-o", f"{kind}.yaml")
        assert code == 0, err
        profile = Profile.load(f"{kind}.yaml")
        row = profile.models["mobilenet_v2"]
        assert (profile.gpu_type, row.batch_sizes()) == (kind, (1, 2, 4))
        assert {"latency_ms", "memory_mib", "achieved_occupancy_pct"} <= {*row.estimated}
        assert all(point.memory_mib and 0 < point.metrics["achieved_occupancy_pct"] <= 100 for point in row.points)
    slo_ms = 30 * max(Profile.load(f"{kind}.yaml").models["mobilenet_v2"].latency_ms(4) for kind in ("v100", "t4"))
    Path("w.yaml").write_text(f"models: [{{name: mobilenet_v2, rate_rps: {500 / slo_ms}, slo_ms: {slo_ms}}}]")
    given = ["--gpus", "v100:1,t4:1", "--profiles", "v100.yaml", "--profiles", "t4.yaml"]
    with pytest.raises(SystemExit) as ended:
        main(["plan", "w.yaml", "--policy", "usher", *given, "-o", "plan.yaml"])
    said = capsys.readouterr()
    assert ended.value.code == 0, said.err
    assert "estimated, not measured" in said.out
    with pytest.raises(SystemExit) as ended:
        main(["lab", "balance", "plan.yaml", "--profiles", "v100.yaml", "--profiles", "t4.yaml", "--json"])
    assert ended.value.code == 0
    (gpu,) = json.loads(capsys.readouterr().out)["gpus"]
    assert gpu["models"] == 1
    assert gpu["apart_pct"] == pytest.approx(abs(gpu["cuti_pct"] - gpu["muti_pct"]))


def test_operators_of_a_model_are_timed_into_a_file(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("cpu.yaml").write_text(
        Profile.model_validate({"name": "cpu", "gpu_type": "cpu", "source": "made up", "models": {}}).dump()
    )
    words = ["time", OWN, "--profile", "cpu.yaml", "--device", "cpu", "--batch-sizes", "2", "-o", "o.yaml"]
    code, _, err = run(capsys, *words, "--option", "width=64")
    assert code == 0, err
    (timed,) = OperatorFile.load("o.yaml").runs
    assert [operator.name for operator in timed.operators] == ["mul", "sum"]
