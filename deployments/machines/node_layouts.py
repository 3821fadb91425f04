"""MIG layouts of the GPUs of a Ray cluster: cut on their nodes, watched there, and compared with what a plan needs.

Nothing here waits, but for `check_layouts`, which is asked once before anything is applied.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from tenuto.deployments.machines.node_gpus import read_ray_inventory
from tenuto.deployments.serve.config import ActorOptions
from tenuto.errors import EnvironmentFaultError, Problem, raise_if_any
from tenuto.mps.inventory import GpuDevice
from tenuto.mps.mig_layout import MigCut, MigDevice, apply_layout, read_mig_devices
from tenuto.placement import Plan
from tenuto.placement.plan import PlannedGpu

_WATCHED_S = 15.0  # pace: between two looks at the instances of a node, each of which may start a worker of Ray
_CURE = "Run `tenuto cluster` and plan on what is there"


@dataclass(frozen=True)
class CutOrder:
    """A GPU that is to have instances: its id in the plan, its UUID, the node (address or label; None: any)."""

    device: str
    gpu_uuid: str
    node: str | None
    wanted: tuple[MigCut, ...]

    @classmethod
    def of(cls, places: Sequence[PlannedGpu]) -> CutOrder | None:
        """Return what a plan's places on one GPU take; None where that GPU is not bound to hardware."""
        first = places[0]
        uuid = first.uuid if first.instance is None else first.instance.gpu_uuid
        if uuid is None:
            return None
        return cls(first.device, uuid, first.label or first.address, tuple(cut for cut in map(cut_of, places) if cut))


def cut_of(gpu: PlannedGpu) -> MigCut | None:
    """Return the instance that a place of a plan is; None for a whole GPU."""
    return None if gpu.cut_as is None or gpu.instance is None else MigCut(gpu.cut_as.profile, gpu.instance.start)


class NodeLayouts:
    """Cuts GPUs and watches their instances, in tasks on their nodes."""

    def __init__(
        self,
        start: Callable[[str | None, Callable[..., Any], tuple[Any, ...]], Any] | None = None,
        poll: Callable[[Any], tuple[bool, Any]] | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Take what starts a task on a node and what asks whether it has ended; default: Ray's."""
        self._start, self._poll, self._clock = start or _start_task, poll or poll_task, clock
        self._cutting: dict[str, Any] = {}
        self._looks: dict[str | None, tuple[float, Any]] = {}
        self._present: dict[str, tuple[MigDevice, ...]] = {}

    def begin(self, order: CutOrder) -> None:
        """Begin to cut a GPU."""
        self._present.pop(order.gpu_uuid, None)
        self._looks.clear()  # one under way may see the layout before
        self._cutting[order.device] = self._start(order.node, _cut, (order.gpu_uuid, order.wanted))

    def ended(self) -> dict[str, str]:
        """Return the GPUs, by id, that were cut since the last call, each with why it could not be; empty: it was."""
        errors = {}
        for device, task in list(self._cutting.items()):
            is_over, answer = self._poll(task)
            if is_over:
                del self._cutting[device]
                errors[device] = answer or ""
        return errors

    def watch(self, nodes: Sequence[str | None]) -> Mapping[str, tuple[MigDevice, ...]]:
        """Return the MIG devices of GPUs of some nodes by the GPU's UUID, at most some seconds old; a GPU of which
        nothing is known, as while it is cut, is not in it."""
        for node in nodes:
            begun_s, task = self._looks.get(node, (-_WATCHED_S, None))
            if task is not None:
                is_over, answer = self._poll(task)
                if not is_over:
                    continue
                self._looks[node] = begun_s, None
                if isinstance(answer, dict) and not self._cutting:
                    self._present.update(answer)
            elif self._clock() - begun_s >= _WATCHED_S and not self._cutting:
                self._looks[node] = self._clock(), self._start(node, _look, ())
        return self._present


def _cut(gpu_uuid: str, layout: tuple[MigCut, ...]) -> str:
    try:
        apply_layout(gpu_uuid, layout)
    except EnvironmentFaultError as error:
        return str(error)
    return ""


def _look() -> dict[str, tuple[MigDevice, ...]] | None:
    try:
        return read_mig_devices()
    except EnvironmentFaultError:
        return None


def _start_task(node: str | None, what: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    import ray

    options = ActorOptions(node).to_data()
    return ray.remote(what).options(max_retries=0, **options).remote(*arguments)


def poll_task(task: Any) -> tuple[bool, Any]:
    """Return whether a task has ended, and its answer or, as a text, its fault."""
    import ray

    ready, _ = ray.wait([task], timeout=0)
    if not ready:
        return False, None
    try:
        return True, ray.get(task, timeout=1.0)
    except Exception as error:  # a node that is lost, or whatever the task raised
        return True, f"its node could not do that: {error}"


# --- before anything is applied ---------------------------------------------------------------------------------------


def check_layouts(plan: Plan, read: Callable[[], Mapping[str, Sequence[GpuDevice]]] = read_ray_inventory) -> None:
    """Refuse a plan whose GPUs are cut otherwise than it needs, unless it may cut them.

    Only GPUs that are bound to hardware are asked for. Where no node tells its GPUs, gpu-lets find out.

    Raises:
        InvalidInputError: with every GPU that is not as the plan needs it, and the cure.
    """
    held = set(plan.used_gpus)
    places = [gpu for gpu in plan.gpus if gpu.id in held and gpu.type != "cpu" and _uuid_of(gpu) is not None]
    if not any(gpu.mig is not None or gpu.instance is not None or gpu.uuid is not None for gpu in places):
        return
    with suppress(EnvironmentFaultError):
        devices = [device for of_node in read().values() for device in of_node]
        raise_if_any([problem for gpu in places for problem in _layout_problems(gpu, devices)])


def _uuid_of(gpu: PlannedGpu) -> str | None:
    return gpu.uuid or (None if gpu.instance is None else gpu.instance.gpu_uuid)


def _layout_problems(gpu: PlannedGpu, devices: Sequence[GpuDevice]) -> list[Problem]:
    where = f"plan: gpus.{gpu.id}"
    parent = gpu.uuid if gpu.instance is None else gpu.instance.gpu_uuid
    parts = [device for device in devices if parent is not None and device.parent_uuid == parent]
    of_gpu = parts or [device for device in devices if device.uuid == parent]
    cut = ", ".join(f"{p.type} at {'?' if p.start is None else p.start}" for p in parts) or "not cut"
    if gpu.mig == "managed" and parent is not None:
        if not of_gpu:
            return [Problem(where, parent, "no node has this GPU", f"{_CURE}.")]
        if not of_gpu[0].has_mig and gpu.instance is not None:
            return [Problem(where, gpu.type, "this GPU has no MIG", "Plan on the whole GPU, without `mig`.")]
        if of_gpu[0].resets:
            cure = f"End what uses it, then nvidia-smi --gpu-reset -i {parent}."
            return [Problem(where, gpu.type, "its MIG mode changes at its next reset", cure)]
        return []
    if gpu.instance is None and gpu.uuid is not None and not gpu.uuid.startswith("MIG-"):
        if parts or any(device.is_mig for device in of_gpu):
            rule = f"is planned whole and is in MIG mode ({cut})"
            cure = f"{_CURE}, let plans cut it (mig: managed), or turn MIG off: nvidia-smi -i {parent} -mig 0."
            return [Problem(where, gpu.uuid, rule, cure)]
        return []
    start = None if gpu.instance is None else gpu.instance.start
    is_here = any(
        device.uuid == gpu.uuid if gpu.uuid is not None else device.start == start and device.type == gpu.type
        for device in (devices if gpu.uuid is not None else parts)
        if start is None or device.start in (None, start)
    )
    if is_here or not devices:
        return []
    cure = f"Cut it so (nvidia-smi mig), or {_CURE[0].lower()}{_CURE[1:]}, or let plans cut it (mig: managed)."
    return [Problem(where, gpu.uuid or gpu.type, f"this MIG instance is not there; its GPU is {cut}", cure)]
