"""Peak memory of a model: the memory that the CUDA allocator reserved, or the growth of this process's resident set."""

from __future__ import annotations

import ctypes
import ctypes.util
import gc
import sys
from pathlib import Path
from typing import Protocol

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")


def reserved_mib() -> float:
    """Return what PyTorch's allocator holds of the first visible CUDA device."""
    import torch

    return torch.cuda.memory_reserved(0) / 2**20


class MemoryMeter(Protocol):
    """Measures the peak between two calls."""

    def reset(self) -> None:
        """Begin a new peak."""

    def peak_mib(self) -> float | None:
        """Return the peak since `reset`, less the memory when the meter was made; None if it cannot be told."""


class CudaMemory:
    """The largest amount PyTorch's caching allocator reserved on the first visible device.

    Other processes on the GPU cannot use this memory, even if tensors do not fill it. The CUDA context itself (some
    hundreds of MiB, outside the allocator) is not included.
    """

    def reset(self) -> None:
        """Return unused blocks to the device and begin a new peak."""
        import torch

        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(0)

    def peak_mib(self) -> float | None:
        """Return `max_memory_reserved` in MiB."""
        import torch

        return torch.cuda.max_memory_reserved(0) / 2**20


class ResidentMemory:
    """Growth of the resident set of this process since the meter was made, by the kernel's high-water mark (Linux).

    Make it after the libraries were imported and before the model is built, in a fresh process: memory that other
    models left behind would hide growth. On other systems than Linux it measures nothing.
    """

    def __init__(self) -> None:
        self._base_mib = self._read("VmRSS")

    def reset(self) -> None:
        """Return freed memory to the kernel and lower the high-water mark to what is resident now."""
        gc.collect()
        if sys.platform == "linux":
            trim = getattr(ctypes.CDLL(ctypes.util.find_library("c")), "malloc_trim", None)
            if trim is not None:
                trim(0)
        if self._base_mib is not None:
            _CLEAR.write_text("5", encoding="utf-8")

    def peak_mib(self) -> float | None:
        """Return the peak growth in MiB."""
        peak = self._read("VmHWM")
        return None if peak is None or self._base_mib is None else max(0.0, peak - self._base_mib)

    @staticmethod
    def _read(key: str) -> float | None:
        try:
            lines = _STATUS.read_text(encoding="utf-8").splitlines()
        except OSError:
            return None
        return next((int(line.split()[1]) / 1024 for line in lines if line.startswith(key + ":")), None)
