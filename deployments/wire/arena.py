"""Shared memory for the bodies of requests. A body is received once into a slot, which the gpu-lets of the same machine
map.

An arena is anonymous memory of the receiving process (`memfd_create`). Other processes open it through that process'
entry in /proc, which the kernel allows to processes of the same user. It needs no name, so nothing is left behind
however a process ends. The memory lives until the last process that maps it is gone.
"""

from __future__ import annotations

import bisect
import contextlib
import mmap
import os
import re
from collections.abc import Callable
from pathlib import Path

_GRAIN_BYTES = 1 << 16  # unit: slots are multiples of this, so that a freed slot fits the next body
_MEMFD = "/memfd:tenuto-arena"
_MOST_ADDRESSES = 1 << 45  # limit: of an arena; a process has four times as many (47 bits)
_NAME = re.compile(r"(\d+):(\d+):(\d+)")  # process, file descriptor, inode


def machine_id() -> str:
    """Return an id that is equal for processes that can open each other's arenas: kernel, process ids and user."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{boot}/{os.readlink('/proc/self/ns/pid')}/{os.geteuid()}"


class Held:
    """What others may use, mostly memory. It is given back when every holder has released it; whoever made it is the
    first."""

    __slots__ = ("_holders",)

    def __init__(self) -> None:
        self._holders = 1

    def hold(self) -> None:
        """Add a holder; each `hold` needs one `release`."""
        self._holders += 1

    def release(self) -> None:
        """Remove a holder."""
        self._holders -= 1
        if not self._holders:
            self._give_back()

    def _give_back(self) -> None:
        raise NotImplementedError


class Slot(Held):
    """A part of an arena. The arena reuses it after its last holder has released it."""

    __slots__ = ("_arena", "_on_free", "data", "offset")

    def __init__(self, arena: Arena, offset: int, data: memoryview, on_free: Callable[[], None] | None) -> None:
        super().__init__()
        self._arena = arena
        self._on_free = on_free
        self.offset = offset
        self.data = data

    @property
    def arena(self) -> str:
        """The name of its arena."""
        return self._arena.name

    @property
    def is_scarce(self) -> bool:
        """Whether more than half of its arena is in use."""
        return self._arena.is_scarce

    def _give_back(self) -> None:
        self._arena._give_back(self)
        if self._on_free is not None:
            self._on_free()


class Arena:
    """Slots of shared memory, which are reused without being cleared. All calls must come from one thread.

    The system gives memory when a slot is first written. The arena keeps the first `limit_bytes` of this memory for
    later slots, which lie as far in front as they can; memory behind that goes back to the system with its slot.
    """

    def __init__(self, limit_bytes: int, *, reach: int = 1) -> None:
        """Reserve addresses for slots. This takes no memory yet.

        Args:
            limit_bytes: the most memory that is kept.
            reach: how many times as many bytes all slots together may have. Who gives more than 1 bounds how many bytes
                of them are written.
        """
        self.limit_bytes = limit_bytes // _GRAIN_BYTES * _GRAIN_BYTES
        addresses = max(self.limit_bytes, min(reach * self.limit_bytes, _MOST_ADDRESSES))
        self._file = os.memfd_create("tenuto-arena", os.MFD_CLOEXEC)
        os.ftruncate(self._file, addresses)
        self._map = mmap.mmap(self._file, addresses)
        self._view = memoryview(self._map)
        self.name = f"{os.getpid()}:{self._file}:{os.fstat(self._file).st_ino}"
        self.used_bytes = 0
        self._gaps = [(0, addresses)]  # free parts, (offset, length), in order; no two lie side by side

    @property
    def is_scarce(self) -> bool:
        """Whether more than half of it is in use."""
        return 2 * self.used_bytes > self.limit_bytes

    def take(self, size: int, on_free: Callable[[], None] | None = None) -> Slot | None:
        """Return a slot with `size` bytes of `data`, of any content; None when no place is free. `on_free` is called
        after its last release."""
        length = _whole_grains(size)
        for place, (offset, free) in enumerate(self._gaps):
            if free >= length:
                self._gaps[place : place + 1] = [(offset + length, free - length)] if free > length else []
                self.used_bytes += length
                return Slot(self, offset, self._view[offset : offset + size], on_free)
        return None

    def _give_back(self, slot: Slot) -> None:
        offset, length = slot.offset, _whole_grains(len(slot.data))
        self.used_bytes -= length
        behind = max(offset, self.limit_bytes)
        if behind < offset + length:
            self._map.madvise(mmap.MADV_REMOVE, behind, offset + length - behind)
        gaps, place = self._gaps, bisect.bisect(self._gaps, (offset,))
        if place < len(gaps) and gaps[place][0] == offset + length:
            length += gaps.pop(place)[1]
        if place and sum(gaps[place - 1]) == offset:
            place -= 1
            offset, before = gaps.pop(place)
            length += before
        gaps.insert(place, (offset, length))

    def close(self) -> None:
        """Release the memory. The system takes it back once no other process maps it, and no slot is left here."""
        os.close(self._file)
        self._view.release()
        with contextlib.suppress(BufferError):  # a slot is left, whose view ends the mapping
            self._map.close()  # it has a descriptor of its own


def _whole_grains(size: int) -> int:
    """Return the length of a slot for so many bytes."""
    return -(-max(1, size) // _GRAIN_BYTES) * _GRAIN_BYTES


class MappedArenas:
    """The arenas of other processes, as one process sees them."""

    def __init__(self) -> None:
        self._maps: dict[str, memoryview] = {}

    def bytes_of(self, arena: str, offset: int, length: int) -> memoryview:
        """Return a part of an arena without copying it.

        Raises:
            OSError: the arena cannot be mapped: its process is gone, or belongs to another user.
            ValueError: the name is no arena's, or the part lies outside of the arena.
        """
        view = self._maps.get(arena)
        if view is None:
            view = self._maps[arena] = self._open(arena)
        if not 0 <= offset <= offset + length <= len(view):
            raise ValueError(f"bytes {offset} to {offset + length} lie outside of arena {arena}")
        return view[offset : offset + length]

    def _open(self, arena: str) -> memoryview:
        match = _NAME.fullmatch(arena)
        if match is None:
            raise ValueError(f"{arena!r} names no arena")
        for known in [known for known in self._maps if not _lives(known)]:
            del self._maps[known]  # the mapping ends with its last view
        file = os.open(f"/proc/{match[1]}/fd/{match[2]}", os.O_RDWR | os.O_CLOEXEC)
        try:
            status = os.fstat(file)
            if status.st_ino != int(match[3]) or not os.readlink(f"/proc/self/fd/{file}").startswith(_MEMFD):
                raise ValueError(f"{arena!r} names no arena")
            return memoryview(mmap.mmap(file, status.st_size))
        finally:
            os.close(file)


def _lives(arena: str) -> bool:
    pid, number, inode = arena.split(":")
    try:
        return os.stat(f"/proc/{pid}/fd/{number}").st_ino == int(inode)
    except OSError:
        return False
