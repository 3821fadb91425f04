"""Tracks the MIG layouts that a plan needs while it is applied: which gpu-lets wait for their GPU to be cut, what ends
before, and which instances exist."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from tenuto.deployments.machines.node_layouts import CutOrder
from tenuto.mps.mig_layout import MigDevice
from tenuto.placement import Plan
from tenuto.placement.cluster import Gpu, Placed, excludes
from tenuto.placement.plan import PlannedGpu

logger = logging.getLogger("ray.serve")


class LayoutSide(Protocol):
    """Cuts GPUs into MIG instances and watches them; `NodeLayouts` on a real cluster. No call waits."""

    def begin(self, order: CutOrder) -> None:
        """Begin to cut a GPU."""

    def ended(self) -> dict[str, str]:
        """Return the GPUs whose cutting ended since the last call, each with the reason why it failed; empty when it
        succeeded."""

    def watch(self, nodes: Sequence[str | None]) -> Mapping[str, tuple[MigDevice, ...]]:
        """Return the known MIG devices of GPUs on some nodes, by the GPU's UUID."""


class MigReconfiguration:
    """Invariant: a GPU is cut only when no gpu-let is in an instance that goes, and never twice at once.

    `refused`: why an instance could not be made, by its id. An emulated GPU has its planned layout as soon as the
    gpu-lets in the way have ended.
    """

    def __init__(self, layouts: LayoutSide | None, held: Iterable[PlannedGpu]) -> None:
        """Take over GPUs on which gpu-lets run; their instances exist."""
        self._layouts = layouts
        self._there: dict[str, list[PlannedGpu]] = {}  # by GPU: instances known to exist
        for gpu in held:
            self._there.setdefault(gpu.device, []).append(gpu)
        self._wanted: dict[str, list[PlannedGpu]] = {}  # by GPU to cut: its instances in the plan
        self._under_way: dict[str, list[PlannedGpu]] = {}  # by GPU that is being cut: the instances that it gets
        self._emulated = False
        self.refused: dict[str, str] = {}

    @property
    def waiting(self) -> frozenset[str]:
        """The planned instances that do not exist yet."""
        return frozenset(gpu.id for places in self._wanted.values() for gpu in places if not self._is_there(gpu))

    def _is_there(self, gpu: PlannedGpu) -> bool:
        return any((gpu.id, gpu.type) == (other.id, other.type) for other in self._there.get(gpu.device, ()))

    def need(self, plan: Plan, *, emulated: bool) -> None:
        """Want a plan's instances from now on. Instances that nobody may cut count as existing."""
        self._emulated, self.refused, self._wanted = emulated, {}, {}
        held = set(plan.used_gpus)
        missing = {g.device for g in plan.gpus if g.id in held and g.mig == "managed" and not self._is_there(g)}
        for gpu in plan.gpus:
            if gpu.device in missing:
                self._wanted.setdefault(gpu.device, []).append(gpu)

    def go_on(self, leaving: Sequence[Placed]) -> bool:
        """Cut the GPUs that are free for it; return whether instances have come that gpu-lets waited for.

        Args:
            leaving: where gpu-lets still are that are not in the plan.
        """
        came = False
        for device, why in ({} if self._layouts is None else self._layouts.ended()).items():
            made = self._under_way.pop(device, [])
            if why:
                logger.error("control: GPU %s could not be cut: %s", device, why)
                ordered = {(gpu.id, gpu.type) for gpu in made}  # the instances that had to go may exist or not
                self._there[device] = [g for g in self._there.get(device, ()) if (g.id, g.type) in ordered]
                if self._wanted.get(device) == made:  # no other plan has come meanwhile
                    self.refused |= {gpu.id: why for gpu in made}
            else:
                came = self._note_instances(device, made) or came
        for device, places in list(self._wanted.items()):
            is_blocked = any(excludes(gpu, other) for gpu in places for other in leaving)
            if device in self._under_way or is_blocked or any(gpu.id in self.refused for gpu in places):
                continue
            order = None if self._emulated else CutOrder.of(places)
            if order is None or self._layouts is None:
                came = self._note_instances(device, places) or came
            else:
                self._there[device] = self._staying(device, places)
                self._under_way[device] = places
                self._layouts.begin(order)
        return came

    def _staying(self, device: str, places: Sequence[PlannedGpu]) -> list[PlannedGpu]:
        """Return the instances of a GPU that stay when it is cut into these."""
        return [gpu for gpu in self._there.get(device, ()) if not any(excludes(gpu, place) for place in places)]

    def _note_instances(self, device: str, made: Sequence[PlannedGpu]) -> bool:
        """Note that a GPU was cut; return whether it has got instances. The plan may want others by now."""
        self._there[device] = [*{(gpu.id, gpu.type): gpu for gpu in (*self._staying(device, made), *made)}.values()]
        if all(map(self._is_there, self._wanted.get(device, ()))):
            self._wanted.pop(device, None)
        return bool(made)

    def remaining(self, gpus: Sequence[Gpu], plan: Plan) -> tuple[Gpu, ...]:
        """Return the GPUs without those that cannot exist beside the plan's, and without MIG instances that another
        tool ended."""
        on: dict[str, list[PlannedGpu]] = {}
        for gpu in plan.gpus:
            if gpu.mig is not None or gpu.instance is not None:
                on.setdefault(gpu.device, []).append(gpu)
        if not on:
            return tuple(gpus)
        real = [
            g for places in on.values() for g in places if g.instance is not None and g.instance.gpu_uuid is not None
        ]
        nodes = list(dict.fromkeys(gpu.label or gpu.address for gpu in real))
        devices = self._layouts.watch(nodes) if self._layouts is not None and not self._emulated else {}
        waiting = self.waiting
        for device, places in self._there.items():
            self._there[device] = [gpu for gpu in places if _is_present(gpu, devices)]
        return tuple(
            gpu
            for gpu in gpus
            if not any(excludes(gpu, other) for other in on.get(gpu.device, ()))
            and (gpu.id in waiting or _is_present(gpu, devices))
        )


def _is_present(gpu: Gpu | PlannedGpu, devices: Mapping[str, tuple[MigDevice, ...]]) -> bool:
    """Return whether a MIG instance exists on its GPU; when nobody has looked, assume so."""
    parts = None if gpu.instance is None else devices.get(gpu.instance.gpu_uuid or "")
    if parts is None or gpu.instance is None:
        return True
    by_place = any(part.type == gpu.type and part.start in (None, gpu.instance.start) for part in parts)
    return by_place if gpu.mig == "managed" or gpu.uuid is None else any(part.uuid == gpu.uuid for part in parts)
