"""Memory for bodies that are on their way in: it is taken as their bytes come, whatever was announced, and whoever
takes it leaves as much to the others."""

from __future__ import annotations

from tenuto.deployments.entry.http.exchange import HttpError
from tenuto.deployments.entry.http.open_connections import Limits
from tenuto.deployments.wire.arena import Arena, Held, Slot
from tenuto.deployments.wire.tensors import Buffer

SLOT_BYTES = 1 << 14  # derived: bodies from here on are received into shared memory; below, one more copy costs less
_FIRST_PART = 16  # derived: a slot has at most so many times the bytes that have come; a larger part is copied longer
# derived: as many times the memory as slots of bodies that have only begun may take, and 14 times as much for gaps
# between them (first fit needs log2 of the largest slot by the smallest).
REACH = 256


def unfinished() -> HttpError:
    """Return the refusal of a body for which there is no memory."""
    return HttpError(503, "too many requests are unfinished. Retry in a moment.", retry_after_s=1.0)


class BodyMemory:
    """Memory for the bodies of several clients: `part` of what may be unfinished."""

    def __init__(self, limits: Limits, part: float = 1.0) -> None:
        self._limits = limits
        self._part = part
        self.bytes = 0  # that are taken

    @property
    def left_bytes(self) -> float:
        """How many bytes nobody has taken."""
        return self._part * self._limits.unfinished_bytes - self.bytes


class Account:
    """What one client has taken of a pool. Invariant: a client takes no more than it leaves to all others, so the next
    client finds room however many bytes the others send."""

    def __init__(self, pool: BodyMemory) -> None:
        self.pool = pool
        self.bytes = 0

    def has_room(self, size: int) -> bool:
        """Whether the client may take so many bytes now."""
        return self.bytes + size <= self.pool.left_bytes - size

    def take(self, size: int) -> None:
        """Take bytes that have come. Raises `HttpError` 503."""
        if not self.has_room(size):
            raise unfinished()
        self.bytes += size
        self.pool.bytes += size

    def give(self, size: int) -> None:
        """Give bytes back."""
        self.bytes -= size
        self.pool.bytes -= size


class IncomingBody(Held):
    """A body of known length that is being received. A large one goes on in a slot of the arena when its first part has
    come. Its memory is counted until its last holder has released it, and until nobody reads the slot any more."""

    def __init__(self, arena: Arena, account: Account, size: int) -> None:
        """Expect a body of so many bytes. Raises `HttpError` 503 when there is no room for it now."""
        if not account.has_room(size):
            raise unfinished()
        super().__init__()
        self.slot: Slot | None = None
        self.size = size
        self.missing = size  # bytes that are still to come
        self._arena = arena
        self._account = account
        self._first = bytearray()  # until it has a slot
        self._enough = size if size < SLOT_BYTES else max(SLOT_BYTES, size // _FIRST_PART)
        self._counted = 0

    @property
    def data(self) -> memoryview:
        """The body, once nothing is missing."""
        return memoryview(self._first) if self.slot is None else self.slot.data

    def room(self, spare: memoryview) -> memoryview:
        """Return where the next bytes are to be received: their place in the slot, or without one `spare` memory."""
        return spare[: self.missing] if self.slot is None else self.slot.data[-self.missing :]

    def came(self, data: Buffer) -> None:
        """Take the next bytes, which were received into `room`. Raises `HttpError` 503."""
        if self.slot is None:
            self.take(data)
        else:
            self._count(len(data))

    def take(self, data: Buffer) -> None:
        """Take the next bytes, wherever they are. Raises `HttpError` 503."""
        at = self.size - self.missing
        self._count(len(data))
        if self.slot is not None:
            self.slot.data[at : at + len(data)] = data
            return
        self._first += data
        if self.size >= SLOT_BYTES and len(self._first) >= self._enough:
            self.slot = self._arena.take(self.size, self._uncount)
            if self.slot is None:
                raise unfinished()
            self.slot.data[: len(self._first)] = self._first
            self._first = bytearray()

    def _count(self, size: int) -> None:
        self._account.take(size)
        self._counted += size
        self.missing -= size

    def _give_back(self) -> None:
        if self.slot is None:
            self._uncount()
        else:
            self.slot.release()

    def _uncount(self) -> None:
        self._account.give(self._counted)
        self._counted = 0
        self.slot = None  # which refers to this
