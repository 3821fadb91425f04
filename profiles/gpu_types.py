"""GPU types Tenuto knows by name: memory, SM count and a list price, so that `--gpus v100:4` is enough.

They are listed in `data/gpu_types.yaml`. To use another type, give its `memory_mib` in the cluster file. There,
`price_per_hour` replaces the list price.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from importlib import resources

import msgspec

from tenuto.files import parse_yaml
from tenuto.profiles.mig_instances import ALL_GPCS, instance_type_of, type_of_instance

FAST_CAPABILITY = (8, 0)
"""format: CUDA's compute capability from which on the fast choices are the defaults for options that are left open."""


@dataclass(frozen=True)
class GpuType:
    """The facts that a kind of device fixes.

    `capability` is CUDA's compute capability, and `product` a regular expression of the driver's name for it. These and
    `sm_count` are None for `cpu`, which has no streaming multiprocessors. `like` names a type with the same chip and
    other memory; measurements on that type hold for this one too.
    """

    memory_mib: int
    sm_count: int | None = None
    price_per_hour: float | None = None
    capability: tuple[int, int] | None = None
    product: str | None = None
    like: str | None = None


_DATA = resources.files("tenuto.profiles").joinpath("data", "gpu_types.yaml")
GPU_TYPES = msgspec.convert(parse_yaml(_DATA.read_text(encoding="utf-8")), dict[str, GpuType])

# format: NVIDIA names a MIG device after its memory in GB, of which the split takes up to a twentieth: 1g.5gb has
# 4864 MiB.
_MIG_MIB_PER_GB = 1024 * 0.95


def memory_mib_of(name: str) -> float | None:
    """Return the memory in MiB of a known type, or of a MIG device of one, such as a100-3g.20gb. Other names: None.

    The memory of a MIG device follows from its name and is rounded down.
    """
    kind = GPU_TYPES.get(name)
    if kind is not None:
        return float(kind.memory_mib)
    mig = instance_type_of(name)
    if mig is None or mig.base not in GPU_TYPES or mig.base == "cpu":
        return None
    return mig.memory_gb * _MIG_MIB_PER_GB


def price_of(name: str) -> float | None:
    """Return what an hour of a known type costs, of a MIG instance its GPCs' part of it; None where it has no price."""
    mig = instance_type_of(name)
    kind = GPU_TYPES.get(name if mig is None else mig.base)
    if kind is None or kind.price_per_hour is None:
        return None
    return kind.price_per_hour * (1.0 if mig is None else mig.gpcs / ALL_GPCS)


def capability_of_type(name: str) -> tuple[int, int] | None:
    """Return the compute capability of a known type or of a MIG device of one; None for any other, and for `cpu`."""
    mig = instance_type_of(name)
    kind = GPU_TYPES.get(name if mig is None else mig.base)
    return None if kind is None else kind.capability


def measured_as(name: str) -> tuple[str, ...]:
    """Return the types whose measurements hold for a type: its own first, then of the same chip with other memory; of a
    MIG instance then those of its GPU, in instances of as many GPCs."""
    mig = instance_type_of(name)
    of_gpu = () if mig is None else measured_as(mig.base)
    kind = GPU_TYPES.get(name)
    return (name, *((kind.like,) if kind is not None and kind.like is not None else ()), *of_gpu)


def accelerators_of(name: str) -> tuple[str, ...]:
    """Return the names of a GPU type in Ray's labels: A100 and A100-80G for a100-80gb. Nodes label themselves with the
    chip alone."""
    chip, memory_mib = name.partition("-")[0].upper(), memory_mib_of(name)
    return (chip,) if memory_mib is None else (chip, f"{chip}-{round(memory_mib / 1024)}G")


def is_fast_type(name: str) -> bool:
    """Return whether a type is known to have `FAST_CAPABILITY`."""
    capability = capability_of_type(name)
    return capability is not None and capability >= FAST_CAPABILITY


def gpu_type_of(name: str) -> str:
    """Return our name of a GPU type from the driver's: `v100` for `Tesla V100-SXM2-16GB`, `a100-3g.20gb` for `NVIDIA
    A100-SXM4-40GB MIG 3g.20gb`. For an unknown product it is the driver's name in lower case with dashes."""
    mig = re.fullmatch(r"(.*\S)\s+MIG\s+((?:\d+c\.)?\d+g\.\d+gb(?:\+\S+)?)", name.strip(), re.IGNORECASE)
    if mig is not None:
        return type_of_instance(gpu_type_of(mig[1]), mig[2].lower())
    for own, kind in GPU_TYPES.items():
        if kind.product is not None and re.search(kind.product, name, re.IGNORECASE):
            return own
    return re.sub(r"[^a-z0-9]+", "-", re.sub(r"(?i)nvidia|geforce|tesla", "", name).lower()).strip("-") or "unknown"


def sms_of_share(sm_count: int, share_pct: float) -> int:
    """Return the most multiprocessors that a share of a GPU may give. It is rounded down, as CUDA MPS does, but is at
    least two, because the two of a texture processing cluster are given out together."""
    return min(sm_count, max(2, math.floor(sm_count * share_pct / 100.0 + 1e-9)))
