"""Shared memory for the bodies of requests: received once into a slot, mapped by the gpu-lets of the same machine.

An arena is anonymous memory of the process that receives (`memfd_create`). Others open it through that process' entry
in /proc, which the kernel allows to processes of the same user; it needs no name, so that nothing is left behind
however a process ends, and it lives until the last one that maps it is gone.
"""

from __future__ import annotations

import mmap
import os
import re
from collections import defaultdict
from pathlib import Path
from typing import Protocol

_GRAIN_BYTES = 1 << 16  # unit: sizes of slots, so that one that was given back fits the next
_MEMFD = "/memfd:tenuto-arena"
_NAME = re.compile(r"(\d+):(\d+):(\d+)")  # process, file descriptor, inode


def machine_id() -> str:
    """Return what two processes have in common that can open each other's arenas: kernel, process ids and user."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{boot}/{os.readlink('/proc/self/ns/pid')}/{os.geteuid()}"


class Held(Protocol):
    """Memory that others may read: it is not reused before everyone who holds it has let go."""

    def hold(self) -> None:
        """Keep it until one more `release`."""

    def release(self) -> None:
        """Let go."""


class Slot:
    """A part of an arena. It returns there when everyone who holds it has let go."""

    __slots__ = ("_arena", "_holders", "data", "offset")

    def __init__(self, arena: Arena, offset: int, data: memoryview) -> None:
        self._arena = arena
        self._holders = 1
        self.offset = offset
        self.data = data

    @property
    def arena(self) -> str:
        """The name of its arena."""
        return self._arena.name

    def hold(self) -> None:
        """Keep it until one more `release`."""
        self._holders += 1

    def release(self) -> None:
        """Let go; whoever was the last gives it back."""
        self._holders -= 1
        if not self._holders:
            self._arena._give_back(self)


class Arena:
    """Slots of shared memory, reused without being cleared. All calls come from one thread.

    Memory is taken from the system when a slot is first written, and kept for the next ones.
    """

    def __init__(self, limit_bytes: int) -> None:
        """Reserve addresses for at most `limit_bytes` of slots; no memory yet."""
        self.limit_bytes = limit_bytes // _GRAIN_BYTES * _GRAIN_BYTES
        self._file = os.memfd_create("tenuto-arena", os.MFD_CLOEXEC)
        os.ftruncate(self._file, self.limit_bytes)
        self._map = mmap.mmap(self._file, self.limit_bytes)
        self._view = memoryview(self._map)
        self.name = f"{os.getpid()}:{self._file}:{os.fstat(self._file).st_ino}"
        self.used_bytes = 0
        self._begun_bytes = 0  # below lie slots that are or were in use
        self._free: defaultdict[int, list[int]] = defaultdict(list)  # offsets by size; the last used first

    def take(self, size: int) -> Slot | None:
        """Return a slot of at least `size` bytes with its `data` cut to it, of any content; None when all is in use."""
        length = -(-max(1, size) // _GRAIN_BYTES) * _GRAIN_BYTES
        offsets = self._free.get(length)
        if offsets:
            offset = offsets.pop()
        elif self._begun_bytes + length <= self.limit_bytes:
            offset, self._begun_bytes = self._begun_bytes, self._begun_bytes + length
        else:
            found = self._cut(length)
            if found is None:
                return None
            offset = found
        self.used_bytes += length
        return Slot(self, offset, self._view[offset : offset + size])

    def _cut(self, length: int) -> int | None:
        """Join free neighbours, and return the beginning of a gap that is long enough."""
        pieces = sorted((offset, size) for size, offsets in self._free.items() for offset in offsets)
        self._free.clear()
        gaps: list[list[int]] = []
        for offset, size in pieces:
            if gaps and gaps[-1][0] + gaps[-1][1] == offset:
                gaps[-1][1] += size
            else:
                gaps.append([offset, size])
        if gaps and sum(gaps[-1]) == self._begun_bytes:
            self._begun_bytes = gaps.pop()[0]
        chosen = None
        for gap in sorted(gaps, key=lambda gap: gap[1]):
            if chosen is None and gap[1] >= length:
                chosen = gap[0]
                gap[0] += length
                gap[1] -= length
            if gap[1]:
                self._free[gap[1]].append(gap[0])
        if chosen is None and self._begun_bytes + length <= self.limit_bytes:
            chosen, self._begun_bytes = self._begun_bytes, self._begun_bytes + length
        return chosen

    def _give_back(self, slot: Slot) -> None:
        length = -(-max(1, len(slot.data)) // _GRAIN_BYTES) * _GRAIN_BYTES
        self._free[length].append(slot.offset)
        self.used_bytes -= length

    def close(self) -> None:
        """Let go of the memory; it is gone when those who map it have let go too."""
        os.close(self._file)
        # The views of slots keep the mapping itself until they are gone.


class MappedArenas:
    """The arenas of other processes, as one process sees them."""

    def __init__(self) -> None:
        self._maps: dict[str, memoryview] = {}

    def bytes_of(self, arena: str, offset: int, length: int) -> memoryview:
        """Return a part of an arena without copying it.

        Raises:
            OSError: it cannot be mapped: its process is gone, or belongs to somebody else.
            ValueError: this is no arena, or a part that it does not have.
        """
        view = self._maps.get(arena)
        if view is None:
            view = self._maps[arena] = self._open(arena)
        if not 0 <= offset <= offset + length <= len(view):
            raise ValueError(f"bytes {offset} to {offset + length} lie outside of arena {arena}")
        return view[offset : offset + length]

    def _open(self, arena: str) -> memoryview:
        found = _NAME.fullmatch(arena)
        if found is None:
            raise ValueError(f"{arena!r} names no arena")
        for known in [known for known in self._maps if not _lives(known)]:
            del self._maps[known]  # the mapping goes with the last view of it
        file = os.open(f"/proc/{found[1]}/fd/{found[2]}", os.O_RDWR | os.O_CLOEXEC)
        try:
            status = os.fstat(file)
            if status.st_ino != int(found[3]) or not os.readlink(f"/proc/self/fd/{file}").startswith(_MEMFD):
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
