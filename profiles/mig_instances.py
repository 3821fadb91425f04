"""MIG instances: what a GPU type can be cut into, and what an instance's type says of it.

The table is `data/mig.yaml`. It serves where there is no driver to ask; on a GPU that is there, the driver's possible
placements decide.
"""

from __future__ import annotations

import re
from functools import cache
from importlib import resources

import msgspec

from tenuto.files import parse_yaml

ALL_GPCS = 7  # format: NVIDIA's, compute slices of a GPU in MIG mode; one is called a GPC in the profiles' names
MEMORY_SLICES = 8  # format: NVIDIA's, of every GPU in MIG mode; each has its part of the memory and of its bandwidth
_TYPE = re.compile(r"(?P<base>.+)-(?P<profile>(?:\dc\.)?(?P<gpcs>\d)g\.(?P<gb>\d+)gb(?:\+\S+)?)")


class InstanceProfile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A size of instance: its GPCs, how many memory slices it takes, and at which of these it may begin."""

    gpcs: int
    slices: int
    starts: tuple[int, ...]


class InstanceType(msgspec.Struct, frozen=True):
    """What the type of an instance, such as a100-80gb-3g.40gb, says: the GPU's type, the profile, GPCs and memory."""

    base: str
    profile: str
    gpcs: int
    memory_gb: int

    @property
    def at_most(self) -> float:
        """How many times as long as on the whole GPU work takes at most: by the part of the compute or of the memory
        bandwidth that the instance has, whichever is less."""
        known = instance_profiles(self.base).get(self.profile)
        return max(ALL_GPCS / self.gpcs, 1.0 if known is None else MEMORY_SLICES / known.slices)


@cache
def instance_type_of(name: str) -> InstanceType | None:
    """Return what a GPU type says where it is one of a MIG instance; None for a whole GPU."""
    match = _TYPE.fullmatch(name)
    return (
        None if match is None else InstanceType(match["base"], match["profile"], int(match["gpcs"]), int(match["gb"]))
    )


def type_of_instance(base: str, profile: str) -> str:
    """Return the type of an instance of this profile on a GPU of this type."""
    return f"{base}-{profile}"


def instance_profiles(gpu_type: str) -> dict[str, InstanceProfile]:
    """Return the profiles of instances that a GPU type can be cut into, by name; none where it knows no MIG."""
    return _table().get(gpu_type, {})


@cache
def _table() -> dict[str, dict[str, InstanceProfile]]:
    text = resources.files("tenuto.profiles").joinpath("data", "mig.yaml").read_text(encoding="utf-8")
    return msgspec.convert(parse_yaml(text), dict[str, dict[str, InstanceProfile]])


def mig_types() -> tuple[str, ...]:
    """Return the GPU types that are known to have MIG."""
    return tuple(_table())
