"""MIG layouts of this machine's GPUs: what each is cut into, what it could be cut into, and the way to another layout.

All through NVML, whose possible placements decide. Nothing is taken from under a process, whoever it belongs to. A
change that the driver refuses half-way is taken back.
"""

from __future__ import annotations

import contextlib
import ctypes
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

from tenuto.errors import EnvironmentFaultError
from tenuto.mps.inventory import Nvml, answering, load_nvml, mig_handles, processes_on, read_inventory, text_of
from tenuto.mps.others import find_others

_LEAVE_S = 30  # limit: a gpu-let's CUDA MPS server ends some seconds after the gpu-let
_OFF, _ON = 0, 1  # format: NVML_DEVICE_MIG_DISABLE and NVML_DEVICE_MIG_ENABLE
_RIGHTS = "Cutting takes root, or access to /proc/driver/nvidia/capabilities/mig/config"


class MigNvml(Nvml, Protocol):
    """The part of `pynvml` that cuts GPUs; the tests give a fake one."""

    NVML_GPU_INSTANCE_PROFILE_COUNT: int
    NVML_COMPUTE_INSTANCE_PROFILE_COUNT: int
    NVML_COMPUTE_INSTANCE_ENGINE_PROFILE_SHARED: int
    c_nvmlGpuInstancePlacement_t: Any
    c_nvmlGpuInstance_t: Any
    c_nvmlComputeInstance_t: Any

    def nvmlDeviceSetMigMode(self, handle: Any, mode: int) -> int: ...
    def nvmlDeviceGetGpuInstanceProfileInfo(self, handle: Any, profile: int) -> Any: ...
    def nvmlDeviceGetGpuInstancePossiblePlacements(
        self, handle: Any, profile_id: int, placements: Any, count: Any
    ) -> Any: ...
    def nvmlDeviceGetGpuInstances(self, handle: Any, profile_id: int, instances: Any, count: Any) -> Any: ...
    def nvmlDeviceCreateGpuInstanceWithPlacement(self, handle: Any, profile_id: int, placement: Any) -> Any: ...
    def nvmlGpuInstanceDestroy(self, instance: Any) -> Any: ...
    def nvmlGpuInstanceGetComputeInstanceProfileInfo(self, instance: Any, profile: int, engine: int) -> Any: ...
    def nvmlGpuInstanceGetComputeInstances(self, instance: Any, profile_id: int, found: Any, count: Any) -> Any: ...
    def nvmlGpuInstanceCreateComputeInstance(self, instance: Any, profile_id: int) -> Any: ...
    def nvmlComputeInstanceDestroy(self, instance: Any) -> Any: ...


class MigCut(NamedTuple):
    """An instance as it is wanted: its profile, such as 3g.20gb, and the memory slice where it begins."""

    profile: str
    start: int

    def __str__(self) -> str:
        return f"{self.profile} at {self.start}"


@dataclass(frozen=True)
class MigInstance:
    """An instance that is there. `uuids` are of its MIG devices: one, unless another tool parted its compute or left it
    without."""

    cut: MigCut
    slices: int
    uuids: tuple[str, ...]

    def overlaps(self, start: int, slices: int) -> bool:
        """Return whether it takes one of these memory slices."""
        return self.cut.start < start + slices and start < self.cut.start + self.slices


@dataclass(frozen=True)
class MigLayout:
    """How a GPU is cut. `is_on`: it is in MIG mode; `is_pending`: it changes that mode at its next reset."""

    is_on: bool
    is_pending: bool
    instances: tuple[MigInstance, ...] = ()

    def __str__(self) -> str:
        cut = ", ".join(str(instance.cut) for instance in self.instances) or "no instances"
        return cut if self.is_on else "whole"


class MigDevice(NamedTuple):
    """A MIG device as everybody may see it: its type, such as a100-3g.20gb, and UUID, and where its instance begins;
    None where this user is not told."""

    type: str
    start: int | None
    uuid: str


def read_mig_devices(nvml: Nvml | None = None) -> dict[str, tuple[MigDevice, ...]]:
    """Return the MIG devices of every GPU of this machine by the GPU's UUID; raises `EnvironmentFaultError` where NVML
    does not answer."""
    devices = read_inventory(nvml or load_nvml(), None)
    by_gpu: dict[str, tuple[MigDevice, ...]] = {device.uuid: () for device in devices if device.parent_uuid is None}
    for device in devices:
        if device.parent_uuid is not None:
            part = MigDevice(device.type, device.start, device.uuid)
            by_gpu[device.parent_uuid] = (*by_gpu.get(device.parent_uuid, ()), part)
    return by_gpu


def apply_layout(
    gpu_uuid: str,
    cuts: Collection[MigCut],
    *,
    nvml: MigNvml | None = None,
    leave_s: int = _LEAVE_S,
    sleep: Callable[[float], None] = time.sleep,
) -> MigLayout:
    """Cut a GPU so that it has all of these instances, and return its layout; with none of them it is whole and out of
    MIG mode.

    Of the instances that are there only those are touched that take a memory slice of a new one. Who calls this has the
    operator's permission (`mig: managed`).

    Args:
        gpu_uuid: of the GPU.
        cuts: no two of which take the same memory slice.
        nvml: the driver.
        leave_s: how long processes in the way may take to leave.
        sleep: waits for seconds.

    Raises:
        EnvironmentFaultError: a process is in the way, a reset is pending, or the driver refuses. The GPU then has the
            layout that it had; where that could not be brought back, the message says what it has.
    """
    nvml = nvml or load_nvml()
    with answering(nvml), _told(nvml, gpu_uuid):
        gpu = _Gpu(nvml, gpu_uuid)
        before = gpu.layout()
        come = sorted({*cuts} - {instance.cut for instance in before.instances if len(instance.uuids) == 1})
        if before.is_on == bool(cuts) and not come:
            return before
        if before.is_pending:
            raise _refused(
                gpu_uuid, "it changes its MIG mode at its next reset", f"nvidia-smi --gpu-reset -i {gpu_uuid}"
            )
        if not before.is_on:
            _leave(gpu_uuid, [gpu_uuid], nvml, leave_s, sleep)
            gpu.set_mode(_ON)
        try:
            gone = _in_the_way(gpu, before, come) if cuts else before.instances
            _leave(gpu_uuid, [uuid for instance in gone for uuid in instance.uuids], nvml, leave_s, sleep)
            _exchange(gpu, gone, come)
            if not cuts:
                gpu.set_mode(_OFF)
        except (EnvironmentFaultError, nvml.NVMLError) as error:
            _go_back(gpu, before, nvml)
            now = gpu.layout()
            if _cuts(now) != _cuts(before):
                cure = f"It was {before} and is {now} now, which could not be taken back; see nvidia-smi mig -lgi"
                raise _refused(gpu_uuid, str(error).rstrip("."), cure) from error
            if isinstance(error, EnvironmentFaultError):
                raise
            raise _refused(gpu_uuid, f"the driver refuses: {error}", f"It is {before} as before. {_RIGHTS}") from error
        return gpu.layout()


def _cuts(layout: MigLayout) -> tuple[bool, frozenset[MigCut]]:
    return layout.is_on, frozenset(instance.cut for instance in layout.instances if instance.uuids)


class _Profile(NamedTuple):
    """A size of instances as the driver has it."""

    name: str
    number: int
    most: int
    gpcs: int


class _Gpu:
    """One GPU as NVML has it. Every method may raise NVML's error."""

    def __init__(self, nvml: MigNvml, uuid: str) -> None:
        self._nvml, self._uuid = nvml, uuid
        self._handle = nvml.nvmlDeviceGetHandleByUUID(uuid)

    def layout(self) -> MigLayout:
        """Return how it is cut."""
        mode, pending = self._nvml.nvmlDeviceGetMigMode(self._handle)
        instances = []
        if mode == _ON:
            devices = self._devices()
            for cut, slices, _, number in self._instances():
                instances.append(MigInstance(cut, slices, tuple(devices.get(number, ()))))
        order = sorted(instances, key=lambda instance: instance.cut.start)
        return MigLayout(mode == _ON, mode != pending, tuple(order))

    def profiles(self) -> list[_Profile]:
        """Return the sizes of instances that it knows."""
        profiles_by_type = []
        for number in range(self._nvml.NVML_GPU_INSTANCE_PROFILE_COUNT):
            try:
                info = self._nvml.nvmlDeviceGetGpuInstanceProfileInfo(self._handle, number)
            except self._nvml.NVMLError:  # not one of this GPU
                continue
            name = text_of(info.name).lower().removeprefix("mig ")
            profiles_by_type.append(_Profile(name, int(info.id), int(info.instanceCount), int(info.sliceCount)))
        return profiles_by_type

    def places(self, profile: _Profile) -> dict[int, int]:
        """Return the memory slices where an instance may begin on the empty GPU, each with how many it takes."""
        count = ctypes.c_uint()
        ask = self._nvml.nvmlDeviceGetGpuInstancePossiblePlacements
        ask(self._handle, profile.number, None, ctypes.byref(count))
        places = (self._nvml.c_nvmlGpuInstancePlacement_t * count.value)()
        ask(self._handle, profile.number, places, ctypes.byref(count))
        return {int(place.start): int(place.size) for place in places[: count.value]}

    def slices_of(self, cut: MigCut) -> int:
        """Return how many memory slices an instance takes; raises `EnvironmentFaultError` where there can be none."""
        profile = self._profile(cut)
        places = self.places(profile)
        if cut.start not in places:
            rule = f"the driver has no {cut.profile} at memory slice {cut.start}"
            raise _refused(self._uuid, rule, f"It begins at {', '.join(map(str, sorted(places)))}")
        return places[cut.start]

    def _profile(self, cut: MigCut) -> _Profile:
        known = {profile.name: profile for profile in self.profiles()}
        if cut.profile not in known:
            raise _refused(self._uuid, f"the driver has no {cut.profile}", f"It has {', '.join(known) or 'none'}")
        return known[cut.profile]

    def _instances(self) -> Iterator[tuple[MigCut, int, Any, int]]:
        """Yield every instance with its slices, handle and number."""
        for profile in self.profiles():
            count = ctypes.c_uint()
            handles = (self._nvml.c_nvmlGpuInstance_t * profile.most)()
            self._nvml.nvmlDeviceGetGpuInstances(self._handle, profile.number, handles, ctypes.byref(count))
            for handle in handles[: count.value]:
                info = self._nvml.nvmlGpuInstanceGetInfo(handle)
                cut = MigCut(profile.name, int(info.placement.start))
                yield cut, int(info.placement.size), handle, int(info.id)

    def _devices(self) -> dict[int, list[str]]:
        """Return the UUIDs of its MIG devices by the number of their instance."""
        uuids: dict[int, list[str]] = {}
        for part in mig_handles(self._nvml, self._handle):
            number = int(self._nvml.nvmlDeviceGetGpuInstanceId(part))
            uuids.setdefault(number, []).append(text_of(self._nvml.nvmlDeviceGetUUID(part)))
        return uuids

    def set_mode(self, mode: int) -> None:
        """Go into or out of MIG mode; raises `EnvironmentFaultError` where that waits for a reset, and leaves the mode
        as it was."""
        status = self._nvml.nvmlDeviceSetMigMode(self._handle, mode)
        self._handle = self._nvml.nvmlDeviceGetHandleByUUID(self._uuid)  # the old one may not outlive the mode
        if self._nvml.nvmlDeviceGetMigMode(self._handle) == [mode, mode]:
            return
        self._nvml.nvmlDeviceSetMigMode(self._handle, _OFF if mode == _ON else _ON)
        what = "on" if mode == _ON else "off"
        cure = f"nvidia-smi -i {self._uuid} -mig {mode}; nvidia-smi --gpu-reset -i {self._uuid}, with nothing on it"
        raise _refused(self._uuid, f"MIG mode cannot go {what} without a reset (NVML status {status})", cure)

    def make(self, cut: MigCut) -> None:
        """Make an instance with one MIG device that has all of it."""
        size = self.slices_of(cut)
        profile = self._profile(cut)
        place = self._nvml.c_nvmlGpuInstancePlacement_t(cut.start, size)
        made = self._nvml.nvmlDeviceCreateGpuInstanceWithPlacement(self._handle, profile.number, ctypes.byref(place))
        self._fill(made, profile.gpcs)

    def fill(self, cut: MigCut) -> None:
        """Make the MIG device of an instance that is there without one."""
        for present, _, handle, _ in self._instances():
            if present == cut:
                self._fill(handle, self._profile(cut).gpcs)

    def _fill(self, instance: Any, gpcs: int) -> None:
        for info in self._compute_profiles(instance):
            if int(info.sliceCount) == gpcs:
                self._nvml.nvmlGpuInstanceCreateComputeInstance(instance, int(info.id))
                return
        raise EnvironmentFaultError(f"the driver has no compute instance of {gpcs} slices")

    def _compute_profiles(self, instance: Any) -> Iterator[Any]:
        ask, shared = (
            self._nvml.nvmlGpuInstanceGetComputeInstanceProfileInfo,
            self._nvml.NVML_COMPUTE_INSTANCE_ENGINE_PROFILE_SHARED,
        )
        for number in range(self._nvml.NVML_COMPUTE_INSTANCE_PROFILE_COUNT):
            with contextlib.suppress(self._nvml.NVMLError):  # not one of this instance
                yield ask(instance, number, shared)

    def end(self, cut: MigCut) -> None:
        """End an instance with its MIG devices; one that is not there is ignored."""
        for present, _, handle, _ in self._instances():
            if present != cut:
                continue
            for info in list(self._compute_profiles(handle)):
                count = ctypes.c_uint()
                inside = (self._nvml.c_nvmlComputeInstance_t * max(1, int(info.instanceCount)))()
                self._nvml.nvmlGpuInstanceGetComputeInstances(handle, int(info.id), inside, ctypes.byref(count))
                for each in inside[: count.value]:
                    self._nvml.nvmlComputeInstanceDestroy(each)
            self._nvml.nvmlGpuInstanceDestroy(handle)


def _in_the_way(gpu: _Gpu, layout: MigLayout, come: Sequence[MigCut]) -> tuple[MigInstance, ...]:
    """Return the instances that take a memory slice of a new one, and those without a MIG device of all of theirs that
    are to be had whole."""
    sizes = {cut: gpu.slices_of(cut) for cut in come}
    return tuple(i for i in layout.instances if any(i.overlaps(cut.start, size) for cut, size in sizes.items()))


def _exchange(gpu: _Gpu, gone: Sequence[MigInstance], come: Sequence[MigCut]) -> None:
    for instance in gone:
        gpu.end(instance.cut)
    for cut in come:
        gpu.make(cut)


def _go_back(gpu: _Gpu, before: MigLayout, nvml: MigNvml) -> None:
    """Bring a layout back as far as the driver lets it: who asks next reads what is there."""
    earlier = {instance.cut: instance for instance in before.instances}
    now = gpu.layout()
    present = {instance.cut: instance for instance in now.instances}
    steps = [partial(gpu.end, cut) for cut in present if cut not in earlier]
    steps += [partial(gpu.make, cut) for cut in earlier if now.is_on and cut not in present]
    steps += [
        partial(gpu.fill, cut) for cut in present if cut in earlier and earlier[cut].uuids and not present[cut].uuids
    ]
    if now.is_on and not before.is_on:
        steps.append(partial(gpu.set_mode, _OFF))
    for step in steps:
        with contextlib.suppress(EnvironmentFaultError, nvml.NVMLError):
            step()


def _leave(gpu_uuid: str, devices: Sequence[str], nvml: MigNvml, leave_s: int, sleep: Callable[[float], None]) -> None:
    """Wait until no process is on GPUs or MIG devices; raises `EnvironmentFaultError` with those that stay."""
    for left_s in range(leave_s, -1, -1):
        pids = sorted({pid for device in devices for pid in processes_on(device, nvml)})
        if not pids:
            return
        if left_s:
            sleep(1.0)
    raise _refused(
        gpu_uuid,
        f"{', '.join(map(str, find_others(tuple(pids), set())))} would be cut off",
        "Stop what is not Tenuto's, or keep these instances (`mig: fixed`)",
    )


@contextlib.contextmanager
def _told(nvml: MigNvml, gpu_uuid: str) -> Iterator[None]:
    try:
        yield
    except nvml.NVMLError as error:
        raise _refused(gpu_uuid, f"NVML does not do it: {error}", _RIGHTS) from error


def _refused(gpu_uuid: str, why: str, cure: str) -> EnvironmentFaultError:
    return EnvironmentFaultError(f"MIG layout of {gpu_uuid}: {why}. {cure}.")
