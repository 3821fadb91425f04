"""GPU types Tenuto knows by name: memory, SM count and a list price, so that `--gpus v100:4` is enough.

A type that is not listed here is used by giving `memory_mib` in the cluster file.
Prices are on-demand US list prices of large clouds per GPU and hour, rounded; override with `price_per_hour`.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

FAST_CAPABILITY = (8, 0)
"""format: CUDA's compute capability, from which on everything that is fast is chosen where options leave it open."""


@dataclass(frozen=True)
class GpuType:
    """What is fixed by the kind of device.

    `sm_count` is None where compute is not divided into streaming multiprocessors (`cpu`), and so is `capability`,
    CUDA's compute capability.
    """

    name: str
    memory_mib: int
    sm_count: int | None
    price_per_hour: float | None
    capability: tuple[int, int] | None = None


GPU_TYPES: dict[str, GpuType] = {
    kind.name: kind
    for kind in (
        GpuType("v100", 16_384, 80, 3.06, (7, 0)),
        GpuType("k80", 11_441, 13, 0.90, (3, 7)),  # one of the two GPUs of a board, as clouds sell them
        GpuType("t4", 15_360, 40, 0.526, (7, 5)),
        GpuType("p100", 16_384, 56, 1.46, (6, 0)),
        GpuType("p4", 7_680, 20, 0.60, (6, 1)),
        GpuType("1080ti", 11_264, 28, None, (6, 1)),
        GpuType("titanx", 12_288, 24, None, (5, 2)),
        GpuType("2080ti", 11_264, 68, None, (7, 5)),
        GpuType("3080", 10_240, 68, None, (8, 6)),
        GpuType("a10g", 24_576, 80, 1.006, (8, 6)),
        GpuType("l4", 24_576, 58, 0.71, (8, 9)),
        GpuType("a100", 40_960, 108, 3.67, (8, 0)),
        GpuType("h100", 81_920, 132, 6.98, (9, 0)),
        GpuType("h200", 144_384, 132, 7.91, (9, 0)),
        GpuType("b200", 183_359, 148, None, (10, 0)),
        GpuType("gb200", 189_471, 148, None, (10, 0)),
        # The processor of this machine, shared by threads instead of SMs; memory is the host's and checked on the node.
        GpuType("cpu", 16_384, None, None),
    )
}

# What the driver calls them; first match wins.
_PRODUCTS = (
    (r"\bGB200\b", "gb200"),
    (r"\bB200\b", "b200"),
    (r"\bH200\b", "h200"),
    (r"\bH100\b", "h100"),
    (r"\bA100\b", "a100"),
    (r"\bA10G\b", "a10g"),
    (r"\bV100S?\b", "v100"),
    (r"\bP100\b", "p100"),
    (r"\bP4\b", "p4"),
    (r"\bL4\b", "l4"),
    (r"\bT4\b", "t4"),
    (r"\bK80\b", "k80"),
    (r"\bGTX 1080 Ti\b", "1080ti"),
    (r"\bRTX 2080 Ti\b", "2080ti"),
    (r"\bRTX 3080(?! Ti)\b", "3080"),
    (r"\bGTX TITAN X\b", "titanx"),
)

# format: NVIDIA names a MIG device after its memory in GB, of which the split takes up to a twentieth: 1g.5gb has
# 4864 MiB.
_MIG_MIB_PER_GB = 1024 * 0.95


def memory_mib_of(name: str) -> float | None:
    """Return the memory in MiB of a known type, or of a MIG device of one, such as a100-3g.20gb, by its name, rounded
    down; None for any other."""
    kind = GPU_TYPES.get(name)
    if kind is not None:
        return float(kind.memory_mib)
    mig = re.fullmatch(r"(.+)-(?:\dc\.)?\dg\.(\d+)gb(?:\+\S+)?", name)
    if mig is None or mig[1] not in GPU_TYPES or mig[1] == "cpu":
        return None
    return int(mig[2]) * _MIG_MIB_PER_GB


def capability_of_type(name: str) -> tuple[int, int] | None:
    """Return the compute capability of a known type or of a MIG device of one; None for any other, and for `cpu`."""
    kind = GPU_TYPES.get(name) or GPU_TYPES.get(name.partition("-")[0])
    return None if kind is None else kind.capability


def is_fast_type(name: str) -> bool:
    """Return whether a type is known to have `FAST_CAPABILITY`."""
    capability = capability_of_type(name)
    return capability is not None and capability >= FAST_CAPABILITY


def gpu_type_of(name: str) -> str:
    """Return our name of a GPU type by the driver's: `v100` of `Tesla V100-SXM2-16GB`, `a100-3g.20gb` of `NVIDIA
    A100-SXM4-40GB MIG 3g.20gb`; of a product that is not known here its name in small letters with dashes."""
    mig = re.fullmatch(r"(.*\S)\s+MIG\s+((?:\d+c\.)?\d+g\.\d+gb(?:\+\S+)?)", name.strip(), re.IGNORECASE)
    if mig is not None:
        return f"{gpu_type_of(mig[1])}-{mig[2].lower()}"
    for pattern, kind in _PRODUCTS:
        if re.search(pattern, name, re.IGNORECASE):
            return kind
    return re.sub(r"[^a-z0-9]+", "-", re.sub(r"(?i)nvidia|geforce|tesla", "", name).lower()).strip("-") or "unknown"


def sms_of_share(sm_count: int, share_pct: float) -> int:
    """Return the most multiprocessors that a share of a GPU may give: rounded down, as CUDA MPS does, but never below
    the two of a texture processing cluster, which are handed out together."""
    return min(sm_count, max(2, math.floor(sm_count * share_pct / 100.0 + 1e-9)))
