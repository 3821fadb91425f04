"""Shared memory of one request of an application."""

from __future__ import annotations

from tenuto.deployments.entry.http.body_memory import unfinished
from tenuto.deployments.wire.arena import Arena, Held, Slot

_SHARED_BYTES = 1 << 14  # derived: below it a copy costs less than shared memory, as for bodies of HTTP


class RunMemory(Held):
    """Where the inputs of the request lie, and what its stages hand on. All of it is given back together, after the
    last holder has released it."""

    def __init__(self, arena: Arena | None, inputs: Slot | None) -> None:
        """Take the arena for what is handed on, and what the inputs lie in; the caller is the first holder."""
        super().__init__()
        self._arena, self._slots = arena, [] if inputs is None else [inputs]
        if inputs is not None:
            inputs.hold()

    @property
    def is_scarce(self) -> bool:
        """Whether more than half of the arena is in use."""
        return self._arena is not None and self._arena.is_scarce

    def take_slot(self, size: int) -> Slot | None:
        """Return a place for so many bytes; None where none is left in the arena, or they are so few that a copy is
        cheaper. Raises `HttpError` 503 when requests under way hold as much as bodies may, and as much again."""
        arena = self._arena
        if arena is None or size < _SHARED_BYTES:
            return None
        if arena.used_bytes + size > 2 * arena.limit_bytes:
            raise unfinished()
        slot = arena.take(size)
        if slot is not None:
            self._slots.append(slot)
        return slot

    def _give_back(self) -> None:
        slots, self._slots = self._slots, []
        for slot in slots:
            slot.release()
