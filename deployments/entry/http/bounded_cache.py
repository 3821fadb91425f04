"""What was read of clients' bytes once and need not be read again, in bounded memory."""

from __future__ import annotations

from typing import TypeVar

KeyT = TypeVar("KeyT")
ValueT = TypeVar("ValueT")


class BoundedCache(dict[KeyT, ValueT]):
    """Values by the bytes that they were read from. When it is full, it begins anew: clients send few different heads,
    and what they send again is read again."""

    def __init__(self, most: int) -> None:
        """Take the most values that are kept."""
        super().__init__()
        self._most = most

    def add(self, key: KeyT, value: ValueT) -> ValueT:
        """Keep a value, and return it."""
        if len(self) >= self._most:
            self.clear()
        self[key] = value
        return value
