"""The protocol's system shared memory extension: tensors in POSIX shared memory that a client made and registered.

The server reads and writes the region's file instead of mapping it: a client that cuts its file short would otherwise
end this process, and everybody's requests with it. That is the one copy there is: into memory that gpu-lets map.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tenuto.deployments.entry.http import Exchange, HttpError
from tenuto.deployments.entry.oip import BadRequestError, Region
from tenuto.deployments.wire.arena import Arena, Slot
from tenuto.deployments.wire.tensors import InputPart

_FOLDER = Path("/dev/shm")
_KEY = re.compile(r"/?[A-Za-z0-9._-]{1,200}")
_MOST_REGIONS = 1024


@dataclass(frozen=True, slots=True)
class _Registered:
    """A region by its client's name; offsets in it begin at `offset` of the file."""

    key: str
    file: int
    offset: int
    size: int


class Regions:
    """The regions that clients have registered, by their names."""

    def __init__(self, arena: Arena) -> None:
        """Start with none; `arena` takes what is read.

        `prefix`: what names of shared memory must begin with; None: clients may register none.
        """
        self.prefix: str | None = ""
        self._arena = arena
        self._regions: dict[str, _Registered] = {}

    def register(self, name: str, key: Any, offset: Any, size: Any) -> None:
        """Open a region.

        Raises:
            HttpError: 400 for what is no region, and for a name that is taken.
        """
        if not isinstance(key, str) or _KEY.fullmatch(key) is None or key.strip("/.") == "":
            raise HttpError(400, f"key {key!r} names no shared memory. Give the name it was made with.")
        if self.prefix is None:
            raise HttpError(403, "shared memory is not offered to clients here. Send tensors in the body.")
        if not key.lstrip("/").startswith(self.prefix):
            raise HttpError(403, f"shared memory must have a name that begins with '{self.prefix}' here.")
        if type(offset) is not int or type(size) is not int or offset < 0 or size < 1:
            raise HttpError(400, "offset and byte_size must be whole numbers of at least 0 and 1.")
        if name in self._regions:
            raise HttpError(400, f"shared memory region '{name}' is registered already. Unregister it first.")
        if len(self._regions) >= _MOST_REGIONS:
            raise HttpError(429, f"{_MOST_REGIONS} regions are registered. Unregister those not in use.")
        try:
            file = os.open(_FOLDER / key.lstrip("/"), os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError as error:
            raise HttpError(400, f"shared memory '{key}' cannot be opened: {error.strerror}.") from None
        held = os.fstat(file).st_size
        if held < offset + size:
            os.close(file)
            raise HttpError(400, f"shared memory '{key}' has {held} bytes, not {offset + size}.")
        self._regions[name] = _Registered(key, file, offset, size)

    def unregister(self, name: str | None = None) -> None:
        """Close a region, or all of them; one that is not registered is ignored."""
        for each in list(self._regions) if name is None else [name]:
            region = self._regions.pop(each, None)
            if region is not None:
                os.close(region.file)

    def status(self, name: str | None = None) -> list[dict[str, Any]]:
        """Return what is registered, as the extension describes it.

        Raises:
            HttpError: 404 for a name that is not.
        """
        if name is not None and name not in self._regions:
            raise HttpError(404, f"no shared memory region '{name}' is registered.")
        return [
            {"name": each, "key": region.key, "offset": region.offset, "byte_size": region.size}
            for each, region in self._regions.items()
            if name in (None, each)
        ]

    def read(self, exchange: Exchange, region: Region) -> InputPart:
        """Copy a part of a region to where gpu-lets can read it; the memory is the exchange's.

        Raises:
            BadRequestError: no such region, or the file was cut short.
            HttpError: 503 while too much is unfinished.
        """
        slot = self._copy(region)
        exchange.slots.append(slot)
        return InputPart(slot.data, "", slot.arena, slot.offset)

    def _place(self, region: Region) -> tuple[int, int]:
        known = self._regions.get(region.name)
        if known is None:
            raise BadRequestError(f"no shared memory region '{region.name}' is registered.")
        if region.offset + region.size > known.size:
            raise BadRequestError(f"bytes {region.offset} to {region.offset + region.size} lie outside of region "
                                  f"'{region.name}', which has {known.size}.")  # fmt: skip
        return known.file, known.offset + region.offset

    def _copy(self, region: Region) -> Slot:
        file, offset = self._place(region)
        slot = self._arena.take(region.size)
        if slot is None:
            raise HttpError(503, "too many requests are unfinished. Retry in a moment.", retry_after_s=1.0)
        done = 0
        while done < region.size:
            count = os.preadv(file, [slot.data[done:]], offset + done)
            if not count:
                slot.release()
                raise BadRequestError(f"region '{region.name}' ends before the tensor does.")
            done += count
        return slot

    def write(self, region: Region, data: bytes) -> None:
        """Put bytes into a part of a region.

        Raises:
            BadRequestError: no such region, or the file was cut short.
        """
        file, offset = self._place(region)
        if os.fstat(file).st_size < offset + len(data):
            raise BadRequestError(f"region '{region.name}' ends before the output does.")
        os.pwrite(file, data, offset)

    def close(self) -> None:
        """Close all regions."""
        self.unregister()
