"""A store of named values in memory."""

from __future__ import annotations

__all__ = ["DictStore"]


class DictStore:
    """What `ClusterStore` is on a cluster."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}

    def get(self, key: str) -> bytes | None:
        return self.values.get(key)

    def put(self, key: str, value: bytes) -> None:
        self.values[key] = value

    def add(self, key: str, value: bytes) -> bool:
        return self.values.setdefault(key, value) is value

    def keys(self, prefix: str) -> list[str]:
        return sorted(key for key in self.values if key.startswith(prefix))

    def delete(self, key: str) -> None:
        self.values.pop(key, None)
