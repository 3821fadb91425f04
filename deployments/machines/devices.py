"""Figures of this node's GPUs from the driver, for operators: memory, power, clocks, temperature, Xid errors.

They are read through NVML, which creates no CUDA context. For the GPUs of another node, its own gateway reports.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from typing import Any, Protocol

from tenuto.deployments.wire.status import DeviceStatus
from tenuto.errors import EnvironmentFaultError
from tenuto.mps.faults import XidEvents
from tenuto.mps.inventory import Nvml, load_nvml, text_of

logger = logging.getLogger("ray.serve")

_EVERY_S = 5.0  # pace: time between two looks at a GPU
_SM_CLOCK = 1  # format: NVML_CLOCK_SM
_CORE_TEMPERATURE = 0  # format: NVML_TEMPERATURE_GPU


class DeviceNvml(Nvml, Protocol):
    """The part of the module `pynvml` that tells figures; tests give a fake."""

    def nvmlDeviceGetUtilizationRates(self, handle: Any) -> Any: ...
    def nvmlDeviceGetPowerUsage(self, handle: Any) -> int: ...
    def nvmlDeviceGetClockInfo(self, handle: Any, kind: int) -> int: ...
    def nvmlDeviceGetTemperature(self, handle: Any, sensor: int) -> int: ...


def load_device_nvml() -> DeviceNvml | None:
    """Return NVML; None if its package or the driver is missing."""
    try:
        nvml: DeviceNvml = load_nvml()
        nvml.nvmlInit()
    except Exception:  # no package, no library, no driver: each raises another kind
        return None
    return nvml


class DeviceFigures:
    """The figures of all GPUs of this node, at most five seconds old. All awaits must come from one event loop."""

    def __init__(
        self, load: Callable[[], DeviceNvml | None] = load_device_nvml, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`load` loads NVML, when figures are first asked for; `clock` returns seconds."""
        self._load = load
        self._clock = clock
        self._nvml: DeviceNvml | None = None
        self._is_loaded = False
        self._devices: list[tuple[Any, str, str]] = []  # handle, UUID, name
        self._xids: dict[str, XidEvents] = {}
        self._read_s = -_EVERY_S
        self._latest: list[DeviceStatus] = []

    async def read(self) -> list[DeviceStatus]:
        """Return the figures of each GPU in base units; a figure that a GPU does not tell is None."""
        if self._clock() - self._read_s >= _EVERY_S:
            self._read_s = self._clock()
            self._latest = await asyncio.to_thread(self._read)  # a driver under load takes milliseconds
        return self._latest

    def _read(self) -> list[DeviceStatus]:
        if not self._is_loaded:
            self._is_loaded = True
            self._begin()
        nvml = self._nvml
        if nvml is None:
            return []
        return [self._device(nvml, *device) for device in self._devices]

    def _begin(self) -> None:
        nvml = self._nvml = self._load()
        if nvml is None:
            return
        try:
            count = nvml.nvmlDeviceGetCount()
        except nvml.NVMLError as error:
            logger.warning("the driver tells nothing of its GPUs: %s", error)
            return
        for index in range(count):
            try:
                handle = nvml.nvmlDeviceGetHandleByIndex(index)
                uuid, name = text_of(nvml.nvmlDeviceGetUUID(handle)), text_of(nvml.nvmlDeviceGetName(handle))
            except nvml.NVMLError as error:
                logger.warning("the driver tells nothing of GPU %d: %s", index, error)
                continue
            self._devices.append((handle, uuid, name))
            with contextlib.suppress(EnvironmentFaultError):  # not every GPU has events
                self._xids[uuid] = XidEvents(uuid, nvml)

    def _count_xids(self, uuid: str) -> int:
        watched = self._xids.get(uuid)
        if watched is None:
            return 0
        before = len(watched.seen)
        for xid in watched.look()[before:]:
            logger.error("the driver reports Xid %s on GPU %s", xid, uuid)
        return len(watched.seen)

    def _device(self, nvml: DeviceNvml, handle: Any, uuid: str, name: str) -> DeviceStatus:
        def told(read: Callable[[], float]) -> float | None:
            try:
                return read()
            except nvml.NVMLError:
                return None

        return DeviceStatus(
            uuid=uuid,
            name=name,
            memory_used_bytes=told(lambda: nvml.nvmlDeviceGetMemoryInfo(handle).used),
            memory_total_bytes=told(lambda: nvml.nvmlDeviceGetMemoryInfo(handle).total),
            utilization_ratio=told(lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100.0),
            power_watts=told(lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000.0),
            sm_clock_hertz=told(lambda: nvml.nvmlDeviceGetClockInfo(handle, _SM_CLOCK) * 1e6),
            temperature_celsius=told(lambda: float(nvml.nvmlDeviceGetTemperature(handle, _CORE_TEMPERATURE))),
            xid_errors=self._count_xids(uuid),
        )
