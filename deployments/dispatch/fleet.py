"""The gpu-lets of the present plan as the dispatcher sees them: their links, what runs on each, who may be used.

It follows plan changes: unchanged gpu-lets keep their connections and what runs, removed ones answer what they run
before their connection closes. It decides nothing about batches.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tenuto.deployments.dispatch.in_flight import Batch
from tenuto.deployments.entry.served import ServedModel
from tenuto.deployments.wire.link import Finder, GpuletLink, Link, LinkEvents
from tenuto.placement import Plan

__all__ = ["Fleet", "LinkFactory"]

# Makes the link to a gpu-let from its index in the plan, its id, what finds it and who is told.
LinkFactory = Callable[[int, str, Finder, LinkEvents], Link]

_LAST_ANSWERS_S = 30.0


@dataclass(slots=True)
class _Slot:
    """One gpu-let of the plan. `running` holds the sequence numbers of its unanswered batches, oldest first."""

    link: Link
    running: deque[int] = field(default_factory=deque)
    is_away: bool = True  # the core must not use it: absent, loading, or busy with a batch of an older plan


class Fleet:
    """Invariant: a batch is in `_batches` from its dispatch until it is answered, aborted or lost."""

    def __init__(
        self, find_gpulet: Callable[[str], Finder], events: LinkEvents, make_link: LinkFactory = GpuletLink
    ) -> None:
        self._find_gpulet = find_gpulet
        self._events = events
        self._make_link = make_link
        self._slots: list[_Slot] = []
        self._batches: dict[int, Batch] = {}
        self._plan: Plan | None = None
        self._closing: set[asyncio.Task[None]] = set()
        self._served: dict[str, ServedModel] = {}

    # --- plan changes -------------------------------------------------------------------------------------------

    def adopt(self, plan: Plan) -> None:
        """Follow a plan: every gpu-let is away until `offer` says otherwise; links of unchanged ids stay."""
        old = {slot.link.gpulet_id: slot for slot in self._slots}
        self._plan = plan
        self._served.clear()  # a source may have changed
        self._slots = []
        for index, gpulet in enumerate(plan.gpulets):
            slot = old.pop(gpulet.id, None)
            if slot is None:
                slot = _Slot(self._make_link(index, gpulet.id, self._find_gpulet(gpulet.id), self._events))
                slot.link.start()
            slot.link.index = index
            slot.is_away = True
            self._slots.append(slot)
            for sequence in slot.running:
                self._batches[sequence].gpulet = index
        for slot in old.values():
            self._retire(slot)

    def _retire(self, slot: _Slot) -> None:
        """Let a removed gpu-let answer what it runs, then close its connection."""

        async def close_when_idle() -> None:
            limit = asyncio.get_running_loop().time() + _LAST_ANSWERS_S
            while any(sequence in self._batches for sequence in slot.running):
                if asyncio.get_running_loop().time() > limit:
                    break
                await asyncio.sleep(0.02)
            await slot.link.stop()

        slot.link.index = -1
        for sequence in slot.running:
            self._batches[sequence].gpulet = -1
        task = asyncio.create_task(close_when_idle(), name=f"close {slot.link.gpulet_id}")
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        """Disconnect from every gpu-let."""
        await asyncio.gather(*(slot.link.stop() for slot in self._slots), *self._closing)

    # --- who may be used ----------------------------------------------------------------------------------------

    def offer(self, index: int) -> bool:
        """Return whether a gpu-let has just become usable: connected, holding what the plan says, and idle."""
        slot = self._slots[index]
        if self._plan is None or not slot.is_away or not slot.link.is_up or slot.running:
            return False
        held = slot.link.description.get("models", {})
        if any(held.get(program.name, 0) < program.batch_size for program in self._plan.gpulets[index].programs):
            return False
        slot.is_away = False
        return True

    def is_ready(self, model: str | None = None) -> bool:
        """Whether every gpu-let is usable; with a model, whether at least one of its gpu-lets is."""
        if self._plan is None:
            return False
        if model is None:
            return not any(slot.is_away for slot in self._slots)
        hosts = {gpulet.id for gpulet in self._plan.hosts_of(model)}
        return any(slot.link.gpulet_id in hosts and not slot.is_away for slot in self._slots)

    def served(self, model: str) -> ServedModel | None:
        """Return a model's signature as reported by the first gpu-let of it that ever connected; None before."""
        found = self._served.get(model)
        if found is None:
            raw = self.signature(model)
            if raw is not None:
                found = self._served[model] = ServedModel.from_data(raw)
        return found

    def signature(self, model: str) -> dict[str, Any] | None:
        """Return the plain data of a model's signature; None before one of its gpu-lets ever connected."""
        for slot in self._slots:
            raw: dict[str, Any] | None = slot.link.description.get("signatures", {}).get(model)
            if raw is not None:
                return raw
        return None

    def described(self) -> None:
        """A gpu-let said anew what it holds."""
        self._served.clear()

    def descriptions(self) -> list[dict[str, Any]]:
        """Return what every gpu-let reported when it connected, and whether it is up."""
        return [
            {"id": slot.link.gpulet_id, "up": slot.link.is_up, **_public(slot.link.description)} for slot in self._slots
        ]

    # --- what runs ----------------------------------------------------------------------------------------------

    def add(self, batch: Batch) -> Link:
        """Note a dispatched batch and return the link it goes over."""
        self._batches[batch.sequence] = batch
        slot = self._slots[batch.gpulet]
        slot.running.append(batch.sequence)
        return slot.link

    def take(self, index: int, sequence: int) -> Batch | None:
        """Return an answered batch and forget it; None for one that was aborted. `index` < 0: of a removed gpu-let."""
        batch = self._batches.pop(sequence, None)
        if batch is not None and index >= 0:
            self._slots[index].running.remove(sequence)
        return batch

    def abort(self, index: int) -> Batch | None:
        """Forget the oldest batch of a gpu-let and tell it so; None when it runs none."""
        slot = self._slots[index]
        if not slot.running:
            return None
        batch = self._batches.pop(slot.running.popleft())
        batch.aborted = True
        slot.link.send({"abort": batch.sequence}, ())
        return batch

    def lose(self, index: int) -> list[Batch]:
        """A gpu-let is gone: return and forget what ran there."""
        slot = self._slots[index]
        lost = [self._batches.pop(sequence) for sequence in slot.running if sequence in self._batches]
        slot.running.clear()
        slot.is_away = True
        return lost


def _public(description: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in description.items() if key not in ("token", "address")}
