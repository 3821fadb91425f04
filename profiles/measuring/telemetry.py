"""Power, clock and temperature of one GPU while something runs on it, from NVML (`nvidia-ml-py`, imported on use)."""

from __future__ import annotations

import os
import statistics
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from tenuto.errors import EnvironmentFaultError


@dataclass(frozen=True)
class Reading:
    """One reading of a GPU: watts, MHz and degrees Celsius."""

    power_w: float
    sm_clock_mhz: float
    temperature_c: float


class Telemetry(Protocol):
    """Reads one GPU; calls come from one thread at a time."""

    def read(self) -> Reading:
        """Return the present reading."""

    def limits(self) -> dict[str, float]:
        """Return `max_power_w` and `max_sm_clock_mhz`."""

    def used_mib(self) -> float:
        """Return the memory that all processes on the GPU hold."""


class NvmlTelemetry:
    """NVML for the GPU with a UUID. Under CUDA MPS the readings are those of the whole GPU, all clients together."""

    def __init__(self, uuid: str) -> None:
        """Open NVML.

        Raises:
            EnvironmentFaultError: nvidia-ml-py or the driver is missing, or no GPU has this UUID.
        """
        self._nvml = _nvml()
        self.uuid = uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"
        try:
            self._nvml.nvmlInit()
            self._handle = self._nvml.nvmlDeviceGetHandleByUUID(self.uuid)
        except self._nvml.NVMLError as error:
            raise EnvironmentFaultError(
                f"NVML does not answer for {self.uuid}: {error}. Check `nvidia-smi`."
            ) from error

    def read(self) -> Reading:
        """Return the present reading; raises `EnvironmentFaultError` if the driver refuses it."""
        nvml = self._nvml
        try:
            return Reading(
                nvml.nvmlDeviceGetPowerUsage(self._handle) / 1000.0,
                float(nvml.nvmlDeviceGetClockInfo(self._handle, nvml.NVML_CLOCK_SM)),
                float(nvml.nvmlDeviceGetTemperature(self._handle, nvml.NVML_TEMPERATURE_GPU)),
            )
        except nvml.NVMLError as error:
            raise EnvironmentFaultError(f"NVML reads neither power nor clocks: {error}.") from error

    def used_mib(self) -> float:
        """Return the memory that all processes hold; raises `EnvironmentFaultError` if the driver refuses."""
        try:
            return float(self._nvml.nvmlDeviceGetMemoryInfo(self._handle).used) / 2**20
        except self._nvml.NVMLError as error:
            raise EnvironmentFaultError(f"NVML knows no memory: {error}.") from error

    def limits(self) -> dict[str, float]:
        """Return `max_power_w` and `max_sm_clock_mhz`; raises `EnvironmentFaultError` if the driver refuses."""
        nvml = self._nvml
        try:
            return {
                "max_power_w": nvml.nvmlDeviceGetEnforcedPowerLimit(self._handle) / 1000.0,
                "max_sm_clock_mhz": float(nvml.nvmlDeviceGetMaxClockInfo(self._handle, nvml.NVML_CLOCK_SM)),
            }
        except nvml.NVMLError as error:
            raise EnvironmentFaultError(f"NVML knows no limits of power and clock: {error}.") from error


def first_visible_uuid() -> str:
    """Return the UUID of the first GPU that CUDA_VISIBLE_DEVICES leaves visible, without starting CUDA.

    Ordinals are taken in PCI order, as NVML does. With GPUs of different kinds CUDA counts in another order, unless
    CUDA_DEVICE_ORDER=PCI_BUS_ID, so it is safer to name the UUID.

    Raises:
        EnvironmentFaultError: nvidia-ml-py or the driver is missing, or there is no such GPU.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
    if visible.startswith(("GPU-", "MIG-")):
        return visible
    nvml = _nvml()
    try:
        nvml.nvmlInit()
        uuid = nvml.nvmlDeviceGetUUID(nvml.nvmlDeviceGetHandleByIndex(int(visible)))
    except (nvml.NVMLError, ValueError) as error:
        raise EnvironmentFaultError(f"NVML finds no GPU '{visible}': {error}. Check `nvidia-smi`.") from error
    return uuid.decode() if isinstance(uuid, bytes) else str(uuid)


def watch(
    telemetry: Telemetry,
    run: Callable[[], object],
    clock_s: Callable[[], float],
    *,
    seconds: float,
    period_s: float = 0.02,  # pace: the driver's own
) -> dict[str, float]:
    """Repeat `run` for a time and return the median `power_w`, `sm_clock_mhz` and `temperature_c` of its second half.

    The first half is left out because the driver's power is a moving average. Readings come from a thread of their own,
    so that the GPU is busy while they are taken; a last one is taken in any case.

    Raises:
        EnvironmentFaultError: a reading failed.
    """
    readings: list[Reading] = []
    faults: list[EnvironmentFaultError] = []
    ended = threading.Event()

    def collect() -> None:
        while not ended.wait(period_s):
            try:
                readings.append(telemetry.read())
            except EnvironmentFaultError as fault:
                faults.append(fault)
                return

    thread = threading.Thread(target=collect, name="telemetry", daemon=True)
    thread.start()
    try:
        began = clock_s()
        while True:
            run()
            if clock_s() - began >= seconds:
                break
    finally:
        ended.set()
        thread.join(timeout=5.0)  # limit: for the thread to end
    if faults:
        raise faults[0]
    readings.append(telemetry.read())
    later = readings[len(readings) // 2 :]
    return {
        name: round(statistics.median(getattr(reading, name) for reading in later), 2)
        for name in ("power_w", "sm_clock_mhz", "temperature_c")
    }


def _nvml() -> Any:
    try:
        import pynvml
    except ImportError as error:
        raise EnvironmentFaultError("power and clocks need nvidia-ml-py. Run: pip install nvidia-ml-py") from error
    return pynvml
