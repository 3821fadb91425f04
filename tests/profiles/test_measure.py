import io
import json
import math
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from tenuto.errors import EnvironmentFaultError, InvalidInputError
from tenuto.profiles import Profile, ProfilePoint
from tenuto.profiles.measuring.measure import (
    STOPPED,
    Measurement,
    MeasureRequest,
    assemble,
    gpu_type_of,
    measure_model,
    row_name,
)
from tenuto.profiles.measuring.memory import ResidentMemory
from tenuto.profiles.measuring.timing import Timing, fit_line, measure_repeatedly, measure_until_stable, quantile
from tenuto.profiles.measuring.worker import main, measure_points, random_inputs
from tenuto.profiles.networks.cpu_share import cpu_threads
from tenuto.profiles.networks.models import build
from tenuto.profiles.networks.torch_runner import RunOptions
from tests.profiles.test_models import SMALL, one_thread  # noqa: F401

OWN = "tests.profiles.own_models:scale"


class Clock:
    """A clock that only the work moves: each run takes the next duration, the last one for ever."""

    def __init__(self, *durations_s: float) -> None:
        self.now = 0.0
        self.durations = list(durations_s)
        self.runs = 0

    def __call__(self) -> float:
        return self.now

    def run(self) -> None:
        self.now += self.durations[min(self.runs, len(self.durations) - 1)]
        self.runs += 1


def test_steady_work_stops_early() -> None:
    clock = Clock(0.002)
    timing = measure_until_stable(clock.run, clock, budget_s=100)
    assert clock.runs == timing.runs == 10
    assert timing.median_ms == pytest.approx(2.0)
    assert timing.spread_ms == pytest.approx(0.0, abs=1e-9)


def test_noisy_work_is_repeated_until_the_median_is_certain() -> None:
    noisy = Clock(*[0.001 * (1 + 0.05 * math.sin(i * 7.3)) for i in range(500)])
    timing = measure_until_stable(noisy.run, noisy, budget_s=100, tolerance_pct=1.0)
    assert 10 < timing.runs < 500
    assert timing.uncertainty_pct <= 1.0


def test_the_budget_ends_it_but_three_runs_are_made() -> None:
    slow = Clock(10.0, 12.0, 11.0)
    timing = measure_until_stable(slow.run, slow, budget_s=1)
    assert timing.runs == 3
    assert timing.median_ms == pytest.approx(11_000)
    forever = Clock(0.001, 0.002)
    forever.durations = [0.001, 0.01] * 1000
    assert measure_until_stable(forever.run, forever, budget_s=1e9).runs == 500


def test_rounds_are_repeated_while_their_medians_disagree_and_time_is_left() -> None:
    settled = Clock(*[0.002] * 10, 0.001)
    timing, repeat_pct = measure_repeatedly(settled.run, settled, budget_s=1)
    assert settled.runs == 30  # a slow round, a quick one, and another that agrees with it
    assert timing.median_ms == pytest.approx(1.0)
    assert timing.runs == 20
    assert repeat_pct == pytest.approx(0.0, abs=1e-9)
    steady = Clock(0.001)
    assert measure_repeatedly(steady.run, steady, budget_s=1)[0].runs == 20
    late = Clock(*[0.2] * 3, 0.1)
    timing, repeat_pct = measure_repeatedly(late.run, late, budget_s=1)
    assert repeat_pct == pytest.approx(100.0)  # no time is left: the disagreement is reported
    assert timing.runs == 8


def test_one_outlier_does_not_move_the_median() -> None:
    timing = Timing.of([1.0] * 20 + [500.0])
    assert timing.median_ms == 1.0
    assert timing.fastest_ms == 1.0


def test_quantiles_are_linear_between_values() -> None:
    assert quantile([1.0, 2.0, 3.0], 0.25) == 1.5
    assert quantile([4.0], 0.9) == 4.0


def test_the_line_is_found_again() -> None:
    line = fit_line([(b, 1.5 * b + 4.0) for b in (1, 2, 4, 8)])
    assert line is not None
    assert line == pytest.approx((1.5, 4.0, 1.0, 0.0), abs=1e-9)
    bent = fit_line([(1, 1.0), (2, 2.0), (3, 2.0)])
    assert bent is not None
    alpha, beta, r_squared, error = bent
    assert (alpha, beta) == pytest.approx((0.5, 2 / 3))
    assert r_squared == pytest.approx(0.75)
    assert error == pytest.approx(100 / 6)  # the line passes 1/3 under the second point, and 1/6 beside the first
    assert fit_line([(4, 1.0)]) is None
    assert fit_line([(1, 2.0), (2, 2.0)])[2] is None  # type: ignore[index]


@pytest.mark.parametrize(
    ("share", "cores", "threads"), [(50, 2, 1), (100, 2, 2), (1, 2, 1), (25, 16, 4), (None, 8, 8), (70, 2, 1)]
)
def test_a_share_of_cores_is_threads(share: float | None, cores: int, threads: int) -> None:
    assert cpu_threads(share, cores) == threads


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("Tesla V100-SXM2-16GB", "v100"), ("NVIDIA A100-SXM4-40GB", "a100"), ("NVIDIA H200", "h200"),
        ("NVIDIA GeForce GTX 1080 Ti", "1080ti"), ("NVIDIA GeForce RTX 2080 Ti", "2080ti"), ("NVIDIA L4", "l4"),
        ("NVIDIA A10G", "a10g"), ("Tesla T4", "t4"), ("NVIDIA L40S", "l40s"),
        ("NVIDIA A100-SXM4-40GB MIG 3g.20gb", "a100-3g.20gb"),
    ],
)  # fmt: skip
def test_gpu_types_by_the_drivers_name(name: str, expected: str) -> None:
    assert gpu_type_of(name) == expected


class FixedMemory:
    def reset(self) -> None:
        pass

    def peak_mib(self) -> float | None:
        return 12.34


def measured_events(request: MeasureRequest) -> list[Mapping[str, Any]]:
    events: list[Mapping[str, Any]] = []
    loaded = build(request.source, options=request.options)
    measure_points(loaded, request, device="cpu", run_options=RunOptions(), memory=FixedMemory(), report=events.append)
    return events


def test_points_are_measured_in_the_most_useful_order() -> None:
    request = MeasureRequest(OWN, batch_sizes=(2, 1), shares=(50.0, 100.0), budget_s=0.02)
    events = measured_events(request)
    points = [ProfilePoint.model_validate(e["point"]) for e in events if e["event"] == "point"]
    assert [(p.share_pct, p.batch_size) for p in points] == [(100, 1), (100, 2), (50, 1), (50, 2)]
    assert all(p.latency_ms > 0 and p.memory_mib == 12.3 and p.metrics["runs"] >= 3 for p in points)
    assert events[0]["weights_mib"] == pytest.approx(4 / 2**20)


def test_running_out_of_memory_keeps_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from tests.profiles.own_models import Scale

    original = Scale.forward

    def limited(self: Scale, x: torch.Tensor) -> Any:
        if len(x) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return original(self, x)

    monkeypatch.setattr(Scale, "forward", limited)
    events = measured_events(MeasureRequest(OWN, batch_sizes=(1, 2, 4), budget_s=0.01))
    assert len([e for e in events if e["event"] == "point"]) == 1
    doubts = " ".join(event["text"] for event in events if event["event"] == "doubt")
    assert "batch 2 and above at 100 %: out of memory" in doubts


def test_inputs_are_seeded_and_within_range() -> None:
    signature = build("bert", options=SMALL["bert"]).signature
    first, again = random_inputs(signature, 3), random_inputs(signature, 3)
    assert (first["input_ids"] == again["input_ids"]).all()
    assert first["input_ids"].max() < 1000
    assert first["attention_mask"].all()


def test_resident_memory_sees_what_is_allocated_and_released() -> None:
    if ResidentMemory().peak_mib() is None:
        pytest.skip("the kernel reports no resident set here")
    # A process of its own: here, freed memory of other tests would be used again and not count as growth.
    program = """
import numpy as np
from tenuto.profiles.measuring.memory import ResidentMemory
meter = ResidentMemory()
meter.reset()
block = np.ones(40 * 2**20 // 8)
grown = meter.peak_mib()
del block
meter.reset()
print(grown, meter.peak_mib())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    grown, after = (float(word) for word in done.stdout.split())
    assert 38 <= grown <= 60
    assert after < 20


@pytest.fixture(scope="module")
def measured() -> tuple[Measurement, list[ProfilePoint]]:
    """One real measurement in a process of its own."""
    points: list[ProfilePoint] = []
    request = MeasureRequest(OWN, device="cpu", batch_sizes=(1, 2, 4), budget_s=0.05, options={"width": 8})
    return measure_model(request, on_point=points.append), points


def test_a_model_is_measured_in_a_process_of_its_own(measured: tuple[Measurement, list[ProfilePoint]]) -> None:
    measurement, points = measured
    assert measurement.name == "scale"
    assert measurement.gpu_type == "cpu"
    assert "cores" in measurement.hardware
    assert measurement.versions["torch"]
    assert [p.batch_size for p in measurement.profile.points] == [1, 2, 4]
    assert list(measurement.profile.points) == points
    assert measurement.profile.fit is not None
    assert measurement.profile.weights_mib is not None


def test_a_profile_file_survives_the_round_trip(
    measured: tuple[Measurement, list[ProfilePoint]], tmp_path: Path
) -> None:
    profile = assemble([measured[0]], name="here", command="tenuto profile scale")
    path = tmp_path / "profile.yaml"
    path.write_text(profile.dump())
    assert Profile.load(path) == profile
    assert profile.measured is not None
    assert profile.measured.date[:2] == "20"
    with pytest.raises(InvalidInputError, match="measured twice"):
        assemble([measured[0], measured[0]], name="x")
    with pytest.raises(InvalidInputError, match="nothing was measured"):
        assemble([], name="x")


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (MeasureRequest("resnet51"), "not in the catalogue"),
        (MeasureRequest("resnet50", batch_sizes=(0, 1)), "at least 1"),
        (MeasureRequest("resnet50", shares=(101.0,)), "up to 100"),
        (MeasureRequest("resnet50", budget_s=0), "above 0"),
    ],
)
def test_wrong_requests_start_no_process(
    request_: MeasureRequest, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("subprocess.Popen", None)
    with pytest.raises(InvalidInputError, match=message):
        measure_model(request_)


@pytest.mark.parametrize(("kind", "raised"), [("InvalidInputError", InvalidInputError),
                                              ("EnvironmentFaultError", EnvironmentFaultError)])  # fmt: skip
def test_faults_in_the_process_reach_the_caller(
    kind: str, raised: type[Exception], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    script = tmp_path / "fault.py"
    script.write_text(f'print(\'{{"event": "error", "kind": "{kind}", "text": "bad option"}}\')')
    monkeypatch.setattr("tenuto.profiles.measuring.measure._WORKER", [str(script)])
    with pytest.raises(raised, match="bad option"):
        measure_model(MeasureRequest(OWN, device="cpu"))


def test_the_worker_reports_faults_as_events(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    request = MeasureRequest(OWN, device="cpu", options={"depth": 1})
    monkeypatch.setattr("sys.stdin", io.StringIO(json.dumps(asdict(request))))
    stdout = os.dup(1)
    try:
        main()
    finally:
        os.dup2(stdout, 1)
        os.close(stdout)
    events = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
    assert [event["event"] for event in events] == ["machine", "error"]
    assert events[1]["kind"] == "InvalidInputError"
    assert "cannot be called with the options" in events[1]["text"]


def test_a_process_that_dies_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script = tmp_path / "dies.py"
    for code, message in (("import sys; sys.exit('torn apart')", "torn apart"),
                          ("import os; os.kill(os.getpid(), 9)", "memory runs out")):  # fmt: skip
        script.write_text(code)
        monkeypatch.setattr("tenuto.profiles.measuring.measure._WORKER", [str(script)])
        with pytest.raises(EnvironmentFaultError, match=message):
            measure_model(MeasureRequest(OWN, device="cpu"))


def test_shares_of_a_gpu_need_mps_and_get_a_process_each(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script = tmp_path / "fake.py"
    script.write_text(
        "import json, os, sys\n"
        "request = json.load(sys.stdin)\n"
        "machine = dict(event='machine', device='cuda', gpu_type='h200', hardware='fake', memory_mib=1, versions={})\n"
        "print(json.dumps(machine))\n"
        "share = os.environ.get('CUDA_MPS_ACTIVE_THREAD_PERCENTAGE')\n"
        "for size in request['batch_sizes']:\n"
        "    point = dict(batch_size=size, share_pct=request['shares'][0], latency_ms=1 + size)\n"
        "    point['metrics'] = {'mps': float(share)}\n"
        "    print(json.dumps(dict(event='point', point=point)))\n"
    )
    monkeypatch.setattr("tenuto.profiles.measuring.measure._WORKER", [str(script)])
    request = MeasureRequest(OWN, shares=(50.0, 100.0), batch_sizes=(1, 2))
    with pytest.raises(EnvironmentFaultError, match="needs CUDA MPS"):
        measure_model(request)
    measurement = measure_model(
        request, share_environment=lambda share: {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(share)}
    )
    found = [(p.share_pct, p.batch_size, p.metrics["mps"]) for p in measurement.profile.points]
    assert found == [(100, 1, 100), (100, 2, 100), (50, 1, 50), (50, 2, 50)]


def test_rows_are_named_after_the_model(tmp_path: Path) -> None:
    assert row_name("torchvision/resnet50") == "resnet50"
    assert row_name("package.module:Class.make") == "make"
    (tmp_path / "my-bert").mkdir()
    assert row_name(str(tmp_path / "my-bert") + "/") == "my-bert"


def test_a_stopped_run_is_taken_up_where_it_ended(quick_workers: None) -> None:
    request = MeasureRequest(OWN, device="cpu", batch_sizes=(1, 2), budget_s=0.02, options={"width": 8})
    stopped = measure_model(replace(request, batch_sizes=(1,)))
    assert stopped.profile.fit is None
    before = stopped.profile.model_copy(update={"doubts": (STOPPED,)})
    points: list[ProfilePoint] = []
    finished = measure_model(request, before=before, on_point=points.append)
    assert [p.batch_size for p in points] == [2]
    assert finished.profile.points[0] == before.points[0]
    assert finished.profile.fit is not None
    assert STOPPED not in finished.profile.doubts


def test_no_point_begins_after_the_time_limit() -> None:
    clock = Clock(0.0)
    request = MeasureRequest(OWN, batch_sizes=(1, 2, 4), budget_s=0.02, time_limit_s=10)
    events: list[Mapping[str, Any]] = []

    def report(event: Mapping[str, Any]) -> None:
        events.append(event)
        clock.now += 6.0 if event["event"] == "point" else 0.0

    class Counting(Clock):
        def __call__(self) -> float:
            clock.now += 1e-4
            return clock.now

    measure_points(build(OWN), request, device="cpu", run_options=RunOptions(), memory=FixedMemory(), report=report,
                   clock_s=Counting())  # fmt: skip
    assert [e["event"] for e in events if e["event"] in ("point", "stopped")] == ["point", "point", "stopped"]


def test_batches_that_the_others_predict_are_left_out() -> None:
    request = MeasureRequest(OWN, batch_sizes=(1, 2, 4, 8, 16), budget_s=0.02, tolerance_pct=99.0,
                             known=((1, 100.0, 1.0), (4, 100.0, 4.0), (16, 100.0, 16.0)))  # fmt: skip
    events = measured_events(request)
    assert [e["event"] for e in events if e["event"] == "point"] == []
    assert "batches 2, 8 at 100 %: not measured" in events[-1]["text"]
    assert request.left() == 2


def test_a_share_that_is_not_enforced_ends_the_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script = tmp_path / "fake.py"
    script.write_text(
        "import json, sys\n"
        "json.load(sys.stdin)\n"
        "print(json.dumps(dict(event='machine', device='cuda', gpu_type='h200', hardware='fake', memory_mib=1, "
        "versions={}, sm_count=132)))\n"
    )
    monkeypatch.setattr("tenuto.profiles.measuring.measure._WORKER", [str(script)])
    with pytest.raises(EnvironmentFaultError, match="sees 132 of 132 SMs: the share is not enforced"):
        measure_model(
            MeasureRequest(OWN, device="cuda", shares=(50.0,)), share_environment=lambda share: {"SHARE": f"{share:g}"}
        )
