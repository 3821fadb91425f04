"""NVML in memory: GPUs, their processes, and failures."""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

V100 = "GPU-11111111-1111-1111-1111-111111111111"
A100 = "GPU-22222222-2222-2222-2222-222222222222"


@dataclass
class FakeGpu:
    uuid: str
    name: str = "Tesla V100-SXM2-16GB"
    memory_mib: int = 16_160
    capability: tuple[int, int] = (7, 0)
    mig: int | None = None  # None: the GPU knows no MIG
    compute_mode: int = 0
    pids: list[int] = field(default_factory=list)
    mps_pids: list[int] | None = None  # None: the driver does not tell
    parts: list["FakePart | None"] = field(default_factory=list)


@dataclass
class FakePart:
    """A MIG device, by default of an A100 with 40 GB."""

    uuid: str
    name: str = "NVIDIA A100-SXM4-40GB MIG 3g.20gb"
    memory_mib: int = 20_096
    sm_count: int = 42
    slices: int = 3
    pids: list[int] = field(default_factory=list)
    mps_pids: list[int] | None = None


class FakeNvml:
    class NVMLError(Exception):
        pass

    def __init__(self, *gpus: FakeGpu, has_driver: bool = True, as_bytes: bool = False) -> None:
        self.gpus = list(gpus)
        self.has_driver = has_driver
        self.as_bytes = as_bytes
        self.open = 0

    def _text(self, text: str) -> Any:
        return text.encode() if self.as_bytes else text

    def nvmlInit(self) -> None:
        if not self.has_driver:
            raise self.NVMLError("Driver Not Loaded")
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlSystemGetDriverVersion(self) -> Any:
        return self._text("580.95.05")

    def nvmlDeviceGetCount(self) -> int:
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Any:
        return self.gpus[index]

    def nvmlDeviceGetHandleByUUID(self, uuid: Any) -> Any:
        for gpu in self.gpus:
            for device in (gpu, *gpu.parts):
                if device is not None and device.uuid == uuid:
                    return device
        raise self.NVMLError("Not Found")

    def nvmlDeviceGetUUID(self, handle: Any) -> Any:
        return self._text(handle.uuid)

    def nvmlDeviceGetName(self, handle: Any) -> Any:
        return self._text(handle.name)

    def nvmlDeviceGetMemoryInfo(self, handle: Any) -> Any:
        return SimpleNamespace(total=handle.memory_mib << 20, free=handle.memory_mib << 19)

    def nvmlDeviceGetCudaComputeCapability(self, handle: Any) -> Any:
        return list(handle.capability)

    def nvmlDeviceGetMigMode(self, handle: Any) -> Any:
        if handle.mig is None:
            raise self.NVMLError("Not Supported")
        return [handle.mig, handle.mig]

    def nvmlDeviceGetComputeMode(self, handle: Any) -> int:
        return int(handle.compute_mode)

    def nvmlDeviceGetComputeRunningProcesses(self, handle: Any) -> Any:
        return [SimpleNamespace(pid=pid, usedGpuMemory=None) for pid in handle.pids]

    def nvmlDeviceGetMPSComputeRunningProcesses(self, handle: Any) -> Any:
        if handle.mps_pids is None:
            raise self.NVMLError("Not Supported")
        return [SimpleNamespace(pid=pid, usedGpuMemory=None) for pid in handle.mps_pids]

    def nvmlDeviceGetMaxMigDeviceCount(self, handle: Any) -> int:
        return len(handle.parts)

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: Any, index: int) -> Any:
        if handle.parts[index] is None:
            raise self.NVMLError("Not Found")
        return handle.parts[index]

    def nvmlDeviceGetAttributes(self, handle: Any) -> Any:
        return SimpleNamespace(
            multiprocessorCount=handle.sm_count, gpuInstanceSliceCount=handle.slices, memorySizeMB=handle.memory_mib
        )

    def nvmlDeviceGetGpuInstanceId(self, handle: Any) -> int:
        return int(self.gpus[-1].parts.index(handle))

    def nvmlDeviceGetGpuInstanceById(self, handle: Any, number: int) -> Any:
        raise self.NVMLError("Insufficient Permissions")

    def nvmlGpuInstanceGetInfo(self, instance: Any) -> Any:
        raise self.NVMLError("Insufficient Permissions")
