"""What clients may use, and which clients may have a connection. A connection that is not in use gives way to others,
and so does one whose client does not take its answers."""

from __future__ import annotations

import itertools
from collections import Counter, OrderedDict
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

_LOOKED_AT = 32  # limit: connections that are looked at to find one that is not in use


@dataclass(slots=True)
class Limits:
    """What clients may use. `unfinished_bytes` limits the bodies of requests that are not answered, and once more the
    answers that clients do not take."""

    body_bytes: int = 64 << 20  # default
    unfinished_bytes: int = 512 << 20  # default
    connections: int = 4096  # default

    @property
    def most_body_bytes(self) -> int:
        """The largest body: as large as it may be, and half of what may be unfinished."""
        return min(self.body_bytes, self.unfinished_bytes // 2)


class Untaken:
    """The answers that clients have asked for and have not taken. When these are too many bytes, the client that has
    been behind for longest is given up. A client that reads slowly is no attacker, so nothing happens before."""

    class Behind(Protocol):
        """A connection."""

        def give_up(self) -> None:
            """Close the connection at once, and drop what it has not sent."""

    def __init__(self, limits: Limits, turned_away: Counter[str]) -> None:
        """Take the limits, and the counter of clients that were given up."""
        self._limits = limits
        self._turned_away = turned_away
        self._held: dict[Untaken.Behind, int] = {}  # who is behind for longest is first
        self.bytes = 0

    def holds(self, connection: Behind, size: int) -> None:
        """Note how many bytes a connection has to send. The connection is behind while there are any."""
        self.bytes += size - self._held.get(connection, 0)
        if size:
            self._held[connection] = size
        else:
            self._held.pop(connection, None)
        while self.bytes > self._limits.unfinished_bytes:
            oldest = next(iter(self._held))
            self.forget(oldest)
            self._turned_away["slow"] += 1
            oldest.give_up()

    def forget(self, connection: Behind) -> None:
        """Forget a connection that is gone."""
        self.bytes -= self._held.pop(connection, 0)


class Holder(Protocol):
    """A connection. `has_key`: its client has shown a key."""

    has_key: bool

    @property
    def gives_way(self) -> bool:
        """Whether nobody waits for an answer here, so that another client may have this place."""

    def give_way(self) -> None:
        """Close at once."""


HolderT = TypeVar("HolderT", bound=Holder)


class OpenConnections(Generic[HolderT]):
    """The connections that are open. When clients have keys, connections that have shown no key share a quarter of the
    places. They never take any other place."""

    def __init__(self, limits: Limits, turned_away: Counter[str]) -> None:
        """Take the limits, and the counter of connections that found no place or lost theirs."""
        self.has_keys = False  # clients show keys
        self._limits = limits
        self._turned_away = turned_away
        # Each in the order of last use: the first has been unused for longest.
        self._strangers: OrderedDict[HolderT, None] = OrderedDict()
        self._clients: OrderedDict[HolderT, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._strangers) + len(self._clients)

    def fit(self) -> None:
        """Close connections that nobody uses, where more are open than may be by now."""
        part = self._strangers_part
        self._find_place(self._strangers, 1 + (part if self.has_keys else self._limits.connections))
        self._find_place(self._clients, 1 + self._limits.connections - part)

    def taken(self) -> list[HolderT]:
        """Return all connections that have a place."""
        return [*self._strangers, *self._clients]

    def admit(self, connection: HolderT) -> bool:
        """Give a new connection a place; return False when there are too many and all are in use."""
        part = self._strangers_part if self.has_keys else self._limits.connections
        if not self._find_place(self._strangers, part):
            self._turned_away["full"] += 1
            return False
        self._strangers[connection] = None
        return True

    def admit_key(self, connection: HolderT) -> bool:
        """Give a connection whose client has shown a key a place among such connections; return False when there are
        too many of them and all are in use."""
        if not self._find_place(self._clients, self._limits.connections - self._strangers_part):
            return False
        connection.has_key = True
        self._strangers.pop(connection, None)
        self._clients[connection] = None
        return True

    def note_use(self, connection: HolderT) -> None:
        """Note that a connection was used just now."""
        places = self._clients if connection.has_key else self._strangers
        if connection in places:
            places.move_to_end(connection)

    def forget(self, connection: HolderT) -> None:
        """Free the place of a connection that is gone."""
        self._strangers.pop(connection, None)
        self._clients.pop(connection, None)

    @property
    def _strangers_part(self) -> int:
        return max(1, self._limits.connections // 4)  # limit: of clients without a key, beside others

    def _find_place(self, places: OrderedDict[HolderT, None], most: int) -> bool:
        """Return whether there is a place. When all are taken, the oldest connections that are not in use are
        closed."""
        for oldest in list(itertools.islice(places, _LOOKED_AT)) if len(places) >= most else ():
            if len(places) < most:
                break
            if oldest.gives_way:
                self.forget(oldest)
                oldest.give_way()
                self._turned_away["idle"] += 1
            else:
                places.move_to_end(oldest)
        return len(places) < most
