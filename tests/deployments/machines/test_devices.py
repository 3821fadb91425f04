"""Figures of GPUs in base units, what a GPU does not tell left out, and every Xid counted once."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from tenuto.deployments.machines.devices import DeviceFigures
from tenuto.deployments.operator.exposition import render_metrics
from tenuto.deployments.wire.status import DeviceStatus, SystemStatus
from tests.mps import fake_nvml

FakeError = fake_nvml.FakeNvml.NVMLError


class FakeNvml(fake_nvml.FakeNvml):
    """Two GPUs; the second tells no power. `xids` are events that have not been read."""

    nvmlEventTypeXidCriticalError = 8

    def __init__(self) -> None:
        super().__init__()
        self.xids: list[int] = []
        self.reads = 0

    def nvmlInit(self) -> None: ...
    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> int:
        return int(uuid.removeprefix("GPU-"))

    def nvmlDeviceGetUUID(self, handle: int) -> bytes:
        return f"GPU-{handle}".encode()

    def nvmlDeviceGetName(self, handle: int) -> str:
        return "H200"

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        self.reads += 1
        return SimpleNamespace(used=3 << 30, total=140 << 30)

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> Any:
        return SimpleNamespace(gpu=37)

    def nvmlDeviceGetPowerUsage(self, handle: int) -> int:
        if handle:
            raise FakeError("not supported")
        return 412_000

    def nvmlDeviceGetClockInfo(self, handle: int, kind: int) -> int:
        assert kind == 1
        return 1980

    def nvmlDeviceGetTemperature(self, handle: int, sensor: int) -> int:
        return 61

    def nvmlEventSetCreate(self) -> str:
        return "events"

    def nvmlDeviceRegisterEvents(self, handle: int, kinds: int, events: str) -> None:
        if handle:
            raise FakeError("not supported")

    def nvmlEventSetWait_v2(self, events: str, timeout_ms: int) -> Any:
        assert timeout_ms == 0
        if not self.xids:
            raise FakeError("timeout")
        return SimpleNamespace(device=0, eventData=self.xids.pop())


async def test_a_gpu_that_is_lost_hides_no_other_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the driver is asked may fail, at the first look or later."""

    def lost(handle: int, *_others: object) -> Any:
        if handle == 1:
            raise FakeError("GPU is lost")
        return whole(FakeNvml(), handle, *_others)

    calls = [name for name in vars(FakeNvml) if name.startswith("nvmlDevice") and not name.endswith("Count")]
    for name in calls:
        for is_first in (True, False):
            nvml, times_s = FakeNvml(), iter(range(0, 1000, 10))
            figures = DeviceFigures(partial(lambda nvml: nvml, nvml), clock=partial(next, times_s))
            if not is_first:
                await figures.read()
            whole = getattr(FakeNvml, name)
            monkeypatch.setattr(nvml, name, lost)
            assert "GPU-0" in [device.uuid for device in await figures.read()]


async def test_figures_come_in_base_units_and_at_most_every_five_seconds() -> None:
    nvml, now_s = FakeNvml(), 0.0
    figures = DeviceFigures(lambda: nvml, clock=lambda: now_s)
    first, second = await figures.read()
    assert first == DeviceStatus(
        uuid="GPU-0",
        name="H200",
        memory_used_bytes=3 << 30,
        memory_total_bytes=140 << 30,
        utilization_ratio=0.37,
        power_watts=412.0,
        sm_clock_hertz=1.98e9,
        temperature_celsius=61.0,
        xid_errors=0,
    )
    assert second.power_watts is None
    reads = nvml.reads
    now_s = 4.9
    await figures.read()
    assert nvml.reads == reads
    nvml.xids = [79, 31]
    now_s = 5.0
    assert [device.xid_errors for device in await figures.read()] == [2, 0]
    now_s = 10.0
    found = await figures.read()
    assert [device.xid_errors for device in found] == [2, 0]
    text = render_metrics(SystemStatus(models={}, devices=found))
    assert 'tenuto_gpu_xid_errors_total{uuid="GPU-0",name="H200"} 2\n' in text
    assert text.count("tenuto_gpu_power_watts{") == 1


async def test_without_a_driver_there_is_nothing_to_tell() -> None:
    asked = 0

    def load() -> None:
        nonlocal asked
        asked += 1

    times = iter(range(0, 100, 10))
    figures = DeviceFigures(load, clock=lambda: float(next(times)))
    for _ in range(3):
        assert await figures.read() == []
    assert asked == 1
