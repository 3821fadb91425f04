"""How many blocks of a kernel fit on an SM, how many SMs a launch needs, and how full they are: arithmetic only.

Source: the four bounds of the thesis (section 5.3.2) are threads, registers, shared memory and the block limit; the
allocation units are those of NVIDIA's occupancy calculator.
"""

from __future__ import annotations

import math
from operator import itemgetter

from tenuto.errors import refused
from tenuto.profiles.measuring.kernels.record import Kernel, SmLimits


def blocks_that_fit(kernel: Kernel, limits: SmLimits) -> tuple[int, str]:
    """Return how many blocks of a kernel fit on one SM, and by which bound: of equal ones the first of blocks, threads,
    registers and shared_memory.

    If registers or shared memory were not recorded, they set no bound, so the result is an upper bound.

    Raises:
        InvalidInputError: not even one block fits; the kernel did not run on this compute capability.
    """
    warps = max(1, math.ceil(kernel.threads_per_block / limits.warp_size))
    bounds = [(limits.blocks, "blocks"), (limits.warps // warps, "threads")]
    if kernel.registers_per_thread:
        per_warp = _up(kernel.registers_per_thread * limits.warp_size, limits.register_unit)
        granules = limits.registers // per_warp // limits.warp_granularity
        bounds.append((granules * limits.warp_granularity // warps, "registers"))
    if kernel.shared_memory_bytes is not None:
        per_block = _up(kernel.shared_memory_bytes + limits.reserved_shared_bytes, limits.shared_unit)
        if per_block:
            bounds.append((limits.shared_bytes // per_block, "shared_memory"))
    fit, binding = min(bounds, key=itemgetter(0))
    if fit < 1:
        raise refused(
            f"kernel {kernel.name}",
            kernel.block,
            f"a block does not fit on an SM by its {binding}",
            "Check that the trace's compute capability is that of the GPU it was recorded on.",
        )
    return fit, binding


def _up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


def sms_needed(kernel: Kernel, limits: SmLimits) -> int:
    """Return the SMs a launch fills when each takes as many blocks as fit; may exceed what the GPU has."""
    return math.ceil(kernel.blocks / blocks_that_fit(kernel, limits)[0])


def estimated_occupancy_pct(kernel: Kernel, limits: SmLimits, sm_count: int) -> float:
    """Estimate achieved occupancy: warps resident per SM of the whole GPU, in percent of what an SM holds.

    The blocks are spread evenly over all SMs, and at most as many as fit are resident. A kernel's last, partly filled
    wave does not count. Profilers that use CUPTI print the same estimate; Nsight Compute measures the real value.
    """
    warps = max(1, math.ceil(kernel.threads_per_block / limits.warp_size))
    resident = min(kernel.blocks / sm_count, blocks_that_fit(kernel, limits)[0])
    return 100.0 * resident * warps / limits.warps
