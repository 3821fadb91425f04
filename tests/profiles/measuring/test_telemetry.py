import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from tenuto.errors import EnvironmentFaultError, InvalidInputError
from tenuto.profiles.measuring.events import Doubt, Event
from tenuto.profiles.measuring.kernels.chrome_trace import load_chrome_trace
from tenuto.profiles.measuring.kernels.recording import record_kernels
from tenuto.profiles.measuring.measure import MeasureRequest
from tenuto.profiles.measuring.profile_worker import measure_points
from tenuto.profiles.measuring.telemetry import NvmlTelemetry, Reading, watch
from tenuto.profiles.networks.model_options import RunOptions
from tenuto.profiles.networks.models import build
from tests.profiles.measuring.kernels.test_kernels import DATA
from tests.profiles.measuring.test_profile_worker import OWN, FixedMemory, points_of
from tests.profiles.measuring.test_timing import Clock


class FakeGpu:
    """Power climbs by one watt with every reading; `broken` fails as a driver does."""

    def __init__(self, broken: bool = False) -> None:
        self.count = 0
        self.broken = broken

    def read(self) -> Reading:
        if self.broken:
            raise EnvironmentFaultError("NVML reads neither power nor clocks: lost.")
        self.count += 1
        return Reading(100.0 + self.count, 1500.0, 40.0)

    def used_mib(self) -> float:
        return 900.0

    def limits(self) -> dict[str, float]:
        return {"max_power_w": 300.0, "max_sm_clock_mhz": 1530.0}


def test_readings_are_taken_while_it_runs() -> None:
    clock = Clock(0.3)
    found = watch(FakeGpu(), clock.run, clock, seconds=1.0, period_s=10.0)
    assert clock.runs == 4
    assert found == {"power_w": 101.0, "sm_clock_mhz": 1500.0, "temperature_c": 40.0}
    with pytest.raises(EnvironmentFaultError, match="lost"):
        watch(FakeGpu(broken=True), clock.run, clock, seconds=0.1, period_s=10.0)


def nvml(**changes: Any) -> SimpleNamespace:
    class NVMLError(Exception):
        pass

    functions: dict[str, Any] = {
        "NVMLError": NVMLError,
        "NVML_CLOCK_SM": 1,
        "NVML_TEMPERATURE_GPU": 0,
        "nvmlInit": lambda: None,
        "nvmlDeviceGetHandleByUUID": lambda uuid: uuid,
        "nvmlDeviceGetPowerUsage": lambda h: 250_500,
        "nvmlDeviceGetClockInfo": lambda h, kind: 1410,
        "nvmlDeviceGetTemperature": lambda h, kind: 55,
        "nvmlDeviceGetEnforcedPowerLimit": lambda h: 300_000,
        "nvmlDeviceGetMaxClockInfo": lambda h, kind: 1530,
    }
    return SimpleNamespace(**{**functions, **changes})


def test_nvml_is_imported_on_use_and_converted(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setitem(sys.modules, "pynvml", nvml(nvmlDeviceGetHandleByUUID=asked.append))
    telemetry = NvmlTelemetry("1234")
    assert asked == ["GPU-1234"]
    assert telemetry.read() == Reading(250.5, 1410.0, 55.0)
    assert telemetry.limits() == {"max_power_w": 300.0, "max_sm_clock_mhz": 1530.0}


def test_nvml_faults_say_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = nvml()

    def fail(*_: Any) -> None:
        raise fake.NVMLError("Driver Not Loaded")

    fake.nvmlInit = fail
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    with pytest.raises(EnvironmentFaultError, match=r"Driver Not Loaded.*nvidia-smi"):
        NvmlTelemetry("1234")
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(EnvironmentFaultError, match="pip install nvidia-ml-py"):
        NvmlTelemetry("1234")


def measured(telemetry: FakeGpu, record: Callable[[Callable[[], object]], Any]) -> list[Event]:
    """Return what is reported of one batch size."""
    events: list[Event] = []
    request = MeasureRequest(OWN, batch_sizes=(2,), budget_s=0.02)
    how: dict[str, Any] = {"device": "cpu", "options": RunOptions(), "memory": FixedMemory(), "record": record}
    measure_points(build(OWN), request, report=events.append, telemetry=telemetry, **how)
    return events


def test_a_point_carries_power_clocks_and_kernel_metrics() -> None:
    trace = load_chrome_trace(DATA / "kineto_trace.json")
    (point,) = points_of(measured(FakeGpu(), lambda run: trace))
    assert point.metrics["power_w"] >= 101
    assert point.metrics["kernels"] == 4
    assert point.metrics["h2d_bytes"] == 602112
    assert "repeat_pct" in point.metrics


def test_what_cannot_be_read_is_left_out_with_a_doubt() -> None:
    events = measured(FakeGpu(broken=True), record_kernels)
    doubts = " ".join(event.text for event in events if isinstance(event, Doubt))
    assert "no power and clocks" in doubts
    assert "no kernel metrics" in doubts  # a CPU trace describes no GPU
    assert points_of(events)


def test_a_cpu_records_no_kernels() -> None:
    runs: list[int] = []
    with pytest.raises(InvalidInputError, match="deviceProperties"):
        record_kernels(lambda: runs.append(1))
    assert runs == [1]
