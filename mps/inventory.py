"""The GPUs of this machine: UUID, type, memory, SM count, driver and modes, from NVML and the CUDA driver.

GPUs are never told apart by their ordinals, because these differ between NVML, CUDA and every process that has its own
CUDA_VISIBLE_DEVICES.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol

from tenuto.errors import EnvironmentFaultError
from tenuto.profiles.gpu_types import gpu_type_of

_COMPUTE_MODES = {0: "default", 1: "exclusive-thread", 2: "prohibited", 3: "exclusive-process"}


class Nvml(Protocol):
    """The part of the module `pynvml` that is used; tests give a fake."""

    @property
    def NVMLError(self) -> type[Exception]: ...
    def nvmlInit(self) -> None: ...
    def nvmlShutdown(self) -> None: ...
    def nvmlSystemGetDriverVersion(self) -> Any: ...
    def nvmlDeviceGetCount(self) -> int: ...
    def nvmlDeviceGetHandleByIndex(self, index: int) -> Any: ...
    def nvmlDeviceGetHandleByUUID(self, uuid: Any) -> Any: ...
    def nvmlDeviceGetUUID(self, handle: Any) -> Any: ...
    def nvmlDeviceGetName(self, handle: Any) -> Any: ...
    def nvmlDeviceGetMemoryInfo(self, handle: Any) -> Any: ...
    def nvmlDeviceGetCudaComputeCapability(self, handle: Any) -> Any: ...
    def nvmlDeviceGetMigMode(self, handle: Any) -> Any: ...
    def nvmlDeviceGetComputeMode(self, handle: Any) -> int: ...
    def nvmlDeviceGetComputeRunningProcesses(self, handle: Any) -> Any: ...
    def nvmlDeviceGetMPSComputeRunningProcesses(self, handle: Any) -> Any: ...
    def nvmlDeviceGetMaxMigDeviceCount(self, handle: Any) -> int: ...
    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: Any, index: int) -> Any: ...
    def nvmlDeviceGetAttributes(self, handle: Any) -> Any: ...
    def nvmlDeviceGetGpuInstanceId(self, handle: Any) -> int: ...
    def nvmlDeviceGetGpuInstanceById(self, handle: Any, number: int) -> Any: ...
    def nvmlGpuInstanceGetInfo(self, instance: Any) -> Any: ...


@dataclass(frozen=True)
class GpuDevice:
    """One GPU, or one MIG device of a GPU, which counts as a GPU of its own for us and for CUDA.

    `type` is a name of our GPU types, or the product's name in lower case with dashes; that of a MIG device has its
    profile appended, such as a100-3g.20gb. `is_mig`: a GPU in MIG mode without a MIG device, on which nothing can run.
    `parent_uuid`: the physical GPU of a MIG device, None for whole GPUs. `start`: the memory slice where it begins;
    None also where the driver does not tell, as to a user who may not cut the GPU. `has_mig`: whether the GPU could be
    in MIG mode, `resets`: whether it changes that mode at its next reset.
    """

    uuid: str
    name: str
    type: str
    memory_mib: int
    free_memory_mib: int
    compute_capability: tuple[int, int]
    sm_count: int
    driver: str
    is_mig: bool
    compute_mode: str
    parent_uuid: str | None = None
    start: int | None = None
    has_mig: bool = False
    resets: bool = False

    def to_data(self) -> dict[str, Any]:
        """Return plain data; `compute_capability` as text such as 8.0."""
        data = asdict(self)
        data["compute_capability"] = ".".join(map(str, self.compute_capability))
        return data


def without_mps(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without the variables that choose GPUs, a CUDA MPS daemon, a share or a memory cap."""
    return {
        key: value
        for key, value in environment.items()
        if key != "CUDA_VISIBLE_DEVICES" and not key.startswith("CUDA_MPS_")
    }


def load_nvml() -> Any:
    """Return the NVML binding, which has no types; raises `EnvironmentFaultError` if nvidia-ml-py is not installed."""
    try:
        import pynvml
    except ModuleNotFoundError as error:
        raise EnvironmentFaultError("nvidia-ml-py is not installed. Run: pip install 'tenuto[serve]'") from error
    return pynvml


def read_sm_counts(timeout_s: float = 60.0) -> dict[str, int]:
    """Return the SM count of every GPU by UUID, from a process that sees all of them and no CUDA MPS daemon.

    Raises:
        EnvironmentFaultError: the driver failed, did not answer in time, or gave an answer that is no count.
    """
    environment = without_mps(os.environ)
    environment["CUDA_MPS_PIPE_DIRECTORY"] = "/nonexistent"  # else CUDA looks into the default, /tmp/nvidia-mps
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-m", "tenuto.mps.sm_count"],
            env=environment,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise EnvironmentFaultError(
            f"the CUDA driver did not answer within {timeout_s:g} s. Run nvidia-smi."
        ) from error
    if done.returncode != 0:
        raise EnvironmentFaultError(done.stderr.strip().splitlines()[-1] if done.stderr.strip() else "CUDA failed")
    try:
        counts = json.loads(done.stdout)
        return {str(uuid): int(count) for uuid, count in counts.items()}
    except (ValueError, AttributeError, TypeError) as error:
        raise EnvironmentFaultError(f"the SM counts cannot be read: {done.stdout[:200]!r}") from error


def read_inventory(
    nvml: Nvml | None = None, sm_counts: Callable[[], Mapping[str, int]] | None = read_sm_counts
) -> tuple[GpuDevice, ...]:
    """Return every GPU of this machine in NVML's order. A GPU in MIG mode is replaced by its MIG devices. Without
    `sm_counts` no process asks CUDA, and whole GPUs have 0 multiprocessors.

    Raises:
        EnvironmentFaultError: no driver, no binding, or a GPU whose SM count CUDA does not tell.
    """
    nvml = nvml or load_nvml()
    with answering(nvml):
        try:
            driver = text_of(nvml.nvmlSystemGetDriverVersion())
            handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
            counts = None if sm_counts is None else sm_counts() if handles else {}
            whole = [(handle, _device(nvml, handle, driver, counts)) for handle in handles]
            return tuple(device for handle, gpu in whole for device in (_mig_devices(nvml, handle, gpu) or (gpu,)))
        except nvml.NVMLError as error:
            raise EnvironmentFaultError(f"NVML does not answer: {error}. Run nvidia-smi.") from error


def processes_on(uuid: str, nvml: Nvml | None = None) -> tuple[int, ...]:
    """Return the pids that NVML sees with a compute context on a GPU, CUDA MPS clients included; raises
    `EnvironmentFaultError` when NVML fails."""
    nvml = nvml or load_nvml()
    with answering(nvml):
        try:
            handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
            pids = {int(p.pid) for p in nvml.nvmlDeviceGetComputeRunningProcesses(handle)}
            # Older drivers and bindings do not have this call. There, clients show as their server.
            with contextlib.suppress(nvml.NVMLError, AttributeError):
                pids |= {int(p.pid) for p in nvml.nvmlDeviceGetMPSComputeRunningProcesses(handle)}
            return tuple(sorted(pids))
        except nvml.NVMLError as error:
            raise EnvironmentFaultError(f"NVML does not know GPU {uuid}: {error}. Run nvidia-smi -L.") from error


@contextlib.contextmanager
def answering(nvml: Nvml) -> Iterator[None]:
    """Hold NVML open; raises `EnvironmentFaultError` where no driver answers."""
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        raise EnvironmentFaultError(
            f"no NVIDIA driver answers on this machine: {error}. Install the driver, or check it with nvidia-smi."
        ) from error
    try:
        yield
    finally:
        nvml.nvmlShutdown()


def _device(nvml: Nvml, handle: Any, driver: str, sm_counts: Mapping[str, int] | None) -> GpuDevice:
    uuid, name = text_of(nvml.nvmlDeviceGetUUID(handle)), text_of(nvml.nvmlDeviceGetName(handle))
    try:
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
        total, free = int(memory.total), int(memory.free)
    except nvml.NVMLError:  # not supported where the GPU shares the host's memory
        total = free = 0
    major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
    try:
        mode, pending = nvml.nvmlDeviceGetMigMode(handle)
        has_mig = True
    except nvml.NVMLError:  # not supported: a GPU from before MIG
        mode, pending, has_mig = 0, 0, False
    is_mig = mode == 1
    # With MIG on, CUDA shows instances and no whole GPU; 0 then says that there is nothing to share by SMs.
    if sm_counts is not None and uuid not in sm_counts and not is_mig:
        raise EnvironmentFaultError(f"CUDA does not show {name} ({uuid}), which NVML does. Check nvidia-smi -L.")
    try:
        compute_mode = nvml.nvmlDeviceGetComputeMode(handle)
    except nvml.NVMLError:  # as in containers that hide it
        compute_mode = -1
    return GpuDevice(
        uuid=uuid,
        name=name,
        type=gpu_type_of(name),
        memory_mib=total >> 20,
        free_memory_mib=free >> 20,
        compute_capability=(int(major), int(minor)),
        sm_count=int((sm_counts or {}).get(uuid, 0)),
        driver=driver,
        is_mig=is_mig,
        compute_mode=_COMPUTE_MODES.get(compute_mode, "unknown"),
        has_mig=has_mig,
        resets=mode != pending,
    )


def _mig_devices(nvml: Nvml, handle: Any, gpu: GpuDevice) -> tuple[GpuDevice, ...]:
    """Return the MIG devices of a GPU; none if it is not in MIG mode, or has none yet."""
    if not gpu.is_mig:
        return ()
    devices = []
    for part in mig_handles(nvml, handle):
        attributes, memory = nvml.nvmlDeviceGetAttributes(part), nvml.nvmlDeviceGetMemoryInfo(part)
        name = text_of(nvml.nvmlDeviceGetName(part))
        if " MIG " not in name:  # drivers before 450.80 give the GPU's name
            slices, gib = int(attributes.gpuInstanceSliceCount), round(int(attributes.memorySizeMB) / 1024)
            name = f"{name} MIG {slices}g.{gib}gb"
        devices.append(
            replace(
                gpu,
                uuid=text_of(nvml.nvmlDeviceGetUUID(part)),
                name=name,
                type=gpu_type_of(name),
                memory_mib=int(memory.total) >> 20,
                free_memory_mib=int(memory.free) >> 20,
                sm_count=int(attributes.multiprocessorCount),
                is_mig=False,
                parent_uuid=gpu.uuid,
                start=_start(nvml, handle, part),
            )
        )
    return tuple(devices)


def mig_handles(nvml: Nvml, handle: Any) -> Iterator[Any]:
    """Yield the handles of a GPU's MIG devices."""
    for index in range(int(nvml.nvmlDeviceGetMaxMigDeviceCount(handle))):
        with contextlib.suppress(nvml.NVMLError):  # no device in this place
            yield nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index)


def _start(nvml: Nvml, handle: Any, part: Any) -> int | None:
    """Return the memory slice where a MIG device's instance begins; None where the driver does not tell."""
    try:
        instance = nvml.nvmlDeviceGetGpuInstanceById(handle, nvml.nvmlDeviceGetGpuInstanceId(part))
        return int(nvml.nvmlGpuInstanceGetInfo(instance).placement.start)
    except nvml.NVMLError:  # as to users who may not cut it
        return None


def text_of(value: Any) -> str:
    """Return a text of NVML's binding, which gave bytes before release 12."""
    return value.decode() if isinstance(value, bytes) else str(value)
