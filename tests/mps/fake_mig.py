"""A driver that cuts GPUs, in memory: an A100 with 40 GB and what can go wrong with it."""

import ctypes
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from .fake_nvml import A100, FakeGpu, FakeNvml, FakePart

# By the driver's number: name, GPCs, memory slices, first slices, SMs, MiB.
PROFILES: dict[int, tuple[str, int, int, tuple[int, ...], int, int]] = {
    0: ("7g.40gb", 7, 8, (0,), 98, 40_192),
    5: ("4g.20gb", 4, 4, (0,), 56, 20_096),
    9: ("3g.20gb", 3, 4, (0, 4), 42, 20_096),
    14: ("2g.10gb", 2, 2, (0, 2, 4), 28, 9_984),
    19: ("1g.5gb", 1, 1, (0, 1, 2, 3, 4, 5, 6), 14, 4_864),
}
_NUMBERS = dict(enumerate((19, 14, 9, 5, 0)))


class _Placement(ctypes.Structure):
    _fields_ = (("start", ctypes.c_uint), ("size", ctypes.c_uint))


@dataclass
class FakeInstance:
    profile: int
    start: int
    part: FakePart | None


@dataclass
class FakeMigGpu(FakeGpu):
    """`refuses`: instances as (profile, start) that the driver does not make; `needs_reset`: another MIG mode waits
    for one; `forbids`: who asks has no rights."""

    uuid: str = A100
    name: str = "NVIDIA A100-SXM4-40GB"
    memory_mib: int = 40_960
    capability: tuple[int, int] = (8, 0)
    mig: int | None = 1
    pending: int | None = None
    instances: dict[int, FakeInstance] = field(default_factory=dict)
    refuses: set[tuple[str, int]] = field(default_factory=set)
    needs_reset: bool = False
    forbids: bool = False
    made: int = 0

    def cut(self, name: str, start: int) -> int:
        """Make an instance; returns its number."""
        profile = next(number for number, known in PROFILES.items() if known[0] == name)
        _, _, _, _, sms, mib = PROFILES[profile]
        self.made += 1
        uuid = f"MIG-{self.made:08d}-1111-1111-1111-111111111111"
        part = FakePart(uuid, f"{self.name} MIG {name}", mib, sms, PROFILES[profile][1])
        self.instances[self.made] = FakeInstance(profile, start, part)
        self._tell()
        return self.made

    def _tell(self) -> None:
        self.parts = [instance.part for instance in self.instances.values()]

    def end(self, number: int) -> None:
        """Another tool, or the driver, ends an instance."""
        del self.instances[number]
        self._tell()

    @property
    def cuts(self) -> list[tuple[str, int]]:
        """What it is cut into."""
        return sorted((PROFILES[i.profile][0], i.start) for i in self.instances.values())


class FakeMigNvml(FakeNvml):
    """Handles of instances are their numbers; only the first GPU is cut."""

    NVML_GPU_INSTANCE_PROFILE_COUNT = 8
    NVML_COMPUTE_INSTANCE_PROFILE_COUNT = 6
    NVML_COMPUTE_INSTANCE_ENGINE_PROFILE_SHARED = 0
    c_nvmlGpuInstancePlacement_t = _Placement
    c_nvmlGpuInstance_t = ctypes.c_uint
    c_nvmlComputeInstance_t = ctypes.c_uint

    def __init__(self, gpu: FakeMigGpu, *others: FakeGpu) -> None:
        super().__init__(gpu, *others)
        self.gpu = gpu
        self.log: list[str] = []

    def _allowed(self) -> None:
        if self.gpu.forbids:
            raise self.NVMLError("Insufficient Permissions")

    def nvmlDeviceGetMigMode(self, handle: Any) -> Any:
        mode, pending = super().nvmlDeviceGetMigMode(handle)
        return [mode, pending if getattr(handle, "pending", None) is None else handle.pending]

    def nvmlDeviceSetMigMode(self, handle: Any, mode: int) -> int:
        self._allowed()
        self.log.append(f"mode {mode}")
        if handle.needs_reset and handle.mig != mode:
            handle.pending = mode
            return 16
        handle.mig, handle.pending = mode, None
        return 0

    def nvmlDeviceGetGpuInstanceProfileInfo(self, handle: Any, profile: int) -> Any:
        if profile not in _NUMBERS or handle.mig is None:
            raise self.NVMLError("Not Supported")
        number = _NUMBERS[profile]
        name, gpcs, slices, starts, _, _ = PROFILES[number]
        most = {8: 1, 4: len(starts)}.get(slices, 7)
        return SimpleNamespace(id=number, name=f"MIG {name}".encode(), instanceCount=most, sliceCount=gpcs)

    def nvmlDeviceGetGpuInstancePossiblePlacements(
        self, handle: Any, profile_id: int, placements: Any, count: Any
    ) -> Any:
        self._allowed()
        _, _, slices, starts, _, _ = PROFILES[profile_id]
        count._obj.value = len(starts)
        for place, start in enumerate(starts if placements is not None else ()):
            placements[place] = _Placement(start, slices)

    def nvmlDeviceGetGpuInstances(self, handle: Any, profile_id: int, instances: Any, count: Any) -> Any:
        self._allowed()
        found = [number for number, one in handle.instances.items() if one.profile == profile_id]
        count._obj.value = len(found)
        for place, number in enumerate(found):
            instances[place] = number

    def nvmlDeviceGetGpuInstanceId(self, handle: Any) -> int:
        found = [number for number, one in self.gpu.instances.items() if one.part is handle]
        if not found:
            raise self.NVMLError("Not Found")
        return found[0]

    def nvmlDeviceGetGpuInstanceById(self, handle: Any, number: int) -> Any:
        self._allowed()
        return number

    def nvmlGpuInstanceGetInfo(self, instance: Any) -> Any:
        one = self.gpu.instances[instance]
        place = SimpleNamespace(start=one.start, size=PROFILES[one.profile][2])
        return SimpleNamespace(id=instance, profileId=one.profile, placement=place)

    def nvmlDeviceCreateGpuInstanceWithPlacement(self, handle: Any, profile_id: int, placement: Any) -> Any:
        self._allowed()
        name, start = PROFILES[profile_id][0], placement._obj.start
        end = start + placement._obj.size
        self.log.append(f"make {name} at {start}")
        taken = [i for i in handle.instances.values() if i.start < end and start < i.start + PROFILES[i.profile][2]]
        if (name, start) in handle.refuses or taken:
            raise self.NVMLError("Insufficient Resources")
        number = handle.cut(name, start)
        handle.instances[number].part = None
        handle.parts = [instance.part for instance in handle.instances.values()]
        return number

    def nvmlGpuInstanceDestroy(self, instance: Any) -> Any:
        self._allowed()
        one = self.gpu.instances[instance]
        if one.part is not None:
            raise self.NVMLError("In use by another client")
        self.log.append(f"end {PROFILES[one.profile][0]} at {one.start}")
        self.gpu.end(instance)

    def nvmlGpuInstanceGetComputeInstanceProfileInfo(self, instance: Any, profile: int, engine: int) -> Any:
        gpcs = {0: 1, 1: 2, 2: 3, 3: 4, 4: 7}.get(profile)
        if gpcs is None or gpcs > PROFILES[self.gpu.instances[instance].profile][1]:
            raise self.NVMLError("Not Supported")
        return SimpleNamespace(id=profile, sliceCount=gpcs, instanceCount=1)

    def nvmlGpuInstanceGetComputeInstances(self, instance: Any, profile_id: int, found: Any, count: Any) -> Any:
        one = self.gpu.instances[instance]
        gpcs = {0: 1, 1: 2, 2: 3, 3: 4, 4: 7}[profile_id]
        has = one.part is not None and PROFILES[one.profile][1] == gpcs
        count._obj.value = int(has)
        if has:
            found[0] = instance

    def nvmlGpuInstanceCreateComputeInstance(self, instance: Any, profile_id: int) -> Any:
        one = self.gpu.instances[instance]
        name, _, _, _, sms, mib = PROFILES[one.profile]
        uuid = f"MIG-{instance:08d}-1111-1111-1111-111111111111"
        one.part = FakePart(uuid, f"{self.gpu.name} MIG {name}", mib, sms, PROFILES[one.profile][1])
        self.gpu.parts = [each.part for each in self.gpu.instances.values()]
        return instance

    def nvmlComputeInstanceDestroy(self, instance: Any) -> Any:
        one = self.gpu.instances[instance]
        if one.part is not None and one.part.pids:
            raise self.NVMLError("In use by another client")
        one.part = None
        self.gpu.parts = [each.part for each in self.gpu.instances.values()]
