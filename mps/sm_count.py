"""SM counts from the CUDA driver, which NVML does not know; `python -m tenuto.mps.sm_count` prints them as JSON.

The inventory runs it as another process, because `cuInit` reads the environment once and may contact a CUDA MPS daemon,
which the inventory's own process must not do. No context is created.
"""

from __future__ import annotations

import ctypes
import json
import sys
import uuid
from dataclasses import dataclass

from tenuto.errors import EnvironmentFaultError

_MULTIPROCESSOR_COUNT = 16  # format: CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT of cuda.h


@dataclass(frozen=True)
class VisibleDevice:
    """A device as this process sees it; under CUDA MPS `sm_count` is what its share leaves."""

    uuid: str
    sm_count: int


def visible_devices() -> tuple[VisibleDevice, ...]:
    """Return the devices CUDA shows to this process, in its own order.

    Raises:
        EnvironmentFaultError: no driver library, or a driver call failed; the message has CUDA's error number.
    """
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise EnvironmentFaultError(
            "the CUDA driver library libcuda.so.1 cannot be loaded. Install the NVIDIA driver."
        ) from error
    _call(library, "cuInit", ctypes.c_uint(0))
    count = ctypes.c_int()
    _call(library, "cuDeviceGetCount", ctypes.byref(count))
    devices = []
    for index in range(count.value):
        device, sm_count, raw = ctypes.c_int(), ctypes.c_int(), (ctypes.c_ubyte * 16)()  # format: bytes of a UUID
        _call(library, "cuDeviceGet", ctypes.byref(device), ctypes.c_int(index))
        # This second version of the call tells the UUID of a MIG device if a MIG device is visible.
        _call(library, "cuDeviceGetUuid_v2", raw, device)
        _call(library, "cuDeviceGetAttribute", ctypes.byref(sm_count), ctypes.c_int(_MULTIPROCESSOR_COUNT), device)
        # CUDA does not tell whether the UUID is a MIG device's or a GPU's, so comparisons must ignore the prefix.
        devices.append(VisibleDevice(f"GPU-{uuid.UUID(bytes=bytes(raw))}", sm_count.value))
    return tuple(devices)


def free_memory_mib(library: ctypes.CDLL | None = None) -> float | None:
    """Return the free memory in MiB that CUDA shows the primary context of this process's first GPU; None if it does
    not tell, or if there is no such context (none is made). Under CUDA MPS it is at most the cap."""
    try:
        library = library if library is not None else ctypes.CDLL("libcuda.so.1")
        device, flags, active = ctypes.c_int(), ctypes.c_uint(), ctypes.c_int()
        context, free, total = ctypes.c_void_p(), ctypes.c_size_t(), ctypes.c_size_t()
        _call(library, "cuDeviceGet", ctypes.byref(device), ctypes.c_int(0))
        _call(library, "cuDevicePrimaryCtxGetState", device, ctypes.byref(flags), ctypes.byref(active))
        if not active.value:
            return None
        _call(library, "cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        try:
            _call(library, "cuCtxPushCurrent_v2", context)
            try:
                _call(library, "cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
            finally:
                _call(library, "cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))
        finally:
            _call(library, "cuDevicePrimaryCtxRelease_v2", device)
    except (OSError, AttributeError, EnvironmentFaultError):
        return None
    return free.value / 2**20


def _call(library: ctypes.CDLL, name: str, *arguments: object) -> None:
    code = getattr(library, name)(*arguments)
    if code != 0:
        raise EnvironmentFaultError(f"{name} of the CUDA driver failed with error {code}. Run nvidia-smi.")


if __name__ == "__main__":
    try:
        json.dump({device.uuid: device.sm_count for device in visible_devices()}, sys.stdout)
    except EnvironmentFaultError as fault:
        sys.exit(str(fault))
