"""What the driver says of this node's GPUs, for operators: memory, power, clocks, temperature, Xid errors.

Read through NVML, which creates no CUDA context. A GPU of another node is that node's gateway's to tell.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, Protocol

logger = logging.getLogger("ray.serve")

_EVERY_S = 5.0
_SM_CLOCK = 1  # NVML_CLOCK_SM
_CORE_TEMPERATURE = 0  # NVML_TEMPERATURE_GPU
_XID = 0x8  # nvmlEventTypeXidCriticalError


class DeviceNvml(Protocol):
    """The part of the module `pynvml` that is used; the tests give a fake one."""

    @property
    def NVMLError(self) -> type[Exception]: ...
    def nvmlInit(self) -> None: ...
    def nvmlShutdown(self) -> None: ...
    def nvmlDeviceGetCount(self) -> int: ...
    def nvmlDeviceGetHandleByIndex(self, index: int) -> Any: ...
    def nvmlDeviceGetUUID(self, handle: Any) -> Any: ...
    def nvmlDeviceGetName(self, handle: Any) -> Any: ...
    def nvmlDeviceGetMemoryInfo(self, handle: Any) -> Any: ...
    def nvmlDeviceGetUtilizationRates(self, handle: Any) -> Any: ...
    def nvmlDeviceGetPowerUsage(self, handle: Any) -> int: ...
    def nvmlDeviceGetClockInfo(self, handle: Any, kind: int) -> int: ...
    def nvmlDeviceGetTemperature(self, handle: Any, sensor: int) -> int: ...
    def nvmlEventSetCreate(self) -> Any: ...
    def nvmlDeviceRegisterEvents(self, handle: Any, kinds: int, events: Any) -> None: ...
    def nvmlEventSetWait(self, events: Any, timeout_ms: int) -> Any: ...


def load_device_nvml() -> DeviceNvml | None:
    """Return NVML; None where its package or the driver is not there."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # no package, no library, no driver: each has a kind of its own
        return None
    module: DeviceNvml = pynvml
    return module


class DeviceFigures:
    """The figures of all GPUs of this node, at most five seconds old. All awaits must come from one event loop."""

    def __init__(
        self, load: Callable[[], DeviceNvml | None] = load_device_nvml, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Take what loads NVML, when figures are first asked for, and a clock in seconds."""
        self._load = load
        self._clock = clock
        self._nvml: DeviceNvml | None = None
        self._is_loaded = False
        self._handles: list[Any] = []
        self._events: Any = None
        self._xids: Counter[str] = Counter()
        self._read_s = -_EVERY_S
        self._latest: list[dict[str, Any]] = []

    async def read(self) -> list[dict[str, Any]]:
        """Return the figures of each GPU in base units; one that a GPU does not tell is left out."""
        if self._clock() - self._read_s >= _EVERY_S:
            self._read_s = self._clock()
            self._latest = await asyncio.to_thread(self._read)  # a driver under load takes milliseconds
        return self._latest

    def _read(self) -> list[dict[str, Any]]:
        if not self._is_loaded:
            self._is_loaded = True
            self._begin()
        nvml = self._nvml
        if nvml is None:
            return []
        self._count_xids(nvml)
        return [self._device(nvml, handle) for handle in self._handles]

    def _begin(self) -> None:
        nvml = self._nvml = self._load()
        if nvml is None:
            return
        try:
            self._handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
            self._events = nvml.nvmlEventSetCreate()
        except nvml.NVMLError as error:
            logger.warning("the driver tells nothing of its GPUs: %s", error)
            return
        for handle in self._handles:
            with contextlib.suppress(nvml.NVMLError):  # not every GPU has events
                nvml.nvmlDeviceRegisterEvents(handle, _XID, self._events)

    def _count_xids(self, nvml: DeviceNvml) -> None:
        """Take the events that have come; the wait ends with an error when there are none left."""
        if self._events is None:
            return
        with contextlib.suppress(nvml.NVMLError):
            while True:
                event = nvml.nvmlEventSetWait(self._events, 0)
                uuid = _text(nvml.nvmlDeviceGetUUID(event.device))
                self._xids[uuid] += 1
                logger.error("the driver reports Xid %s on GPU %s", event.eventData, uuid)

    def _device(self, nvml: DeviceNvml, handle: Any) -> dict[str, Any]:
        uuid = _text(nvml.nvmlDeviceGetUUID(handle))
        found: dict[str, Any] = {"uuid": uuid, "name": _text(nvml.nvmlDeviceGetName(handle))}
        figures: dict[str, Callable[[], float]] = {
            "memory_used_bytes": lambda: nvml.nvmlDeviceGetMemoryInfo(handle).used,
            "memory_total_bytes": lambda: nvml.nvmlDeviceGetMemoryInfo(handle).total,
            "utilization_ratio": lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100.0,
            "power_watts": lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000.0,
            "sm_clock_hertz": lambda: nvml.nvmlDeviceGetClockInfo(handle, _SM_CLOCK) * 1e6,
            "temperature_celsius": lambda: float(nvml.nvmlDeviceGetTemperature(handle, _CORE_TEMPERATURE)),
        }
        for key, read in figures.items():
            with contextlib.suppress(nvml.NVMLError):
                found[key] = read()
        return {**found, "xid_errors": self._xids[uuid]}

    def close(self) -> None:
        """Let go of NVML."""
        if self._nvml is not None:
            with contextlib.suppress(self._nvml.NVMLError):
                self._nvml.nvmlShutdown()


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
