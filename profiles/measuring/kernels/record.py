"""One kernel launch as a profiler recorded it, and the limits of the streaming multiprocessors it ran on."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tenuto.errors import refused

Dim3 = tuple[int, int, int]


@dataclass(frozen=True)
class Kernel:
    """One launch. Times are microseconds on the recorder's clock. A value that was not recorded is None, never a guess.

    `shared_memory_bytes` is static and dynamic shared memory of one block together.
    """

    name: str
    grid: Dim3
    block: Dim3
    start_us: float
    duration_us: float
    registers_per_thread: int | None = None
    shared_memory_bytes: int | None = None
    stream: int | None = None
    achieved_occupancy_pct: float | None = None
    l2_util_pct: float | None = None
    dram_util_pct: float | None = None
    correlation: int | None = None  # CUPTI's number of the launch

    @property
    def blocks(self) -> int:
        """Thread blocks of the launch."""
        return math.prod(self.grid)

    @property
    def threads_per_block(self) -> int:
        """Threads of one block."""
        return math.prod(self.block)

    @property
    def end_us(self) -> float:
        """When the kernel ended."""
        return self.start_us + self.duration_us


@dataclass(frozen=True)
class SmLimits:
    """The limits of one SM of a compute capability (CUDA C++ Programming Guide, technical specifications).

    Warps get registers in units of `register_unit`. The number of warps that fit is rounded down to a multiple of
    `warp_granularity` (one per scheduler). From 8.0 on the system reserves `reserved_shared_bytes` of each block.
    """

    warps: int
    blocks: int
    shared_bytes: int
    shared_unit: int
    reserved_shared_bytes: int = 0
    registers: int = 65_536  # format: of NVIDIA's SMs
    register_unit: int = 256  # format: likewise
    warp_granularity: int = 4  # format: likewise
    warp_size: int = 32  # format: likewise


_KIB = 1024  # unit
SM_LIMITS: dict[tuple[int, int], SmLimits] = {
    (5, 2): SmLimits(64, 32, 96 * _KIB, 256),
    (6, 0): SmLimits(64, 32, 64 * _KIB, 256, warp_granularity=2),
    (6, 1): SmLimits(64, 32, 96 * _KIB, 256),
    (7, 0): SmLimits(64, 32, 96 * _KIB, 256),
    (7, 5): SmLimits(32, 16, 64 * _KIB, 256),
    (8, 0): SmLimits(64, 32, 164 * _KIB, 128, _KIB),
    (8, 6): SmLimits(48, 16, 100 * _KIB, 128, _KIB),
    (8, 7): SmLimits(48, 16, 164 * _KIB, 128, _KIB),
    (8, 9): SmLimits(48, 24, 100 * _KIB, 128, _KIB),
    (9, 0): SmLimits(64, 32, 228 * _KIB, 128, _KIB),
    (10, 0): SmLimits(64, 32, 228 * _KIB, 128, _KIB),
    (10, 3): SmLimits(64, 32, 228 * _KIB, 128, _KIB),
    (12, 0): SmLimits(48, 24, 100 * _KIB, 128, _KIB),
    (12, 1): SmLimits(48, 24, 100 * _KIB, 128, _KIB),
}


@dataclass(frozen=True)
class Device:
    """The GPU a trace was recorded on. `sm_count` is that of the process: a CUDA MPS share makes it smaller."""

    name: str
    compute_capability: tuple[int, int]
    sm_count: int

    @property
    def limits(self) -> SmLimits:
        """The limits of its SMs; raises `InvalidInputError` for an unknown compute capability."""
        return sm_limits(self.compute_capability)


def sm_limits(compute_capability: tuple[int, int]) -> SmLimits:
    """Return the limits of one SM.

    Raises:
        InvalidInputError: the compute capability is not listed; another's limits would be a guess.
    """
    try:
        return SM_LIMITS[compute_capability]
    except KeyError:
        known = ", ".join(f"{major}.{minor}" for major, minor in sorted(SM_LIMITS))
        value = ".".join(str(part) for part in compute_capability)
        raise refused(
            "compute capability",
            value,
            "its occupancy limits are not known here",
            f"Known: {known}. Add it to tenuto.profiles.measuring.kernels.record.",
        ) from None
